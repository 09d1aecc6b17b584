"""Precision of an inference: the fastest by measurement, compared with fp32 on the first images.

The first images are computed in both precisions and keep their fp32 outputs. If a lower precision changes too many predictions
or their confidence, by the limits of an export, all other images are computed in fp32 too.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vitrail.deploy.runtimes.base import DeployedModel, ModelContract, OutputKind, Runtime, random_pixels
from vitrail.inference import TorchRuntime
from vitrail.models.eomt import combine_queries, unpack_queries
from vitrail.models.flops import count as count_cost
from vitrail.models.registry import config_from_json
from vitrail.nn.packing import can_pack
from vitrail.utils.devices import device_name, processor_name
from vitrail.utils.json import to_json
from vitrail.utils.precision import (
    FLOAT_PRECISIONS,
    MEASURING_SECONDS,
    PACKED,
    PrecisionChoice,
    choose_cuda,
    choose_measured,
    measure_interleaved,
    multiplies_bf16,
)

MIN_IMAGES = 128  # fewer are done in fp32 before measuring and checking have paid
MIN_MACS = 2e11  # multiply-adds of all images, a few seconds
MIN_MACS_PER_IMAGE = 2e8  # of a model that is opened for an unknown number of images
CHECKED_IMAGES = 64
MEASURED_IMAGES = 4  # of a batch; fewer if they take long
CHOICES: dict[str, PrecisionChoice] = {}  # made in this process, by model and machine
MessageCallback = Callable[[str], None]


class PrecisionCheck:
    """Outputs of the first images in fp32 and in a lower precision, and the verdict. Shared by the threads of a run."""

    def __init__(self, contract: ModelContract, output_kind: OutputKind, choice: PrecisionChoice) -> None:
        self.contract, self.choice = contract, choice
        self.output_kind: OutputKind = output_kind
        self.images = self.compared = 0
        self.pairs: list[tuple[Any, Any]] = []  # what the task keeps of the finite fp32 outputs, and of the others
        self.lower: list[np.ndarray] = []  # all outputs in the lower precision, if they are no maps
        self.passed: bool | None = None  # None until enough images were compared
        self.why = ""
        self.report: MessageCallback | None = None
        self.lock = threading.Lock()

    def add(self, expected: np.ndarray, outputs: np.ndarray) -> None:
        """Add the outputs of a batch; decide after CHECKED_IMAGES."""
        with self.lock:
            if self.passed is not None:
                return
            self.images += len(expected)
            if not self.contract.task.has_maps:
                self.lower.append(outputs)
            self.keep(expected, outputs)
            if self.images >= CHECKED_IMAGES:
                self.decide()

    def keep(self, expected: np.ndarray, outputs: np.ndarray) -> None:
        """Keep what is compared of a batch, of the images whose fp32 outputs are finite."""
        if self.output_kind == "queries":  # they are compared by the masks that they make together
            expected, outputs = (self.combine(packed) for packed in (expected, outputs))
        finite = np.isfinite(expected).all(tuple(range(1, expected.ndim)))
        if finite.any():
            keep = self.contract.task.keep_outputs
            self.pairs.append((keep(expected[finite]), keep(outputs[finite])))
            self.compared += int(finite.sum())

    def combine(self, packed: np.ndarray) -> np.ndarray:
        """Return the maps of logits that packed queries [B, Q, N] make."""
        predicted = unpack_queries(torch.from_numpy(packed), len(self.contract.labels or ()))
        return combine_queries(predicted, predicted.masks.shape[2:]).numpy()

    def decide(self) -> None:
        """Compare all outputs so far by the limits of an export."""
        from vitrail.deploy.export.comparison import compare_outputs, tolerances_for

        if not self.pairs:
            return  # nothing to compare with: the model itself is broken
        first, second = (self.contract.task.join_outputs(parts) for parts in zip(*self.pairs, strict=True))
        compared = compare_outputs(self.contract, self.output_kind, first, second)
        violations = tolerances_for(self.choice.precision).find_violations(compared)
        checked, precision = f"on the first {self.compared} images", self.choice.precision
        self.why = (
            f"{precision} refused {checked}: {violations[0]}" if violations else f"{compared.describe()} {checked}"
        )
        self.passed = not violations
        if self.report is not None:
            self.report(self.describe())

    @property
    def precision(self) -> str:
        """Return the precision of the outputs."""
        return self.choice.precision if self.passed else "fp32"

    def describe(self) -> str:
        """Return the precision and the reason as a line."""
        if self.passed is None:
            return f"{self.choice}; fp32 until {CHECKED_IMAGES} images are compared"
        return str(PrecisionChoice(self.precision, f"{self.choice.why}; {self.why}" if self.passed else self.why))

    def lower_outputs(self) -> np.ndarray | None:
        """Return the outputs of the first images in the lower precision, if it passed; maps are not kept."""
        return np.concatenate(self.lower) if self.passed and self.lower else None


class CheckedRuntime:
    """A runtime of lower precision, and that of fp32, used until the check has passed and after it has failed."""

    def __init__(self, lower: Runtime, reference: Runtime, check: PrecisionCheck) -> None:
        self.lower, self.reference, self.check = lower, reference, check
        self.name = lower.name
        self.device = getattr(lower, "device", torch.device("cpu"))

    @property
    def precision(self) -> str:
        return self.check.precision

    @property
    def is_checking(self) -> bool:
        """Return whether images are computed in both precisions."""
        return self.check.passed is None

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, K] or features [B, F] of uint8 pixels [B, C, H, W]."""
        if self.check.passed:
            return self.lower(pixels)
        expected = self.reference(pixels)
        if self.check.passed is None:
            self.check.add(expected, self.lower(pixels))
        return expected

    def clone(self, clone: Callable[[Runtime], Runtime]) -> "CheckedRuntime":
        """Return another instance for another thread, with the same check."""
        return CheckedRuntime(clone(self.lower), clone(self.reference), self.check)


def choose_runtime(
    deployed: DeployedModel, n_images: int | None, report: MessageCallback | None = None
) -> DeployedModel:
    """Return a model opened with PyTorch in fp32 with the runtime of the fastest precision, for so many images.

    `report` receives the result of the check where the number of images is unknown; a run of known length ends with it.
    """
    runtime, contract = deployed.runtime, deployed.contract
    assert isinstance(runtime, TorchRuntime)
    if runtime.device.type not in ("cpu", "cuda") or is_short(contract, n_images):
        return deployed
    key = choice_key(contract, f"{runtime.device} {torch.get_num_threads()}")
    runtimes: dict[str, TorchRuntime] = {"fp32": runtime}
    if key not in CHOICES:
        runtimes = list_candidates(runtime)
        on_cuda = runtime.device.type == "cuda"
        cuda = choose_cuda(runtime.device, device_name(runtime.device)) if on_cuda else None
        CHOICES[key] = cuda or measure_runtimes(runtimes, contract)
    choice = CHOICES[key]
    if choice.precision == "fp32":
        chosen = runtimes.get(PACKED) or copy_runtime(runtime, "fp32", packed=True) if choice.packed else runtime
        return replace(deployed, runtime=chosen, choice=choice)
    lower = runtimes.get(choice.precision) or copy_runtime(runtime, choice.precision)
    return with_check(deployed, lower, choice, report if n_images is None else None)


def with_check(
    deployed: DeployedModel, lower: Runtime, choice: PrecisionChoice, report: MessageCallback | None = None
) -> DeployedModel:
    """Return a model opened in fp32 with a runtime of lower precision, checked on the first images."""
    check = PrecisionCheck(deployed.contract, deployed.output_kind, choice)
    check.report = report
    contract = replace(deployed.contract, precision=choice.precision)
    return replace(deployed, contract=contract, runtime=CheckedRuntime(lower, deployed.runtime, check), choice=choice)


def choose_once(key: str, measure: Callable[[], PrecisionChoice]) -> PrecisionChoice:
    """Return the choice for a key, measured if this process does not know it."""
    if key not in CHOICES:
        CHOICES[key] = measure()
    return CHOICES[key]


def choice_key(contract: ModelContract, runtime: str) -> str:
    """Return what the fastest precision depends on: the model, the processor and the runtime with its threads."""
    config = {name: value for name, value in contract.config.items() if name != "classes"}  # features have none
    parts = [contract.checksum, config, to_json(contract.preprocessing), contract.merge, processor_name(), runtime]
    return json.dumps(parts, sort_keys=True)


def is_short(contract: ModelContract, n_images: int | None) -> bool:
    """Return whether measuring and checking would take longer than they can save."""
    if n_images is not None and n_images < MIN_IMAGES:
        return True
    config = config_from_json(contract.config)
    macs = count_cost(config).macs
    return macs < MIN_MACS_PER_IMAGE if n_images is None else n_images * macs < MIN_MACS


def list_candidates(runtime: TorchRuntime) -> dict[str, TorchRuntime]:
    """Return the runtimes to measure on a CPU by name: fp32, packed fp32 and bf16 as far as the processor has them."""
    found = {"fp32": runtime}
    if runtime.device.type == "cpu" and can_pack(torch.float32):
        found[PACKED] = copy_runtime(runtime, "fp32", packed=True)
    if runtime.device.type == "cpu" and multiplies_bf16(runtime.device):
        found["bf16"] = copy_runtime(runtime, "bf16")
    return found


def measure_runtimes(runtimes: Mapping[str, Runtime], contract: ModelContract) -> PrecisionChoice:
    """Return the fastest precision of these runtimes of one model by measurement, on the CPU."""
    seconds = {"fp32": 1.0} if len(runtimes) == 1 else time_runtimes(runtimes, contract)
    return choose_measured(seconds, processor_name())


def time_runtimes(
    runtimes: Mapping[str, Runtime], contract: ModelContract, seconds: float = MEASURING_SECONDS
) -> dict[str, float]:
    """Return the seconds of a few images in each of these runtimes of one model, measured in about so many seconds."""
    pixels = random_pixels(contract.preprocessing, MEASURED_IMAGES)
    first = measure_interleaved({"fp32": lambda: runtimes["fp32"](pixels[:1])}, 0.0)["fp32"]
    # A warm-up and a measurement of each have to fit into the time.
    images = max(1, min(MEASURED_IMAGES, int(seconds / (2 * len(runtimes) * first))))
    return measure_interleaved({name: lambda run=run: run(pixels[:images]) for name, run in runtimes.items()}, seconds)


def copy_runtime(runtime: TorchRuntime, precision: str, packed: bool | None = None) -> TorchRuntime:
    """Return a runtime of the same model in another precision."""
    return TorchRuntime(
        runtime.model, runtime.preprocessing, runtime.output_kind, runtime.device, precision, packed=packed
    )


def current_precision(deployed: DeployedModel) -> str:
    """Return the precision in which a model computes now."""
    return getattr(deployed.runtime, "precision", deployed.contract.precision)


def decided_precision(deployed: DeployedModel) -> str | None:
    """Return the precision in which a checkpoint computes from now on; None while it is checked, and for an exported file."""
    is_open = deployed.model is None or getattr(deployed.runtime, "is_checking", False)
    precision = current_precision(deployed)
    return None if is_open or precision not in FLOAT_PRECISIONS else precision


def describe_precision(deployed: DeployedModel) -> tuple[str, ...]:
    """Return a line on how the precision was chosen, if it was."""
    if isinstance(deployed.runtime, CheckedRuntime):
        return (deployed.runtime.check.describe(),)
    return () if deployed.choice is None else (str(deployed.choice),)

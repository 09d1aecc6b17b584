"""An ONNX graph in 8-bit integers: ranges measured on pictures, and float where a layer does not bear it.

Weights get a scale for each output channel, activations one for each tensor (`QuantizeLinear` and `DequantizeLinear` around what
is multiplied). Only products with weights are rounded: attention's own products, norms and softmax stay in float.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.deploy.graph import INPUT
from vitrail.deploy.libraries import onnxruntime
from vitrail.deploy.onnx_export import quiet

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

KINDS = ("MatMul", "Gemm", "Conv")
FEW = 16  # pictures on which the layers' sensitivity is measured
SECONDS = 300.0  # for measuring them
Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Quantised:
    """A graph in int8, and which layers stayed in float."""

    proto: "ModelProto"
    kept: tuple[str, ...]
    layers: int  # that could be rounded
    notes: tuple[str, ...] = ()


class Reader:
    """Pictures for the calibration, one batch at a time, as onnxruntime asks for them."""

    def __init__(self, batches: Iterator[np.ndarray]) -> None:
        self.batches = batches

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: batch}

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        found = self.get_next()
        if found is None:
            raise StopIteration
        return found


class Quantiser:
    """One graph with the ranges of its activations; any choice of its layers can be rounded."""

    def __init__(self, path: Path, pixels: np.ndarray) -> None:
        """`pixels` are what the graph takes, [B, C, H, W]: bytes, or normalised."""
        onnxruntime()
        from onnxruntime.quantization import CalibrationMethod, create_calibrator
        from onnxruntime.quantization.quant_utils import load_model_with_shape_infer

        with quiet(), tempfile.TemporaryDirectory(prefix="vitrail-") as around:
            self.proto = load_model_with_shape_infer(path)
            calibrator = create_calibrator(
                path,
                list(KINDS),
                augmented_model_path=str(Path(around) / "augmented.onnx"),
                calibrate_method=CalibrationMethod.MinMax,
            )
            reader: Any = Reader(pixels[start : start + 4] for start in range(0, len(pixels), 4))
            calibrator.collect_data(reader)
            self.ranges = calibrator.compute_data()
        weights = {tensor.name for tensor in self.proto.graph.initializer}
        self.names = [node.name for node in self.proto.graph.node if multiplies(node, weights)]
        self.reduced = not has_vnni()

    def rounded(self, names: Sequence[str]) -> "ModelProto":
        """The graph with these layers in int8."""
        import onnx
        from onnxruntime.quantization import QDQQuantizer, QuantType

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        if not names:
            return proto
        with quiet():
            quantizer = QDQQuantizer(
                proto,
                True,  # a scale for each channel
                self.reduced,
                QuantType.QInt8,
                QuantType.QUInt8,
                self.ranges,
                list(names),
                [],
                list(KINDS),
                {"OpTypesToExcludeOutputQuantization": list(KINDS), "QuantizeBias": False},
            )
            quantizer.quantize_model()
        return quantizer.model.model

    def sensitivity(
        self, pixels: np.ndarray, output: str, told: Told | None = None, seconds: float = SECONDS
    ) -> dict[str, float]:
        """How much each layer, rounded alone, moves the answer: mean square over the pictures; fewer when time is up."""
        wanted, found = run(self.proto, pixels, output), {}
        until = time.monotonic() + seconds
        for place, name in enumerate(self.names, start=1):
            moved = run(self.rounded([name]), pixels, output) - wanted
            found[name] = float(np.square(moved).mean())
            if told:
                told("measuring layers", place, len(self.names))
            if time.monotonic() > until:
                break
        return found


def multiplies(node: "NodeProto", weights: set[str]) -> bool:
    """Whether this is a product with weights."""
    return node.op_type in KINDS and len(node.input) > 1 and node.input[1] in weights


def run(proto: "ModelProto", pixels: np.ndarray, output: str) -> np.ndarray:
    """What a graph gives, straight from memory."""
    library = onnxruntime()
    options = library.SessionOptions()
    options.log_severity_level = 3
    session = library.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    parts = [session.run([output], {INPUT: pixels[start : start + 8]})[0] for start in range(0, len(pixels), 8)]
    return np.concatenate([np.asarray(part) for part in parts])


def quantised(
    quantiser: Quantiser,
    few: np.ndarray,
    output: str,
    holds: Callable[["ModelProto"], bool],
    told: Told | None = None,
    seconds: float = SECONDS,
) -> Quantised:
    """As many layers in int8 as hold together.

    All of them first. Where that does not hold, each is measured alone, and the most sensitive stay in float: one, two, four
    and so on until it holds, and then as few as that needs.
    """
    names, notes = quantiser.names, []
    if not names:
        raise ValueError("there is nothing in this graph that could be rounded to int8")
    if quantiser.reduced:
        notes.append(
            "weights are rounded to 7 bits, because products of 8 overflow on processors without VNNI, as this one"
        )

    def without(count: int, order: list[str]) -> "ModelProto":
        return quantiser.rounded([name for name in names if name not in order[:count]])

    whole = quantiser.rounded(names)
    if holds(whole):
        return Quantised(whole, (), len(names), tuple(notes))
    moved = quantiser.sensitivity(few, output, told, seconds)
    if len(moved) < len(names):
        notes.append(f"time was up after {len(moved)} of {len(names)} layers: the others stay in float")
    # Those that were not measured count as the most sensitive.
    order = sorted(names, key=lambda name: -moved.get(name, float("inf")))
    count = max(1, len(names) - len(moved))
    fails, works, best = count - 1, 0, None
    while best is None and count < len(names):
        proto = without(count, order)
        if holds(proto):
            works, best = count, proto
        else:
            fails, count = count, 2 * count
    if best is None:
        raise ValueError(
            f"int8: the tolerance does not hold with any of the {len(names)} layers but a few rounded: "
            "calibrate on more pictures like yours (--calibrate), allow more (--tolerance), or stay in float"
        )
    while works - fails > 1:
        middle = (works + fails) // 2
        proto = without(middle, order)
        if holds(proto):
            works, best = middle, proto
        else:
            fails = middle
        if told:
            told("keeping layers in float", works, len(names))
    return Quantised(best, tuple(name.partition("/")[0] for name in order[:works]), len(names), tuple(notes))


def has_vnni() -> bool:
    """Whether this processor multiplies bytes into wide sums."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True  # no Linux: then most likely a processor that does
    return "vnni" in flags or "aarch64" in flags or "asimddp" in flags

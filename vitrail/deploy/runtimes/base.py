"""The runtime interface, and the contract stored as JSON in every exported file.

Contracts are validated when they are read: a file may be damaged or come from elsewhere.
"""

import json
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol, get_type_hints

import numpy as np

from vitrail.data.clip import describe_samples
from vitrail.data.dataset import Media, TargetKind
from vitrail.data.preprocessing import Preprocessing
from vitrail.inference import OutputKind
from vitrail.models.base import Model
from vitrail.models.registry import config_from_json
from vitrail.tasks import TASKS, Task
from vitrail.tasks.comparison import TargetStatistics
from vitrail.tasks.masks import check_colours, check_ignored
from vitrail.utils.json import to_json, value_from_json
from vitrail.utils.precision import EXPORT_PRECISIONS, PrecisionChoice, check_precision


class Runtime(Protocol):
    """A function of uint8 pixels; one thread at a time may call it."""

    name: str  # one of RUNTIMES

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, K] or [B, K, H, W], features [B, F] or queries [B, Q, N] of uint8 pixels [B, C, H, W]."""
        ...


@dataclass(frozen=True)
class ModelContract:
    """Inputs, labels and origin of a model, written into every file exported from it."""

    preprocessing: Preprocessing
    labels: tuple[str, ...] | None = None  # None for a model that ends in features
    several: bool = False  # multi-label: one sigmoid per class
    merge: int = 0  # tokens merged in each layer
    precision: str = "fp32"
    config: dict[str, Any] = field(default_factory=dict)  # of the model, as JSON
    name: str = ""  # of the source model
    checksum: str = ""  # SHA-256 of the source model's weights
    any_size: bool = False  # accepts every size divisible by the patch size
    colours: tuple[str, ...] | None = None  # of the classes of masks, "#rrggbb"
    ignore: tuple[int, ...] | None = None  # stored values of masks that were ignored in training
    statistics: TargetStatistics | None = None  # of the training targets, if the outputs are numbers

    @cached_property  # parsing the configuration builds the decoder
    def target_kind(self) -> TargetKind:
        """Return what the model predicts: one class of an image, several, one for each pixel, or numbers."""
        if self.labels is not None and self.statistics is not None:
            return "numbers"
        if self.labels is not None and self.config and config_from_json(self.config).output_kind == "masks":
            return "masks"
        return "multi" if self.several else "single"

    @property
    def task(self) -> Task:
        """Return the task that the model has learnt."""
        return TASKS[self.target_kind]

    @property
    def media(self) -> Media:
        """Return what the model takes: images, videos as clips, or sounds."""
        return self.preprocessing.media

    def describe_inputs(self) -> str:
        """Return what the model takes, in words."""
        clip = self.preprocessing.clip
        if self.media == "sound":
            return "sounds"
        return "images" if clip is None else f"videos, as {describe_samples(clip.frames)}"

    @property
    def activation(self) -> str | None:
        """Return the function from logits to the probabilities of classes; None for numbers and masks."""
        return {"single": "softmax", "multi": "sigmoid"}.get(self.target_kind)

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Return the names of the numbers that the model predicts; None for another."""
        return None if self.statistics is None else self.labels


LOG_ENERGIES = (-14.0, 2.0)  # from quiet to loud, of a log-mel spectrogram


def random_pixels(preprocessing: Preprocessing, count: int) -> np.ndarray:
    """Return random rows with a fixed seed: uint8 [B, C, H, W], of clips [B, C, T, H, W]; of sounds float32 log energies."""
    rng, shape = np.random.default_rng(0), (count, *preprocessing.shape)
    if preprocessing.media == "sound":
        return rng.uniform(*LOG_ENERGIES, shape).astype(np.float32)
    return rng.integers(0, 256, shape, dtype=np.uint8)


BATCH_SECONDS = 600.0  # default time limit of one batch of an exported graph, which may loop for ever


@dataclass(frozen=True)
class DeployedModel:
    """An open model with its runtime."""

    where: str  # as given by the user
    name: str  # for display
    contract: ModelContract
    runtime: Runtime
    output_kind: OutputKind = "logits"
    model: Model | None = None  # None for an exported file
    notes: tuple[str, ...] = ()  # for the user, such as how the runtime was chosen
    file: str | None = None  # the exported file, if the runtime uses one
    batch_timeout: float = BATCH_SECONDS
    choice: PrecisionChoice | None = None  # of the precision, if it was chosen by measurement

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes; None if there are none, for which the contract has indices."""
        if self.model is not None:
            return self.model.labels
        labels = self.contract.labels
        return None if labels is None or labels == tuple(map(str, range(len(labels)))) else labels


METADATA_KEY = "vitrail"  # key in the file's metadata
FORMAT_VERSION = 1
LATER_FIELDS = {"colours", "ignore", "statistics"}  # which files of earlier versions lack
InputKind = Literal["uint8", "float"]  # raw or normalised pixels


def contract_to_json(contract: ModelContract, input: InputKind) -> str:
    """Return the contract and the kind of input as one line of JSON."""
    values = {field.name: getattr(contract, field.name) for field in fields(contract)}
    values |= {"preprocessing": to_json(contract.preprocessing), "labels": contract.labels and list(contract.labels)}
    values |= {"statistics": to_json(contract.statistics)}
    return json.dumps({"format": FORMAT_VERSION, "input": input} | values)


def contract_from_json(text: str) -> tuple[ModelContract, InputKind]:
    """Return what `contract_to_json` wrote; raise ValueError if it is invalid."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid vitrail metadata ({error})") from None
    if not isinstance(metadata, dict):
        raise ValueError("invalid vitrail metadata: not a JSON object")
    if metadata.get("format") != FORMAT_VERSION:
        found = f"unsupported metadata format {metadata.get('format')!r}, expected {FORMAT_VERSION}"
        raise ValueError(f"{found}: export the model again, or update vitrail")
    types = get_type_hints(ModelContract)
    if missing := sorted({"input", *types} - LATER_FIELDS - set(metadata)):
        raise ValueError(f"vitrail metadata without {', '.join(missing)}: export the model again")
    if metadata["input"] not in ("uint8", "float"):
        raise ValueError(f"its input must be uint8 or float, got {metadata['input']!r}")
    config = metadata["config"]  # checked by `config_from_json`
    known = {name: kind for name, kind in types.items() if name != "config" and name in metadata}
    values = {name: value_from_json(metadata[name], kind, name) for name, kind in known.items()}
    contract = ModelContract(**values, config=config)
    check_contract(contract)
    return contract, metadata["input"]


def check_contract(contract: ModelContract) -> None:
    """Raise ValueError if parts of the contract contradict each other."""
    check_precision(contract.precision, EXPORT_PRECISIONS)
    if contract.merge < 0:
        raise ValueError(f"the number of merged tokens must be >= 0, got {contract.merge}")
    config = config_from_json(contract.config)
    if contract.labels is not None and len(contract.labels) != config.classes:
        raise ValueError(f"it has {len(contract.labels)} labels for {config.classes} classes")
    if contract.colours is not None:
        if contract.labels is None or len(contract.colours) != len(contract.labels):
            raise ValueError(f"it has {len(contract.colours)} colours for {len(contract.labels or ())} labels")
        check_colours(contract.colours)
    check_ignored(contract.ignore or ())
    if contract.statistics is not None and len(contract.statistics.mean) != len(contract.labels or ()):
        raise ValueError(f"it has statistics of {len(contract.statistics.mean)} targets for {config.classes} outputs")
    contract.preprocessing.check_frames(config.frames, "save it with another preprocessing")
    if (channels := contract.preprocessing.channels) != config.channels:
        raise ValueError(f"its preprocessing gives {channels} channels, its model expects {config.channels}")

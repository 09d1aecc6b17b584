"""An open checkpoint: the file, its detected format, and its labels and preprocessing."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vitrail.checkpoints.artifact import (
    TOKENIZER_TENSOR,
    CheckpointContract,
    hash_tensor,
    is_artifact,
    read_contract,
)
from vitrail.checkpoints.detect import (
    FORMATS,
    TOWER_FORMATS,
    Detection,
    detect_format,
    match_artifact,
    match_modality,
)
from vitrail.checkpoints.formats import FILE_NAME_KEY, PERIODS_KEY, ast, clip, get_object, timm, transformers
from vitrail.checkpoints.io import INDEX_FILES, WEIGHT_FILES, open_checkpoint
from vitrail.checkpoints.io.safetensors import SafetensorsFile
from vitrail.checkpoints.io.source import TensorFile
from vitrail.checkpoints.keys import KeyMapping, format_names, select_mappings
from vitrail.checkpoints.modalities import is_shared, read_modality
from vitrail.data.clip import Clip
from vitrail.data.preprocessing import CLIP_STATS, IMAGENET_STATS, INCEPTION_STATS, Preprocessing
from vitrail.data.tokenizer import TOKENIZER_FILES, Tokenizer, read_tokenizer
from vitrail.models.base import ModelConfig
from vitrail.models.registry import build_from
from vitrail.models.vit_config import parse_resampling

ByteProgress = Callable[[int, int], None]  # bytes done, total bytes
NORMALIZATIONS = {"imagenet": IMAGENET_STATS, "half": INCEPTION_STATS, "clip": CLIP_STATS}
ARCHITECTURE_KEYS = ("heads", "gelu", "eps", "size", "pool", "channels", "resampling", "window", "periods", "block")
ARCHITECTURE_KEYS += ("frames", "stride")  # of a clip; of overlapping patches
ARCHITECTURE_KEYS += ("text_heads", "text_gelu", "text_eps", "text_token")  # of a text tower
PREPROCESSING_KEYS = ("mean", "std", "crop", "fit", "interpolation")


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


@dataclass
class Checkpoint:
    """An open and detected checkpoint. `read_state` reads the tensors and raises if the checkpoint is incomplete."""

    source: TensorFile
    detection: Detection
    contract: CheckpointContract
    digests: dict[str, str] = field(default_factory=dict)  # of an artifact's tensors
    labels_from: str = "not in the file"
    preprocessing_from: str = "not in the file"
    random_tensors: list[str] = field(default_factory=list)  # our tensors that were allowed to be missing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of the stored weights."""
        return sorted({self.source.specs[name].dtype for name in self.detection.loaded}, key=str)

    def find_nonfinite(self, progress: ByteProgress = no_progress) -> list[str]:
        """Return the tensors with values that are not finite, after reading all of them."""
        names, done, total = [], 0, sum(self.source.specs[name].nbytes for name in self.detection.loaded)
        for name in self.detection.loaded:
            if not is_finite(self._read_tensor(name, mmap=True)):
                names.append(name)
            done += self.source.specs[name].nbytes
            progress(done, total)
        return names

    def read_state(
        self, allow_missing: Iterable[str] = (), progress: ByteProgress = no_progress, mmap: bool = False
    ) -> dict[str, Tensor]:
        """Return our tensors as stored; raise with a list unless all are there, of the right shape and finite.

        `allow_missing` takes names with `*`, theirs or ours: such tensors get random values if they are missing. `mmap`
        leaves tensors in the file's pages where nothing has to be rearranged.
        """
        detection, keys = self.detection, select_mappings(self.detection.table)
        allowed = [allow_missing] if isinstance(allow_missing, str) else list(allow_missing)
        lacking = [entry for entry in keys if any(name in detection.missing for name in entry.theirs)]
        random = [entry for entry in lacking if _matches_any(entry, allowed)]
        random_names = {name for entry in random for name in entry.theirs}
        detection = replace(detection, missing={n: s for n, s in detection.missing.items() if n not in random_names})
        if not detection.is_complete:
            raise incomplete_error(self.source.path, detection)
        state: dict[str, Tensor] = {}
        wanted = [entry for entry in keys if entry not in random]
        done, total = 0, sum(self.source.specs[name].nbytes for entry in wanted for name in entry.theirs)
        not_finite: list[str] = []
        for entry in wanted:
            theirs, ours = self._read_tensors(entry, mmap)
            not_finite += [name for name, tensor in zip(entry.theirs, theirs, strict=True) if not is_finite(tensor)]
            state |= zip(entry.ours, ours, strict=True)
            done += sum(self.source.specs[name].nbytes for name in entry.theirs)
            progress(done, total)
        if not_finite:
            raise self.source.error(f"values that are not finite in {len(not_finite)}: {format_names(not_finite)}")
        if random:
            fresh = build_from(self.contract.config).state_dict()
            self.random_tensors = [name for entry in random for name in entry.ours]
            state |= {name: fresh[name] for name in self.random_tensors}
        return state

    def read_own_tokenizer(self) -> Tokenizer | None:
        """Return the tokeniser of an artifact; None if it has none."""
        if TOKENIZER_TENSOR not in self.source.specs:
            return None
        data = self._read_tensor(TOKENIZER_TENSOR, mmap=False)
        if data.dtype != torch.uint8 or data.ndim != 1:
            raise self.source.error(f"damaged tokeniser: {data.dtype} {list(data.shape)} is no row of bytes")
        try:
            return check_tokenizer(Tokenizer.from_bytes(data), self.contract.config)
        except ValueError as error:
            raise self.source.error(str(error)) from None

    def _read_tensors(self, entry: KeyMapping, mmap: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return their tensors and ours for one key. Row blocks of one tensor are read directly into it."""
        specs = [self.source.specs[name] for name in entry.theirs]
        if entry.transform.row_splits is None or len({spec.dtype for spec in specs}) > 1:
            theirs = [self._read_tensor(name, mmap) for name in entry.theirs]
            return theirs, entry.transform.read(theirs)
        whole = torch.empty((sum(entry.transform.row_splits), *specs[0].shape[1:]), dtype=specs[0].dtype)
        parts = list(whole.split(entry.transform.row_splits))
        for name, part in zip(entry.theirs, parts, strict=True):
            self.source.read_into(name, part)
        return parts, [whole]

    def _read_tensor(self, name: str, mmap: bool) -> Tensor:
        tensor = self.source.view(name) if mmap else self.source.read(name)
        if self.digests and hash_tensor(tensor) != self.digests[name]:
            raise self.source.error(f"damaged: the checksum of {name} differs")
        return tensor


def _matches_any(entry: KeyMapping, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (*entry.theirs, *entry.ours) for pattern in patterns)


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def incomplete_error(path: Path, detection: Detection, limit: int = 12) -> ValueError:
    """Return the error for an incomplete checkpoint: the closest format and the differing tensors."""
    differences = detection.list_differences()
    lines = [
        f"{path}: not loaded. The closest format is {detection.reason}.",
        f"{len(detection.loaded)} tensors match; {len(differences)} differ:",
        *(f"  {line}" for line in differences[:limit]),
    ]
    if len(differences) > limit:
        lines.append(f"  and {len(differences) - limit} more")
    if detection.missing and not detection.unexpected and not detection.mismatched:
        lines.append("Missing tensors can be initialised at random: allow_missing=PATTERN")
    return ValueError("\n".join(lines))


def open_and_detect(
    path: Path, assume: Mapping[str, Any] | None = None, take: str | None = None, towers: bool = False
) -> Checkpoint:
    """Open a file or directory and detect its format from its header.

    Of a file with an image tower and a text tower, both are read with `towers`, otherwise the image tower.
    """
    assume = parse_assumptions(assume or {})
    source = open_checkpoint(path, take)
    try:
        if strange := next((name for name in source.specs if not name.isprintable()), None):
            raise source.error(f"invalid tensor name {strange!a}")
        return _detect_checkpoint(source, assume, towers, take)
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        source.close()
        raise source.error(f"invalid settings or sizes ({type(error).__name__}: {error})") from None
    except BaseException:
        source.close()
        raise


def _detect_checkpoint(source: TensorFile, assume: dict[str, Any], towers: bool, take: str | None) -> Checkpoint:
    shapes = {name: spec.shape for name, spec in source.specs.items()}
    if isinstance(source, SafetensorsFile) and is_artifact(source.metadata):
        modality = None
        if is_shared(source):
            modality, contract, digests = read_modality(source, take, towers)
        else:
            if take is not None:
                raise source.error(f"it holds one model and no {take!r}")
            contract, digests = read_contract(source)
        if facts := [name for name in assume if name != "resampling"]:
            raise source.error(f"an artifact needs no assumptions: leave out {', '.join(facts)}")
        if "resampling" in assume:  # not a fact of the weights: files of earlier versions do not record it
            contract = replace(contract, config=contract.config.with_resampling(assume["resampling"]))
        if modality is not None:
            detection = match_modality(contract.config, shapes, modality)
            return Checkpoint(source, detection, contract, digests, "the artifact", "the artifact")
        image = contract.config.image_tower
        if towers and image is contract.config:
            raise source.error("it has no text tower: use vitrail.load")
        prefix = "" if towers or image is contract.config else "image."
        if prefix:
            contract = replace(contract, config=image)
        detection = match_artifact(contract.config, shapes, prefix)
        checkpoint = Checkpoint(source, detection, contract, digests, "the artifact", "the artifact")
        if towers:
            checkpoint.contract = replace(contract, tokenizer=checkpoint.read_own_tokenizer())
        return checkpoint
    architecture = {name: value for name, value in assume.items() if name in ARCHITECTURE_KEYS}
    try:
        settings = {**source.settings, FILE_NAME_KEY: source.path.stem, PERIODS_KEY: read_periods(source)}
        detection = detect_format(shapes, settings, architecture, towers)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from None
    if max(detection.config.image_size) > 65_536:
        raise source.error(f"image size must be at most 65536, got {detection.config.image_size}")
    constants = {name for entry in select_mappings(detection.table) if not entry.ours for name in entry.theirs}
    dtypes = {source.specs[name].dtype for name in detection.loaded if name not in constants}
    if strange := [dtype for dtype in dtypes if not dtype.is_floating_point]:
        raise source.error(f"its weights are stored as {strange[0]}, not as floating-point numbers")
    for name, value in architecture.items():
        if name not in detection.assumptions and not detection.config.matches_option(name, value):
            raise source.error(f"{name}={value} contradicts the tensors: leave it out")
    labels, labels_from = find_labels(source, detection)
    pipeline, pipeline_from = find_preprocessing(source, detection, assume)
    provenance = {"file": source.path.name, "form": detection.format, "container": source.container}
    card: dict[str, Any] = {"provenance": provenance}
    if "license" in source.metadata:
        card["licence"] = source.metadata["license"]
    tokenizer = find_tokenizer(source, detection.config) if towers else None
    contract = CheckpointContract(detection.config, labels, pipeline, card, tokenizer)
    return Checkpoint(source, detection, contract, {}, labels_from, pipeline_from)


def find_tokenizer(source: TensorFile, config: ModelConfig) -> Tokenizer | None:
    """Return the tokeniser in the files beside standard weights; None if there is none."""
    folder, text = source.path.parent, config.text_tower
    if source.path.name not in (*WEIGHT_FILES, *INDEX_FILES) or text is None:
        return None
    if not any((folder / name).is_file() for name in TOKENIZER_FILES if not name.startswith("tokenizer_config")):
        return None
    settings = get_object(source.settings, "open_clip_config.json", "model_cfg")
    tokenizer = read_tokenizer(
        folder, text.context, open_clip=bool(settings), settings=get_object(settings, "text_cfg")
    )
    return check_tokenizer(tokenizer, config)


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> Tokenizer:
    """Return a tokeniser; raise ValueError if it is not that of the model's text tower."""
    text = config.text_tower
    if text is None:
        raise ValueError("a tokeniser belongs to a text tower, and the model has none: leave it out")
    if tokenizer.vocabulary > text.vocabulary:
        ids = f"ids up to {tokenizer.vocabulary - 1:,}, the text tower {text.vocabulary:,} tokens"
        raise ValueError(f"the tokeniser has {ids}: give the tokeniser of this model")
    if tokenizer.context != text.context:
        raise ValueError(f"the tokeniser's context is {tokenizer.context}, the text tower's {text.context}")
    return tokenizer


def read_periods(source: TensorFile) -> list[float] | None:
    """Return the periods of rotary positions that DINOv3's release stores: no shape tells their precision."""
    name = next((name for name in source.specs if name.endswith("rope_embed.periods")), None)
    if name is None or len(source.specs[name].shape) != 1 or source.specs[name].nbytes > 2**16:
        return None
    return source.read(name).float().tolist()


def find_labels(source: TensorFile, detection: Detection) -> tuple[tuple[str, ...] | None, str]:
    """Return the class names in the format's settings, if their number is that of the classes, and their source."""
    classes = detection.config.classes
    if classes is None:
        return None, "a model without classes"
    labels = transformers.parse_labels(source.settings)
    if labels is None:
        labels = timm.parse_labels_and_preprocessing(source.settings, detection.config.image_size)[0]
    if labels is None:
        return None, "not in the file"
    if len(labels) != classes:
        return None, f"config.json has {len(labels)} for {classes} classes: ignored"
    return labels, "config.json"


def find_preprocessing(source: TensorFile, detection: Detection, assume: dict[str, Any]) -> tuple[Preprocessing, str]:
    """Return the pipeline of the format's settings or its published default, and its source; `assume` overrides both."""
    form = next(form for form in (*FORMATS, *TOWER_FORMATS) if form.name == detection.format)
    config, size = detection.config, detection.config.image_size
    parsers = (ast.parse_preprocessing, transformers.parse_preprocessing)
    if pipeline := next(filter(None, (parse(source.settings, size) for parse in parsers)), None):
        why = "preprocessor_config.json"
    elif pipeline := timm.parse_labels_and_preprocessing(source.settings, size)[1]:
        why = "config.json"
    elif pipeline := clip.parse_preprocessing(source.settings, size):
        why = "open_clip_config.json"
    else:
        pipeline, why = form.default_preprocessing(config, source.path.stem)
    stride = config.size_rule[0]
    # If the pipeline's size is another one than the model's, positions are resampled to it, as the original code does.
    if pipeline.size[0] % stride or pipeline.size[1] % stride:
        pipeline, why = pipeline.with_size(size), f"{why}, for the image size {size[0]}×{size[1]}"
    if config.frames is not None and pipeline.clip is None:  # settings of processors have none
        default = form.default_preprocessing(config, source.path.stem)[0].clip
        pipeline = replace(pipeline, clip=default or Clip(config.frames))
    if config.channels != pipeline.channels:
        pipeline, why = pipeline.with_channels(config.channels), f"{why}, for {config.channels} channels"
    changes: dict[str, Any] = {name: assume[name] for name in ("mean", "std", "fit", "interpolation") if name in assume}
    if "crop" in assume:
        changes["resize"] = tuple(math.floor(side / assume["crop"]) for side in pipeline.size)
    for name in ("mean", "std"):
        if len(changes.get(name, pipeline.mean)) != config.channels:
            raise ValueError(f"{name} must have {config.channels} values, one per channel, got {len(changes[name])}")
    if changes:
        pipeline, why = replace(pipeline, **changes), f"{why}, with {', '.join(sorted(changes))} as given"
    return pipeline, why


def parse_assumptions(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed assumptions, from text or values: heads=6, gelu=tanh, size=224x224, mean=imagenet, crop=0.9…"""
    parsers: dict[str, Callable[[Any], Any]] = {
        "heads": int,
        "channels": int,
        "eps": float,
        "crop": float,
        "window": int,
        "frames": int,
        "stride": int,
        "text_heads": int,
        "text_eps": float,
        "text_token": int,
    }
    parsers |= {"size": _parse_size, "mean": _parse_numbers, "std": _parse_numbers, "resampling": lambda value: value}
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in (known := (*ARCHITECTURE_KEYS, *PREPROCESSING_KEYS)):
            raise ValueError(f"unknown assumption {name!r}: known are {', '.join(known)}")
        try:
            if name in ("mean", "std") and isinstance(value, str) and value in NORMALIZATIONS:
                parsed[name] = NORMALIZATIONS[value][name]
                if "std" not in given:  # a name for the mean sets both
                    parsed["std"] = NORMALIZATIONS[value]["std"]
            else:
                parsed[name] = parsers.get(name, str)(value)
        except (TypeError, ValueError, IndexError):
            raise ValueError(
                f"invalid value assume={{{name!r}: {given[name]!r}}}: see `vitrail describe --help`"
            ) from None
    limits: dict[str, float] = {"heads": 100_000, "channels": 100_000, "crop": 1, "eps": 1, "window": 1_000}
    for name, most in (limits | {"frames": 100_000, "stride": 100_000, "text_heads": 100_000, "text_eps": 1}).items():
        if name in parsed and not 0 < parsed[name] <= most:
            raise ValueError(f"{name} must be above 0 and at most {most:,}, got {given[name]}")
    if 0 < parsed.get("crop", 1) < 0.01:
        raise ValueError(f"crop must be at least 0.01, got {given['crop']}")
    if "resampling" in parsed:
        parse_resampling(parsed["resampling"])  # raises for an unknown name
    if min(parsed.get("size", (1,))) < 1:
        raise ValueError(f"both sides of size must be at least 1 pixel, got {given['size']}")
    return parsed


def _parse_size(value: str | int | Sequence[int]) -> tuple[int, int]:
    sides = re.split("[x×]", value) if isinstance(value, str) else [value] if isinstance(value, int) else value
    if len(sides) > 2:
        raise ValueError("more than two sides")
    return int(sides[0]), int(sides[-1])


def _parse_numbers(value: str | Iterable[float]) -> tuple[float, ...]:
    return tuple(float(part) for part in (value.split(",") if isinstance(value, str) else value))

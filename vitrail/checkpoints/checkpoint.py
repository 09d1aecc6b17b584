"""A checkpoint as a whole: the open file, what it was recognised as, and the data contract that comes with it."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vitrail.checkpoints import clip, timm, transformers
from vitrail.checkpoints.artifact import Contract, digest, is_artifact, read_contract
from vitrail.checkpoints.files.opened import open_checkpoint
from vitrail.checkpoints.files.safetensors import SafetensorsFile
from vitrail.checkpoints.files.source import Source, refuse
from vitrail.checkpoints.keys import Key, keys_of, some
from vitrail.checkpoints.look import FILE_NAME, GELUS
from vitrail.checkpoints.recognise import FORMS, Reading, own, recognise
from vitrail.data.preprocessing import CLIP, HALF, IMAGENET, Preprocessing
from vitrail.models.build import POOLS, Config, build_from
from vitrail.models.vit import ViTConfig
from vitrail.nn.embed import Patches

Progress = Callable[[int, int], None]  # bytes done, bytes in all
COLOURS = {"imagenet": IMAGENET, "half": HALF, "clip": CLIP}
ARCHITECTURE = ("heads", "gelu", "eps", "size", "pool", "channels")
PIPELINE = ("mean", "std", "crop", "fit", "interpolation")


def no_progress(done: int, total: int) -> None:
    """Says nothing."""


@dataclass
class Checkpoint:
    """Open, recognised, not yet read. `state` reads it, and refuses what is not whole."""

    source: Source
    reading: Reading
    contract: Contract
    digests: dict[str, str] = field(default_factory=dict)  # of an artifact's tensors
    labels_from: str = "not in the file"
    preprocessing_from: str = "not in the file"
    random: list[str] = field(default_factory=list)  # tensors of ours that were allowed to be missing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.source.close()

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The kinds of number that the weights are stored in."""
        return sorted({self.source.specs[name].dtype for name in self.reading.loaded}, key=str)

    def values(self, progress: Progress = no_progress) -> list[str]:
        """The tensors with values that are not finite. Reads everything."""
        found, done, total = [], 0, sum(self.source.specs[name].bytes for name in self.reading.loaded)
        for name in self.reading.loaded:
            if not finite(self._tensor(name, mapped=True)):
                found.append(name)
            done += self.source.specs[name].bytes
            progress(done, total)
        return found

    def state(
        self, allow_missing: Iterable[str] = (), progress: Progress = no_progress, mapped: bool = False
    ) -> dict[str, Tensor]:
        """Our tensors, as they are stored. Every one is there, of the right shape and finite; else an error that lists.

        `allow_missing` takes names with `*`, theirs or ours: such tensors are made at random if they are missing.
        `mapped` leaves tensors in the file's pages where nothing has to be rearranged.
        """
        reading, keys = self.reading, keys_of(self.reading.table)
        allowed = [allow_missing] if isinstance(allow_missing, str) else list(allow_missing)
        lacking = [entry for entry in keys if any(name in reading.missing for name in entry.theirs)]
        excused = [entry for entry in lacking if _matches(entry, allowed)]
        forgiven = {name for entry in excused for name in entry.theirs}
        reading = replace(reading, missing={n: s for n, s in reading.missing.items() if n not in forgiven})
        if not reading.whole:
            raise refuse_whole(self.source.path, reading)
        found: dict[str, Tensor] = {}
        wanted = [entry for entry in keys if entry not in excused]
        done, total = 0, sum(self.source.specs[name].bytes for entry in wanted for name in entry.theirs)
        not_finite: list[str] = []
        for entry in wanted:
            theirs, ours = self._tensors(entry, mapped)
            not_finite += [name for name, tensor in zip(entry.theirs, theirs, strict=True) if not finite(tensor)]
            found |= zip(entry.ours, ours, strict=True)
            done += sum(self.source.specs[name].bytes for name in entry.theirs)
            progress(done, total)
        if not_finite:
            raise refuse(self.source.path, f"values that are not finite in {len(not_finite)}: {some(not_finite)}")
        if excused:
            fresh = build_from(self.contract.config).state_dict()
            self.random = [name for entry in excused for name in entry.ours]
            found |= {name: fresh[name] for name in self.random}
        return found

    def _tensors(self, entry: Key, mapped: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Their tensors and ours for one key. What only has to be put together is read to where it belongs."""
        specs = [self.source.specs[name] for name in entry.theirs]
        if entry.change.rows is None or len({spec.dtype for spec in specs}) > 1:
            theirs = [self._tensor(name, mapped) for name in entry.theirs]
            return theirs, entry.change.read(theirs)
        whole = torch.empty((sum(entry.change.rows), *specs[0].shape[1:]), dtype=specs[0].dtype)
        parts = list(whole.split(entry.change.rows))
        for name, part in zip(entry.theirs, parts, strict=True):
            self.source.read_into(name, part)
        return parts, [whole]

    def _tensor(self, name: str, mapped: bool) -> Tensor:
        tensor = self.source.view(name) if mapped else self.source.read(name)
        if self.digests and digest(tensor) != self.digests[name]:
            raise refuse(self.source.path, f"damaged: {name} is not what was written (the checksum differs)")
        return tensor


def _matches(entry: Key, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, one) for name in (*entry.theirs, *entry.ours) for one in patterns)


def finite(tensor: Tensor) -> bool:
    """Whether every value is a number."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def refuse_whole(path: Path, reading: Reading, most: int = 12) -> ValueError:
    """The error for a checkpoint that is not whole: the form it comes closest to, and what would have to change."""
    differences = reading.differences()
    lines = [
        f"{path}: not loaded. It is closest to {reading.why}.",
        f"{len(reading.loaded)} tensors have their place; {len(differences)} differ:",
        *(f"  {line}" for line in differences[:most]),
    ]
    if len(differences) > most:
        lines.append(f"  and {len(differences) - most} more")
    if reading.missing and not reading.unexpected and not reading.misshapen:
        lines.append("Missing tensors alone can be made at random: --allow-missing PATTERN")
    return ValueError("\n".join(lines))


def open_and_recognise(path: Path, assume: Mapping[str, Any] | None = None, take: str | None = None) -> Checkpoint:
    """A file or directory, open and recognised from its header alone."""
    assume = assumptions(assume or {})
    source = open_checkpoint(path, take)
    try:
        if strange := next((name for name in source.specs if not name.isprintable()), None):
            raise refuse(source.path, f"the name {strange!a} is not that of a tensor")
        return _recognised(source, assume)
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        source.close()  # numbers and settings that nobody could mean
        raise refuse(source.path, f"its settings or sizes make no sense ({type(error).__name__}: {error})") from None
    except BaseException:
        source.close()
        raise


def _recognised(source: Source, assume: dict[str, Any]) -> Checkpoint:
    shapes = {name: spec.shape for name, spec in source.specs.items()}
    if isinstance(source, SafetensorsFile) and is_artifact(source.metadata):
        contract, digests = read_contract(source)
        if assume:
            raise refuse(source.path, f"an artifact says everything itself: leave out {', '.join(assume)}")
        return Checkpoint(source, own(contract.config, shapes), contract, digests, "the artifact", "the artifact")
    architecture = {name: value for name, value in assume.items() if name in ARCHITECTURE}
    try:
        settings = {**source.settings, FILE_NAME: source.path.stem}
        reading = recognise(shapes, settings, architecture)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from None
    if reading.config.image_size[0] > 65_536 or reading.config.image_size[1] > 65_536:
        raise refuse(source.path, f"an image size of {reading.config.image_size} is not that of a model")
    numbers = {source.specs[name].dtype for name in reading.loaded}
    if strange := [kind for kind in numbers if not kind.is_floating_point]:
        raise refuse(source.path, f"its weights are stored as {strange[0]}, not as floating-point numbers")
    for name, value in architecture.items():
        if name not in reading.facts and not agrees(reading.config, name, value):
            raise refuse(source.path, f"{name}={value} was told, and the tensors tell otherwise: leave it out")
    labels, labels_from = find_labels(source, reading)
    pipeline, pipeline_from = find_preprocessing(source, reading, assume)
    provenance = {"file": source.path.name, "form": reading.form, "container": source.container}
    card: dict[str, Any] = {"provenance": provenance}
    if "license" in source.metadata:
        card["licence"] = source.metadata["license"]
    contract = Contract(reading.config, labels, pipeline, card)
    return Checkpoint(source, reading, contract, {}, labels_from, pipeline_from)


def agrees(config: Config, name: str, value: Any) -> bool:
    """Whether what was told, though nobody asked, is so."""
    if not isinstance(config, ViTConfig):
        return (name, value) in (("size", config.image_size), ("channels", config.channels))
    known = {
        "heads": config.size.heads,
        "eps": config.eps,
        "size": config.image_size,
        "channels": config.channels,
        "gelu": next((name for name, slot in GELUS.items() if slot == config.block.mlp), None),
        "pool": next((name for name, slot in POOLS.items() if slot == config.pool), None),
    }
    return known[name] == value


def find_labels(source: Source, reading: Reading) -> tuple[tuple[str, ...] | None, str]:
    """The class names that the format's settings hold, if they are as many as the classes."""
    classes = reading.config.classes
    if classes is None:
        return None, "a model without classes"
    labels = transformers.labels(source.settings)
    if labels is None:
        labels = timm.labels_and_pipeline(source.settings, reading.config.image_size)[0]
    if labels is None:
        return None, "not in the file"
    if len(labels) != classes:
        return None, f"config.json has {len(labels)} for {classes} classes: not taken"
    return labels, "config.json"


def find_preprocessing(source: Source, reading: Reading, assume: dict[str, Any]) -> tuple[Preprocessing | None, str]:
    """The pipeline of the format's settings, or its published default; what was told overrides either."""
    form = next(form for form in FORMS if form.name == reading.form)
    config, size = reading.config, reading.config.image_size
    found, why = transformers.pipeline(source.settings, size), "preprocessor_config.json"
    if found is None:
        found, why = timm.labels_and_pipeline(source.settings, size)[1], "config.json"
    if found is None:
        found, why = clip.pipeline(source.settings, size), "open_clip_config.json"
    if found is None:
        found, why = form.preprocessing(config, source.path.stem)
    stride = getattr(config, "embed", Patches(1)).stride
    # Where the pipeline gives another size than the model's, positions are resampled to it, here as by its makers' code.
    if found.size[0] % stride or found.size[1] % stride:
        found, why = found.at(size), f"{why}, for the image size {size[0]}×{size[1]}"
    if config.channels != found.channels:
        found, why = found.with_channels(config.channels), f"{why}, for {config.channels} channels"
    changes: dict[str, Any] = {name: assume[name] for name in ("mean", "std", "fit", "interpolation") if name in assume}
    if "crop" in assume:
        changes["resize"] = tuple(math.floor(side / assume["crop"]) for side in found.size)
    for name in ("mean", "std"):
        if len(changes.get(name, found.mean)) != config.channels:
            raise ValueError(f"{len(changes[name])} values for {name}, and the model takes {config.channels} channels")
    if changes:
        found, why = replace(found, **changes), f"{why}, with {', '.join(sorted(changes))} as told"
    return found, why


def assumptions(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a checkpoint, from text or values: heads=6, gelu=tanh, size=224x224, mean=imagenet, crop=0.9…"""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in (*ARCHITECTURE, *PIPELINE):
            raise ValueError(f"nothing can be assumed of {name!r}: known are {', '.join((*ARCHITECTURE, *PIPELINE))}")
        try:
            if name in ("heads", "channels"):
                found[name] = int(value)
            elif name in ("eps", "crop"):
                found[name] = float(value)
            elif name == "size":
                sides = (
                    re.split("[x×]", value) if isinstance(value, str) else [value] if isinstance(value, int) else value
                )
                found[name] = (int(sides[0]), int(sides[-1]))
                if len(sides) > 2:
                    raise ValueError("more than two sides")
            elif name in ("mean", "std"):
                if isinstance(value, str) and value in COLOURS:
                    found[name] = COLOURS[value][name]
                    if "std" not in given:  # a word for the mean is one for both
                        found["std"] = COLOURS[value]["std"]
                else:
                    parts = value.split(",") if isinstance(value, str) else value
                    found[name] = tuple(float(part) for part in parts)
            else:
                found[name] = str(value)
        except (TypeError, ValueError, IndexError):
            raise ValueError(f"{name}={value} cannot be read: see `vitrail describe --help`") from None
    for name, most in {"heads": 100_000, "channels": 100_000, "crop": 1, "eps": 1}.items():
        if name in found and not 0 < found[name] <= most:
            raise ValueError(f"{name}={given[name]}: it must be above 0 and at most {most:,}")
    if 0 < found.get("crop", 1) < 0.01:
        raise ValueError(f"crop={given['crop']}: it must be at least 0.01")
    if min(found.get("size", (1,))) < 1:
        raise ValueError(f"size={given['size']}: both sides must be at least 1 pixel")
    return found

"""Detection of a checkpoint's format and architecture, and the matching of its tensors, from the header only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.artifact import TOKENIZER_TENSOR
from vitrail.checkpoints.formats import (
    ast,
    beit,
    clip,
    clip_transformers,
    dinov3,
    eomt,
    eva,
    google,
    mvit,
    swin,
    timesformer,
    timm,
    torchvision,
    transformers,
    videomae,
    vit_pytorch,
    vivit,
)
from vitrail.checkpoints.formats import towers as towers_formats
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, build_meta_state, find_ignored, format_names
from vitrail.models.base import ModelConfig
from vitrail.models.registry import configure
from vitrail.models.shared_encoder import LAYERS

# In the order in which they are tried.
CLIPS = (videomae, vivit, timesformer)
PROJECTS = (
    *(*CLIPS, ast, dinov3, eva, beit, timm, transformers, clip_transformers, google, torchvision, clip),
    *(vit_pytorch, swin, mvit, eomt),
)
FORMATS: tuple[formats.CheckpointFormat, ...] = tuple(form for project in PROJECTS for form in project.FORMATS)
TOWER_FORMATS = towers_formats.FORMATS  # with a text tower
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.", "_forward_module.")  # that training adds to every name


@dataclass(frozen=True)
class Detection:
    """A detected checkpoint, with every tensor accounted for."""

    format: str
    reason: str
    config: ModelConfig
    table: KeyTable  # of the names in the file
    root: str = ""
    assumptions: dict[str, tuple[Any, str]] = field(default_factory=dict)  # not determined by tensors: value, source
    loaded: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)  # on purpose, with the reason
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unexpected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)  # found, expected

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def list_differences(self) -> list[str]:
        """Return the differences, tensor by tensor."""
        return [
            *(f"{name} {list(shape)} is missing" for name, shape in self.missing.items()),
            *(f"{name} {list(shape)} is unexpected" for name, shape in self.unexpected.items()),
            *(f"{name} is {list(shape)}, expected {list(want)}" for name, (shape, want) in self.mismatched.items()),
        ]


def detect_format(
    shapes: formats.Shapes, settings: dict[str, Any], assume: Mapping[str, Any], towers: bool = False
) -> Detection:
    """Return the format that matches, or the closest one with its differences; raise if none is close.

    With `towers`, formats with a text tower are tried; otherwise an image tower is read alone.
    """
    wrapper, inner = strip_wrappers(shapes)
    given = {name: (value, "given") for name, value in assume.items()}
    best: Detection | None = None
    complaints: list[str] = []
    for form in TOWER_FORMATS if towers else FORMATS:
        for root in form.roots:
            names = formats.TensorNames(inner, root)
            if not form.matches(names):
                continue
            try:
                assumptions = formats.Assumptions(form.parse_settings(settings) | given)
                config = form.read_config(names, assumptions)
                table = form.build_table(config, root)
            except ValueError as error:
                complaints.append(f"it looks like {form.title}, but {error}")
                continue
            found = (names.find(name) if "|" in name else name for name in form.required_keys[:2])
            telling = " and ".join(f"{root}{name}" for name in found)
            wanted = keys.compute_expected_shapes(table, config)
            reason = f"{form.title}: it has {telling}" + (f", after {wrapper!r}" if wrapper else "")
            tensors = account_tensors(wanted, inner, find_ignored(table, inner), wrapper)
            table = keys.add_root(table, wrapper)
            detection = Detection(form.name, reason, config, table, wrapper + root, assumptions.used, **tensors)
            if detection.is_complete:
                return detection
            if best is None or len(detection.list_differences()) < len(best.list_differences()):
                best = detection
    if best is not None:
        return best
    if towers and not complaints:
        raise ValueError(
            "no text tower in a known format (CLIP, OpenCLIP, transformers' CLIP and SigLIP): use vitrail.load"
        )
    raise ValueError(complaints[0] if complaints else describe_unknown_format(inner))


def account_tensors(
    wanted: formats.Shapes, shapes: formats.Shapes, ignored: Mapping[str, str] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of `Detection` that account for every tensor; `prefix` is added to the names."""
    ignored, common = ignored or {}, [name for name in wanted if name in shapes]
    extra = [name for name in shapes if name not in wanted and name not in ignored]
    differ = [name for name in common if tuple(shapes[name]) != wanted[name]]
    return {
        "loaded": tuple(prefix + name for name in common if tuple(shapes[name]) == wanted[name]),
        "ignored": {prefix + name: reason for name, reason in ignored.items()},
        "missing": {prefix + name: shape for name, shape in wanted.items() if name not in shapes},
        "unexpected": {prefix + name: tuple(shapes[name]) for name in extra},
        "mismatched": {prefix + name: (tuple(shapes[name]), wanted[name]) for name in differ},
    }


def match_artifact(config: ModelConfig, shapes: formats.Shapes, prefix: str = "") -> Detection:
    """Match the tensors of an artifact, whose configuration is known; `prefix` is that of one of its towers."""
    wanted = {prefix + name: tuple(tensor.shape) for name, tensor in build_meta_state(config).items()}
    ignored = {"decoder.*": "MAE decoder", TOKENIZER_TENSOR: "tokeniser"}
    ignored |= dict.fromkeys(("text.*", "logits.*"), "text tower") if prefix else {}
    table: KeyTable = [keys.map_key(name.removeprefix(prefix), name) for name in wanted]
    table = [*table, *(IgnoredKeys(name, why) for name, why in ignored.items())]
    reason = "vitrail's artifact: its header holds the configuration"
    return Detection("vitrail", reason, config, table, **account_tensors(wanted, shapes, find_ignored(table, shapes)))


def match_modality(config: ModelConfig, shapes: formats.Shapes, modality: str) -> Detection:
    """Match the tensors of one modality of a shared encoder: the layers of all, and those under its own name."""
    wanted = {name: tuple(tensor.shape) for name, tensor in build_meta_state(config).items()}
    stored = {name: name if name.startswith(f"{LAYERS}.") else f"{modality}.{name}" for name in wanted}
    others = {name for name in shapes if not name.startswith((f"{LAYERS}.", f"{modality}."))}
    ignored = dict.fromkeys(sorted({f"{name.partition('.')[0]}*" for name in others}), "other modalities")
    table: KeyTable = [keys.map_key(name, theirs) for name, theirs in stored.items()]
    table = [*table, *(IgnoredKeys(name, why) for name, why in ignored.items())]
    account = account_tensors(
        {stored[name]: shape for name, shape in wanted.items()}, shapes, find_ignored(table, shapes)
    )
    return Detection("vitrail", f"the modality {modality} of vitrail's shared encoder", config, table, **account)


def strip_wrappers(shapes: formats.Shapes) -> tuple[str, formats.Shapes]:
    """Return the prefix that training added to every name, and the shapes without it."""
    wrapper = ""
    while True:
        more = next((w for w in WRAPPER_PREFIXES if shapes and all(name.startswith(w) for name in shapes)), None)
        if more is None:
            return wrapper, shapes
        wrapper += more
        shapes = {name[len(more) :]: shape for name, shape in shapes.items()}


def describe_unknown_format(shapes: formats.Shapes) -> str:
    """Return an error text for an unknown format: the tensors, and the closest format."""
    masked = {mask_numbers(name) for name in shapes}
    examples = build_example_names()
    scores = {form: sum(_has_name(masked, name) for name in names) / len(names) for form, names in examples.items()}
    nearest = max(scores, key=lambda form: scores[form])
    text = f"unknown format: {len(shapes)} tensors, among them {format_names(shapes, 4)}"
    if not scores[nearest]:
        return f"{text}. No name belongs to a Vision Transformer in a known format: {format_names(scores, 20)}"
    names = examples[nearest]
    lacking = sorted(name for name in names if not _has_name(masked, name))
    strange = sorted(name for name in masked if not any(name.endswith(known) for known in names))
    found = f"{len(names) - len(lacking)} of its {len(names)} kinds of names"
    differ = f"missing: {format_names(lacking, 6) or 'none'}; unknown: {format_names(strange, 6) or 'none'}"
    return f"{text}. The closest format is {nearest}, with {found}; {differ}"


def mask_numbers(name: str) -> str:
    """Return a name with its numbers replaced by #."""
    return re.sub(r"\d+", "#", name)


def _has_name(names: set[str], wanted: str) -> bool:
    return any(name == wanted or name.endswith((f".{wanted}", f"/{wanted}")) for name in names)


@lru_cache(maxsize=1)
def build_example_names() -> dict[str, set[str]]:
    """Return the kinds of names of every format, from a small model of it."""
    small: dict[str, Any] = {"patch": 16, "width": 64, "depth": 1, "heads": 1, "image_size": 32}
    examples = {}
    for form in FORMATS:
        config = (
            configure(**form.example)
            if "family" in form.example or "name" in form.example
            else configure(**{**small, **form.example})
        )
        mappings = keys.select_mappings(form.build_table(config, ""))
        examples[form.name] = {mask_numbers(name) for entry in mappings for name in entry.theirs}
    return examples

"""Low-rank additions (LoRA) in the form of the PEFT library: a directory with adapter_config.json and adapter_model.safetensors.

PEFT names the modules of transformers' models, which have queries, keys and values apart where ours are one matrix: an addition
B A to that matrix is three of theirs with the same A and the rows of B between them, and three of theirs with different A are
rows of one difference of ours. So both directions are exact. transformers renamed its modules in version 5: both spellings are
read.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail.checkpoints.files import safetensors
from vitrail.checkpoints.files.atomic import staged
from vitrail.checkpoints.files.source import parse_json, read_json, refuse
from vitrail.checkpoints.transformers import family_of
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import Config
from vitrail.models.tuning import LowRank
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.written import dataclass_from_json, to_json
from vitrail.nn.mlp import SwiGLU

Spelling = Literal["transformers 5", "transformers 4"]
SPELLINGS: tuple[Spelling, ...] = ("transformers 5", "transformers 4")
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LARGEST = sys.float_info.max  # a whole number may be larger, and is then no float
BEFORE = "base_model.model."  # PEFT's, before every name
OURS = "vitrail.adapter"  # in the header of the weights: labels and preprocessing, which PEFT has no place for

# Settings that say how an adapter came to be, or that are read below; every other one that is set would change what it computes.
# fmt: off
HARMLESS = frozenset((
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "modules_to_save",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core",
    "eva_config", "runtime_config", "qalora_group_size",
))
# fmt: on
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")  # that leave the base as it is


@dataclass(frozen=True)
class Part:
    """Rows of one of our matrices, which are a matrix of theirs."""

    ours: str
    start: int
    rows: int


@dataclass(frozen=True)
class Adapter:
    """What an adapter changes of a model."""

    differences: dict[str, Tensor]  # to be added to our weights, by name
    head: dict[str, Tensor] = field(default_factory=dict)  # in place of ours, by name
    labels: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None

    @property
    def classes(self) -> int | None:
        """Those of its head, where it has one."""
        return next((len(tensor) for name, tensor in self.head.items() if name.endswith("weight")), None)


def modules_of(config: ViTConfig, spelling: Spelling, root: str | None = None) -> dict[str, Part]:
    """Which rows of which of our matrices each of their modules is."""
    family = family_of(config)
    dino, new, gated = family.startswith("dinov2"), spelling == "transformers 5", isinstance(config.block.mlp, SwiGLU)
    root = f"{family}." if root is None else root
    inner, width, mlp = config.size.heads * config.shape.head_width, config.size.width, config.size.mlp
    attention = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
    if not new:
        attention = (*(f"attention.attention.{name}" for name in ("query", "key", "value")), "attention.output.dense")
    if gated:
        first, last = (
            (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj") if new else (("mlp.weights_in",), "mlp.weights_out")
        )
    elif dino or new:
        first, last = ("mlp.fc1",), "mlp.fc2"
    else:
        first, last = ("intermediate.dense",), "output.dense"
    rows = (2 if gated else 1) * mlp // len(first)
    found: dict[str, Part] = {}
    for layer in range(config.size.depth):
        theirs = f"{root}layers.{layer}" if new and not dino else f"{root}encoder.layer.{layer}"
        ours = f"blocks.{layer}"
        for place, name in enumerate(attention[:3]):
            found[f"{theirs}.{name}"] = Part(f"{ours}.msa.qkv", place * inner, inner)
        found[f"{theirs}.{attention[3]}"] = Part(f"{ours}.msa.out", 0, width)
        for place, name in enumerate(first):
            found[f"{theirs}.{name}"] = Part(f"{ours}.mlp.fc1", place * rows, rows)
        found[f"{theirs}.{last}"] = Part(f"{ours}.mlp.fc2", 0, width)
    return found


def heads_of(config: ViTConfig) -> dict[str, str]:
    """Their classifiers' names, and ours."""
    if config.prefix.outputs == 2:
        return {"cls_classifier": "head.label", "distillation_classifier": "head.teacher"}
    return {"classifier": "head"}


# --- writing ---


def write_adapter(
    directory: str | Path,
    model: ViT,
    *,
    base: str | None = None,
    labels: Iterable[str] | None = None,
    preprocessing: Preprocessing | None = None,
    spelling: Spelling = "transformers 5",
) -> None:
    """The low-rank additions of a model, before they are merged, and its head; a new directory, whole or not at all.

    `base` is what they are added to: a name on the Hub, or a path.
    """
    added = dict(additions(model))
    if not added:
        raise ValueError(
            "the model has no low-rank additions: tune it with lora, and write them before they are merged"
        )
    names = modules_of(model.config, spelling)
    if strange := sorted(set(added) - {part.ours for part in names.values()}):
        raise ValueError(f"transformers has no name for {strange[0]}: its adapter cannot be written")
    ranks = {len(one.a) for one in added.values()}
    tensors: dict[str, Tensor] = {}
    for theirs, part in names.items():
        if part.ours in added:
            one = added[part.ours]
            tensors[f"{BEFORE}{theirs}.lora_A.weight"] = one.a
            tensors[f"{BEFORE}{theirs}.lora_B.weight"] = one.b[part.start : part.start + part.rows]
    state = model.state_dict()
    heads = heads_of(model.config) if model.config.classes is not None else {}
    for theirs, ours in heads.items():
        for kind in ("weight", "bias"):
            tensors[f"{BEFORE}{theirs}.{kind}"] = state[f"{ours}.{kind}"]
    told = {
        "labels": None if labels is None else list(labels),
        "preprocessing": None if preprocessing is None else to_json(preprocessing),
    }
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": max(ranks),
        "lora_alpha": max(ranks),  # B A is added as it is
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "target_modules": targets(names, added),
        "modules_to_save": list(heads) or None,
    }
    if len(ranks) > 1:
        raise ValueError(f"additions of the ranks {', '.join(map(str, sorted(ranks)))}: one rank can be written")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with staged(Path(directory)) as place:
        place.mkdir()
        safetensors.write(place / WEIGHTS, whole, {"format": "pt", OURS: json.dumps(told, ensure_ascii=False)})
        (place / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def additions(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Our modules that have a low-rank addition."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            for one in module.parametrizations["weight"]:  # type: ignore[index]
                if isinstance(one, LowRank):
                    yield name, one


def targets(names: Mapping[str, Part], added: Mapping[str, LowRank]) -> list[str]:
    """What follows the layer's number: the ends of the names that PEFT looks for."""
    ends = {theirs.split("layer", 1)[1].split(".", 2)[2] for theirs, part in names.items() if part.ours in added}
    return sorted(ends)


# --- reading ---


def read_adapter(directory: str | Path, config: Config) -> Adapter:
    """What the adapter in a directory changes of a model of this configuration; what cannot be expressed is refused."""
    folder = Path(directory)
    if not isinstance(config, ViTConfig):
        raise ValueError(f"{folder} is for a Vision Transformer, and the model is a ResNet")
    if not (folder / SETTINGS).is_file():
        raise ValueError(f"{folder} holds no adapter: there is no {SETTINGS} in it")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}: save the adapter with safe_serialization=True")
    settings = read_json(folder / SETTINGS)
    if not isinstance(settings, dict):
        raise refuse(folder / SETTINGS, "no table of settings")
    check_settings(settings, folder / SETTINGS)
    with safetensors.SafetensorsFile(folder / WEIGHTS) as source:
        tensors = {name: source.read(name) for name in source.specs}
        labels, preprocessing = _told(source, config)
    if not tensors:
        raise refuse(folder / WEIGHTS, "it holds no tensors: there is nothing to merge")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            kind = safetensors.NAMES[tensor.dtype]
            raise refuse(folder / WEIGHTS, f"{name} is stored as {kind}: save the adapter in float32")
        if not torch.isfinite(tensor).all():
            raise refuse(folder / WEIGHTS, f"{name} has values that are not finite numbers")
    pairs, head = _sorted(tensors, config, folder / WEIGHTS)
    return Adapter(_differences(pairs, settings, config, folder), head, labels, preprocessing)


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Refuses what would compute something else than W + scale · B A."""
    if settings.get("peft_type") != "LORA":
        raise refuse(path, f"an adapter of the kind {settings.get('peft_type')!r}: only LORA can be read")
    if settings.get("use_dora"):
        raise refuse(path, "DoRA changes the length of weights too, which is no low-rank addition: merge it with PEFT")
    if settings.get("bias", "none") != "none":
        raise refuse(path, f"it trained biases too (bias {settings['bias']!r}): merge it with PEFT")
    if settings.get("init_lora_weights") not in BEGINNINGS:
        how = settings["init_lora_weights"]
        raise refuse(path, f"it was begun by {how!r}, which changes the base: convert it with PEFT first")
    if not isinstance(settings.get("alpha_pattern") or {}, dict):
        raise refuse(path, f"its alpha_pattern is {str(settings['alpha_pattern'])[:60]!r}: a table of names is wanted")
    for name, value in settings.items():
        if name not in HARMLESS and value not in (None, False, "", [], {}):
            raise refuse(
                path, f"its setting {name} is {str(value)[:60]!r}, which cannot be expressed: merge it with PEFT"
            )


def _told(
    source: safetensors.SafetensorsFile, config: ViTConfig
) -> tuple[tuple[str, ...] | None, Preprocessing | None]:
    """Labels and preprocessing, where the adapter is one of ours."""
    if OURS not in source.metadata:
        return None, None
    told = parse_json(source.metadata[OURS].encode(), source.path, "damaged description")
    if not isinstance(told, dict):
        raise refuse(source.path, "damaged description")
    labels, pipeline = told.get("labels"), told.get("preprocessing")
    if labels is not None and not (isinstance(labels, list) and all(isinstance(name, str) for name in labels)):
        raise refuse(source.path, "its labels are no list of names")
    if labels is not None and len(set(labels)) != len(labels):
        twice = next(name for name in labels if labels.count(name) > 1)
        raise refuse(source.path, f"two of its labels are {twice[:60]!r}: each class has a name of its own")
    made = None if pipeline is None else dataclass_from_json(pipeline, Preprocessing, "preprocessing")
    if made is not None and made.channels != config.channels:
        raise refuse(
            source.path, f"its preprocessing gives {made.channels} channels and the model takes {config.channels}"
        )
    return None if labels is None else tuple(labels), made


Pairs = dict[str, tuple[Part, dict[str, Tensor]]]


def _sorted(tensors: Mapping[str, Tensor], config: ViTConfig, path: Path) -> tuple[Pairs, dict[str, Tensor]]:
    """A and B of each of their modules, and the head; every tensor has a place."""
    known: dict[str, Part] = {}
    for spelling in SPELLINGS:
        for root in (None, ""):
            known |= modules_of(config, spelling, root)
    heads, head, pairs = heads_of(config), {}, Pairs()
    for name, tensor in tensors.items():
        short = name.removeprefix(BEFORE)
        module, _, kind = short.rpartition(".")
        if kind in ("weight", "bias") and module in heads:
            _put(head, f"{heads[module]}.{kind}", tensor, name, path)
            continue
        module, _, matrix = module.rpartition(".")
        if matrix not in ("lora_A", "lora_B") or kind != "weight" or module not in known:
            raise refuse(path, f"{name} has no place in this model: is the adapter for another one?")
        _put(pairs.setdefault(module, (known[module], {}))[1], matrix, tensor, name, path)
    _check_once(pairs, path)
    _check_head(head, heads, path)
    return pairs, head


def _put(found: dict[str, Tensor], key: str, tensor: Tensor, name: str, path: Path) -> None:
    """Gives a tensor its place, where no other has it."""
    if key in found:
        raise refuse(path, f"{name} is there twice, with and without {BEFORE}: which one is meant?")
    found[key] = tensor


def _check_once(pairs: Pairs, path: Path) -> None:
    """Refuses rows that two modules would change: one module spelt in two ways."""
    rows = sorted((part.ours, part.start, part.rows, module) for module, (part, _) in pairs.items())
    for (ours, start, count, module), (other, begin, _, again) in pairwise(rows):
        if ours == other and begin < start + count:
            raise refuse(path, f"{module} and {again} are the same weights: which one is meant?")


def _check_head(head: Mapping[str, Tensor], heads: Mapping[str, str], path: Path) -> None:
    """Refuses a head that is not whole, or whose tensors are no weights and biases of the same classes."""
    if not head:
        return
    if len(head) != 2 * len(heads):
        raise refuse(path, f"its head lacks {2 * len(heads) - len(head)} tensors")
    shapes = {name: list(tensor.shape) for name, tensor in head.items()}
    weights = [shapes[f"{ours}.weight"] for ours in heads.values()]
    biases = [shapes[f"{ours}.bias"] for ours in heads.values()]
    classes = weights[0][:1]
    if (
        classes in ([], [0])
        or any(len(shape) != 2 or shape[:1] != classes for shape in weights)
        or any(shape != classes for shape in biases)
    ):
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise refuse(path, f"its head is no weights [classes, width] with biases [classes]: {said}")


def _differences(pairs: Pairs, settings: Mapping[str, Any], config: ViTConfig, folder: Path) -> dict[str, Tensor]:
    """scale · B A in the rows of our matrices where they belong, in double precision."""
    gated, mlp = isinstance(config.block.mlp, SwiGLU), config.size.mlp
    inner, width = config.size.heads * config.shape.head_width, config.size.width
    shapes = {
        "msa.qkv": (3 * inner, width),
        "msa.out": (width, inner),
        "mlp.fc1": ((2 if gated else 1) * mlp, width),
        "mlp.fc2": (width, mlp),
    }
    found: dict[str, Tensor] = {}
    for module, (part, matrices) in pairs.items():
        if len(matrices) != 2:
            raise refuse(folder / WEIGHTS, f"{module} has {' and '.join(matrices)} alone")
        a, b = matrices["lora_A"].double(), matrices["lora_B"].double()
        shape = shapes[part.ours.split(".", 2)[2]]
        if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != (part.rows, shape[1]) or a.shape[0] != b.shape[1]:
            raise refuse(
                folder / WEIGHTS,
                f"{module} has A {list(a.shape)} and B {list(b.shape)}; this model's matrix is {part.rows}×{shape[1]}: "
                "is the adapter for another size?",
            )
        if not len(a):
            raise refuse(folder / WEIGHTS, f"{module} has A and B of rank 0: there is nothing to merge")
        name = f"{part.ours}.weight"
        whole = found.setdefault(name, torch.zeros(shape, dtype=torch.float64))
        whole[part.start : part.start + part.rows] += scale(settings, module, len(a), folder) * (b @ a)
    return found


def scale(settings: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """lora_alpha / r, or / √r with use_rslora; a pattern may give a module an alpha of its own."""
    alpha = settings.get("lora_alpha", 8)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if not all(letter.isalnum() or letter in "._" for letter in pattern):
            raise refuse(
                folder / SETTINGS, f"the alpha_pattern {pattern!r} is not the end of a name: merge it with PEFT"
            )
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
            break
    if type(alpha) not in (int, float) or not abs(alpha) <= LARGEST:
        raise refuse(folder / SETTINGS, f"a lora_alpha of {str(alpha)[:40]!r}: a number is wanted")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)

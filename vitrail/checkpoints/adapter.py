"""LoRA adapters of the PEFT library: a directory with adapter_config.json and adapter_model.safetensors.

PEFT names the modules of transformers' models, which have separate matrices for queries, keys and values where vitrail has
one. An addition B A to that matrix is three of theirs with the same A and the rows of B divided among them; three of theirs
with different A are row blocks of one difference. So both directions are exact. transformers renamed its modules in version
5; both namings are read.
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

from vitrail.checkpoints.artifact import parse_labels_and_preprocessing
from vitrail.checkpoints.formats import LabelsAndPreprocessing, ast
from vitrail.checkpoints.formats.beit import is_beit
from vitrail.checkpoints.formats.transformers import choose_family
from vitrail.checkpoints.io import safetensors
from vitrail.checkpoints.io.source import checkpoint_error, parse_json, read_json
from vitrail.checkpoints.keys import build_meta_state
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import ModelConfig, State, TokenConfig, TokenModel, is_classifier
from vitrail.models.lora import LowRank
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.position import RotaryDINOv3
from vitrail.utils.files import stage_output
from vitrail.utils.json import to_json

TransformersNaming = Literal["transformers 5", "transformers 4"]
TRANSFORMERS_NAMINGS: tuple[TransformersNaming, ...] = ("transformers 5", "transformers 4")
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_FLOAT = sys.float_info.max  # an integer may be larger and is then no float
PEFT_PREFIX = "base_model.model."  # PEFT's, before every name
METADATA_KEY = "vitrail.adapter"  # in the header of the weights: labels and preprocessing, which PEFT does not store

# Settings that record how an adapter was trained, or that are read below. Any other setting would change its output.
# fmt: off
SUPPORTED_SETTINGS = frozenset((
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "modules_to_save",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core",
    "eva_config", "runtime_config", "qalora_group_size",
))
# fmt: on
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUPPORTED_INITS = (None, True, False, "gaussian", "orthogonal", "eva")  # they leave the base unchanged


@dataclass(frozen=True)
class RowSlice:
    """The rows of one of our matrices that are one of their matrices."""

    ours: str
    start: int
    rows: int


@dataclass(frozen=True)
class Adapter:
    """The changes that an adapter makes to a model."""

    deltas: dict[str, Tensor]  # to be added to our weights, by name
    head: dict[str, Tensor] = field(default_factory=dict)  # in place of ours, by name
    labels: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None

    @property
    def classes(self) -> int | None:
        """Return the number of classes of its head, or None without a head."""
        weights = (t for name, t in self.head.items() if name.endswith("weight") and is_classifier(name))
        return next(map(len, weights), None)


def map_modules(config: TokenConfig, naming: TransformersNaming, root: str | None = None) -> dict[str, RowSlice]:
    """Return the rows of our matrices that each of their modules is."""
    family = "beit" if is_beit(config) else choose_family(config)
    family = ast.ROOT.removesuffix(".") if ast.is_ast(config) else family
    rotary = isinstance(config.position, RotaryDINOv3)
    dino, new, gated = family.startswith("dinov2"), naming == "transformers 5", isinstance(config.block.mlp, SwiGLU)
    if new or rotary:
        theirs = {"msa.qkv": tuple(f"attention.{part}_proj" for part in "qkv"), "msa.out": ("attention.o_proj",)}
    else:
        parts = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
        theirs = {"msa.qkv": parts, "msa.out": ("attention.output.dense",)}
    if gated and (new or rotary):
        theirs |= {"mlp.fc1": ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc2": ("mlp.down_proj",)}
    elif gated:
        theirs |= {"mlp.fc1": ("mlp.weights_in",), "mlp.fc2": ("mlp.weights_out",)}
    elif rotary:
        theirs |= {"mlp.fc1": ("mlp.up_proj",), "mlp.fc2": ("mlp.down_proj",)}
    elif dino or new:
        theirs |= {"mlp.fc1": ("mlp.fc1",), "mlp.fc2": ("mlp.fc2",)}
    else:
        theirs |= {"mlp.fc1": ("intermediate.dense",), "mlp.fc2": ("output.dense",)}
    layers = (f"{family}." if root is None else root) + ("layers" if new and not dino else "encoder.layer")
    if rotary:
        layers = "model.layer" if new else "layer"
    slices: dict[str, RowSlice] = {}
    for layer in range(config.depth):
        for module, names in theirs.items():
            ours = f"blocks.{layer}.{module}"
            rows = len(build_meta_state(config)[f"{ours}.weight"]) // len(names)
            for index, name in enumerate(names):
                slices[f"{layers}.{layer}.{name}"] = RowSlice(ours, index * rows, rows)
    return slices


def map_heads(config: TokenConfig) -> dict[str, str]:
    """Return the names of their classifiers and of ours."""
    if ast.is_ast(config):
        return {"classifier.dense": "head.linear", "classifier.layernorm": "head.pre_logits"}
    if config.prefix.outputs == 2:
        return {"cls_classifier": "head.label", "distillation_classifier": "head.teacher"}
    return {"classifier": "head"}


# --- writing ---


def write_adapter(
    directory: str | Path,
    model: TokenModel,
    *,
    base: str | None = None,
    labels: Iterable[str] | None = None,
    preprocessing: Preprocessing | None = None,
    naming: TransformersNaming = "transformers 5",
) -> None:
    """Write the low-rank additions of a model, before they are merged, and its head to a new directory, atomically.

    `base` is the model that they are added to: a name on the Hub or a path.
    """
    added = dict(find_low_rank(model))
    if not added:
        raise ValueError("the model has no low-rank additions: tune it with lora and write them before merging")
    names = map_modules(model.config, naming)
    if strange := sorted(set(added) - {part.ours for part in names.values()}):
        raise ValueError(f"cannot write the adapter: transformers has no name for {strange[0]}")
    ranks = {len(low_rank.a) for low_rank in added.values()}
    if len(ranks) > 1:
        raise ValueError(f"all low-rank additions must have one rank, got {', '.join(map(str, sorted(ranks)))}")
    tensors: dict[str, Tensor] = {}
    for theirs, part in names.items():
        if part.ours in added:
            low_rank = added[part.ours]
            tensors[f"{PEFT_PREFIX}{theirs}.lora_A.weight"] = low_rank.a
            tensors[f"{PEFT_PREFIX}{theirs}.lora_B.weight"] = low_rank.b[part.start : part.start + part.rows]
    state = model.state_dict()
    heads = map_heads(model.config) if model.config.classes is not None else {}
    for theirs, ours in heads.items():
        for kind in ("weight", "bias"):
            tensors[f"{PEFT_PREFIX}{theirs}.{kind}"] = state[f"{ours}.{kind}"]
    # PEFT matches the ends of names: the part after the layer number
    ends = {theirs.split("layer", 1)[1].split(".", 2)[2] for theirs, part in names.items() if part.ours in added}
    metadata = {"labels": None if labels is None else list(labels), "preprocessing": to_json(preprocessing)}
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": max(ranks),
        "lora_alpha": max(ranks),  # a scale of 1
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "target_modules": sorted(ends),
        "modules_to_save": list(heads) or None,
    }
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": "pt", METADATA_KEY: json.dumps(metadata, ensure_ascii=False)}
    with stage_output(Path(directory)) as path:
        path.mkdir()
        safetensors.save_safetensors(path / WEIGHTS_FILE, stored, header)
        (path / CONFIG_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def find_low_rank(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Yield our modules with a low-rank addition, by name."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            for parametrization in module.parametrizations["weight"]:  # type: ignore[index]
                if isinstance(parametrization, LowRank):
                    yield name, parametrization


# --- reading ---


def read_adapter(directory: str | Path, config: ModelConfig) -> Adapter:
    """Return the changes of the adapter in a directory to a model of this configuration; raise if unsupported."""
    folder = Path(directory)
    if not isinstance(config, TokenConfig) or config.frames is not None:
        raise ValueError(
            f"{folder} is an adapter of a Vision Transformer of images: give the one that it was trained on"
        )
    config_path, path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if not config_path.is_file():
        raise ValueError(f"{folder} is no adapter: it has no {CONFIG_FILE}")
    if not path.is_file():
        raise ValueError(f"{folder} has no {WEIGHTS_FILE}: save the adapter with safe_serialization=True")
    settings = read_json(config_path)
    if not isinstance(settings, dict):
        raise checkpoint_error(config_path, "not a JSON object")
    check_settings(settings, config_path)
    with safetensors.SafetensorsFile(path) as source:
        tensors = {name: source.read(name) for name in source.specs}
        labels, preprocessing = _read_metadata(source, config)
    if not tensors:
        raise checkpoint_error(path, "it has no tensors to merge: save the adapter again")
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES:
            kind = safetensors.DTYPE_NAMES[tensor.dtype]
            raise checkpoint_error(path, f"{name} is stored as {kind}: save the adapter in float32")
        if not torch.isfinite(tensor).all():
            raise checkpoint_error(path, f"{name} has values that are not finite")
    pairs, head = _sort_tensors(tensors, config, path)
    return Adapter(_compute_deltas(pairs, settings, config, folder), head, labels, preprocessing)


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Raise if the settings compute anything other than W + scale · B A."""
    if settings.get("peft_type") != "LORA":
        raise checkpoint_error(path, f"unsupported adapter type {settings.get('peft_type')!r}: only LORA is supported")
    if settings.get("use_dora"):
        raise checkpoint_error(path, "DoRA is not supported, it also scales the weights: merge it with PEFT")
    if settings.get("bias", "none") != "none":
        raise checkpoint_error(path, f"trained biases are not supported (bias {settings['bias']!r}): merge with PEFT")
    if settings.get("init_lora_weights") not in SUPPORTED_INITS:
        init = settings["init_lora_weights"]
        raise checkpoint_error(path, f"initialisation {init!r} changes the base: convert the adapter with PEFT first")
    if not isinstance(patterns := settings.get("alpha_pattern") or {}, dict):
        raise checkpoint_error(path, f"alpha_pattern must be a JSON object, got {str(patterns)[:60]!r}")
    for name, value in settings.items():
        if name not in SUPPORTED_SETTINGS and value not in (None, False, "", [], {}):
            raise checkpoint_error(path, f"unsupported setting {name}={str(value)[:60]!r}: merge the adapter with PEFT")


def _read_metadata(source: safetensors.SafetensorsFile, config: TokenConfig) -> LabelsAndPreprocessing:
    """Return the labels and preprocessing of an adapter that vitrail wrote."""
    if METADATA_KEY not in source.metadata:
        return None, None
    metadata = parse_json(source.metadata[METADATA_KEY].encode(), source.path, "damaged metadata")
    if not isinstance(metadata, dict):
        raise source.error("damaged metadata")
    try:
        labels, pipeline = parse_labels_and_preprocessing({"labels": None, "preprocessing": None, **metadata}, config)
    except ValueError as error:
        raise source.error(str(error)) from None
    if labels is not None and len(set(labels)) != len(labels):
        twice = next(name for name in labels if labels.count(name) > 1)
        raise source.error(f"two labels are {twice[:60]!r}: each class needs its own name")
    return labels, pipeline


LoRAPairs = dict[str, tuple[RowSlice, dict[str, Tensor]]]


def _sort_tensors(tensors: State, config: TokenConfig, path: Path) -> tuple[LoRAPairs, State]:
    """Return A and B of each of their modules, and the head; raise for a tensor of another model."""
    known: dict[str, RowSlice] = {}
    for spelling in TRANSFORMERS_NAMINGS:
        for root in (None, ""):
            known |= map_modules(config, spelling, root)
    heads, head, pairs = map_heads(config), {}, LoRAPairs()
    for name, tensor in tensors.items():
        short = name.removeprefix(PEFT_PREFIX)
        module, _, kind = short.rpartition(".")
        if kind in ("weight", "bias") and module in heads:
            _insert_once(head, f"{heads[module]}.{kind}", tensor, name, path)
            continue
        module, _, matrix = module.rpartition(".")
        if matrix not in ("lora_A", "lora_B") or kind != "weight" or module not in known:
            raise checkpoint_error(path, f"this model has no {name}: is the adapter for another model?")
        _insert_once(pairs.setdefault(module, (known[module], {}))[1], matrix, tensor, name, path)
    _check_no_overlap(pairs, path)
    _check_head(head, heads, path)
    return pairs, head


def _insert_once(target: dict[str, Tensor], key: str, tensor: Tensor, name: str, path: Path) -> None:
    """Insert a tensor; raise if the key is taken."""
    if key in target:
        raise checkpoint_error(path, f"{name} is there twice, with and without {PEFT_PREFIX}: remove one")
    target[key] = tensor


def _check_no_overlap(pairs: LoRAPairs, path: Path) -> None:
    """Raise if two modules change the same rows: one module under two names."""
    rows = sorted((part.ours, part.start, part.rows, module) for module, (part, _) in pairs.items())
    for (ours, start, count, module), (other, begin, _, again) in pairwise(rows):
        if ours == other and begin < start + count:
            raise checkpoint_error(path, f"{module} and {again} are the same weights: remove one")


def _check_head(head: Mapping[str, Tensor], heads: Mapping[str, str], path: Path) -> None:
    """Raise if a head is incomplete or its weights and biases differ in their classes."""
    if not head:
        return
    if len(head) != 2 * len(heads):
        raise checkpoint_error(path, f"its head lacks {2 * len(heads) - len(head)} tensors: save the adapter again")
    shapes = {name: list(tensor.shape) for name, tensor in head.items()}
    layers = [ours for ours in heads.values() if is_classifier(f"{ours}.weight")]
    weights, biases = ([shapes[f"{ours}.{kind}"] for ours in layers] for kind in ("weight", "bias"))
    classes = weights[0][:1]
    fit = all(len(shape) == 2 and shape[:1] == classes for shape in weights) and biases == [classes] * len(biases)
    if classes in ([], [0]) or not fit:
        text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise checkpoint_error(path, f"the head must have weights [classes, width] and biases [classes], got {text}")


def _compute_deltas(pairs: LoRAPairs, settings: Mapping[str, Any], config: TokenConfig, folder: Path) -> State:
    """Return scale · B A in the rows of our matrices, in double precision."""
    path = folder / WEIGHTS_FILE
    deltas: dict[str, Tensor] = {}
    for module, (part, matrices) in pairs.items():
        if len(matrices) != 2:
            raise checkpoint_error(path, f"{module} has only {' and '.join(matrices)}: save the adapter again")
        a, b = matrices["lora_A"].double(), matrices["lora_B"].double()
        name = f"{part.ours}.weight"
        shape = build_meta_state(config)[name].shape
        if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != (part.rows, shape[1]) or a.shape[0] != b.shape[1]:
            found, matrix = f"A {list(a.shape)} and B {list(b.shape)}", f"{part.rows}×{shape[1]}"
            hint = "is the adapter for another size?"
            raise checkpoint_error(path, f"{module} has {found}; this model's matrix is {matrix}: {hint}")
        if not len(a):
            raise checkpoint_error(path, f"{module} has A and B of rank 0")
        whole = deltas.setdefault(name, torch.zeros(shape, dtype=torch.float64))
        whole[part.start : part.start + part.rows] += compute_scale(settings, module, len(a), folder) * (b @ a)
    return deltas


def compute_scale(settings: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """Return lora_alpha / r, or lora_alpha / √r with use_rslora; a pattern may give a module its own alpha."""
    alpha, path = settings.get("lora_alpha", 8), folder / CONFIG_FILE
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if not all(letter.isalnum() or letter in "._" for letter in pattern):
            raise checkpoint_error(path, f"alpha_pattern {pattern!r} is not the end of a name: merge it with PEFT")
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
            break
    if type(alpha) not in (int, float) or not abs(alpha) <= MAX_FLOAT:
        raise checkpoint_error(path, f"lora_alpha must be a number, got {str(alpha)[:40]!r}")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)

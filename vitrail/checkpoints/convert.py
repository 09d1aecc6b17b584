"""Conversion of a model to another project's format, verified by reading the result back."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitrail.checkpoints import TARGET_NAMES
from vitrail.checkpoints.artifact import CheckpointContract, save_artifact
from vitrail.checkpoints.checkpoint import ByteProgress, no_progress, open_and_detect
from vitrail.checkpoints.formats import (
    GELUS,
    Reasons,
    beit,
    clip,
    dinov3,
    eomt,
    eva,
    google,
    mvit,
    swin,
    timm,
    torchvision,
    transformers,
    vit_pytorch,
)
from vitrail.checkpoints.io import npz, safetensors
from vitrail.checkpoints.io import pytorch as pickled
from vitrail.checkpoints.keys import KeyTable, build_meta_state, export_state, format_names
from vitrail.checkpoints.load import KEEP, adapt_state, assemble_model, merge_adapter, resolve_path
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.things import find_things
from vitrail.models.adapt import with_key_bias, with_learned_positions, with_positions_for, with_projection_as_classes
from vitrail.models.base import ModelConfig, TokenConfig, refuse
from vitrail.models.mvit_config import MViTConfig
from vitrail.models.segmenter import SegmenterConfig
from vitrail.models.swin import SwinConfig
from vitrail.models.vit_config import POOLS, describe_resampling, parse_resampling
from vitrail.nn.block import ResPostNorm
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import MAP, Mean
from vitrail.nn.position import Learned1D, Relative, RelativeMLP, RotaryDINOv3, RotaryEVA02
from vitrail.utils.files import stage_output

SAMPLE_IMAGE = Path(__file__).parent / "photograph.jpg"
LOGIT_TOLERANCE = 1e-4  # relative to the largest logit, between the model read and the model written
State = dict[str, Tensor]


def write_weights_file(out: Path, theirs: Mapping[str, Tensor], contract: CheckpointContract) -> None:
    """Write one file of the kind that its extension names."""
    if out.suffix == ".safetensors":
        safetensors.save_safetensors(out, theirs, {"format": "pt"})
    else:
        pickled.save_pytorch(out, theirs)


def write_transformers_directory(
    out: Path, theirs: Mapping[str, Tensor], contract: CheckpointContract, more: Mapping[str, Any] | None = None
) -> None:
    """Write the weights and transformers' configuration files to a directory; `more` is added to config.json."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in theirs.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    out.mkdir()
    safetensors.save_safetensors(out / "model.safetensors", theirs, {"format": "pt"})
    config = contract.config
    if isinstance(config, SwinConfig):
        settings = swin.build_settings(config, dtype)
    elif isinstance(config, SegmenterConfig):
        settings = eomt.build_settings(config, dtype)
    elif isinstance(config, TokenConfig) and isinstance(config.position, RotaryDINOv3):
        settings = dinov3.build_settings(config, dtype)
    elif beit.is_beit(config):
        settings = beit.build_settings(config.require_tokens("transformers' format"), dtype)
    else:
        settings = transformers.build_settings(config.require_tokens("transformers' format"), dtype)
    files = transformers.build_files(
        settings | dict(more or {}), config.classes, contract.labels, contract.preprocessing
    )
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ConversionTarget:
    """A format to write: what it cannot express, its key table, and how its files are written."""

    title: str
    list_limits: Callable[[TokenConfig], Reasons]
    build_table: Callable[[Any], KeyTable]
    position_prefix: Callable[[TokenConfig], str] = lambda config: "outputs"  # the prefix tokens with positions
    suffixes: tuple[str, ...] = (".safetensors", ".pth", ".pt", ".bin")  # none for a directory
    write: Callable[[Path, Mapping[str, Tensor], CheckpointContract], None] = write_weights_file
    families: frozenset[str] = frozenset({"vit"})
    supports_swiglu: bool = False
    supports_projections: bool = True  # CLIP's projection without a bias
    list_unused_tensors: Callable[[Any], dict[str, tuple[int, ...]]] = lambda config: {}  # required, not used
    supports_fixed_positions: bool = False  # positions without a table
    resampling: Callable[[TokenConfig], str | None] = lambda config: (
        None
    )  # its code's rule; None if it has one image size
    restate_bias: Callable[[TokenConfig, State], tuple[TokenConfig, State]] = with_key_bias  # of q, k and v
    list_notes: Callable[[TokenConfig, State], list[str]] = (
        lambda config, state: []
    )  # where its code computes otherwise
    supports_res_post: bool = False  # norms at the end of each branch


@dataclass
class ConversionReport:
    """The result of a conversion and of its verification."""

    path: Path
    target: str
    tensors: int
    bytes: int
    largest_logit: float
    largest_difference: float
    notes: list[str] = field(default_factory=list)
    compared: str = "logits"  # or features, if a new head is still zero
    as_read_by_strangers: float | None = None  # the difference when read without the assumptions

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path), "bit_for_bit": True}


TARGETS: dict[str, ConversionTarget] = {
    "timm": ConversionTarget(
        "timm",
        timm.list_limits,
        timm.build_table,
        position_prefix=timm.choose_position_prefix,
        families=frozenset({"vit", "bit", "swin", "mvit"}),
        supports_swiglu=True,
        supports_projections=False,
        supports_res_post=True,
        resampling=lambda config: "timm",
    ),
    "hf": ConversionTarget(
        "transformers",
        transformers.list_limits,
        lambda config: transformers.map_vit(config, transformers.choose_family(config)),
        position_prefix=lambda config: "all" if transformers.choose_family(config) == "deit" else "outputs",
        suffixes=(),
        write=write_transformers_directory,
        families=frozenset({"vit", "swin", "segmenter"}),
        supports_swiglu=True,
        list_unused_tensors=transformers.list_unused_tensors,
        resampling=lambda config: transformers.choose_resampling(transformers.choose_family(config)),
    ),
    "big_vision": ConversionTarget(
        "Google's .npz",
        google.list_limits,
        lambda config: google.map_vit(config, google.choose_naming(config)),
        position_prefix=lambda config: getattr(config.position, "prefix", "none"),
        suffixes=(".npz",),
        write=lambda out, theirs, contract: npz.save_npz(out, theirs),
        supports_fixed_positions=True,
        resampling=lambda config: "google",
    ),
    "torchvision": ConversionTarget(
        "torchvision",
        torchvision.list_limits,
        torchvision.map_vit,
        families=frozenset({"vit", "swin"}),
        resampling=lambda config: "torchvision",
    ),
    "vit-pytorch": ConversionTarget(
        "vit-pytorch", vit_pytorch.list_limits, vit_pytorch.build_table, supports_fixed_positions=True
    ),
    "clip": ConversionTarget("CLIP", clip.list_limits, clip.map_vit, resampling=lambda config: "timm"),
    "dinov2": ConversionTarget(
        "DINOv2",
        timm.list_dinov2_limits,
        lambda config: timm.map_vit(config, timm.DINOV2),
        supports_swiglu=True,
        list_unused_tensors=lambda config: {"mask_token": (1, config.size.width)},
        resampling=lambda config: timm.choose_dinov2_resampling(config.prefix.registers),
    ),
}


def _make_dinov3_target(naming: dinov3.Naming, **more: Any) -> ConversionTarget:
    return ConversionTarget(
        naming.title,
        lambda config: dinov3.list_limits(config, naming),
        lambda config: dinov3.build_table(config, "", naming),
        supports_swiglu=True,
        list_notes=lambda config, state: dinov3.list_notes(config, state, naming),
        **{"restate_bias": lambda config, state: (config, state), **more},
    )


# The targets of models that a project has another class for.
DINOV3_TARGETS = {
    "timm": _make_dinov3_target(dinov3.TIMM),
    "hf": _make_dinov3_target(
        dinov3.TRANSFORMERS,
        suffixes=(),
        write=write_transformers_directory,
        list_unused_tensors=lambda config: {dinov3.TRANSFORMERS.tokens[2]: (1, 1, config.size.width)},
    ),
    "dinov3": _make_dinov3_target(
        dinov3.META,
        restate_bias=dinov3.with_bias,
        list_unused_tensors=lambda config: {dinov3.META.tokens[2]: (1, config.size.width)},
    ),
}
EVA_TARGET = ConversionTarget(
    "timm's EVA",
    eva.list_limits,
    eva.build_table,
    supports_swiglu=True,
    resampling=lambda config: "timm",
    restate_bias=lambda config, state: (config, state),
)
TARGETS["dinov3"] = DINOV3_TARGETS["dinov3"]
assert ("vitrail", *TARGETS) == TARGET_NAMES


def _make_beit_target(naming: beit.Naming, **more: Any) -> ConversionTarget:
    return ConversionTarget(
        naming.title,
        lambda config: beit.list_limits(config, naming),
        lambda config: beit.build_target_table(config, naming),
        resampling=lambda config: (
            naming.resampling if isinstance(config.position, Relative) else naming.absolute_resampling
        ),
        restate_bias=lambda config, state: (config, state),
        **more,
    )


# The targets of models that a project has another class for.
BEIT_TARGETS = {
    "timm": _make_beit_target(beit.TIMM, supports_projections=False),
    "hf": _make_beit_target(beit.TRANSFORMERS, suffixes=(), write=write_transformers_directory),
}


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    allow_missing: Iterable[str] = (),
    classes: int | None = KEEP,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    labels: tuple[str, ...] | None = None,
    stuff: str | None = None,
    licence: str | None = None,
    adapter: str | Path | None = None,
    image_path: Path = SAMPLE_IMAGE,
    progress: ByteProgress = no_progress,
) -> ConversionReport:
    """Convert a checkpoint of any known format to one of `TARGET_NAMES`, then reload and compare it.

    `adapter` is a PEFT directory whose low-rank additions are merged first. `stuff` names the classes without objects of a
    segmentation model (`find_things`); vitrail's own format alone stores them.
    """
    if to not in TARGET_NAMES:
        raise ValueError(f"unknown format {to!r}: use {', '.join(TARGET_NAMES)}")
    if stuff is not None and to != "vitrail":
        raise ValueError(f"stuff= needs to='vitrail': the format {to} does not store it")
    out = Path(out)
    with open_and_detect(resolve_path(source), assume, take) as checkpoint:
        # from shapes only, so that an unsupported model is refused before its tensors are read
        shapes = dict(build_meta_state(checkpoint.contract.config))
        changed, _ = adapt_state(checkpoint.contract, shapes, classes, image_size, channels)
        check_expressible(to, changed.config, changed.preprocessing)
        check_output_name(to, out)
        state = checkpoint.read_state(allow_missing, progress)
        contract = checkpoint.contract
    notes = []
    if checkpoint.random_tensors:
        notes.append(f"random values, allowed to be missing: {', '.join(checkpoint.random_tensors)}")
        contract = replace(contract, card=contract.card | {"random": checkpoint.random_tensors})
    if adapter is not None:
        contract, state = merge_adapter(contract, state, adapter)
        notes.append(f"low-rank additions of {adapter} merged")
    contract, state = adapt_state(contract, state, classes, image_size, channels)
    if labels is not None:
        if len(labels) != contract.config.classes:
            raise ValueError(f"{len(labels)} labels for {contract.config.classes} classes: give one per class")
        contract = replace(contract, labels=labels)
    if stuff is not None:
        contract = replace(contract, card=contract.card | {"things": name_things(contract, stuff)})
    if licence is not None:
        contract = replace(contract, card=contract.card | {"licence": licence})
    return write_and_verify(contract, state, out, to, image_path, notes)


def name_things(contract: CheckpointContract, stuff: str) -> list[bool]:
    """Return which classes of a segmentation model have objects, all but those of `stuff`."""
    if contract.config.output_kind != "masks":
        raise refuse(contract.config, "stuff=", "leave it out")
    return list(find_things(stuff, contract.labels or tuple(map(str, range(contract.config.classes or 0)))))


def get_target(to: str, config: ModelConfig) -> ConversionTarget:
    """Return the target of a format for this kind of model."""
    if not isinstance(config, TokenConfig):
        return TARGETS[to]
    if isinstance(config.position, RotaryDINOv3):
        return DINOV3_TARGETS.get(to, TARGETS[to])
    if beit.is_beit(config):
        return BEIT_TARGETS.get(to, TARGETS[to])
    is_eva = isinstance(config.position, RotaryEVA02) or not any(eva.list_limits(config).values())
    return EVA_TARGET if to == "timm" and is_eva else TARGETS[to]


def check_output_name(to: str, out: Path) -> None:
    """Raise if the output name does not fit the format."""
    suffixes = (".safetensors",) if to == "vitrail" else TARGETS[to].suffixes
    if suffixes and out.suffix not in suffixes:
        raise ValueError(f"{out}: a file for {to} must be named {' or '.join('*' + suffix for suffix in suffixes)}")
    if not suffixes and out.suffix in (".safetensors", ".bin", ".pth", ".npz"):
        raise ValueError(f"{out}: {to} writes several files, give the name of a new directory")


def check_expressible(to: str, config: ModelConfig, pipeline: Preprocessing | None = None) -> None:
    """Raise with the reasons if the format cannot express the model."""
    if to == "vitrail":
        return
    if to == "hf" and pipeline is not None:
        transformers.build_processor_config(pipeline)
    target = get_target(to, config)
    if config.family not in target.families:
        raise refuse(config, f"the format of {target.title}", "use --to vitrail")
    if not isinstance(config, TokenConfig):
        build_target_table(to, config)
        return
    config, _ = _restate(target, config, None)
    limits = {**list_vitrail_only(config), **target.list_limits(config)}
    is_res_post = isinstance(config.block, ResPostNorm)
    limits["its norms stand before attention and MLP"] = is_res_post and not target.supports_res_post
    limits["it has no SwiGLU"] = isinstance(config.block.mlp, SwiGLU) and not target.supports_swiglu
    if reasons := [reason for reason, holds in limits.items() if holds]:
        raise ValueError(f"{target.title} cannot express this model: {'; '.join(reasons)}")
    target.build_table(config)


def build_target_table(to: str, config: ModelConfig) -> KeyTable:
    """Return the key table of a file to write."""
    if isinstance(config, SwinConfig):
        return swin.build_table(config, swin.TARGETS[to])
    if isinstance(config, MViTConfig):
        return mvit.build_table(config)
    if isinstance(config, SegmenterConfig):
        return eomt.map_eomt(config)
    return get_target(to, config).build_table(config)


def restate_config(to: str, config: ModelConfig) -> ModelConfig:
    """Return the configuration of the same model as a format expresses it."""
    if to == "vitrail" or not isinstance(config, TokenConfig):
        return config
    return _restate(get_target(to, config), config, None)[0]


def list_vitrail_only(config: TokenConfig) -> Reasons:
    """Return why no other format can express a model."""
    mlp, pool = config.block.mlp, config.pool
    return {
        f"it has no {type(mlp).__name__}": not isinstance(mlp, SwiGLU) and mlp not in GELUS.values(),
        "its attention pooling has the activation of its blocks": isinstance(pool, MAP) and pool.mlp != mlp,
        "its distilled models have their two heads": config.classes is None and config.prefix.outputs == 2,
    }


def _restate(target: ConversionTarget, config: TokenConfig, state: State | None) -> tuple[TokenConfig, State]:
    """Return the same model as the format expresses it: positions as a table, for the prefix tokens it covers."""
    if state is None:
        with torch.device("meta"):
            return _restate(target, config, dict(build_meta_state(config)))
    config, state = target.restate_bias(config, state)
    if not target.supports_fixed_positions:
        config, state = with_learned_positions(config, state)
    if not target.supports_projections:
        config, state = with_projection_as_classes(config, state)
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        config, state = with_positions_for(config, state, target.position_prefix(config))
    return config, state


def write_and_verify(
    contract: CheckpointContract,
    state: State,
    out: Path,
    to: str,
    image_path: Path = SAMPLE_IMAGE,
    notes: list[str] | None = None,
) -> ConversionReport:
    """Write a model in a format, read it back, and compare every tensor bit for bit and the logits on a photograph.

    Only a verified file is moved to `out`.
    """
    check_expressible(to, contract.config, contract.preprocessing)
    check_output_name(to, out)
    notes, assume = list(notes or []), {}
    image = prepare_image(image_path, contract)
    stated, written = contract, state  # the model as the format expresses it
    with stage_output(out) as path:
        if to == "vitrail":
            save_artifact(path, state, contract)
        else:
            target = get_target(to, contract.config)
            if isinstance(contract.config, TokenConfig):
                config, written = _restate(target, contract.config, state)
                notes += _describe_restatements(contract.config, config)
                notes += compare_resampling(contract.config, target.resampling(config), target.title)
                notes += target.list_notes(config, written)
                stated = replace(contract, config=config)
            theirs = export_state(build_target_table(to, stated.config), written)
            if isinstance(stated.config, TokenConfig):
                dtype, unused = next(iter(theirs.values())).dtype, target.list_unused_tensors(stated.config)
                theirs |= {name: torch.zeros(shape, dtype=dtype) for name, shape in unused.items()}
            elif isinstance(stated.config, SegmenterConfig):
                unused = eomt.list_unused_tensors(stated.config)
                theirs |= {name: torch.zeros(shape) for name, shape in unused.items()}
            elif isinstance(stated.config, SwinConfig):
                notes += swin.compare_shift(stated.config, swin.TARGETS[to])
            target.write(path, theirs, stated)
            assume = collect_assumptions(stated.config)
        with open_and_detect(path, assume) as again:
            back, read, count = again.read_state(), again.contract, len(again.source.specs)
        check_identical(path, written, back)
        if to == "vitrail" and read != contract:
            raise ValueError("the written file has another configuration, labels or pipeline: please report this bug")
        expected, compared = compute_outputs(contract, state, image, "logits"), "logits"
        if not expected.any():  # a new head is zero: compare its input instead
            expected, compared = compute_outputs(contract, state, image, "features"), "features"
        read = replace(stated, config=_copy_training_fields(read.config, stated.config))
        outputs = compute_outputs(read, back, image, compared)
        report = replace(report_conversion(out, to, back, expected, outputs, notes, compared), tensors=count)
        if to != "vitrail":
            _compare_without_assumptions(report, path, stated, expected, image)
    return report


def report_conversion(
    out: Path, to: str, state: State, expected: Tensor, outputs: Tensor, notes: list[str], compared: str
) -> ConversionReport:
    """Return the report on a file that was read back; raise if the model's outputs differ."""
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    largest, difference = float(expected.abs().max()), float((outputs - expected).abs().max())
    if not difference <= LOGIT_TOLERANCE * max(1.0, largest):
        raise ValueError(f"not written: read back, the {compared} differ by {difference:.3g} of {largest:.3g}")
    return ConversionReport(out, to, len(state), nbytes, largest, difference, notes, compared)


def _copy_training_fields(read: ModelConfig, wanted: ModelConfig) -> ModelConfig:
    """Return the configuration that was read, with the training fields that no file stores."""
    names = ("dropout", "stochastic_depth", "init")
    if isinstance(read, SegmenterConfig) and isinstance(wanted, SegmenterConfig):
        return replace(read, backbone=_copy_training_fields(read.backbone, wanted.backbone))
    if isinstance(read, TokenConfig) and isinstance(wanted, TokenConfig):
        return replace(read, **{name: getattr(wanted, name) for name in names})
    if isinstance(read, SwinConfig | MViTConfig) and isinstance(wanted, SwinConfig | MViTConfig):
        return replace(read, **{name: getattr(wanted, name) for name in (*names, "attention_dropout")})
    return read


def _describe_restatements(before: TokenConfig, after: TokenConfig) -> list[str]:
    notes = []
    if type(before.position) is not type(after.position):
        notes.append("fixed positions are written as a table")
    elif before.position != after.position and before.prefix.count:
        notes.append("positions of the prefix tokens are added to the tokens, or zero if there were none")
    if before.block.qkv_bias and before.block.key_bias != after.block.key_bias:
        notes.append("the bias of q, k and v has zeros for the keys, which have none here")
    if before.block.qkv_bias != after.block.qkv_bias:
        notes.append("q and v get a bias of zeros, which they do not have here")
    if before.head != after.head:
        notes.append(f"the projection is written as a head of {after.classes} classes with zero bias")
    return notes


def compare_resampling(config: TokenConfig, theirs: str | None, project: str) -> list[str]:
    """Return a note if a project resamples positions by another rule than the model; None: it has one image size."""
    ours = config.resampling
    if ours is None or theirs is None or parse_resampling(theirs) == ours:
        return []
    words = f"{describe_resampling(ours)} here, {describe_resampling(parse_resampling(theirs))} in {project}"
    return [f"positions are resampled to other sizes by another rule: {words}"]


def collect_assumptions(config: ModelConfig) -> dict[str, Any]:
    """Return the facts of a model that tensors do not determine, as assumptions for reading it back."""
    if isinstance(config, SegmenterConfig):
        return collect_assumptions(config.backbone)
    facts: dict[str, Any] = {"size": config.image_size}
    if isinstance(config, TokenConfig):
        facts |= {"heads": config.size.heads, "eps": config.eps, "channels": config.channels}
        gelu = next((name for name, slot in GELUS.items() if slot == config.block.mlp), None)
        pool = next((name for name in ("class", "mean") if POOLS[name] == config.pool and config.prefix.outputs), None)
        relative, is_res_post = (
            isinstance(config.position, Relative | RelativeMLP),
            isinstance(config.block, ResPostNorm),
        )
        block = "res-post" if is_res_post else "pre" if relative else None
        choices = {"gelu": gelu, "pool": pool, "resampling": config.resampling, "block": block}
        if isinstance(config.position, RotaryDINOv3):
            choices["periods"] = config.position.precision
        facts |= {name: value for name, value in choices.items() if value}
    elif isinstance(config, SwinConfig):
        facts |= {"eps": config.eps, "window": config.windows[0]}
    elif isinstance(config, MViTConfig):
        facts["eps"] = config.eps
    return facts


def check_identical(path: Path, written: State, back: State) -> None:
    """Raise unless every tensor was read back with the same bytes."""
    same = {name for name in written if name in back and is_bit_identical(written[name], back[name])}
    if differ := sorted({*written, *back} - same):
        raise ValueError(f"{path.name}: {len(differ)} tensors differ when read back: {format_names(differ)}")


def is_bit_identical(one: Tensor, other: Tensor) -> bool:
    """Return whether shape, dtype and bytes are the same: -0 is not 0, and NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def _compare_without_assumptions(
    report: ConversionReport, out: Path, contract: CheckpointContract, expected: Tensor, image: Tensor
) -> None:
    """Note the facts that a reader without assumptions misses, and how much they change the logits."""
    try:
        with open_and_detect(out) as checkpoint:
            config, pipeline = checkpoint.contract.config, checkpoint.contract.preprocessing
            missed = _list_unrecorded(config, contract.config)
            if missed:
                report.notes.append(f"the file does not record {', '.join(missed)}: give it when loading")
            if missed and report.compared != "features":
                logits = compute_outputs(checkpoint.contract, checkpoint.read_state(), image, "logits")
                report.as_read_by_strangers = float((logits - expected).abs().max())
    except ValueError as error:
        report.notes.append(f"it cannot be read without assumptions: {str(error).split(': ', 1)[-1]}")
        return
    if contract.preprocessing is not None and pipeline != contract.preprocessing:
        other = "the file does not record all of it"
        if report.target == "hf" and pipeline is not None:
            names = [f.name for f in fields(pipeline)]
            names = [name for name in names if getattr(pipeline, name) != getattr(contract.preprocessing, name)]
            other = "transformers differs: " + ", ".join(f"{name} {getattr(pipeline, name)}" for name in names)
        report.notes.append(f"preprocessing is {contract.preprocessing.describe()}; {other}")
    if contract.labels is not None and report.target != "hf":
        report.notes.append(f"the format does not store labels: {len(contract.labels)} labels are left out")


def _list_unrecorded(read: ModelConfig, wanted: ModelConfig) -> list[str]:
    if isinstance(read, SegmenterConfig) and isinstance(wanted, SegmenterConfig):
        return _list_unrecorded(read.backbone, wanted.backbone)
    if not isinstance(read, TokenConfig) or not isinstance(wanted, TokenConfig):
        return []
    facts = {
        f"{wanted.size.heads} heads": read.size == wanted.size,
        f"{type(wanted.block.mlp).__name__}": read.block.mlp == wanted.block.mlp,
        f"eps {wanted.eps:g}": read.eps == wanted.eps,
        f"{'residual post-norm' if isinstance(wanted.block, ResPostNorm) else 'pre-norm'} layers": type(read.block)
        is type(wanted.block),
        f"{'mean' if isinstance(wanted.pool, Mean) else 'class token'} pooling": isinstance(read.pool, Mean)
        == isinstance(wanted.pool, Mean),
        f"{getattr(wanted.position, 'precision', '')} periods": read.position == wanted.position
        or not isinstance(wanted.position, RotaryDINOv3),
        f"the image size {wanted.image_size[0]}×{wanted.image_size[1]}": read.image_size == wanted.image_size,
    }
    return [fact for fact, same in facts.items() if not same]


def prepare_image(image_path: Path, contract: CheckpointContract) -> Tensor:
    """Return the photograph preprocessed for the model, [1, C, H, W]."""
    config = contract.config
    pipeline = contract.preprocessing or Preprocessing(config.image_size, config.image_size)
    if pipeline.channels not in (1, 3, 4):
        pipeline = pipeline.with_channels(3)
    try:
        with Image.open(image_path) as image:
            x = pipeline(image)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{image_path}: {error}") from None
    return x.repeat(-(-config.channels // x.shape[0]), 1, 1)[: config.channels].unsqueeze(0)


@torch.inference_mode()
def compute_outputs(contract: CheckpointContract, state: State, image: Tensor, kind: str) -> Tensor:
    """Return the logits or the features, the input of the classifier, of a model for an image."""
    model = assemble_model(contract, state, torch.float32)
    return model(image) if kind == "logits" else model.compute_pre_logits(image)

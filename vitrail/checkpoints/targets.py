"""Formats of other projects as targets of a conversion: what each can express, its key table, and how its files are written."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints import TARGET_NAMES
from vitrail.checkpoints.artifact import CheckpointContract
from vitrail.checkpoints.formats import (
    GELUS,
    Reasons,
    ast,
    beit,
    clip,
    dinov3,
    eomt,
    eva,
    google,
    mvit,
    swin,
    timesformer,
    timm,
    torchvision,
    towers,
    transformers,
    videomae,
    vit_pytorch,
    vivit,
)
from vitrail.checkpoints.io import npz, safetensors
from vitrail.checkpoints.io import pytorch as pickled
from vitrail.checkpoints.keys import KeyTable, build_meta_state
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.adapt import with_key_bias, with_learned_positions, with_positions_for, with_projection_as_classes
from vitrail.models.base import ModelConfig, TokenConfig, refuse
from vitrail.models.mvit_config import MViTConfig
from vitrail.models.segmenter import SegmenterConfig
from vitrail.models.swin import SwinConfig
from vitrail.models.two_towers import TwoTowersConfig
from vitrail.nn.block import ResPostNorm
from vitrail.nn.head import Similarity
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import MAP
from vitrail.nn.position import Factorised, Learned1D, Relative, RotaryDINOv3, RotaryEVA02, Sinusoid1D

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
    elif isinstance(config, TwoTowersConfig):
        settings = towers.build_settings(config, dtype)
    elif isinstance(config, TokenConfig) and isinstance(config.position, RotaryDINOv3):
        settings = dinov3.build_settings(config, dtype)
    elif config.frames is not None:
        settings = choose_clip_project(config).build_settings(config.require_tokens("transformers", clips=True), dtype)
    elif ast.is_ast(config):
        settings = ast.build_settings(config.require_tokens("transformers' format"), dtype)
    elif beit.is_beit(config):
        settings = beit.build_settings(config.require_tokens("transformers' format"), dtype)
    else:
        settings = transformers.build_settings(config.require_tokens("transformers' format"), dtype)
    files = transformers.build_files(settings | dict(more or {}), config.classes, contract.labels)
    if contract.preprocessing is not None:
        files["preprocessor_config.json"] = build_preprocessor_config(contract.preprocessing)
    if config.frames is not None and "preprocessor_config.json" in files:
        files["preprocessor_config.json"]["image_processor_type"] = "VideoMAEImageProcessor"
    if contract.tokenizer is not None:
        files |= towers.build_tokenizer_files(contract.tokenizer)
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_preprocessor_config(pipeline: Preprocessing) -> dict[str, Any]:
    """Return preprocessor_config.json: of an image processor, or of a feature extractor of sounds."""
    return transformers.build_processor_config(pipeline) if pipeline.sound is None else ast.build_extractor(pipeline)


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
        families=frozenset({"vit", "swin", "segmenter", "two_towers"}),
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
        families=frozenset({"vit", "swin", "mvit"}),
        resampling=lambda config: "torchvision",
    ),
    "vit-pytorch": ConversionTarget(
        "vit-pytorch", vit_pytorch.list_limits, vit_pytorch.build_table, supports_fixed_positions=True
    ),
    "clip": ConversionTarget(
        "CLIP",
        clip.list_limits,
        clip.map_vit,
        resampling=lambda config: "timm",
        families=frozenset({"vit", "two_towers"}),
    ),
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
AST_TARGET = ConversionTarget(
    ast.TITLE, ast.list_limits, ast.build_table, suffixes=(), write=write_transformers_directory
)
TARGETS["dinov3"] = DINOV3_TARGETS["dinov3"]


def _make_clip_target(
    project: Any, naming: videomae.Naming | timesformer.Naming, root: str | None = None, **more: Any
) -> ConversionTarget:
    return ConversionTarget(
        naming.title,
        lambda config: project.list_limits(config, naming),
        lambda config: project.build_table(config, root, naming),
        supports_fixed_positions=True,
        **{"restate_bias": lambda config, state: (config, state), **more},
    )


# The targets of models of clips.
DIRECTORY: dict[str, Any] = {"suffixes": (), "write": write_transformers_directory}
VIDEOMAE_TARGETS = {
    "hf": _make_clip_target(
        videomae,
        videomae.TRANSFORMERS,
        list_notes=lambda config, state: videomae.list_notes(config, videomae.TRANSFORMERS),
        **DIRECTORY,
    ),
    "videomae": _make_clip_target(
        videomae,
        videomae.RELEASE,
        list_notes=lambda config, state: videomae.list_notes(config, videomae.RELEASE),
    ),
}
TIMESFORMER_TARGETS = {
    "hf": _make_clip_target(
        timesformer,
        timesformer.TRANSFORMERS,
        resampling=lambda config: "timesformer",
        restate_bias=with_key_bias,
        **DIRECTORY,
    ),
    "timesformer": _make_clip_target(
        timesformer,
        timesformer.RELEASE,
        "",
        resampling=lambda config: "timesformer",
        restate_bias=with_key_bias,
    ),
}
VIVIT_TARGETS = {
    "hf": ConversionTarget(
        vivit.TITLE, vivit.list_limits, vivit.build_table, resampling=lambda config: "transformers", **DIRECTORY
    )
}
TARGETS |= {"videomae": VIDEOMAE_TARGETS["videomae"], "timesformer": TIMESFORMER_TARGETS["timesformer"]}


def choose_clip_project(config: ModelConfig) -> Any:
    """Return the module of the project whose code computes a model of clips, by its positions."""
    position = getattr(config, "position", None)
    return timesformer if isinstance(position, Factorised) else videomae if position == Sinusoid1D() else vivit


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


def get_target(to: str, config: ModelConfig) -> ConversionTarget:
    """Return the target of a format for this kind of model."""
    if not isinstance(config, TokenConfig):
        return TARGETS[to]
    if config.frames is not None:
        projects = {timesformer: TIMESFORMER_TARGETS, videomae: VIDEOMAE_TARGETS, vivit: VIVIT_TARGETS}
        return projects[choose_clip_project(config)].get(to, TARGETS[to])
    if isinstance(config.position, RotaryDINOv3):
        return DINOV3_TARGETS.get(to, TARGETS[to])
    if beit.is_beit(config):
        return BEIT_TARGETS.get(to, TARGETS[to])
    if ast.is_ast(config):
        return AST_TARGET if to == "hf" else TARGETS[to]
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
        build_preprocessor_config(pipeline)
    target = get_target(to, config)
    if config.family not in target.families:
        raise refuse(config, f"the format of {target.title}", "use --to vitrail")
    if not isinstance(config, TokenConfig):
        build_target_table(to, config)
        return
    config, _ = restate_model(target, config, None)
    limits = {**list_vitrail_only(config, target), **target.list_limits(config)}
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
        return mvit.TARGETS[to](config)
    if isinstance(config, SegmenterConfig):
        return eomt.map_eomt(config)
    if isinstance(config, TwoTowersConfig):
        return towers.build_target_table(to, config)
    return get_target(to, config).build_table(config)


def restate_config(to: str, config: ModelConfig) -> ModelConfig:
    """Return the configuration of the same model as a format expresses it."""
    if to == "vitrail" or not isinstance(config, TokenConfig):
        return config
    return restate_model(get_target(to, config), config, None)[0]


def list_vitrail_only(config: TokenConfig, target: ConversionTarget) -> Reasons:
    """Return why no other format can express a model, or only one."""
    mlp, pool = config.block.mlp, config.pool
    return {
        f"it has no {type(mlp).__name__}": not isinstance(mlp, SwiGLU) and mlp not in GELUS.values(),
        "its attention pooling has the activation of its blocks": isinstance(pool, MAP) and pool.mlp != mlp,
        "it has no classifier of unit vectors": isinstance(config.head, Similarity),
        "its distilled models have their two heads": config.classes is None
        and config.prefix.outputs == 2
        and not ast.is_ast(config),
        "it has no mean of the output tokens": ast.is_ast(config) and target is not AST_TARGET,
    }


def restate_model(target: ConversionTarget, config: TokenConfig, state: State | None) -> tuple[TokenConfig, State]:
    """Return the same model as the format expresses it: positions as a table, for the prefix tokens it covers."""
    if state is None:
        with torch.device("meta"):
            return restate_model(target, config, dict(build_meta_state(config)))
    config, state = target.restate_bias(config, state)
    if not target.supports_fixed_positions:
        config, state = with_learned_positions(config, state)
    if not target.supports_projections:
        config, state = with_projection_as_classes(config, state)
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        config, state = with_positions_for(config, state, target.position_prefix(config))
    return config, state

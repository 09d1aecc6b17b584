"""Key tables of timm: `vit_*`, `deit_*`, `vit_relpos_*`, hybrids and `resnetv2_*_bit`; and of the DeiT, MAE, DINO and DINOv2
releases, which use timm's names with a few exceptions."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vitrail.checkpoints.architecture import (
    FILE_NAME_KEY,
    Assumptions,
    CheckpointFormat,
    FormatMismatchError,
    TensorNames,
    get_patch_size,
    is_square,
    split_position_rows,
)
from vitrail.checkpoints.keys import (
    IgnoredKeys,
    KeyMapping,
    KeyTable,
    Tensors,
    TensorTransform,
    add_root,
    check_complete,
    concatenate,
    map_key,
    map_layer,
    reshape,
)
from vitrail.data.preprocessing import CLIP_STATS, IMAGENET_STATS, INCEPTION_STATS, NormalisationStats, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.sizes import Size
from vitrail.models.vit_config import POOLS, ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import MAP, ClassToken, Mean
from vitrail.nn.position import Learned1D, Relative


@dataclass(frozen=True)
class TimmNaming:
    """The names that differ in releases with timm's names."""

    title: str = "timm"
    scale: str = "ls{}.gamma"
    registers: str = "reg_token"
    gated: tuple[str, str] = ("fc1", "fc2")


TIMM = TimmNaming()
DEIT3 = TimmNaming("DeiT III", scale="gamma_{}")
DINOV2 = TimmNaming("DINOv2", registers="register_tokens", gated=("w12", "w3"))


def map_vit(config: TokenConfig, naming: TimmNaming = TIMM) -> KeyTable:
    """Return the table of `VisionTransformer`, its distilled and relative-position variants, and hybrids."""
    size, prefix = config.size, config.prefix
    table: KeyTable = [*_map_embed(config)]
    if prefix.outputs == 1:
        table.append(map_key("prefix.outputs", "cls_token"))
    elif prefix.outputs == 2:
        table.append(map_key("prefix.outputs", ("cls_token", "dist_token"), concatenate(1, [1, 1])))
    if prefix.registers:
        table.append(map_key("prefix.registers", naming.registers))
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        table.append(map_key("position.weight", "pos_embed"))
    elif isinstance(config.position, Relative):
        table.append(_map_relative(config))
    if config.token_norm:
        table += map_layer("token_norm", "norm_pre")
    into, out = naming.gated if isinstance(config.block.mlp, SwiGLU) else ("fc1", "fc2")
    for layer in range(size.depth):
        block = f"blocks.{layer}"
        table += map_layer(f"{block}.norm1", f"{block}.norm1")
        table.append(map_key(f"{block}.msa.qkv.weight", f"{block}.attn.qkv.weight"))
        if config.block.qkv_bias:
            table.append(map_key(f"{block}.msa.qkv.bias", f"{block}.attn.qkv.bias"))
        table += map_layer(f"{block}.msa.out", f"{block}.attn.proj")
        if config.block.qk_norm:
            table += map_layer(f"{block}.msa.q_norm", f"{block}.attn.q_norm")
            table += map_layer(f"{block}.msa.k_norm", f"{block}.attn.k_norm")
        table += map_layer(f"{block}.norm2", f"{block}.norm2")
        table += map_layer(f"{block}.mlp.fc1", f"{block}.mlp.{into}") + map_layer(
            f"{block}.mlp.fc2", f"{block}.mlp.{out}"
        )
        if config.block.layer_scale is not None:
            for branch in (1, 2):
                table.append(map_key(f"{block}.branch{branch}.scale.weight", f"{block}.{naming.scale.format(branch)}"))
    norm_after = isinstance(config.pool, Mean) and config.pool.norm_after
    table += map_layer("pool.norm", "fc_norm" if norm_after else "norm")
    if isinstance(config.pool, MAP):
        table.append(map_key("pool.probe", "attn_pool.latent"))
        table += (
            map_layer("pool.q", "attn_pool.q")
            + map_layer("pool.kv", "attn_pool.kv")
            + map_layer("pool.out", "attn_pool.proj")
        )
        table += map_layer("pool.norm2", "attn_pool.norm")
        table += map_layer("pool.mlp.fc1", "attn_pool.mlp.fc1") + map_layer("pool.mlp.fc2", "attn_pool.mlp.fc2")
    table += _map_head(config)
    return check_complete(naming.title, table, config)


def _map_head(config: TokenConfig) -> KeyTable:
    if isinstance(config.head, PreLogits):
        linear = map_layer("head.linear", "head") if config.classes is not None else []
        return [*map_layer("head.pre_logits", "pre_logits.fc"), *linear]
    if config.classes is None:
        return []
    if config.prefix.outputs == 2:
        return [*map_layer("head.label", "head"), *map_layer("head.teacher", "head_dist")]
    return [*map_layer("head", "head")]


def _map_embed(config: TokenConfig) -> KeyTable:
    embed, width = config.embed, config.size.width
    if isinstance(embed, Patches):
        shape = (width, config.channels, embed.patch, embed.patch)
        weight = map_key("embed.projection.weight", "patch_embed.proj.weight", reshape(shape, (width, -1)))
        return [weight, map_key("embed.projection.bias", "patch_embed.proj.bias")] if embed.bias else [weight]
    if not isinstance(embed, Hybrid):
        raise ValueError(f"timm cannot express this model: it has no {type(embed).__name__}")
    channels = 64 if not embed.stages else 256 * 2 ** (len(embed.stages) - 1)
    shape = (width, channels, embed.patch, embed.patch)
    backbone = "patch_embed.backbone"
    stem = f"{backbone}.stem" if embed.stages else backbone
    table: KeyTable = [
        map_key("embed.trunk.root.weight", f"{stem}.conv.weight"),
        *map_layer("embed.trunk.norm", f"{stem}.norm"),
        map_key("embed.projection.weight", "patch_embed.proj.weight", reshape(shape, (width, -1))),
        map_key("embed.projection.bias", "patch_embed.proj.bias"),
    ]
    for stage, depth in enumerate(embed.stages):
        for block in range(depth):
            ours, theirs = f"embed.trunk.stages.{stage}.{block}", f"{backbone}.stages.{stage}.blocks.{block}"
            table += _map_bottleneck(ours, theirs, block == 0)
            if block == 0:
                table += map_layer(f"{ours}.shortcut_norm", f"{theirs}.downsample.norm")
    return table


def _map_bottleneck(ours: str, theirs: str, project: bool) -> KeyTable:
    table: KeyTable = []
    for index in (1, 2, 3):
        table.append(map_key(f"{ours}.conv{index}.weight", f"{theirs}.conv{index}.weight"))
        table += map_layer(f"{ours}.norm{index}", f"{theirs}.norm{index}")
    if project:
        table.append(map_key(f"{ours}.shortcut.weight", f"{theirs}.downsample.conv.weight"))
    return table


def _map_relative(config: TokenConfig) -> KeyMapping:
    """Map our [tables, H, 2h-1, 2w-1] and [tables, H, 3] to their flat [offsets (+3), H], per layer or shared."""
    (h, w), heads = config.shape.grid, config.size.heads
    offsets = (2 * h - 1) * (2 * w - 1)
    shared = isinstance(config.position, Relative) and config.position.at == "shared"
    name = "relative_position_bias_table"
    theirs = (
        (f"shared_rel_pos.{name}",)
        if shared
        else tuple(f"blocks.{layer}.attn.rel_pos.{name}" for layer in range(config.size.depth))
    )

    def read(tables: Tensors) -> Tensors:
        stacked = torch.stack(tables).transpose(1, 2)  # [tables, H, offsets (+3)]
        grids = stacked[..., :offsets].reshape(-1, heads, 2 * h - 1, 2 * w - 1)
        return [grids, stacked[..., offsets:].contiguous()] if config.prefix.count else [grids]

    def write(ours: Tensors) -> Tensors:
        stacked = torch.cat([ours[0].flatten(2), *ours[1:]], -1)
        return [table.contiguous() for table in stacked.transpose(1, 2).unbind()]

    ours = ("position.offsets", "position.prefix") if config.prefix.count else ("position.offsets",)
    return map_key(ours, theirs, TensorTransform(read, write))


def table_for(config: ModelConfig) -> KeyTable:
    """Return the key table of a model of any family that timm has."""
    if isinstance(config, BiTConfig):
        return map_bit(config)
    return map_vit(config.tokens_for("timm's format"))


def map_bit(config: BiTConfig) -> KeyTable:
    """Return the table of `resnetv2_*_bit`."""
    table: KeyTable = [map_key("root.weight", "stem.conv.weight"), *map_layer("norm", "norm")]
    for stage, depth in enumerate(config.stages):
        for block in range(depth):
            table += _map_bottleneck(f"stages.{stage}.{block}", f"stages.{stage}.blocks.{block}", block == 0)
    if config.classes is not None:
        channels = round(256 * 2 ** (len(config.stages) - 1) * config.factor)
        shape = (config.classes, channels, 1, 1)
        table.append(map_key("head.weight", "head.fc.weight", reshape(shape, shape[:2])))
        table.append(map_key("head.bias", "head.fc.bias"))
    return check_complete("timm", table, config)


# --- detection ---


def read_config(names: TensorNames, facts: Assumptions, naming: TimmNaming = TIMM) -> ViTConfig:
    """Return the configuration of a Vision Transformer with these names."""
    width, channels, _, _ = projection = names.shape("patch_embed.proj.weight", 4)
    patch = get_patch_size(projection, "patch_embed.proj.weight")
    embed, channels = _read_embed(names, patch, channels)
    depth = names.count_layers("blocks.{}.")
    gated = naming.gated[1] != "fc2" and names.find(f"blocks.*.mlp.{naming.gated[1]}.weight") is not None
    into, out = naming.gated if gated else ("fc1", "fc2")
    hidden = names.layer_shape(f"blocks.*.mlp.{into}.weight", 2)[0]
    mlp = names.layer_shape(f"blocks.*.mlp.{out}.weight", 2)[1]
    heads, inner = facts.resolve_heads(width, "timm"), names.layer_shape("blocks.*.attn.qkv.weight", 2)[0] // 3
    outputs = _count_output_tokens(names)
    registers = names.shape(naming.registers, 3)[1] if naming.registers in names else 0
    prefix = Prefix(outputs, registers)
    position, image_size = _read_position(names, facts, prefix, embed.stride, naming)
    clip = "norm_pre.weight" in names or "norm_pre.bias" in names
    activation = SwiGLU() if hidden == 2 * mlp else facts.resolve_gelu("exact", "timm's default")
    pool = _read_pool(names, facts, prefix)
    if isinstance(pool, MAP):
        pool = MAP(activation)
    pre_logits = names.shape("pre_logits.fc.weight", 2)[0] if "pre_logits.fc.weight" in names else None
    return ViTConfig(
        size=Size(depth, width, mlp, heads, None if inner == width else inner // heads),
        embed=embed,
        position=position,
        prefix=prefix,
        block=PreNorm(
            mlp=activation,
            layer_scale=1e-5 if names.find(f"blocks.*.{naming.scale.format('*')}") else None,
            qk_norm=names.find("blocks.*.attn.q_norm.*") is not None,
            qkv_bias=names.find("blocks.*.attn.qkv.bias") is not None,
        ),
        pool=pool,
        head=Linear() if pre_logits is None else PreLogits(None if pre_logits == width else pre_logits),
        classes=names.output_dim("head"),
        image_size=image_size,
        channels=channels,
        eps=facts.resolve("eps", 1e-5 if clip else 1e-6, "timm's default" + (" for CLIP" if clip else "")),
        token_norm=clip,
        init="deit" if outputs == 2 else "vit",
    )


def _count_output_tokens(names: TensorNames) -> int:
    """Return the number of class and distillation tokens; a missing one is detected by its position or its head."""
    if "dist_token" in names or "head_dist.weight" in names:
        return 2
    if "cls_token" in names or "pos_embed" not in names:
        return 1 if "cls_token" in names else 0
    rows = names.shape("pos_embed", 3)[1]
    return 1 if not is_square(rows) and is_square(rows - 1) else 0


def _read_embed(names: TensorNames, patch: int, channels: int) -> tuple[Patches | Hybrid, int]:
    backbone = "patch_embed.backbone"
    for stem in (f"{backbone}.stem.conv.weight", f"{backbone}.conv.weight"):
        if stem in names:
            stages = names.count_layers(backbone + ".stages.{}.")
            depths = (names.count_layers(f"{backbone}.stages.{stage}.blocks." + "{}.") for stage in range(stages))
            return Hybrid(tuple(depths), patch), names.shape(stem, 4)[1]
    clip = "norm_pre.weight" in names or "norm_pre.bias" in names  # CLIP's patches have no bias
    return Patches(patch, bias="patch_embed.proj.bias" in names or not clip), channels


def _read_position(
    names: TensorNames, facts: Assumptions, prefix: Prefix, stride: int, naming: TimmNaming
) -> tuple[Learned1D | Relative, tuple[int, int]]:
    relative = {"every": "blocks.0.attn.rel_pos.", "shared": "shared_rel_pos."}
    for at, start in relative.items():
        if f"{start}relative_position_bias_table" in names:
            rows = names.shape(f"{start}relative_position_bias_table", 2)[0] - (3 if prefix.count else 0)
            side = (math.isqrt(max(rows, 0)) + 1) // 2
            height, width = facts.resolve("size", (side * stride, side * stride), "a square grid of relative offsets")
            if rows < 1 or (2 * (height // stride) - 1) * (2 * (width // stride) - 1) != rows:
                raise FormatMismatchError(
                    f"{rows} relative offsets do not match an image of {height}×{width}: give --assume size=HxW"
                )
            return Relative("every" if at == "every" else "shared"), (height, width)
    rows = names.shape("pos_embed", 3)[1]
    if naming is DINOV2:
        choices = {"outputs": prefix.outputs}
    else:
        choices = {"all" if prefix.registers else "outputs": prefix.count, "none": 0}
        if facts.given.get("no_embed_class", (False,))[0]:
            choices = {"none": 0}
    given = facts.given.get("size")
    if given is None:
        which, patches = split_position_rows(rows, is_square, choices)
    else:
        wanted = (given[0][0] // stride) * (given[0][1] // stride)
        which, patches = split_position_rows(rows, lambda left: left == wanted, choices)
    h, w = facts.resolve_grid(patches, stride)
    return Learned1D(prefix=which), (h * stride, w * stride)  # type: ignore[arg-type]


def _read_pool(names: TensorNames, facts: Assumptions, prefix: Prefix) -> Any:
    if "attn_pool.latent" in names:
        return MAP()
    if "fc_norm.weight" in names:
        return Mean(norm_after=True)
    if not prefix.outputs:
        return Mean()
    name = facts.resolve("pool", "class", "timm's default for a model with a class token")
    if name not in ("class", "mean"):
        raise FormatMismatchError(f"pool must be class or mean, got {name}")
    return ClassToken() if name == "class" else POOLS[name]


def read_bit_config(names: TensorNames, facts: Assumptions) -> BiTConfig:
    """Return the configuration of a BiT ResNet in timm's names."""
    width, channels, kernel, _ = names.shape("stem.conv.weight", 4)
    count = names.count_layers("stages.{}.")
    stages = tuple(names.count_layers(f"stages.{stage}.blocks." + "{}.") for stage in range(count))
    return BiTConfig(
        stages=stages,
        factor=width / 64,
        channels=channels,
        classes=names.output_dim("head.fc", 4),
        image_size=facts.resolve("size", (224, 224), "any size is supported"),
        root="small" if kernel == 3 else "large",
    )


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return timm's pipeline for the most likely model with these tensors and this file name."""
    size = config.image_size
    if isinstance(config, BiTConfig):
        pipeline = _make_center_crop(size, 1.0 if size[0] > 224 else 0.875, "bilinear", INCEPTION_STATS)
        return pipeline, "timm's default for BiT"
    config = config.tokens_for("timm's format")
    if isinstance(config.pool, MAP):
        squashed = Preprocessing(size, size, "squash", "bicubic", **INCEPTION_STATS)
        return squashed, "timm's default for attention pooling (SigLIP)"
    if config.token_norm:
        return _make_center_crop(size, 1.0, "bicubic", CLIP_STATS), "timm's default for a norm before the blocks (CLIP)"
    fraction = 0.9 if size[0] <= 224 else 1.0
    imagenet = _make_center_crop(size, fraction, "bicubic", IMAGENET_STATS)
    if config.block.layer_scale is not None or config.prefix.registers:
        return imagenet, "timm's default for LayerScale (DINOv2, DeiT III)"
    if config.prefix.outputs == 2:
        return imagenet, "timm's default for a distillation token (DeiT)"
    if isinstance(config.pool, Mean) and config.pool.norm_after and isinstance(config.position, Learned1D):
        return imagenet, "timm's default for fc_norm (MAE)"
    if release := re.search(r"(?<![a-z])(deit3?|dino(?:v2)?|mae)(?![a-z])", name.lower()):
        return imagenet, f"timm's default for {release[1]}, from the file name"
    return (
        _make_center_crop(size, fraction, "bicubic", INCEPTION_STATS),
        "timm's default for a plain ViT; DeiT, MAE and DINO have the same tensors and use --assume mean=imagenet",
    )


def _make_center_crop(
    size: tuple[int, int], fraction: float, interpolation: Any, colours: NormalisationStats = INCEPTION_STATS
) -> Preprocessing:
    resize = (math.floor(size[0] / fraction), math.floor(size[1] / fraction))
    return Preprocessing(size, resize, "cover", interpolation, **colours)


def release_preprocessing(config: ModelConfig, name: str, project: str) -> tuple[Preprocessing, str]:
    """Return the pipeline of Meta's releases with timm's names: ImageNet statistics, a centre crop."""
    assert isinstance(config, ViTConfig)
    if project == DINOV2.title and 224 % config.embed.stride == 0:  # trained at 518², evaluated at 224²
        return Preprocessing((224, 224), (256, 256), **IMAGENET_STATS), f"{project}'s default"
    if config.image_size[0] > 256:
        return _make_center_crop(config.image_size, 1.0, "bicubic", IMAGENET_STATS), f"{project}'s default"
    pipeline = Preprocessing(config.image_size, config.image_size, **IMAGENET_STATS)
    return pipeline.with_resize_factor(256 / 224), f"{project}'s default"


# Architectures with the same tensor names but other computations.
UNSUPPORTED_ARCHITECTURES = re.compile(r"_rpn_|_rope|^vit_pe_|^eva\d*_|_parallel_|_xp_|naflex|^beit")
# Architectures whose number of heads is not the usual one for their width.
UNUSUAL_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt_": 16}


def parse_settings(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the facts of a timm repository's config.json, or of the file name without one."""
    config = settings.get("config.json")
    config = config if isinstance(config, dict) and "pretrained_cfg" in config else {}
    source = "config.json" if config else "the file's name"
    architecture = str(config.get("architecture") or settings.get(FILE_NAME_KEY, ""))
    if (config or "_patch" in architecture) and (strange := UNSUPPORTED_ARCHITECTURES.search(architecture)):
        raise FormatMismatchError(f"unsupported architecture {architecture} ({strange[0].strip('_')}), from {source}")
    facts: dict[str, tuple[Any, str]] = {}
    arguments, cfg = config.get("model_args"), config.get("pretrained_cfg")
    arguments = arguments if isinstance(arguments, dict) else {}
    cfg = cfg if isinstance(cfg, dict) else {}
    heads = next((number for name, number in UNUSUAL_HEADS.items() if architecture.startswith(name)), None)
    if heads is not None:
        facts["heads"] = (heads, source)
    size = arguments.get("img_size", cfg.get("input_size"))
    size = [size, size] if type(size) is int else size
    if isinstance(size, list) and len(size) in (2, 3) and all(type(side) is int and side > 0 for side in size):
        facts["size"] = ((size[-2], size[-1]), source)
    if arguments.get("no_embed_class"):
        facts["no_embed_class"] = (True, source)
    if arguments.get("pool_include_prefix"):
        raise FormatMismatchError("unsupported pool_include_prefix in config.json")
    acts = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick", "quickgelu": "quick"}
    act = arguments.get("act_layer")
    if isinstance(act, str):
        facts["gelu"] = (acts.get(act, act), source)
    elif "quickgelu" in architecture:
        facts["gelu"] = ("quick", source)
    if type(arguments.get("num_heads")) is int and arguments["num_heads"] > 0:
        facts["heads"] = (arguments["num_heads"], source)
    pools = {"token": "class", "avg": "mean", "map": "map", "None": None}
    pool = str(arguments.get("global_pool", config.get("global_pool")))
    if pool not in pools:
        raise FormatMismatchError(f"unsupported global_pool {pool!r} in config.json")
    if pools[pool] in ("class", "mean"):
        facts["pool"] = (pools[pool], source)
    return facts


def build_table(config: ModelConfig, root: str, naming: TimmNaming = TIMM) -> KeyTable:
    table = add_root(
        map_bit(config) if isinstance(config, BiTConfig) else map_vit(config.tokens_for("timm's format"), naming), root
    )
    if isinstance(config, BiTConfig):
        return table
    return [
        *table,
        *(IgnoredKeys(f"{root}decoder_{name}", "MAE decoder") for name in MAE_DECODER_KEYS),
        IgnoredKeys(f"{root}mask_token", "used in pre-training only"),
        IgnoredKeys(f"{root}blocks.*.attn.rel_pos.relative_position_index", "computed, not learned"),
        IgnoredKeys(f"{root}shared_rel_pos.relative_position_index", "computed, not learned"),
        *(IGNORED_OUTSIDE_ROOT if root else ()),
    ]


MAE_DECODER_KEYS = ("embed.*", "blocks.*", "norm.*", "pred.*", "pos_embed")
IGNORED_OUTSIDE_ROOT = (
    IgnoredKeys("head.mlp.*", "DINO head"),
    IgnoredKeys("head.last_layer.*", "DINO head"),
    IgnoredKeys("dino_head.*", "DINO head"),
    IgnoredKeys("ibot_head.*", "iBOT head"),
    IgnoredKeys("text.*", "text tower"),
    IgnoredKeys("logit_scale", "text tower"),
    IgnoredKeys("logit_bias", "text tower"),
)
ROOTS = ("", "backbone.", "encoder.", "visual.trunk.")
REQUIRED_KEYS = ("patch_embed.proj.weight", "blocks.*.attn.qkv.weight")


def _make_release_format(
    name: str, title: str, naming: TimmNaming, required_keys: tuple[str, ...], example: dict[str, Any]
) -> CheckpointFormat:
    return CheckpointFormat(
        name,
        title,
        required_keys,
        partial(read_config, naming=naming),
        partial(build_table, naming=naming),
        partial(release_preprocessing, project=naming.title),
        ROOTS,
        parse_settings,
        example,
    )


FORMATS = (
    _make_release_format(
        "dinov2",
        "DINOv2's release",
        DINOV2,
        (*REQUIRED_KEYS, "mask_token", "blocks.*.ls?.gamma"),
        {"layer_scale": 1.0, "classes": None, "registers": 4},
    ),
    _make_release_format(
        "deit3", "DeiT III's release", DEIT3, (*REQUIRED_KEYS, "blocks.*.gamma_?"), {"layer_scale": 1.0}
    ),
    CheckpointFormat(
        "timm",
        "timm's Vision Transformer, whose names DeiT, MAE and DINO use too",
        REQUIRED_KEYS,
        read_config,
        build_table,
        default_preprocessing,
        ROOTS,
        parse_settings,
    ),
    CheckpointFormat(
        "timm bit",
        "timm's BiT ResNet",
        ("stem.conv.weight", "stages.0.blocks.0.conv1.weight", "stages.0.blocks.0.downsample.conv.weight"),
        read_bit_config,
        build_table,
        default_preprocessing,
        ("", "backbone."),
        parse_settings,
        {"name": "R14x0.25"},
    ),
)


def parse_labels_and_preprocessing(
    settings: Mapping[str, Any], size: tuple[int, int]
) -> tuple[tuple[str, ...] | None, Preprocessing | None]:
    """Return the class names and the pipeline in timm's config.json."""
    config = settings.get("config.json")
    config = config if isinstance(config, dict) else {}
    cfg = config.get("pretrained_cfg")
    cfg = cfg if isinstance(cfg, dict) else config
    names = config.get("label_names", cfg.get("label_names"))
    labels = tuple(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else None
    if not {"mean", "std", "interpolation"} <= set(cfg):
        return labels, None
    fraction, mode = float(cfg.get("crop_pct") or 0.875), cfg.get("crop_mode") or "center"
    if not 0.01 <= fraction <= 1:
        raise ValueError(f"crop_pct in config.json must be from 0.01 to 1, got {fraction}")
    if mode not in ("center", "squash"):
        raise ValueError(f"unsupported crop mode {mode!r} in config.json: give the pipeline with --assume")
    pipeline = _make_center_crop(size, fraction, cfg["interpolation"])
    colours = {name: tuple(float(v) for v in cfg[name]) for name in ("mean", "std")}
    return labels, replace(pipeline, fit="squash" if mode == "squash" else "cover", **colours)


def build_timm_arguments(config: ModelConfig) -> dict[str, Any] | None:
    """Return the arguments of timm's `VisionTransformer` (or its distilled class) for this model; None for others."""
    if not isinstance(config, ViTConfig) or not isinstance(config.embed, Patches):
        return None
    if not isinstance(config.position, Learned1D) or isinstance(config.block.mlp, SwiGLU):
        return None
    size, block = config.size, config.block
    arguments: dict[str, Any] = {
        "img_size": config.image_size if config.image_size[0] != config.image_size[1] else config.image_size[0],
        "patch_size": config.embed.patch,
        "in_chans": config.channels,
        "num_classes": config.classes or 0,
        "embed_dim": size.width,
        "depth": size.depth,
        "num_heads": size.heads,
        "mlp_ratio": size.mlp / size.width,
    }
    defaults: dict[str, Any] = {
        "qkv_bias": (block.qkv_bias, True),
        "qk_norm": (block.qk_norm, False),
        "init_values": (block.layer_scale, None),
        "class_token": (config.prefix.outputs > 0, True),
        "no_embed_class": (config.prefix.count > 0 and config.position.prefix == "none", False),
        "reg_tokens": (config.prefix.registers, 0),
        "pre_norm": (config.token_norm, False),
        "global_pool": ({Mean: "avg", MAP: "map"}.get(type(config.pool), "token"), "token"),
        "act_layer": ({"TanhGELU": "gelu_tanh", "QuickGELU": "quick_gelu"}.get(type(block.mlp).__name__), None),
    }
    arguments |= {name: value for name, (value, default) in defaults.items() if value != default}
    if isinstance(config.pool, Mean):
        arguments["fc_norm"] = config.pool.norm_after
    return arguments

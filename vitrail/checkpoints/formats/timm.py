"""Key tables of timm: `vit_*`, `deit_*`, `vit_relpos_*`, hybrids and `resnetv2_*_bit`; and of the DeiT, MAE, DINO and DINOv2
releases, which use timm's names with a few exceptions. `map_tensors` in keys.py explains `?`, `#` and `*` of the rules."""

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vitrail.checkpoints import formats, keys
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames, relative
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules
from vitrail.data.preprocessing import CLIP_STATS, IMAGENET_STATS, INCEPTION_STATS, NormalisationStats, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.sizes import Size
from vitrail.models.vit_config import POOLS, ViTConfig
from vitrail.nn.block import ResPostNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import MAP, ClassAndMean, ClassToken, Mean
from vitrail.nn.position import Learned1D, PositionSlot, Relative, RelativeMLP

# Architectures with the same tensor names but other computations.
UNSUPPORTED_ARCHITECTURES = re.compile(r"_rope|^vit_pe_|^eva02_|^eva_(?!large_)|_parallel_|_xp_|naflex|^beit3")
# Architectures whose number of heads is not the usual one for their width.
UNUSUAL_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt_": 16}
IGNORED = {
    **{f"decoder_{name}": "MAE decoder" for name in ("embed.*", "blocks.*", "norm.*", "pred.*", "pos_embed")},
    "mask_token": "used in pre-training only",
    "blocks.*.attn.rel_pos.relative_position_index": "computed, not learned",
    "shared_rel_pos.relative_position_index": "computed, not learned",
}
IGNORED_OUTSIDE_ROOT = {
    **dict.fromkeys(("head.mlp.*", "head.last_layer.*", "dino_head.*"), "DINO head"),
    "ibot_head.*": "iBOT head",
    **dict.fromkeys(("text.*", "logit_scale", "logit_bias"), "text tower"),
}
ROOTS = ("", "backbone.", "encoder.", "visual.trunk.")
REQUIRED_KEYS = ("patch_embed.proj.weight", "blocks.*.attn.qkv.weight")


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
    rules: Rules = {
        "?prefix.outputs": "cls_token",
        "?prefix.registers": naming.registers,
        "?token_norm.*": "norm_pre.*",
        "blocks.#.norm1.*": "blocks.#.norm1.*",
        "blocks.#.msa.qkv.weight": "blocks.#.attn.qkv.weight",
        "?blocks.#.msa.qkv.bias": "blocks.#.attn.qkv.bias",
        "?blocks.#.msa.q_norm.*": "blocks.#.attn.q_norm.*",
        "?blocks.#.msa.k_norm.*": "blocks.#.attn.k_norm.*",
        "blocks.#.msa.out.*": "blocks.#.attn.proj.*",
        "?blocks.#.branch1.scale.weight": f"blocks.#.{naming.scale.format(1)}",
        "blocks.#.norm2.*": "blocks.#.norm2.*",
        "blocks.#.mlp.fc1.*": "blocks.#.mlp.fc1.*",
        "blocks.#.mlp.fc2.*": "blocks.#.mlp.fc2.*",
        "?blocks.#.branch2.scale.weight": f"blocks.#.{naming.scale.format(2)}",
        "pool.norm.*": "norm.*",
        "?pool.probe": "attn_pool.latent",
        "?pool.q.*": "attn_pool.q.*",
        "?pool.kv.*": "attn_pool.kv.*",
        "?pool.out.*": "attn_pool.proj.*",
        "?pool.norm2.*": "attn_pool.norm.*",
        "?pool.mlp.fc1.*": "attn_pool.mlp.fc1.*",
        "?pool.mlp.fc2.*": "attn_pool.mlp.fc2.*",
        "?head.*": "head.*",
        "?head.pre_logits.*": "pre_logits.fc.*",
        "?head.linear.*": "head.*",
        **_list_embed_rules(config),
    }
    if config.prefix.outputs == 2:
        rules |= {"?prefix.outputs": (("cls_token", "dist_token"), keys.concatenate(1, [1, 1]))}
        if config.classes is not None and isinstance(config.head, Linear):
            rules |= {"head.label.*": "head.*", "head.teacher.*": "head_dist.*"}
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        rules |= {"position.weight": "pos_embed"}
    if isinstance(config.block.mlp, SwiGLU):
        rules |= {f"blocks.#.mlp.fc{n}.*": f"blocks.#.mlp.{name}.*" for n, name in enumerate(naming.gated, start=1)}
    if isinstance(config.pool, Mean) and config.pool.norm_after:
        rules |= {"pool.norm.*": "fc_norm.*"}
    if isinstance(config.position, RelativeMLP):
        rules |= relative.list_mlp_rules(_list_relative_modules(config))
    tables = isinstance(config.position, Relative) and config.position.absolute is None
    entries = [relative.map_relative(config, _list_relative_modules(config))] if tables else []
    return keys.map_tensors(naming.title, config, rules, *entries)


def _list_relative_modules(config: TokenConfig) -> list[str]:
    return relative.list_modules(config, relative.MODULES["every"], relative.MODULES["shared"])


def _list_embed_rules(config: TokenConfig) -> Rules:
    embed, channels = config.embed, config.channels
    if isinstance(embed, Hybrid):
        channels, patch = embed.channels, embed.patch
    else:
        patch = formats.require_patches("timm", config)
    rules: Rules = {
        "embed.projection.weight": ("patch_embed.proj.weight", keys.flatten_patches(channels, patch)),
        "?embed.projection.bias": "patch_embed.proj.bias",
    }
    if isinstance(embed, Hybrid):
        backbone = "patch_embed.backbone"
        stem = f"{backbone}.stem" if embed.stages else backbone
        rules |= {"embed.trunk.root.weight": f"{stem}.conv.weight", "embed.trunk.norm.*": f"{stem}.norm.*"}
        rules |= _list_stage_rules(embed.stages, "embed.trunk.", f"{backbone}.")
    return rules


def _list_stage_rules(stages: tuple[int, ...], ours: str, theirs: str) -> Rules:
    """Return the rules of a ResNet's blocks."""
    rules: Rules = {}
    for stage, depth in enumerate(stages):
        for block in range(depth):
            our_block, their_block = f"{ours}stages.{stage}.{block}", f"{theirs}stages.{stage}.blocks.{block}"
            for index in (1, 2, 3):
                rules |= {f"{our_block}.conv{index}.weight": f"{their_block}.conv{index}.weight"}
                rules |= {f"{our_block}.norm{index}.*": f"{their_block}.norm{index}.*"}
            rules |= {f"?{our_block}.shortcut.weight": f"{their_block}.downsample.conv.weight"}
            rules |= {f"?{our_block}.shortcut_norm.*": f"{their_block}.downsample.norm.*"}
    return rules


def map_bit(config: BiTConfig) -> KeyTable:
    """Return the table of `resnetv2_*_bit`."""
    rules: Rules = {"root.weight": "stem.conv.weight", "norm.*": "norm.*", **_list_stage_rules(config.stages, "", "")}
    if config.classes is not None:
        rules |= {"head.weight": ("head.fc.weight", keys.flatten_patches(-1, 1)), "head.bias": "head.fc.bias"}
    return keys.map_tensors("timm", config, rules)


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions, naming: TimmNaming = TIMM) -> ViTConfig:
    """Return the configuration of a Vision Transformer with these names."""
    width, channels, patch, _ = names.patch_shape("patch_embed.proj.weight")
    has_token_norm = "norm_pre.weight" in names or "norm_pre.bias" in names  # CLIP
    embed: Patches | Hybrid = Patches(patch, bias="patch_embed.proj.bias" in names or not has_token_norm)
    backbone = "patch_embed.backbone"
    for stem in (f"{backbone}.stem.conv.weight", f"{backbone}.conv.weight"):
        if stem in names:
            embed, channels = Hybrid(_count_blocks(names, f"{backbone}."), patch), names.shape(stem, 4)[1]
    depth = names.count_layers("blocks.{}.")
    gated = naming.gated[1] != "fc2" and names.find(f"blocks.*.mlp.{naming.gated[1]}.weight") is not None
    first_linear, second_linear = naming.gated if gated else ("fc1", "fc2")
    hidden = names.layer_shape(f"blocks.*.mlp.{first_linear}.weight", 2)[0]
    mlp = names.layer_shape(f"blocks.*.mlp.{second_linear}.weight", 2)[1]
    heads = relative.count_timm_heads(names) or assumptions.resolve_heads(width, "timm")
    attention_width = names.layer_shape("blocks.*.attn.qkv.weight", 2)[0] // 3
    outputs = _count_output_tokens(names)
    registers = names.shape(naming.registers, 3)[1] if naming.registers in names else 0
    prefix = Prefix(outputs, registers)
    position, image_size = _read_position(names, assumptions, prefix, embed.stride, naming)
    activation = SwiGLU() if hidden == 2 * mlp else assumptions.resolve_gelu("exact", "timm's default")
    pool = _read_pool(names, assumptions, prefix)
    if isinstance(pool, MAP):
        pool = MAP(activation)
    has_scale = names.find(f"blocks.*.{naming.scale.format('*')}") is not None
    eps = (1e-5, "timm's default for CLIP") if has_token_norm else (1e-6, "timm's default")
    return ViTConfig(
        size=Size(depth, width, mlp, heads, None if attention_width == width else attention_width // heads),
        embed=embed,
        position=position,
        prefix=prefix,
        block=relative.choose_timm_block(position, has_scale, assumptions)(
            mlp=activation,
            layer_scale=1e-5 if has_scale else None,
            qk_norm=names.find("blocks.*.attn.q_norm.*") is not None,
            qkv_bias=names.find("blocks.*.attn.qkv.bias") is not None,
        ),
        pool=pool,
        head=formats.choose_head(names.output_dim("pre_logits.fc"), width),
        classes=names.output_dim("head"),
        image_size=image_size,
        channels=channels,
        eps=assumptions.resolve("eps", *eps),
        token_norm=has_token_norm,
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


def _count_blocks(names: TensorNames, root: str) -> tuple[int, ...]:
    """Return the blocks in each stage of a ResNet."""
    stages = range(names.count_layers(root + "stages.{}."))
    return tuple(names.count_layers(f"{root}stages.{stage}.blocks." + "{}.") for stage in stages)


def _read_position(
    names: TensorNames, assumptions: Assumptions, prefix: Prefix, stride: int, naming: TimmNaming
) -> tuple[PositionSlot, tuple[int, int]]:
    if found := relative.read_timm_position(names, assumptions, prefix.count, stride):
        return found
    rows = names.shape("pos_embed", 3)[1]
    choices = {"all" if prefix.registers else "outputs": prefix.count, "none": 0}
    if naming is DINOV2:
        choices = {"outputs": prefix.outputs}
    elif assumptions.given.get("no_embed_class", (False,))[0]:
        choices = {"none": 0}
    height, width = assumptions.given.get("size", ((0, 0),))[0]
    wanted = (height // stride) * (width // stride)
    # the first choice that leaves the patches of the given size, or a square grid
    patch_counts = {which: rows - covered for which, covered in choices.items()}
    fits = (n for n, left in patch_counts.items() if left > 0 and (left == wanted if wanted else is_square(left)))
    which = next(fits, next(iter(choices)))
    resampling = assumptions.resolve_resampling(*_choose_resampling(names, prefix.registers, naming))
    position = Learned1D(prefix=which, resampling=resampling)  # type: ignore[arg-type]
    return position, assumptions.resolve_table_size(patch_counts[which], stride)


def _choose_resampling(names: TensorNames, registers: int, naming: TimmNaming) -> tuple[str, str]:
    """Return the rule of the project that wrote a file with timm's names, and the evidence."""
    if naming is DINOV2:
        return choose_dinov2_resampling(registers), f"DINOv2's code {'with' if registers else 'without'} registers"
    if naming is DEIT3:
        return "transformers", "DeiT III's code"
    if "decoder_embed.weight" in names:
        return "transformers", "MAE's interpolate_pos_embed, by its decoder"
    if names.root and TensorNames(names.shapes).find("head.last_layer.*"):
        return "dino", "DINO's code, by its head"
    return "timm", "timm's resample_abs_pos_embed"


def choose_dinov2_resampling(registers: int) -> str:
    """Return the rule of DINOv2's release, which its models with registers changed."""
    return "timm" if registers else "dino"


def is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number


def _read_pool(names: TensorNames, assumptions: Assumptions, prefix: Prefix) -> Any:
    if "attn_pool.latent" in names:
        return MAP()
    if "fc_norm.weight" in names:
        return Mean(norm_after=True)
    if not prefix.outputs:
        return Mean()
    name = assumptions.resolve("pool", "class", "timm's default for a model with a class token")
    if name not in ("class", "mean"):
        raise ValueError(f"pool must be class or mean, got {name}")
    return ClassToken() if name == "class" else POOLS[name]


def read_bit_config(names: TensorNames, assumptions: Assumptions) -> BiTConfig:
    """Return the configuration of a BiT ResNet in timm's names."""
    width, channels, kernel, _ = names.shape("stem.conv.weight", 4)
    return BiTConfig(
        stages=_count_blocks(names, ""),
        factor=width / 64,
        channels=channels,
        classes=names.output_dim("head.fc", 4),
        image_size=assumptions.resolve("size", (224, 224), "any size is supported"),
        root="small" if kernel == 3 else "large",
    )


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return timm's pipeline for the most likely model with these tensors and this file name."""
    size = config.image_size
    if isinstance(config, BiTConfig):
        pipeline = make_center_crop(size, 1.0 if size[0] > 224 else 0.875, "bilinear", INCEPTION_STATS)
        return pipeline, "timm's default for BiT"
    config = config.require_tokens("timm's format")
    if isinstance(config.pool, MAP):
        squashed = Preprocessing(size, size, "squash", "bicubic", **INCEPTION_STATS)
        return squashed, "timm's default for attention pooling (SigLIP)"
    if config.token_norm:
        return make_center_crop(size, 1.0, "bicubic", CLIP_STATS), "timm's default for a norm before the blocks (CLIP)"
    fraction = 0.9 if size[0] <= 224 else 1.0
    imagenet = make_center_crop(size, fraction, "bicubic", IMAGENET_STATS)
    if config.block.layer_scale is not None or config.prefix.registers:
        return imagenet, "timm's default for LayerScale (DINOv2, DeiT III)"
    if config.prefix.outputs == 2:
        return imagenet, "timm's default for a distillation token (DeiT)"
    if isinstance(config.pool, Mean) and config.pool.norm_after and isinstance(config.position, Learned1D):
        return imagenet, "timm's default for fc_norm (MAE)"
    if release := re.search(r"(?<![a-z])(deit3?|dino(?:v2)?|mae)(?![a-z])", name.lower()):
        return imagenet, f"timm's default for {release[1]}, from the file name"
    why = "timm's default for a plain ViT; DeiT, MAE and DINO have the same tensors and use assume={'mean': 'imagenet'}"
    return make_center_crop(size, fraction, "bicubic", INCEPTION_STATS), why


def make_center_crop(
    size: tuple[int, int], fraction: float, interpolation: Any, stats: NormalisationStats = INCEPTION_STATS
) -> Preprocessing:
    """Return the pipeline that crops the centre, this fraction of the shorter side."""
    resize = (math.floor(size[0] / fraction), math.floor(size[1] / fraction))
    return Preprocessing(size, resize, "cover", interpolation, **stats)


def release_preprocessing(config: TokenConfig, name: str, project: str) -> tuple[Preprocessing, str]:
    """Return the pipeline of Meta's releases with timm's names: ImageNet statistics, a centre crop."""
    if project == DINOV2.title and 224 % config.embed.stride == 0:  # trained at 518², evaluated at 224²
        return Preprocessing((224, 224), (256, 256), **IMAGENET_STATS), f"{project}'s default"
    if config.image_size[0] > 256:
        return make_center_crop(config.image_size, 1.0, "bicubic", IMAGENET_STATS), f"{project}'s default"
    pipeline = Preprocessing(config.image_size, config.image_size, **IMAGENET_STATS)
    return pipeline.with_resize_factor(256 / 224), f"{project}'s default"


def parse_settings(settings: dict[str, Any], supported: str | None = None) -> dict[str, tuple[Any, str]]:
    """Return the facts of a timm repository's config.json, or of the file name without one.

    Architectures whose names begin with `supported` are not refused.
    """
    config = formats.get_object(settings, "config.json")
    config = config if "pretrained_cfg" in config else {}
    source = "config.json" if config else "the file's name"
    architecture = str(config.get("architecture") or settings.get(formats.FILE_NAME_KEY, ""))
    known = supported is not None and architecture.startswith(supported)
    unsupported = None if known else UNSUPPORTED_ARCHITECTURES.search(architecture)
    if (config or "_patch" in architecture) and unsupported:
        raise ValueError(f"unsupported architecture {architecture} ({unsupported[0].strip('_')}), from {source}")
    facts: dict[str, tuple[Any, str]] = {}
    arguments, cfg = formats.get_object(config, "model_args"), formats.get_object(config, "pretrained_cfg")
    heads = next((number for name, number in UNUSUAL_HEADS.items() if architecture.startswith(name)), None)
    if heads is not None:
        facts["heads"] = (heads, source)
    size = arguments.get("img_size", cfg.get("input_size"))
    size = [size, size] if type(size) is int else size
    if isinstance(size, list) and len(size) in (2, 3) and all(type(side) is int and side > 0 for side in size):
        facts["size"] = ((size[-2], size[-1]), source)
    release = None if config else re.match(r"(dino|mae)(?:_|$)", architecture)  # file names of these releases
    if release is not None:
        facts["resampling"] = ({"dino": "dino", "mae": "transformers"}[release[1]], source)
    if "_rpn_" in architecture:
        facts["block"] = ("res-post", source)
    if arguments.get("no_embed_class"):
        facts["no_embed_class"] = (True, source)
    if arguments.get("pool_include_prefix"):
        raise ValueError("unsupported pool_include_prefix in config.json")
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
        raise ValueError(f"unsupported global_pool {pool!r} in config.json")
    if pools[pool] in ("class", "mean"):
        facts["pool"] = (pools[pool], source)
    return facts


def build_table(config: ModelConfig, root: str = "", naming: TimmNaming = TIMM) -> KeyTable:
    """Return the table of a model of any family that timm has."""
    if isinstance(config, BiTConfig):
        return keys.add_root(map_bit(config), root)
    ignored = [IgnoredKeys(f"{root}{name}", why) for name, why in IGNORED.items()]
    outside = [IgnoredKeys(name, why) for name, why in IGNORED_OUTSIDE_ROOT.items()] if root else []
    table = map_vit(config.require_tokens("timm's format"), naming)
    return [*keys.add_root(table, root), *ignored, *outside]


def list_limits(config: TokenConfig) -> Reasons:
    """Return why timm cannot express a model, apart from its tensor names."""
    position = config.position
    has_bias, has_both = isinstance(position, Relative | RelativeMLP), getattr(position, "absolute", None) is not None
    fits = has_bias or (isinstance(position, Learned1D) and position.at == "stem")
    plain = config.prefix.count <= 1 and not config.token_norm and not isinstance(config.pool, MAP)
    return {
        "it only has learned 1-D positions at the stem, or relative ones": not fits,
        "only its BEiT has learned and relative positions": has_both,
        "its relative models have at most a class token, no norm on z_0 and no attention pooling": has_bias
        and not plain,
        "its relative models have no SwiGLU": has_bias and isinstance(config.block.mlp, SwiGLU),
        "its norms at the end of a branch have no LayerScale": is_res_post(config)
        and config.block.layer_scale is not None,
        "it has no pooling of class token and mean together": isinstance(config.pool, ClassAndMean),
        "it has no pre-logits layer": isinstance(config.head, PreLogits),
        "its heads divide the width evenly": config.size.head is not None,
    }


def is_res_post(config: TokenConfig) -> bool:
    return isinstance(config.block, ResPostNorm)


def list_dinov2_limits(config: TokenConfig) -> Reasons:
    """Return why DINOv2's release cannot express a model, apart from its tensor names."""
    learned = isinstance(config.position, Learned1D) and config.position.at == "stem"
    return {
        "it only has learned 1-D positions at the stem": not learned,
        "its models have no classes: --classes none": config.classes is not None,
        "its models have LayerScale and a class token": config.block.layer_scale is None or config.prefix.outputs != 1,
        "its models read their class token": not isinstance(config.pool, ClassToken),
    }


def choose_position_prefix(config: TokenConfig) -> str:
    """Return timm's prefix tokens with positions: with registers, all of them or none."""
    assert isinstance(config.position, Learned1D)
    return "none" if config.prefix.registers and config.position.prefix == "outputs" else config.position.prefix


def _make_format(name: str, title: str, naming: TimmNaming, keys: tuple[str, ...], **example: Any) -> CheckpointFormat:
    return CheckpointFormat(
        name,
        title,
        (*REQUIRED_KEYS, *keys),
        partial(read_config, naming=naming),
        partial(build_table, naming=naming),
        default_preprocessing if naming is TIMM else partial(release_preprocessing, project=naming.title),
        ROOTS,
        parse_settings,
        example,
    )


DINOV2_EXAMPLE = {"layer_scale": 1.0, "classes": None, "registers": 4}
FORMATS = (
    _make_format("dinov2", "DINOv2's release", DINOV2, ("mask_token", "blocks.*.ls?.gamma"), **DINOV2_EXAMPLE),
    _make_format("deit3", "DeiT III's release", DEIT3, ("blocks.*.gamma_?",), layer_scale=1.0),
    _make_format("timm", "timm's Vision Transformer, whose names DeiT, MAE and DINO use too", TIMM, ()),
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


def parse_labels_and_preprocessing(settings: dict[str, Any], size: tuple[int, int]) -> formats.LabelsAndPreprocessing:
    """Return the class names and the pipeline in timm's config.json."""
    config = formats.get_object(settings, "config.json")
    cfg = formats.get_object(config, "pretrained_cfg") or config
    names = config.get("label_names", cfg.get("label_names"))
    labels = tuple(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else None
    if not {"mean", "std", "interpolation"} <= set(cfg):
        return labels, None
    fraction, mode = float(cfg.get("crop_pct") or 0.875), cfg.get("crop_mode") or "center"
    if not 0.01 <= fraction <= 1:
        raise ValueError(f"crop_pct in config.json must be from 0.01 to 1, got {fraction}")
    if mode not in ("center", "squash"):
        raise ValueError(f"unsupported crop mode {mode!r} in config.json: give the pipeline with assume=")
    pipeline = make_center_crop(size, fraction, cfg["interpolation"])
    stats = {name: tuple(float(v) for v in cfg[name]) for name in ("mean", "std")}
    return labels, replace(pipeline, fit="squash" if mode == "squash" else "cover", **stats)


def build_timm_arguments(config: ModelConfig) -> dict[str, Any] | None:
    """Return the arguments of timm's `VisionTransformer` (or its distilled class) for this model; None for others."""
    if not isinstance(config, ViTConfig) or not isinstance(config.embed, Patches):
        return None
    is_plain = config.block.key_bias and not is_res_post(config)  # else BEiT or vit_relpos
    if not is_plain or not isinstance(config.position, Learned1D) or isinstance(config.block.mlp, SwiGLU):
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

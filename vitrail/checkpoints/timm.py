"""timm's names: `vit_*`, `deit_*`, `vit_relpos_*`, hybrids and `resnetv2_*_bit`. DeiT, MAE, DINO and DINOv2 releases use them
too, a few of them spelled differently."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vitrail.checkpoints.keys import Change, Key, LeftOut, Table, Tensors, both, complete, joined, key, reshaped, rooted
from vitrail.checkpoints.look import FILE_NAME, Differs, Facts, Form, Names, is_square, prefix_rows, square
from vitrail.data.preprocessing import CLIP, HALF, IMAGENET, Colours, Preprocessing
from vitrail.models.bit import BiTConfig
from vitrail.models.build import POOLS, Config
from vitrail.models.hybrid import Hybrid
from vitrail.models.sizes import Size
from vitrail.models.vit import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.pool import MAP, ClassToken, Mean
from vitrail.nn.position import Learned1D, Relative
from vitrail.nn.prefix import Prefix


@dataclass(frozen=True)
class Spelling:
    """What the releases that use timm's names spell differently."""

    title: str = "timm"
    scale: str = "ls{}.gamma"
    registers: str = "reg_token"
    gated: tuple[str, str] = ("fc1", "fc2")


TIMM = Spelling()
DEIT3 = Spelling("DeiT III", scale="gamma_{}")
DINOV2 = Spelling("DINOv2", registers="register_tokens", gated=("w12", "w3"))


def vit(config: ViTConfig, spelling: Spelling = TIMM) -> Table:
    """`VisionTransformer`, `VisionTransformerDistilled`, `VisionTransformerRelPos` and hybrids."""
    size, prefix = config.size, config.prefix
    table: Table = [*_embed(config)]
    if prefix.outputs == 1:
        table.append(key("prefix.outputs", "cls_token"))
    elif prefix.outputs == 2:
        table.append(key("prefix.outputs", ("cls_token", "dist_token"), joined(1, [1, 1])))
    if prefix.registers:
        table.append(key("prefix.registers", spelling.registers))
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        table.append(key("position.weight", "pos_embed"))
    elif isinstance(config.position, Relative):
        table.append(_relative(config))
    if config.token_norm:
        table += both("token_norm", "norm_pre")
    into, out = spelling.gated if isinstance(config.block.mlp, SwiGLU) else ("fc1", "fc2")
    for layer in range(size.depth):
        block = f"blocks.{layer}"
        table += both(f"{block}.norm1", f"{block}.norm1")
        table.append(key(f"{block}.msa.qkv.weight", f"{block}.attn.qkv.weight"))
        if config.block.qkv_bias:
            table.append(key(f"{block}.msa.qkv.bias", f"{block}.attn.qkv.bias"))
        table += both(f"{block}.msa.out", f"{block}.attn.proj")
        if config.block.qk_norm:
            table += both(f"{block}.msa.q_norm", f"{block}.attn.q_norm")
            table += both(f"{block}.msa.k_norm", f"{block}.attn.k_norm")
        table += both(f"{block}.norm2", f"{block}.norm2")
        table += both(f"{block}.mlp.fc1", f"{block}.mlp.{into}") + both(f"{block}.mlp.fc2", f"{block}.mlp.{out}")
        if config.block.layer_scale is not None:
            for branch in (1, 2):
                table.append(key(f"{block}.branch{branch}.scale.weight", f"{block}.{spelling.scale.format(branch)}"))
    norm_after = isinstance(config.pool, Mean) and config.pool.norm_after
    table += both("pool.norm", "fc_norm" if norm_after else "norm")
    if isinstance(config.pool, MAP):
        table.append(key("pool.probe", "attn_pool.latent"))
        table += both("pool.q", "attn_pool.q") + both("pool.kv", "attn_pool.kv") + both("pool.out", "attn_pool.proj")
        table += both("pool.norm2", "attn_pool.norm")
        table += both("pool.mlp.fc1", "attn_pool.mlp.fc1") + both("pool.mlp.fc2", "attn_pool.mlp.fc2")
    table += _head(config)
    return complete(spelling.title, table, config)


def _head(config: ViTConfig) -> Table:
    if isinstance(config.head, PreLogits):
        linear = both("head.linear", "head") if config.classes is not None else []
        return [*both("head.pre_logits", "pre_logits.fc"), *linear]
    if config.classes is None:
        return []
    if config.prefix.outputs == 2:
        return [*both("head.label", "head"), *both("head.teacher", "head_dist")]
    return [*both("head", "head")]


def _embed(config: ViTConfig) -> Table:
    embed, width = config.embed, config.size.width
    if isinstance(embed, Patches):
        shape = (width, config.channels, embed.patch, embed.patch)
        weight = key("embed.projection.weight", "patch_embed.proj.weight", reshaped(shape, (width, -1)))
        return [weight, key("embed.projection.bias", "patch_embed.proj.bias")] if embed.bias else [weight]
    if not isinstance(embed, Hybrid):
        raise ValueError(f"timm cannot express this model: it has no {type(embed).__name__}")
    channels = 64 if not embed.stages else 256 * 2 ** (len(embed.stages) - 1)
    shape = (width, channels, embed.patch, embed.patch)
    backbone = "patch_embed.backbone"
    stem = f"{backbone}.stem" if embed.stages else backbone
    table: Table = [
        key("embed.trunk.root.weight", f"{stem}.conv.weight"),
        *both("embed.trunk.norm", f"{stem}.norm"),
        key("embed.projection.weight", "patch_embed.proj.weight", reshaped(shape, (width, -1))),
        key("embed.projection.bias", "patch_embed.proj.bias"),
    ]
    for stage, depth in enumerate(embed.stages):
        for block in range(depth):
            ours, theirs = f"embed.trunk.stages.{stage}.{block}", f"{backbone}.stages.{stage}.blocks.{block}"
            table += _bottleneck(ours, theirs, block == 0)
            if block == 0:
                table += both(f"{ours}.shortcut_norm", f"{theirs}.downsample.norm")
    return table


def _bottleneck(ours: str, theirs: str, project: bool) -> Table:
    table: Table = []
    for index in (1, 2, 3):
        table.append(key(f"{ours}.conv{index}.weight", f"{theirs}.conv{index}.weight"))
        table += both(f"{ours}.norm{index}", f"{theirs}.norm{index}")
    if project:
        table.append(key(f"{ours}.shortcut.weight", f"{theirs}.downsample.conv.weight"))
    return table


def _relative(config: ViTConfig) -> Key:
    """Our [tables, H, 2h-1, 2w-1] and [tables, H, 3] are their flat [offsets (+3), H] for each layer, or one shared."""
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
    return key(ours, theirs, Change(read, write))


def bit(config: BiTConfig) -> Table:
    """`resnetv2_*_bit`."""
    table: Table = [key("root.weight", "stem.conv.weight"), *both("norm", "norm")]
    for stage, depth in enumerate(config.stages):
        for block in range(depth):
            table += _bottleneck(f"stages.{stage}.{block}", f"stages.{stage}.blocks.{block}", block == 0)
    if config.classes is not None:
        channels = round(256 * 2 ** (len(config.stages) - 1) * config.factor)
        shape = (config.classes, channels, 1, 1)
        table.append(key("head.weight", "head.fc.weight", reshaped(shape, shape[:2])))
        table.append(key("head.bias", "head.fc.bias"))
    return complete("timm", table, config)


# --- recognising ---


def look(names: Names, facts: Facts, spelling: Spelling = TIMM) -> ViTConfig:
    """The configuration of a Vision Transformer in these names."""
    width, channels, _, _ = projection = names.shape("patch_embed.proj.weight", 4)
    patch = square(projection, "patch_embed.proj.weight")
    embed, channels = _look_embed(names, patch, channels)
    depth = names.count("blocks.{}.")
    gated = spelling.gated[1] != "fc2" and names.anywhere(f"blocks.*.mlp.{spelling.gated[1]}.weight") is not None
    into, out = spelling.gated if gated else ("fc1", "fc2")
    hidden = names.layer_shape(f"blocks.*.mlp.{into}.weight", 2)[0]
    mlp = names.layer_shape(f"blocks.*.mlp.{out}.weight", 2)[1]
    heads, inner = facts.heads(width, "timm"), names.layer_shape("blocks.*.attn.qkv.weight", 2)[0] // 3
    outputs = _look_outputs(names)
    registers = names.shape(spelling.registers, 3)[1] if spelling.registers in names else 0
    prefix = Prefix(outputs, registers)
    position, image_size = _look_position(names, facts, prefix, embed.stride, spelling)
    clip = "norm_pre.weight" in names or "norm_pre.bias" in names
    activation = SwiGLU() if hidden == 2 * mlp else facts.gelu("exact", "timm's default")
    pool = _look_pool(names, facts, prefix)
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
            layer_scale=1e-5 if names.anywhere(f"blocks.*.{spelling.scale.format('*')}") else None,
            qk_norm=names.anywhere("blocks.*.attn.q_norm.*") is not None,
            qkv_bias=names.anywhere("blocks.*.attn.qkv.bias") is not None,
        ),
        pool=pool,
        head=Linear() if pre_logits is None else PreLogits(None if pre_logits == width else pre_logits),
        classes=names.outputs("head"),
        image_size=image_size,
        channels=channels,
        eps=facts.ask("eps", 1e-5 if clip else 1e-6, "timm's default" + (" for CLIP" if clip else "")),
        token_norm=clip,
        init="deit" if outputs == 2 else "vit",
    )


def _look_outputs(names: Names) -> int:
    """Class and distillation tokens. One that got lost left its position behind, and its teacher's head."""
    if "dist_token" in names or "head_dist.weight" in names:
        return 2
    if "cls_token" in names or "pos_embed" not in names:
        return 1 if "cls_token" in names else 0
    rows = names.shape("pos_embed", 3)[1]
    return 1 if not is_square(rows) and is_square(rows - 1) else 0


def _look_embed(names: Names, patch: int, channels: int) -> tuple[Patches | Hybrid, int]:
    backbone = "patch_embed.backbone"
    for stem in (f"{backbone}.stem.conv.weight", f"{backbone}.conv.weight"):
        if stem in names:
            stages = names.count(backbone + ".stages.{}.")
            depths = (names.count(f"{backbone}.stages.{stage}.blocks." + "{}.") for stage in range(stages))
            return Hybrid(tuple(depths), patch), names.shape(stem, 4)[1]
    clip = "norm_pre.weight" in names or "norm_pre.bias" in names  # whose patches have no bias
    return Patches(patch, bias="patch_embed.proj.bias" in names or not clip), channels


def _look_position(
    names: Names, facts: Facts, prefix: Prefix, stride: int, spelling: Spelling
) -> tuple[Learned1D | Relative, tuple[int, int]]:
    relative = {"every": "blocks.0.attn.rel_pos.", "shared": "shared_rel_pos."}
    for at, start in relative.items():
        if f"{start}relative_position_bias_table" in names:
            rows = names.shape(f"{start}relative_position_bias_table", 2)[0] - (3 if prefix.count else 0)
            side = (math.isqrt(max(rows, 0)) + 1) // 2
            height, width = facts.ask("size", (side * stride, side * stride), "a square grid of relative offsets")
            if rows < 1 or (2 * (height // stride) - 1) * (2 * (width // stride) - 1) != rows:
                raise Differs(f"{rows} relative offsets are not those of {height}×{width}: say --assume size=HxW")
            return Relative("every" if at == "every" else "shared"), (height, width)
    rows = names.shape("pos_embed", 3)[1]
    if spelling is DINOV2:
        choices = {"outputs": prefix.outputs}
    else:
        choices = {"all" if prefix.registers else "outputs": prefix.count, "none": 0}
        if facts.told.get("no_embed_class", (False,))[0]:
            choices = {"none": 0}
    told = facts.told.get("size")
    if told is None:
        which, patches = prefix_rows(rows, is_square, choices)
    else:
        wanted = (told[0][0] // stride) * (told[0][1] // stride)
        which, patches = prefix_rows(rows, lambda left: left == wanted, choices)
    h, w = facts.grid(patches, stride)
    return Learned1D(prefix=which), (h * stride, w * stride)  # type: ignore[arg-type]


def _look_pool(names: Names, facts: Facts, prefix: Prefix) -> Any:
    if "attn_pool.latent" in names:
        return MAP()
    if "fc_norm.weight" in names:
        return Mean(norm_after=True)
    if not prefix.outputs:
        return Mean()
    name = facts.ask("pool", "class", "timm's default for a model with a class token")
    if name not in ("class", "mean"):
        raise Differs(f"pool={name}: these tensors can be pooled by class or by mean")
    return ClassToken() if name == "class" else POOLS[name]


def look_bit(names: Names, facts: Facts) -> BiTConfig:
    """The configuration of a BiT ResNet in timm's names."""
    width, channels, kernel, _ = names.shape("stem.conv.weight", 4)
    count = names.count("stages.{}.")
    stages = tuple(names.count(f"stages.{stage}.blocks." + "{}.") for stage in range(count))
    return BiTConfig(
        stages=stages,
        factor=width / 64,
        channels=channels,
        classes=names.outputs("head.fc", 4),
        image_size=facts.ask("size", (224, 224), "any size will do"),
        root="small" if kernel == 3 else "large",
    )


def preprocessing(config: Config, name: str) -> tuple[Preprocessing, str]:
    """timm's pipeline for what these tensors, and the name of the file, are likeliest to be."""
    size = config.image_size
    if isinstance(config, BiTConfig):
        return _cropped(size, 1.0 if size[0] > 224 else 0.875, "bilinear", HALF), "timm's default for BiT"
    if isinstance(config.pool, MAP):
        squashed = Preprocessing(size, size, "squash", "bicubic", **HALF)
        return squashed, "timm's default for attention pooling (SigLIP)"
    if config.token_norm:
        return _cropped(size, 1.0, "bicubic", CLIP), "timm's default for a norm before the blocks (CLIP)"
    fraction = 0.9 if size[0] <= 224 else 1.0
    if config.block.layer_scale is not None or config.prefix.registers:
        return _cropped(size, fraction, "bicubic", IMAGENET), "timm's default for LayerScale (DINOv2, DeiT III)"
    if config.prefix.outputs == 2:
        return _cropped(size, fraction, "bicubic", IMAGENET), "timm's default for a distillation token (DeiT)"
    if isinstance(config.pool, Mean) and config.pool.norm_after and isinstance(config.position, Learned1D):
        return _cropped(size, fraction, "bicubic", IMAGENET), "timm's default for fc_norm (MAE)"
    if named := re.search(r"(?<![a-z])(deit3?|dino(?:v2)?|mae)(?![a-z])", name.lower()):
        return (
            _cropped(size, fraction, "bicubic", IMAGENET),
            f"timm's default for {named[1]}, which the file's name says",
        )
    return (
        _cropped(size, fraction, "bicubic", HALF),
        "timm's default for a plain ViT; DeiT, MAE and DINO have the same tensors and use --assume mean=imagenet",
    )


def _cropped(size: tuple[int, int], fraction: float, interpolation: Any, colours: Colours = HALF) -> Preprocessing:
    resize = (math.floor(size[0] / fraction), math.floor(size[1] / fraction))
    return Preprocessing(size, resize, "cover", interpolation, **colours)


def release(config: Config, name: str, who: str) -> tuple[Preprocessing, str]:
    """The pipeline of Meta's releases that use timm's names: the ImageNet mean, and the centre of a larger image."""
    assert isinstance(config, ViTConfig)
    if who == DINOV2.title and 224 % config.embed.stride == 0:  # trained at 518², evaluated at 224²
        return Preprocessing((224, 224), (256, 256), **IMAGENET), f"{who}'s default"
    if config.image_size[0] > 256:
        return _cropped(config.image_size, 1.0, "bicubic", IMAGENET), f"{who}'s default"
    pipeline = Preprocessing(config.image_size, config.image_size, **IMAGENET)
    return pipeline.larger(256 / 224), f"{who}'s default"


# Architectures whose tensors have the same names and whose arithmetic is another.
STRANGE = re.compile(r"_rpn_|_rope|^vit_pe_|^eva\d*_|_parallel_|_xp_|naflex|^beit")
# Architectures whose heads are not the usual number for their width.
ODD_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt_": 16}


def told(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What the config.json of a timm repository says; without one, what the file's name does."""
    config = settings.get("config.json")
    config = config if isinstance(config, dict) and "pretrained_cfg" in config else {}
    source = "config.json" if config else "the file's name"
    architecture = str(config.get("architecture") or settings.get(FILE_NAME, ""))
    if (config or "_patch" in architecture) and (strange := STRANGE.search(architecture)):
        raise Differs(f"{source} says {architecture}, whose {strange[0].strip('_')} is not among the models here")
    found: dict[str, tuple[Any, str]] = {}
    arguments, cfg = config.get("model_args"), config.get("pretrained_cfg")
    arguments = arguments if isinstance(arguments, dict) else {}
    cfg = cfg if isinstance(cfg, dict) else {}
    heads = next((number for name, number in ODD_HEADS.items() if architecture.startswith(name)), None)
    if heads is not None:
        found["heads"] = (heads, source)
    size = arguments.get("img_size", cfg.get("input_size"))
    size = [size, size] if type(size) is int else size
    if isinstance(size, list) and len(size) in (2, 3) and all(type(side) is int and side > 0 for side in size):
        found["size"] = ((size[-2], size[-1]), source)
    if arguments.get("no_embed_class"):
        found["no_embed_class"] = (True, source)
    if arguments.get("pool_include_prefix"):
        raise Differs("config.json says pool_include_prefix, which is not among the poolings here")
    acts = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick", "quickgelu": "quick"}
    act = arguments.get("act_layer")
    if isinstance(act, str):
        found["gelu"] = (acts.get(act, act), source)
    elif "quickgelu" in architecture:
        found["gelu"] = ("quick", source)
    if type(arguments.get("num_heads")) is int and arguments["num_heads"] > 0:
        found["heads"] = (arguments["num_heads"], source)
    pools = {"token": "class", "avg": "mean", "map": "map", "None": None}
    pool = str(arguments.get("global_pool", config.get("global_pool")))
    if pool not in pools:
        raise Differs(f"config.json says global_pool {pool!r}, which is not among the poolings here")
    if pools[pool] in ("class", "mean"):
        found["pool"] = (pools[pool], source)
    return found


def timm_table(config: Config, root: str, spelling: Spelling = TIMM) -> Table:
    table = rooted(bit(config) if isinstance(config, BiTConfig) else vit(config, spelling), root)
    if isinstance(config, BiTConfig):
        return table
    return [
        *table,
        *(LeftOut(f"{root}decoder_{name}", "MAE decoder") for name in MAE_DECODER),
        LeftOut(f"{root}mask_token", "used in pre-training alone"),
        LeftOut(f"{root}blocks.*.attn.rel_pos.relative_position_index", "computed, not learned"),
        LeftOut(f"{root}shared_rel_pos.relative_position_index", "computed, not learned"),
        *(LEFT_OUTSIDE if root else ()),
    ]


MAE_DECODER = ("embed.*", "blocks.*", "norm.*", "pred.*", "pos_embed")
LEFT_OUTSIDE = (
    LeftOut("head.mlp.*", "DINO head"),
    LeftOut("head.last_layer.*", "DINO head"),
    LeftOut("dino_head.*", "DINO head"),
    LeftOut("ibot_head.*", "iBOT head"),
    LeftOut("text.*", "text tower"),
    LeftOut("logit_scale", "text tower"),
    LeftOut("logit_bias", "text tower"),
)
ROOTS = ("", "backbone.", "encoder.", "visual.trunk.")
TELLING = ("patch_embed.proj.weight", "blocks.*.attn.qkv.weight")


def _release_form(name: str, title: str, spelling: Spelling, telling: tuple[str, ...], example: dict[str, Any]) -> Form:
    return Form(
        name,
        title,
        telling,
        partial(look, spelling=spelling),
        partial(timm_table, spelling=spelling),
        partial(release, who=spelling.title),
        ROOTS,
        told,
        example,
    )


FORMS = (
    _release_form(
        "dinov2",
        "DINOv2's release",
        DINOV2,
        (*TELLING, "mask_token", "blocks.*.ls?.gamma"),
        {"layer_scale": 1.0, "classes": None, "registers": 4},
    ),
    _release_form("deit3", "DeiT III's release", DEIT3, (*TELLING, "blocks.*.gamma_?"), {"layer_scale": 1.0}),
    Form(
        "timm",
        "timm's Vision Transformer, whose names DeiT, MAE and DINO use too",
        TELLING,
        look,
        timm_table,
        preprocessing,
        ROOTS,
        told,
    ),
    Form(
        "timm bit",
        "timm's BiT ResNet",
        ("stem.conv.weight", "stages.0.blocks.0.conv1.weight", "stages.0.blocks.0.downsample.conv.weight"),
        look_bit,
        timm_table,
        preprocessing,
        ("", "backbone."),
        told,
        {"name": "R14x0.25"},
    ),
)


def labels_and_pipeline(
    settings: Mapping[str, Any], size: tuple[int, int]
) -> tuple[tuple[str, ...] | None, Preprocessing | None]:
    """The class names and the pipeline that timm keeps in its config.json."""
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
        raise ValueError(f"config.json's crop_pct is {fraction}")
    if mode not in ("center", "squash"):
        raise ValueError(f"timm's crop mode {mode!r} is not reproduced: give --assume with the pipeline that you mean")
    pipeline = _cropped(size, fraction, cfg["interpolation"])
    colours = {name: tuple(float(v) for v in cfg[name]) for name in ("mean", "std")}
    return labels, replace(pipeline, fit="squash" if mode == "squash" else "cover", **colours)


def arguments(config: Config) -> dict[str, Any] | None:
    """What timm's `VisionTransformer` (or `VisionTransformerDistilled`) takes to be this model; None for the others."""
    if not isinstance(config, ViTConfig) or not isinstance(config.embed, Patches):
        return None
    if not isinstance(config.position, Learned1D) or isinstance(config.block.mlp, SwiGLU):
        return None
    size, block = config.size, config.block
    made: dict[str, Any] = {
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
    made |= {name: value for name, (value, default) in defaults.items() if value != default}
    if isinstance(config.pool, Mean):
        made["fc_norm"] = config.pool.norm_after
    return made

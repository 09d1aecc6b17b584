"""Key table of Google's `.npz` files, vision_transformer and big_vision: Flax's module names joined by slashes.

The two number a layer's parts differently, and in the first the class token has a position. big_vision can also stack all
layers into one tensor ("scan").
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vitrail.checkpoints import formats
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames
from vitrail.checkpoints.keys import IgnoredKeys, KeyTable, Rules, TensorTransform, add_root, map_tensors, permute
from vitrail.data.preprocessing import INCEPTION_STATS, Preprocessing
from vitrail.models.base import TokenConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear
from vitrail.nn.pool import MAP, ClassAndMean, ClassToken, Mean
from vitrail.nn.position import Learned1D, SinCos2D


@dataclass(frozen=True)
class GoogleNaming:
    """The numbering of a layer's parts, and the name of the positions."""

    title: str
    attention: int
    mlp: int
    second_norm: int
    position: str
    scanned: bool = False


VISION_TRANSFORMER = GoogleNaming("vision_transformer", 1, 3, 2, "Transformer/posembed_input/pos_embedding")
BIG_VISION = GoogleNaming("big_vision", 0, 0, 1, "pos_embedding")
SCANNED = GoogleNaming("big_vision, scanned", 0, 0, 1, "pos_embedding", scanned=True)


def _norm(ours: str, theirs: str) -> Rules:
    return {f"{ours}.weight": f"{theirs}/scale", f"{ours}.bias": f"{theirs}/bias"}


def _dense(ours: str, theirs: str) -> Rules:
    return {f"{ours}.weight": (f"{theirs}/kernel", permute(1, 0)), f"{ours}.bias": f"{theirs}/bias"}


def _conv(ours: str, theirs: str) -> Rules:
    """Map a convolution's [h, w, inputs, outputs]."""
    return {f"{ours}.weight": (f"{theirs}/kernel", permute(3, 2, 0, 1))}


def _heads_in(ours: str, theirs: str, parts: tuple[str, ...], heads: int, head: int) -> Rules:
    """Map queries, keys and values: theirs separate, [D, H, d]; ours one matrix, [parts·H·d, D]."""
    weight = TensorTransform(
        read=lambda t: [torch.cat([part.flatten(1).T for part in t])],
        write=lambda o: [part.T.unflatten(1, (heads, head)).contiguous() for part in o[0].chunk(len(parts))],
    )
    bias = TensorTransform(
        read=lambda t: [torch.cat([part.flatten() for part in t])],
        write=lambda o: [part.unflatten(0, (heads, head)).contiguous() for part in o[0].chunk(len(parts))],
    )
    return {
        f"{ours}.weight": (tuple(f"{theirs}/{part}/kernel" for part in parts), weight),
        f"{ours}.bias": (tuple(f"{theirs}/{part}/bias" for part in parts), bias),
    }


def _heads_out(ours: str, theirs: str, heads: int, head: int) -> Rules:
    weight = TensorTransform(
        read=lambda t: [t[0].flatten(0, 1).T.contiguous()],
        write=lambda o: [o[0].T.unflatten(0, (heads, head)).contiguous()],
    )
    return {f"{ours}.weight": (f"{theirs}/out/kernel", weight), f"{ours}.bias": f"{theirs}/out/bias"}


def _embed(config: TokenConfig) -> Rules:
    embed, channels, rules = config.embed, config.channels, Rules()
    if isinstance(embed, Hybrid):
        channels, patch = embed.channels, embed.patch
        rules |= _conv("embed.trunk.root", "conv_root") | _norm("embed.trunk.norm", "gn_root")
        for stage, depth in enumerate(embed.stages):
            for block in range(depth):
                ours, theirs = f"embed.trunk.stages.{stage}.{block}", f"block{stage + 1}/unit{block + 1}"
                for index in (1, 2, 3):
                    rules |= _conv(f"{ours}.conv{index}", f"{theirs}/conv{index}")
                    rules |= _norm(f"{ours}.norm{index}", f"{theirs}/gn{index}")
                rules |= _conv(f"?{ours}.shortcut", f"{theirs}/conv_proj")
                rules |= _norm(f"?{ours}.shortcut_norm", f"{theirs}/gn_proj")
    else:
        patch = formats.require_patches("Google's .npz", config)
    patches = TensorTransform(
        read=lambda t: [t[0].permute(3, 2, 0, 1).flatten(1).contiguous()],
        write=lambda o: [o[0].unflatten(1, (channels, patch, patch)).permute(2, 3, 1, 0).contiguous()],
    )
    return rules | {"embed.projection.weight": ("embedding/kernel", patches), "embed.projection.bias": "embedding/bias"}


def map_vit(config: TokenConfig, naming: GoogleNaming) -> KeyTable:
    """Return the table of a Flax Vision Transformer."""
    heads, head = config.size.heads, config.shape.head_width
    layer, pool = f"Transformer/encoderblock{'' if naming.scanned else '_#'}", "MAPHead_0"
    pool_attention, pool_head = f"{pool}/MultiHeadDotProductAttention_0", config.size.width // heads
    attention = f"{layer}/MultiHeadDotProductAttention_{naming.attention}"
    rules: Rules = {
        **_embed(config),
        "?prefix.outputs": "cls",
        **_norm("blocks.#.norm1", f"{layer}/LayerNorm_0"),
        **_heads_in("blocks.#.msa.qkv", attention, ("query", "key", "value"), heads, head),
        **_heads_out("blocks.#.msa.out", attention, heads, head),
        **_norm("blocks.#.norm2", f"{layer}/LayerNorm_{naming.second_norm}"),
        **_dense("blocks.#.mlp.fc1", f"{layer}/MlpBlock_{naming.mlp}/Dense_0"),
        **_dense("blocks.#.mlp.fc2", f"{layer}/MlpBlock_{naming.mlp}/Dense_1"),
        **_norm("pool.norm", "Transformer/encoder_norm"),
        "?pool.probe": f"{pool}/probe",
        **_heads_in("?pool.q", pool_attention, ("query",), heads, pool_head),
        **_heads_in("?pool.kv", pool_attention, ("key", "value"), heads, pool_head),
        **_heads_out("?pool.out", pool_attention, heads, pool_head),
        **_norm("?pool.norm2", f"{pool}/LayerNorm_0"),
        **_dense("?pool.mlp.fc1", f"{pool}/MlpBlock_0/Dense_0"),
        **_dense("?pool.mlp.fc2", f"{pool}/MlpBlock_0/Dense_1"),
        **_dense("?head.pre_logits", "pre_logits"),
        **_dense("?head.linear", "head"),
    }
    if config.classes is not None and isinstance(config.head, Linear):
        rules |= _dense("head", "head")
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        rules |= {"position.weight": naming.position}
    return map_tensors(naming.title, config, rules)


def read_config(names: TensorNames, assumptions: Assumptions, naming: GoogleNaming) -> ViTConfig:
    """Return the configuration of a Flax Vision Transformer; its shapes also determine the heads."""
    patch, _, channels, width = names.patch_shape("embedding/kernel", sides=(0, 1))
    embed: Patches | Hybrid = Patches(patch)
    if "conv_root/kernel" in names:
        channels = names.shape("conv_root/kernel", 4)[2]
        stages = names.count_layers("block{}/", start=1)
        depths = (names.count_layers(f"block{stage + 1}" + "/unit{}/", start=1) for stage in range(stages))
        embed = Hybrid(tuple(depths), patch)
    first = "Transformer/encoderblock" + ("" if naming.scanned else "_*")
    extra = 1 if naming.scanned else 0
    query = names.layer_shape(f"{first}/MultiHeadDotProductAttention_{naming.attention}/query/kernel", 3 + extra)
    mlp = names.layer_shape(f"{first}/MlpBlock_{naming.mlp}/Dense_0/kernel", 2 + extra)[-1]
    depth = query[0] if naming.scanned else names.count_layers("Transformer/encoderblock_{}/")
    heads, head = query[-2:]
    if depth > formats.MAX_LAYERS:
        raise ValueError(f"at most {formats.MAX_LAYERS:,} layers are supported, got {depth:,}")
    outputs = 1 if "cls" in names else 0
    if naming.position in names:
        which = "outputs" if naming is VISION_TRANSFORMER else "none"
        patches = names.shape(naming.position, 3)[1] - (outputs if naming is VISION_TRANSFORMER else 0)
        resampling = assumptions.resolve_resampling("google", "SciPy's zoom in Google's code")
        position: Any = Learned1D(prefix=which, resampling=resampling)
        image_size = assumptions.resolve_table_size(patches, embed.stride)
    else:
        position = SinCos2D()
        image_size = assumptions.resolve_image_size(embed.stride, "sin-cos positions have no size")
    activation = assumptions.resolve_gelu("tanh", "Flax's default; timm runs the same weights with exact GELU")
    pool = MAP(activation) if "MAPHead_0/probe" in names else ClassToken() if outputs else Mean()
    pre_logits = names.shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in names else None
    return ViTConfig(
        size=Size(depth, width, mlp, heads, None if heads * head == width else head),
        embed=embed,
        position=position,
        prefix=Prefix(outputs),
        block=PreNorm(mlp=activation),
        pool=pool,
        head=formats.choose_head(pre_logits, width),
        classes=names.shape("head/kernel", 2)[1] if "head/kernel" in names else None,
        image_size=image_size,
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, "Flax's default"),
    )


def default_preprocessing(config: TokenConfig, name: str, naming: GoogleNaming) -> tuple[Preprocessing, str]:
    """Return the pipeline: vision_transformer and SigLIP squash without antialiasing, big_vision's ImageNet models crop."""
    size = config.image_size
    if naming is VISION_TRANSFORMER or isinstance(config.pool, MAP):
        squash = Preprocessing(size, size, "squash", "bilinear", antialias=False, engine="torch", **INCEPTION_STATS)
        source = "vision_transformer's default" if naming is VISION_TRANSFORMER else "big_vision's default for SigLIP"
        return squash, source
    pipeline = Preprocessing(size, size, "cover", "box", **INCEPTION_STATS)
    return pipeline.with_resize_factor(256 / 224), "big_vision's default for ImageNet"


def _build_table(config: TokenConfig, root: str, naming: GoogleNaming) -> KeyTable:
    outer = root.removesuffix("img/")
    ignored = dict.fromkeys((f"{outer}{name}" for name in ("txt/*", "t", "b")), "text tower") if outer != root else {}
    ignored |= {"opt/state/*": "optimiser", "opt/count": "optimiser"}
    return [*add_root(map_vit(config, naming), root), *(IgnoredKeys(name, why) for name, why in ignored.items())]


def _make_format(name: str, title: str, naming: GoogleNaming) -> CheckpointFormat:
    layer = "Transformer/encoderblock" + ("" if naming.scanned else "_*")
    return CheckpointFormat(
        name,
        title,
        ("embedding/kernel", f"{layer}/MultiHeadDotProductAttention_{naming.attention}/query/kernel"),
        partial(read_config, naming=naming),
        partial(_build_table, naming=naming),
        partial(default_preprocessing, naming=naming),
        ("", "params/", "params/img/", "img/", "opt/target/"),
    )


FORMATS = (
    _make_format("vision_transformer", "Google's vision_transformer", VISION_TRANSFORMER),
    _make_format("big_vision", "Google's big_vision", BIG_VISION),
    _make_format("big_vision scanned", "Google's big_vision with stacked layers", SCANNED),
)


def choose_naming(config: TokenConfig) -> GoogleNaming:
    """Return the naming of a configuration: in vision_transformer, the class token has a position."""
    covers = isinstance(config.position, Learned1D) and config.position.prefix != "none" and config.prefix.outputs
    return VISION_TRANSFORMER if covers or isinstance(config.embed, Hybrid) else BIG_VISION


def list_limits(config: TokenConfig) -> Reasons:
    """Return why Google's code cannot express a model, apart from its tensor names."""
    position, prefix, pool, width = config.position, config.prefix, config.pool, config.size.width
    at_stem = isinstance(position, Learned1D | SinCos2D) and position.at == "stem"
    mean = isinstance(pool, Mean)
    return {
        "it only has learned 1-D or 2-D sin-cos positions at the stem": not at_stem,
        formats.SIN_COS_LIMIT: isinstance(position, SinCos2D) and position != SinCos2D(),
        "it has no distillation token and no registers": prefix.outputs == 2 or prefix.registers > 0,
        "it applies the norm before the mean": mean and pool.norm_after,
        "it has no pooling of class token and mean together": isinstance(pool, ClassAndMean),
        "its models with mean pooling have no class token": mean and prefix.outputs > 0,
        "the heads of its attention pooling divide the width": isinstance(pool, MAP) and width % config.size.heads > 0,
        "its patches have a bias": isinstance(config.embed, Patches) and not config.embed.bias,
    }

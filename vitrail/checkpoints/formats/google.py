"""Key table of Google's `.npz` files, vision_transformer and big_vision: Flax's module names joined by slashes.

The two number a layer's parts differently, and in the first the class token has a position. big_vision can also stack all
layers into one tensor ("scan").
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vitrail.checkpoints.architecture import (
    MAX_LAYERS,
    Assumptions,
    CheckpointFormat,
    FormatMismatchError,
    TensorNames,
    get_patch_size,
)
from vitrail.checkpoints.keys import (
    IgnoredKeys,
    KeyMapping,
    KeyTable,
    Tensors,
    TensorTransform,
    add_root,
    check_complete,
    map_key,
    stack_layers,
    transpose,
)
from vitrail.data.preprocessing import INCEPTION_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.head import Linear, PreLogits
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


def _map_norm(ours: str, theirs: str) -> list[KeyMapping]:
    return [map_key(f"{ours}.weight", f"{theirs}/scale"), map_key(f"{ours}.bias", f"{theirs}/bias")]


def _map_dense(ours: str, theirs: str) -> list[KeyMapping]:
    return [map_key(f"{ours}.weight", f"{theirs}/kernel", transpose()), map_key(f"{ours}.bias", f"{theirs}/bias")]


def _map_conv(ours: str, theirs: str) -> KeyMapping:
    """Map a convolution's [h, w, inputs, outputs]."""
    order = TensorTransform(
        read=lambda t: [t[0].permute(3, 2, 0, 1).contiguous()], write=lambda o: [o[0].permute(2, 3, 1, 0).contiguous()]
    )
    return map_key(ours, theirs, order)


def _map_patches(ours: str, theirs: str, channels: int, patch: int) -> KeyMapping:
    def read(t: Tensors) -> Tensors:
        return [t[0].permute(3, 2, 0, 1).flatten(1).contiguous()]

    def write(o: Tensors) -> Tensors:
        return [o[0].unflatten(1, (channels, patch, patch)).permute(2, 3, 1, 0).contiguous()]

    return map_key(ours, theirs, TensorTransform(read, write))


def _map_heads_in(ours: str, theirs: str, parts: tuple[str, ...], heads: int, head: int) -> list[KeyMapping]:
    """Map queries, keys and values: theirs separate, [D, H, d]; ours one matrix, [parts·H·d, D]."""
    weight = TensorTransform(
        read=lambda t: [torch.cat([part.flatten(1).T for part in t])],
        write=lambda o: [part.T.unflatten(1, (heads, head)).contiguous() for part in o[0].chunk(len(parts))],
    )
    bias = TensorTransform(
        read=lambda t: [torch.cat([part.flatten() for part in t])],
        write=lambda o: [part.unflatten(0, (heads, head)).contiguous() for part in o[0].chunk(len(parts))],
    )
    return [
        map_key(f"{ours}.weight", tuple(f"{theirs}/{part}/kernel" for part in parts), weight),
        map_key(f"{ours}.bias", tuple(f"{theirs}/{part}/bias" for part in parts), bias),
    ]


def _map_heads_out(ours: str, theirs: str, heads: int, head: int) -> list[KeyMapping]:
    weight = TensorTransform(
        read=lambda t: [t[0].flatten(0, 1).T.contiguous()],
        write=lambda o: [o[0].T.unflatten(0, (heads, head)).contiguous()],
    )
    return [map_key(f"{ours}.weight", f"{theirs}/out/kernel", weight), map_key(f"{ours}.bias", f"{theirs}/out/bias")]


def _map_layer(config: TokenConfig, layer: int, naming: GoogleNaming) -> list[KeyMapping]:
    ours = f"blocks.{layer}"
    theirs = "Transformer/encoderblock" + ("" if naming.scanned else f"_{layer}")
    attention = f"{theirs}/MultiHeadDotProductAttention_{naming.attention}"
    heads, head = config.size.heads, config.shape.head_width
    return [
        *_map_norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0"),
        *_map_heads_in(f"{ours}.msa.qkv", attention, ("query", "key", "value"), heads, head),
        *_map_heads_out(f"{ours}.msa.out", attention, heads, head),
        *_map_norm(f"{ours}.norm2", f"{theirs}/LayerNorm_{naming.second_norm}"),
        *_map_dense(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_{naming.mlp}/Dense_0"),
        *_map_dense(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_{naming.mlp}/Dense_1"),
    ]


def _map_embed(config: TokenConfig) -> list[KeyMapping]:
    embed = config.embed
    if isinstance(embed, Patches):
        table = [_map_patches("embed.projection.weight", "embedding/kernel", config.channels, embed.patch)]
    elif isinstance(embed, Hybrid):
        channels = 64 if not embed.stages else 256 * 2 ** (len(embed.stages) - 1)
        table = [
            _map_conv("embed.trunk.root.weight", "conv_root/kernel"),
            *_map_norm("embed.trunk.norm", "gn_root"),
            _map_patches("embed.projection.weight", "embedding/kernel", channels, embed.patch),
        ]
        for stage, depth in enumerate(embed.stages):
            for block in range(depth):
                ours, theirs = f"embed.trunk.stages.{stage}.{block}", f"block{stage + 1}/unit{block + 1}"
                for index in (1, 2, 3):
                    table.append(_map_conv(f"{ours}.conv{index}.weight", f"{theirs}/conv{index}/kernel"))
                    table += _map_norm(f"{ours}.norm{index}", f"{theirs}/gn{index}")
                if block == 0:
                    table.append(_map_conv(f"{ours}.shortcut.weight", f"{theirs}/conv_proj/kernel"))
                    table += _map_norm(f"{ours}.shortcut_norm", f"{theirs}/gn_proj")
    else:
        raise ValueError(f"Google's .npz cannot express this model: it has no {type(embed).__name__}")
    return [*table, map_key("embed.projection.bias", "embedding/bias")]


def map_vit(config: TokenConfig, naming: GoogleNaming) -> KeyTable:
    """Return the table of a Flax Vision Transformer."""
    heads, head = config.size.heads, config.shape.head_width
    table: KeyTable = [*_map_embed(config)]
    if config.prefix.outputs:
        table.append(map_key("prefix.outputs", "cls"))
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        table.append(map_key("position.weight", naming.position))
    layers = [_map_layer(config, layer, naming) for layer in range(config.size.depth)]
    table += stack_layers(layers) if naming.scanned else [entry for layer in layers for entry in layer]
    table += _map_norm("pool.norm", "Transformer/encoder_norm")
    if isinstance(config.pool, MAP):
        pool = "MAPHead_0"
        attention = f"{pool}/MultiHeadDotProductAttention_0"
        table.append(map_key("pool.probe", f"{pool}/probe"))
        table += _map_heads_in("pool.q", attention, ("query",), heads, head)
        table += _map_heads_in("pool.kv", attention, ("key", "value"), heads, head)
        table += _map_heads_out("pool.out", attention, heads, head)
        table += _map_norm("pool.norm2", f"{pool}/LayerNorm_0")
        table += _map_dense("pool.mlp.fc1", f"{pool}/MlpBlock_0/Dense_0")
        table += _map_dense("pool.mlp.fc2", f"{pool}/MlpBlock_0/Dense_1")
    if isinstance(config.head, PreLogits):
        table += _map_dense("head.pre_logits", "pre_logits")
        if config.classes is not None:
            table += _map_dense("head.linear", "head")
    elif config.classes is not None:
        table += _map_dense("head", "head")
    return check_complete(naming.title, table, config)


def read_config(names: TensorNames, facts: Assumptions, naming: GoogleNaming) -> ViTConfig:
    """Return the configuration of a Flax Vision Transformer; its shapes also determine the heads."""
    kernel = names.shape("embedding/kernel", 4)
    patch, channels, width = get_patch_size(kernel[:2], "embedding/kernel"), kernel[2], kernel[3]
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
    if depth > MAX_LAYERS:
        raise FormatMismatchError(f"too many layers: {depth:,}")
    outputs = 1 if "cls" in names else 0
    if naming.position in names:
        which = "outputs" if naming is VISION_TRANSFORMER else "none"
        patches = names.shape(naming.position, 3)[1] - (outputs if naming is VISION_TRANSFORMER else 0)
        h, w = facts.resolve_grid(patches, embed.stride)
        position: Any = Learned1D(prefix=which)
        image_size = (h * embed.stride, w * embed.stride)
    else:
        position = SinCos2D()
        image_size = facts.resolve_image_size(embed.stride, "sin-cos positions have no size")
    activation = facts.resolve_gelu("tanh", "Flax's default; timm runs the same weights with exact GELU")
    pool = MAP(activation) if "MAPHead_0/probe" in names else ClassToken() if outputs else Mean()
    pre_logits = names.shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in names else None
    return ViTConfig(
        size=Size(depth, width, mlp, heads, None if heads * head == width else head),
        embed=embed,
        position=position,
        prefix=Prefix(outputs),
        block=PreNorm(mlp=activation),
        pool=pool,
        head=Linear() if pre_logits is None else PreLogits(None if pre_logits == width else pre_logits),
        classes=names.shape("head/kernel", 2)[1] if "head/kernel" in names else None,
        image_size=image_size,
        channels=channels,
        eps=facts.resolve("eps", 1e-6, "Flax's default"),
    )


def default_preprocessing(config: ModelConfig, name: str, naming: GoogleNaming) -> tuple[Preprocessing, str]:
    """Return the pipeline: vision_transformer and SigLIP squash without antialiasing, big_vision's ImageNet models crop."""
    assert isinstance(config, ViTConfig)
    size = config.image_size
    if naming is VISION_TRANSFORMER or isinstance(config.pool, MAP):
        squash = Preprocessing(size, size, "squash", "bilinear", antialias=False, engine="torch", **INCEPTION_STATS)
        source = "vision_transformer's default" if naming is VISION_TRANSFORMER else "big_vision's default for SigLIP"
        return squash, source
    pipeline = Preprocessing(size, size, "cover", "box", **INCEPTION_STATS)
    return pipeline.with_resize_factor(256 / 224), "big_vision's default for ImageNet"


def _build_table(config: ModelConfig, root: str, naming: GoogleNaming) -> KeyTable:
    assert isinstance(config, ViTConfig)
    table = add_root(map_vit(config, naming), root)
    if root.endswith("img/"):
        outer = root.removesuffix("img/")
        table += [IgnoredKeys(f"{outer}{name}", "text tower") for name in ("txt/*", "t", "b")]
    return [*table, IgnoredKeys("opt/state/*", "optimiser"), IgnoredKeys("opt/count", "optimiser")]


def _make_format(name: str, title: str, naming: GoogleNaming, required_keys: tuple[str, ...]) -> CheckpointFormat:
    return CheckpointFormat(
        name,
        title,
        ("embedding/kernel", *required_keys),
        partial(read_config, naming=naming),
        partial(_build_table, naming=naming),
        partial(default_preprocessing, naming=naming),
        ("", "params/", "params/img/", "img/", "opt/target/"),
    )


FORMATS = (
    _make_format(
        "vision_transformer",
        "Google's vision_transformer",
        VISION_TRANSFORMER,
        ("Transformer/encoderblock_*/MultiHeadDotProductAttention_1/query/kernel",),
    ),
    _make_format(
        "big_vision",
        "Google's big_vision",
        BIG_VISION,
        ("Transformer/encoderblock_*/MultiHeadDotProductAttention_0/query/kernel",),
    ),
    _make_format(
        "big_vision scanned",
        "Google's big_vision with stacked layers",
        SCANNED,
        ("Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel",),
    ),
)


def choose_naming(config: TokenConfig) -> GoogleNaming:
    """Return the naming of a configuration: in vision_transformer, the class token has a position."""
    covers = isinstance(config.position, Learned1D) and config.position.prefix != "none" and config.prefix.outputs
    return VISION_TRANSFORMER if covers or isinstance(config.embed, Hybrid) else BIG_VISION


def list_unsupported(config: TokenConfig) -> list[str]:
    """Return why Google's code cannot express a model, apart from its tensor names."""
    reasons = []
    if not isinstance(config.position, Learned1D | SinCos2D) or config.position.at != "stem":
        reasons.append("it only has learned 1-D or 2-D sin-cos positions at the stem")
    if isinstance(config.position, SinCos2D) and config.position != SinCos2D():
        reasons.append("its sin-cos positions have the frequencies of end=True")
    if config.prefix.outputs == 2 or config.prefix.registers:
        reasons.append("it has no distillation token and no registers")
    if isinstance(config.pool, Mean) and config.pool.norm_after:
        reasons.append("it applies the norm before the mean")
    if isinstance(config.pool, ClassAndMean):
        reasons.append("it has no pooling of class token and mean together")
    if isinstance(config.pool, Mean) and config.prefix.outputs:
        reasons.append("its models with mean pooling have no class token")
    if isinstance(config.embed, Patches) and not config.embed.bias:
        reasons.append("its patches have a bias")
    return reasons

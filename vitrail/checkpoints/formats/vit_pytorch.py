"""Key tables of vit-pytorch's `ViT` and `SimpleViT`: patches flattened pixel by pixel, with a norm on both sides."""

import math

from vitrail.checkpoints.architecture import Assumptions, CheckpointFormat, FormatMismatchError, TensorNames
from vitrail.checkpoints.keys import (
    KeyTable,
    add_root,
    check_complete,
    map_empty,
    map_key,
    map_layer,
    reorder_patches,
    reshape,
)
from vitrail.data.preprocessing import INCEPTION_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.pool import ClassToken, Mean
from vitrail.nn.position import Learned1D, SinCos2D


def _map_patches(config: TokenConfig) -> KeyTable:
    if not (isinstance(config.embed, Patches) and config.embed.normed):
        raise ValueError("vit-pytorch cannot express this model: it has a norm before and after its patch projection")
    order = reorder_patches(config.channels, config.embed.patch)
    return [
        *map_layer("embed.norm_in", "to_patch_embedding.1", order),
        map_key("embed.projection.weight", "to_patch_embedding.2.weight", order),
        map_key("embed.projection.bias", "to_patch_embedding.2.bias"),
        *map_layer("embed.norm_out", "to_patch_embedding.3"),
    ]


def _map_layer(layer: int) -> KeyTable:
    ours, theirs = f"blocks.{layer}", f"transformer.layers.{layer}"
    return [
        *map_layer(f"{ours}.norm1", f"{theirs}.0.norm"),
        map_key(f"{ours}.msa.qkv.weight", f"{theirs}.0.to_qkv.weight"),
        *map_layer(f"{ours}.norm2", f"{theirs}.1.net.0"),
        *map_layer(f"{ours}.mlp.fc1", f"{theirs}.1.net.1"),
    ]


def map_vit(config: TokenConfig) -> KeyTable:
    """Return the table of `vit_pytorch.ViT`."""
    width, rows = config.size.width, config.prefix.outputs + config.shape.patches
    table = _map_patches(config)
    if config.prefix.outputs:
        table.append(map_key("prefix.outputs", "cls_token", reshape((1, width), (1, 1, width))))
    else:
        table.append(map_empty("cls_token", 0, width))
    table.append(map_key("position.weight", "pos_embedding", reshape((rows, width), (1, rows, width))))
    for layer in range(config.size.depth):
        theirs = f"transformer.layers.{layer}"
        table += _map_layer(layer) + map_layer(f"blocks.{layer}.msa.out", f"{theirs}.0.to_out.0")
        table += map_layer(f"blocks.{layer}.mlp.fc2", f"{theirs}.1.net.4")
    table += map_layer("pool.norm", "transformer.norm")
    if config.classes is not None:
        table += map_layer("head", "mlp_head")
    return check_complete("vit-pytorch's ViT", table, config)


def map_simple_vit(config: TokenConfig) -> KeyTable:
    """Return the table of `vit_pytorch.SimpleViT`: fixed sin-cos positions, mean pooling, no bias in attention."""
    table = _map_patches(config)
    for layer in range(config.size.depth):
        theirs = f"transformer.layers.{layer}"
        table += _map_layer(layer)
        table.append(map_key(f"blocks.{layer}.msa.out.weight", f"{theirs}.0.to_out.weight"))
        table += map_layer(f"blocks.{layer}.mlp.fc2", f"{theirs}.1.net.3")
    table += map_layer("pool.norm", "transformer.norm")
    if config.classes is not None:
        table += map_layer("head", "linear_head")
    return check_complete("vit-pytorch's SimpleViT", table, config)


# --- detection ---


def read_config(names: TensorNames, facts: Assumptions) -> ViTConfig:
    """Return the configuration of either. The channels are not recorded: three, if that leaves a square patch."""
    width, values = names.shape("to_patch_embedding.2.weight", 2)
    default = next((c for c in (3, 1, 4, 2) if values % c == 0 and math.isqrt(values // c) ** 2 * c == values), None)
    channels = facts.resolve("channels", default, "the most likely for a square patch")
    patch = math.isqrt(values // max(channels, 1))
    if patch * patch * channels != values:
        raise FormatMismatchError(f"{values} values are no square patch of {channels} channels")
    inner = names.layer_shape("transformer.layers.*.0.to_qkv.weight", 2)[0] // 3
    heads = facts.resolve(
        "heads", inner // 64 if inner % 64 == 0 else None, "vit-pytorch's default, 64 values per head"
    )
    if inner % heads:
        raise FormatMismatchError(f"{heads} heads do not divide {inner} values")
    simple = names.find("transformer.layers.*.0.to_out.weight") is not None
    outputs, head = 0, "linear_head" if simple else "mlp_head"
    if simple:
        position, image_size = SinCos2D(), facts.resolve_image_size(patch, "sin-cos positions have no size")
    else:
        outputs = 1 if names.shapes.get(f"{names.root}cls_token", (0,))[0] == 1 else 0
        h, w = facts.resolve_grid(names.shape("pos_embedding", 2)[0] - outputs, patch)
        position, image_size = Learned1D(), (h * patch, w * patch)
    return ViTConfig(
        size=Size(
            depth=names.count_layers("transformer.layers.{}."),
            width=width,
            mlp=names.layer_shape("transformer.layers.*.1.net.1.weight", 2)[0],
            heads=heads,
            head=None if inner == width else inner // heads,
        ),
        embed=Patches(patch, normed=True),
        position=position,
        prefix=Prefix(outputs),
        block=PreNorm(mlp=facts.resolve_gelu("exact", "vit-pytorch's default"), qkv_bias=False, out_bias=not simple),
        pool=ClassToken() if outputs else Mean(),
        classes=names.output_dim(head),
        image_size=image_size,
        channels=channels,
        eps=facts.resolve("eps", 1e-5, "vit-pytorch's default"),
    )


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return a generic pipeline: vit-pytorch defines none."""
    pipeline = Preprocessing(config.image_size, config.image_size, "squash", "bilinear", **INCEPTION_STATS)
    return pipeline.with_channels(config.channels), "generic: vit-pytorch defines none"


def build_table(config: ModelConfig, root: str = "") -> KeyTable:
    """Return the table of `ViT` or of `SimpleViT` for a configuration."""
    assert isinstance(config, ViTConfig)
    return add_root(map_vit(config) if isinstance(config.position, Learned1D) else map_simple_vit(config), root)


_EXAMPLE = {"embed": Patches(16, normed=True), "block": PreNorm(qkv_bias=False)}
_SIMPLE_EXAMPLE = {"block": PreNorm(qkv_bias=False, out_bias=False), "position": "sincos2d", "pool": "mean"}
_REQUIRED_KEYS = ("to_patch_embedding.2.weight", "transformer.layers.*.0.to_qkv.weight")
FORMATS = (
    CheckpointFormat(
        "vit-pytorch",
        "vit-pytorch's ViT",
        (*_REQUIRED_KEYS, "pos_embedding"),
        read_config,
        build_table,
        default_preprocessing,
        example=_EXAMPLE,
    ),
    CheckpointFormat(
        "vit-pytorch simple",
        "vit-pytorch's SimpleViT",
        (*_REQUIRED_KEYS, "transformer.layers.*.0.to_out.weight"),
        read_config,
        build_table,
        default_preprocessing,
        example=_EXAMPLE | _SIMPLE_EXAMPLE,
    ),
)


def list_unsupported(config: TokenConfig) -> list[str]:
    """Return why vit-pytorch cannot express a model, apart from its tensor names."""
    reasons = []
    if config.block.qkv_bias:
        reasons.append("its queries, keys and values have no bias")
    if not (isinstance(config.embed, Patches) and config.embed.normed):
        reasons.append("it has a norm before and after its patch projection")
    simple = not config.block.out_bias
    positions = SinCos2D if simple else Learned1D
    if not isinstance(config.position, positions) or config.position.at != "stem":
        reasons.append(f"its {'SimpleViT' if simple else 'ViT'} has other positions")
    elif isinstance(config.position, SinCos2D) and config.position != SinCos2D():
        reasons.append("its sin-cos positions have the frequencies of end=True")
    if config.prefix.registers or config.prefix.outputs == 2:
        reasons.append("it has no registers and no distillation token")
    if isinstance(config.pool, Mean) == bool(config.prefix.outputs) or config.pool not in (ClassToken(), Mean()):
        reasons.append("it reads the class token, or the mean without one")
    return reasons

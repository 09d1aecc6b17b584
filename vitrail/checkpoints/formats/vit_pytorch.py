"""Key tables of vit-pytorch's `ViT` and `SimpleViT`: patches flattened pixel by pixel, with a norm on both sides."""

import math
from typing import Any

import torch

from vitrail.checkpoints import keys
from vitrail.checkpoints.formats import SIN_COS_LIMIT, Assumptions, CheckpointFormat, Reasons, TensorNames
from vitrail.checkpoints.keys import KeyMapping, KeyTable, Rules, TensorTransform
from vitrail.data.preprocessing import INCEPTION_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches, Prefix
from vitrail.nn.pool import ClassToken, Mean
from vitrail.nn.position import Learned1D, SinCos2D


def map_vit(config: TokenConfig) -> KeyTable:
    """Return the table of `vit_pytorch.ViT`."""
    width, rows = config.size.width, config.prefix.outputs + config.shape.patches
    rules: Rules = {
        "?prefix.outputs": ("cls_token", keys.reshape((1, width), (1, 1, width))),
        "position.weight": ("pos_embedding", keys.reshape((rows, width), (1, rows, width))),
        "blocks.#.msa.out.*": "transformer.layers.#.0.to_out.0.*",
        "blocks.#.mlp.fc2.*": "transformer.layers.#.1.net.4.*",
        "?head.*": "mlp_head.*",
    }
    empty = TensorTransform(read=lambda t: [], write=lambda o: [torch.zeros(0, width)])  # written without a class token
    no_token = [] if config.prefix.outputs else [KeyMapping((), ("cls_token",), empty)]
    return keys.map_tensors("vit-pytorch's ViT", config, _list_shared_rules(config) | rules, *no_token)


def map_simple_vit(config: TokenConfig) -> KeyTable:
    """Return the table of `vit_pytorch.SimpleViT`: fixed sin-cos positions, mean pooling, no bias in attention."""
    rules: Rules = {
        "blocks.#.msa.out.weight": "transformer.layers.#.0.to_out.weight",
        "blocks.#.mlp.fc2.*": "transformer.layers.#.1.net.3.*",
        "?head.*": "linear_head.*",
    }
    return keys.map_tensors("vit-pytorch's SimpleViT", config, _list_shared_rules(config) | rules)


def _list_shared_rules(config: TokenConfig) -> Rules:
    """Return the rules that both classes share."""
    if not (isinstance(config.embed, Patches) and config.embed.normed):
        raise ValueError("vit-pytorch cannot express this model: it has a norm before and after its patch projection")
    order = keys.reorder_patches(config.channels, config.embed.patch)
    return {
        "embed.norm_in.*": ("to_patch_embedding.1.*", order),
        "embed.projection.weight": ("to_patch_embedding.2.weight", order),
        "embed.projection.bias": "to_patch_embedding.2.bias",
        "embed.norm_out.*": "to_patch_embedding.3.*",
        "blocks.#.norm1.*": "transformer.layers.#.0.norm.*",
        "blocks.#.msa.qkv.weight": "transformer.layers.#.0.to_qkv.weight",
        "blocks.#.norm2.*": "transformer.layers.#.1.net.0.*",
        "blocks.#.mlp.fc1.*": "transformer.layers.#.1.net.1.*",
        "pool.norm.*": "transformer.norm.*",
    }


# --- detection ---


def read_config(names: TensorNames, assumptions: Assumptions) -> ViTConfig:
    """Return the configuration of either. The channels are not recorded: three, if that leaves a square patch."""
    width, values = names.shape("to_patch_embedding.2.weight", 2)
    default = next((c for c in (3, 1, 4, 2) if values % c == 0 and math.isqrt(values // c) ** 2 * c == values), None)
    channels = assumptions.resolve("channels", default, "the most likely for a square patch")
    patch = math.isqrt(values // max(channels, 1))
    if patch * patch * channels != values:
        raise ValueError(f"{values} values are no square patch of {channels} channels")
    inner = names.layer_shape("transformer.layers.*.0.to_qkv.weight", 2)[0] // 3
    usual = inner // 64 if inner % 64 == 0 else None
    heads = assumptions.resolve("heads", usual, "vit-pytorch's default, 64 values per head")
    if inner % heads:
        raise ValueError(f"{heads} heads do not divide {inner} values")
    simple = names.find("transformer.layers.*.0.to_out.weight") is not None
    outputs, head = 0, "linear_head" if simple else "mlp_head"
    if simple:
        position, image_size = SinCos2D(), assumptions.resolve_image_size(patch, "sin-cos positions have no size")
    else:
        outputs = 1 if names.shapes.get(f"{names.root}cls_token", (0,))[0] == 1 else 0
        resampling = assumptions.resolve_resampling("timm", "vitrail's default; vit-pytorch has one image size")
        position = Learned1D(resampling=resampling)
        image_size = assumptions.resolve_table_size(names.shape("pos_embedding", 2)[0] - outputs, patch)
    gelu = assumptions.resolve_gelu("exact", "vit-pytorch's default")
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
        block=PreNorm(mlp=gelu, qkv_bias=False, out_bias=not simple),
        pool=ClassToken() if outputs else Mean(),
        classes=names.output_dim(head),
        image_size=image_size,
        channels=channels,
        eps=assumptions.resolve("eps", 1e-5, "vit-pytorch's default"),
    )


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return a generic pipeline: vit-pytorch defines none."""
    pipeline = Preprocessing(config.image_size, config.image_size, "squash", "bilinear", **INCEPTION_STATS)
    return pipeline.with_channels(config.channels), "generic: vit-pytorch defines none"


def build_table(config: TokenConfig, root: str = "") -> KeyTable:
    """Return the table of `ViT` or of `SimpleViT` for a configuration."""
    return keys.add_root(map_vit(config) if isinstance(config.position, Learned1D) else map_simple_vit(config), root)


def _make_format(name: str, title: str, required_key: str, example: dict[str, Any]) -> CheckpointFormat:
    required = ("to_patch_embedding.2.weight", "transformer.layers.*.0.to_qkv.weight", required_key)
    example = {"embed": Patches(16, normed=True), "block": PreNorm(qkv_bias=False), **example}
    return CheckpointFormat(name, title, required, read_config, build_table, default_preprocessing, example=example)


SIMPLE_VIT = {"block": PreNorm(qkv_bias=False, out_bias=False), "position": "sincos2d", "pool": "mean"}
FORMATS = (
    _make_format("vit-pytorch", "vit-pytorch's ViT", "pos_embedding", {}),
    _make_format("vit-pytorch simple", "vit-pytorch's SimpleViT", "transformer.layers.*.0.to_out.weight", SIMPLE_VIT),
)


def list_limits(config: TokenConfig) -> Reasons:
    """Return why vit-pytorch cannot express a model, apart from its tensor names."""
    position, prefix = config.position, config.prefix
    kind, slot = ("ViT", Learned1D) if config.block.out_bias else ("SimpleViT", SinCos2D)
    fits = isinstance(position, slot) and position.at == "stem"
    pool = ClassToken() if prefix.outputs else Mean()
    return {
        "its queries, keys and values have no bias": config.block.qkv_bias,
        "it has a norm before and after its patch projection": not getattr(config.embed, "normed", False),
        f"its {kind} has other positions": not fits,
        SIN_COS_LIMIT: fits and isinstance(position, SinCos2D) and position != SinCos2D(),
        "it has no registers and no distillation token": prefix.registers > 0 or prefix.outputs == 2,
        "it reads the class token, or the mean without one": config.pool != pool,
    }

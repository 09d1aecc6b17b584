"""Key table of torchvision's `vit_b_16` and its siblings, and of the SWAG weights published for them."""

from functools import partial

from vitrail.checkpoints.architecture import (
    Assumptions,
    CheckpointFormat,
    TensorNames,
    get_patch_size,
    list_commonly_unsupported,
)
from vitrail.checkpoints.keys import KeyTable, add_root, check_complete, map_key, map_layer, reshape
from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.pool import ClassToken

MLP_NAMES = ("0", "3")
OLD_MLP_NAMES = ("linear_1", "linear_2")  # before torchvision 0.13, and in its published files


def map_vit(config: TokenConfig, mlp: tuple[str, str] = MLP_NAMES) -> KeyTable:
    """Return the table of `torchvision.models.VisionTransformer`."""
    if not isinstance(config.embed, Patches):
        raise ValueError(f"torchvision cannot express this model: it has no {type(config.embed).__name__}")
    width = config.size.width
    shape = (width, config.channels, config.embed.patch, config.embed.patch)
    table: KeyTable = [
        map_key("embed.projection.weight", "conv_proj.weight", reshape(shape, (width, -1))),
        map_key("embed.projection.bias", "conv_proj.bias"),
        map_key("prefix.outputs", "class_token"),
        map_key("position.weight", "encoder.pos_embedding"),
    ]
    for layer in range(config.size.depth):
        ours, theirs = f"blocks.{layer}", f"encoder.layers.encoder_layer_{layer}"
        table += map_layer(f"{ours}.norm1", f"{theirs}.ln_1")
        table.append(map_key(f"{ours}.msa.qkv.weight", f"{theirs}.self_attention.in_proj_weight"))
        table.append(map_key(f"{ours}.msa.qkv.bias", f"{theirs}.self_attention.in_proj_bias"))
        table += map_layer(f"{ours}.msa.out", f"{theirs}.self_attention.out_proj")
        table += map_layer(f"{ours}.norm2", f"{theirs}.ln_2")
        table += map_layer(f"{ours}.mlp.fc1", f"{theirs}.mlp.{mlp[0]}") + map_layer(
            f"{ours}.mlp.fc2", f"{theirs}.mlp.{mlp[1]}"
        )
    table += map_layer("pool.norm", "encoder.ln")
    if isinstance(config.head, PreLogits):
        table += map_layer("head.pre_logits", "heads.pre_logits")
        if config.classes is not None:
            table += map_layer("head.linear", "heads.head")
    elif config.classes is not None:
        table += map_layer("head", "heads.head")
    return check_complete("torchvision", table, config)


def read_config(names: TensorNames, facts: Assumptions, mlp: tuple[str, str]) -> ViTConfig:
    """Return the configuration of a torchvision Vision Transformer."""
    width, channels, _, _ = projection = names.shape("conv_proj.weight", 4)
    patch = get_patch_size(projection, "conv_proj.weight")
    h, w = facts.resolve_grid(names.shape("encoder.pos_embedding", 3)[1] - 1, patch)
    hidden = names.shape("heads.pre_logits.weight", 2)[0] if "heads.pre_logits.weight" in names else None
    return ViTConfig(
        size=Size(
            depth=names.count_layers("encoder.layers.encoder_layer_{}."),
            width=width,
            mlp=names.layer_shape(f"encoder.layers.encoder_layer_*.mlp.{mlp[0]}.weight", 2)[0],
            heads=facts.resolve_heads(width, "torchvision"),
        ),
        embed=Patches(patch),
        block=PreNorm(mlp=facts.resolve_gelu("exact", "torchvision's default")),
        head=Linear() if hidden is None else PreLogits(None if hidden == width else hidden),
        classes=names.output_dim("heads.head"),
        image_size=(h * patch, w * patch),
        channels=channels,
        eps=facts.resolve("eps", 1e-6, "torchvision's default"),
    )


def default_preprocessing(config: ModelConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the pipeline: SWAG's for sizes above 224, for H/14 at 224, and for file names with "swag"."""
    assert isinstance(config, ViTConfig)
    size, width = config.image_size, config.size.width
    bicubic = Preprocessing(size, size, "cover", "bicubic", **IMAGENET_STATS)
    if size[0] == 224 and (width == 1280 or "swag" in name.lower()):
        return bicubic, "torchvision's default for SWAG's linear weights"
    if size[0] == 224 and width == 1024 and config.embed.stride == 16:
        pipeline = Preprocessing(size, (242, 242), "cover", "bilinear", **IMAGENET_STATS)
        return pipeline, "torchvision's default for vit_l_16"
    if size[0] > 224:
        return bicubic, "torchvision's default for SWAG at this size"
    pipeline = Preprocessing(size, size, "cover", "bilinear", **IMAGENET_STATS)
    return pipeline.with_resize_factor(256 / 224), "torchvision's default at 224²"


def _make_format(name: str, title: str, mlp: tuple[str, str]) -> CheckpointFormat:
    first = "encoder.layers.encoder_layer_*"
    return CheckpointFormat(
        name,
        title,
        ("conv_proj.weight", f"{first}.self_attention.in_proj_weight", f"{first}.mlp.{mlp[0]}.weight"),
        partial(read_config, mlp=mlp),
        lambda config, root: add_root(map_vit(config, mlp), root),
        default_preprocessing,
    )


FORMATS = (
    _make_format("torchvision", "torchvision's Vision Transformer", MLP_NAMES),
    _make_format("torchvision old", "torchvision's Vision Transformer before version 0.13", OLD_MLP_NAMES),
)


def list_unsupported(config: TokenConfig) -> list[str]:
    """Return why torchvision cannot express a model, apart from its tensor names."""
    reasons = list_commonly_unsupported(config)
    if config.prefix.registers:
        reasons.append("it has no registers")
    if config.prefix.outputs != 1 or not isinstance(config.pool, ClassToken):
        reasons.append("it has one class token and reads it")
    return reasons

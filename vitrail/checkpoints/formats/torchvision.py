"""Key table of torchvision's `vit_b_16` and its siblings, and of the SWAG weights published for them."""

from functools import partial

from vitrail.checkpoints import formats
from vitrail.checkpoints.formats import Assumptions, CheckpointFormat, Reasons, TensorNames
from vitrail.checkpoints.keys import KeyTable, Rules, add_root, flatten_patches, map_tensors
from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.models.base import TokenConfig
from vitrail.models.sizes import Size
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.pool import ClassToken
from vitrail.nn.position import Learned1D

MLP_NAMES = ("0", "3")
OLD_MLP_NAMES = ("linear_1", "linear_2")  # before torchvision 0.13, and in its published files


def map_vit(config: TokenConfig, mlp: tuple[str, str] = MLP_NAMES) -> KeyTable:
    """Return the table of `torchvision.models.VisionTransformer`."""
    patch, layer = formats.require_patches("torchvision", config), "encoder.layers.encoder_layer_#"
    rules: Rules = {
        "embed.projection.weight": ("conv_proj.weight", flatten_patches(config.channels, patch)),
        "embed.projection.bias": "conv_proj.bias",
        "prefix.outputs": "class_token",
        "position.weight": "encoder.pos_embedding",
        "blocks.#.norm1.*": f"{layer}.ln_1.*",
        "blocks.#.msa.qkv.*": f"{layer}.self_attention.in_proj_*",
        "blocks.#.msa.out.*": f"{layer}.self_attention.out_proj.*",
        "blocks.#.norm2.*": f"{layer}.ln_2.*",
        "blocks.#.mlp.fc1.*": f"{layer}.mlp.{mlp[0]}.*",
        "blocks.#.mlp.fc2.*": f"{layer}.mlp.{mlp[1]}.*",
        "pool.norm.*": "encoder.ln.*",
        "?head.pre_logits.*": "heads.pre_logits.*",
        "?head.linear.*": "heads.head.*",
        "?head.*": "heads.head.*",
    }
    return map_tensors("torchvision", config, rules)


def read_config(names: TensorNames, assumptions: Assumptions, mlp: tuple[str, str]) -> ViTConfig:
    """Return the configuration of a torchvision Vision Transformer."""
    width, channels, patch, _ = names.patch_shape("conv_proj.weight")
    return ViTConfig(
        size=Size(
            depth=names.count_layers("encoder.layers.encoder_layer_{}."),
            width=width,
            mlp=names.layer_shape(f"encoder.layers.encoder_layer_*.mlp.{mlp[0]}.weight", 2)[0],
            heads=assumptions.resolve_heads(width, "torchvision"),
        ),
        embed=Patches(patch),
        position=Learned1D(
            resampling=assumptions.resolve_resampling("torchvision", "torchvision's interpolate_embeddings")
        ),
        block=PreNorm(mlp=assumptions.resolve_gelu("exact", "torchvision's default")),
        head=formats.choose_head(names.output_dim("heads.pre_logits"), width),
        classes=names.output_dim("heads.head"),
        image_size=assumptions.resolve_table_size(names.shape("encoder.pos_embedding", 3)[1] - 1, patch),
        channels=channels,
        eps=assumptions.resolve("eps", 1e-6, "torchvision's default"),
    )


def default_preprocessing(config: TokenConfig, name: str) -> tuple[Preprocessing, str]:
    """Return the pipeline: SWAG's for sizes above 224, for H/14 at 224, and for file names with "swag"."""
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


def list_limits(config: TokenConfig) -> Reasons:
    """Return why torchvision cannot express a model, apart from its tensor names."""
    reads_token = isinstance(config.pool, ClassToken) and config.prefix.outputs == 1
    return {
        **formats.list_common_limits(config),
        "it has no registers": config.prefix.registers > 0,
        "it has one class token and reads it": not reads_token,
    }

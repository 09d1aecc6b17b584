"""torchvision's names: `vit_b_16` and its siblings."""

from vitrail.checkpoints.keys import Table, both, complete, key, reshaped
from vitrail.models.vit import ViTConfig
from vitrail.nn.embed import Patches


def vit(config: ViTConfig) -> Table:
    """`torchvision.models.VisionTransformer`."""
    if not isinstance(config.embed, Patches):
        raise ValueError(f"torchvision's Vision Transformer has no {type(config.embed).__name__}")
    width = config.size.width
    shape = (width, config.channels, config.embed.patch, config.embed.patch)
    table: Table = [
        key("embed.projection.weight", "conv_proj.weight", reshaped(shape, (width, -1))),
        key("embed.projection.bias", "conv_proj.bias"),
        key("prefix.outputs", "class_token"),
        key("position.weight", "encoder.pos_embedding"),
    ]
    for layer in range(config.size.depth):
        ours, theirs = f"blocks.{layer}", f"encoder.layers.encoder_layer_{layer}"
        table += both(f"{ours}.norm1", f"{theirs}.ln_1")
        table.append(key(f"{ours}.msa.qkv.weight", f"{theirs}.self_attention.in_proj_weight"))
        table.append(key(f"{ours}.msa.qkv.bias", f"{theirs}.self_attention.in_proj_bias"))
        table += both(f"{ours}.msa.out", f"{theirs}.self_attention.out_proj")
        table += both(f"{ours}.norm2", f"{theirs}.ln_2")
        table += both(f"{ours}.mlp.fc1", f"{theirs}.mlp.0") + both(f"{ours}.mlp.fc2", f"{theirs}.mlp.3")
    table += both("pool.norm", "encoder.ln")
    if config.classes is not None:
        table += both("head", "heads.head")
    return complete("torchvision", table, config)

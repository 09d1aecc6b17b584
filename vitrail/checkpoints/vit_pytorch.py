"""vit-pytorch's names: its `ViT` and `SimpleViT`, whose patches are flattened pixel by pixel and normed on both sides."""

from vitrail.checkpoints.keys import Table, both, complete, key, patch_last, reshaped
from vitrail.models.vit import ViTConfig
from vitrail.nn.embed import Patches


def _patches(config: ViTConfig) -> Table:
    if not (isinstance(config.embed, Patches) and config.embed.normed):
        raise ValueError("vit-pytorch norms its patches before and after projecting them: use Patches(normed=True)")
    order = patch_last(config.channels, config.embed.patch)
    return [
        *both("embed.norm_in", "to_patch_embedding.1", order),
        key("embed.projection.weight", "to_patch_embedding.2.weight", order),
        key("embed.projection.bias", "to_patch_embedding.2.bias"),
        *both("embed.norm_out", "to_patch_embedding.3"),
    ]


def _layer(layer: int) -> Table:
    ours, theirs = f"blocks.{layer}", f"transformer.layers.{layer}"
    return [
        *both(f"{ours}.norm1", f"{theirs}.0.norm"),
        key(f"{ours}.msa.qkv.weight", f"{theirs}.0.to_qkv.weight"),
        *both(f"{ours}.norm2", f"{theirs}.1.net.0"),
        *both(f"{ours}.mlp.fc1", f"{theirs}.1.net.1"),
    ]


def vit(config: ViTConfig) -> Table:
    """`vit_pytorch.ViT`."""
    width, rows = config.size.width, config.prefix.outputs + config.shape.patches
    table = _patches(config)
    table.append(key("prefix.outputs", "cls_token", reshaped((1, width), (1, 1, width))))
    table.append(key("position.weight", "pos_embedding", reshaped((rows, width), (1, rows, width))))
    for layer in range(config.size.depth):
        theirs = f"transformer.layers.{layer}"
        table += _layer(layer) + both(f"blocks.{layer}.msa.out", f"{theirs}.0.to_out.0")
        table += both(f"blocks.{layer}.mlp.fc2", f"{theirs}.1.net.4")
    table += both("pool.norm", "transformer.norm") + both("head", "mlp_head")
    return complete("vit-pytorch's ViT", table, config)


def simple_vit(config: ViTConfig) -> Table:
    """`vit_pytorch.SimpleViT`: fixed sin-cos positions, mean pooling, no bias in attention."""
    table = _patches(config)
    for layer in range(config.size.depth):
        theirs = f"transformer.layers.{layer}"
        table += _layer(layer)
        table.append(key(f"blocks.{layer}.msa.out.weight", f"{theirs}.0.to_out.weight"))
        table += both(f"blocks.{layer}.mlp.fc2", f"{theirs}.1.net.3")
    table += both("pool.norm", "transformer.norm") + both("head", "linear_head")
    return complete("vit-pytorch's SimpleViT", table, config)

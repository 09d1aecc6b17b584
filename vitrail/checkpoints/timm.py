"""timm's names: `vit_*`, `deit_*`, `vit_relpos_*`, hybrids and `resnetv2_*_bit`. DeiT and DINO releases use them too."""

import torch

from vitrail.checkpoints.keys import Change, Key, Table, Tensors, both, complete, joined, key, reshaped
from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViTConfig
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear
from vitrail.nn.pool import MAP, Mean
from vitrail.nn.position import Learned1D, Relative


def vit(config: ViTConfig) -> Table:
    """`VisionTransformer`, `VisionTransformerDistilled`, `VisionTransformerRelPos` and hybrids."""
    size, prefix = config.size, config.prefix
    table: Table = [*_embed(config)]
    if prefix.outputs == 1:
        table.append(key("prefix.outputs", "cls_token"))
    elif prefix.outputs == 2:
        table.append(key("prefix.outputs", ("cls_token", "dist_token"), joined(1, [1, 1])))
    if prefix.registers:
        table.append(key("prefix.registers", "reg_token"))
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        table.append(key("position.weight", "pos_embed"))
    elif isinstance(config.position, Relative):
        table.append(_relative(config))
    for layer in range(size.depth):
        ours, theirs = f"blocks.{layer}", f"blocks.{layer}"
        table += both(f"{ours}.norm1", f"{theirs}.norm1")
        table.append(key(f"{ours}.msa.qkv.weight", f"{theirs}.attn.qkv.weight"))
        if config.block.qkv_bias:
            table.append(key(f"{ours}.msa.qkv.bias", f"{theirs}.attn.qkv.bias"))
        table += both(f"{ours}.msa.out", f"{theirs}.attn.proj")
        if config.block.qk_norm:
            table += both(f"{ours}.msa.q_norm", f"{theirs}.attn.q_norm")
            table += both(f"{ours}.msa.k_norm", f"{theirs}.attn.k_norm")
        table += both(f"{ours}.norm2", f"{theirs}.norm2")
        table += both(f"{ours}.mlp.fc1", f"{theirs}.mlp.fc1")
        table += both(f"{ours}.mlp.fc2", f"{theirs}.mlp.fc2")
        if config.block.layer_scale is not None:
            table.append(key(f"{ours}.branch1.scale.weight", f"{theirs}.ls1.gamma"))
            table.append(key(f"{ours}.branch2.scale.weight", f"{theirs}.ls2.gamma"))
    norm_after = isinstance(config.pool, Mean) and config.pool.norm_after
    table += both("pool.norm", "fc_norm" if norm_after else "norm")
    if isinstance(config.pool, MAP):
        table.append(key("pool.probe", "attn_pool.latent"))
        table += both("pool.q", "attn_pool.q") + both("pool.kv", "attn_pool.kv") + both("pool.out", "attn_pool.proj")
        table += both("pool.norm2", "attn_pool.norm")
        table += both("pool.mlp.fc1", "attn_pool.mlp.fc1") + both("pool.mlp.fc2", "attn_pool.mlp.fc2")
    if config.classes is not None:
        if not isinstance(config.head, Linear):
            table += both("head.pre_logits", "pre_logits.fc") + both("head.linear", "head")
        elif prefix.outputs == 2:
            table += both("head.label", "head") + both("head.teacher", "head_dist")
        else:
            table += both("head", "head")
    return complete("timm", table, config)


def _embed(config: ViTConfig) -> Table:
    embed, width = config.embed, config.size.width
    if isinstance(embed, Patches):
        shape = (width, config.channels, embed.patch, embed.patch)
        return [
            key("embed.projection.weight", "patch_embed.proj.weight", reshaped(shape, (width, -1))),
            key("embed.projection.bias", "patch_embed.proj.bias"),
        ]
    if not isinstance(embed, Hybrid):
        raise ValueError(f"timm has no Vision Transformer with {type(embed).__name__}")
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
        return [grids, stacked[..., offsets:]] if config.prefix.count else [grids]

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

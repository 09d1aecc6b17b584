"""Hugging Face transformers' names, as its `save_pretrained` writes them: ViT, DeiT, DINOv2 with and without registers."""

from typing import Literal

from vitrail.checkpoints.keys import LeftOut, Table, both, complete, joined, key, reshaped
from vitrail.models.vit import ViTConfig
from vitrail.nn.embed import Patches
from vitrail.nn.head import PreLogits
from vitrail.nn.mlp import SwiGLU

Family = Literal["vit", "deit", "dinov2", "dinov2_with_registers"]


def vit(config: ViTConfig, family: Family) -> Table:
    """`…ForImageClassification` of these families, or the bare `…Model` where the configuration has no classes."""
    if not isinstance(config.embed, Patches):
        raise ValueError(f"transformers' {family} has no {type(config.embed).__name__}")
    size, prefix = config.size, config.prefix
    width, dino = size.width, family.startswith("dinov2")
    root = f"{family}." if config.classes is not None else ""
    embeddings = f"{root}embeddings"
    shape = (width, config.channels, config.embed.patch, config.embed.patch)
    table: Table = [
        key(
            "embed.projection.weight",
            f"{embeddings}.patch_embeddings.projection.weight",
            reshaped(shape, (width, -1)),
        ),
        key("embed.projection.bias", f"{embeddings}.patch_embeddings.projection.bias"),
        key("position.weight", f"{embeddings}.position_embeddings"),
    ]
    if prefix.outputs == 1:
        table.append(key("prefix.outputs", f"{embeddings}.cls_token"))
    elif prefix.outputs == 2:
        tokens = (f"{embeddings}.cls_token", f"{embeddings}.distillation_token")
        table.append(key("prefix.outputs", tokens, joined(1, [1, 1])))
    if prefix.registers:
        table.append(key("prefix.registers", f"{embeddings}.register_tokens"))
    if dino:
        table.append(LeftOut(f"{embeddings}.mask_token", "used in pre-training alone"))
    for layer in range(size.depth):
        ours, theirs = f"blocks.{layer}", f"{root}encoder.layer.{layer}"
        attention = f"{theirs}.attention.attention"
        for part in ("weight", "bias") if config.block.qkv_bias else ("weight",):
            names = tuple(f"{attention}.{which}.{part}" for which in ("query", "key", "value"))
            table.append(key(f"{ours}.msa.qkv.{part}", names, joined(0, [width] * 3)))
        table += both(f"{ours}.msa.out", f"{theirs}.attention.output.dense")
        if dino:
            table += both(f"{ours}.norm1", f"{theirs}.norm1") + both(f"{ours}.norm2", f"{theirs}.norm2")
            into, out = ("weights_in", "weights_out") if isinstance(config.block.mlp, SwiGLU) else ("fc1", "fc2")
            table += both(f"{ours}.mlp.fc1", f"{theirs}.mlp.{into}") + both(f"{ours}.mlp.fc2", f"{theirs}.mlp.{out}")
            table.append(key(f"{ours}.branch1.scale.weight", f"{theirs}.layer_scale1.lambda1"))
            table.append(key(f"{ours}.branch2.scale.weight", f"{theirs}.layer_scale2.lambda1"))
        else:
            table += both(f"{ours}.norm1", f"{theirs}.layernorm_before")
            table += both(f"{ours}.norm2", f"{theirs}.layernorm_after")
            table += both(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense")
            table += both(f"{ours}.mlp.fc2", f"{theirs}.output.dense")
    table += both("pool.norm", f"{root}layernorm")
    if isinstance(config.head, PreLogits) and config.classes is None:
        table += both("head.pre_logits", f"{root}pooler.dense")
    if config.classes is not None:
        if prefix.outputs == 2:
            table += both("head.label", "cls_classifier") + both("head.teacher", "distillation_classifier")
        else:
            table += both("head", "classifier")
    return complete(f"transformers' {family}", table, config)

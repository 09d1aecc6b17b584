"""vit-pytorch's names: its `ViT` and `SimpleViT`, whose patches are flattened pixel by pixel and normed on both sides."""

import math

from vitrail.checkpoints.keys import Table, both, complete, empty, key, patch_last, reshaped, rooted
from vitrail.checkpoints.look import Differs, Facts, Form, Names
from vitrail.data.preprocessing import HALF, Preprocessing
from vitrail.models.build import Config
from vitrail.models.sizes import Size
from vitrail.models.vit import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.pool import ClassToken, Mean
from vitrail.nn.position import Learned1D, SinCos2D
from vitrail.nn.prefix import Prefix


def _patches(config: ViTConfig) -> Table:
    if not (isinstance(config.embed, Patches) and config.embed.normed):
        raise ValueError("vit-pytorch cannot express this model: it norms its patches before and after projecting them")
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
    if config.prefix.outputs:
        table.append(key("prefix.outputs", "cls_token", reshaped((1, width), (1, 1, width))))
    else:
        table.append(empty("cls_token", 0, width))
    table.append(key("position.weight", "pos_embedding", reshaped((rows, width), (1, rows, width))))
    for layer in range(config.size.depth):
        theirs = f"transformer.layers.{layer}"
        table += _layer(layer) + both(f"blocks.{layer}.msa.out", f"{theirs}.0.to_out.0")
        table += both(f"blocks.{layer}.mlp.fc2", f"{theirs}.1.net.4")
    table += both("pool.norm", "transformer.norm")
    if config.classes is not None:
        table += both("head", "mlp_head")
    return complete("vit-pytorch's ViT", table, config)


def simple_vit(config: ViTConfig) -> Table:
    """`vit_pytorch.SimpleViT`: fixed sin-cos positions, mean pooling, no bias in attention."""
    table = _patches(config)
    for layer in range(config.size.depth):
        theirs = f"transformer.layers.{layer}"
        table += _layer(layer)
        table.append(key(f"blocks.{layer}.msa.out.weight", f"{theirs}.0.to_out.weight"))
        table += both(f"blocks.{layer}.mlp.fc2", f"{theirs}.1.net.3")
    table += both("pool.norm", "transformer.norm")
    if config.classes is not None:
        table += both("head", "linear_head")
    return complete("vit-pytorch's SimpleViT", table, config)


# --- recognising ---


def look(names: Names, facts: Facts) -> ViTConfig:
    """The configuration of either. Neither records its channels: three, if that leaves a square patch."""
    width, values = names.shape("to_patch_embedding.2.weight", 2)
    default = next((c for c in (3, 1, 4, 2) if values % c == 0 and math.isqrt(values // c) ** 2 * c == values), None)
    channels = facts.ask("channels", default, "the likeliest for a square patch")
    patch = math.isqrt(values // max(channels, 1))
    if patch * patch * channels != values:
        raise Differs(f"{values} values are no square patch of {channels} channels")
    inner = names.layer_shape("transformer.layers.*.0.to_qkv.weight", 2)[0] // 3
    heads = facts.ask("heads", inner // 64 if inner % 64 == 0 else None, "vit-pytorch's default, 64 values a head")
    if inner % heads:
        raise Differs(f"{heads} heads do not divide {inner} values")
    simple = names.anywhere("transformer.layers.*.0.to_out.weight") is not None
    outputs, head = 0, "linear_head" if simple else "mlp_head"
    if simple:
        position, image_size = SinCos2D(), facts.free_size(patch, "sin-cos positions have no size")
    else:
        outputs = 1 if names.shapes.get(f"{names.root}cls_token", (0,))[0] == 1 else 0
        h, w = facts.grid(names.shape("pos_embedding", 2)[0] - outputs, patch)
        position, image_size = Learned1D(), (h * patch, w * patch)
    return ViTConfig(
        size=Size(
            depth=names.count("transformer.layers.{}."),
            width=width,
            mlp=names.layer_shape("transformer.layers.*.1.net.1.weight", 2)[0],
            heads=heads,
            head=None if inner == width else inner // heads,
        ),
        embed=Patches(patch, normed=True),
        position=position,
        prefix=Prefix(outputs),
        block=PreNorm(mlp=facts.gelu("exact", "vit-pytorch's default"), qkv_bias=False, out_bias=not simple),
        pool=ClassToken() if outputs else Mean(),
        classes=names.outputs(head),
        image_size=image_size,
        channels=channels,
        eps=facts.ask("eps", 1e-5, "vit-pytorch's default"),
    )


def preprocessing(config: Config, name: str) -> tuple[Preprocessing, str]:
    """vit-pytorch prescribes none."""
    pipeline = Preprocessing(config.image_size, config.image_size, "squash", "bilinear", **HALF)
    return pipeline.with_channels(config.channels), "made up: vit-pytorch prescribes none"


def table_for(config: Config, root: str = "") -> Table:
    """Of the two, the one that this configuration is."""
    assert isinstance(config, ViTConfig)
    return rooted(vit(config) if isinstance(config.position, Learned1D) else simple_vit(config), root)


_EXAMPLE = {"embed": Patches(16, normed=True), "block": PreNorm(qkv_bias=False)}
_SIMPLE = {"block": PreNorm(qkv_bias=False, out_bias=False), "position": "sincos2d", "pool": "mean"}
_TELLING = ("to_patch_embedding.2.weight", "transformer.layers.*.0.to_qkv.weight")
FORMS = (
    Form(
        "vit-pytorch",
        "vit-pytorch's ViT",
        (*_TELLING, "pos_embedding"),
        look,
        table_for,
        preprocessing,
        example=_EXAMPLE,
    ),
    Form(
        "vit-pytorch simple",
        "vit-pytorch's SimpleViT",
        (*_TELLING, "transformer.layers.*.0.to_out.weight"),
        look,
        table_for,
        preprocessing,
        example=_EXAMPLE | _SIMPLE,
    ),
)


def reasons(config: ViTConfig) -> list[str]:
    """Why vit-pytorch cannot express a model, beyond the names of its tensors."""
    found = []
    if config.block.qkv_bias:
        found.append("its queries, keys and values have no bias")
    if not (isinstance(config.embed, Patches) and config.embed.normed):
        found.append("it norms its patches before and after projecting them")
    simple = not config.block.out_bias
    positions = SinCos2D if simple else Learned1D
    if not isinstance(config.position, positions) or config.position.at != "stem":
        found.append(f"its {'SimpleViT' if simple else 'ViT'} has other positions")
    elif isinstance(config.position, SinCos2D) and config.position != SinCos2D():
        found.append("its sin-cos positions have the frequencies of end=True")
    if config.prefix.registers or config.prefix.outputs == 2:
        found.append("it has no registers and no distillation token here")
    if isinstance(config.pool, Mean) == bool(config.prefix.outputs) or config.pool not in (ClassToken(), Mean()):
        found.append("it reads the class token, or without one takes the mean")
    return found

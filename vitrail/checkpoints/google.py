"""Google's names, in the `.npz` files of vision_transformer and big_vision: Flax's modules joined by slashes.

The two differ in how they number a layer's parts, and in whether the class token has a position. big_vision can also stack
all layers into one tensor ("scan").
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vitrail.checkpoints.keys import Change, Key, LeftOut, Table, Tensors, complete, key, rooted, stacked, transposed
from vitrail.checkpoints.look import MOST_LAYERS, Differs, Facts, Form, Names, square
from vitrail.data.preprocessing import HALF, Preprocessing
from vitrail.models.build import Config
from vitrail.models.hybrid import Hybrid
from vitrail.models.sizes import Size
from vitrail.models.vit import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Linear, PreLogits
from vitrail.nn.pool import MAP, ClassAndMean, ClassToken, Mean
from vitrail.nn.position import Learned1D, SinCos2D
from vitrail.nn.prefix import Prefix


@dataclass(frozen=True)
class Spelling:
    """How the parts of a layer are numbered, and where the positions are."""

    title: str
    attention: int
    mlp: int
    second_norm: int
    position: str
    scanned: bool = False


ORIGINAL = Spelling("vision_transformer", 1, 3, 2, "Transformer/posembed_input/pos_embedding")
BIG_VISION = Spelling("big_vision", 0, 0, 1, "pos_embedding")
SCANNED = Spelling("big_vision, scanned", 0, 0, 1, "pos_embedding", scanned=True)


def _norm(ours: str, theirs: str) -> list[Key]:
    return [key(f"{ours}.weight", f"{theirs}/scale"), key(f"{ours}.bias", f"{theirs}/bias")]


def _dense(ours: str, theirs: str) -> list[Key]:
    return [key(f"{ours}.weight", f"{theirs}/kernel", transposed()), key(f"{ours}.bias", f"{theirs}/bias")]


def _conv(ours: str, theirs: str) -> Key:
    """A convolution's [h, w, inputs, outputs]."""
    order = Change(
        read=lambda t: [t[0].permute(3, 2, 0, 1).contiguous()],
        write=lambda o: [o[0].permute(2, 3, 1, 0).contiguous()],
    )
    return key(ours, theirs, order)


def _patches(ours: str, theirs: str, channels: int, patch: int) -> Key:
    def read(t: Tensors) -> Tensors:
        return [t[0].permute(3, 2, 0, 1).flatten(1).contiguous()]

    def write(o: Tensors) -> Tensors:
        return [o[0].unflatten(1, (channels, patch, patch)).permute(2, 3, 1, 0).contiguous()]

    return key(ours, theirs, Change(read, write))


def _heads_in(ours: str, theirs: str, parts: tuple[str, ...], heads: int, head: int) -> list[Key]:
    """Queries, keys, values: theirs apart and [D, H, d], ours together and [parts·H·d, D]."""
    weight = Change(
        read=lambda t: [torch.cat([part.flatten(1).T for part in t])],
        write=lambda o: [part.T.unflatten(1, (heads, head)).contiguous() for part in o[0].chunk(len(parts))],
    )
    bias = Change(
        read=lambda t: [torch.cat([part.flatten() for part in t])],
        write=lambda o: [part.unflatten(0, (heads, head)).contiguous() for part in o[0].chunk(len(parts))],
    )
    return [
        key(f"{ours}.weight", tuple(f"{theirs}/{part}/kernel" for part in parts), weight),
        key(f"{ours}.bias", tuple(f"{theirs}/{part}/bias" for part in parts), bias),
    ]


def _heads_out(ours: str, theirs: str, heads: int, head: int) -> list[Key]:
    weight = Change(
        read=lambda t: [t[0].flatten(0, 1).T.contiguous()],
        write=lambda o: [o[0].T.unflatten(0, (heads, head)).contiguous()],
    )
    return [key(f"{ours}.weight", f"{theirs}/out/kernel", weight), key(f"{ours}.bias", f"{theirs}/out/bias")]


def _layer(config: ViTConfig, layer: int, spelling: Spelling) -> list[Key]:
    ours = f"blocks.{layer}"
    theirs = "Transformer/encoderblock" + ("" if spelling.scanned else f"_{layer}")
    attention = f"{theirs}/MultiHeadDotProductAttention_{spelling.attention}"
    heads, head = config.size.heads, config.shape.head_width
    return [
        *_norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0"),
        *_heads_in(f"{ours}.msa.qkv", attention, ("query", "key", "value"), heads, head),
        *_heads_out(f"{ours}.msa.out", attention, heads, head),
        *_norm(f"{ours}.norm2", f"{theirs}/LayerNorm_{spelling.second_norm}"),
        *_dense(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_{spelling.mlp}/Dense_0"),
        *_dense(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_{spelling.mlp}/Dense_1"),
    ]


def _embed(config: ViTConfig) -> list[Key]:
    embed = config.embed
    if isinstance(embed, Patches):
        table = [_patches("embed.projection.weight", "embedding/kernel", config.channels, embed.patch)]
    elif isinstance(embed, Hybrid):
        channels = 64 if not embed.stages else 256 * 2 ** (len(embed.stages) - 1)
        table = [
            _conv("embed.trunk.root.weight", "conv_root/kernel"),
            *_norm("embed.trunk.norm", "gn_root"),
            _patches("embed.projection.weight", "embedding/kernel", channels, embed.patch),
        ]
        for stage, depth in enumerate(embed.stages):
            for block in range(depth):
                ours, theirs = f"embed.trunk.stages.{stage}.{block}", f"block{stage + 1}/unit{block + 1}"
                for index in (1, 2, 3):
                    table.append(_conv(f"{ours}.conv{index}.weight", f"{theirs}/conv{index}/kernel"))
                    table += _norm(f"{ours}.norm{index}", f"{theirs}/gn{index}")
                if block == 0:
                    table.append(_conv(f"{ours}.shortcut.weight", f"{theirs}/conv_proj/kernel"))
                    table += _norm(f"{ours}.shortcut_norm", f"{theirs}/gn_proj")
    else:
        raise ValueError(f"Google's .npz cannot express this model: it has no {type(embed).__name__}")
    return [*table, key("embed.projection.bias", "embedding/bias")]


def vit(config: ViTConfig, spelling: Spelling) -> Table:
    """The parameters of a Flax Vision Transformer."""
    heads, head = config.size.heads, config.shape.head_width
    table: Table = [*_embed(config)]
    if config.prefix.outputs:
        table.append(key("prefix.outputs", "cls"))
    if isinstance(config.position, Learned1D) and config.position.at == "stem":
        table.append(key("position.weight", spelling.position))
    layers = [_layer(config, layer, spelling) for layer in range(config.size.depth)]
    table += stacked(layers) if spelling.scanned else [entry for layer in layers for entry in layer]
    table += _norm("pool.norm", "Transformer/encoder_norm")
    if isinstance(config.pool, MAP):
        pool = "MAPHead_0"
        attention = f"{pool}/MultiHeadDotProductAttention_0"
        table.append(key("pool.probe", f"{pool}/probe"))
        table += _heads_in("pool.q", attention, ("query",), heads, head)
        table += _heads_in("pool.kv", attention, ("key", "value"), heads, head)
        table += _heads_out("pool.out", attention, heads, head)
        table += _norm("pool.norm2", f"{pool}/LayerNorm_0")
        table += _dense("pool.mlp.fc1", f"{pool}/MlpBlock_0/Dense_0")
        table += _dense("pool.mlp.fc2", f"{pool}/MlpBlock_0/Dense_1")
    if isinstance(config.head, PreLogits):
        table += _dense("head.pre_logits", "pre_logits")
        if config.classes is not None:
            table += _dense("head.linear", "head")
    elif config.classes is not None:
        table += _dense("head", "head")
    return complete(spelling.title, table, config)


def look(names: Names, facts: Facts, spelling: Spelling) -> ViTConfig:
    """The configuration of a Flax Vision Transformer, which tells its heads too."""
    kernel = names.shape("embedding/kernel", 4)
    patch, channels, width = square(kernel[:2], "embedding/kernel"), kernel[2], kernel[3]
    embed: Patches | Hybrid = Patches(patch)
    if "conv_root/kernel" in names:
        channels = names.shape("conv_root/kernel", 4)[2]
        stages = names.count("block{}/", start=1)
        depths = (names.count(f"block{stage + 1}" + "/unit{}/", start=1) for stage in range(stages))
        embed = Hybrid(tuple(depths), patch)
    first = "Transformer/encoderblock" + ("" if spelling.scanned else "_*")
    extra = 1 if spelling.scanned else 0
    query = names.layer_shape(f"{first}/MultiHeadDotProductAttention_{spelling.attention}/query/kernel", 3 + extra)
    mlp = names.layer_shape(f"{first}/MlpBlock_{spelling.mlp}/Dense_0/kernel", 2 + extra)[-1]
    depth = query[0] if spelling.scanned else names.count("Transformer/encoderblock_{}/")
    heads, head = query[-2:]
    if depth > MOST_LAYERS:
        raise Differs(f"{depth:,} layers are more than a model has")
    outputs = 1 if "cls" in names else 0
    if spelling.position in names:
        which = "outputs" if spelling is ORIGINAL else "none"
        patches = names.shape(spelling.position, 3)[1] - (outputs if spelling is ORIGINAL else 0)
        h, w = facts.grid(patches, embed.stride)
        position: Any = Learned1D(prefix=which)
        image_size = (h * embed.stride, w * embed.stride)
    else:
        position = SinCos2D()
        image_size = facts.free_size(embed.stride, "sin-cos positions have no size")
    activation = facts.gelu("tanh", "Flax's default; timm runs the same weights with exact GELU")
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
        eps=facts.ask("eps", 1e-6, "Flax's default"),
    )


def preprocessing(config: Config, name: str, spelling: Spelling) -> tuple[Preprocessing, str]:
    """vision_transformer and SigLIP squash with TensorFlow's plain bilinear; big_vision's ImageNet models take a crop."""
    assert isinstance(config, ViTConfig)
    size = config.image_size
    if spelling is ORIGINAL or isinstance(config.pool, MAP):
        squashed = Preprocessing(size, size, "squash", "bilinear", antialias=False, engine="torch", **HALF)
        return squashed, "vision_transformer's default" if spelling is ORIGINAL else "big_vision's default for SigLIP"
    return Preprocessing(size, size, "cover", "box", **HALF).larger(256 / 224), "big_vision's default for ImageNet"


def _table(config: Config, root: str, spelling: Spelling) -> Table:
    assert isinstance(config, ViTConfig)
    table = rooted(vit(config, spelling), root)
    if root.endswith("img/"):
        outer = root.removesuffix("img/")
        table += [LeftOut(f"{outer}{name}", "text tower") for name in ("txt/*", "t", "b")]
    return [*table, LeftOut("opt/state/*", "optimiser"), LeftOut("opt/count", "optimiser")]


def _form(name: str, title: str, spelling: Spelling, telling: tuple[str, ...]) -> Form:
    return Form(
        name,
        title,
        ("embedding/kernel", *telling),
        partial(look, spelling=spelling),
        partial(_table, spelling=spelling),
        partial(preprocessing, spelling=spelling),
        ("", "params/", "params/img/", "img/", "opt/target/"),
    )


FORMS = (
    _form(
        "vision_transformer",
        "Google's vision_transformer",
        ORIGINAL,
        ("Transformer/encoderblock_*/MultiHeadDotProductAttention_1/query/kernel",),
    ),
    _form(
        "big_vision",
        "Google's big_vision",
        BIG_VISION,
        ("Transformer/encoderblock_*/MultiHeadDotProductAttention_0/query/kernel",),
    ),
    _form(
        "big_vision scanned",
        "Google's big_vision with stacked layers",
        SCANNED,
        ("Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel",),
    ),
)


def spelling_of(config: ViTConfig) -> Spelling:
    """Which of the two projects' models this is: in the first, the class token has a position."""
    covers = isinstance(config.position, Learned1D) and config.position.prefix != "none" and config.prefix.outputs
    return ORIGINAL if covers or isinstance(config.embed, Hybrid) else BIG_VISION


def reasons(config: ViTConfig) -> list[str]:
    """Why Google's code cannot express a model, beyond the names of its tensors."""
    found = []
    if not isinstance(config.position, Learned1D | SinCos2D) or config.position.at != "stem":
        found.append("its positions are learned in one dimension, or 2-D sin-cos, at the stem")
    if isinstance(config.position, SinCos2D) and config.position != SinCos2D():
        found.append("its sin-cos positions have the frequencies of end=True")
    if config.prefix.outputs == 2 or config.prefix.registers:
        found.append("it has no distillation token and no registers")
    if isinstance(config.pool, Mean) and config.pool.norm_after:
        found.append("it norms before it takes the mean")
    if isinstance(config.pool, ClassAndMean):
        found.append("it does not pool class token and mean side by side")
    if isinstance(config.pool, Mean) and config.prefix.outputs:
        found.append("a model that takes the mean has no class token there")
    if isinstance(config.embed, Patches) and not config.embed.bias:
        found.append("its patches have a bias")
    return found

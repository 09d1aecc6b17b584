"""The boundary: short strings in, a model out. Inside, every slot is an object."""

import re
from dataclasses import replace
from typing import Any, TypeVar

from vitrail.models.bit import BiT, BiTConfig, build_bit
from vitrail.models.hybrid import published_hybrid
from vitrail.models.sizes import RESNETS, SIZES, Size, closest, named_size
from vitrail.models.vit import EmbedSlot, ViT, ViTConfig, build_vit
from vitrail.nn.block import BlockSlot, Parallel, PostNorm, PreNorm
from vitrail.nn.embed import ConvStem, Patches
from vitrail.nn.head import HeadSlot, Linear, PreLogits
from vitrail.nn.mlp import GELU, MLPSlot, QuickGELU, ReLU, SwiGLU, TanhGELU
from vitrail.nn.pool import MAP, ClassAndMean, ClassToken, Mean, PoolSlot
from vitrail.nn.position import (
    Learned1D,
    Learned2D,
    NoPosition,
    PositionSlot,
    Relative,
    Rotary2D,
    SinCos2D,
    Sinusoid1D,
)
from vitrail.nn.prefix import Prefix

Config = ViTConfig | BiTConfig
T = TypeVar("T")

EMBEDS: dict[str, Any] = {"patches": Patches, "conv-stem": ConvStem}
POSITIONS: dict[str, Any] = {
    "none": NoPosition,
    "learned1d": Learned1D,
    "learned2d": Learned2D,
    "relative": Relative,
    "sincos2d": SinCos2D,
    "sinusoid1d": Sinusoid1D,
    "rotary2d": Rotary2D,
}
PREFIXES = {"none": Prefix(0), "class": Prefix(1), "class+distillation": Prefix(2)}
POOLS: dict[str, PoolSlot] = {
    "class": ClassToken(),
    "mean": Mean(),
    "mean-norm": Mean(norm_after=True),
    "class+mean": ClassAndMean(),
    "map": MAP(),
}
BLOCKS: dict[str, BlockSlot] = {"pre": PreNorm(), "post": PostNorm(), "parallel": Parallel()}
MLPS: dict[str, MLPSlot] = {
    "gelu": GELU(),
    "gelu-tanh": TanhGELU(),
    "gelu-quick": QuickGELU(),
    "relu": ReLU(),
    "swiglu": SwiGLU(),
}
HEADS: dict[str, HeadSlot] = {"linear": Linear(), "pre-logits": PreLogits()}

VIT_NAME = re.compile(r"(?:R(?P<resnet>\d*)\+)?(?P<size>[A-Za-z]+)/(?P<patch>\d+)")
BIT_NAME = re.compile(r"(?:BiT-)?R(?P<resnet>\d+)x(?P<factor>\d+(?:\.\d+)?)")


def named(slot: str, name: str, known: dict[str, T]) -> T:
    """What a short string stands for in a slot, or an error with the names that are known."""
    if name not in known:
        raise ValueError(f"unknown {slot} {name!r}: {closest(name, list(known))}")
    return known[name]


def named_position(name: str) -> PositionSlot:
    """`learned1d`, or `learned1d@every` and `learned1d@shared` for positions that are added at every layer."""
    kind, _, at = name.partition("@")
    position = named("position", kind, POSITIONS)
    if not at:
        return position()
    if position in (NoPosition, Rotary2D):
        raise ValueError(f"position {kind!r} has no place to be added at: leave out '@{at}'")
    return position(at=at)


def side(value: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width; one number stands for both."""
    if isinstance(value, int):
        return value, value
    if len(value) != 2:
        raise ValueError(f"image size {value!r}: give a number, or (height, width)")
    return value[0], value[1]


def configure_vit(
    name: str | None = None,
    *,
    patch: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    head_width: int | None = None,
    mlp_width: int | None = None,
    embed: str | EmbedSlot = "patches",
    position: str | PositionSlot = "learned1d",
    prefix: str | Prefix | None = None,
    registers: int = 0,
    pool: str | PoolSlot = "class",
    block: str | BlockSlot = "pre",
    mlp: str | MLPSlot | None = None,
    head: str | HeadSlot = "linear",
    layer_scale: float | None = None,
    qk_norm: bool = False,
    classes: int | None = 1000,
    image_size: int | tuple[int, int] = 224,
    channels: int = 3,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    eps: float = 1e-6,
    token_norm: bool = False,
    init: str | None = None,
) -> ViTConfig:
    """A configuration from a name and what differs from it.

    `name` is a size and a patch, "B/16", or a hybrid, "R50+B/16". Without a name, give `patch`, `width`, `depth` and
    `heads`; the MLP is then four times as wide as the model. Every slot takes a short string or the object itself.
    """
    if name is None:
        if patch is None or width is None or depth is None or heads is None:
            raise ValueError("without a name like 'B/16', give patch, width, depth and heads")
        size = Size(depth, width, 4 * width if mlp_width is None else mlp_width, heads, head_width)
        slot = embed
    else:
        match = VIT_NAME.fullmatch(name)
        if match is None:
            usable = "use a size and a patch, like 'B/16' or 'R50+B/16'"
            if is_resnet(name):
                raise ValueError(f"{name} is a ResNet, and a Vision Transformer is wanted here: {usable}")
            raise ValueError(f"unknown model {name!r}: {usable}. Sizes: {', '.join(SIZES)}")
        base = named_size(match["size"])
        chosen = width or base.width
        size = Size(
            depth=base.depth if depth is None else depth,
            width=base.width if width is None else width,
            mlp=mlp_width if mlp_width is not None else (base.mlp if width is None else 4 * chosen),
            heads=base.heads if heads is None else heads,
            head=head_width,
        )
        patch = int(match["patch"]) if patch is None else patch
        if match["resnet"] is not None:
            if embed != "patches":
                raise ValueError(f"{name} is a hybrid: its embedding is the ResNet's, leave out embed")
            slot = published_hybrid(match["resnet"], patch)
        else:
            slot = embed
    if isinstance(slot, str):
        slot = named("embedding", slot, EMBEDS)(patch)
    elif isinstance(slot, (Patches, ConvStem)) and slot.patch != patch:
        raise ValueError(f"patches of {patch} by name and of {slot.patch} by {slot}: say the same twice")

    pool = named("pooling", pool, POOLS) if isinstance(pool, str) else pool
    if prefix is None:
        prefix = "class" if pool.needs else "none"
    prefix = named("prefix", prefix, PREFIXES) if isinstance(prefix, str) else prefix
    prefix = replace(prefix, registers=prefix.registers + registers)

    block = named("block", block, BLOCKS) if isinstance(block, str) else block
    if mlp is not None:
        block = replace(block, mlp=named("MLP", mlp, MLPS) if isinstance(mlp, str) else mlp)
    if layer_scale is not None:
        block = replace(block, layer_scale=layer_scale)
    if qk_norm:
        block = replace(block, qk_norm=True)

    return ViTConfig(
        size=size,
        embed=slot,
        position=named_position(position) if isinstance(position, str) else position,
        prefix=prefix,
        block=block,
        pool=pool,
        head=named("head", head, HEADS) if isinstance(head, str) else head,
        classes=classes,
        image_size=side(image_size),
        channels=channels,
        dropout=dropout,
        stochastic_depth=stochastic_depth,
        eps=eps,
        token_norm=token_norm,
        init=init or ("deit" if prefix.outputs == 2 else "vit"),
    )


def configure_bit(
    name: str,
    *,
    classes: int | None = 1000,
    image_size: int | tuple[int, int] = 224,
    channels: int = 3,
    root: str = "large",
) -> BiTConfig:
    """A BiT ResNet from its name, "R50x1" or "R152x4"; factors below 1 make small ones, and `root="small"` suits 32²."""
    match = BIT_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"unknown ResNet {name!r}: use a depth and a width factor, like 'R50x1'")
    if int(match["resnet"]) not in RESNETS:
        raise ValueError(f"unknown ResNet depth in {name!r}: use R{', R'.join(map(str, RESNETS))}")
    roots: dict[str, Any] = {"large": "large", "small": "small"}
    return BiTConfig(
        stages=RESNETS[int(match["resnet"])],
        factor=float(match["factor"]),
        channels=channels,
        classes=classes,
        image_size=side(image_size),
        root=named("root", root, roots),
    )


def is_resnet(name: str) -> bool:
    """Whether a name is that of a BiT ResNet, not of a Vision Transformer."""
    return BIT_NAME.fullmatch(name) is not None


def configure(name: str | None = None, **slots: Any) -> Config:
    """The configuration that a name and its slots stand for, Vision Transformer or ResNet."""
    if name is not None and not is_resnet(name) and not VIT_NAME.fullmatch(name):
        raise ValueError(
            f"unknown model {name!r}: use a size and a patch, like 'B/16' or 'R50+B/16', or a ResNet like 'R50x1'. "
            f"Sizes: {', '.join(SIZES)}"
        )
    if name is not None and is_resnet(name):
        extra = set(slots) - {"classes", "image_size", "channels", "root"}
        if extra:
            raise ValueError(f"{name} is a ResNet and has no {', '.join(sorted(extra))}")
        return configure_bit(name, **slots)
    return configure_vit(name, **slots)


def build(name: str | None = None, **slots: Any) -> ViT | BiT:
    """A model with fresh weights from a name and what stands in its slots: see `configure_vit` and `configure_bit`.

    >>> build("S/16", position="sincos2d", pool="mean", registers=4, channels=1, image_size=(160, 224), classes=10)
    """
    return build_from(configure(name, **slots))


def build_from(config: Config) -> ViT | BiT:
    """A model with fresh weights from its configuration."""
    return build_bit(config) if isinstance(config, BiTConfig) else build_vit(config)

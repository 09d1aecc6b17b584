"""One encoder layer: equations 2 and 3, and the other orders in which its parts have been put.

B images, N tokens, D width. With `read`, a layer gives the first tokens alone: what the last layer computes for tokens that
nobody reads would be thrown away.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitrail.nn.attention import MSA
from vitrail.nn.mlp import GELU, MLPSlot, ReLU
from vitrail.nn.position import NOWHERE, Place
from vitrail.nn.shape import Shape


class StochasticDepth(nn.Module):
    """Drops a residual branch for whole images at random while training (Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        kept = 1.0 - self.rate
        mask = torch.empty(x.shape[0], *[1] * (x.ndim - 1), dtype=x.dtype, device=x.device).bernoulli_(kept)
        return x * mask.div_(kept)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch, small at first (CaiT, Touvron et al. 2021)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Branch(nn.Module):
    """What a residual branch passes before it is added; nothing at all in the paper's model at inference."""

    def __init__(self, width: int, dropout: float, layer_scale: float | None, depth_rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.depth = StochasticDepth(depth_rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.depth(self.scale(self.dropout(x)))


def first(z: Tensor, read: int | None) -> Tensor:
    """The tokens that are read: all of them, or the first few."""
    return z if read is None else z[:, :read]


class EncoderBlock(nn.Module):
    """The parts that every order of layer has. Subclasses say in which order z goes through them."""

    def __init__(self, shape: Shape, spec: "BlockSlot", dropout: float, depth_rate: float) -> None:
        super().__init__()
        d, eps = shape.width, shape.eps
        self.norm1 = nn.LayerNorm(d, eps=eps)
        self.msa = MSA(
            d,
            shape.heads,
            shape.head_width,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            qk_norm=spec.qk_norm,
            dropout=spec.attention_dropout,
            eps=eps,
        )
        self.branch1 = Branch(d, dropout, spec.layer_scale, depth_rate)
        self.mlp = spec.mlp.build(d, shape.mlp, dropout)
        self.branch2 = Branch(d, dropout, spec.layer_scale, depth_rate)


class TwoNormBlock(EncoderBlock):
    """A layer with a norm for each of its two branches."""

    def __init__(self, shape: Shape, spec: "BlockSlot", dropout: float, depth_rate: float) -> None:
        super().__init__(shape, spec, dropout, depth_rate)
        self.norm2 = nn.LayerNorm(shape.width, eps=shape.eps)


class PreNormBlock(TwoNormBlock):
    """One encoder layer, equations 2 and 3."""

    def forward(self, z: Tensor, place: Place = NOWHERE, read: int | None = None) -> Tensor:  # [B, N, D]
        z = first(z, read) + self.branch1(self.msa(self.norm1(z), place, read))  # eq. 2
        return z + self.branch2(self.mlp(self.norm2(z)))  # eq. 3


class PostNormBlock(TwoNormBlock):
    """One encoder layer of the 2017 Transformer: the norm comes after the sum."""

    def forward(self, z: Tensor, place: Place = NOWHERE, read: int | None = None) -> Tensor:
        z = self.norm1(first(z, read) + self.branch1(self.msa(z, place, read)))
        return self.norm2(z + self.branch2(self.mlp(z)))


class ParallelBlock(EncoderBlock):
    """MSA and MLP side by side on one norm (GPT-J; ViT-22B, Dehghani et al. 2023)."""

    def forward(self, z: Tensor, place: Place = NOWHERE, read: int | None = None) -> Tensor:
        y = self.norm1(z)
        mixed = self.branch1(self.msa(y, place, read)) + self.branch2(self.mlp(first(y, read)))
        return first(z, read) + mixed


@dataclass(frozen=True)
class PreNorm:
    """The paper's layer, with the options that its follow-ups added."""

    mlp: MLPSlot = GELU()
    layer_scale: float | None = None  # initial value; None for no LayerScale
    qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    attention_dropout: float = 0.0
    module: ClassVar[type[EncoderBlock]] = PreNormBlock
    final_norm: ClassVar[bool] = True  # whether equation 4's LN is still to be done after the last layer


@dataclass(frozen=True)
class PostNorm(PreNorm):
    """The 2017 Transformer's layer, whose output is normalised already."""

    mlp: MLPSlot = ReLU()
    module: ClassVar[type[EncoderBlock]] = PostNormBlock
    final_norm: ClassVar[bool] = False


@dataclass(frozen=True)
class Parallel(PreNorm):
    """MSA and MLP at once, on one norm."""

    module: ClassVar[type[EncoderBlock]] = ParallelBlock


BlockSlot = PreNorm

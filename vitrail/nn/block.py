"""Encoder layers: equations 2 and 3, other orders of the same parts, and activation checkpointing.

B images, N tokens, D width. With `n_outputs`, a layer computes its output for the first tokens only: the last layer skips
tokens that the pooling does not read.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.nn.attention import MSA
from vitrail.nn.linear import LinearLayer
from vitrail.nn.mlp import GELU, MLPSlot, ReLU
from vitrail.nn.position import NO_POSITION, LayerPosition
from vitrail.nn.shape import EncoderShape, Grid


def run_block(block: nn.Module, recompute: bool, *arguments: object) -> Tensor:
    """Run one block; with `recompute`, the backward pass computes its activations again."""
    if recompute and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(block, *arguments, use_reentrant=False))
    return block(*arguments)


class RecomputeSequential(nn.Sequential):
    """A sequence of blocks with optional activation checkpointing of each."""

    recompute = False

    def forward(self, input: Tensor) -> Tensor:
        for block in self:
            input = run_block(block, self.recompute, input)
        return input


class RecomputeModule(nn.Module):
    """A module with one switch for the activation checkpointing of all its blocks."""

    recompute = False

    @property
    def activation_checkpointing(self) -> bool:
        """Compute activations again in the backward pass instead of storing them: less memory, more time."""
        return self.recompute

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: bool) -> None:
        for module in self.modules():
            if isinstance(module, (RecomputeModule, RecomputeSequential)):
                module.recompute = value


class StochasticDepth(nn.Module):
    """Random dropping of a residual branch for whole images during training (Huang et al. 2016)."""

    def __init__(self, drop_rate: float) -> None:
        super().__init__()
        self.drop_rate = drop_rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_rate == 0.0:
            return x
        keep_rate = 1.0 - self.drop_rate
        mask = torch.empty(x.shape[0], *[1] * (x.ndim - 1), dtype=x.dtype, device=x.device).bernoulli_(keep_rate)
        return x * mask.div_(keep_rate)

    def extra_repr(self) -> str:
        return f"rate={self.drop_rate:g}"


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch, small at initialisation (CaiT, Touvron et al. 2021)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ResidualBranch(nn.Module):
    """Dropout, LayerScale and stochastic depth of a residual branch; the identity in the paper's model at inference."""

    def __init__(self, width: int, dropout: float, layer_scale: float | None, stochastic_depth: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.depth = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        return self.depth(self.scale(self.dropout(x)))


def take_first_tokens(z: Tensor, n_outputs: int | None) -> Tensor:
    """Return all tokens, or the first `n_outputs`."""
    return z if n_outputs is None else z[:, :n_outputs]


class EncoderBlock(nn.Module):
    """The parts that all layers share. Subclasses define the order in which z passes them."""

    def __init__(self, shape: EncoderShape, spec: "BlockSlot", dropout: float, stochastic_depth: float) -> None:
        super().__init__()
        d = shape.width
        self.norm1 = nn.LayerNorm(d, eps=shape.eps)
        self.msa = MSA(shape, spec)
        self.branch1 = ResidualBranch(d, dropout, spec.layer_scale, stochastic_depth)
        self.mlp = spec.mlp.build(d, shape.mlp, dropout, shape.eps)
        self.branch2 = ResidualBranch(d, dropout, spec.layer_scale, stochastic_depth)


class TwoNormBlock(EncoderBlock):
    """A layer with one norm per branch."""

    def __init__(self, shape: EncoderShape, spec: "BlockSlot", dropout: float, stochastic_depth: float) -> None:
        super().__init__(shape, spec, dropout, stochastic_depth)
        self.norm2 = nn.LayerNorm(shape.width, eps=shape.eps)


class PreNormBlock(TwoNormBlock):
    """One encoder layer, equations 2 and 3."""

    def forward(self, z: Tensor, position: LayerPosition = NO_POSITION, n_outputs: int | None = None) -> Tensor:
        z = take_first_tokens(z, n_outputs) + self.branch1(self.msa(self.norm1(z), position, n_outputs))  # eq. 2
        return z + self.branch2(self.mlp(self.norm2(z)))  # eq. 3


class PostNormBlock(TwoNormBlock):
    """One encoder layer of the 2017 Transformer: the norm follows the sum."""

    def forward(self, z: Tensor, position: LayerPosition = NO_POSITION, n_outputs: int | None = None) -> Tensor:
        z = self.norm1(take_first_tokens(z, n_outputs) + self.branch1(self.msa(z, position, n_outputs)))
        return self.norm2(z + self.branch2(self.mlp(z)))


class ResPostNormBlock(TwoNormBlock):
    """One encoder layer whose norms stand at the end of each branch (Swin v2, Liu et al. 2022; timm's `rpn`)."""

    def forward(self, z: Tensor, position: LayerPosition = NO_POSITION, n_outputs: int | None = None) -> Tensor:
        z = take_first_tokens(z, n_outputs) + self.branch1(self.norm1(self.msa(z, position, n_outputs)))
        return z + self.branch2(self.norm2(self.mlp(z)))


class DividedBlock(PreNormBlock):
    """One encoder layer of TimeSformer (Bertasius et al. 2021): each patch attends to those at its place in other frames,
    then to those of its frame. Prefix tokens take part in every frame; their attention is averaged over the frames."""

    def __init__(self, shape: EncoderShape, spec: "BlockSlot", dropout: float, stochastic_depth: float) -> None:
        super().__init__(shape, spec, dropout, stochastic_depth)
        d, self.prefix = shape.width, shape.prefix
        self.time_norm = nn.LayerNorm(d, eps=shape.eps)
        self.time_msa = MSA(shape, spec)
        self.time_projection = LinearLayer(d, d)
        self.time_branch = ResidualBranch(d, dropout, spec.layer_scale, stochastic_depth)

    def forward(self, z: Tensor, position: LayerPosition = NO_POSITION, n_outputs: int | None = None) -> Tensor:
        assert position.grid is not None, "a layer that separates time from space needs the grid"
        steps, places, p = position.grid[0], math.prod(position.grid[1:]), self.prefix
        tokens, x = z[:, :p], z[:, p:].unflatten(1, (steps, places))  # [B, p, D], [B, t, h·w, D]
        x = x + self.time_branch(self.attend_in_time(x))
        frames = torch.cat((tokens.unsqueeze(1).expand(-1, steps, -1, -1), x), 2)  # [B, t, p + h·w, D]
        only_prefix = n_outputs is not None and n_outputs <= p
        y = self.msa(self.norm1(frames.flatten(0, 1)), n_outputs=n_outputs if only_prefix else None)
        y = y.unflatten(0, (-1, steps))
        y_prefix, y_patches = y[:, :, :p].mean(1), y[:, :, p:].flatten(1, 2)
        y = y_prefix if only_prefix else torch.cat((y_prefix, y_patches), 1)
        z = take_first_tokens(tokens if only_prefix else torch.cat((tokens, x.flatten(1, 2)), 1), n_outputs)
        z = z + self.branch1(take_first_tokens(y, n_outputs))
        return z + self.branch2(self.mlp(self.norm2(z)))

    def attend_in_time(self, x: Tensor) -> Tensor:
        """Return the attention of patches [B, t, h·w, D] to those at the same place, of the same shape."""
        y = self.time_msa(self.time_norm(x).transpose(1, 2).flatten(0, 1))  # [B·h·w, t, D]
        return self.time_projection(y).unflatten(0, (x.shape[0], -1)).transpose(1, 2)


class ParallelBlock(EncoderBlock):
    """MSA and MLP in parallel on one norm (GPT-J; ViT-22B, Dehghani et al. 2023)."""

    def forward(self, z: Tensor, position: LayerPosition = NO_POSITION, n_outputs: int | None = None) -> Tensor:
        y = self.norm1(z)
        mixed = self.branch1(self.msa(y, position, n_outputs)) + self.branch2(self.mlp(take_first_tokens(y, n_outputs)))
        return take_first_tokens(z, n_outputs) + mixed


@dataclass(frozen=True)
class PreNorm:
    """The paper's layer, with the options of its successors."""

    mlp: MLPSlot = GELU()
    layer_scale: float | None = None  # initial value; None for no LayerScale
    qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    attention_dropout: float = 0.0
    key_bias: bool = field(default=True, metadata={"omit_default": True})  # False: of qkv_bias, only that of q and v
    attention_norm: bool = field(
        default=False, metadata={"omit_default": True}
    )  # of the heads, before their projection
    module: ClassVar[type[EncoderBlock]] = PreNormBlock
    final_norm: ClassVar[bool] = True  # whether equation 4's LN follows the last layer
    is_divided: ClassVar[bool] = False  # whether attention over time is separate from that over space

    def count_attention(self, grid: Grid) -> dict[int, int]:
        """Return how many attention matrices between so many patches a head computes: {patches: matrices}."""
        return {math.prod(grid): 1}


@dataclass(frozen=True)
class PostNorm(PreNorm):
    """The 2017 Transformer's layer, whose output is already normalised."""

    mlp: MLPSlot = ReLU()
    module: ClassVar[type[EncoderBlock]] = PostNormBlock
    final_norm: ClassVar[bool] = False


@dataclass(frozen=True)
class Divided(PreNorm):
    """Attention over time, then over space, for clips (TimeSformer): t·(h·w)² + h·w·t² products instead of (t·h·w)²."""

    module: ClassVar[type[EncoderBlock]] = DividedBlock
    is_divided: ClassVar[bool] = True

    def count_attention(self, grid: Grid) -> dict[int, int]:
        steps, places = grid[0], math.prod(grid[1:])
        return {places: steps + places} if steps == places else {places: steps, steps: places}


@dataclass(frozen=True)
class Parallel(PreNorm):
    """MSA and MLP in parallel, on one norm."""

    module: ClassVar[type[EncoderBlock]] = ParallelBlock


@dataclass(frozen=True)
class ResPostNorm(PreNorm):
    """The norms at the end of each branch; they start at zero, so that every layer starts as the identity."""

    module: ClassVar[type[EncoderBlock]] = ResPostNormBlock


BlockSlot = PreNorm

"""The interface of position embeddings, their slots, and the positions of one layer.

T tokens: the prefix tokens, then N patches in a grid of h×w, or t×h×w for clips. D width, H heads, d = D/H.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.resampling import Resampling
from vitrail.nn.shape import EncoderShape, Grid

PositionScope = Literal["stem", "every", "shared"]
POSITION_SCOPES = ("stem", "every", "shared")


class Rotation(NamedTuple):
    """A rotation of value pairs; the sine has the sign with which the other value of the pair is added."""

    cosine: Tensor  # [1 or B, 1, T, d]
    sine: Tensor
    halves: bool  # value i is paired with value i + d/2, otherwise with its neighbour


class LayerPosition(NamedTuple):
    """The positions of one layer: a term for its input, a bias for its attention, a rotation of its q and k, and keys of
    offsets, whose products with the queries are a bias too."""

    embedding: Tensor | None = None  # [1 or B, T, D]
    bias: Tensor | None = None  # [1 or B, H, T, T]
    rotation: Rotation | None = None
    offsets: tuple[Tensor, Tensor] | None = None  # embeddings as keys, [R, d], and the one of each pair, [1 or B, T, T]
    grid: Grid | None = None  # of the patches, for layers that separate time from space; None if some are left out

    def add_to(self, z: Tensor) -> Tensor:
        """Return z plus the position embedding, if any; raise ValueError if the positions are not those of z's tokens."""
        inside = (self.rotation.cosine if self.rotation else None, self.offsets[1] if self.offsets else None)
        tables = (self.embedding, self.bias, *inside)
        for length in (table.shape[-2] for table in tables if table is not None):
            if length != z.shape[1]:
                got = f"{z.shape[1]} tokens and positions of {length}"
                raise ValueError(f"got {got}: pass encode the image's grid and the keep of its patches")
        return z if self.embedding is None else z + self.embedding

    def compute_bias(self, q: Tensor, n_outputs: int | None = None) -> Tensor | None:
        """Return the bias of q·k for queries [B, H, n, d] of all tokens, or of the first `n_outputs`: [1 or B, H, n, T]."""
        if self.offsets is None:
            return self.bias if self.bias is None or n_outputs is None else self.bias[:, :, :n_outputs]
        keys, index = self.offsets
        index = index if n_outputs is None else index[:, :n_outputs]
        scores = F.linear(q * q.shape[-1] ** -0.5, keys)  # [B, H, n, R]
        return scores.gather(-1, index.unsqueeze(1).expand(q.shape[0], q.shape[1], -1, -1))


NO_POSITION = LayerPosition()


class PositionEmbedding(nn.Module):
    """The interface of position embeddings. The base class adds none: the patches are then a bag of words."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape

    def stem_embedding(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        """Return the term added to z_0, [1 or B, T, D]."""
        return None

    def layer_positions(self, grid: Grid, keep: Tensor | None) -> Iterator[LayerPosition]:
        """Yield the positions of each of the L layers, in order."""
        yield from repeat(NO_POSITION, self.shape.depth)


@dataclass(frozen=True)
class Position:
    """The base class of the slots, whose `build` returns the module."""

    axes: ClassVar[tuple[int, ...]] = (2,)  # of the grids that they are for: 2 for images, 3 for clips

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        """Return the module's tensors resampled from the grid of `shape` to another one (section 3.2)."""
        if tensors:
            raise NotImplementedError(f"{type(self).__name__} needs a resize_tensors for {', '.join(tensors)}")
        return tensors


def resampling_field() -> Any:
    """Return the field of a slot whose learned tables are resampled to other grids."""
    return field(default=Resampling(), kw_only=True, repr=False, metadata={"omit_default": True})


def check_width(kind: str, width: int, divisor: int, what: str = "width") -> None:
    if width % divisor:
        near = max(1, round(width / divisor)) * divisor
        raise ValueError(f"{kind} positions need a {what} divisible by {divisor}, got {width}: use {near}")


@dataclass(frozen=True)
class NoPosition(Position):
    """No positions: attention treats the patches as a set."""

    axes: ClassVar[tuple[int, ...]] = (2, 3)

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return PositionEmbedding(shape)

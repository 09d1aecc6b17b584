"""Rotary positions: queries and keys rotated by the row and the column of their patch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.nn.position.base import LayerPosition, Position, PositionEmbedding, check_width
from vitrail.nn.shape import EncoderShape, Grid


class RotaryEmbedding(PositionEmbedding):
    """Rotation of the value pairs of q and k: half of the pairs by the column, half by the row ("RoPE axial", Heo et al.
    2024). The product q·k then depends on offsets only. Prefix tokens are not rotated."""

    def __init__(self, shape: EncoderShape, theta: float) -> None:
        super().__init__(shape)
        self.theta = theta
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor

    def layer_positions(self, grid: Grid, keep: Tensor | None) -> Iterator[LayerPosition]:
        yield from repeat(LayerPosition(rotation=self.compute_rotation(grid, keep)), self.shape.depth)

    def compute_rotation(self, grid: Grid, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        d = self.shape.head_width
        device = self._like.device
        omega = self.theta ** -(torch.arange(d // 4, device=device, dtype=torch.float32) * 4 / d)  # [d/4]
        y = torch.arange(grid[0], device=device)[:, None, None] * omega
        x = torch.arange(grid[1], device=device)[None, :, None] * omega
        angle = torch.cat((x.expand(*grid, -1), y.expand(*grid, -1)), -1).flatten(0, 1).unsqueeze(0)  # [1, N, d/2]
        if keep is not None:
            angle = F.embedding(keep, angle[0])
        angle = F.pad(angle, (0, 0, self.shape.prefix, 0)).repeat_interleave(2, -1).unsqueeze(1)  # [., 1, T, d]
        return angle.cos().to(self._like.dtype), angle.sin().to(self._like.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (a, b) of the last dimension to (a cos - b sin, b cos + a sin)."""
    cosine, sine = rotation
    crossed = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cosine + crossed * sine


@dataclass(frozen=True)
class Rotary2D(Position):
    """Queries and keys rotated by row and column, in every layer."""

    theta: float = 100.0

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("2-D rotary", shape.head_width, 4, "head width")
        return RotaryEmbedding(shape, self.theta)

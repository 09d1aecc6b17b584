"""Relative positions: a bias of q·k for each offset between two patches, or a vector that is multiplied with the query."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn

from vitrail.nn.position.base import LayerPosition, Position, PositionEmbedding, PositionScope, resampling_field
from vitrail.nn.resampling import Resampling, resample_rows, resample_table
from vitrail.nn.shape import EncoderShape, Grid


class RelativePositionBias(PositionEmbedding):
    """A learned bias per head and 2-D offset between two patches, added to q·k. Three more values per head are the
    biases of prefix to patch, patch to prefix and prefix to prefix."""

    def __init__(self, shape: EncoderShape, at: PositionScope, resampling: Resampling) -> None:
        super().__init__(shape)
        self.at, self.resampling = at, resampling
        tables, (h, w) = shape.depth if at == "every" else 1, shape.grid
        self.offsets = nn.Parameter(torch.empty(tables, shape.heads, 2 * h - 1, 2 * w - 1))
        self.prefix = nn.Parameter(torch.empty(tables, shape.heads, 3)) if shape.prefix else None

    def layer_positions(self, grid: Grid, keep: Tensor | None) -> Iterator[LayerPosition]:
        index = self.compute_offset_index(grid, keep)
        if self.at == "shared":
            yield from repeat(LayerPosition(bias=self.compute_bias(0, grid, index)), self.shape.depth)
        else:
            for layer in range(self.shape.depth):
                yield LayerPosition(bias=self.compute_bias(layer, grid, index))

    def compute_offset_index(self, grid: Grid, keep: Tensor | None) -> Tensor:
        """Return the index of each query-key offset in the flattened table: [1 or B, N, N]."""
        h, w = grid
        patch = torch.arange(h * w, device=self.offsets.device).unsqueeze(0) if keep is None else keep
        y, x = patch // w, patch % w
        dy = y[:, :, None] - y[:, None, :] + h - 1
        dx = x[:, :, None] - x[:, None, :] + w - 1
        return dy * (2 * w - 1) + dx

    def table(self, layer: int, grid: Grid) -> Tensor:
        """Return the values of every offset on this grid, in reading order: [H, offsets]."""
        return self.resample_offsets(self.offsets[layer], grid).flatten(1)

    def resample_offsets(self, offsets: Tensor, grid: Grid) -> Tensor:
        """Return tables of offsets [..., 2h-1, 2w-1] for another grid."""
        return resample_table(offsets, (2 * grid[0] - 1, 2 * grid[1] - 1), self.resampling)

    def compute_bias(self, layer: int, grid: Grid, index: Tensor) -> Tensor:
        bias = self.table(layer, grid)[:, index].transpose(0, 1)  # [1 or B, H, N, N]
        if self.prefix is None:
            return bias
        b, heads, n, _ = bias.shape
        p = self.shape.prefix
        to_patch, to_prefix, among = self.prefix[layer].view(1, heads, 3, 1).unbind(2)  # each [1, H, 1]
        above = torch.cat((among[..., None].expand(b, -1, p, p), to_patch[..., None].expand(b, -1, p, n)), 3)
        below = torch.cat((to_prefix[..., None].expand(b, -1, n, p), bias), 3)
        return torch.cat((above, below), 2)


class RelativeEmbedding1D(PositionEmbedding):
    """Relative attention as in appendix D.4: a learned vector per offset p_q - p_k of two patches in reading order. Its
    product with the query is added to q·k. Prefix tokens are at no offset: three more vectors stand for prefix to patch,
    patch to prefix and prefix to prefix."""

    def __init__(self, shape: EncoderShape, at: PositionScope, resampling: Resampling) -> None:
        super().__init__(shape)
        self.at, self.resampling = at, resampling
        tables, d = shape.depth if at == "every" else 1, shape.head_width
        self.offsets = nn.Parameter(torch.empty(tables, 2 * shape.patches - 1, d))
        self.prefix = nn.Parameter(torch.empty(tables, 3, d)) if shape.prefix else None

    def layer_positions(self, grid: Grid, keep: Tensor | None) -> Iterator[LayerPosition]:
        index = self.compute_offset_index(grid, keep)
        if self.at == "shared":
            yield from repeat(LayerPosition(offsets=(self.table(0, grid), index)), self.shape.depth)
        else:
            for layer in range(self.shape.depth):
                yield LayerPosition(offsets=(self.table(layer, grid), index))

    def compute_offset_index(self, grid: Grid, keep: Tensor | None) -> Tensor:
        """Return the row of `table` for each query and key: [1 or B, T, T]."""
        n, p = grid[0] * grid[1], self.shape.prefix
        patch = torch.arange(n, device=self.offsets.device).unsqueeze(0) if keep is None else keep
        index = patch[:, :, None] - patch[:, None, :] + (n - 1)
        if self.prefix is None:
            return index
        b, kept, _ = index.shape
        above = torch.cat((index.new_full((b, p, p), 2), index.new_zeros(b, p, kept)), 2)
        return torch.cat((above, torch.cat((index.new_ones(b, kept, p), index + 3), 2)), 1)

    def table(self, layer: int, grid: Grid) -> Tensor:
        """Return the vectors of the prefix, then of every offset on this grid: [R, d]."""
        offsets = self.resample_offsets(self.offsets[layer], grid)
        return offsets if self.prefix is None else torch.cat((self.prefix[layer], offsets))

    def resample_offsets(self, offsets: Tensor, grid: Grid) -> Tensor:
        """Return [2N-1, d] for the patches of another grid, resampled along the offset."""
        return resample_rows(offsets, 2 * grid[0] * grid[1] - 1, self.resampling)


@dataclass(frozen=True)
class RelativePosition(Position):
    """The scope of relative positions: one table per layer or one shared table."""

    at: PositionScope = "every"
    resampling: Resampling = resampling_field()

    def __post_init__(self) -> None:
        if self.at not in ("every", "shared"):
            raise ValueError(f"scope of relative positions must be 'every' or 'shared', got {self.at!r}")


@dataclass(frozen=True)
class Relative(RelativePosition):
    """A learned bias per head and 2-D offset."""

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return RelativePositionBias(shape, self.at, self.resampling)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        offsets = resample_table(tensors["offsets"], (2 * grid[0] - 1, 2 * grid[1] - 1), self.resampling)
        return tensors | {"offsets": offsets}


@dataclass(frozen=True)
class Relative1D(RelativePosition):
    """The paper's relative attention (appendix D.4): a learned vector per 1-D offset, multiplied with the query. At another
    image size the table is resampled along the offset."""

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return RelativeEmbedding1D(shape, self.at, self.resampling)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        offsets = resample_rows(tensors["offsets"], 2 * grid[0] * grid[1] - 1, self.resampling)
        return tensors | {"offsets": offsets.contiguous()}

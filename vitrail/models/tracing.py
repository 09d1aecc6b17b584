"""Forms of a model for tracing: everything that does not depend on the image becomes a constant.

At one size, positions of every kind are stored as tables. At any size, learned tables are resampled inside the graph by
products with two small matrices of weights, because runtimes multiply alike but resize differently. The ResNets'
weights are standardised once.

T tokens, D width, h×w the table's grid, n cells along one side of the image's grid.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn import position as positions
from vitrail.nn.position import LayerPosition, PositionEmbedding, Rotation
from vitrail.nn.resampling import Resampling, compute_axis_weights
from vitrail.nn.resnet import StdConv, pad_same
from vitrail.nn.shape import Grid

M = TypeVar("M", bound=nn.Module)


def fold_convolutions(model: M) -> M:
    """Replace, in place, convolutions that standardise their weights in each step by ones with standardised weights."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, StdConv):
                setattr(module, name, FoldedConv(child))
    return model


class FoldedConv(nn.Module):
    """A convolution of a BiT with standardised weights."""

    def __init__(self, of: StdConv) -> None:
        super().__init__()
        flat = of.weight.reshape(1, of.out_channels, -1)
        with torch.no_grad():
            weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8)
        self.weight = nn.Parameter(weight.reshape_as(of.weight), requires_grad=False)
        self.kernel, self.stride, self.padding, self.same = of.kernel_size[0], of.stride[0], of.padding, of.same

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel, self.stride, 0.0) if self.same else x
        return F.conv2d(x, self.weight, None, self.stride, self.padding)  # pyright: ignore[reportArgumentType]


# --- one size ---


class ConstantPositions(PositionEmbedding):
    """Positions of any kind on one grid, as constants; layers with the same positions share them."""

    def __init__(self, of: PositionEmbedding, grid: Grid) -> None:
        super().__init__(of.shape)
        self.tables: list[Tensor] = []
        self.halves = getattr(of, "halves", False)  # of a rotation
        with torch.no_grad():
            self.stem_name = self.store_table(of.stem_embedding(grid, None))
            store, layers = self.store_table, of.layer_positions(grid, None)
            self.layers = [
                (
                    store(p.embedding),
                    store(p.bias),
                    tuple(map(store, (p.rotation or ())[:2])),
                    tuple(map(store, p.offsets or ())),
                )
                for p in layers
            ]
        self.tables.clear()

    def store_table(self, table: Tensor | None) -> str | None:
        """Register a table as a buffer, once, and return the buffer's name."""
        if table is None:
            return None
        index = next((index for index, known in enumerate(self.tables) if known is table), len(self.tables))
        if index == len(self.tables):
            self.tables.append(table)
            self.register_buffer(f"table_{index}", table.detach().contiguous())
        return f"table_{index}"

    def get_table(self, name: str | None) -> Tensor | None:
        return None if name is None else self.get_buffer(name)

    def get_pair(self, names: tuple[str | None, ...]) -> tuple[Tensor, Tensor] | None:
        pair = [self.get_buffer(name) for name in names if name is not None]
        return (pair[0], pair[1]) if pair else None

    def stem_embedding(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        return self.get_table(self.stem_name)

    def layer_positions(self, grid: Grid, keep: Tensor | None) -> Iterator[LayerPosition]:
        for embedding, bias, *pairs in self.layers:
            turn, offsets = (self.get_pair(names) for names in pairs)
            rotation = None if turn is None else Rotation(*turn, self.halves)
            yield LayerPosition(self.get_table(embedding), self.get_table(bias), rotation, offsets)


# --- any size ---


def resample_in_graph(position: PositionEmbedding) -> PositionEmbedding:
    """Return the same positions with tables resampled inside the graph; computed positions are returned unchanged."""
    match position:
        case positions.Learned1DTable():
            return TracedLearned1D(position)
        case positions.Learned2DTable():
            return TracedLearned2D(position)
        case positions.ReferenceRotation():
            return TracedReferenceRotation(position)
        case positions.RelativePositionBias():
            return TracedRelative(position)
        case positions.RelativeEmbedding1D():
            return TracedRelative1D(position)
        case _:
            return position


class TracedLearned(positions.AddedPositionEmbedding):
    """A learned table that is resampled inside the graph."""

    def __init__(self, of: Any) -> None:
        super().__init__(of.shape, of.at)
        self.of = of


class TracedLearned1D(TracedLearned):
    """A vector per token, resampled to the grid of the image."""

    def table(self, index: int, grid: Grid) -> Tensor:
        covered, table = self.of.covered, self.of.weight[index]
        patches = resample_by_weights(table[covered:].unflatten(0, self.shape.grid), grid, self.of.resampling)
        return torch.cat((table[:covered], patches.flatten(0, 1)))


class TracedLearned2D(TracedLearned):
    """A vector per row and one per column, both resampled."""

    def table(self, index: int, grid: Grid) -> Tensor:
        (h, w), of = grid, self.of
        rows, columns = of.rows_weight[index], of.columns_weight[index]
        y = compute_axis_weights(of.resampling, self.shape.grid[0], h, rows) @ rows  # [h, D/2]
        x = compute_axis_weights(of.resampling, self.shape.grid[1], w, columns) @ columns  # [w, D/2]
        patches = torch.cat((y[:, None].expand(h, w, -1), x[None].expand(h, w, -1)), -1).flatten(0, 1)
        return torch.cat((of.prefix[index], patches))


class TracedReferenceRotation(positions.ReferenceRotation):
    """A rotation, and a vector per token that is resampled."""

    def __init__(self, of: positions.ReferenceRotation) -> None:
        super().__init__(of.shape, of.theta, of.reference, TracedLearned1D(of.learned))
        self._like = of._like


class TracedRelative(positions.RelativePositionBias):
    """A bias per offset, with the table of offsets resampled."""

    def __init__(self, of: positions.RelativePositionBias) -> None:
        PositionEmbedding.__init__(self, of.shape)
        self.at, self.resampling, self.offsets, self.prefix = of.at, of.resampling, of.offsets, of.prefix
        self.absolute = None if of.absolute is None else resample_in_graph(of.absolute)

    def table(self, layer: int, grid: Grid) -> Tensor:
        h, w = grid
        offsets = self.offsets[layer].permute(1, 2, 0)  # [2h-1, 2w-1, H]
        return resample_by_weights(offsets, (2 * h - 1, 2 * w - 1), self.resampling).flatten(0, 1).T


class TracedRelative1D(positions.RelativeEmbedding1D):
    """A vector per 1-D offset, with the table of offsets resampled."""

    def __init__(self, of: positions.RelativeEmbedding1D) -> None:
        PositionEmbedding.__init__(self, of.shape)
        self.at, self.resampling, self.offsets, self.prefix = of.at, of.resampling, of.offsets, of.prefix

    def resample_offsets(self, offsets: Tensor, grid: Grid) -> Tensor:
        return compute_axis_weights(self.resampling, len(offsets), 2 * grid[0] * grid[1] - 1, offsets) @ offsets


def resample_by_weights(table: Tensor, grid: Grid, resampling: Resampling) -> Tensor:
    """Return a table [h, w, D] on another grid, equal to `vitrail.nn.resampling.resample_table`."""
    (h, w, _), device = table.shape, table.device
    changes = (torch.arange(grid[0], device=device)[-1:] + 1 != h) | (
        torch.arange(grid[1], device=device)[-1:] + 1 != w
    )
    rows, columns = (
        compute_axis_weights(resampling, old, new, table, changes) for old, new in zip((h, w), grid, strict=True)
    )
    wide = columns @ table.transpose(0, 1).flatten(1)  # [w', h·D]: OpenVINO requires both factors to be matrices
    wide = wide.unflatten(1, (h, -1)).transpose(0, 1)  # [h, w', D]
    return (rows @ wide.flatten(1)).unflatten(1, (grid[1], -1))

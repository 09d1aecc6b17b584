"""Positions added to the tokens: E_pos of equation 1, at the stem or at every layer (appendix D.4)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.position.base import (
    POSITION_SCOPES,
    LayerPosition,
    Position,
    PositionEmbedding,
    PositionScope,
    check_width,
    resampling_field,
)
from vitrail.nn.resampling import Resampling, resample_rows, resample_steps, resample_table
from vitrail.nn.shape import EncoderShape, Grid


class AddedPositionEmbedding(PositionEmbedding):
    """A table of positions added to the tokens: at the stem, at every layer, or at every layer from one table."""

    def __init__(self, shape: EncoderShape, at: PositionScope) -> None:
        super().__init__(shape)
        self.at = at

    def table(self, index: int, grid: Grid) -> Tensor:
        """Return the rows for the covered prefix tokens, then one row per patch: [covered+N, D]."""
        raise NotImplementedError

    def gather_rows(self, index: int, grid: Grid, keep: Tensor | None) -> Tensor:
        """Return the table with zero rows for uncovered prefix tokens and only the kept patches: [1 or B, T, D]."""
        table = self.table(index, grid).unsqueeze(0)
        covered = table.shape[1] - math.prod(grid)
        prefix, patches = table[:, :covered], table[:, covered:]
        if covered < self.shape.prefix:
            prefix = F.pad(prefix, (0, 0, 0, self.shape.prefix - covered))
        elif keep is None:
            return table
        if keep is not None:
            prefix, patches = prefix.expand(keep.shape[0], -1, -1), F.embedding(keep, patches[0])
        return torch.cat((prefix, patches), 1)

    def stem_embedding(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        return self.gather_rows(0, grid, keep) if self.at == "stem" else None

    def layer_positions(self, grid: Grid, keep: Tensor | None) -> Iterator[LayerPosition]:
        if self.at == "stem":
            yield from super().layer_positions(grid, keep)
        elif self.at == "shared":
            yield from repeat(LayerPosition(embedding=self.gather_rows(0, grid, keep)), self.shape.depth)
        else:
            for layer in range(self.shape.depth):
                yield LayerPosition(embedding=self.gather_rows(layer, grid, keep))


class Learned1DTable(AddedPositionEmbedding):
    """One learned vector per token in reading order: the paper's default."""

    def __init__(self, shape: EncoderShape, at: PositionScope, covered: int, resampling: Resampling) -> None:
        super().__init__(shape, at)
        self.covered, self.resampling = covered, resampling
        tables = shape.depth if at == "every" else 1
        self.weight = nn.Parameter(torch.empty(tables, covered + shape.patches, shape.width))

    def table(self, index: int, grid: Grid) -> Tensor:
        table = self.weight[index]  # [covered+N, D]
        if grid == self.shape.grid:
            return table
        prefix, patches = table[: self.covered], table[self.covered :]  # section 3.2: resample the patches only
        patches = resample_table(patches.T.unflatten(1, self.shape.grid), grid, self.resampling).flatten(1).T
        return torch.cat((prefix, patches))


class Learned2DTable(AddedPositionEmbedding):
    """One learned vector per row and one per column, D/2 values each, concatenated."""

    def __init__(self, shape: EncoderShape, at: PositionScope, resampling: Resampling) -> None:
        super().__init__(shape, at)
        self.resampling = resampling
        tables, half = shape.depth if at == "every" else 1, shape.width // 2
        self.prefix = nn.Parameter(torch.empty(tables, shape.outputs, shape.width))
        self.rows_weight = nn.Parameter(torch.empty(tables, shape.grid[0], half))
        self.columns_weight = nn.Parameter(torch.empty(tables, shape.grid[1], half))

    def table(self, index: int, grid: Grid) -> Tensor:
        h, w = grid
        y = resample_rows(self.rows_weight[index], h, self.resampling)  # [h, D/2]
        x = resample_rows(self.columns_weight[index], w, self.resampling)  # [w, D/2]
        patches = torch.cat((y[:, None].expand(h, w, -1), x[None].expand(h, w, -1)), -1).flatten(0, 1)
        return torch.cat((self.prefix[index], patches))


class FactorisedTable(AddedPositionEmbedding):
    """One learned vector per place in a frame and one per step in time, added. Prefix tokens have that of their place."""

    def __init__(self, shape: EncoderShape, at: PositionScope, covered: int, resampling: Resampling) -> None:
        super().__init__(shape, at)
        self.covered, self.resampling = covered, resampling
        tables, (steps, *frame) = shape.depth if at == "every" else 1, shape.grid
        self.space_weight = nn.Parameter(torch.empty(tables, covered + math.prod(frame), shape.width))
        self.time_weight = nn.Parameter(torch.empty(tables, steps, shape.width))

    def table(self, index: int, grid: Grid) -> Tensor:
        prefix, space = self.space_weight[index].split_with_sizes((self.covered, math.prod(self.shape.grid[1:])))
        space = resample_table(space.T.unflatten(1, self.shape.grid[1:]), grid[1:], self.resampling).flatten(1).T
        time = resample_steps(self.time_weight[index], grid[0])  # [t, D]
        return torch.cat((prefix, (time[:, None] + space).flatten(0, 1)))


class FixedPositionEmbedding(AddedPositionEmbedding):
    """Added positions without parameters; an empty buffer holds the device and the precision to compute in."""

    def __init__(self, shape: EncoderShape, at: PositionScope) -> None:
        super().__init__(shape, at)
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor

    def arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self._like.device, dtype=torch.float32)


class SinCos2DTable(FixedPositionEmbedding):
    """Sine and cosine of column and row, a quarter of the width each; prefix tokens have no position."""

    def __init__(self, shape: EncoderShape, at: PositionScope, temperature: float, end: bool) -> None:
        super().__init__(shape, at)
        self.temperature, self.end = temperature, end

    def table(self, index: int, grid: Grid) -> Tensor:
        quarter = self.shape.width // 4
        omega = self.temperature ** -(self.arange(quarter) / max(1, quarter - self.end))  # [D/4]
        y = (self.arange(grid[0])[:, None, None] * omega).expand(-1, grid[1], -1)  # [h, w, D/4]
        x = (self.arange(grid[1])[None, :, None] * omega).expand(grid[0], -1, -1)
        return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), -1).flatten(0, 1).to(self._like.dtype)


class Sinusoid1DTable(FixedPositionEmbedding):
    """The positions of "Attention Is All You Need", section 3.5, over the whole sequence, prefix included."""

    def table(self, index: int, grid: Grid) -> Tensor:
        length, width = self.shape.prefix + math.prod(grid), self.shape.width
        omega = 10_000.0 ** -(self.arange(width // 2) * 2 / width)
        angle = self.arange(length)[:, None] * omega  # [T, D/2]
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(self._like.dtype)  # sine, cosine alternating


def check_not_geometric(resampling: Resampling) -> None:
    if resampling.kind == "geometric":
        raise ValueError("geometric resampling is for tables of offsets: use it with relative positions")


@dataclass(frozen=True)
class AddedPosition(Position):
    """The scope of positions that are added to the tokens."""

    at: PositionScope = "stem"

    def __post_init__(self) -> None:
        if self.at not in POSITION_SCOPES:
            raise ValueError(f"position scope must be one of {', '.join(POSITION_SCOPES)}, got {self.at!r}")


@dataclass(frozen=True)
class Learned1D(AddedPosition):
    """The paper's default. `prefix` selects the prefix tokens that have a position: the output tokens (class,
    distillation), none (DeiT III, SigLIP), or all including registers."""

    axes: ClassVar[tuple[int, ...]] = (2, 3)
    prefix: Literal["outputs", "none", "all"] = "outputs"
    resampling: Resampling = resampling_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix not in ("outputs", "none", "all"):
            raise ValueError(f"Learned1D.prefix must be 'outputs', 'none' or 'all', got {self.prefix!r}")
        check_not_geometric(self.resampling)

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return Learned1DTable(shape, self.at, self.count_covered(shape), self.resampling)

    def count_covered(self, shape: EncoderShape) -> int:
        """Return the number of prefix tokens that have a row in the table."""
        return {"outputs": shape.outputs, "none": 0, "all": shape.prefix}[self.prefix]

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        covered, table = self.count_covered(shape), tensors["weight"]
        patches = table[:, covered:].transpose(1, 2).unflatten(2, shape.grid)
        patches = resample_table(patches, grid, self.resampling).flatten(2).transpose(1, 2)
        return {"weight": torch.cat((table[:, :covered], patches), 1)}


@dataclass(frozen=True)
class Factorised(AddedPosition):
    """A vector for the place in the frame plus one for the step in time, for clips (TimeSformer). The output tokens have a
    vector of the first kind."""

    axes: ClassVar[tuple[int, ...]] = (3,)
    resampling: Resampling = resampling_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_geometric(self.resampling)

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return FactorisedTable(shape, self.at, shape.outputs, self.resampling)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        covered, table = shape.outputs, tensors["space_weight"]
        space = table[:, covered:].transpose(1, 2).unflatten(2, shape.grid[1:])
        space = resample_table(space, grid[1:], self.resampling).flatten(2).transpose(1, 2)
        time = resample_steps(tensors["time_weight"].transpose(0, 1), grid[0]).transpose(0, 1)
        return {"space_weight": torch.cat((table[:, :covered], space), 1), "time_weight": time.contiguous()}


@dataclass(frozen=True)
class Learned2D(AddedPosition):
    """A vector for the row concatenated with one for the column."""

    resampling: Resampling = resampling_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_geometric(self.resampling)

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("2-D learned", shape.width, 2)
        return Learned2DTable(shape, self.at, self.resampling)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        tensors = dict(tensors)
        for name, length in (("rows_weight", grid[0]), ("columns_weight", grid[1])):
            tensors[name] = resample_rows(tensors[name], length, self.resampling).contiguous()
        return tensors


@dataclass(frozen=True)
class SinCos2D(AddedPosition):
    """Fixed sines and cosines of row and column. `end` divides the exponents by D/4 - 1 ("Better plain ViT baselines",
    vit-pytorch); otherwise by D/4 (MoCo v3, MAE, timm)."""

    temperature: float = 10_000.0
    end: bool = True

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("2-D sin-cos", shape.width, 4)
        return SinCos2DTable(shape, self.at, self.temperature, self.end)


@dataclass(frozen=True)
class Sinusoid1D(AddedPosition):
    """The fixed 1-D positions of the 2017 Transformer, over all tokens (of clips: VideoMAE)."""

    axes: ClassVar[tuple[int, ...]] = (2, 3)

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("1-D sinusoid", shape.width, 2)
        return Sinusoid1DTable(shape, self.at)

"""Relative positions: a bias of q·k for each offset between two patches, or a vector that is multiplied with the query."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.position.added import Learned1D
from vitrail.nn.position.base import LayerPosition, Position, PositionEmbedding, PositionScope, resampling_field
from vitrail.nn.resampling import Resampling, resample_rows, resample_table
from vitrail.nn.shape import EncoderShape, Grid


class OffsetBias(PositionEmbedding):
    """A bias per head and 2-D offset between two patches, added to q·k. Subclasses define the values."""

    def __init__(self, shape: EncoderShape, at: PositionScope) -> None:
        super().__init__(shape)
        self.at = at

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def table(self, layer: int, grid: Grid) -> Tensor:
        """Return the values of every offset on this grid, in reading order: [H, offsets]."""
        raise NotImplementedError

    def prefix_bias(self, layer: int) -> Tensor:
        """Return the biases of prefix to patch, patch to prefix and prefix to prefix: [H, 3]."""
        raise NotImplementedError

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
        if keep is None:  # without the remainder of a division, which ONNX supports for known numbers only
            y = torch.arange(h, device=self.device)[:, None].expand(h, w).reshape(1, -1)
            x = torch.arange(w, device=self.device)[None].expand(h, w).reshape(1, -1)
        else:
            y, x = keep // w, keep % w
        dy = y[:, :, None] - y[:, None, :] + h - 1
        dx = x[:, :, None] - x[:, None, :] + w - 1
        return dy * (2 * w - 1) + dx

    def compute_bias(self, layer: int, grid: Grid, index: Tensor) -> Tensor:
        bias = self.table(layer, grid)[:, index].transpose(0, 1)  # [1 or B, H, N, N]
        if not self.shape.prefix:
            return bias
        b, heads, n, _ = bias.shape
        p = self.shape.prefix
        to_patch, to_prefix, among = self.prefix_bias(layer).view(1, heads, 3, 1).unbind(2)  # each [1, H, 1]
        above = torch.cat((among[..., None].expand(b, -1, p, p), to_patch[..., None].expand(b, -1, p, n)), 3)
        below = torch.cat((to_prefix[..., None].expand(b, -1, n, p), bias), 3)
        return torch.cat((above, below), 2)


class RelativePositionBias(OffsetBias):
    """A learned table of biases. Three more values per head are the biases of prefix to patch, patch to prefix and prefix
    to prefix. A learned table may be added to the tokens as well."""

    def __init__(
        self, shape: EncoderShape, at: PositionScope, resampling: Resampling, absolute: Learned1D | None = None
    ) -> None:
        super().__init__(shape, at)
        self.resampling = resampling
        tables, (h, w) = shape.depth if at == "every" else 1, shape.grid
        self.offsets = nn.Parameter(torch.empty(tables, shape.heads, 2 * h - 1, 2 * w - 1))
        self.prefix = nn.Parameter(torch.empty(tables, shape.heads, 3)) if shape.prefix else None
        self.absolute = None if absolute is None else absolute.build(shape)

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def stem_embedding(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        return None if self.absolute is None else self.absolute.stem_embedding(grid, keep)

    def table(self, layer: int, grid: Grid) -> Tensor:
        return self.resample_offsets(self.offsets[layer], grid).flatten(1)

    def prefix_bias(self, layer: int) -> Tensor:
        assert self.prefix is not None
        return self.prefix[layer]

    def resample_offsets(self, offsets: Tensor, grid: Grid) -> Tensor:
        """Return tables of offsets [..., 2h-1, 2w-1] for another grid."""
        return resample_table(offsets, (2 * grid[0] - 1, 2 * grid[1] - 1), self.resampling)


class OffsetMLP(nn.Module):
    """fc2(relu(fc1(offset))): from the two coordinates of an offset to the bias of each head."""

    def __init__(self, hidden: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, hidden)
        self.fc2 = nn.Linear(hidden, heads, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class ComputedPositionBias(OffsetBias):
    """A bias that an MLP computes from the logarithm of the offset, for any grid (after Swin v2, Liu et al. 2022). The bias
    of prefix tokens is zero."""

    def __init__(self, shape: EncoderShape, at: PositionScope, hidden: int, scaled: bool) -> None:
        super().__init__(shape, at)
        self.scaled = scaled
        tables = shape.depth if at == "every" else 1
        self.mlps = nn.ModuleList(OffsetMLP(hidden, shape.heads, bias=not scaled) for _ in range(tables))

    @property
    def reference(self) -> Tensor:
        return cast(OffsetMLP, self.mlps[0]).fc1.weight

    @property
    def device(self) -> torch.device:
        return self.reference.device

    def table(self, layer: int, grid: Grid) -> Tensor:
        offsets = compute_log_offsets(grid, grid if self.scaled else None, self.device).to(self.reference.dtype)
        values = self.mlps[layer](offsets)  # [offsets, H]
        return (16 * values.sigmoid() if self.scaled else values).T

    def prefix_bias(self, layer: int) -> Tensor:
        return self.reference.new_zeros(self.shape.heads, 3)


def compute_log_offsets(grid: Grid, scale: Grid | None, device: torch.device | None = None) -> Tensor:
    """Return the offsets of two patches of a grid on a logarithmic scale, sign(x)·log(1 + |x|): [(2h-1)(2w-1), 2].

    With a `scale`, the offsets are first scaled so that the largest one of that grid is 8, and the logarithm has the base 8
    (Swin v2, equation 4).
    """
    (h, w), lines = grid, []
    for axis, side in enumerate(grid):
        line = torch.arange(1 - side, side, device=device, dtype=torch.float32)
        if scale is not None:
            largest = torch.arange(scale[axis], device=device, dtype=torch.float32)[-1:].clamp(min=1.0)
            line = line * (8 / largest)
        size = line.abs() + 1
        lines.append(line.sign() * (size.log() if scale is None else size.log2() / 3))
    y, x = lines[0][:, None].expand(2 * h - 1, 2 * w - 1), lines[1][None].expand(2 * h - 1, 2 * w - 1)
    return torch.stack((y, x), -1).flatten(0, 1)


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

    def __post_init__(self) -> None:
        if self.at not in ("every", "shared"):
            raise ValueError(f"scope of relative positions must be 'every' or 'shared', got {self.at!r}")


@dataclass(frozen=True)
class Relative(RelativePosition):
    """A learned bias per head and 2-D offset. `absolute` adds a learned table to the tokens as well, as BEiT can."""

    resampling: Resampling = resampling_field()
    absolute: Learned1D | None = field(default=None, repr=False, metadata={"omit_default": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.absolute is not None and self.absolute.at != "stem":
            raise ValueError(f"Relative.absolute must be added at the stem, got at={self.absolute.at!r}")

    def __str__(self) -> str:
        return f"{self!r}" + ("" if self.absolute is None else f" and {self.absolute}")

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return RelativePositionBias(shape, self.at, self.resampling, self.absolute)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        offsets = resample_table(tensors["offsets"], (2 * grid[0] - 1, 2 * grid[1] - 1), self.resampling)
        if self.absolute is None:
            return tensors | {"offsets": offsets}
        added = self.absolute.resize_tensors({"weight": tensors["absolute.weight"]}, shape, grid)
        return tensors | {"offsets": offsets, "absolute.weight": added["weight"]}


@dataclass(frozen=True)
class RelativeMLP(RelativePosition):
    """A bias per head and 2-D offset, computed by an MLP with `hidden` values from the logarithm of the offset (timm's
    `vit_relpos`). `scaled`: the offset is relative to the image's grid, and the bias is 16 times a sigmoid (Swin v2)."""

    hidden: int = 128
    scaled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < 1:
            raise ValueError(f"RelativeMLP.hidden must be at least 1, got {self.hidden}")

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return ComputedPositionBias(shape, self.at, self.hidden, self.scaled)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        return tensors  # computed for any grid


@dataclass(frozen=True)
class Relative1D(RelativePosition):
    """The paper's relative attention (appendix D.4): a learned vector per 1-D offset, multiplied with the query. At another
    image size the table is resampled along the offset."""

    resampling: Resampling = resampling_field()

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return RelativeEmbedding1D(shape, self.at, self.resampling)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        offsets = resample_rows(tensors["offsets"], 2 * grid[0] * grid[1] - 1, self.resampling)
        return tensors | {"offsets": offsets.contiguous()}

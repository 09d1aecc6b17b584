"""Position embeddings: E_pos of equation 1 and its alternatives (appendix D.4).

Positions are added to the tokens (at the stem or at every layer), bias the attention matrix, or rotate queries and keys.
All of them work on any grid: learned tables are resampled in two dimensions, the others are computed.

T tokens: the prefix tokens, then N patches in a grid of h×w. D width, H heads, d = D/H.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.resampling import Resampling, resample_rows, resample_table
from vitrail.nn.shape import EncoderShape, Grid

PositionScope = Literal["stem", "every", "shared"]
POSITION_SCOPES = ("stem", "every", "shared")


class LayerPosition(NamedTuple):
    """The positions of one layer: a term for its input, a bias for its attention, a rotation of its q and k, and keys of
    offsets, whose products with the queries are a bias too."""

    embedding: Tensor | None = None  # [1 or B, T, D]
    bias: Tensor | None = None  # [1 or B, H, T, T]
    rotation: tuple[Tensor, Tensor] | None = None  # cosine and sine, each [1 or B, 1, T, d]
    offsets: tuple[Tensor, Tensor] | None = None  # embeddings as keys, [R, d], and the one of each pair, [1 or B, T, T]

    def add_to(self, z: Tensor) -> Tensor:
        """Return z plus the position embedding, if any; raise ValueError if the positions are not those of z's tokens."""
        inside = (self.rotation[0] if self.rotation else None, self.offsets[1] if self.offsets else None)
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


# --- added to the tokens ---


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
        covered = table.shape[1] - grid[0] * grid[1]
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
        length, width = self.shape.prefix + grid[0] * grid[1], self.shape.width
        omega = 10_000.0 ** -(self.arange(width // 2) * 2 / width)
        angle = self.arange(length)[:, None] * omega  # [T, D/2]
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(self._like.dtype)  # sine, cosine alternating


# --- inside attention ---


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


# --- the slots ---


@dataclass(frozen=True)
class Position:
    """The base class of the slots, whose `build` returns the module."""

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        """Return the module's tensors resampled from the grid of `shape` to another one (section 3.2)."""
        if tensors:
            raise NotImplementedError(f"{type(self).__name__} needs a resize_tensors for {', '.join(tensors)}")
        return tensors


@dataclass(frozen=True)
class AddedPosition(Position):
    """The scope of positions that are added to the tokens."""

    at: PositionScope = "stem"

    def __post_init__(self) -> None:
        if self.at not in POSITION_SCOPES:
            raise ValueError(f"position scope must be one of {', '.join(POSITION_SCOPES)}, got {self.at!r}")


def resampling_field() -> Any:
    """Return the field of a slot whose learned tables are resampled to other grids."""
    return field(default=Resampling(), kw_only=True, repr=False, metadata={"omit_default": True})


def _check_width(kind: str, width: int, divisor: int, what: str = "width") -> None:
    if width % divisor:
        near = max(1, round(width / divisor)) * divisor
        raise ValueError(f"{kind} positions need a {what} divisible by {divisor}, got {width}: use {near}")


@dataclass(frozen=True)
class NoPosition(Position):
    """No positions: attention treats the patches as a set."""

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        return PositionEmbedding(shape)


@dataclass(frozen=True)
class Learned1D(AddedPosition):
    """The paper's default. `prefix` selects the prefix tokens that have a position: the output tokens (class,
    distillation), none (DeiT III, SigLIP), or all including registers."""

    prefix: Literal["outputs", "none", "all"] = "outputs"
    resampling: Resampling = resampling_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix not in ("outputs", "none", "all"):
            raise ValueError(f"Learned1D.prefix must be 'outputs', 'none' or 'all', got {self.prefix!r}")

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
class Learned2D(AddedPosition):
    """A vector for the row concatenated with one for the column."""

    resampling: Resampling = resampling_field()

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        _check_width("2-D learned", shape.width, 2)
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
        _check_width("2-D sin-cos", shape.width, 4)
        return SinCos2DTable(shape, self.at, self.temperature, self.end)


@dataclass(frozen=True)
class Sinusoid1D(AddedPosition):
    """The fixed 1-D positions of the 2017 Transformer."""

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        _check_width("1-D sinusoid", shape.width, 2)
        return Sinusoid1DTable(shape, self.at)


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


@dataclass(frozen=True)
class Rotary2D(Position):
    """Queries and keys rotated by row and column, in every layer."""

    theta: float = 100.0

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        _check_width("2-D rotary", shape.head_width, 4, "head width")
        return RotaryEmbedding(shape, self.theta)


PositionSlot = NoPosition | Learned1D | Learned2D | Relative | Relative1D | SinCos2D | Sinusoid1D | Rotary2D

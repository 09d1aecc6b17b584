"""Where a token is: E_pos of equation 1 and its alternatives (appendix D.4).

Some positions are added to the tokens (at the stem, or again at every layer), some bias the attention matrix, some turn the
queries and keys. All of them work on any grid: learned ones are resampled in two dimensions, the others computed anew.

T tokens: N patches in a grid of h×w, and those before them. D width, H heads, d = D/H.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.shape import Grid, Shape

At = Literal["stem", "every", "shared"]
PLACES = ("stem", "every", "shared")


class Place(NamedTuple):
    """What one layer is told about positions: a sum for its input, a bias for its attention, a turn of its q and k."""

    add: Tensor | None = None  # [1 or B, T, D]
    bias: Tensor | None = None  # [1 or B, H, T, T]
    turn: tuple[Tensor, Tensor] | None = None  # cosine and sine, each [1 or B, 1, T, d]

    def enter(self, z: Tensor) -> Tensor:
        """What the layer takes for z: the positions added, if they are; refused if they are those of other tokens."""
        tables = (self.add, self.bias, None if self.turn is None else self.turn[0])
        for places in (table.shape[-2] for table in tables if table is not None):
            if places != z.shape[1]:
                raise ValueError(
                    f"z has {z.shape[1]} tokens and its positions are of {places}: "
                    "give encode the grid of the image, and the keep that chose its patches"
                )
        return z if self.add is None else z + self.add


NOWHERE = Place()


class Position(nn.Module):
    """What every kind of position answers. This one knows nothing: without positions, patches are a bag of words."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def stem(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        """What is added to z_0, [1 or B, T, D]."""
        return None

    def layers(self, grid: Grid, keep: Tensor | None) -> Iterator[Place]:
        """What each of the L layers is told, in order."""
        for _ in range(self.shape.depth):
            yield NOWHERE


def resample(table: Tensor, grid: Grid) -> Tensor:
    """A table [..., h, w] on another grid: bicubic, and the identity where the grid is its own."""
    if tuple(table.shape[-2:]) == tuple(grid):
        return table
    if table.shape[-1] == 1 and grid[1] == 1:  # PyTorch (2.13) resamples a single column wrongly, a single row rightly
        return resample(table.transpose(-1, -2), (1, grid[0])).transpose(-1, -2)
    flat = table.reshape(1, -1, *table.shape[-2:]).float()
    flat = F.interpolate(flat, size=grid, mode="bicubic", antialias=True, align_corners=False)
    return flat.reshape(*table.shape[:-2], *grid).to(table.dtype)


# --- added ---


class Added(Position):
    """Positions that are a table, added to the tokens at the stem, at every layer, or at every layer from one table."""

    def __init__(self, shape: Shape, at: At) -> None:
        super().__init__(shape)
        self.at = at

    def table(self, index: int, grid: Grid) -> Tensor:
        """The rows for the prefix tokens that have one, if any, and then one for each patch: [covered+N, D]."""
        raise AssertionError("a table of positions says how it is made")

    def rows(self, index: int, grid: Grid, keep: Tensor | None) -> Tensor:
        """The table with its prefix completed by zeros, and only the patches that were kept: [1 or B, T, D]."""
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

    def stem(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        return self.rows(0, grid, keep) if self.at == "stem" else None

    def layers(self, grid: Grid, keep: Tensor | None) -> Iterator[Place]:
        if self.at == "stem":
            yield from super().layers(grid, keep)
        elif self.at == "shared":
            place = Place(add=self.rows(0, grid, keep))
            for _ in range(self.shape.depth):
                yield place
        else:
            for layer in range(self.shape.depth):
                yield Place(add=self.rows(layer, grid, keep))


class Learned1DTable(Added):
    """The paper's default: one learned vector for each token in reading order."""

    def __init__(self, shape: Shape, at: At, covered: int) -> None:
        super().__init__(shape, at)
        self.covered = covered
        tables = shape.depth if at == "every" else 1
        self.weight = nn.Parameter(torch.empty(tables, covered + shape.patches, shape.width))

    def table(self, index: int, grid: Grid) -> Tensor:
        table = self.weight[index]  # [covered+N, D]
        if grid == self.shape.grid:
            return table
        prefix, patches = table[: self.covered], table[self.covered :]  # section 3.2: only the patches lie on a grid
        patches = resample(patches.T.unflatten(1, self.shape.grid), grid).flatten(1).T
        return torch.cat((prefix, patches))


class Learned2DTable(Added):
    """One learned vector for each row and one for each column, D/2 values each, side by side."""

    def __init__(self, shape: Shape, at: At) -> None:
        super().__init__(shape, at)
        tables, half = shape.depth if at == "every" else 1, shape.width // 2
        self.prefix = nn.Parameter(torch.empty(tables, shape.outputs, shape.width))
        self.rows_weight = nn.Parameter(torch.empty(tables, shape.grid[0], half))
        self.columns_weight = nn.Parameter(torch.empty(tables, shape.grid[1], half))

    def table(self, index: int, grid: Grid) -> Tensor:
        h, w = grid
        y = resample(self.rows_weight[index].T.unsqueeze(-1), (h, 1)).squeeze(-1).T  # [h, D/2]
        x = resample(self.columns_weight[index].T.unsqueeze(-1), (w, 1)).squeeze(-1).T  # [w, D/2]
        patches = torch.cat((y[:, None].expand(h, w, -1), x[None].expand(h, w, -1)), -1).flatten(0, 1)
        return torch.cat((self.prefix[index], patches))


class Fixed(Added):
    """Added positions without parameters: a buffer of no size says on which device, and in which precision, to compute."""

    def __init__(self, shape: Shape, at: At) -> None:
        super().__init__(shape, at)
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor

    def steps(self, count: int) -> Tensor:
        return torch.arange(count, device=self._like.device, dtype=torch.float32)


class SinCos2DTable(Fixed):
    """Sine and cosine of column and row, a quarter of the width each; prefix tokens have no position."""

    def __init__(self, shape: Shape, at: At, temperature: float, end: bool) -> None:
        super().__init__(shape, at)
        self.temperature, self.end = temperature, end

    def table(self, index: int, grid: Grid) -> Tensor:
        quarter = self.shape.width // 4
        omega = self.temperature ** -(self.steps(quarter) / max(1, quarter - self.end))  # [D/4]
        y = (self.steps(grid[0])[:, None, None] * omega).expand(-1, grid[1], -1)  # [h, w, D/4]
        x = (self.steps(grid[1])[None, :, None] * omega).expand(grid[0], -1, -1)
        return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), -1).flatten(0, 1).to(self._like.dtype)


class Sinusoid1DTable(Fixed):
    """The positions of "Attention Is All You Need", section 3.5, over the whole sequence, prefix included."""

    def table(self, index: int, grid: Grid) -> Tensor:
        length, width = self.shape.prefix + grid[0] * grid[1], self.shape.width
        omega = 10_000.0 ** -(self.steps(width // 2) * 2 / width)
        angle = self.steps(length)[:, None] * omega  # [T, D/2]
        return (
            torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(self._like.dtype)
        )  # sine, cosine, sine, cosine…


# --- inside attention ---


class RelativeBias(Position):
    """A learned number for each head and each 2-D offset between two patches, added to q·k. Three more numbers for each
    head stand for prefix to patch, patch to prefix and prefix to prefix."""

    def __init__(self, shape: Shape, at: At) -> None:
        super().__init__(shape)
        self.at = at
        tables, (h, w) = shape.depth if at == "every" else 1, shape.grid
        self.offsets = nn.Parameter(torch.empty(tables, shape.heads, 2 * h - 1, 2 * w - 1))
        self.prefix = nn.Parameter(torch.empty(tables, shape.heads, 3)) if shape.prefix else None

    def layers(self, grid: Grid, keep: Tensor | None) -> Iterator[Place]:
        index = self.index(grid, keep)
        if self.at == "shared":
            place = Place(bias=self.bias(0, grid, index))
            for _ in range(self.shape.depth):
                yield place
        else:
            for layer in range(self.shape.depth):
                yield Place(bias=self.bias(layer, grid, index))

    def index(self, grid: Grid, keep: Tensor | None) -> Tensor:
        """For each query patch and key patch the place of their offset in the flattened table: [1 or B, N, N]."""
        h, w = grid
        patch = torch.arange(h * w, device=self.offsets.device).unsqueeze(0) if keep is None else keep
        y, x = patch // w, patch % w
        dy = y[:, :, None] - y[:, None, :] + h - 1
        dx = x[:, :, None] - x[:, None, :] + w - 1
        return dy * (2 * w - 1) + dx

    def table(self, layer: int, grid: Grid) -> Tensor:
        """The numbers of every offset on this grid, in reading order: [H, offsets]."""
        return resample(self.offsets[layer], (2 * grid[0] - 1, 2 * grid[1] - 1)).flatten(1)

    def bias(self, layer: int, grid: Grid, index: Tensor) -> Tensor:
        bias = self.table(layer, grid)[:, index].transpose(0, 1)  # [1 or B, H, N, N]
        if self.prefix is None:
            return bias
        b, heads, n, _ = bias.shape
        p = self.shape.prefix
        to_patch, to_prefix, among = self.prefix[layer].view(1, heads, 3, 1).unbind(2)  # each [1, H, 1]
        above = torch.cat((among[..., None].expand(b, -1, p, p), to_patch[..., None].expand(b, -1, p, n)), 3)
        below = torch.cat((to_prefix[..., None].expand(b, -1, n, p), bias), 3)
        return torch.cat((above, below), 2)


class RotaryTurn(Position):
    """Pairs of values in q and k are turned by an angle: half of the pairs by the column, half by the row ("RoPE axial",
    Heo et al. 2024). The product q·k then depends on offsets alone. Prefix tokens are not turned."""

    def __init__(self, shape: Shape, theta: float) -> None:
        super().__init__(shape)
        self.theta = theta
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor

    def layers(self, grid: Grid, keep: Tensor | None) -> Iterator[Place]:
        place = Place(turn=self.turn(grid, keep))
        for _ in range(self.shape.depth):
            yield place

    def turn(self, grid: Grid, keep: Tensor | None) -> tuple[Tensor, Tensor]:
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


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (a, b) of the last dimension to (a cos - b sin, b cos + a sin)."""
    cosine, sine = turn
    crossed = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cosine + crossed * sine


# --- the slots ---


def _check_place(at: str) -> None:
    if at not in PLACES:
        raise ValueError(f"positions are added at {', '.join(PLACES)}, not at {at!r}")


def _check_width(kind: str, width: int, divisor: int, what: str = "width") -> None:
    if width % divisor:
        near = max(1, round(width / divisor)) * divisor
        raise ValueError(f"{kind} positions need a {what} divisible by {divisor}, got {width}: use {near}")


@dataclass(frozen=True)
class NoPosition:
    """No positions: attention then sees a set of patches, not an image."""

    def build(self, shape: Shape) -> Position:
        return Position(shape)


@dataclass(frozen=True)
class Learned1D:
    """The paper's default. `prefix` says which tokens before the patches have a position too: the output tokens (class,
    distillation), none (DeiT III, SigLIP), or all of them, registers included."""

    at: At = "stem"
    prefix: Literal["outputs", "none", "all"] = "outputs"

    def __post_init__(self) -> None:
        _check_place(self.at)
        if self.prefix not in ("outputs", "none", "all"):
            raise ValueError(f"positions cover the prefix tokens 'outputs', 'none' or 'all', not {self.prefix!r}")

    def build(self, shape: Shape) -> Position:
        return Learned1DTable(shape, self.at, {"outputs": shape.outputs, "none": 0, "all": shape.prefix}[self.prefix])


@dataclass(frozen=True)
class Learned2D:
    """A vector for the row beside one for the column."""

    at: At = "stem"

    def __post_init__(self) -> None:
        _check_place(self.at)

    def build(self, shape: Shape) -> Position:
        _check_width("2-D learned", shape.width, 2)
        return Learned2DTable(shape, self.at)


@dataclass(frozen=True)
class SinCos2D:
    """Fixed sines and cosines of row and column. `end` divides the exponents by D/4 - 1, as "Better plain ViT baselines"
    and vit-pytorch do; without it by D/4, as MoCo v3, MAE and timm do."""

    at: At = "stem"
    temperature: float = 10_000.0
    end: bool = True

    def __post_init__(self) -> None:
        _check_place(self.at)

    def build(self, shape: Shape) -> Position:
        _check_width("2-D sin-cos", shape.width, 4)
        return SinCos2DTable(shape, self.at, self.temperature, self.end)


@dataclass(frozen=True)
class Sinusoid1D:
    """The fixed positions of the 2017 Transformer, blind to the second dimension."""

    at: At = "stem"

    def __post_init__(self) -> None:
        _check_place(self.at)

    def build(self, shape: Shape) -> Position:
        _check_width("1-D sinusoid", shape.width, 2)
        return Sinusoid1DTable(shape, self.at)


@dataclass(frozen=True)
class Relative:
    """A learned bias for each head and 2-D offset, with a table for every layer or one shared by all."""

    at: At = "every"

    def __post_init__(self) -> None:
        if self.at not in ("every", "shared"):
            raise ValueError(f"relative positions act in the layers: 'every' or 'shared', not {self.at!r}")

    def build(self, shape: Shape) -> Position:
        return RelativeBias(shape, self.at)


@dataclass(frozen=True)
class Rotary2D:
    """Queries and keys turned by row and column, in every layer."""

    theta: float = 100.0

    def build(self, shape: Shape) -> Position:
        _check_width("2-D rotary", shape.head_width, 4, "head width")
        return RotaryTurn(shape, self.theta)


PositionSlot = NoPosition | Learned1D | Learned2D | SinCos2D | Sinusoid1D | Relative | Rotary2D

"""Resampling of position tables to another grid (section 3.2), by the rules of different projects.

Every rule is separable: along each axis, a new value is a weighted sum of old ones. `resample_table` computes it with PyTorch's
kernels, which have two axes. `compute_axis_weights` returns the same weights as a matrix for one axis: exported graphs use
it, and so does the time axis of clips, along which tables are interpolated linearly, whatever the rule.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.nn.shape import Grid

KINDS = ("bicubic", "linear", "geometric", "nearest", "cut")
ANTIALIASED_CUBIC, PLAIN_CUBIC = -0.5, -0.75  # the parameter a of PyTorch's two bicubic filters
GEOMETRIC_STEPS = 19  # halvings of the interval from 1.01 to 1.5 until it is shorter than 1e-6


@dataclass(frozen=True)
class Resampling:
    """A rule to resample a table of n old to m new values along each axis; the default is timm's.

    `antialias` widens the filter when shrinking. `align_corners` maps the first and last values onto each other, else the
    outer edges of the cells. `offset` is added to m in the scale n/m, as DINO does against rounding. The kind "geometric" is
    for tables of offsets: the old values stand at distances from the centre that grow geometrically, so that the nearest
    offsets keep their values, and are interpolated linearly (BEiT; timm's `resize_rel_pos_bias_table`). The kind "cut" keeps
    the m values in the middle of an axis that shrinks, and interpolates one that grows linearly (AST).
    """

    kind: Literal["bicubic", "linear", "geometric", "nearest", "cut"] = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"kind of resampling must be {', '.join(map(repr, KINDS[:-1]))} or 'cut', got {self.kind!r}"
            )
        if not 0 <= self.offset < 1:
            raise ValueError(f"offset of resampling must be at least 0 and below 1, got {self.offset}")
        if self.antialias + self.align_corners + (self.offset > 0) > 1:
            raise ValueError("resampling supports only one of antialias, align_corners and an offset")
        if self.kind in ("geometric", "nearest", "cut") and (self.antialias or self.align_corners or self.offset):
            raise ValueError(f"{self.kind} resampling supports none of antialias, align_corners and an offset")

    def describe(self) -> str:
        """Return the rule in words."""
        if self.kind == "cut":
            return "the middle of an axis that shrinks, linear for one that grows"
        words = {"antialiased": self.antialias, "corners aligned": self.align_corners}
        words[f"offset {self.offset:g}"] = self.offset > 0
        return ", ".join((self.kind, *(word for word, holds in words.items() if holds)))


TIME = Resampling("linear", antialias=False)  # the rule along the time axis of clips
GROWTH = TIME  # the rule of "cut" for an axis that grows


def resample_table(table: Tensor, grid: Grid, resampling: Resampling) -> Tensor:
    """Return a table [..., h, w] or [..., t, h, w] resampled to another grid; unchanged on its own grid."""
    if tuple(table.shape[-len(grid) :]) == tuple(grid):
        return table
    if len(grid) == 3:
        steps = resample_steps(table.movedim(-3, 0), grid[0]).movedim(0, -3)
        return resample_table(steps, grid[1:], resampling)
    if table.shape[-1] == 1 and grid[1] == 1:  # PyTorch (2.13) resamples a single column wrongly; a single row is right
        return resample_table(table.transpose(-1, -2), (1, grid[0]), resampling).transpose(-1, -2)
    flat = table.reshape(1, -1, *table.shape[-2:]).float()
    if resampling.kind == "geometric":
        changes = torch.ones(
            1, device=flat.device, dtype=torch.bool
        )  # a side that stays is resampled with the other one
        sides = zip(flat.shape[-2:], grid, strict=True)
        rows, columns = (compute_axis_weights(resampling, n, m, flat, changes) for n, m in sides)
        return (rows @ flat @ columns.T).reshape(*table.shape[:-2], *grid).to(table.dtype)
    if resampling.kind == "cut":
        for axis, (n, m) in enumerate(zip(table.shape[-2:], grid, strict=True), start=2):
            flat = flat.narrow(axis, n // 2 - m // 2, m) if m < n else flat
        return resample_table(flat[0], grid, GROWTH).reshape(*table.shape[:-2], *grid).to(table.dtype)
    if resampling.kind == "nearest":
        return F.interpolate(flat, grid, mode="nearest").reshape(*table.shape[:-2], *grid).to(table.dtype)
    size: dict[str, Any] = {"size": grid}
    if resampling.offset:
        size = {"scale_factor": [(m + resampling.offset) / n for n, m in zip(flat.shape[-2:], grid, strict=True)]}
    mode = "bicubic" if resampling.kind == "bicubic" else "bilinear"
    flat = F.interpolate(
        flat, **size, mode=mode, antialias=resampling.antialias, align_corners=resampling.align_corners
    )
    return flat.reshape(*table.shape[:-2], *grid).to(table.dtype)


def resample_rows(table: Tensor, count: int, resampling: Resampling) -> Tensor:
    """Return a table of one axis, [..., n, D], resampled to `count` rows."""
    column = table.transpose(-1, -2).unsqueeze(-1)
    return resample_table(column, (count, 1), resampling).squeeze(-1).transpose(-1, -2)


def resample_steps(table: Tensor, count: int) -> Tensor:
    """Return a table whose first axis is time, [t, ...], interpolated linearly to `count` steps."""
    if len(table) == count:
        return table
    weights = compute_axis_weights(TIME, len(table), count, table.float())
    return (weights @ table.float().flatten(1)).unflatten(1, table.shape[1:]).to(table.dtype)


def compute_axis_weights(
    resampling: Resampling, source: int, count: int, reference: Tensor, changes: Tensor | None = None
) -> Tensor:
    """Return the weights [count, source] of the old values in each new one, along one axis.

    `count` may be unknown before a graph runs; device and precision are those of `reference`. `changes` is whether the grid
    changes, by default along this axis: an offset is not added on the table's own grid, and offsets keep their places.
    """
    steps = torch.arange(count, device=reference.device, dtype=torch.float32)
    total = steps[-1:] + 1  # count as a tensor
    if resampling.kind == "geometric":
        changes = (total != source) if changes is None else changes
        return _compute_geometric_weights(source, steps - (total - 1) / 2, changes).to(reference.dtype)
    cells = torch.arange(source, device=reference.device, dtype=torch.float32)
    if resampling.kind == "cut":
        kept = steps + source // 2 - torch.div(total, 2, rounding_mode="floor")
        grown = compute_axis_weights(GROWTH, source, count, reference)
        return torch.where(total < source, (kept[:, None] == cells).to(reference.dtype), grown)
    if resampling.kind == "nearest":
        return ((steps * (source / total)).floor()[:, None] == cells).to(reference.dtype)
    if resampling.align_corners:
        scale = (source - 1) / (total - 1).clamp(min=1.0)
        middle = steps * scale
    else:
        changes = (total != source) if changes is None else changes
        scale = source / (total + resampling.offset * changes if resampling.offset else total)
        middle = (steps + 0.5) * scale - 0.5
    if resampling.antialias:
        distance = (cells[None] - middle[:, None]) / scale.clamp(min=1.0)
        weight = _filter(resampling.kind, distance.abs(), ANTIALIASED_CUBIC)
        return (weight / weight.sum(1, keepdim=True)).to(reference.dtype)
    first, reach = middle.floor(), 2 if resampling.kind == "bicubic" else 1
    weight = torch.zeros_like(middle[:, None] * cells[None])
    for step in range(1 - reach, 1 + reach):  # cells beyond the edge repeat the last one
        tap = _filter(resampling.kind, (middle - first - step).abs(), PLAIN_CUBIC)
        weight = weight + tap[:, None] * (cells[None] == (first + step).clamp(0, source - 1)[:, None])
    return weight.to(reference.dtype)


def _compute_geometric_weights(source: int, offsets: Tensor, changes: Tensor) -> Tensor:
    """Return the weights of the values of `source` old offsets in the new ones, [m]: linear interpolation, constant beyond
    the last. The old offset k stands at 1 + r + … + r^(k-1), with r such that the largest one reaches the largest new one."""
    offsets = offsets if offsets.device.type == "mps" else offsets.double()  # a sum of large powers is compared
    powers = torch.arange(source // 2, device=offsets.device, dtype=offsets.dtype)
    low, high = offsets.new_full((1,), 1.01), offsets.new_full((1,), 1.5)
    ratio = low
    for _ in range(GEOMETRIC_STEPS):
        ratio = (low + high) / 2
        is_beyond = (ratio**powers).sum(0, keepdim=True) > offsets[-1:]
        low, high = torch.where(is_beyond, low, ratio), torch.where(is_beyond, ratio, high)
    ratio = torch.where(changes, ratio, torch.ones_like(ratio))
    distances = (ratio**powers).cumsum(0)
    places = torch.cat((-distances.flip(0), torch.zeros_like(ratio), distances))  # [source]
    passed = ((offsets[:, None] - places[None, :-1]) / (places[1:] - places[:-1])).clamp(0.0, 1.0)  # share of each gap
    ends = torch.ones_like(offsets[:, None])
    return torch.cat((ends, passed), 1) - torch.cat((passed, torch.zeros_like(ends)), 1)


def _filter(kind: str, x: Tensor, a: float) -> Tensor:
    """Return the value of the filter at distance x ≥ 0."""
    if kind == "linear":
        return (1 - x).clamp(min=0.0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))

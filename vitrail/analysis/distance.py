"""Mean attention distance in pixels (figure 7, right), and attention between patches on a coarser grid.

For each query patch, the distances to all patches are weighted by attention; then the mean over queries is taken. Prefix tokens
have no position: they are left out on both sides, and attention among patches is renormalised to sum to 1. Without that, a head
that attends mostly to the class token would seem to have a short distance.

H heads, h×w patches, N of them, r rows.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.analysis.heads import LayerHeads
from vitrail.analysis.record import evaluation_mode, find_vit, watch_attention
from vitrail.analysis.results import AttentionDistances
from vitrail.nn.shape import Grid


def patch_centres(grid: Grid, stride: int, device: torch.device) -> Tensor:
    """Return row and column of every patch centre in pixels, [N, 2]."""
    y, x = torch.meshgrid(*(torch.arange(n, device=device, dtype=torch.float32) for n in grid), indexing="ij")
    return (torch.stack((y, x), -1).flatten(0, 1) + 0.5) * stride


class MeanDistance:
    """Mean attention distance of each head."""

    def __init__(self, heads: int, grid: Grid, stride: int, prefix: int, device: torch.device) -> None:
        self.prefix, self.centres = prefix, patch_centres(grid, stride, device)
        self.total = torch.zeros(heads, device=device)

    def update(self, rows: slice, attention: Tensor) -> None:
        """Add some rows, [H, r, T]."""
        skipped = max(0, self.prefix - rows.start)
        attention = attention[:, skipped:, self.prefix :]  # patches to patches
        if not attention.shape[1]:
            return
        first = rows.start + skipped - self.prefix
        queries = self.centres[first : first + attention.shape[1]]
        distance = (queries[:, None] - self.centres[None]).square_().sum(-1).sqrt_()  # [r, N]
        total = attention.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.total += ((attention * distance).sum(-1) / total).sum(1)

    def compute(self) -> Tensor:  # [H]
        return self.total / len(self.centres)


def measure_distances(model: nn.Module, images: Iterable[Tensor]) -> AttentionDistances:
    """Return the mean attention distance over normalised batches [B, C, H, W] of images of one size."""
    vit = find_vit(model)
    stride, prefix, depth = vit.embed.stride, vit.config.prefix.count, len(vit.blocks)
    distances: list[list[Tensor]] = []  # by image and layer, [H] each
    size: tuple[int, int] | None = None
    grid = vit.config.shape.grid

    def measure_layer(layer: int, heads: LayerHeads) -> None:
        for index, by_layer in enumerate(distances[-heads.q.shape[0] :]):
            distance = MeanDistance(heads.q.shape[1], grid, stride, prefix, heads.q.device)
            for rows, attention in heads.select_image(index).iter_rows():
                distance.update(rows, attention)
            by_layer.append(distance.compute().cpu())

    with evaluation_mode(model), torch.no_grad(), watch_attention(vit.blocks, list(range(1, depth + 1)), measure_layer):
        for batch in images:
            grid = vit.embed.grid(batch)
            if not len(batch):
                continue
            height, width = batch.shape[-2:]
            if size is not None and size != (height, width):
                raise ValueError(f"images must have one size, got {height}×{width} after {size[0]}×{size[1]} pixels")
            size = height, width
            distances += [[] for _ in range(len(batch))]
            model(batch)
    if size is None:
        raise ValueError("no images: attention distances need at least 1")
    values = np.stack([torch.stack(by_layer).numpy() for by_layer in distances])  # [n, L, H]
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])
    return AttentionDistances(values.mean(0), spread, len(values), size)


MAX_CELLS = 256  # for 12 heads of 12 layers this is 19 MB of a page


def coarsen_grid(grid: Grid, max_cells: int = MAX_CELLS) -> tuple[Grid, int]:
    """Return a grid of at most `max_cells` cells, and the number of patches along the side of a cell."""
    if max_cells < 1:
        raise ValueError(f"max_cells must be >= 1, got {max_cells}")
    h, w = grid
    side = 1
    while math.ceil(h / side) * math.ceil(w / side) > max_cells:
        side += 1
    return (math.ceil(h / side), math.ceil(w / side)), side


class CellAttention:
    """Attention of every cell to every cell, for each head: summed over keys, averaged over queries."""

    def __init__(self, heads: int, grid: Grid, prefix: int, max_cells: int, device: torch.device) -> None:
        self.prefix, self.grid = prefix, grid
        (a, b), self.side = coarsen_grid(grid, max_cells)
        self.cells = a, b
        self.total = torch.zeros(a * b, heads, a * b, device=device)
        y, x = (torch.arange(n, device=device) // self.side for n in grid)
        self.cell_of_patch = (y[:, None] * b + x[None]).flatten()  # of each patch
        self.row_pooling = torch.nn.functional.one_hot(y, a).T.float()  # [a, h]
        self.column_pooling = torch.nn.functional.one_hot(x, b).float()  # [w, b]

    def update(self, rows: slice, attention: Tensor) -> None:
        """Add some rows, [H, r, T]."""
        skipped = max(0, self.prefix - rows.start)
        attention = attention[:, skipped:, self.prefix :]
        if not attention.shape[1]:
            return
        if self.side > 1:
            pooled = self.row_pooling @ (attention.unflatten(-1, self.grid) @ self.column_pooling)
            attention = pooled.flatten(-2)  # [H, r, n]
        first = rows.start + skipped - self.prefix
        cell = self.cell_of_patch[first : first + attention.shape[1]]
        self.total.index_add_(0, cell, attention.transpose(0, 1))

    def compute(self) -> Tensor:  # [H, n, n]
        return (self.total / self.cell_of_patch.bincount()[:, None, None]).transpose(0, 1)

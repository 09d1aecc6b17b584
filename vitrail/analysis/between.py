"""All patches to all patches, on a grid coarse enough to be kept.

Where there are more than so many patches, neighbours are put together in square cells: attention is summed over the keys of a
cell and averaged over its queries, so that rows keep their sums and still say how much of a query's attention goes where.

H heads, h×w patches, a×b cells, n of them, r rows.
"""

import math

import torch
from torch import Tensor

from vitrail.nn.shape import Grid

CELLS = 256  # as many as a page can hold for twelve heads of twelve layers: 19 MB


def coarse(grid: Grid, cells: int = CELLS) -> tuple[Grid, int]:
    """A grid of at most so many cells, and the patches along the side of one."""
    if cells < 1:
        raise ValueError(f"a grid of {cells} cells: give at least 1")
    h, w = grid
    side = 1
    while math.ceil(h / side) * math.ceil(w / side) > cells:
        side += 1
    return (math.ceil(h / side), math.ceil(w / side)), side


class Between:
    """Attention of every cell to every cell, for each head."""

    def __init__(self, heads: int, grid: Grid, prefix: int, cells: int, device: torch.device) -> None:
        self.prefix, self.grid = prefix, grid
        (a, b), self.side = coarse(grid, cells)
        self.cells = a, b
        self.total = torch.zeros(a * b, heads, a * b, device=device)
        y, x = (torch.arange(n, device=device) // self.side for n in grid)
        self.cell = (y[:, None] * b + x[None]).flatten()  # of each patch
        self.down = torch.nn.functional.one_hot(y, a).T.float()  # [a, h]
        self.across = torch.nn.functional.one_hot(x, b).float()  # [w, b]

    def see(self, rows: slice, attention: Tensor) -> None:
        """Some rows, [H, r, T]."""
        skipped = max(0, self.prefix - rows.start)
        attention = attention[:, skipped:, self.prefix :]
        if not attention.shape[1]:
            return
        if self.side > 1:
            attention = (self.down @ (attention.unflatten(-1, self.grid) @ self.across)).flatten(-2)  # [H, r, n]
        first = rows.start + skipped - self.prefix
        cell = self.cell[first : first + attention.shape[1]]
        self.total.index_add_(0, cell, attention.transpose(0, 1))

    def result(self) -> Tensor:  # [H, n, n]
        return (self.total / self.cell.bincount()[:, None, None]).transpose(0, 1)

"""Many small pictures set as one, so that hundreds of maps are drawn as quickly as one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Mosaic:
    """Tiles in rows and columns on a ground, and where the middle of each row and column is, in pixels."""

    pixels: np.ndarray  # uint8 [H, W, 3]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    tile: Size  # of each


def tile_size(grid: Size, most: int) -> Size:
    """Pixels of a tile for a grid of patches: as many whole pixels a patch as fit, or the grid made smaller."""
    largest = max(grid)
    if largest <= most:
        each = most // largest
        return grid[0] * each, grid[1] * each
    return max(1, round(grid[0] * most / largest)), max(1, round(grid[1] * most / largest))


def mosaic(
    tiles: Sequence[Sequence[np.ndarray]],
    gap: int = 4,
    ground: tuple[int, int, int] = (255, 255, 255),
    apart: dict[int, int] | None = None,
) -> Mosaic:
    """Rows of tiles, uint8 [h, w, 3], all of one size. `apart` gives more room, in pixels, after some rows."""
    h, w = tiles[0][0].shape[:2]
    wide = max(map(len, tiles))
    apart = apart or {}
    tops, top = [], 0
    for row in range(len(tiles)):
        tops.append(top)
        top += h + gap + apart.get(row, 0)
    height = tops[-1] + h
    made = np.empty((height, wide * (w + gap) - gap, 3), dtype=np.uint8)
    made[:] = ground
    for top, row in zip(tops, tiles, strict=True):
        for column, tile in enumerate(row):
            made[top : top + h, column * (w + gap) : column * (w + gap) + w] = tile
    return Mosaic(
        made,
        tuple(top + h / 2 for top in tops),
        tuple(column * (w + gap) + w / 2 for column in range(wide)),
        (h, w),
    )

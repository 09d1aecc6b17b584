"""The principal components of the filters that make tokens from pixels: figure 7 (left) of the paper."""

import math

import numpy as np

from vitrail.analysis.seen import Filters
from vitrail.views.colours import BLUE, INK, ORANGE, QUIET
from vitrail.views.mosaic import Mosaic, mosaic, tile_size
from vitrail.views.overlay import blocks
from vitrail.views.sheet import DPI, HEAD, MARGIN, Sheet, shortened

COLUMNS = 7


def draw(found: Filters, model: str) -> bytes:
    """Tiles in the order of their variance, and how much of it they hold."""
    tiles = tiles_of(found, round(DPI * 0.62), gap=9)
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    share = 100 * float(found.explained.sum())
    side, count, patch = 3.1, len(found.tiles), found.tiles.shape[1]
    sheet = Sheet(
        2 * MARGIN + wide + 0.95 + side,
        HEAD + max(high, 2.2) + 0.75,
        f"The first {count} principal filters",
        f"{shortened(model, 48)}  ·  of the {found.source}, {patch}×{patch} pixels  ·  together {share:.0f} % of its variance",
    )
    sheet.tiles(MARGIN, HEAD, tiles)
    axes = sheet.axes(MARGIN + wide + 0.9, HEAD, side, max(high, 2.2))
    number = np.arange(1, count + 1)
    axes.bar(number, 100 * found.explained, color=BLUE, width=0.72, alpha=0.85, label="of one filter")
    axes.plot(number, 100 * found.explained.cumsum(), color=ORANGE, linewidth=1.6, label="of all up to it")
    axes.set_xlabel("component", fontsize=8, color=INK)
    axes.set_ylabel("share of the variance, %", fontsize=8, color=INK)
    axes.grid(axis="x", visible=False)
    axes.set_xlim(0.2, count + 0.8)
    axes.set_ylim(0, 103)
    axes.legend(frameon=False, fontsize=7.5, labelcolor=QUIET, loc="upper left", handlelength=1.4)
    return sheet.png()


def tiles_of(found: Filters, most: int, gap: int = 8) -> Mosaic:
    """The filters as colours: grey is 0."""
    size = tile_size((found.tiles.shape[1], found.tiles.shape[2]), most)
    tiles = [blocks(_colours(tile), size) for tile in found.tiles]
    rows = math.ceil(len(tiles) / COLUMNS)
    return mosaic([tiles[row * COLUMNS : (row + 1) * COLUMNS] for row in range(rows)], gap)


def _colours(tile: np.ndarray) -> np.ndarray:
    """Values between -1 and 1, [P, P, C], as colours; of other channels than red, green and blue the mean, in grey."""
    rgb = tile if tile.shape[2] == 3 else np.repeat(tile.mean(2, keepdims=True), 3, axis=2)
    return ((rgb.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8)

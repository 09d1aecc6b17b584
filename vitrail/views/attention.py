"""Attention maps of every layer and head over the picture: of the token that is read in the end, or of a chosen patch."""

from collections.abc import Sequence

import numpy as np

from vitrail.views.aside import WIDTH, about, aside
from vitrail.views.colours import HEAT, QUIET, scaled
from vitrail.views.mosaic import Mosaic, mosaic, tile_size
from vitrail.views.overlay import blocks, marked, over, resized
from vitrail.views.sheet import DPI, HEAD, MARGIN, Sheet
from vitrail.views.shown import Shown

LABELS = 0.55  # inches for the names of rows


def draw(shown: Shown, layers: Sequence[int] | None = None, at: bool = False) -> bytes:
    """A column for each layer (of `layers`, from 1), a row for each head; with `at`, of the chosen patch."""
    maps = _maps(shown, at)
    layers = layers or range(1, len(maps) + 1)
    heads = maps.shape[1]
    most = _tile(len(layers), heads + 1)
    tiles = maps_over(shown, layers, most, at)
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    left = MARGIN + WIDTH + 0.35 + LABELS
    sheet = Sheet(
        left + wide + MARGIN,
        max(HEAD + high + 0.78, HEAD + WIDTH * shown.pixels.shape[0] / shown.pixels.shape[1] + 1.5),
        f"Where the {_who(shown, at)} looks",
        about(shown, "each map from 0 to its own largest value"),
    )
    end = aside(sheet, MARGIN, HEAD + 0.32, shown, mark=at)
    sheet.key(MARGIN, end + 0.3, WIDTH, HEAT, "0", "its largest", "attention weight in each map")
    rows = ["mean", *(f"head {head}" for head in range(1, heads + 1))]
    sheet.text(left, HEAD + 0.02, "layer", size=7, colour=QUIET, baseline="center")
    sheet.tiles(left, HEAD + 0.32, tiles, rows, [str(layer) for layer in layers])
    return sheet.png()


def maps_over(
    shown: Shown, layers: Sequence[int], most: int, at: bool = False, gap: int = 4, heads: bool = True
) -> Mosaic:
    """The maps over the picture as tiles of at most so many pixels: the mean of the heads first, then every head."""
    maps = _maps(shown, at)
    size = tile_size(shown.seen.grid, most)
    small = resized(shown.pixels, size)
    box = shown.box if at else None

    def tile(values: np.ndarray) -> np.ndarray:
        drawn = over(small, blocks(scaled(values, 0.0), size))
        return marked(drawn, box, line=max(1, most // 110))

    chosen = maps[[layer - 1 for layer in layers]]
    rows = [[tile(layer) for layer in chosen.mean(1)]]
    rows += [[tile(layer[head]) for layer in chosen] for head in range(maps.shape[1] if heads else 0)]
    return mosaic(rows, gap=gap, apart={0: 2 * gap})


def _maps(shown: Shown, at: bool) -> np.ndarray:
    maps = shown.seen.attention_at if at else shown.seen.attention
    assert maps is not None
    return maps


def _tile(columns: int, rows: int) -> int:
    """Pixels of a tile, so that many fit on a sheet and few are not too large."""
    return round(DPI * min(1.5, max(0.34, min(10.6 / columns, 9.0 / rows))))


def _who(shown: Shown, at: bool) -> str:
    if not at or shown.seen.at is None:
        return shown.seen.reader
    row, column = shown.seen.at
    return f"patch in row {row + 1}, column {column + 1}"

"""Figures of patch embedding filters (figure 7, left) and of position embeddings (figure 7, centre)."""

import math

import numpy as np

from vitrail.analysis.figures.overlay import Mosaic, build_mosaic, fit_tile_size, resize_blocks
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, draw_legend, shorten_name
from vitrail.analysis.results import PositionMaps, PrincipalFilters, space_evenly
from vitrail.reports.colours import BLUE, DIVERGING_CMAP, ORANGE, SIMILARITY_CMAP, apply_cmap, rescale

FILTER_COLUMNS = 7


def draw_filters(filters: PrincipalFilters, model: str) -> bytes:
    """Draw the filters in order of their variance, and its cumulative fraction."""
    tiles = tile_filters(filters, round(DPI * 0.62), gap=9)
    left, height = MARGIN + tiles.inches[0] + 0.9, max(tiles.inches[1], 2.2)
    plot_width, count, patch = 3.1, len(filters.tiles), filters.tiles.shape[1]
    size = left + plot_width + MARGIN + 0.05, HEADING_HEIGHT + height + 0.75
    facts = f"{filters.source}, {patch}×{patch} pixels", f"{100 * float(filters.explained.sum()):.0f} % of its variance"
    sheet = Sheet(*size, f"The first {count} principal filters", shorten_name(model, 48), *facts)
    sheet.draw_mosaic(MARGIN, HEADING_HEIGHT, tiles)
    axes = sheet.add_axes(left, HEADING_HEIGHT, plot_width, height, x="component", y="variance, %", x_grid=False)
    number = np.arange(1, count + 1)
    axes.bar(number, 100 * filters.explained, color=BLUE, width=0.72, alpha=0.85, label="one filter")
    axes.plot(number, 100 * filters.explained.cumsum(), color=ORANGE, linewidth=1.6, label="cumulative")
    axes.set_xlim(0.2, count + 0.8)
    axes.set_ylim(0, 103)
    draw_legend(axes, "upper left", handlelength=1.4)
    return sheet.to_png()


def tile_filters(filters: PrincipalFilters, max_tile: int, gap: int = 8) -> Mosaic:
    """Return the filters as colours; grey is 0."""
    size = fit_tile_size((filters.tiles.shape[1], filters.tiles.shape[2]), max_tile)
    tiles = [resize_blocks(_to_colours(tile), size) for tile in filters.tiles]
    rows = math.ceil(len(tiles) / FILTER_COLUMNS)
    return build_mosaic([tiles[row * FILTER_COLUMNS : (row + 1) * FILTER_COLUMNS] for row in range(rows)], gap)


def _to_colours(tile: np.ndarray) -> np.ndarray:
    """Return values between -1 and 1, [P, P, C], as colours; for C ≠ 3 the mean over channels in grey."""
    rgb = tile if tile.shape[2] == 3 else np.repeat(tile.mean(2, keepdims=True), 3, axis=2)
    return ((rgb.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8)


MAX_POSITIONS = 16  # drawn rows and columns of a larger grid
LABEL_WIDTH = 0.5


def draw_positions(positions: PositionMaps, model: str) -> bytes | None:
    """Draw the position maps, or return None for a model without position embedding, or whose bias depends on the image."""
    draw = {"added": _draw_added, "bias": _draw_bias, "rotary": _draw_rotary}.get(positions.kind)
    return draw(positions, model) if draw else None


def tile_positions(positions: PositionMaps, max_tile: int, gap: int = 7, max_positions: int = MAX_POSITIONS) -> Mosaic:
    """Return the maps as tiles of at most `max_tile` pixels; of added embeddings at most `max_positions` per side."""
    if positions.similarity is not None:
        rows, columns = (space_evenly(side, max_positions) for side in positions.grid)
        values, reach, cmap = positions.similarity[np.ix_(rows, columns)], 1.0, SIMILARITY_CMAP
    elif positions.bias is not None:
        values, reach, cmap = positions.bias, _colour_range(positions.bias), DIVERGING_CMAP
    else:
        assert positions.turn is not None
        values, reach, cmap = positions.turn[None, None], 1.0, DIVERGING_CMAP
    size = fit_tile_size(values.shape[2:], max_tile)
    tiles = apply_cmap(rescale(values, -reach, reach), cmap)  # [rows, columns, h, w, 3]
    tiles[np.isnan(values)] = 255  # heads that a layer does not have
    return build_mosaic([[resize_blocks(tile, size) for tile in row] for row in tiles], gap)


def _colour_range(values: np.ndarray) -> float:
    return max(1e-9, float(np.nanquantile(np.abs(values), 0.998)))  # robust to single outliers


def _draw_added(positions: PositionMaps, model: str) -> bytes:
    rows, columns = (space_evenly(side, MAX_POSITIONS) for side in positions.grid)
    tiles = tile_positions(positions, round(DPI * 6.6 / max(len(rows), len(columns))))
    left, top, (width, height) = MARGIN + LABEL_WIDTH, HEADING_HEIGHT, tiles.inches
    drawn = "" if (len(rows), len(columns)) == positions.grid else f"{len(rows)}×{len(columns)} of them are drawn"
    facts = shorten_name(model, 48), f"a grid of {positions.grid[0]}×{positions.grid[1]} positions", drawn
    sheet = Sheet(left + width + 0.95 + MARGIN, top + height + 0.95, "Similarity of position embeddings", *facts)
    sheet.draw_mosaic(left, top, tiles, [str(k + 1) for k in rows], [str(k + 1) for k in columns], below=True)
    _label_sides(sheet, tiles, "row of the patch", "column of the patch")
    marks = "−1", "0", "1"
    sheet.draw_vertical_colour_bar(left + width + 0.3, top, height, SIMILARITY_CMAP, marks, "cosine similarity")
    return sheet.to_png()


def _label_sides(sheet: Sheet, tiles: Mosaic, rows: str, columns: str) -> None:
    """Draw the titles of the rows and columns of a mosaic at the margin."""
    left, top, (width, height) = MARGIN + LABEL_WIDTH, HEADING_HEIGHT, tiles.inches
    sheet.draw_text(left + width / 2, top + height + 0.3, columns, align="center")
    sheet.draw_text(MARGIN, top + height / 2, rows, rotation=90, baseline="center", align="center")


def _draw_bias(positions: PositionMaps, model: str) -> bytes:
    assert positions.bias is not None
    tables, heads = positions.bias.shape[:2]
    tiles = tile_positions(positions, round(DPI * min(1.6, max(0.36, min(9.5 / heads, 9.0 / tables)))))
    left, top, (width, height) = MARGIN + 0.7, HEADING_HEIGHT + 0.2, tiles.inches
    facts = shorten_name(model, 48), "by offset in rows and columns; the centre is the patch itself"
    sheet = Sheet(max(5.6, left + width + 0.95 + MARGIN), top + height + 0.65, "Relative position bias", *facts)
    layers = [f"layer {k + 1}" for k in range(tables)] if tables > 1 else ["all layers"]
    sheet.draw_mosaic(left, top, tiles, layers, [f"head {k + 1}" if heads <= 12 else str(k + 1) for k in range(heads)])
    reach = f"{_colour_range(positions.bias):.2g}"
    bar = left + width + 0.3, top, max(height, 1.2)
    sheet.draw_vertical_colour_bar(*bar, DIVERGING_CMAP, (f"−{reach}", "0", reach), "bias")
    return sheet.to_png()


def _draw_rotary(positions: PositionMaps, model: str) -> bytes:
    tiles = tile_positions(positions, round(DPI * 4.2))
    left, top, (width, height) = MARGIN + LABEL_WIDTH, HEADING_HEIGHT, tiles.inches
    facts = shorten_name(model, 48), "by offset; the centre is the patch itself"
    sheet = Sheet(left + width + 1.0 + MARGIN, top + height + 0.95, "Rotary position embedding", *facts)
    sheet.draw_mosaic(left, top, tiles)
    h, w = positions.grid
    for share, down, across in ((0.0, 1 - h, 1 - w), (0.5, 0, 0), (1.0, h - 1, w - 1)):
        row, column = (f"{offset:+d}" if offset else "0" for offset in (down, across))
        sheet.draw_label(left - 0.08, top + share * height, row, align="right", baseline="center")
        sheet.draw_label(left + share * width, top + height + 0.08, column, align="center")
    _label_sides(sheet, tiles, "row offset", "column offset")
    marks, label = ("−1", "0", "1"), "mean cosine of the rotation"
    sheet.draw_vertical_colour_bar(left + width + 0.3, top, height, DIVERGING_CMAP, marks, label)
    return sheet.to_png()

"""Figures of patch embedding filters (figure 7, left) and of position embeddings (figure 7, centre)."""

import math

import numpy as np

from vitrail.analysis.figures.overlay import Mosaic, build_mosaic, fit_tile_size, resize_blocks
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, shorten_name
from vitrail.analysis.results import PositionMaps, PrincipalFilters, space_evenly
from vitrail.reports.colours import BLUE, DIVERGING_CMAP, INK, MUTED, ORANGE, SIMILARITY_CMAP, apply_cmap, rescale

FILTER_COLUMNS = 7


def draw_filters(filters: PrincipalFilters, model: str) -> bytes:
    """Draw the filters in order of their variance, and its cumulative fraction."""
    tiles = tile_filters(filters, round(DPI * 0.62), gap=9)
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    share = 100 * float(filters.explained.sum())
    side, count, patch = 3.1, len(filters.tiles), filters.tiles.shape[1]
    sheet = Sheet(
        2 * MARGIN + wide + 0.95 + side,
        HEADING_HEIGHT + max(high, 2.2) + 0.75,
        f"The first {count} principal filters",
        f"{shorten_name(model, 48)}  ·  {filters.source}, {patch}×{patch} pixels  ·  {share:.0f} % of its variance",
    )
    sheet.draw_mosaic(MARGIN, HEADING_HEIGHT, tiles)
    axes = sheet.add_axes(MARGIN + wide + 0.9, HEADING_HEIGHT, side, max(high, 2.2))
    number = np.arange(1, count + 1)
    axes.bar(number, 100 * filters.explained, color=BLUE, width=0.72, alpha=0.85, label="one filter")
    axes.plot(number, 100 * filters.explained.cumsum(), color=ORANGE, linewidth=1.6, label="cumulative")
    axes.set_xlabel("component", fontsize=8, color=INK)
    axes.set_ylabel("variance, %", fontsize=8, color=INK)
    axes.grid(axis="x", visible=False)
    axes.set_xlim(0.2, count + 0.8)
    axes.set_ylim(0, 103)
    axes.legend(frameon=False, fontsize=7.5, labelcolor=MUTED, loc="upper left", handlelength=1.4)
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
    """Draw the position maps, or return None for a model without position embedding."""
    match positions.kind:
        case "added":
            return _draw_added(positions, model)
        case "bias":
            return _draw_bias(positions, model)
        case "rotary":
            return _draw_rotary(positions, model)
    return None


def tile_positions(positions: PositionMaps, max_tile: int, gap: int = 7, max_positions: int = MAX_POSITIONS) -> Mosaic:
    """Return the maps as tiles of at most `max_tile` pixels; of added embeddings at most `max_positions` per side."""
    if positions.similarity is not None:
        rows, columns = (space_evenly(side, max_positions) for side in positions.grid)
        size = fit_tile_size(positions.grid, max_tile)
        shown = positions.similarity[np.ix_(rows, columns)]  # select before colouring
        drawn = apply_cmap(rescale(shown, -1.0, 1.0), SIMILARITY_CMAP)  # [rows, columns, h, w, 3]
        return build_mosaic([[resize_blocks(tile, size) for tile in line] for line in drawn], gap)
    if positions.bias is not None:
        size = fit_tile_size((positions.bias.shape[2], positions.bias.shape[3]), max_tile)
        reach = _colour_range(positions.bias)
        drawn = apply_cmap(rescale(positions.bias, -reach, reach), DIVERGING_CMAP)
        return build_mosaic([[resize_blocks(tile, size) for tile in line] for line in drawn], gap)
    assert positions.turn is not None
    size = fit_tile_size((positions.turn.shape[0], positions.turn.shape[1]), max_tile)
    return build_mosaic([[resize_blocks(apply_cmap(rescale(positions.turn, -1.0, 1.0), DIVERGING_CMAP), size)]], gap)


def _colour_range(values: np.ndarray) -> float:
    return max(1e-9, float(np.quantile(np.abs(values), 0.998)))  # robust to single outliers


def _draw_added(found: PositionMaps, model: str) -> bytes:
    rows, columns = (space_evenly(side, MAX_POSITIONS) for side in found.grid)
    tiles = tile_positions(found, round(DPI * 6.6 / max(len(rows), len(columns))))
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    part = "" if (len(rows), len(columns)) == found.grid else f"{len(rows)}×{len(columns)} of them are drawn"
    sheet = Sheet(
        2 * MARGIN + LABEL_WIDTH + wide + 0.95,
        HEADING_HEIGHT + high + 0.95,
        "Similarity of position embeddings",
        "  ·  ".join(
            filter(None, (shorten_name(model, 48), f"a grid of {found.grid[0]}×{found.grid[1]} positions", part))
        ),
    )
    left, top = MARGIN + LABEL_WIDTH, HEADING_HEIGHT
    sheet.draw_mosaic(left, top, tiles, [str(k + 1) for k in rows], [str(k + 1) for k in columns], below=True)
    sheet.draw_text(left + wide / 2, top + high + 0.3, "column of the patch", size=8, colour=INK, align="center")
    sheet.draw_text(MARGIN, top + high / 2, "row of the patch", size=8, rotation=90, baseline="center", align="center")
    _draw_vertical_colour_bar(
        sheet, left + wide + 0.3, top, high, SIMILARITY_CMAP, ("−1", "0", "1"), "cosine similarity"
    )
    return sheet.to_png()


def _draw_bias(found: PositionMaps, model: str) -> bytes:
    assert found.bias is not None
    tables, heads = found.bias.shape[:2]
    tiles = tile_positions(found, round(DPI * min(1.6, max(0.36, min(9.5 / heads, 9.0 / tables)))))
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    reach = _colour_range(found.bias)
    sheet = Sheet(
        max(5.6, 2 * MARGIN + 0.7 + wide + 0.95),
        HEADING_HEIGHT + high + 0.85,
        "Relative position bias",
        f"{shorten_name(model, 48)}  ·  by offset in rows and columns; the centre is the patch itself",
    )
    layers = [f"layer {k + 1}" for k in range(tables)] if tables > 1 else ["all layers"]
    left, top = MARGIN + 0.7, HEADING_HEIGHT + 0.2
    sheet.draw_mosaic(left, top, tiles, layers, [f"head {k + 1}" if heads <= 12 else str(k + 1) for k in range(heads)])
    _draw_vertical_colour_bar(
        sheet, left + wide + 0.3, top, max(high, 1.2), DIVERGING_CMAP, (f"−{reach:.2g}", "0", f"{reach:.2g}"), "bias"
    )
    return sheet.to_png()


def _draw_rotary(found: PositionMaps, model: str) -> bytes:
    tiles = tile_positions(found, round(DPI * 4.2))
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    sheet = Sheet(
        2 * MARGIN + LABEL_WIDTH + wide + 1.0,
        HEADING_HEIGHT + high + 0.95,
        "Rotary position embedding",
        f"{shorten_name(model, 48)}  ·  by offset; the centre is the patch itself",
    )
    left, top = MARGIN + LABEL_WIDTH, HEADING_HEIGHT
    h, w = found.grid
    sheet.draw_mosaic(left, top, tiles)
    for share, down, across in ((0.0, 1 - h, 1 - w), (0.5, 0, 0), (1.0, h - 1, w - 1)):
        sheet.draw_text(
            left - 0.08,
            top + share * high,
            f"{down:+d}" if down else "0",
            size=7,
            colour=MUTED,
            align="right",
            baseline="center",
        )
        sheet.draw_text(
            left + share * wide,
            top + high + 0.08,
            f"{across:+d}" if across else "0",
            size=7,
            colour=MUTED,
            align="center",
        )
    sheet.draw_text(left + wide / 2, top + high + 0.3, "column offset", size=8, colour=INK, align="center")
    sheet.draw_text(MARGIN, top + high / 2, "row offset", size=8, rotation=90, baseline="center", align="center")
    _draw_vertical_colour_bar(
        sheet, left + wide + 0.3, top, high, DIVERGING_CMAP, ("−1", "0", "1"), "mean cosine of the rotation"
    )
    return sheet.to_png()


def _draw_vertical_colour_bar(
    sheet: Sheet, left: float, top: float, height: float, cmap: str, marks: tuple[str, str, str], label: str
) -> None:
    """Draw a vertical colour bar."""
    bar = np.repeat(apply_cmap(np.linspace(1, 0, 256), cmap)[:, None], 10, axis=1)
    width = 0.13
    axes = sheet.add_axes(left, top, width, height)
    axes.imshow(bar, aspect="auto", interpolation="nearest")
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    for share, word in zip((1.0, 0.5, 0.0), marks, strict=True):
        sheet.draw_text(left + width + 0.06, top + share * height, word, size=7, colour=MUTED, baseline="center")
    sheet.draw_text(
        left + width + 0.36, top + height / 2, label, size=7.5, colour=MUTED, rotation=90, baseline="center"
    )

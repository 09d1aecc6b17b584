"""Figures of attention maps by layer and head, attention rollout and relevance."""

from collections.abc import Sequence

import numpy as np

from vitrail.analysis.figures.image_view import IMAGE_WIDTH, ImageView, draw_side_image, format_subtitle
from vitrail.analysis.figures.overlay import (
    Mosaic,
    build_mosaic,
    fit_tile_size,
    outline_patch,
    overlay_heat,
    resize_blocks,
    resize_image,
    resize_smooth,
)
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, shorten_name
from vitrail.reports.colours import HEAT_CMAP, INK, MUTED, apply_cmap, rescale

LABEL_WIDTH = 0.55  # inches, for row labels


def draw_attention(view: ImageView, layers: Sequence[int] | None = None, at: bool = False) -> bytes:
    """Draw a column per layer (of `layers`, from 1) and a row per head; with `at`, for the selected patch."""
    maps = _get_maps(view, at)
    layers = layers or range(1, len(maps) + 1)
    heads = maps.shape[1]
    tiles = overlay_maps(view, layers, _tile_pixels(len(layers), heads + 1), at)
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    left = MARGIN + IMAGE_WIDTH + 0.35 + LABEL_WIDTH
    sheet = Sheet(
        left + wide + MARGIN,
        max(
            HEADING_HEIGHT + high + 0.78,
            HEADING_HEIGHT + IMAGE_WIDTH * view.pixels.shape[0] / view.pixels.shape[1] + 1.5,
        ),
        f"Attention of the {_format_query(view, at)}",
        format_subtitle(view, "each map from 0 to its own maximum"),
    )
    end = draw_side_image(sheet, MARGIN, HEADING_HEIGHT + 0.32, view, mark=at)
    sheet.draw_colour_bar(MARGIN, end + 0.3, IMAGE_WIDTH, HEAT_CMAP, "0", "maximum", "attention weight in each map")
    rows = ["mean", *(f"head {head}" for head in range(1, heads + 1))]
    sheet.draw_text(left, HEADING_HEIGHT + 0.02, "layer", size=7, colour=MUTED, baseline="center")
    sheet.draw_mosaic(left, HEADING_HEIGHT + 0.32, tiles, rows, [str(layer) for layer in layers])
    return sheet.to_png()


def overlay_maps(
    view: ImageView, layers: Sequence[int], max_tile: int, at: bool = False, gap: int = 4, heads: bool = True
) -> Mosaic:
    """Return the maps over the image as tiles of at most `max_tile` pixels: the mean over heads, then every head."""
    maps = _get_maps(view, at)
    size = fit_tile_size(view.trace.grid, max_tile)
    small = resize_image(view.pixels, size)
    box = view.patch_box if at else None

    def tile(values: np.ndarray) -> np.ndarray:
        drawn = overlay_heat(small, resize_blocks(rescale(values, 0.0), size))
        return outline_patch(drawn, box, thickness=max(1, max_tile // 110))

    chosen = maps[[layer - 1 for layer in layers]]
    rows = [[tile(layer) for layer in chosen.mean(1)]]
    rows += [[tile(layer[head]) for layer in chosen] for head in range(maps.shape[1] if heads else 0)]
    return build_mosaic(rows, gap=gap, extra_gaps={0: 2 * gap})


def _get_maps(shown: ImageView, at: bool) -> np.ndarray:
    maps = shown.trace.attention_at if at else shown.trace.attention
    assert maps is not None
    return maps


def _tile_pixels(columns: int, rows: int) -> int:
    """Return the tile size in pixels that fits the sheet."""
    return round(DPI * min(1.5, max(0.34, min(10.6 / columns, 9.0 / rows))))


def _format_query(shown: ImageView, at: bool) -> str:
    if not at or shown.trace.at is None:
        return shown.trace.reader
    row, column = shown.trace.at
    return f"patch in row {row + 1}, column {column + 1}"


MAP_WIDTH, MAP_GAP, MAP_PIXELS = 2.75, 0.3, 600


def draw_rollout(view: ImageView) -> bytes:
    """Draw attention rollout (appendix D of the paper)."""
    assert view.trace.rollout is not None
    return _draw_map(
        view,
        view.trace.rollout,
        "Attention rollout",
        "attention of all layers multiplied, with the residual path; mean over heads",
        "rollout",
    )


def draw_relevance(view: ImageView) -> bytes:
    """Draw the relevance for a class: attention weighted by its gradient."""
    trace = view.trace
    assert trace.relevance is not None
    target = "the predicted class" if trace.target is None else view.label(trace.target)
    return _draw_map(
        view,
        trace.relevance,
        f"Relevance for {shorten_name(target, 40)}",
        "attention weighted by the gradient of this class, over all layers",
        "relevance",
    )


def overlay_map(view: ImageView, values: np.ndarray, pixels: int) -> np.ndarray:
    """Return a smoothed map over the image, `pixels` wide; dark is its minimum."""
    height, width = view.pixels.shape[:2]
    size = (max(1, round(pixels * height / width)), pixels)
    return overlay_heat(resize_image(view.pixels, size), resize_smooth(rescale(values), size))


def _draw_map(shown: ImageView, values: np.ndarray, title: str, method: str, unit: str) -> bytes:
    height, width = shown.pixels.shape[:2]
    high = MAP_WIDTH * height / width
    sheet = Sheet(
        2 * MARGIN + 3 * MAP_WIDTH + 2 * MAP_GAP, HEADING_HEIGHT + high + 1.0, title, format_subtitle(shown, method)
    )
    size = (max(1, round(MAP_PIXELS * height / width)), MAP_PIXELS)
    top = HEADING_HEIGHT - 0.02
    panels = (
        (resize_image(shown.pixels, size), shorten_name(shown.name), shown.prediction_text),
        (resize_blocks(apply_cmap(rescale(values, 0.0), HEAT_CMAP), size), "The map, one square per patch", ""),
        (overlay_map(shown, values, MAP_PIXELS), "The map over the image", "smoothed; dark is its minimum"),
    )
    for index, (pixels, caption, note) in enumerate(panels):
        left = MARGIN + index * (MAP_WIDTH + MAP_GAP)
        sheet.draw_image(left, top, MAP_WIDTH, pixels)
        sheet.draw_text(left, top + high + 0.1, caption, size=7.6, colour=INK)
        sheet.draw_text(left, top + high + 0.28, shorten_name(note, 44), size=7.2, colour=MUTED)
    left = MARGIN + MAP_WIDTH + MAP_GAP
    sheet.draw_colour_bar(left, top + high + 0.36, MAP_WIDTH, HEAT_CMAP, "0", f"{values.max():.3g} ({unit})")
    return sheet.to_png()

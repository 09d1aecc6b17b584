"""Figures of attention maps by layer and head, attention rollout and relevance."""

from collections.abc import Sequence

import numpy as np

from vitrail.analysis.figures import overlay
from vitrail.analysis.figures.image_view import (
    AXIS_HEIGHT,
    IMAGE_WIDTH,
    ImageView,
    describe_input,
    draw_axes,
    draw_side_image,
)
from vitrail.analysis.figures.overlay import Mosaic, outline_patch, overlay_heat, resize_blocks, resize_image
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, shorten_name
from vitrail.reports.colours import HEAT_CMAP, apply_cmap, rescale

LABEL_WIDTH = 0.55  # inches, for row labels


def draw_attention(view: ImageView, layers: Sequence[int] | None = None, at: bool = False) -> bytes:
    """Draw a column per layer (of `layers`, from 1) and a row per head; with `at`, for the selected patch."""
    maps = get_maps(view, at)
    layers = layers or range(1, len(maps) + 1)
    heads = maps.shape[1]
    max_tile = round(DPI * min(1.5, max(0.34, min(10.6 / len(layers), 9.0 / (heads + 1)))))
    tiles = overlay_maps(view, layers, max_tile, at)
    left, top = MARGIN + IMAGE_WIDTH + 0.35 + LABEL_WIDTH, HEADING_HEIGHT + 0.32
    width, height = tiles.inches
    beside = IMAGE_WIDTH * view.pixels.shape[0] / view.pixels.shape[1] + 1.5
    size = left + width + MARGIN, HEADING_HEIGHT + max(height + 0.78, beside)
    title, note = f"Attention of the {format_query(view, at)}", "each map from 0 to its own maximum"
    sheet = Sheet(*size, title, *describe_input(view), note)
    end = draw_side_image(sheet, MARGIN, top, view, mark=at)
    sheet.draw_colour_bar(MARGIN, end + 0.3, IMAGE_WIDTH, HEAT_CMAP, "0", "maximum", "attention weight in each map")
    rows = ["mean", *(f"head {head}" for head in range(1, heads + 1))]
    sheet.draw_label(left, HEADING_HEIGHT + 0.02, "layer", baseline="center")
    sheet.draw_mosaic(left, top, tiles, rows, [str(layer) for layer in layers])
    return sheet.to_png()


def overlay_maps(
    view: ImageView, layers: Sequence[int], max_tile: int, at: bool = False, gap: int = 4, heads: bool = True
) -> Mosaic:
    """Return the maps over the image as tiles of at most `max_tile` pixels: the mean over heads, then every head."""
    maps = get_maps(view, at)
    size = overlay.fit_tile_size(view.trace.grid, max_tile)
    small = resize_image(view.pixels, size)
    box = view.patch_box if at else None

    def draw_tile(values: np.ndarray) -> np.ndarray:
        tile = overlay_heat(small, resize_blocks(rescale(values, 0.0), size))
        return outline_patch(tile, box, thickness=max(1, max_tile // 110))

    chosen = maps[[layer - 1 for layer in layers]]
    rows = [[draw_tile(layer) for layer in chosen.mean(1)]]
    rows += [[draw_tile(layer[head]) for layer in chosen] for head in range(maps.shape[1] if heads else 0)]
    return overlay.build_mosaic(rows, gap=gap, extra_gaps={0: 2 * gap})


def get_maps(view: ImageView, at: bool) -> np.ndarray:
    """Return the attention of the selected patch, or of the token that is read, [L, H, h, w]."""
    maps = view.trace.attention_at if at else view.trace.attention
    assert maps is not None
    return maps


def format_query(view: ImageView, at: bool) -> str:
    """Return the name of the query of `get_maps`."""
    if not at or view.trace.at is None:
        return view.trace.reader
    return f"patch in {view.patch_text}" if view.axes is None else f"patch at {view.patch_text}"


MAP_WIDTH, MAP_GAP, MAP_PIXELS = 2.75, 0.3, 600


def draw_rollout(view: ImageView) -> bytes:
    """Draw attention rollout (appendix D of the paper)."""
    method = "attention of all layers multiplied, with the residual path; mean over heads"
    return _draw_map(view, view.trace.rollout, "Attention rollout", method, "rollout")


def draw_relevance(view: ImageView) -> bytes:
    """Draw the relevance for a class: attention weighted by its gradient."""
    target = "the predicted class" if view.trace.target is None else view.label(view.trace.target)
    method = "attention weighted by the gradient of this class, over all layers"
    return _draw_map(view, view.trace.relevance, f"Relevance for {shorten_name(target, 40)}", method, "relevance")


def overlay_map(view: ImageView, values: np.ndarray, pixels: int) -> np.ndarray:
    """Return a smoothed map over the image, `pixels` wide; dark is its minimum."""
    size = view.fit_width(pixels)
    return overlay_heat(resize_image(view.pixels, size), overlay.resize_smooth(rescale(values), size))


def _draw_map(view: ImageView, values: np.ndarray | None, title: str, method: str, unit: str) -> bytes:
    assert values is not None
    size, top = view.fit_width(MAP_PIXELS), HEADING_HEIGHT - 0.02
    map_height = MAP_WIDTH * view.pixels.shape[0] / view.pixels.shape[1]
    under = top + map_height + (0.0 if view.axes is None else AXIS_HEIGHT - 0.08)
    sheet = Sheet(2 * MARGIN + 3 * MAP_WIDTH + 2 * MAP_GAP, under + 1.02, title, *describe_input(view), method)
    panels = (
        (resize_image(view.pixels, size), shorten_name(view.name), view.prediction_text),
        (resize_blocks(apply_cmap(rescale(values, 0.0), HEAT_CMAP), size), "The map, one square per patch", ""),
        (overlay_map(view, values, MAP_PIXELS), f"The map over the {view.noun}", "smoothed; dark is its minimum"),
    )
    for index, (pixels, caption, note) in enumerate(panels):
        left = MARGIN + index * (MAP_WIDTH + MAP_GAP)
        sheet.draw_image(left, top, MAP_WIDTH, pixels)
        draw_axes(sheet, left, top, MAP_WIDTH, map_height, view, hertz=index == 0)
        sheet.draw_text(left, under + 0.1, caption, size=7.6)
        sheet.draw_label(left, under + 0.28, shorten_name(note, 44), size=7.2)
    left = MARGIN + MAP_WIDTH + MAP_GAP
    sheet.draw_colour_bar(left, under + 0.36, MAP_WIDTH, HEAT_CMAP, "0", f"{values.max():.3g} ({unit})")
    return sheet.to_png()

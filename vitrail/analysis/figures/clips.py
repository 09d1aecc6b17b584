"""Strip of frames with attention over them: a column per time step, a row per layer; of divided attention two rows."""

from collections.abc import Sequence

import numpy as np

from vitrail.analysis.clips import ClipMap, ClipTrace
from vitrail.analysis.figures.image_view import to_rgb
from vitrail.analysis.figures.overlay import build_mosaic, fit_tile_size, overlay_heat, resize_blocks, resize_image
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, shorten_name
from vitrail.analysis.results import space_evenly
from vitrail.reports.colours import HEAT_CMAP, rescale

MAX_ROWS = 6  # unless layers are chosen
LABEL_WIDTH, DIVIDED_LABEL_WIDTH, STRIP_WIDTH = 0.62, 0.98, 11.0  # inches
BAR_WIDTH = 2.4


def choose_maps(trace: ClipTrace, layers: Sequence[int] | None) -> list[ClipMap]:
    """Return the maps to draw: those of all chosen layers, else of a few with the last."""
    available = trace.layers
    few = space_evenly(len(available), MAX_ROWS // len(trace.kinds))
    shown = set(available if layers else (available[index] for index in few))
    return [each for each in trace.maps if each.layer in shown]


def spread_steps(values: np.ndarray, steps: int) -> np.ndarray:
    """Return a map [t, h, w] with the time steps of the clip: a coarser step is repeated."""
    return values[np.arange(steps) * len(values) // steps]


def draw_clip(trace: ClipTrace, name: str, model: str, prediction: str, layers: Sequence[int] | None = None) -> bytes:
    """Draw the frames of a clip, and below them the attention of each layer, mean over heads, from 0 to its maximum."""
    chosen, steps = choose_maps(trace, layers), len(trace.frames)
    height, width = trace.frames.shape[2:]
    tile = fit_tile_size((height, width), round(DPI * min(1.5, STRIP_WIDTH / steps)))
    frames = [resize_image(to_rgb(frame), tile) for frame in trace.frames]

    def draw_row(each: ClipMap) -> list[np.ndarray]:
        scaled = rescale(
            spread_steps(each.values.mean(0), steps), 0.0
        )  # over the whole clip, so that time steps compare
        return [overlay_heat(frame, resize_blocks(heat, tile)) for frame, heat in zip(frames, scaled, strict=True)]

    gaps = {0: 8} | {row + 1: 8 for row, each in enumerate(chosen) if each.kind == "space"}
    mosaic = build_mosaic([frames, *map(draw_row, chosen)], extra_gaps=gaps)
    is_divided = "space" in trace.kinds
    left, top = MARGIN + (DIVIDED_LABEL_WIDTH if is_divided else LABEL_WIDTH), HEADING_HEIGHT + 0.32
    across, down = mosaic.inches
    title = "Divided attention over time and space" if is_divided else f"Attention of the {trace.reader} over time"
    reader = f"time: patches at one place; space: {trace.reader}" if is_divided else ""
    subtitle = (shorten_name(model, 48), shorten_name(name), shorten_name(prediction), reader, "mean over heads")
    sheet = Sheet(max(left + across + MARGIN, 6.0), top + down + 0.9, title, *subtitle)
    rows = ["frame", *(each.label for each in chosen)]
    sheet.draw_mosaic(left, top, mosaic, rows, [f"step {step}" for step in range(1, steps + 1)])
    sheet.draw_colour_bar(left, top + down + 0.36, BAR_WIDTH, HEAT_CMAP, "0", "maximum", "attention weight in each row")
    return sheet.to_png()

"""Strip of frames with attention over them: a column per time step, a row per layer."""

from collections.abc import Sequence

import numpy as np

from vitrail.analysis.clips import ClipTrace
from vitrail.analysis.figures.image_view import to_rgb
from vitrail.analysis.figures.overlay import build_mosaic, fit_tile_size, overlay_heat, resize_blocks, resize_image
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, shorten_name
from vitrail.analysis.results import space_evenly
from vitrail.reports.colours import HEAT_CMAP, rescale

MAX_ROWS = 6  # layers, unless they are chosen
LABEL_WIDTH, STRIP_WIDTH = 0.62, 11.0  # inches
BAR_WIDTH = 2.4


def choose_rows(trace: ClipTrace, layers: Sequence[int] | None) -> list[int]:
    """Return the indices of the layers to draw: all of the chosen ones, else a few with the last."""
    return list(range(len(trace.layers))) if layers else space_evenly(len(trace.layers), MAX_ROWS)


def draw_clip(trace: ClipTrace, name: str, model: str, prediction: str, layers: Sequence[int] | None = None) -> bytes:
    """Draw the frames of a clip, and below them the attention of each layer, mean over heads, from 0 to its maximum."""
    chosen = choose_rows(trace, layers)
    maps = trace.attention[chosen].mean(1)  # [rows, t, h, w]
    steps = maps.shape[1]
    height, width = trace.frames.shape[2:]
    tile = fit_tile_size((height, width), round(DPI * min(1.5, STRIP_WIDTH / steps)))
    frames = [resize_image(to_rgb(frame), tile) for frame in trace.frames]

    def draw_row(values: np.ndarray) -> list[np.ndarray]:
        scaled = rescale(values, 0.0)  # over the whole clip, so that time steps compare
        return [overlay_heat(frame, resize_blocks(heat, tile)) for frame, heat in zip(frames, scaled, strict=True)]

    mosaic = build_mosaic([frames, *map(draw_row, maps)], extra_gaps={0: 8})
    left, top = MARGIN + LABEL_WIDTH, HEADING_HEIGHT + 0.32
    across, down = mosaic.inches
    title = f"Attention of the {trace.reader} over time"
    subtitle = (shorten_name(model, 48), shorten_name(name), shorten_name(prediction), "mean over heads")
    sheet = Sheet(max(left + across + MARGIN, 6.0), top + down + 0.9, title, *subtitle)
    rows = ["frame", *(f"layer {trace.layers[row]}" for row in chosen)]
    sheet.draw_mosaic(left, top, mosaic, rows, [f"step {step}" for step in range(1, steps + 1)])
    sheet.draw_colour_bar(left, top + down + 0.36, BAR_WIDTH, HEAT_CMAP, "0", "maximum", "attention weight in each row")
    return sheet.to_png()

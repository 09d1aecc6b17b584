"""Colour maps that are readable with colour blindness, as tables, and the mapping of values to colours.

Magnitudes use sequential maps (magma, viridis, cividis); signed values use a diverging map, orange over white to violet.
"""

from functools import cache

import numpy as np

from vitrail.reports.charts.canvas import LIGHT

HEAT_CMAP, SIMILARITY_CMAP, NORM_CMAP, DIVERGING_CMAP = "magma", "viridis", "cividis", "PuOr_r"
INK, MUTED, RULE, PAPER = LIGHT.text, LIGHT.muted, LIGHT.rule, LIGHT.background
BLUE, ORANGE, _, RED, VIOLET, _ = LIGHT.colours
# Ten classes on a page of either theme: at least 3:1 against the background, and apart from each other also for protanopes,
# deuteranopes and tritanopes (tests/reports/test_class_colours.py).
CLASS_COLOURS = {
    "light": (
        *("#1e51d4", "#ff0d47", "#b88d00", "#159a4a", "#830592"),
        *("#f446ad", "#798fe7", "#952114", "#5f3c69", "#c26276"),
    ),
    "dark": (
        *("#5ab7ff", "#ba6842", "#d7ef4b", "#af45ef", "#14bd00"),
        *("#eecf78", "#14897b", "#8273b3", "#40fdf5", "#a9fcbc"),
    ),
}
RAMP_NAME = "plasma"  # numbers, of which each theme uses the part with contrast
RAMP_PARTS = {"light": (0.0, 0.64), "dark": (0.41, 1.0)}
MARK_COLOUR = (255, 255, 255)  # outline of the selected patch, over maps whose low values are dark


@cache
def colour_table(cmap: str) -> np.ndarray:
    """Return the 256 colours of a map, uint8 [256, 3]."""
    from matplotlib import colormaps

    return (colormaps[cmap](np.arange(256))[:, :3] * 255).round().astype(np.uint8)


def apply_cmap(values: np.ndarray, cmap: str) -> np.ndarray:
    """Return values between 0 and 1 as colours, uint8 [..., 3]; NaN is mapped to 0."""
    clipped = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    return colour_table(cmap)[(clipped * 255).round().astype(np.uint8)]


def rescale(values: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    """Return values rescaled from [low, high] (default: their own range) to [0, 1]; equal values become 0."""
    values = np.asarray(values, dtype=np.float64)
    low = float(np.nanmin(values)) if low is None else low
    high = float(np.nanmax(values)) if high is None else high
    return np.zeros_like(values) if high - low < 1e-12 else ((values - low) / (high - low)).clip(0, 1)

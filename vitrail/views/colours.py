"""Colour maps that colour-blind eyes read too, as tables, and values as colours.

Magnitudes run from dark to light (magma, viridis, cividis); what has a sign runs from orange over white to violet.
"""

from functools import cache

import numpy as np

HEAT, LIKE, LENGTH, SIGNED = "magma", "viridis", "cividis", "PuOr_r"
INK, QUIET, RULE, PAPER = "#1c1b22", "#5c5867", "#e5e1d8", "#ffffff"  # the report's
BLUE, ORANGE, RED, VIOLET = "#1f55b5", "#c4630a", "#b01e52", "#6d45a8"
MARK = (255, 255, 255)  # the chosen patch, over maps that are dark where nothing is


@cache
def table(name: str) -> np.ndarray:
    """The 256 colours of a map, uint8 [256, 3]."""
    from matplotlib import colormaps

    return (colormaps[name](np.arange(256))[:, :3] * 255).round().astype(np.uint8)


def coloured(values: np.ndarray, name: str) -> np.ndarray:
    """Values between 0 and 1 as colours, uint8 [..., 3]; what is no number is black."""
    inside = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    return table(name)[(inside * 255).round().astype(np.uint8)]


def scaled(values: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    """Values between 0 and 1; of equal values, all 0. Each range is the values' own unless given."""
    values = np.asarray(values, dtype=np.float64)
    low = float(np.nanmin(values)) if low is None else low
    high = float(np.nanmax(values)) if high is None else high
    return np.zeros_like(values) if high - low < 1e-12 else ((values - low) / (high - low)).clip(0, 1)

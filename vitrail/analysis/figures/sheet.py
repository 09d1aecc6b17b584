"""Matplotlib sheet in inches from the top left corner, with the common style of all figures.

Matplotlib is imported with the first sheet. Its bundled fonts are used, so that figures look the same everywhere.
"""

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitrail.analysis.figures.overlay import Mosaic
from vitrail.reports.colours import INK, MUTED, PAPER, RULE, colour_table
from vitrail.reports.html import clean_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 220
SERIF, SANS = ["STIXGeneral", "DejaVu Sans"], ["DejaVu Sans"]
MARGIN = 0.42  # inches
HEADING_HEIGHT = 1.0  # inches


class Sheet:
    """One figure."""

    def __init__(self, width: float, height: float, title: str = "", subtitle: str = "") -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
        self.canvas = FigureCanvasAgg(self.figure)
        if title:
            self.draw_text(MARGIN, 0.36, title, size=15, font=SERIF, baseline="center")
        if subtitle:
            self.draw_text(MARGIN, 0.66, subtitle, size=7.6, colour=MUTED, baseline="center")

    def draw_text(
        self,
        left: float,
        top: float,
        text: str,
        *,
        size: float = 8,
        colour: str = INK,
        font: Sequence[str] = SANS,
        align: str = "left",
        baseline: str = "top",
        **more: Any,
    ) -> None:
        """Draw text without math parsing: names may contain any character."""
        self.figure.text(
            left / self.width,
            1 - top / self.height,
            clean_text(text),
            fontsize=size,
            color=colour,
            family=list(font),
            ha=align,
            va=baseline,
            parse_math=False,
            **more,
        )

    def add_axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Return axes with the common style."""
        made = self.figure.add_axes(
            (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        )
        made.set_facecolor("none")
        for side in ("top", "right"):
            made.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            made.spines[side].set_color(MUTED)
            made.spines[side].set_linewidth(0.6)
        made.tick_params(labelsize=7.5, colors=MUTED, width=0.6, length=3, labelfontfamily="DejaVu Sans")
        made.grid(True, color=RULE, linewidth=0.6)
        made.set_axisbelow(True)
        return made

    def draw_image(self, left: float, top: float, width: float, pixels: np.ndarray) -> float:
        """Draw pixels at this width without interpolation; return the height."""
        height = width * pixels.shape[0] / pixels.shape[1]
        made = self.add_axes(left, top, width, height)
        made.imshow(pixels, interpolation="nearest", aspect="auto")
        made.grid(False)
        made.set_xticks([])
        made.set_yticks([])
        for spine in made.spines.values():
            spine.set_visible(False)
        return height

    def draw_mosaic(
        self,
        left: float,
        top: float,
        mosaic: Mosaic,
        rows: Sequence[str] = (),
        columns: Sequence[str] = (),
        *,
        below: bool = False,
    ) -> tuple[float, float]:
        """Draw a mosaic at one pixel per dot with row and column labels; return its width and height."""
        height, width = (side / DPI for side in mosaic.pixels.shape[:2])
        self.draw_image(left, top, width, mosaic.pixels)
        for middle, word in zip(mosaic.rows, rows, strict=False):
            self.draw_text(
                left - 0.07, top + middle / DPI, word, size=7, colour=MUTED, align="right", baseline="center"
            )
        edge = top + height + 0.06 if below else top - 0.06
        for middle, word in zip(mosaic.columns, columns, strict=False):
            where = left + middle / DPI
            self.draw_text(
                where, edge, word, size=7, colour=MUTED, align="center", baseline="top" if below else "bottom"
            )
        return width, height

    def draw_colour_bar(
        self, left: float, top: float, width: float, cmap: str, low: str, high: str, label: str = ""
    ) -> None:
        """Draw a horizontal colour bar with labels of its ends and a title."""
        self.draw_image(left, top, width, np.repeat(colour_table(cmap)[None], 14, axis=0))
        under = top + width * 14 / 256 + 0.05
        self.draw_text(left, under, low, size=6.5, colour=MUTED)
        self.draw_text(left + width, under, high, size=6.5, colour=MUTED, align="right")
        if label:
            self.draw_text(left, top - 0.06, label, size=6.8, colour=MUTED, baseline="bottom")

    def to_png(self) -> bytes:
        """Return the sheet as a PNG file."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # letters that the fonts lack are drawn as boxes
            self.canvas.draw()
        pixels = np.asarray(self.canvas.buffer_rgba())[..., :3]
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", compress_level=4, dpi=(DPI, DPI))
        return file.getvalue()


def shorten_name(text: str, max_length: int = 34) -> str:
    """Return a name shortened in the middle: file names differ at the end."""
    text = clean_text(text)
    return text if len(text) <= max_length else f"{text[: max_length // 2 - 1]}…{text[-(max_length // 2) :]}"

"""Matplotlib sheet in inches from the top left corner, with the common style of all figures.

Matplotlib is imported with the first sheet. Its bundled fonts are used, so that figures look the same everywhere.
"""

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from vitrail.analysis.figures.overlay import DPI, Mosaic
from vitrail.reports.colours import INK, MUTED, PAPER, RULE, apply_cmap, colour_table
from vitrail.reports.html import clean_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIF, SANS = ["STIXGeneral", "DejaVu Sans"], ["DejaVu Sans"]
MARGIN = 0.42  # inches
HEADING_HEIGHT = 1.0  # inches


class Sheet:
    """One figure."""

    def __init__(self, width: float, height: float, title: str = "", *subtitle: str) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
        self.canvas = FigureCanvasAgg(self.figure)
        self.draw_text(MARGIN, 0.36, title, size=15, font=SERIF, baseline="center")
        self.draw_label(MARGIN, 0.66, "  ·  ".join(filter(None, subtitle)), size=7.6, baseline="center")

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
        """Draw text, if there is any, without math parsing: names may contain any character."""
        if not text:
            return
        style = {"fontsize": size, "color": colour, "family": list(font), "ha": align, "va": baseline}
        x, y = left / self.width, 1 - top / self.height
        self.figure.text(x, y, clean_text(text), parse_math=False, **style, **more)

    def draw_label(self, left: float, top: float, text: str, *, size: float = 7, **style: Any) -> None:
        """Draw small muted text."""
        self.draw_text(left, top, text, size=size, colour=MUTED, **style)

    def add_axes(
        self, left: float, top: float, width: float, height: float, x: str = "", y: str = "", x_grid: bool = True
    ) -> "Axes":
        """Return axes with the common style and these labels."""
        bounds = left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height
        axes = self.figure.add_axes(bounds)
        axes.set_facecolor("none")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(MUTED)
            axes.spines[side].set_linewidth(0.6)
        axes.tick_params(labelsize=7.5, colors=MUTED, width=0.6, length=3, labelfontfamily="DejaVu Sans")
        axes.grid(True, axis="both" if x_grid else "y", color=RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(x, fontsize=8, color=INK)
        axes.set_ylabel(y, fontsize=8, color=INK)
        return axes

    def draw_image(self, left: float, top: float, width: float, pixels: np.ndarray, height: float = 0) -> float:
        """Draw pixels at this width without interpolation; return the height (0: by the aspect ratio)."""
        height = height or width * pixels.shape[0] / pixels.shape[1]
        axes = self.add_axes(left, top, width, height)
        axes.imshow(pixels, interpolation="nearest", aspect="auto")
        axes.set_axis_off()
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
    ) -> None:
        """Draw a mosaic at one pixel per dot, with row labels, and column labels above or below."""
        width, height = mosaic.inches
        self.draw_image(left, top, width, mosaic.pixels)
        for middle, word in zip(mosaic.rows, rows, strict=False):
            self.draw_label(left - 0.07, top + middle / DPI, word, align="right", baseline="center")
        edge, baseline = (top + height + 0.06, "top") if below else (top - 0.06, "bottom")
        for middle, word in zip(mosaic.columns, columns, strict=False):
            self.draw_label(left + middle / DPI, edge, word, align="center", baseline=baseline)

    def draw_colour_bar(
        self, left: float, top: float, width: float, cmap: str, low: str, high: str, label: str = ""
    ) -> None:
        """Draw a horizontal colour bar with labels of its ends and a title."""
        end = top + 0.05 + self.draw_image(left, top, width, np.repeat(colour_table(cmap)[None], 14, axis=0))
        self.draw_label(left, end, low, size=6.5)
        self.draw_label(left + width, end, high, size=6.5, align="right")
        self.draw_label(left, top - 0.06, label, size=6.8, baseline="bottom")

    def draw_vertical_colour_bar(
        self, left: float, top: float, height: float, cmap: str, marks: tuple[str, str, str], label: str
    ) -> None:
        """Draw a vertical colour bar with labels of its minimum, centre and maximum, and a title."""
        bar, width = np.repeat(apply_cmap(np.linspace(1, 0, 256), cmap)[:, None], 10, axis=1), 0.13
        self.draw_image(left, top, width, bar, height)
        for share, word in zip((1.0, 0.5, 0.0), marks, strict=True):
            self.draw_label(left + width + 0.06, top + share * height, word, baseline="center")
        self.draw_label(left + width + 0.36, top + height / 2, label, size=7.5, rotation=90, baseline="center")

    def to_png(self) -> bytes:
        """Return the sheet as a PNG file."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # letters that the fonts lack are drawn as boxes
            self.canvas.draw()
        pixels = np.asarray(self.canvas.buffer_rgba())[..., :3]
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", compress_level=4, dpi=(DPI, DPI))
        return file.getvalue()


LegendLocation = Literal["upper left", "lower left", "lower right"]


def draw_legend(axes: "Axes", location: LegendLocation, size: float = 7.5, **more: Any) -> None:
    """Draw the legend with the common style."""
    axes.legend(frameon=False, fontsize=size, labelcolor=MUTED, loc=location, **more)


def shorten_name(text: str, max_length: int = 34) -> str:
    """Return a name shortened in the middle: file names differ at the end."""
    text = clean_text(text)
    return text if len(text) <= max_length else f"{text[: max_length // 2 - 1]}…{text[-(max_length // 2) :]}"

"""A sheet of paper in inches, on which figures are set from the top left corner, all in one quiet style.

Matplotlib is imported when the first sheet is made. The fonts come with it, so that a figure looks the same everywhere.
"""

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitrail.report.markup import plain
from vitrail.views.colours import INK, PAPER, QUIET, RULE, table
from vitrail.views.mosaic import Mosaic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 220
SERIF, SANS = ["STIXGeneral", "DejaVu Sans"], ["DejaVu Sans"]
MARGIN = 0.42  # inches
HEAD = 1.0  # inches that the heading takes


class Sheet:
    """One figure."""

    def __init__(self, width: float, height: float, title: str = "", under: str = "") -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
        self.canvas = FigureCanvasAgg(self.figure)
        if title:
            self.text(MARGIN, 0.36, title, size=15, font=SERIF, baseline="center")
        if under:
            self.text(MARGIN, 0.66, under, size=7.6, colour=QUIET, baseline="center")

    def text(
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
        """Words, never read as formulas: names of files and classes may hold any character."""
        self.figure.text(
            left / self.width,
            1 - top / self.height,
            plain(text),
            fontsize=size,
            color=colour,
            family=list(font),
            ha=align,
            va=baseline,
            parse_math=False,
            **more,
        )

    def axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """A place to plot, with no more lines than are read."""
        made = self.figure.add_axes(
            (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        )
        made.set_facecolor("none")
        for side in ("top", "right"):
            made.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            made.spines[side].set_color(QUIET)
            made.spines[side].set_linewidth(0.6)
        made.tick_params(labelsize=7.5, colors=QUIET, width=0.6, length=3, labelfontfamily="DejaVu Sans")
        made.grid(True, color=RULE, linewidth=0.6)
        made.set_axisbelow(True)
        return made

    def picture(self, left: float, top: float, width: float, pixels: np.ndarray) -> float:
        """Pixels at this width, as they are; gives the height."""
        height = width * pixels.shape[0] / pixels.shape[1]
        made = self.axes(left, top, width, height)
        made.imshow(pixels, interpolation="nearest", aspect="auto")
        made.grid(False)
        made.set_xticks([])
        made.set_yticks([])
        for spine in made.spines.values():
            spine.set_visible(False)
        return height

    def tiles(
        self,
        left: float,
        top: float,
        made: Mosaic,
        rows: Sequence[str] = (),
        columns: Sequence[str] = (),
        *,
        below: bool = False,
    ) -> tuple[float, float]:
        """A mosaic at one pixel a dot, with a word beside each row and over each column. Gives its size."""
        height, width = (side / DPI for side in made.pixels.shape[:2])
        self.picture(left, top, width, made.pixels)
        for middle, word in zip(made.rows, rows, strict=False):
            self.text(left - 0.07, top + middle / DPI, word, size=7, colour=QUIET, align="right", baseline="center")
        edge = top + height + 0.06 if below else top - 0.06
        for middle, word in zip(made.columns, columns, strict=False):
            where = left + middle / DPI
            self.text(where, edge, word, size=7, colour=QUIET, align="center", baseline="top" if below else "bottom")
        return width, height

    def key(self, left: float, top: float, width: float, name: str, low: str, high: str, what: str = "") -> None:
        """A colour map as a bar, with what its ends and the whole mean."""
        self.picture(left, top, width, np.repeat(table(name)[None], 14, axis=0))
        under = top + width * 14 / 256 + 0.05
        self.text(left, under, low, size=6.5, colour=QUIET)
        self.text(left + width, under, high, size=6.5, colour=QUIET, align="right")
        if what:
            self.text(left, top - 0.06, what, size=6.8, colour=QUIET, baseline="bottom")

    def png(self) -> bytes:
        """The sheet as a file."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Glyph"
            )  # a name in letters that the fonts lack: boxes stand for them
            self.canvas.draw()
        pixels = np.asarray(self.canvas.buffer_rgba())[..., :3]
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", compress_level=4, dpi=(DPI, DPI))
        return file.getvalue()


def shortened(text: str, most: int = 34) -> str:
    """A name that fits, with its end kept: file names differ there."""
    text = plain(text)
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"

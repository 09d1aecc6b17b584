"""The picture beside its maps, with its name and what the model said."""

from vitrail.views.colours import INK, QUIET
from vitrail.views.overlay import marked, resized
from vitrail.views.sheet import Sheet, shortened
from vitrail.views.shown import Shown

WIDTH = 2.1  # inches
PIXELS = 460  # across


def aside(sheet: Sheet, left: float, top: float, shown: Shown, mark: bool = False) -> float:
    """Draws it; gives where it ends, in inches from the top."""
    height, width = shown.pixels.shape[:2]
    scale = min(1.0, 1.25 * width / height)  # a tall picture is made narrower
    size = (round(PIXELS * scale * height / width), round(PIXELS * scale))
    pixels = marked(resized(shown.pixels, size), shown.box if mark else None)
    end = top + sheet.picture(left, top, WIDTH * scale, pixels)
    sheet.text(left, end + 0.1, shortened(shown.name), size=7.4, colour=INK)
    if shown.verdict:
        sheet.text(left, end + 0.27, shortened(shown.verdict), size=7.4, colour=QUIET)
    return end + 0.5


def about(shown: Shown, *more: str) -> str:
    """The line under a title: the model, the size it saw, and what else is to be known."""
    height, width = shown.pixels.shape[:2]
    return "  ·  ".join(filter(None, (shortened(shown.model, 48), f"{width}×{height} pixels", *more)))

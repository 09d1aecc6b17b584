"""What charts are drawn with: colours, text whose width is known about, marks, and numbers on axes."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.report.markup import Markup, h

SIZE = 13  # of text, in pixels
SMALL = 12
FONTS = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', 'Liberation Sans', Arial, sans-serif"
)


@dataclass(frozen=True)
class Palette:
    """Colours of a chart: ground, text, quiet text, rules, and those of families."""

    sheet: str
    ink: str
    quiet: str
    rule: str
    colours: tuple[str, ...]

    def colour(self, place: int) -> str:
        return self.colours[place % len(self.colours)]


# The reports' own colours; on a page its style decides, and so light and dark are one drawing.
LIGHT = Palette(
    "#ffffff", "#1c1b22", "#5c5867", "#e5e1d8", ("#1f55b5", "#c4630a", "#0d7d62", "#b01e52", "#6d45a8", "#6a6670")
)
DARK = Palette(
    "#1a1920", "#eceaf1", "#aaa5b5", "#312f3a", ("#82aef9", "#f3a952", "#5acca5", "#ff8fae", "#c4a5f4", "#b3aebd")
)
PAGE = Palette(
    "var(--sheet)",
    "var(--ink)",
    "var(--quiet)",
    "var(--rule)",
    ("var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"),
)


@dataclass(frozen=True)
class Drawing:
    """What was drawn, from 0 to its width and height."""

    parts: tuple[Markup, ...]
    width: float
    height: float


def width_of(text: str, size: float = SIZE) -> float:
    """About how wide a text is in a common sans-serif; rather too wide than too narrow."""
    return 1.05 * size * sum(map(_letter, text))


def _letter(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.05
    if letter in " ijl.,:;|!'()[]fIrt–-/":
        return 0.38
    return 0.92 if letter in "mwMW@%" else 0.7 if letter.isupper() else 0.58


def shortened(text: str, room: float, size: float = SIZE) -> str:
    """As much of a text as there is room for."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def wrapped(text: str, room: float, size: float = SIZE, most: int = 2) -> list[str]:
    """A text in so many lines at most, broken between words where that is possible."""
    lines, words = [], text.split()
    while words and len(lines) < most - 1:
        line = words.pop(0)
        while words and width_of(f"{line} {words[0]}", size) <= room:
            line += " " + words.pop(0)
        lines.append(shortened(line, room, size))
    return [*lines, shortened(" ".join(words), room, size)] if words else lines or [""]


def text(
    x: float, y: float, said: str, fill: str, size: float = SIZE, anchor: str = "start", weight: int | None = None
) -> Markup:
    """One line of text; y is of its base line."""
    said = said.translate({0xFFFE: "\ufffd", 0xFFFF: "\ufffd"})  # what XML cannot hold, and escaping leaves
    return h(
        "text", said, x=f"{x:.1f}", y=f"{y:.1f}", fill=fill, font_size=size, text_anchor=anchor, font_weight=weight
    )


def rule(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, **more: str) -> Markup:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return h("line", **ends, stroke=stroke, stroke_width=width, **more)


def mark(place: int, x: float, y: float, palette: Palette, tip: str = "", half: float = 4.5) -> Markup:
    """A family's mark: another shape as well as another colour, so that it is told apart without colours too."""
    paint = {"fill": palette.colour(place), "stroke": palette.sheet, "stroke_width": "1"}
    said = h("title", tip) if tip else None
    shapes: tuple[Sequence[tuple[float, float]], ...] = (
        (),
        ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        ((0, -1.2), (1.2, 0.9), (-1.2, 0.9)),
        ((0, 1.2), (1.2, -0.9), (-1.2, -0.9)),
    )
    shape = shapes[place % len(shapes)]
    if not shape:
        return h("circle", said, cx=f"{x:.1f}", cy=f"{y:.1f}", r=half, **paint)
    points = " ".join(f"{x + half * a:.1f},{y + half * b:.1f}" for a, b in shape)
    return h("g", said, h("polygon", points=points), **paint)


def legend(labels: Sequence[str], width: float, palette: Palette, y: float, x: float = 0) -> tuple[list[Markup], float]:
    """Marks with names in as many rows as they need, and how far down they reach."""
    parts, at = [], x
    for place, label in enumerate(labels):
        said = shortened(label, width - x - 20)
        wide = 16 + width_of(said) + 18
        if at > x and at + wide - 18 > width:
            at, y = x, y + 20
        parts += [mark(place, at + 6, y - 4.5, palette), text(at + 16, y, said, palette.ink)]
        at += wide
    return parts, y


def amount(value: float) -> str:
    """A number on an axis: 0.001, 250, 10,000, 2.5 million as 2.5M, 10¹²."""
    size = abs(value)
    if size == 0 or not math.isfinite(value):
        return "0" if size == 0 else "–"
    if size >= 1e9 or size < 1e-4:
        return power(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def power(value: float) -> str:
    """A positive number as a power of ten: 10¹², 2·10⁻⁵."""
    raised = math.floor(math.log10(abs(value)) + 1e-9)
    front, written = f"{value / 10.0**raised:.2g}", str(raised).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{written}" if front == "1" else f"{front}·10{written}"


def share(value: float, step: float) -> str:
    """A share on an axis, with as many digits as the step between ticks needs."""
    digits = next((d for d in range(4) if abs(100 * step * 10**d - round(100 * step * 10**d)) < 1e-6), 4)
    return f"{100 * value:.{digits}f} %"


def interval_of(low: Sequence[float], high: Sequence[float], place: int) -> tuple[float, float] | None:
    """A point's interval, where there is one."""
    if place >= len(low) or place >= len(high) or not (math.isfinite(low[place]) and math.isfinite(high[place])):
        return None
    return low[place], high[place]


def told(value: float, interval: tuple[float, float] | None, percent: bool) -> str:
    """A value in words, with its interval: 71.3 % (70.1–72.5)."""
    if percent:
        within = f" ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})" if interval else ""
        return f"{100 * value:.1f} %{within}"
    within = f" ({amount(interval[0])}–{amount(interval[1])})" if interval else ""
    return amount(value) + within

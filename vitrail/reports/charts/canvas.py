"""Chart values, scales, palettes, text measurement and SVG primitives that all charts share."""

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitrail.reports.html import Markup, h

FONT_SIZE = 13  # pixels
SMALL_FONT_SIZE = 12
FONTS = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', 'Liberation Sans', Arial, sans-serif"
)


@dataclass(frozen=True)
class Series:
    """Points of one series with their intervals (y, low, high); with `maps`, small 2-D arrays [rows][columns]."""

    label: str
    x: tuple[float | str, ...] = ()
    y: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    maps: tuple[tuple[tuple[float, ...], ...], ...] = ()


@dataclass(frozen=True)
class Chart:
    """One plot as a value: reports and documentation pages draw it."""

    title: str
    kind: Literal["lines", "bars", "dots", "maps"]
    series: tuple[Series, ...]
    x_name: str = ""
    y_name: str = ""
    x_log: bool = False
    percent: bool = True  # y is an accuracy, 0 to 1
    from_zero: bool = False  # bars also of values that are close together


@dataclass(frozen=True)
class AxisScale:
    """A range of values and its tick values."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def position(self, value: float) -> float:
        """Return the relative position of a value, clipped to 0 (low end) to 1 (high end)."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    @property
    def step(self) -> float:
        return self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0


def choose_tick_step(width: float, parts: int) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, so that about `parts` steps fit."""
    rough = width / parts
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def make_scale(
    values: Iterable[float], *, tick_count: int = 4, integer: bool = False, tight: bool = False
) -> AxisScale:
    """Return a scale that holds all values. `integer` uses integer ticks; `tight` ends the scale at the extreme values."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if not tight and 0 < low < 0.4 * high:
        low = 0.0
    if high - low < 1e-12 * max(1.0, abs(high)):
        margin = 0.5 if integer or tight else max(abs(high) * 0.1, 1e-9)
        low, high = (max(0.0, low - margin) if low >= 0 else low - margin), high + margin
    step = choose_tick_step(high - low, tick_count)
    if integer:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    ticks = tuple(k * step for k in range(first, last + 1))
    return AxisScale(low, high, ticks) if tight else AxisScale(ticks[0], ticks[-1], ticks)


def count_decimals(step: float, max_decimals: int) -> int | None:
    """Return the decimals that a tick step needs, or None if more than `max_decimals`."""
    for decimals in range(max_decimals + 1):
        scaled = step * 10**decimals
        if abs(scaled - round(scaled)) < 1e-6 * scaled:
            return decimals
    return None


def make_tick_formatter(scale: AxisScale, percent: bool) -> Callable[[float], str]:
    """Return the function that formats the ticks of a value axis."""
    decimals = count_decimals(100 * scale.step if percent else scale.step, 3)
    if percent:
        return lambda tick: f"{100 * tick:.{4 if decimals is None else decimals}f} %"
    return format_tick if decimals is None or scale.step >= 1000 else lambda tick: f"{tick:.{decimals}f}"


def format_tick(value: float) -> str:
    """Return a number as an axis label: 0.001, 250, 10,000, 2.5M, 10¹²."""
    size = abs(value)
    if size == 0 or not math.isfinite(value):
        return "0" if size == 0 else "–"
    if size >= 1e9 or size < 1e-4:
        return format_power(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def format_power(value: float) -> str:
    """Return a positive number as a power of ten: 10¹², 2·10⁻⁵."""
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    front = f"{value / 10.0**exponent:.2g}"
    power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if front == "1" else f"{front}·{power}"


def interval_at(series: Series, index: int) -> tuple[float, float] | None:
    """Return the interval of one point, or None."""
    if index >= len(series.low) or index >= len(series.high):
        return None
    low, high = series.low[index], series.high[index]
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def format_point(value: float, interval: tuple[float, float] | None, percent: bool) -> str:
    """Return a value with its interval: 71.3 % (70.1–72.5)."""
    if percent:
        within = f" ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})" if interval else ""
        return f"{100 * value:.1f} %{within}"
    within = f" ({format_tick(interval[0])}–{format_tick(interval[1])})" if interval else ""
    return format_tick(value) + within


@dataclass(frozen=True)
class Palette:
    """Colours of a chart: background, text, muted text, rules, and one colour per series."""

    background: str
    text: str
    muted: str
    rule: str
    colours: tuple[str, ...]

    def colour(self, index: int) -> str:
        return self.colours[index % len(self.colours)]


# Chart files carry the colours of the reports; on a page, its CSS variables decide, so one drawing serves light and dark.
LIGHT = Palette(
    "#ffffff", "#1c1b22", "#5c5867", "#e5e1d8", ("#1f55b5", "#c4630a", "#0d7d62", "#b01e52", "#6d45a8", "#6a6670")
)
DARK = Palette(
    "#1a1920", "#eceaf1", "#aaa5b5", "#312f3a", ("#82aef9", "#f3a952", "#5acca5", "#ff8fae", "#c4a5f4", "#b3aebd")
)
PAGE = Palette("var(--sheet)", "var(--ink)", "var(--quiet)", "var(--rule)", tuple(f"var(--c{k})" for k in range(1, 7)))


@dataclass(frozen=True)
class Drawing:
    """SVG elements in a box from (0, 0) to (width, height)."""

    parts: tuple[Markup, ...]
    width: float
    height: float


def draw_empty(palette: Palette, width: float) -> Drawing:
    """Return the drawing of a chart without data."""
    return Drawing((draw_text(0, 16, "no data yet", palette.muted),), width, 24)


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return an upper estimate of the width of a text in a common sans-serif font."""
    return 1.05 * size * sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.05
    if letter in " ijl.,:;|!'()[]fIrt–-/":
        return 0.38
    return 0.92 if letter in "mwMW@%" else 0.7 if letter.isupper() else 0.58


def shorten_text(text: str, max_width: float, size: float = FONT_SIZE) -> str:
    """Return the text, cut with an ellipsis if it is wider than `max_width`."""
    if text_width(text, size) <= max_width:
        return text
    while text and text_width(text + "…", size) > max_width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap_text(text: str, max_width: float, size: float = FONT_SIZE, max_lines: int = 2) -> list[str]:
    """Return the text in at most `max_lines` lines, broken between words where possible."""
    lines, words = [], text.split()
    while words and len(lines) < max_lines - 1:
        line = words.pop(0)
        while words and text_width(f"{line} {words[0]}", size) <= max_width:
            line += " " + words.pop(0)
        lines.append(shorten_text(line, max_width, size))
    return [*lines, shorten_text(" ".join(words), max_width, size)] if words else lines or [""]


def draw_text(
    x: float,
    y: float,
    content: str,
    fill: str,
    size: float = FONT_SIZE,
    anchor: str = "start",
    weight: int | None = None,
) -> Markup:
    """Return one line of text; y is its baseline."""
    content = content.translate({0xFFFE: "\ufffd", 0xFFFF: "\ufffd"})  # invalid in XML, and not escaped by html.escape
    at = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    return h("text", content, **at, fill=fill, font_size=size, text_anchor=anchor, font_weight=weight)


def draw_label(x: float, y: float, content: str, palette: Palette, anchor: str = "start") -> Markup:
    """Return one line of small muted text, such as the label of a tick."""
    return draw_text(x, y, content, palette.muted, SMALL_FONT_SIZE, anchor)


def draw_lines(x: float, y: float, lines: Sequence[str], step: float, fill: str, **more: Any) -> list[Markup]:
    """Return lines of text below each other, `step` pixels apart; y is the first baseline."""
    return [draw_text(x, y + step * k, line, fill, **more) for k, line in enumerate(lines)]


def draw_tick_labels(ticks: Iterable[tuple[float, str]], y: float, palette: Palette) -> list[Markup]:
    """Return the labels of a horizontal axis (x, text), without those that would touch the one before."""
    parts, end = [], -math.inf
    for x, label in ticks:
        half = text_width(label, SMALL_FONT_SIZE) / 2
        if x - half > end + 6:
            parts.append(draw_label(x, y, label, palette, "middle"))
            end = x + half
    return parts


def draw_rule(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, **more: str) -> Markup:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return h("line", **ends, stroke=stroke, stroke_width=width, **more)


def draw_marker(index: int, x: float, y: float, palette: Palette, tip: str = "", half: float = 4.5) -> Markup:
    """Return the marker of a series. Shape and colour both differ between series, for colour-blind readers."""
    paint = {"fill": palette.colour(index), "stroke": palette.background, "stroke_width": "1"}
    title = h("title", tip) if tip else None
    shapes: tuple[Sequence[tuple[float, float]], ...] = (
        (),
        ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        ((0, -1.2), (1.2, 0.9), (-1.2, 0.9)),
        ((0, 1.2), (1.2, -0.9), (-1.2, -0.9)),
    )
    shape = shapes[index % len(shapes)]
    if not shape:
        return h("circle", title, cx=f"{x:.1f}", cy=f"{y:.1f}", r=half, **paint)
    points = " ".join(f"{x + half * a:.1f},{y + half * b:.1f}" for a, b in shape)
    return h("g", title, h("polygon", points=points), **paint)


def draw_legend(
    labels: Sequence[str], width: float, palette: Palette, y: float, x: float = 0
) -> tuple[list[Markup], float]:
    """Return markers with labels in as many rows as needed, and the baseline of the last row."""
    parts, left = [], x
    for index, label in enumerate(labels):
        label = shorten_text(label, width - x - 20)
        entry_width = 16 + text_width(label) + 18
        if left > x and left + entry_width - 18 > width:
            left, y = x, y + 20
        parts += [draw_marker(index, left + 6, y - 4.5, palette), draw_text(left + 16, y, label, palette.text)]
        left += entry_width
    return parts, y

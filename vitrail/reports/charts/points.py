"""Line and dot charts with intervals; each series is labelled beside its points where there is room, else in a legend."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vitrail.reports.charts import canvas
from vitrail.reports.charts.canvas import AxisScale, Chart, Drawing, Palette, Series
from vitrail.reports.html import Markup, h

AxisValue = float | str
MAX_LABELLED_VALUES = 9  # x values: up to so many, each one is a tick
NARROW_WIDTH = 560  # pixels: below it, a legend above the plot replaces labels at line ends
LABEL_WIDTH = 170  # pixels of a label at a line end
LINE_HEIGHT = 15  # pixels between the lines of a label
BOLD_FACTOR = 1.08  # relative width of bold text
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class HorizontalAxis:
    """Horizontal axis of categories in their order, or of numbers on a linear or logarithmic scale."""

    categories: tuple[str, ...]
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]
    left: float  # pixels
    right: float

    def position(self, value: AxisValue) -> float:
        if self.categories:
            at = (self.categories.index(str(value)) + 0.5) / len(self.categories)
        else:
            number = math.log10(float(value)) if self.log else float(value)
            at = (number - self.low) / (self.high - self.low)
        return self.left + at * (self.right - self.left)

    def draw(self, bottom: float, palette: Palette) -> tuple[list[Markup], float]:
        """Return the line with its labels, and the lowest baseline of these."""
        parts, lowest = [canvas.draw_rule(self.left, bottom, self.right, bottom, palette.muted)], bottom + 18
        small = {"size": canvas.SMALL_FONT_SIZE, "anchor": "middle"}
        for label in self.categories:
            room = (self.right - self.left) / len(self.categories) - 6
            lines = canvas.wrap_text(label, room, canvas.SMALL_FONT_SIZE, 3)
            parts += canvas.draw_lines(self.position(label), bottom + 18, lines, 15, palette.muted, **small)
            lowest = max(lowest, bottom + 18 + 15 * (len(lines) - 1))
        large = max(self.ticks, default=0) >= 1e9
        ticks = [
            (self.position(t), canvas.format_power(t) if large and t else canvas.format_tick(t)) for t in self.ticks
        ]
        parts += [canvas.draw_rule(x, bottom, x, bottom + 4, palette.muted) for x, _ in ticks]
        return parts + canvas.draw_tick_labels(ticks, bottom + 18, palette), lowest


def make_axis(
    values: Sequence[AxisValue], log: bool, left: float, right: float, padding: float = 0.04
) -> HorizontalAxis:
    """Return the axis that holds these values; `padding` is the fraction left free at each end."""
    if any(isinstance(value, str) for value in values):
        return HorizontalAxis(tuple(dict.fromkeys(map(str, values))), 0, 1, False, (), left, right)
    numbers = sorted({float(value) for value in values if math.isfinite(float(value))}) or [0.0, 1.0]
    log = log and numbers[0] > 0
    low, high = (math.log10(numbers[0]), math.log10(numbers[-1])) if log else (numbers[0], numbers[-1])
    free = (high - low) * padding or 0.5
    ticks: Sequence[float] = numbers
    if len(numbers) > MAX_LABELLED_VALUES:
        ticks = _powers_of_ten(low, high) if log else canvas.make_scale(numbers, tick_count=6, tight=True).ticks
    return HorizontalAxis((), low - free, high + free, log, tuple(ticks), left, right)


def _powers_of_ten(low: float, high: float) -> list[float]:
    """Return the powers of ten between two logarithms, with multiples in between where these are few."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if high - low > 3 else (1, 3) if high - low > 1.5 else (1, 2, 5)
    values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [value for value in values if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def draw_points(chart: Chart, palette: Palette, width: float) -> Drawing:
    """Draw a chart of lines or dots."""
    shown = [series for series in chart.series if any(math.isfinite(y) for y in series.y)]
    if not shown:
        return canvas.draw_empty(palette, width)
    labels = [series.label for series in shown]
    scale = canvas.make_scale([y for series in shown for y in (*series.y, *series.low, *series.high)], tick_count=5)
    format_label = canvas.make_tick_formatter(scale, chart.percent)
    left = max(canvas.text_width(format_label(tick), canvas.SMALL_FONT_SIZE) for tick in scale.ticks) + 8
    labels_at_ends = chart.kind == "lines" and width >= NARROW_WIDTH and len(shown) > 1
    right = width - (22 + min(LABEL_WIDTH, BOLD_FACTOR * max(map(canvas.text_width, labels))) if labels_at_ends else 20)
    parts, top = [], 4.0
    if chart.y_name:
        name = canvas.shorten_text(chart.y_name, width, canvas.SMALL_FONT_SIZE)
        parts.append(canvas.draw_label(0, 14, name, palette))
        top = 26.0
    axis = make_axis([x for series in shown for x in series.x[: len(series.y)]], chart.x_log, left, right)
    height = 280 if width >= NARROW_WIDTH else 240
    frame = _Frame(axis, scale, top + 8, top + 8 + height, _series_offset(shown, axis))
    # Series that share x values need a legend.
    point_labels = None
    if chart.kind == "dots" and len(shown) > 1 and not frame.offset:
        point_labels = _draw_point_labels(shown, frame, palette)
    if len(shown) > 1 and not labels_at_ends and point_labels is None:
        legend, baseline = canvas.draw_legend(labels, width, palette, top + 12)
        parts, top = [*parts, *legend], baseline + 14
        frame = _Frame(axis, scale, top + 8, top + 8 + height, frame.offset)
    for tick in scale.ticks:
        y = frame.y(tick)
        parts += [
            canvas.draw_rule(left, y, right, y, palette.rule),
            canvas.draw_label(left - 8, y + 4, format_label(tick), palette, "end"),
        ]
    axis_parts, lowest = axis.draw(frame.bottom, palette)
    parts += axis_parts
    for index, series in enumerate(shown):
        parts += _draw_series(chart, series, index, len(shown), frame, palette)
    parts += point_labels or []
    if labels_at_ends:
        parts += _draw_end_labels(shown, frame, palette, width)
    if chart.x_name:
        name = canvas.shorten_text(chart.x_name, width - left, canvas.SMALL_FONT_SIZE)
        middle = max(left + canvas.text_width(name, canvas.SMALL_FONT_SIZE) / 2, (left + right) / 2)
        lowest += 20
        parts.append(canvas.draw_label(middle, lowest, name, palette, "middle"))
    return Drawing(tuple(parts), width, lowest + 8)


@dataclass(frozen=True)
class _Frame:
    """Positions of values in the drawing, in pixels."""

    axis: HorizontalAxis
    scale: AxisScale
    top: float
    bottom: float
    offset: float  # between series that share x values

    def y(self, value: float) -> float:
        return self.bottom - self.scale.position(value) * (self.bottom - self.top)

    def marker_positions(self, series: Series, index: int, count: int) -> list[tuple[int, float, float]]:
        """Return index, x and y of each finite point; series that share x values are shifted apart."""
        shift = self.offset * (index - (count - 1) / 2)
        points = enumerate(zip(series.x, series.y, strict=False))
        return [(k, self.axis.position(x) + shift, self.y(y)) for k, (x, y) in points if math.isfinite(y)]


def _series_offset(shown: list[Series], axis: HorizontalAxis) -> float:
    """Return the horizontal distance between series that have points at the same x, in pixels."""
    shared = set(shown[0].x).intersection(*(series.x for series in shown[1:]))
    if len(shown) < 2 or not shared:
        return 0.0
    positions = sorted({axis.position(x) for series in shown for x in series.x})
    gap = min((b - a for a, b in pairwise(positions)), default=60.0)
    return max(0.0, min(8.0, 24.0 / len(shown), (gap - 10) / len(shown)))


def _draw_series(chart: Chart, series: Series, index: int, count: int, frame: _Frame, palette: Palette) -> list[Markup]:
    spots, colour = frame.marker_positions(series, index, count), palette.colour(index)
    parts = []
    if chart.kind == "lines" and len(spots) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for _, x, y in spots)
        dashes = "6 4" if index >= len(palette.colours) else None
        style = {"fill": "none", "stroke": colour, "stroke_width": 2, "stroke_linejoin": "round"}
        parts.append(h("path", d=path, **style, stroke_dasharray=dashes))
    for k, x, _ in spots:
        if interval := canvas.interval_at(series, k):
            low, high = frame.y(interval[0]), frame.y(interval[1])
            lines = [(x, low, x, high), *((x - 3.5, end, x + 3.5, end) for end in (low, high))]
            parts += [canvas.draw_rule(*line, colour, 1.5, stroke_opacity="0.75") for line in lines]
    for k, x, y in spots:
        x_text = series.x[k] if isinstance(series.x[k], str) else canvas.format_tick(float(series.x[k]))
        value = canvas.format_point(series.y[k], canvas.interval_at(series, k), chart.percent)
        parts.append(canvas.draw_marker(index, x, y, palette, f"{series.label}, {x_text}: {value}"))
    return parts


def _draw_end_labels(shown: list[Series], frame: _Frame, palette: Palette, width: float) -> list[Markup]:
    """Return labels at the right ends of the lines, moved apart where lines end close together."""
    left, ends = frame.axis.right + 16, []
    for index, series in enumerate(shown):
        _, x, y = frame.marker_positions(series, index, len(shown))[-1]
        ends.append((y, x, index, canvas.wrap_text(series.label, (width - left) / BOLD_FACTOR)))
    ends.sort()
    # Minimal distance between the middles of neighbouring labels: first move labels down, then up from the bottom.
    apart = [LINE_HEIGHT * (len(a[3]) + len(b[3])) / 2 + 2 for a, b in pairwise(ends)]
    heights = [y for y, *_ in ends]
    for k, gap in enumerate(apart):
        heights[k + 1] = max(heights[k + 1], heights[k] + gap)
    heights[-1] = min(heights[-1], frame.bottom)
    for k, gap in reversed(list(enumerate(apart))):
        heights[k] = min(heights[k], heights[k + 1] - gap)
    parts = []
    for (y, x, index, lines), height in zip(ends, heights, strict=True):
        colour = palette.colour(index)
        parts.append(canvas.draw_rule(x + 6, y, left - 3, height, colour, 1, stroke_opacity="0.45"))
        first = height + 4.5 - LINE_HEIGHT * (len(lines) - 1) / 2
        parts += canvas.draw_lines(left, first, lines, LINE_HEIGHT, colour, weight=600)
    return parts


def _draw_point_labels(shown: list[Series], frame: _Frame, palette: Palette) -> list[Markup] | None:
    """Return a label beside a point of each series that covers nothing, or None if some series has no such position."""
    spots = [frame.marker_positions(series, index, len(shown)) for index, series in enumerate(shown)]
    taken: list[Rectangle] = [(x - 6, y - 6, x + 6, y + 6) for points in spots for _, x, y in points]
    for series, points in zip(shown, spots, strict=True):
        for k, x, _ in points:
            if interval := canvas.interval_at(series, k):
                taken.append((x - 4, frame.y(interval[1]), x + 4, frame.y(interval[0])))
    parts = []
    for index, series in enumerate(shown):
        box = _find_free_box(series.label, spots[index], taken, frame)
        if box is None:
            return None
        taken.append(box)
        parts.append(canvas.draw_text(box[0], box[3] - 4, series.label, palette.colour(index), weight=600))
    return parts


def _find_free_box(
    label: str, spots: list[tuple[int, float, float]], taken: list[Rectangle], frame: _Frame
) -> Rectangle | None:
    """Return a free rectangle right of, above, below or left of one of the two rightmost points, or None."""
    width, height = BOLD_FACTOR * canvas.text_width(label), 17.0
    for _, x, y in sorted(spots, key=lambda spot: -spot[1])[:2]:
        middle, beside = x - width / 2, y - height / 2
        for left, top in ((x + 10, beside), (middle, y - height - 8), (middle, y + 8), (x - width - 10, beside)):
            box = (left, top, left + width, top + height)
            inside = box[0] >= frame.axis.left and box[2] <= frame.axis.right + 10
            inside = inside and box[1] >= frame.top - 8 and box[3] <= frame.bottom
            if inside and not any(_overlap(box, other) for other in taken):
                return box
    return None


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]

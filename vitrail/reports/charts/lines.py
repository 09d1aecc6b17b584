"""Responsive line charts and bars of report pages.

The plot is an SVG stretched over its box; labels are HTML text around it, so they keep their size on a phone. Tooltips need no
script: CSS shows the one under the pointer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vitrail.reports.charts.canvas import AxisScale, count_decimals, make_scale
from vitrail.reports.html import Markup, h, isolate
from vitrail.utils.text import format_number, is_number

MAX_POINTS = 400  # per line: more would be less than a pixel apart
MAX_TOOLTIPS = 80
Interval = Sequence[float]  # low and high end


@dataclass(frozen=True)
class ChartLine:
    """A series of points. `colour` is an index of the page's palette, 1 to 6."""

    label: str
    points: list[tuple[float, float]]
    colour: int = 1
    dots: bool = False
    dashes: str = ""
    band: list[tuple[float, float, float]] = field(default_factory=list)  # x, low, high


def extract_points(rows: Sequence[dict], x: str, y: str) -> list[tuple[float, float]]:
    """Return (x, y) of the log rows in which both are numbers."""
    return [(float(row[x]), float(row[y])) for row in rows if is_number(row.get(x)) and is_number(row.get(y))]


def downsample_points(points: list[tuple[float, float]], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `max_points` points, each the mean of a group of neighbours."""
    if len(points) <= max_points:
        return points
    edges = [round(i * len(points) / max_points) for i in range(max_points + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def render_line_chart(
    title: str,
    lines: list[ChartLine],
    *,
    x_label: str = "epoch",
    format_y: Callable[[float], str] = format_number,
    format_x: Callable[[float], str] = format_number,
    integer_x: bool = True,
    note: str = "",
    mark: tuple[float, float, str] | None = None,
) -> Markup | None:
    """Return a figure of lines over a common axis, or None without points. `mark` rings one point (x, y, label)."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    xs = [x for line in lines for x, _ in line.points]
    x_scale = make_scale(xs, tick_count=5, integer=integer_x and not 0 < max(xs) - min(xs) < 2, tight=True)
    ys = [y for line in lines for _, y in line.points]
    y_scale = make_scale([*ys, *(y for line in lines for _, low, high in line.band for y in (low, high))])
    shapes = [render_grid(y_scale)]
    for line in lines:
        shapes += _render_line(line, x_scale, y_scale)
    if mark:
        x, y = x_scale.position(mark[0]), y_scale.position(mark[1])
        shapes += [render_dot(x, y, css_class) for css_class in ("mark", "mark inner", "dot c1")]
    ends = [f"{line.label} from {format_y(line.points[0][1])} to {format_y(line.points[-1][1])}" for line in lines]
    description = f"{title} over {x_label} {format_x(x_scale.low)} to {format_x(x_scale.high)}: {'; '.join(ends)}"
    tooltips = render_tooltips(lines, x_scale, x_label, format_y)
    area = render_plot(shapes, x_scale, y_scale, format_y, format_x, description, tooltips)
    legend = [render_legend_key(line) for line in lines] if len(lines) > 1 else []
    if mark:
        legend.append(h("span", h("i", class_="ring"), mark[2], class_="key"))
    caption = h("figcaption", h("h3", title), h("div", legend, class_="legend") if legend else None)
    below = [h("p", x_label, class_="axis"), h("p", note, class_="note") if note else None]
    return h("figure", caption, area, below, class_="chart")


def render_chart_grid(charts: Iterable[Markup | None]) -> Markup | None:
    """Return the charts that have data side by side, or None if there are none."""
    charts = [chart for chart in charts if chart]
    return h("div", charts, class_="charts") if charts else None


def render_plot(
    shapes: list[Markup],
    x_scale: AxisScale,
    y_scale: AxisScale,
    format_y: Callable[[float], str],
    format_x: Callable[[float], str],
    description: str,
    overlays: list[Markup],
) -> Markup:
    """Return the plot with its axes. `description` is the text for screen readers."""
    svg = h("svg", shapes, viewBox="0 0 1000 1000", preserveAspectRatio="none", aria_hidden="true")
    format_y, format_x = _make_tick_formatter(format_y, y_scale), _make_tick_formatter(format_x, x_scale)
    y_labels = [
        h("span", format_y(tick), style=f"bottom:{100 * y_scale.position(tick):.2f}%") for tick in y_scale.ticks
    ]
    x_labels = []
    for tick in x_scale.ticks:
        left = 100 * x_scale.position(tick)
        x_labels.append(h("span", format_x(tick), style=f"left:{left:.2f}%", class_="last" if left > 97 else None))
    parts = [
        h("div", y_labels, class_="up"),
        h("div", svg, overlays, class_="area"),
        h("div", x_labels, class_="across"),
    ]
    return h("div", parts, class_="plot", role="img", aria_label=description)


def _make_tick_formatter(format_value: Callable[[float], str], scale: AxisScale) -> Callable[[float], str]:
    """Return the formatter of the ticks: plain numbers get no more decimals than their step needs."""
    if format_value is not format_number:
        return format_value
    decimals = count_decimals(scale.step if len(scale.ticks) > 1 else max(1e-9, *scale.ticks, 0), 5)
    return (lambda tick: f"{tick:.2g}") if decimals is None else (lambda tick: f"{tick:,.{decimals}f}")


def render_grid(y_scale: AxisScale) -> Markup:
    """Return a thin horizontal line at each tick."""
    paths = "".join(f"M0 {1000 - 1000 * y_scale.position(tick):.1f}H1000" for tick in y_scale.ticks)
    return h("path", d=paths, class_="grid")


def _render_line(line: ChartLine, x_scale: AxisScale, y_scale: AxisScale) -> list[Markup]:
    def coordinates(x: float, y: float) -> str:
        return f"{1000 * x_scale.position(x):.1f} {1000 - 1000 * y_scale.position(y):.1f}"

    points, parts = downsample_points(line.points), []
    if len(line.band) > 1:
        lower, upper = [coordinates(x, y) for x, y, _ in line.band], [coordinates(x, y) for x, _, y in line.band]
        parts.append(h("path", d="M" + "L".join([*lower, *reversed(upper)]) + "Z", class_=f"band c{line.colour}"))
    elif line.band:
        x, low, high = line.band[0]
        parts.append(h("path", d=f"M{coordinates(x, low)}L{coordinates(x, high)}", class_=f"line c{line.colour}"))
    if len(points) > 1:
        path = "M" + "L".join(coordinates(x, y) for x, y in points)
        parts.append(h("path", d=path, class_=f"line c{line.colour}", stroke_dasharray=line.dashes or None))
    if len(points) == 1 or (line.dots and len(points) <= 60):
        parts += [render_dot(x_scale.position(x), y_scale.position(y), f"dot c{line.colour}") for x, y in points]
    return parts


def render_dot(x: float, y: float, css_class: str) -> Markup:
    """Return a dot at a position from 0 to 1 along each axis."""
    # A zero-length line with round caps is a dot that stays round when the SVG is stretched.
    return h("path", d=f"M{1000 * x:.1f} {1000 - 1000 * y:.1f}h.01", class_=css_class)


def render_legend_key(line: ChartLine) -> Markup:
    """Return a sample of the line and its label."""
    sample = h("path", d="M1 5H21", class_=f"line c{line.colour}", stroke_dasharray=line.dashes or None)
    dot = h("path", d="M11 5h.01", class_=f"dot c{line.colour}") if line.dots else None
    svg = h("svg", sample, dot, viewBox="0 0 22 10", width="22", height="10", aria_hidden="true")
    return h("span", svg, isolate(line.label), class_="key")


def render_tooltips(
    lines: list[ChartLine], x_scale: AxisScale, x_label: str, format_y: Callable[[float], str]
) -> list[Markup]:
    """Return vertical strips over the plot; the one under the pointer shows the values there."""
    chosen = max(lines, key=lambda line: (line.dots, len(line.points)))
    points = chosen.points
    if len(points) > MAX_TOOLTIPS:
        points = [points[round(i * (len(points) - 1) / (MAX_TOOLTIPS - 1))] for i in range(MAX_TOOLTIPS)]
    positions = [x_scale.position(x) for x, _ in points]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(positions)), 1.0]
    strips = []
    for (x, _), position, left, right in zip(points, positions, edges, edges[1:], strict=False):
        rows = [h("b", f"{x_label} {format_number(x)}" if x % 1 else f"{x_label} {x:,.0f}")]
        for line in lines:
            near = min(line.points, key=lambda point: abs(point[0] - x))
            rows.append(h("span", h("i", class_=f"c{line.colour}"), isolate(line.label), " ", format_y(near[1])))
        strips.append(render_tooltip_strip(left, right, position, rows))
    return strips


def render_tooltip_strip(left: float, right: float, position: float, rows: list[Markup]) -> Markup:
    """Return a strip of the plot that shows `rows` while the pointer is over it."""
    inside = 50.0 if right <= left else 100 * (position - left) / (right - left)
    style = f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%;--at:{inside:.1f}%"
    return h("span", h("span", rows, class_="tip left" if position > 0.5 else "tip"), class_="strip", style=style)


def render_bar(share: float, colour: int = 1, interval: Interval | None = None) -> Markup:
    """Return a bar of a length of 0 to 1 for a table cell, with a line for its interval."""
    parts = [h("i", class_=f"fill c{colour}", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%")]
    if interval:
        low, high = interval
        parts.append(h("i", class_="whisker", style=f"left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"))
    return h("span", parts, class_="bar", aria_hidden="true")


def render_barred(share: float, text: str, colour: int = 1, interval: Interval | None = None) -> Markup:
    """Return a bar with its value beside it, for a table cell."""
    return h("span", render_bar(share, colour, interval), h("span", text), class_="barred")

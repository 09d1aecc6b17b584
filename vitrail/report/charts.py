"""Charts of lines and bars that fit any width: the drawing stretches, its lines and its text do not.

The plot is an SVG stretched over its box; what is written stands around it as text of the page, so that it has the same size
on a phone. What the pointer rests on is told by style alone, without a script.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vitrail.report.markup import Markup, h, name
from vitrail.report.scale import Scale, scale
from vitrail.report.words import is_number, number

MOST_POINTS = 400  # of a line: more would be less than a pixel apart
MOST_TIPS = 80


@dataclass(frozen=True)
class Line:
    """A series of points. `colour` is a number of the page's palette, 1 to 6."""

    label: str
    points: list[tuple[float, float]]
    colour: int = 1
    dots: bool = False
    dashes: str = ""
    band: list[tuple[float, float, float]] = field(default_factory=list)  # x, low, high: an interval around it


def of_rows(rows: Sequence[dict], x: str, y: str) -> list[tuple[float, float]]:
    """The points of a log: rows that have both, as numbers."""
    return [(float(row[x]), float(row[y])) for row in rows if is_number(row.get(x)) and is_number(row.get(y))]


def thinned(points: list[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points, each the mean of its neighbours."""
    if len(points) <= most:
        return points
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def line_chart(
    title: str,
    lines: list[Line],
    *,
    x_name: str,
    value: Callable[[float], str] = number,
    x_value: Callable[[float], str] = number,
    x_whole: bool = True,
    note: str = "",
    mark: tuple[float, float, str] | None = None,
) -> Markup | None:
    """Lines over a common axis with a legend; nothing where there are no points. `mark` rings one point and names it."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    places = [x for line in lines for x, _ in line.points]
    across = scale(places, parts=5, whole=x_whole and not 0 < max(places) - min(places) < 2, tight=True)
    values = [y for line in lines for _, y in line.points] + [y for line in lines for *_, y in line.band]
    up = scale([*values, *(y for line in lines for _, y, _ in line.band)])
    drawn = [grid(up)]
    for line in lines:
        drawn += _drawn(line, across, up)
    if mark:
        drawn += [_dot(across.place(mark[0]), up.place(mark[1]), kind) for kind in ("mark", "mark inner", "dot c1")]
    said = "; ".join(f"{line.label} from {value(line.points[0][1])} to {value(line.points[-1][1])}" for line in lines)
    spread = f"{x_name} {x_value(across.low)} to {x_value(across.high)}"
    area = plot(drawn, across, up, value, x_value, f"{title} over {spread}: {said}", tips(lines, across, x_name, value))
    legend = [key(line) for line in lines] if len(lines) > 1 else []
    if mark:
        legend.append(h("span", h("i", class_="ring"), mark[2], class_="key"))
    return h(
        "figure",
        h("figcaption", h("h3", title), h("div", legend, class_="legend") if legend else None),
        area,
        h("p", x_name, class_="axis"),
        h("p", note, class_="note") if note else None,
        class_="chart",
    )


def plot(
    drawn: list[Markup],
    across: Scale,
    up: Scale,
    value: Callable[[float], str],
    x_value: Callable[[float], str],
    said: str,
    over: list[Markup],
) -> Markup:
    """The drawing with its axes. `said` is what it shows, for those who do not see it."""
    svg = h("svg", drawn, viewBox="0 0 1000 1000", preserveAspectRatio="none", aria_hidden="true")
    value, x_value = ticks_as(value, up), ticks_as(x_value, across)
    ups = [h("span", value(tick), style=f"bottom:{100 * up.place(tick):.2f}%") for tick in up.ticks]
    places = [(tick, 100 * across.place(tick)) for tick in across.ticks]
    acrosses = [
        h("span", x_value(tick), style=f"left:{place:.2f}%", class_="last" if place > 97 else None)
        for tick, place in places
    ]
    return h(
        "div",
        h("div", ups, class_="up"),
        h("div", svg, over, class_="area"),
        h("div", acrosses, class_="across"),
        class_="plot",
        role="img",
        aria_label=said,
    )


def ticks_as(value: Callable[[float], str], axis: Scale) -> Callable[[float], str]:
    """How to write an axis's ticks: plain numbers with no more decimals than their step needs."""
    if value is not number:
        return value
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else max(1e-9, *axis.ticks, 0)
    digits = next((d for d in range(6) if abs(step * 10**d - round(step * 10**d)) < 1e-6 * 10**d * step), None)
    if digits is None:
        return lambda tick: f"{tick:.2g}"
    return lambda tick: f"{tick:,.{digits}f}"


def grid(up: Scale) -> Markup:
    """A thin line at each tick."""
    paths = "".join(f"M0 {1000 - 1000 * up.place(tick):.1f}H1000" for tick in up.ticks)
    return h("path", d=paths, class_="grid")


def _drawn(line: Line, across: Scale, up: Scale) -> list[Markup]:
    places = [(across.place(x), up.place(y)) for x, y in thinned(line.points)]
    made = []
    if len(line.band) > 1:
        there = [f"{1000 * across.place(x):.1f} {1000 - 1000 * up.place(y):.1f}" for x, y, _ in line.band]
        back = [f"{1000 * across.place(x):.1f} {1000 - 1000 * up.place(y):.1f}" for x, _, y in reversed(line.band)]
        made.append(h("path", d="M" + "L".join([*there, *back]) + "Z", class_=f"band c{line.colour}"))
    elif line.band:
        x, low, high = line.band[0]
        ends = f"{1000 - 1000 * up.place(low):.1f}V{1000 - 1000 * up.place(high):.1f}"
        made.append(h("path", d=f"M{1000 * across.place(x):.1f} {ends}", class_=f"line c{line.colour}"))
    if len(places) > 1:
        path = "M" + "L".join(f"{1000 * x:.1f} {1000 - 1000 * y:.1f}" for x, y in places)
        made.append(h("path", d=path, class_=f"line c{line.colour}", stroke_dasharray=line.dashes or None))
    if len(places) == 1 or (line.dots and len(places) <= 60):
        made += [_dot(x, y, f"dot c{line.colour}") for x, y in places]
    return made


def _dot(x: float, y: float, kind: str) -> Markup:
    # A line without length and with round ends is a dot, and stays round when the drawing is stretched.
    return h("path", d=f"M{1000 * x:.1f} {1000 - 1000 * y:.1f}h.01", class_=kind)


def key(line: Line) -> Markup:
    """A sample of the line, and its name."""
    sample = h("path", d="M1 5H21", class_=f"line c{line.colour}", stroke_dasharray=line.dashes or None)
    dot = h("path", d="M11 5h.01", class_=f"dot c{line.colour}") if line.dots else None
    return h(
        "span",
        h("svg", sample, dot, viewBox="0 0 22 10", width="22", height="10", aria_hidden="true"),
        name(line.label),
        class_="key",
    )


def tips(lines: list[Line], across: Scale, x_name: str, value: Callable[[float], str]) -> list[Markup]:
    """Strips over the plot; the one under the pointer tells the values there."""
    chosen = max(lines, key=lambda line: (line.dots, len(line.points)))
    points = chosen.points
    if len(points) > MOST_TIPS:
        points = [points[round(i * (len(points) - 1) / (MOST_TIPS - 1))] for i in range(MOST_TIPS)]
    places = [across.place(x) for x, _ in points]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(places)), 1.0]
    made = []
    for (x, _), place, left, right in zip(points, places, edges, edges[1:], strict=False):
        rows = [h("b", f"{x_name} {number(x)}" if x % 1 else f"{x_name} {x:,.0f}")]
        for line in lines:
            near = min(line.points, key=lambda point: abs(point[0] - x))
            rows.append(h("span", h("i", class_=f"c{line.colour}"), name(line.label), " ", value(near[1])))
        made.append(strip(left, right, place, rows))
    return made


def strip(left: float, right: float, at: float, rows: list[Markup]) -> Markup:
    """A part of a plot's width, with what is told when the pointer rests on it."""
    inside = 50.0 if right <= left else 100 * (at - left) / (right - left)
    side = "tip left" if at > 0.5 else "tip"
    return h(
        "span",
        h("span", rows, class_=side),
        class_="strip",
        style=f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%;--at:{inside:.1f}%",
    )


def bar(share: float, colour: int = 1, interval: tuple[float, float] | None = None) -> Markup:
    """A bar of a length between 0 and 1 inside a cell, with a line for its interval."""
    whisker = None
    if interval:
        low, high = interval
        whisker = h("i", class_="whisker", style=f"left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%")
    return h(
        "span",
        h("i", class_=f"fill c{colour}", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%"),
        whisker,
        class_="bar",
        aria_hidden="true",
    )

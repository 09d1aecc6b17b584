"""Lines and clouds of points with their intervals, each family named beside what it drew where there is room."""

import math
from itertools import pairwise

from vitrail.report.markup import Markup, h
from vitrail.report.scale import Scale, scale
from vitrail.studies.drawing.axes import Across, across, written
from vitrail.studies.drawing.canvas import (
    SIZE,
    SMALL,
    Drawing,
    Palette,
    amount,
    interval_of,
    legend,
    mark,
    rule,
    shortened,
    text,
    told,
    width_of,
    wrapped,
)
from vitrail.studies.study import Chart, Series

NARROW = 560  # pixels: below, names stand above the plot
LABEL = 170  # pixels that a name beside a line may take
LINE = 15  # pixels from one line of a name to the next
BOLD = 1.08  # how much wider bold text is
Box = tuple[float, float, float, float]  # left, top, right, bottom


def drawn(chart: Chart, palette: Palette, width: float) -> Drawing:
    """A chart of lines or dots."""
    series = [each for each in chart.series if any(math.isfinite(y) for y in each.y)]
    if not series:
        return Drawing((text(0, 16, "nothing to draw yet", palette.quiet),), width, 24)
    labels = [each.label for each in series]
    up = _up(series)
    said = written(up, chart.percent)
    left = max(width_of(said(tick), SMALL) for tick in up.ticks) + 8
    beside = chart.kind == "lines" and width >= NARROW and len(series) > 1
    right = width - (22 + min(LABEL, BOLD * max(map(width_of, labels))) if beside else 20)
    parts, top = [], 4.0
    if chart.y_name:
        parts.append(text(0, 14, shortened(chart.y_name, width, SMALL), palette.quiet, SMALL))
        top = 26.0
    axis = across([x for each in series for x in each.x[: len(each.y)]], chart.x_log, left, right)
    high = 280 if width >= NARROW else 240
    frame = _Frame(axis, up, top + 8, top + 8 + high, _aside(series, axis))
    apart = chart.kind == "dots" and len(series) > 1 and not frame.aside  # families in one column need a legend
    direct = _named(series, frame, palette) if apart else None
    if len(series) > 1 and not beside and direct is None:
        keys, reach = legend(labels, width, palette, top + 12)
        parts, top = [*parts, *keys], reach + 14
        frame = _Frame(axis, up, top + 8, top + 8 + high, frame.aside)
    for tick in up.ticks:
        y = frame.y(tick)
        parts += [
            rule(left, y, right, y, palette.rule),
            text(left - 8, y + 4, said(tick), palette.quiet, SMALL, "end"),
        ]
    below, deepest = axis.drawn(frame.bottom, palette)
    parts += below
    for place, each in enumerate(series):
        parts += _family(chart, each, place, len(series), frame, palette)
    parts += direct or []
    if beside:
        parts += _ends(series, frame, palette, width)
    if chart.x_name:
        name = shortened(chart.x_name, width - left, SMALL)
        middle = max(left + width_of(name, SMALL) / 2, (left + right) / 2)
        deepest += 20
        parts.append(text(middle, deepest, name, palette.quiet, SMALL, "middle"))
    return Drawing(tuple(parts), width, deepest + 8)


def _up(series: list[Series]) -> Scale:
    values = [y for each in series for y in (*each.y, *each.low, *each.high)]
    return scale(values, parts=5)


class _Frame:
    """Where values lie in the drawing."""

    def __init__(self, axis: Across, up: Scale, top: float, bottom: float, aside: float) -> None:
        self.axis, self.up, self.top, self.bottom, self.aside = axis, up, top, bottom, aside

    def y(self, value: float) -> float:
        return self.bottom - self.up.place(value) * (self.bottom - self.top)

    def spots(self, series: Series, place: int, families: int) -> list[tuple[int, float, float]]:
        """Each point's number and place; families stand a little aside of each other where they share places."""
        move = self.aside * (place - (families - 1) / 2)
        points = enumerate(zip(series.x, series.y, strict=False))
        return [(k, self.axis.place(x) + move, self.y(y)) for k, (x, y) in points if math.isfinite(y)]


def _aside(series: list[Series], axis: Across) -> float:
    """How far families stand from each other where several have a point at the same place."""
    shared = set(series[0].x).intersection(*(each.x for each in series[1:]))
    if len(series) < 2 or not shared:
        return 0.0
    places = sorted({axis.place(x) for each in series for x in each.x})
    gap = min((b - a for a, b in pairwise(places)), default=60.0)
    return max(0.0, min(8.0, 24.0 / len(series), (gap - 10) / len(series)))


def _family(chart: Chart, series: Series, place: int, families: int, frame: _Frame, palette: Palette) -> list[Markup]:
    spots, colour = frame.spots(series, place, families), palette.colour(place)
    parts = []
    if chart.kind == "lines" and len(spots) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for _, x, y in spots)
        dashes = "6 4" if place >= len(palette.colours) else None
        parts.append(
            h(
                "path",
                d=path,
                fill="none",
                stroke=colour,
                stroke_width=2,
                stroke_linejoin="round",
                stroke_dasharray=dashes,
            )
        )
    for k, x, _ in spots:
        if within := interval_of(series.low, series.high, k):
            low, high = frame.y(within[0]), frame.y(within[1])
            parts.append(rule(x, low, x, high, colour, 1.5, stroke_opacity="0.75"))
            parts += [rule(x - 3.5, end, x + 3.5, end, colour, 1.5, stroke_opacity="0.75") for end in (low, high)]
    for k, x, y in spots:
        where = series.x[k] if isinstance(series.x[k], str) else amount(float(series.x[k]))
        value = told(series.y[k], interval_of(series.low, series.high, k), chart.percent)
        parts.append(mark(place, x, y, palette, f"{series.label}, {where}: {value}"))
    return parts


def _ends(series: list[Series], frame: _Frame, palette: Palette, width: float) -> list[Markup]:
    """Names at the lines' right ends, moved apart where lines end close together."""
    at, ends = frame.axis.right + 16, []
    for place, each in enumerate(series):
        _, x, y = frame.spots(each, place, len(series))[-1]
        ends.append((y, x, place, wrapped(each.label, (width - at) / BOLD)))
    ends.sort()
    # From each name's middle to the next one's; names above push those below down, and the bottom pushes all up again.
    apart = [LINE * (len(a[3]) + len(b[3])) / 2 + 2 for a, b in pairwise(ends)]
    heights = [y for y, *_ in ends]
    for k, gap in enumerate(apart):
        heights[k + 1] = max(heights[k + 1], heights[k] + gap)
    heights[-1] = min(heights[-1], frame.bottom)
    for k, gap in reversed(list(enumerate(apart))):
        heights[k] = min(heights[k], heights[k + 1] - gap)
    parts = []
    for (y, x, place, lines), height in zip(ends, heights, strict=True):
        colour = palette.colour(place)
        parts.append(rule(x + 6, y, at - 3, height, colour, 1, stroke_opacity="0.45"))
        first = height + 4.5 - LINE * (len(lines) - 1) / 2
        parts += [text(at, first + LINE * k, line, colour, SIZE, weight=600) for k, line in enumerate(lines)]
    return parts


def _named(series: list[Series], frame: _Frame, palette: Palette) -> list[Markup] | None:
    """Each family's name beside one of its points, where it covers nothing; None if that cannot be had for all."""
    spots = [frame.spots(each, place, len(series)) for place, each in enumerate(series)]
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for family in spots for _, x, y in family]
    for place, each in enumerate(series):
        for k, x, _ in spots[place]:
            if within := interval_of(each.low, each.high, k):
                taken.append((x - 4, frame.y(within[1]), x + 4, frame.y(within[0])))
    parts = []
    for place, each in enumerate(series):
        box = _free(each.label, spots[place], taken, frame)
        if box is None:
            return None
        taken.append(box)
        parts.append(text(box[0], box[3] - 4, each.label, palette.colour(place), SIZE, weight=600))
    return parts


def _free(label: str, spots: list[tuple[int, float, float]], taken: list[Box], frame: _Frame) -> Box | None:
    """A place for a name at the family's rightmost points: right or left of one, above, below."""
    wide, high = BOLD * width_of(label), 17.0
    for _, x, y in sorted(spots, key=lambda spot: -spot[1])[:2]:
        for left, top in (
            (x + 10, y - high / 2),
            (x - wide / 2, y - high - 8),
            (x - wide / 2, y + 8),
            (x - wide - 10, y - high / 2),
        ):
            box = (left, top, left + wide, top + high)
            inside = box[0] >= frame.axis.left and box[2] <= frame.axis.right + 10
            if inside and box[1] >= frame.top - 8 and box[3] <= frame.bottom and not any(_meet(box, b) for b in taken):
                return box
    return None


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]

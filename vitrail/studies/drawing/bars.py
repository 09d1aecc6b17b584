"""Values of names, one below the other, with their intervals.

Bars begin at zero. Values that lie close together would be lost in bars: they are dots over a part of the axis, which says so.
"""

import math
from dataclasses import dataclass

from vitrail.report.markup import Markup, h
from vitrail.report.scale import Scale, scale
from vitrail.studies.drawing.axes import written
from vitrail.studies.drawing.canvas import (
    SIZE,
    SMALL,
    Drawing,
    Palette,
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
from vitrail.studies.study import Chart

CLOSE = 0.5  # of the largest: where the smallest is more, bars would be nearly equal
STEP = 22.0  # pixels from one bar of a row to the next
ROW = 10.0  # pixels between rows


@dataclass(frozen=True)
class _Bar:
    family: int
    value: float
    interval: tuple[float, float] | None


def drawn(chart: Chart, palette: Palette, width: float) -> Drawing:
    """A chart of bars, or of dots over a part of the axis."""
    rows = _rows(chart)
    if not rows:
        return Drawing((text(0, 16, "nothing to draw yet", palette.quiet),), width, 24)
    bars = [bar for found in rows.values() for bar in found]
    ends = [end for bar in bars for end in (bar.value, *(bar.interval or ()))]
    close = chart.kind == "dots" or min(ends) < 0 or min(ends) > CLOSE * max(ends)
    up = scale(ends, parts=4) if close else scale([0.0, *ends], parts=4)
    values = {id(bar): told(bar.value, None, chart.percent) for bar in bars}
    names = min(max(map(width_of, rows)) + 4, 0.36 * width)
    left, right = names + 12, width - max(map(width_of, values.values())) - 12
    parts, top = [], 0.0
    families = [each.label for each in chart.series]
    if len({bar.family for bar in bars}) > 1 and not _own_names(chart):
        keys, reach = legend(families, width, palette, 14)
        parts, top = keys, reach + 12
    lines = {label: wrapped(label, names, SIZE) for label in rows}
    y, body = top + 4, []
    for label, found in rows.items():
        high = max(STEP * len(found), 17 * len(lines[label])) + ROW
        first = y + high / 2 + 4.5 - 8.5 * (len(lines[label]) - 1)
        body += [text(0, first + 17 * k, line, palette.ink) for k, line in enumerate(lines[label])]
        for k, bar in enumerate(found):
            middle = y + high / 2 + STEP * (k - (len(found) - 1) / 2)
            family = 0 if _own_names(chart) else bar.family
            tip = f"{label}: {told(bar.value, bar.interval, chart.percent)}"
            if len(found) > 1:
                tip = f"{families[bar.family]}, {tip}"
            body += _bar(bar, family, middle, _Span(up, left, right), palette, tip, close)
            body.append(text(width, middle + 4.5, values[id(bar)], palette.ink, SIZE, "end"))
        y += high
    parts += _grid(up, left, right, top, y, chart, palette)
    parts += body
    y += 20
    note = "; ".join(filter(None, (chart.y_name, "the axis does not begin at zero" if up.low > 0 else "")))
    for line in wrapped(note, width - left, SMALL) if note else []:
        y += 17
        parts.append(text(left, y, line, palette.quiet, SMALL))
    return Drawing(tuple(parts), width, y + 8)


@dataclass(frozen=True)
class _Span:
    """Where values lie across."""

    up: Scale
    left: float
    right: float

    def x(self, value: float) -> float:
        return self.left + self.up.place(value) * (self.right - self.left)


def _rows(chart: Chart) -> dict[str, list[_Bar]]:
    """The bars of each name. A family that names no places is a place itself."""
    rows: dict[str, list[_Bar]] = {}
    for family, series in enumerate(chart.series):
        for k, value in enumerate(series.y):
            if math.isfinite(value):
                label = str(series.x[k]) if k < len(series.x) else series.label
                rows.setdefault(label, []).append(_Bar(family, value, interval_of(series.low, series.high, k)))
    return rows


def _own_names(chart: Chart) -> bool:
    """Whether each family is one row: then rows' names are enough."""
    return all(len(each.y) <= 1 for each in chart.series) and len(_rows(chart)) == sum(
        len(each.y) for each in chart.series
    )


def _bar(bar: _Bar, family: int, y: float, span: _Span, palette: Palette, tip: str, close: bool) -> list[Markup]:
    x, parts, colour = span.x(bar.value), [], palette.colour(family)
    if close:
        parts.append(rule(span.left, y, span.right, y, palette.rule, 1, stroke_dasharray="1 3"))
        ink = colour
    else:
        start = span.x(0.0)
        size = {"x": f"{start:.1f}", "y": f"{y - 7:.1f}", "width": f"{max(1.0, x - start):.1f}", "height": "14"}
        parts.append(h("g", h("title", tip), h("rect", **size, rx="2", fill=colour, fill_opacity="0.8")))
        ink = palette.ink
    if bar.interval:
        low, high = (span.x(end) for end in bar.interval)
        parts.append(rule(low, y, high, y, ink, 1.75))
        parts += [rule(end, y - 4, end, y + 4, ink, 1.75) for end in (low, high)]
    if close:
        parts.append(mark(family, x, y, palette, tip, 5))
    return parts


def _grid(
    up: Scale, left: float, right: float, top: float, bottom: float, chart: Chart, palette: Palette
) -> list[Markup]:
    parts, said, end = [], written(up, chart.percent), -math.inf
    for tick in up.ticks:
        x = left + up.place(tick) * (right - left)
        parts.append(rule(x, top, x, bottom, palette.rule))
        label = said(tick)
        half = width_of(label, SMALL) / 2
        if x - half > end + 6:
            parts.append(text(x, bottom + 16, shortened(label, 90, SMALL), palette.quiet, SMALL, "middle"))
            end = x + half
    return [*parts, rule(left, bottom, right, bottom, palette.quiet)]

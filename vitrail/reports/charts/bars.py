"""Bar charts: one row per category, values with their intervals.

Bars start at zero. Values that are close together are drawn as dots over a part of the axis, which says that it does not start
at zero.
"""

import math
from dataclasses import dataclass

from vitrail.reports.charts import canvas
from vitrail.reports.charts.canvas import AxisScale, Chart, Drawing, Palette
from vitrail.reports.html import Markup, h

MIN_CLOSE_RATIO = 0.5  # of the largest value: above it, bars would look equal
BAR_STEP = 22.0  # pixels between the bars of a row
ROW_GAP = 10.0  # pixels between rows


@dataclass(frozen=True)
class _Bar:
    series: int
    value: float
    interval: tuple[float, float] | None


def draw_bars(chart: Chart, palette: Palette, width: float) -> Drawing:
    """Draw a chart of bars, or of dots over a part of the axis."""
    rows = _bars_by_row(chart)
    if not rows:
        return canvas.draw_empty(palette, width)
    bars = [bar for row in rows.values() for bar in row]
    ends = [end for bar in bars for end in (bar.value, *(bar.interval or ()))]
    close = min(ends) > MIN_CLOSE_RATIO * max(ends) and not chart.from_zero
    close = close or chart.kind == "dots" or min(ends) < 0
    scale = canvas.make_scale(ends if close else [0.0, *ends], tick_count=4)
    values = {id(bar): canvas.format_point(bar.value, None, chart.percent) for bar in bars}
    label_width = min(max(map(canvas.text_width, rows)) + 4, 0.36 * width)
    left, right = label_width + 12, width - max(map(canvas.text_width, values.values())) - 12
    parts, top = [], 0.0
    names = [series.label for series in chart.series]
    one_row_each = _has_one_row_per_series(chart, len(rows))
    if len({bar.series for bar in bars}) > 1 and not one_row_each:
        parts, baseline = canvas.draw_legend(names, width, palette, 14)
        top = baseline + 12
    span = _Span(scale, left, right)
    y, body = top + 4, []
    for label, row in rows.items():
        lines = canvas.wrap_text(label, label_width, canvas.FONT_SIZE)
        height = max(BAR_STEP * len(row), 17 * len(lines)) + ROW_GAP
        first = y + height / 2 + 4.5 - 8.5 * (len(lines) - 1)
        body += canvas.draw_lines(0, first, lines, 17, palette.text)
        for k, bar in enumerate(row):
            middle = y + height / 2 + BAR_STEP * (k - (len(row) - 1) / 2)
            tip = f"{label}: {canvas.format_point(bar.value, bar.interval, chart.percent)}"
            if len(row) > 1:
                tip = f"{names[bar.series]}, {tip}"
            body += _draw_bar(bar, 0 if one_row_each else bar.series, middle, span, palette, tip, close)
            body.append(canvas.draw_text(width, middle + 4.5, values[id(bar)], palette.text, canvas.FONT_SIZE, "end"))
        y += height
    parts += [*_draw_grid(span, top, y, chart, palette), *body]
    y += 20
    note = "; ".join(filter(None, (chart.y_name, "the axis does not begin at zero" if scale.low > 0 else "")))
    for line in canvas.wrap_text(note, width - left, canvas.SMALL_FONT_SIZE) if note else []:
        y += 17
        parts.append(canvas.draw_label(left, y, line, palette))
    return Drawing(tuple(parts), width, y + 8)


@dataclass(frozen=True)
class _Span:
    """Horizontal positions of values, in pixels."""

    scale: AxisScale
    left: float
    right: float

    def x(self, value: float) -> float:
        return self.left + self.scale.position(value) * (self.right - self.left)


def _bars_by_row(chart: Chart) -> dict[str, list[_Bar]]:
    """Return the bars of each category. A series without x values is a category itself."""
    rows: dict[str, list[_Bar]] = {}
    for index, series in enumerate(chart.series):
        for k, value in enumerate(series.y):
            if math.isfinite(value):
                label = str(series.x[k]) if k < len(series.x) else series.label
                rows.setdefault(label, []).append(_Bar(index, value, canvas.interval_at(series, k)))
    return rows


def _has_one_row_per_series(chart: Chart, rows: int) -> bool:
    """Return whether each series is one row, so that row labels make a legend needless."""
    return all(len(series.y) <= 1 for series in chart.series) and rows == sum(len(series.y) for series in chart.series)


def _draw_bar(bar: _Bar, index: int, y: float, span: _Span, palette: Palette, tip: str, close: bool) -> list[Markup]:
    x, parts, colour = span.x(bar.value), [], palette.colour(index)
    if close:
        parts.append(canvas.draw_rule(span.left, y, span.right, y, palette.rule, 1, stroke_dasharray="1 3"))
        ink = colour
    else:
        start = span.x(0.0)
        size = {"x": f"{start:.1f}", "y": f"{y - 7:.1f}", "width": f"{max(1.0, x - start):.1f}", "height": "14"}
        parts.append(h("g", h("title", tip), h("rect", **size, rx="2", fill=colour, fill_opacity="0.8")))
        ink = palette.text
    if bar.interval:
        low, high = (span.x(end) for end in bar.interval)
        parts.append(canvas.draw_rule(low, y, high, y, ink, 1.75))
        parts += [canvas.draw_rule(end, y - 4, end, y + 4, ink, 1.75) for end in (low, high)]
    if close:
        parts.append(canvas.draw_marker(index, x, y, palette, tip, 5))
    return parts


def _draw_grid(span: _Span, top: float, bottom: float, chart: Chart, palette: Palette) -> list[Markup]:
    format_label = canvas.make_tick_formatter(span.scale, chart.percent)
    labels = [(span.x(tick), format_label(tick)) for tick in span.scale.ticks]
    rules = [canvas.draw_rule(x, top, x, bottom, palette.rule) for x, _ in labels]
    axis = canvas.draw_rule(span.left, bottom, span.right, bottom, palette.muted)
    return [*rules, *canvas.draw_tick_labels(labels, bottom + 16, palette), axis]

"""Charts as standalone SVG files, light and dark, and as parts of a report page."""

import math

from vitrail.reports.charts import canvas
from vitrail.reports.charts.bars import draw_bars
from vitrail.reports.charts.canvas import Chart, Drawing, Palette
from vitrail.reports.charts.maps import draw_maps
from vitrail.reports.charts.points import draw_points
from vitrail.reports.html import Markup, h

FILE_WIDTH, SCREEN_WIDTH, PHONE_WIDTH = 720, 860, 350  # pixels
MARGIN = 20  # pixels around the chart in a file


def draw_chart(chart: Chart, palette: Palette, width: float) -> Drawing:
    """Draw a chart without its title. Dots at categories are drawn in rows, like bars."""
    if chart.kind == "maps":
        return draw_maps(chart, palette, width)
    has_categories = any(isinstance(x, str) for series in chart.series for x in series.x)
    if chart.kind == "bars" or (chart.kind == "dots" and has_categories):
        return draw_bars(chart, palette, width)
    return draw_points(chart, palette, width)


def render_svg(chart: Chart, dark: bool = False) -> str:
    """Return the chart as an SVG file with title, background and colours of its own."""
    palette = canvas.DARK if dark else canvas.LIGHT
    inside = draw_chart(chart, palette, FILE_WIDTH)
    lines = canvas.wrap_text(chart.title, FILE_WIDTH, 16, 3)
    head = h("g", canvas.draw_lines(0, 15, lines, 21, palette.text, size=16, weight=600))
    top = 21 * len(lines) + 8
    width, height = FILE_WIDTH + 2 * MARGIN, math.ceil(top + inside.height + 2 * MARGIN)
    background = h("rect", width=width, height=height, rx="10", fill=palette.background, stroke=palette.rule)
    plot = h("g", inside.parts, transform=f"translate(0 {top})")
    body = h("g", head, plot, transform=f"translate({MARGIN} {MARGIN})")
    texts = [h("title", chart.title), h("desc", describe_chart(chart))]
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    svg = {"xmlns": "http://www.w3.org/2000/svg", **size, "font_family": canvas.FONTS, "role": "img"}
    return str(h("svg", texts, background, body, **svg)) + "\n"


def render_figure(chart: Chart) -> Markup:
    """Return the chart as a part of a report, for screens and for phones; the CSS of the page shows one of them."""
    drawings = []
    for width, kind in ((SCREEN_WIDTH, "screen"), (PHONE_WIDTH, "phone")):
        inside, about = draw_chart(chart, canvas.PAGE, width), {"role": "img", "aria_label": describe_chart(chart)}
        box = f"0 0 {width} {math.ceil(inside.height)}"
        drawings.append(h("svg", inside.parts, viewBox=box, font_size=canvas.FONT_SIZE, class_=kind, **about))
    return h("figure", h("figcaption", h("h3", chart.title)), drawings, class_="chart study")


def describe_chart(chart: Chart) -> str:
    """Return the text of a chart for screen readers."""
    parts = []
    for series in chart.series:
        if series.maps:
            parts.append(f"{series.label}: {len(series.maps)} maps")
        elif series.y:
            values = [canvas.format_point(value, None, chart.percent) for value in series.y]
            xs = [str(x) for x in series.x] or [""] * len(values)
            shown = ", ".join(f"{x} {value}".strip() for x, value in list(zip(xs, values, strict=False))[:12])
            parts.append(f"{series.label}: {shown}" + (", …" if len(values) > 12 else ""))
    return f"{chart.title}. " + "; ".join(parts)

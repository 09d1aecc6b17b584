"""Charts of studies as SVG: a file that stands by itself on white and on dark pages, or a part of a report."""

import math

from vitrail.report.markup import Markup, h
from vitrail.studies.drawing import bars, maps, points
from vitrail.studies.drawing.canvas import DARK, FONTS, LIGHT, PAGE, SIZE, Drawing, Palette, text, told, wrapped
from vitrail.studies.study import Chart

FILE, SCREEN, PHONE = 720, 860, 350  # pixels that a chart is wide
EDGE = 20  # pixels around a chart that is a file


def drawn(chart: Chart, palette: Palette, width: float) -> Drawing:
    """The chart without its title. Dots at names lie in rows, as bars do: there names have room."""
    if chart.kind == "maps":
        return maps.drawn(chart, palette, width)
    named = any(isinstance(x, str) for series in chart.series for x in series.x)
    if chart.kind == "bars" or (chart.kind == "dots" and named):
        return bars.drawn(chart, palette, width)
    return points.drawn(chart, palette, width)


def svg(chart: Chart, dark: bool = False) -> str:
    """The chart as a file: with its title, its own ground and its own colours, so that any page may show it."""
    palette = DARK if dark else LIGHT
    inside = drawn(chart, palette, FILE)
    lines = wrapped(chart.title, FILE, 16, 3)
    head = [text(0, 15 + 21 * k, line, palette.ink, 16, weight=600) for k, line in enumerate(lines)]
    top = 21 * len(lines) + 8
    width, height = FILE + 2 * EDGE, math.ceil(top + inside.height + 2 * EDGE)
    ground = h("rect", width=width, height=height, rx="10", fill=palette.sheet, stroke=palette.rule)
    body = h(
        "g",
        h("g", head),
        h("g", inside.parts, transform=f"translate(0 {top})"),
        transform=f"translate({EDGE} {EDGE})",
    )
    return str(
        h(
            "svg",
            h("title", chart.title),
            h("desc", said(chart)),
            ground,
            body,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            width=width,
            height=height,
            font_family=FONTS,
            role="img",
        )
        + "\n"
    )


def figure(chart: Chart) -> Markup:
    """The chart as a part of a report, drawn for screens and for phones; the page's style says which is seen."""
    return h(
        "figure",
        h("figcaption", h("h3", chart.title)),
        [_inline(chart, PAGE, width, kind) for width, kind in ((SCREEN, "screen"), (PHONE, "phone"))],
        class_="chart study",
    )


def _inline(chart: Chart, palette: Palette, width: int, kind: str) -> Markup:
    inside = drawn(chart, palette, width)
    return h(
        "svg",
        inside.parts,
        viewBox=f"0 0 {width} {math.ceil(inside.height)}",
        font_size=SIZE,
        class_=kind,
        role="img",
        aria_label=said(chart),
    )


def said(chart: Chart) -> str:
    """What a chart shows, in words, for those who do not see it."""
    parts = []
    for series in chart.series:
        if series.maps:
            parts.append(f"{series.label}: {len(series.maps)} maps")
        elif series.y:
            values = [told(value, None, chart.percent) for value in series.y]
            places = [str(x) for x in series.x] or [""] * len(values)
            shown = ", ".join(f"{x} {value}".strip() for x, value in list(zip(places, values, strict=False))[:12])
            parts.append(f"{series.label}: {shown}" + (", …" if len(values) > 12 else ""))
    return f"{chart.title}. " + "; ".join(parts)

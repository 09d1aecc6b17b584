"""Small pictures of numbers side by side, all in one scale of colours: position embeddings as a grid of grids."""

import base64
import io
import math

import numpy as np
from PIL import Image

from vitrail.report.markup import Markup, h
from vitrail.studies.drawing.canvas import SIZE, SMALL, Drawing, Palette, amount, rule, text, wrapped
from vitrail.studies.study import Chart, Series
from vitrail.views.colours import LIKE, coloured

GAP = 18.0  # pixels between panels
PANEL = 160.0  # pixels that a panel has at least
ENLARGED = 4  # pixels of the picture for one number, so that smoothing does not blur it


def drawn(chart: Chart, palette: Palette, width: float) -> Drawing:
    """A panel for each series, and the scale of colours below."""
    series = [each for each in chart.series if each.maps]
    if not series:
        return Drawing((text(0, 16, "nothing to draw yet", palette.quiet),), width, 24)
    values = np.array([v for each in series for picture in each.maps for row in picture for v in row], float)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    columns = _columns(len(series), width)
    panel = min((width - GAP * (columns - 1)) / columns, 330.0)
    parts, y = [], 0.0
    for start in range(0, len(series), columns):
        row = series[start : start + columns]
        names = [wrapped(each.label, panel, SIZE) for each in row]
        tall = 17 * max(map(len, names))
        deepest = 0.0
        for k, each in enumerate(row):
            x = k * (panel + GAP)
            parts += [text(x, y + 13 + 17 * n, line, palette.ink) for n, line in enumerate(names[k])]
            picture, deep = _panel(each, low, high, x, y + tall + 4, panel)
            parts.append(picture)
            deepest = max(deepest, deep)
        y += tall + 4 + deepest + GAP
    bar, y = _scale(chart, low, high, y, width, palette)
    return Drawing((*parts, *bar), width, y + 6)


def _columns(panels: int, width: float) -> int:
    """Two on a phone, three on a screen; four where three would leave one panel alone."""
    if panels in (4, 7, 8) and (width - 3 * GAP) / 4 >= PANEL:
        return 4
    return min(panels, 3 if (width - 2 * GAP) / 3 >= PANEL else 2)


def _panel(series: Series, low: float, high: float, x: float, y: float, width: float) -> tuple[Markup, float]:
    """The maps of one series in rows and columns, as one picture; and how high it is."""
    count = len(series.maps)
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    tall, wide = np.array(series.maps[0]).shape
    gap = 1 if count > 1 else 0
    sheet = np.zeros((rows * (tall + gap) - gap, columns * (wide + gap) - gap, 4), np.uint8)  # between maps: nothing
    for place, numbers in enumerate(series.maps):
        top, left = (place // columns) * (tall + gap), (place % columns) * (wide + gap)
        part = (np.array(numbers, float) - low) / max(high - low, 1e-12)
        sheet[top : top + tall, left : left + wide, :3] = coloured(part, LIKE)
        sheet[top : top + tall, left : left + wide, 3] = 255
    file = io.BytesIO()
    Image.fromarray(sheet.repeat(ENLARGED, 0).repeat(ENLARGED, 1)).save(file, "PNG", optimize=True)
    height = width * sheet.shape[0] / sheet.shape[1]
    data = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    said = h("title", f"{series.label}: {count} maps" if count > 1 else series.label)
    return h("image", said, href=data, **place, style="image-rendering:pixelated"), height


def _scale(
    chart: Chart, low: float, high: float, y: float, width: float, palette: Palette
) -> tuple[list[Markup], float]:
    """What the colours mean, and how far down that is written."""
    long, steps = min(180.0, width / 2), 60
    colours = coloured(np.linspace(0, 1, steps), LIKE)
    parts: list[Markup] = []
    for k, (r, g, b) in enumerate(colours):
        size = {"x": f"{k * long / steps:.2f}", "width": f"{long / steps + 0.5:.2f}", "y": f"{y:.1f}", "height": "10"}
        parts.append(h("rect", **size, fill=f"#{r:02x}{g:02x}{b:02x}"))
    least, most = ((f"{end:.2f}" if abs(end) < 100 else amount(end)).replace("-", "−") for end in (low, high))
    parts += [
        text(0, y + 25, least, palette.quiet, SMALL),
        text(long, y + 25, most, palette.quiet, SMALL, "end"),
        rule(0, y + 10, long, y + 10, palette.rule),
    ]
    reach = y + 25
    names = ", ".join(filter(None, (chart.y_name, chart.x_name)))
    if names and width - long - 16 > 200:
        lines = wrapped(names, width - long - 16, SMALL, 3)
        parts += [text(long + 16, y + 9 + 16 * k, line, palette.quiet, SMALL) for k, line in enumerate(lines)]
        return parts, max(reach, y + 9 + 16 * (len(lines) - 1))
    for line in wrapped(names, width, SMALL, 3) if names else []:
        reach += 18
        parts.append(text(0, reach, line, palette.quiet, SMALL))
    return parts, reach

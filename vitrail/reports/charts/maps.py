"""Panels of small 2-D arrays as colour maps with one common colour scale, such as position embedding similarities."""

import base64
import io
import math

import numpy as np
from PIL import Image

from vitrail.reports.charts import canvas
from vitrail.reports.charts.canvas import Chart, Drawing, Palette, Series
from vitrail.reports.colours import SIMILARITY_CMAP, apply_cmap
from vitrail.reports.html import Markup, h

GAP = 18.0  # pixels between panels
MIN_PANEL_WIDTH = 160.0  # pixels
PIXEL_SCALE = 4  # image pixels per value, so that smoothing does not blur it


def draw_maps(chart: Chart, palette: Palette, width: float) -> Drawing:
    """Draw a panel for each series, and the colour scale below."""
    shown = [series for series in chart.series if series.maps]
    if not shown:
        return canvas.draw_empty(palette, width)
    values = np.array([v for series in shown for values in series.maps for row in values for v in row], float)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    columns = _count_columns(len(shown), width)
    panel = min((width - GAP * (columns - 1)) / columns, 330.0)
    parts, y = [], 0.0
    for start in range(0, len(shown), columns):
        row = shown[start : start + columns]
        labels = [canvas.wrap_text(series.label, panel, canvas.FONT_SIZE) for series in row]
        label_height = 17 * max(map(len, labels))
        row_height = 0.0
        for k, series in enumerate(row):
            x = k * (panel + GAP)
            parts += canvas.draw_lines(x, y + 13, labels[k], 17, palette.text)
            image, height = _draw_panel(series, low, high, x, y + label_height + 4, panel)
            parts.append(image)
            row_height = max(row_height, height)
        y += label_height + 4 + row_height + GAP
    bar, y = _draw_scale(chart, low, high, y, width, palette)
    return Drawing((*parts, *bar), width, y + 6)


def _count_columns(panels: int, width: float) -> int:
    """Return 2 on a phone, 3 on a screen; 4 where 3 would leave one panel in the last row."""
    if panels in (4, 7, 8) and (width - 3 * GAP) / 4 >= MIN_PANEL_WIDTH:
        return 4
    return min(panels, 3 if (width - 2 * GAP) / 3 >= MIN_PANEL_WIDTH else 2)


def _draw_panel(series: Series, low: float, high: float, x: float, y: float, width: float) -> tuple[Markup, float]:
    """Return the maps of one series in rows and columns as one image, and its height."""
    count = len(series.maps)
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    h_map, w_map = np.array(series.maps[0]).shape
    gap = 1 if count > 1 else 0
    sheet = np.zeros((rows * (h_map + gap) - gap, columns * (w_map + gap) - gap, 4), np.uint8)  # gaps are transparent
    for index, values in enumerate(series.maps):
        top, left = (index // columns) * (h_map + gap), (index % columns) * (w_map + gap)
        scaled = (np.array(values, float) - low) / max(high - low, 1e-12)
        sheet[top : top + h_map, left : left + w_map, :3] = apply_cmap(scaled, SIMILARITY_CMAP)
        sheet[top : top + h_map, left : left + w_map, 3] = 255
    file = io.BytesIO()
    Image.fromarray(sheet.repeat(PIXEL_SCALE, 0).repeat(PIXEL_SCALE, 1)).save(file, "PNG", optimize=True)
    height = width * sheet.shape[0] / sheet.shape[1]
    data = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
    box = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    title = h("title", f"{series.label}: {count} maps" if count > 1 else series.label)
    return h("image", title, href=data, **box, style="image-rendering:pixelated"), height


def _draw_scale(
    chart: Chart, low: float, high: float, y: float, width: float, palette: Palette
) -> tuple[list[Markup], float]:
    """Return the colour scale with its labels, and its lowest baseline."""
    long, steps = min(180.0, width / 2), 60
    colours = apply_cmap(np.linspace(0, 1, steps), SIMILARITY_CMAP)
    parts: list[Markup] = []
    for k, (r, g, b) in enumerate(colours):
        size = {"x": f"{k * long / steps:.2f}", "width": f"{long / steps + 0.5:.2f}", "y": f"{y:.1f}", "height": "10"}
        parts.append(h("rect", **size, fill=f"#{r:02x}{g:02x}{b:02x}"))
    ends = [f"{end:.2f}" if abs(end) < 100 else canvas.format_tick(end) for end in (low, high)]
    parts += [
        canvas.draw_label(0, y + 25, ends[0].replace("-", "−"), palette),
        canvas.draw_label(long, y + 25, ends[1].replace("-", "−"), palette, "end"),
        canvas.draw_rule(0, y + 10, long, y + 10, palette.rule),
    ]
    names, small = ", ".join(filter(None, (chart.y_name, chart.x_name))), canvas.SMALL_FONT_SIZE
    if not names:
        return parts, y + 25
    beside = width - long - 16 > 200  # else the names stand below
    x, first, step = (long + 16, y + 9, 16) if beside else (0, y + 43, 18)
    lines = canvas.wrap_text(names, width - x, small, 3)
    parts += canvas.draw_lines(x, first, lines, step, palette.muted, size=small)
    return parts, max(y + 25, first + step * (len(lines) - 1))

"""Figures of a comparison of two models: one panel per statistic, each as a file, and all on one sheet.

Panels are narrow with large text, so that each is legible on a phone. The models differ in colour, marker and line style, so that
figures do not depend on colour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitrail.analysis.comparison import ModelComparison, ModelResult
from vitrail.analysis.figures.sheet import MARGIN, SERIF, Sheet, shorten_name
from vitrail.reports.colours import BLUE, MUTED, ORANGE
from vitrail.reports.html import clean_text
from vitrail.utils.text import format_image_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_WIDTH, PANEL_HEIGHT = 4.8, 4.7  # inches of a single panel
DOTTED = (0, (1.2, 2.2))
PROBE_TITLE = "Linear probe accuracy"
MARGIN_LEFT, MARGIN_TOP, MARGIN_RIGHT, MARGIN_BOTTOM = 0.72, 1.5, 0.28, 0.68  # inches around the plot


class ModelStyle(NamedTuple):
    """Line and marker style of a model."""

    colour: str
    marker: str
    line: Any
    offset: float  # of its head markers in layers, so that they do not cover those of the other model

    def line_options(self) -> dict[str, Any]:
        """Return the Matplotlib options of its lines."""
        line = {"color": self.colour, "linestyle": self.line, "linewidth": 1.9}
        return line | {"marker": self.marker, "markersize": 5.2, "markeredgewidth": 0}


MODEL_STYLES = (ModelStyle(BLUE, "o", "-", -0.14), ModelStyle(ORANGE, "^", (0, (5, 1.6)), 0.14))


@dataclass(frozen=True)
class MeasurePanel:
    """Panel of one statistic: file, title, axis label and plot function."""

    file: str
    title: str
    unit: str
    plot: Callable[["Axes", ModelComparison], None]
    reference: tuple[float, str] | None = None  # value and label of a horizontal line


def build_panels(comparison: ModelComparison) -> list[MeasurePanel]:
    """Return the panels that the results have data for."""
    distance = "mean attention distance, " + ("pixels" if comparison.has_same_size else "% of the image width")
    mutual = "normalised mutual information, query and key"
    is_pi = all(round(float(side.profile.frequencies[-1]), 2) == 1 for side in comparison.sides)
    high = f"log amplitude at {'frequency π' if is_pi else 'the highest frequency'}, relative to 0"
    spectrum, last = "log amplitude, relative to frequency 0", "Frequencies after the last layer"
    uniform = _uniform_reference(comparison)
    panels = [
        MeasurePanel("distance.png", "Mean attention distance", distance, _plot_distance, uniform),
        MeasurePanel("diversity.png", "Head diversity", "1 − cosine similarity of two heads", _plot_diversity),
        MeasurePanel("mutual.png", "Query dependence", mutual, _plot_mutual_information),
        MeasurePanel("frequencies.png", "High frequencies by depth", high, _plot_high_frequencies),
        MeasurePanel("spectrum.png", last, spectrum, _plot_spectrum),
    ]
    if (probe := comparison.sides[0].probe) is not None:
        majority = (100 * probe.majority_accuracy, "most frequent class")
        panels.append(MeasurePanel("probe.png", PROBE_TITLE, "top-1 accuracy, %", _plot_probe, majority))
    return panels


def draw_panel(panel: MeasurePanel, comparison: ModelComparison) -> bytes:
    """Draw one panel with the names of the models."""
    sheet = Sheet(PANEL_WIDTH, PANEL_HEIGHT)
    sheet.draw_text(MARGIN_LEFT - 0.42, 0.36, panel.title, size=16, font=SERIF, baseline="center")
    _draw_names(sheet, comparison, MARGIN_LEFT - 0.42, 0.68)
    size = PANEL_WIDTH - MARGIN_LEFT - MARGIN_RIGHT, PANEL_HEIGHT - MARGIN_TOP - MARGIN_BOTTOM
    _draw_plot(sheet, panel, comparison, MARGIN_LEFT, MARGIN_TOP, *size)
    return sheet.to_png()


def draw_comparison(comparison: ModelComparison) -> bytes:
    """Draw all panels on one sheet."""
    panels, columns, head = build_panels(comparison), 3, 1.25
    plot, gap, before = (3.35, 2.6), 0.5, MARGIN_LEFT - 0.3  # inches: plot, gap, space for tick labels
    across, down = before + plot[0] + gap, plot[1] + 1.4
    sheet = Sheet(2 * MARGIN + columns * across - gap, head + 2 * down + 0.05, "Two models by layer")
    _draw_names(sheet, comparison, MARGIN, 0.72)
    counts = format_image_count(comparison.image_count)
    if (probe := comparison.sides[0].probe) is not None:
        counts += f"  ·  probes: {probe.train_images:,} training, {probe.test_images:,} test images"
    sheet.draw_label(sheet.width - MARGIN, 0.36, counts, size=9, align="right", baseline="center")
    for index in range(2 * columns):
        left, top = MARGIN + index % columns * across, head + index // columns * down + 0.25
        panel = panels[index] if index < len(panels) else None
        sheet.draw_text(left, top, panel.title if panel else PROBE_TITLE, size=13, font=SERIF, baseline="center")
        if panel:
            _draw_plot(sheet, panel, comparison, left + before, top + 0.48, *plot)
        else:
            for row, line in enumerate(wrap(f"Skipped: {clean_text(comparison.no_probe_reason)}.", 46)):
                sheet.draw_label(left, top + 0.3 + 0.19 * row, line, size=9)
    return sheet.to_png()


def _draw_names(sheet: Sheet, comparison: ModelComparison, left: float, top: float) -> None:
    """Draw the legend, one model per line."""
    from matplotlib.lines import Line2D

    for side, style in zip(comparison.sides, MODEL_STYLES, strict=True):
        across = [(left + along) / sheet.width for along in (0, 0.19, 0.38)]
        down = [1 - top / sheet.height] * 3
        sheet.figure.add_artist(Line2D(across, down, markevery=[1], **style.line_options()))
        sheet.draw_text(left + 0.5, top, f"{side.letter}  {shorten_name(side.name, 44)}", size=9.5, baseline="center")
        top += 0.24


def _draw_plot(sheet: Sheet, panel: MeasurePanel, comparison: ModelComparison, *bounds: float) -> None:
    """Draw the plot with its axis label above; its bounds are left, top, width and height."""
    left, top, width, height = bounds
    axes = sheet.add_axes(left, top, width, height)
    axes.tick_params(labelsize=9)
    panel.plot(axes, comparison)
    axes.xaxis.label.set_fontsize(9.5)
    sheet.draw_label(left - 0.42, top - 0.21, panel.unit, size=8.8, baseline="center")
    if panel.reference is not None:
        value, label = panel.reference
        axes.axhline(value, color=MUTED, linewidth=1.1, linestyle=DOTTED, zorder=1)
        sheet.draw_label(left + width, top - 0.21, f"····  {label}", size=8.8, align="right", baseline="center")


def _layer_coordinates(comparison: ModelComparison, side: ModelResult, first: int) -> np.ndarray:
    """Return the x values of the layers from `first`: numbers, or per cent of the depth if the depths differ."""
    layers = np.arange(first, side.depth + 1)
    return layers if comparison.has_same_depth else 100 * layers / side.depth


def _set_depth_axis(axes: "Axes", comparison: ModelComparison, first: int) -> None:
    """Set limits, ticks and label of the depth axis."""
    if comparison.has_same_depth:
        depth = comparison.sides[0].depth
        axes.set_xlim(first - 0.5, depth + 0.5)
        step = next(step for step in (1, 2, 4, 8, 16, 32, 10**6) if depth / step <= 12)
        axes.set_xticks([1, *range(step if step > 1 else 2, depth + 1, step)] if first else range(0, depth + 1, step))
        axes.set_xlabel("layer" if first else "layer (0: before the first)")
    else:
        edge = 50 / min(side.depth for side in comparison.sides)
        axes.set_xlim((0 if first else -edge), 100 + edge)
        axes.set_xticks([0, 25, 50, 75, 100])
        depths = " and ".join(str(side.depth) for side in comparison.sides)
        axes.set_xlabel(f"depth, % of {depths} layers")
    axes.grid(axis="x", visible=False)


def _plot_heads(axes: "Axes", comparison: ModelComparison, values: Callable[[ModelResult], np.ndarray]) -> float:
    """Plot a dot per head and a line of their mean; return the largest value."""
    largest = 0.0
    for side, style in zip(comparison.sides, MODEL_STYLES, strict=True):
        heads, across = values(side), _layer_coordinates(comparison, side, 1)
        step = 1 if comparison.has_same_depth else 100 / side.depth
        x, dots = np.repeat(across + style.offset * step, heads.shape[1]), {"markersize": 3.4, "markeredgewidth": 0}
        axes.plot(x, heads.ravel(), style.marker, color=style.colour, alpha=0.38, **dots)
        axes.plot(across, heads.mean(1), **style.line_options())
        if np.isfinite(heads).any():
            largest = max(largest, float(np.nanmax(heads)))
    _set_depth_axis(axes, comparison, 1)
    return largest


def _uniform_reference(comparison: ModelComparison) -> tuple[float, str] | None:
    """Return the distance of uniform attention if it is the same for both models."""
    first, second = (side.profile for side in comparison.sides)
    same = (first.grid, first.size) == (second.grid, second.size)
    return (first.everywhere, "uniform attention") if same else None


def _plot_distance(axes: "Axes", comparison: ModelComparison) -> None:
    largest = _plot_heads(axes, comparison, comparison.comparable_distance)
    uniform, _ = _uniform_reference(comparison) or (0.0, "")
    axes.set_ylim(0, 1.06 * max(largest, uniform) or 1.0)


def _plot_diversity(axes: "Axes", comparison: ModelComparison) -> None:
    largest = _plot_heads(axes, comparison, lambda side: side.profile.diversity)
    axes.set_ylim(0, min(1.02, 1.08 * largest) if largest > 0.05 else 0.05)
    if alone := [side.letter for side in comparison.sides if side.heads == 1]:
        note = f"{' and '.join(alone)}: only one head"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, fontsize=9, color=MUTED, ha="center", va="center")


def _plot_mutual_information(axes: "Axes", comparison: ModelComparison) -> None:
    largest = _plot_heads(axes, comparison, lambda side: side.profile.mutual)
    axes.set_ylim(0, min(1.02, 1.08 * largest) if largest > 0.01 else 0.01)


def _plot_band(axes: "Axes", x: np.ndarray, values: np.ndarray, low: Any, high: Any, style: ModelStyle) -> None:
    """Plot a curve with a band."""
    axes.fill_between(x, low, high, color=style.colour, alpha=0.13, linewidth=0)
    axes.plot(x, values, **style.line_options())


def _plot_high_frequencies(axes: "Axes", comparison: ModelComparison) -> None:
    for side, style in zip(comparison.sides, MODEL_STYLES, strict=True):
        values, std = side.high_frequency, side.profile.spectrum_spread[:, -1]
        _plot_band(axes, _layer_coordinates(comparison, side, 0), values, values - std, values + std, style)
    _set_depth_axis(axes, comparison, 0)


def _plot_spectrum(axes: "Axes", comparison: ModelComparison) -> None:
    for side, style in zip(comparison.sides, MODEL_STYLES, strict=True):
        values, std = side.profile.spectrum[-1], side.profile.spectrum_spread[-1]
        _plot_band(axes, side.profile.frequencies, values, values - std, values + std, style)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼ π", "½ π", "¾ π", "π"])
    axes.set_xlabel("frequency per patch")


def _plot_probe(axes: "Axes", comparison: ModelComparison) -> None:
    most = 0.0
    for side, style in zip(comparison.sides, MODEL_STYLES, strict=True):
        assert side.probe is not None
        low, high = 100 * side.probe.intervals.T
        _plot_band(axes, _layer_coordinates(comparison, side, 0), 100 * side.probe.top1, low, high, style)
        most = max(most, float(high.max()))
    _set_depth_axis(axes, comparison, 0)
    axes.set_ylim(0, min(102.0, 1.06 * most))

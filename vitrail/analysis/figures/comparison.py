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
from vitrail.reports.colours import BLUE, INK, MUTED, ORANGE
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
        return {
            "color": self.colour,
            "linestyle": self.line,
            "linewidth": 1.9,
            "marker": self.marker,
            "markersize": 5.2,
            "markeredgewidth": 0,
        }


MODEL_STYLES = (ModelStyle(BLUE, "o", "-", -0.14), ModelStyle(ORANGE, "^", (0, (5, 1.6)), 0.14))


@dataclass(frozen=True)
class MeasurePanel:
    """Panel of one statistic: file, title, axis label and plot function."""

    file: str
    title: str
    unit: str
    plot: Callable[["Axes"], None]
    reference: tuple[float, str] | None = None  # value and label of a horizontal line


def build_panels(comparison: ModelComparison) -> list[MeasurePanel]:
    """Return the panels that the results have data for."""
    pixels = "mean attention distance, " + ("pixels" if comparison.has_same_size else "% of the image width")
    panels = [
        MeasurePanel(
            "distance.png",
            "Mean attention distance",
            pixels,
            lambda axes: _plot_distance(axes, comparison),
            _uniform_reference(comparison),
        ),
        MeasurePanel(
            "diversity.png",
            "Head diversity",
            "1 − cosine similarity of two heads",
            lambda axes: _plot_diversity(axes, comparison),
        ),
        MeasurePanel(
            "mutual.png",
            "Query dependence",
            "normalised mutual information, query and key",
            lambda axes: _plot_mutual_information(axes, comparison),
        ),
        MeasurePanel(
            "frequencies.png",
            "High frequencies by depth",
            f"log amplitude at {_format_highest_frequency(comparison)}, relative to 0",
            lambda axes: _plot_high_frequencies(axes, comparison),
        ),
        MeasurePanel(
            "spectrum.png",
            "Frequencies after the last layer",
            "log amplitude, relative to frequency 0",
            lambda axes: _plot_spectrum(axes, comparison),
        ),
    ]
    probe = comparison.sides[0].probe
    if probe is not None:
        majority = (100 * probe.majority_accuracy, "most frequent class")
        unit = "top-1 accuracy, %"
        panels.append(
            MeasurePanel("probe.png", PROBE_TITLE, unit, lambda axes: _plot_probe(axes, comparison), majority)
        )
    return panels


def draw_panel(panel: MeasurePanel, comparison: ModelComparison) -> bytes:
    """Draw one panel with the names of the models."""
    sheet = Sheet(PANEL_WIDTH, PANEL_HEIGHT)
    sheet.draw_text(MARGIN_LEFT - 0.42, 0.36, panel.title, size=16, font=SERIF, baseline="center")
    _draw_names(sheet, comparison, MARGIN_LEFT - 0.42, 0.68)
    _draw_plot(
        sheet,
        panel,
        MARGIN_LEFT,
        MARGIN_TOP,
        PANEL_WIDTH - MARGIN_LEFT - MARGIN_RIGHT,
        PANEL_HEIGHT - MARGIN_TOP - MARGIN_BOTTOM,
    )
    return sheet.to_png()


def draw_comparison(comparison: ModelComparison) -> bytes:
    """Draw all panels on one sheet."""
    panels, columns, head = build_panels(comparison), 3, 1.25
    plot, gap, before = (3.35, 2.6), 0.5, MARGIN_LEFT - 0.3  # inches: plot, gap, space for tick labels
    across, down = before + plot[0] + gap, plot[1] + 1.4
    sheet = Sheet(2 * MARGIN + columns * across - gap, head + 2 * down + 0.05, "Two models by layer")
    _draw_names(sheet, comparison, MARGIN, 0.72)
    sheet.draw_text(
        sheet.width - MARGIN, 0.36, format_counts(comparison), size=9, colour=MUTED, align="right", baseline="center"
    )
    for index in range(2 * columns):
        left, top = MARGIN + index % columns * across, head + index // columns * down + 0.25
        if index >= len(panels):
            sheet.draw_text(left, top, PROBE_TITLE, size=13, font=SERIF, baseline="center")
            for row, line in enumerate(wrap(f"Skipped: {clean_text(comparison.no_probe_reason)}.", 46)):
                sheet.draw_text(left, top + 0.3 + 0.19 * row, line, size=9, colour=MUTED)
            continue
        sheet.draw_text(left, top, panels[index].title, size=13, font=SERIF, baseline="center")
        _draw_plot(sheet, panels[index], left + before, top + 0.48, *plot)
    return sheet.to_png()


def format_counts(comparison: ModelComparison) -> str:
    """Return the number of images, and those of the probes."""
    images = format_image_count(comparison.image_count)
    probe = comparison.sides[0].probe
    if probe is None:
        return images
    return f"{images}  ·  probes: {probe.train_images:,} training, {probe.test_images:,} test images"


def _draw_names(sheet: Sheet, found: ModelComparison, left: float, top: float) -> None:
    """Draw the legend, one model per line."""
    from matplotlib.lines import Line2D

    for side, style in zip(found.sides, MODEL_STYLES, strict=True):
        across = [(left + along) / sheet.width for along in (0, 0.19, 0.38)]
        down = [1 - top / sheet.height] * 3
        sheet.figure.add_artist(Line2D(across, down, markevery=[1], **style.line_options()))
        sheet.draw_text(left + 0.5, top, f"{side.letter}  {shorten_name(side.name, 44)}", size=9.5, baseline="center")
        top += 0.24


def _draw_plot(sheet: Sheet, panel: MeasurePanel, left: float, top: float, width: float, height: float) -> None:
    """Draw the plot with its axis label above."""
    axes = sheet.add_axes(left, top, width, height)
    axes.tick_params(labelsize=9)
    panel.plot(axes)
    axes.set_xlabel(axes.get_xlabel(), fontsize=9.5, color=INK)
    sheet.draw_text(left - 0.42, top - 0.21, panel.unit, size=8.8, colour=MUTED, baseline="center")
    if panel.reference is not None:
        value, label = panel.reference
        axes.axhline(value, color=MUTED, linewidth=1.1, linestyle=DOTTED, zorder=1)
        style = {"size": 8.8, "colour": MUTED, "align": "right", "baseline": "center"}
        sheet.draw_text(left + width, top - 0.21, f"····  {label}", **style)


def _layer_coordinates(found: ModelComparison, side: ModelResult, first: int) -> np.ndarray:
    """Return the x values of the layers from `first`: numbers, or per cent of the depth if the depths differ."""
    layers = np.arange(first, side.depth + 1)
    return layers if found.has_same_depth else 100 * layers / side.depth


def _set_depth_axis(axes: "Axes", found: ModelComparison, first: int) -> None:
    """Set limits, ticks and label of the depth axis."""
    if found.has_same_depth:
        depth = found.sides[0].depth
        axes.set_xlim(first - 0.5, depth + 0.5)
        step = next(step for step in (1, 2, 4, 8, 16, 32, 10**6) if depth / step <= 12)
        axes.set_xticks([1, *range(step if step > 1 else 2, depth + 1, step)] if first else range(0, depth + 1, step))
        axes.set_xlabel("layer" if first else "layer (0: before the first)")
    else:
        edge = 50 / min(side.depth for side in found.sides)
        axes.set_xlim((0 if first else -edge), 100 + edge)
        axes.set_xticks([0, 25, 50, 75, 100])
        depths = " and ".join(str(side.depth) for side in found.sides)
        axes.set_xlabel(f"depth, % of {depths} layers")
    axes.grid(axis="x", visible=False)


def _plot_heads(axes: "Axes", found: ModelComparison, values: Callable[[ModelResult], np.ndarray]) -> float:
    """Plot a dot per head and a line of their mean; return the largest value."""
    largest = 0.0
    for side, style in zip(found.sides, MODEL_STYLES, strict=True):
        heads, across = values(side), _layer_coordinates(found, side, 1)
        step = 1 if found.has_same_depth else 100 / side.depth
        x, dots = np.repeat(across + style.offset * step, heads.shape[1]), {"markersize": 3.4, "markeredgewidth": 0}
        axes.plot(x, heads.ravel(), style.marker, color=style.colour, alpha=0.38, **dots)
        axes.plot(across, heads.mean(1), **style.line_options())
        if np.isfinite(heads).any():
            largest = max(largest, float(np.nanmax(heads)))
    _set_depth_axis(axes, found, 1)
    return largest


def _uniform_reference(found: ModelComparison) -> tuple[float, str] | None:
    """Return the distance of uniform attention if it is the same for both models."""
    first, second = (side.profile for side in found.sides)
    same = (first.grid, first.size) == (second.grid, second.size)
    return (first.everywhere, "uniform attention") if same else None


def _plot_distance(axes: "Axes", found: ModelComparison) -> None:
    largest = _plot_heads(axes, found, found.comparable_distance)
    common = _uniform_reference(found)
    largest = largest if common is None else max(largest, common[0])
    axes.set_ylim(0, 1.06 * largest or 1.0)


def _plot_diversity(axes: "Axes", found: ModelComparison) -> None:
    largest = _plot_heads(axes, found, lambda side: side.profile.diversity)
    axes.set_ylim(0, min(1.02, 1.08 * largest) if largest > 0.05 else 0.05)
    alone = [side.letter for side in found.sides if side.heads == 1]
    if alone:
        note = f"{' and '.join(alone)}: only one head"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, fontsize=9, color=MUTED, ha="center", va="center")


def _plot_mutual_information(axes: "Axes", found: ModelComparison) -> None:
    largest = _plot_heads(axes, found, lambda side: side.profile.mutual)
    axes.set_ylim(0, min(1.02, 1.08 * largest) if largest > 0.01 else 0.01)


def _plot_band(axes: "Axes", across: np.ndarray, values: np.ndarray, around: np.ndarray, style: ModelStyle) -> None:
    """Plot a curve with a band, [n, 2]."""
    axes.fill_between(across, around[:, 0], around[:, 1], color=style.colour, alpha=0.13, linewidth=0)
    axes.plot(across, values, **style.line_options())


def _plot_high_frequencies(axes: "Axes", found: ModelComparison) -> None:
    for side, style in zip(found.sides, MODEL_STYLES, strict=True):
        spread = side.profile.spectrum_spread[:, -1]
        around = np.stack((side.high_frequency - spread, side.high_frequency + spread), 1)
        _plot_band(axes, _layer_coordinates(found, side, 0), side.high_frequency, around, style)
    _set_depth_axis(axes, found, 0)


def _format_highest_frequency(found: ModelComparison) -> str:
    """Return the name of the highest frequency."""
    highest = {round(float(side.profile.frequencies[-1]), 2) for side in found.sides}
    return "frequency π" if highest == {1.0} else "the highest frequency"


def _plot_spectrum(axes: "Axes", found: ModelComparison) -> None:
    for side, style in zip(found.sides, MODEL_STYLES, strict=True):
        last, spread = side.profile.spectrum[-1], side.profile.spectrum_spread[-1]
        _plot_band(axes, side.profile.frequencies, last, np.stack((last - spread, last + spread), 1), style)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼ π", "½ π", "¾ π", "π"])
    axes.set_xlabel("frequency per patch")


def _plot_probe(axes: "Axes", found: ModelComparison) -> None:
    for side, style in zip(found.sides, MODEL_STYLES, strict=True):
        assert side.probe is not None
        _plot_band(axes, _layer_coordinates(found, side, 0), 100 * side.probe.top1, 100 * side.probe.intervals, style)
    _set_depth_axis(axes, found, 0)
    most = max(float(side.probe.intervals.max()) for side in found.sides if side.probe is not None)
    axes.set_ylim(0, min(102.0, 106 * most))

"""Comparison of two models as a page and as text for the terminal."""

from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np

from vitrail.analysis.comparison import PROBE_FEATURES, ModelComparison, ModelResult
from vitrail.analysis.figures.comparison import MeasurePanel
from vitrail.analysis.page.data import encode_data_uri
from vitrail.reports.document import render_document
from vitrail.reports.html import Markup, clean_text, h, isolate, render_table
from vitrail.utils.text import format_image_count

EMPTY_CELL = "·"
# Name, unit, values by layer, first layer, format.
TableColumn = tuple[str, str, Callable[[ModelResult], np.ndarray], int, str]


def build_columns(comparison: ModelComparison) -> list[TableColumn]:
    """Return the columns of the table."""
    unit, number_format = ("px", ".0f") if comparison.has_same_size else ("% of width", ".1f")
    columns: list[TableColumn] = [
        ("distance", unit, lambda side: comparison.comparable_distance(side).mean(1), 1, number_format),
        ("diversity", "heads", lambda side: side.profile.diversity.mean(1), 1, ".3f"),
        ("mutual inf.", "query, key", lambda side: side.profile.mutual.mean(1), 1, ".3f"),
        ("high freq.", "Δ log", lambda side: side.high_frequency, 0, ".2f"),
    ]
    if probes := {side.letter: side.probe.top1 for side in comparison.sides if side.probe}:
        columns.append(("probe", "top-1 %", lambda side: 100 * probes[side.letter], 0, ".1f"))
    return columns


def build_rows(comparison: ModelComparison) -> list[list[str]]:
    """Return a row per depth that one of the models has, with a cell of A and one of B per statistic."""
    rows = []
    for depth in sorted({Fraction(layer, side.depth) for side in comparison.sides for layer in range(side.depth + 1)}):
        cells = [f"{100 * float(depth):.0f} %"]
        if comparison.has_same_depth:
            cells = [f"{int(depth * comparison.sides[0].depth)}"]
        for _, _, values, first, number_format in build_columns(comparison):
            for side in comparison.sides:
                layer = depth * side.depth
                exists = layer.denominator == 1 and layer >= first
                value = float(values(side)[int(layer) - first]) if exists else float("nan")
                cells.append(f"{value:{number_format}}".replace("-", "−") if np.isfinite(value) else EMPTY_CELL)
        rows.append(cells)
    return rows


def format_model_comparison(comparison: ModelComparison) -> list[str]:
    """Return the models, the table and the notes as lines."""
    columns, width = build_columns(comparison), 7
    lines = [format_model(side) for side in comparison.sides] + [""]
    first = "layer" if comparison.has_same_depth else "depth"
    lines.append(" " * 6 + "".join(f"{name:>{2 * width}}" for name, *_ in columns))
    lines.append(" " * 6 + "".join(f"{unit:>{2 * width}}" for _, unit, *_ in columns))
    lines.append(f"{first:>6}" + "".join(f"{letter:>{width}}" for letter in ("A", "B")) * len(columns))
    lines = [line.rstrip() for line in lines]
    for row in build_rows(comparison):
        lines.append(f"{row[0]:>6}" + "".join(f"{cell:>{width}}" for cell in row[1:]))
    return [*lines, "", *format_notes(comparison)]


def format_model(result: ModelResult) -> str:
    """Return a model in one line."""
    height, width = result.profile.size
    heads = f"{result.heads} head{'' if result.heads == 1 else 's'}"
    layers = f"{result.depth} layer{'' if result.depth == 1 else 's'}"
    return f"{result.letter}  {clean_text(result.name)}: {layers} of {heads}, {width}×{height} pixels"


def format_notes(comparison: ModelComparison) -> list[str]:
    """Return notes on the data and the probes."""
    images = format_image_count(comparison.image_count)
    lines = [f"attention and frequencies over {images} of {clean_text(comparison.source)}"]
    probe = comparison.sides[0].probe
    if probe is None:
        return [*lines, f"no probe: {clean_text(comparison.no_probe_reason)}", *map(clean_text, comparison.notes)]
    counts = f"{probe.classes} classes, {probe.train_images:,} training and {probe.test_images:,} test images"
    lines.append(f"linear probes on the {PROBE_FEATURES} of each layer: {counts}")
    for side in comparison.sides:
        assert side.probe is not None
        best = int(side.probe.top1.argmax())
        low, high = 100 * side.probe.intervals[best]
        accuracy = f"{100 * side.probe.top1[best]:.1f} % ({low:.1f}–{high:.1f})"
        lines.append(f"best layer of {side.letter}: {best} of {side.depth}, top-1 accuracy {accuracy}")
    lines.append(f"accuracy of always predicting the most frequent class: {100 * probe.majority_accuracy:.1f} %")
    return [*lines, *map(clean_text, comparison.notes)]


FigureFiles = Mapping[str, bytes]  # PNG by file
DISTANCE_NOTE = (
    "Each small mark is a head: the mean distance between a query patch and the patches it attends to. The lines are the means "
    "over heads, the dotted line is uniform attention. Park et al. found that later layers of contrastive models attend "
    "globally, those of masked image models locally."
)
DIVERSITY_NOTE = (
    "Head diversity: 0 if all heads have the same attention. Mutual information of query and key: 0 if all queries have the "
    "same attention. Near 0, attention has collapsed to one map."
)
FREQUENCIES_NOTE = (
    "Log amplitude of the highest frequency of the token maps relative to frequency 0, by layer; then all frequencies after the "
    "last layer. Higher values mean more texture, lower values smoother maps and more shape. Bands are one standard deviation "
    "over images."
)
PROBE_NOTE = (
    f"Accuracy of a linear classifier on the {PROBE_FEATURES} of each layer. Bands are Wilson's 95 % intervals for the test "
    "images; they do not include the variance over training samples."
)
COMPARISON_SECTIONS = (
    ("distance", "Distance", "Mean attention distance", DISTANCE_NOTE, ("distance.png",)),
    ("heads", "Diversity", "Diversity of heads and queries", DIVERSITY_NOTE, ("diversity.png", "mutual.png")),
    ("spectrum", "Frequencies", "Token frequencies", FREQUENCIES_NOTE, ("frequencies.png", "spectrum.png")),
    ("probe", "Probe", "Linear probe accuracy", PROBE_NOTE, ("probe.png",)),
)


def render_model_comparison_page(comparison: ModelComparison, panels: list[MeasurePanel], pngs: FigureFiles) -> str:
    """Return the page."""
    first, second = (side.name for side in comparison.sides)
    titles = {panel.file: f"{panel.title}: {panel.unit}" for panel in panels}
    top = [
        h("p", [h("span", fact) for fact in ("comparison", *format_notes(comparison)[:1])], class_="kicker"),
        h("h1", isolate(first), " and ", isolate(second)),
        h("p", [h("span", format_model(side), style="display:block") for side in comparison.sides], class_="lead"),
    ]
    parts = []
    for key, short, title, note, files in COMPARISON_SECTIONS:
        figures = [_embed_figure(pngs[file], titles[file]) for file in files if file in pngs]
        if not figures:
            note = f"Skipped: {comparison.no_probe_reason}."
        charts = h("div", figures, class_="charts") if figures else None
        parts.append((key, short, title, [h("p", note), charts]))
    files = "The values of all heads are in comparison.json and comparison.npz beside this page."
    notes = [h("p", line, class_="note") for line in (*format_notes(comparison), files)]
    parts.append(("numbers", "Numbers", "Values by layer", [_render_numbers(comparison), *notes]))
    return render_document(f"{first} and {second} by layer", f"{first} {second}", top, parts, "the models’ names")


def _embed_figure(png: bytes, title: str) -> Markup:
    image = h("img", src=encode_data_uri(png), alt=title, style="display:block;width:100%;height:auto")
    return h("figure", image, class_="chart", style="background:#fff;padding:.4rem;max-width:34rem")


def _render_numbers(comparison: ModelComparison) -> Markup:
    """Return the means over heads and the probe accuracies as a table."""
    head = ["layer" if comparison.has_same_depth else "depth"]
    head += [f"{title} {side.letter}" for title, *_ in build_columns(comparison) for side in comparison.sides]
    return render_table(head, [*build_rows(comparison)], caption="Both models by layer", numeric_from=1)

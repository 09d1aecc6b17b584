"""Report sections on predicted numbers: errors of each target, predicted against true values, and the worst images.

n images, M targets.
"""

from typing import Any

import numpy as np

from vitrail.metrics.regression import find_largest_errors
from vitrail.reports.charts.canvas import AxisScale, make_scale
from vitrail.reports.charts.lines import (
    render_barred,
    render_chart_grid,
    render_dot,
    render_grid,
    render_plot,
    render_tooltip_strip,
)
from vitrail.reports.document import PageSection
from vitrail.reports.html import Markup, h, isolate, join_markup, render_table
from vitrail.reports.predictions import MAX_CARDS, embed_image, label_cell
from vitrail.reports.run import EvaluatedNumbers
from vitrail.utils.scores import format_score, format_score_interval
from vitrail.utils.text import format_count, format_number, is_interval

MAX_CHARTS = 12  # targets whose values are drawn
MAX_POINTS = 1000  # images of a scatter plot, evenly spaced
MAX_CARD_TARGETS = 4
MAX_BINS = 25


def build_number_sections(evaluation: EvaluatedNumbers, labels: list[str]) -> list[PageSection]:
    """Return the sections of errors, of predicted against true values, and of the worst images."""
    targets = [render_targets(evaluation, labels)] if len(labels) > 1 else []  # of one, the metrics are above
    return [
        ("targets", "Targets", f"Results of each target, {evaluation.split}", targets),
        ("values", "Values", "Predicted and true values", render_values(evaluation, labels)),
        (
            "mistakes",
            f"Worst {evaluation.media}s",
            f"{evaluation.media.capitalize()}s with the largest errors",
            render_worst_images(evaluation, labels),
        ),
    ]


def render_targets(evaluation: EvaluatedNumbers, labels: list[str]) -> Markup:
    """Return a table of the targets: the errors, and beside them what a model that always predicts the mean would have."""
    metrics, rows = evaluation.metrics, []
    spread = evaluation.targets.std(0)
    for k, label in enumerate(labels):
        r2 = metrics["target_r2"][k]
        ends = (metrics.get("target_r2_interval") or [None] * len(labels))[k]
        clipped = (max(0.0, ends[0]), max(0.0, ends[1])) if is_interval(ends) else None
        shown = format_score("r2", r2), -np.inf if r2 is None else r2
        bar = (render_barred(max(0.0, r2), shown[0], 1, clipped), r2) if r2 is not None else shown
        interval = format_score_interval("r2", ends) or "–", ends[0] if is_interval(ends) else -np.inf
        errors = [_error_cells(metrics, name, k) for name in ("mae", "rmse")]
        rows.append([label_cell(label), bar, interval, *errors[0], *errors[1], _number_cell(float(spread[k]))])
    percent = f"95{chr(160)}%"
    head = ["target", "R²", percent, "MAE", percent, "RMSE", percent, "std of the target"]
    return render_table(head, rows, caption="Errors of each target", numeric_from=1, sortable=True)


def _number_cell(value: float) -> tuple[str, float]:
    return format_number(value, 4), value


def _error_cells(metrics: dict[str, Any], name: str, k: int) -> list[tuple[str, float]]:
    """Return an error and its interval."""
    value, ends = metrics[f"target_{name}"][k], (metrics.get(f"target_{name}_interval") or {k: None})[k]
    low_high = "–".join(format_number(end, 4) for end in ends) if is_interval(ends) else "–"
    return [_number_cell(value), (low_high, ends[0] if is_interval(ends) else value)]


def render_values(evaluation: EvaluatedNumbers, labels: list[str]) -> list[Markup | None]:
    """Return a scatter plot and a histogram of the errors of each target."""
    charts: list[Markup | None] = []
    for k, label in enumerate(labels[:MAX_CHARTS]):
        predicted, true = evaluation.predicted[:, k].astype(np.float64), evaluation.targets[:, k]
        charts += [render_scatter(label, predicted, true), render_errors(label, predicted - true)]
    more = f"The first {MAX_CHARTS} of {len(labels)} targets are drawn."
    return [render_chart_grid(charts), h("p", more, class_="note") if len(labels) > MAX_CHARTS else None]


def render_scatter(label: str, predicted: np.ndarray, true: np.ndarray) -> Markup:
    """Return the predicted over the true values; points on the diagonal are exact."""
    scale = make_scale([*predicted.tolist(), *true.tolist()], tick_count=5)
    shown = np.linspace(0, len(true) - 1, min(MAX_POINTS, len(true))).round().astype(int)
    lines = "".join(f"M{1000 * scale.position(tick):.1f} 0V1000" for tick in scale.ticks)
    shapes = [render_grid(scale), h("path", d=lines, class_="grid"), h("path", d="M0 1000L1000 0", class_="diagonal")]
    for index in shown:
        x, y = scale.position(float(true[index])), scale.position(float(predicted[index]))
        shapes.append(render_dot(x, y, "dot c1 cloud"))
    title = f"{label}: predicted over true"
    count = format_count(len(true))
    description = (
        f"{title}, {count} samples, from {format_number(float(true.min()))} to {format_number(float(true.max()))}"
    )
    plot = render_plot(shapes, scale, scale, format_number, format_number, description, [])
    some = f", {len(shown):,} of them drawn" if len(shown) < len(true) else ""
    below = f"true value; points on the dashed line are exact ({count} samples{some})"
    caption = h("figcaption", h("h3", isolate(label), ": predicted over true"))
    return h("figure", caption, plot, h("p", below, class_="axis"), class_="chart square")


def render_errors(label: str, errors: np.ndarray) -> Markup:
    """Return a histogram of the errors, predicted minus true."""
    bins = int(np.clip(np.sqrt(len(errors)) * 1.5, 5, MAX_BINS))
    furthest = float(np.abs(errors).max()) or 1.0
    counts, edges = np.histogram(errors, bins=bins | 1, range=(-furthest, furthest))  # odd: a bin around zero
    x_scale = AxisScale(-furthest, furthest, make_scale([-furthest, furthest], tick_count=4, tight=True).ticks)
    y_scale = make_scale([0.0, float(counts.max())], tick_count=4, integer=True)
    shapes, tooltips = [render_grid(y_scale)], []
    for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        left, right, top = x_scale.position(low), x_scale.position(high), 1000 * y_scale.position(count)
        box = {"x": f"{1000 * left + 2:.1f}", "width": f"{1000 * (right - left) - 4:.1f}"}
        if count:
            shapes.append(h("rect", **box, y=f"{1000 - top:.1f}", height=f"{top:.1f}", class_="block c1"))
            rows = [h("b", f"{format_number(low)} to {format_number(high)}"), h("span", f"{count:,} samples")]
            tooltips.append(render_tooltip_strip(left, right, (left + right) / 2, rows))
    shapes.append(h("path", d="M500 0V1000", class_="diagonal"))
    mean = float(errors.mean())
    description = f"Errors of {label}: mean {format_number(mean)}, largest {format_number(furthest)}"
    plot = render_plot(shapes, x_scale, y_scale, format_number, format_number, description, tooltips)
    below = f"predicted minus true, number of samples; mean {format_number(mean)}".replace("-", "−")
    caption = h("figcaption", h("h3", isolate(label), ": errors"))
    return h("figure", caption, plot, h("p", below, class_="axis"), class_="chart square")


def render_worst_images(evaluation: EvaluatedNumbers, labels: list[str]) -> list[Markup]:
    """Return cards of the images with the largest errors: image, predicted and true numbers."""
    shown: list[int] = find_largest_errors(evaluation.predicted, evaluation.targets, MAX_CARDS).tolist()
    has_images = any(index in evaluation.images for index in shown)
    unit = ", in units of each target’s standard deviation" if len(labels) > 1 else ""
    note = f"The {len(shown)} largest of {len(evaluation):,}{unit}."
    cards = [_render_card(evaluation, index, labels, has_images) for index in shown]
    return [h("p", note), h("div", cards, class_="cards" if has_images else "cards bare")]


def _render_card(evaluation: EvaluatedNumbers, index: int, labels: list[str], with_image: bool) -> Markup:
    file, frame = evaluation.image_name(index), None
    if with_image:
        image = embed_image(evaluation.images.get(index), f"The {evaluation.media} {file}")
        frame = h("div", image or h("span", "image not stored", class_="lacking"), class_="frame")
    lines = []
    for k, label in enumerate(labels[:MAX_CARD_TARGETS]):
        predicted, true = float(evaluation.predicted[index, k]), float(evaluation.targets[index, k])
        if len(labels) > 1:
            values = f"{format_number(predicted, 4)}, true {format_number(true, 4)}"
            lines.append(h("p", h("span", isolate(label)), h("b", values), class_="said"))
        else:
            error = f"{predicted - true:+.3g}".replace("-", "−")
            lines.append(
                h("p", h("span", "predicted"), h("b", format_number(predicted, 4)), h("i", error), class_="said")
            )
            lines.append(h("p", h("span", "true"), h("b", format_number(true, 4)), class_="is"))
    if len(labels) > MAX_CARD_TARGETS:
        lines.append(h("p", f"… and {len(labels) - MAX_CARD_TARGETS} more targets"))
    return h("figure", frame, h("figcaption", join_markup(lines), h("p", isolate(file), class_="file")), class_="card")

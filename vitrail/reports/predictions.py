"""Report sections on the predictions of a split: per-class results, confusion, calibration, most confident errors."""

import base64
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.metrics import accuracy, find_confident_mistakes, find_worst_label, multilabel
from vitrail.metrics.calibration import ReliabilityBin, compute_reliability
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.multilabel import sigmoid
from vitrail.reports.charts.canvas import AxisScale
from vitrail.reports.charts.lines import render_barred, render_grid, render_plot, render_tooltip_strip
from vitrail.reports.document import PageSection
from vitrail.reports.html import Markup, h, isolate, join_markup, render_table
from vitrail.reports.run import Evaluated, EvaluatedSplit, RunDirectory
from vitrail.utils.text import format_calibration, format_count, format_interval, format_percent

MAX_OPEN_ROWS = 40  # rows of a table that is not collapsed
WEAKEST_SHOWN = 20
MAX_MATRIX_CLASSES = 30
MAX_CONFUSED_PAIRS = 20
MIN_BIN_COUNT = 10  # bins with fewer samples are drawn pale
UNIT_SCALE = AxisScale(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))
MAX_CARDS = 24
BROWSER_FORMATS = ("JPEG", "PNG", "WEBP")
PIXELATED_SIZE = 48  # pixels: images up to this size are enlarged without smoothing


def build_class_sections(evaluation: EvaluatedSplit, labels: list[str], title: str) -> list[PageSection]:
    """Return the section of per-class results and, for single-label data with several classes, the confusion section."""
    sections: list[PageSection] = [("classes", "Classes", title, render_class_results(evaluation, labels))]
    if not evaluation.is_multilabel and len(labels) > 1:
        sections.append(("confusion", "Confusion", "Confusion matrix", render_confusion(evaluation, labels)))
    return sections


def build_mistakes_section(evaluation: EvaluatedSplit, labels: list[str]) -> PageSection:
    return "mistakes", "Errors", "Most confident errors", render_mistakes(evaluation, labels)


def render_class_results(evaluation: EvaluatedSplit, labels: list[str]) -> list[Markup]:
    """Return a table of the classes, lowest recall first; with very many classes, the lowest ones and all in a fold-out.

    Classes without samples that were never predicted are left out.
    """
    rows = _multilabel_rows(evaluation, labels) if evaluation.is_multilabel else _single_label_rows(evaluation, labels)
    head = ["class", f"{evaluation.media}s", "recall", f"95{chr(160)}%", "precision", "F1"]
    if evaluation.is_multilabel:
        head = ["class", f"{evaluation.media}s", "average precision", "precision", "recall", "F1"]
    table = render_table(head, rows, caption="Results of each class", numeric_from=1, sortable=True)
    if len(rows) <= MAX_OPEN_ROWS:
        return [table]
    return [
        h("h3", f"The {WEAKEST_SHOWN} weakest of {len(rows):,}"),
        render_table(head, rows[:WEAKEST_SHOWN], caption="The weakest classes", numeric_from=1, sortable=True),
        h("details", h("summary", f"All {len(rows):,} classes"), table),
    ]


def _single_label_rows(evaluation: EvaluatedSplit, labels: list[str]) -> list[list]:
    metrics = accuracy.compute_class_metrics(evaluation.predictions)
    rows = []
    for k in _sort_classes(metrics, "recall"):
        support, correct = int(metrics["support"][k]), int(metrics["right"][k])
        interval = wilson_interval(correct, support) if support else None
        recall = share_cell(metrics["recall"][k], interval, bar=interval is not None)
        ends = (format_interval(interval, 0), interval[0]) if interval else ("–", -1)
        shares = [share_cell(metrics[key][k]) for key in ("precision", "f1")]
        rows.append([label_cell(labels[k]), (format_count(support), support), recall, ends, *shares])
    return rows


def _multilabel_rows(evaluation: EvaluatedSplit, labels: list[str]) -> list[list]:
    metrics = multilabel.compute_label_metrics(evaluation.logits, evaluation.targets)
    rows = []
    for k in _sort_classes(metrics, "average_precision"):
        support, precision = int(metrics["support"][k]), share_cell(metrics["average_precision"][k], bar=True)
        shares = [share_cell(metrics[key][k]) for key in ("precision", "recall", "f1")]
        rows.append([label_cell(labels[k]), (format_count(support), support), precision, *shares])
    return rows


def _sort_classes(metrics: dict[str, np.ndarray], key: str) -> np.ndarray:
    """Return the classes that occur or were predicted, those with the lowest value first."""
    order = np.lexsort((-metrics["support"], metrics[key]))  # NaN sorts last
    return order[(metrics["support"] + metrics["said"])[order] > 0]


def label_cell(label: str) -> tuple[Markup, str]:
    """Return the cell of a class name, and the value to sort by."""
    return isolate(label), label


def share_cell(value: Any, interval: tuple[float, float] | None = None, bar: bool = False) -> tuple[str, float]:
    """Return the cell of a fraction as a percentage, with a bar if wanted, and the value to sort by; NaN is a dash."""
    if np.isnan(value):
        return "–", -1.0
    text, share = format_percent(float(value)), float(value)
    return (render_barred(share, text, 1, interval) if bar else text), share


def render_confusion(evaluation: EvaluatedSplit, labels: list[str]) -> list[Markup]:
    """Return the confusion matrix, or with many classes the pairs that are confused most often."""
    predictions, unit = evaluation.predictions, f"{evaluation.media.capitalize()}s"
    pairs = accuracy.find_confused_pairs(predictions, MAX_CONFUSED_PAIRS)
    if predictions.classes <= MAX_MATRIX_CLASSES:
        worst = []
        if pairs and predictions.classes > 2 and pairs[0][2] > 1:
            truth, predicted, count = pairs[0]
            names = isolate(labels[truth]), " predicted as ", isolate(labels[predicted])
            worst = [h("p", "Most frequent confusion: ", *names, f", {count:,}×.")]
        return [*worst, render_confusion_matrix(accuracy.confusion_matrix(predictions), labels, unit)]
    if not pairs:
        return [h("p", f"No {evaluation.media} was assigned to a wrong class.")]
    support = accuracy.compute_class_metrics(predictions)["support"]
    rows = []
    for truth, predicted, count in pairs:
        share = count / support[truth]
        cells = [(format_count(count), count), (format_percent(share, 0), share)]
        rows.append([label_cell(labels[truth]), label_cell(labels[predicted]), *cells])
    head = ["true class", "predicted class", unit.lower(), "share of the class"]
    note = f"A matrix of {predictions.classes:,} classes is not legible; these are the most frequent confusions."
    return [
        h("p", note),
        render_table(head, rows, caption="Classes confused most often", numeric_from=2, sortable=True),
    ]


def render_confusion_matrix(
    matrix: np.ndarray, labels: list[str], unit: str = "Images", format_cell: Callable[[int, float], str] | None = None
) -> Markup:
    """Return the matrix with true classes as rows and predicted classes as columns, coloured by the share of the row.

    A cell shows its count, or what `format_cell` makes of the count and its share of the row.
    """
    show = format_cell or (lambda count, share: f"{count:,}")
    totals = np.maximum(1, matrix.sum(1))
    turned = "turned" if max(map(len, labels)) > 3 else None
    columns = [h("th", isolate(label, class_=turned, title=label), scope="col") for label in labels]
    rows = []
    for k, label in enumerate(labels):
        cells = [
            _render_cell(int(n), show(int(n), n / totals[k]), n / totals[k], k == j, label, labels[j])
            for j, n in enumerate(matrix[k])
        ]
        rows.append(h("tr", h("th", isolate(label, title=label), scope="row"), cells))
    table = h(
        "table",
        h("caption", f"{unit} of each true class (rows) by predicted class (columns)", class_="unseen"),
        h("thead", h("tr", h("td", h("span", "true ↓", " ", "predicted →"), class_="corner"), columns)),
        h("tbody", rows),
        class_="matrix roomy" if len(labels) <= 12 else "matrix",
    )
    return h("div", table, class_="wide fit", tabindex="0", role="region", aria_label="Confusion matrix")


def _render_cell(count: int, shown: str, share: float, correct: bool, truth: str, predicted: str) -> Markup:
    if not count:
        return h("td", class_="none")
    depth = 8 + 44 * share**0.6  # per cent of the colour: text on it stays legible
    outcome = "correct" if correct else f"predicted as “{predicted}”"
    title = f"{count:,} of “{truth}” ({100 * share:.0f} %) {outcome}"
    return h("td", shown, class_="hit" if correct else "miss", style=f"--v:{depth:.0f}%", title=title)


def render_calibration(evaluation: EvaluatedSplit, temperature: str = "") -> list[Markup]:
    """Return the reliability diagram with the expected calibration error, its direction and the temperature of the run."""
    metrics, media = evaluation.metrics, evaluation.media
    error, direction = format_percent(metrics["calibration_error"]), format_calibration(metrics)
    direction = f"{direction[:1].upper()}{direction[1:]}. "
    scaled = h("p", f"Temperature: {temperature}.", class_="note") if temperature else None
    if evaluation.is_multilabel:
        bins = compute_reliability(sigmoid(evaluation.logits).ravel(), (evaluation.targets > 0).ravel())
        text = (
            f"Each label of each {media} counts: the predicted probability against the fraction of {media}s that have the "
            f"label. {direction}The expected calibration error is {error}. With perfect calibration, bars end on the dashed line."
        )
        chart = render_reliability_chart(bins, "Label frequency by predicted probability", "label")
        return [h("div", h("div", h("p", text), scaled), chart, class_="beside")]
    text = (
        f"{direction}The expected calibration error is {error}. With perfect calibration, bars end on the dashed line; thin "
        "lines are 95 % intervals."
    )
    bins = compute_reliability(evaluation.predictions.confidence, evaluation.predictions.correct)
    chart = render_reliability_chart(bins, "Accuracy by confidence", media)
    return [h("div", h("div", h("p", text), scaled), chart, class_="beside")]


def render_reliability_chart(bins: list[ReliabilityBin], title: str, unit: str) -> Markup:
    """Return bars of the accuracy per confidence bin with intervals, the diagonal, and below a histogram of the counts."""
    full = [bin for bin in bins if bin.count]
    shapes, tooltips, histogram = [render_grid(UNIT_SCALE)], [], []
    largest = max(bin.count for bin in full)
    for bin in full:
        box = {"x": f"{1000 * bin.low + 6:.1f}", "width": f"{1000 * (bin.high - bin.low) - 12:.1f}"}
        low, high = wilson_interval(round(bin.accuracy * bin.count), bin.count)
        top, css_class = 1000 * bin.accuracy, "block c1" if bin.count >= MIN_BIN_COUNT else "block c1 few"
        shapes.append(h("rect", **box, y=f"{1000 - top:.1f}", height=f"{top:.1f}", class_=css_class))
        middle = 500 * (bin.low + bin.high)
        shapes.append(h("path", d=f"M{middle:.1f} {1000 - 1000 * low:.1f}V{1000 - 1000 * high:.1f}", class_="error"))
        height = 100 * bin.count / largest
        histogram.append(h("rect", **box, y=f"{100 - height:.2f}", height=f"{height:.2f}"))
        rows = [
            h("b", f"confidence {100 * bin.low:.0f}–{format_percent(bin.high, 0)}"),
            h("span", f"{bin.count:,} {unit}{'s' * (bin.count != 1)}"),
            h("span", f"confidence {format_percent(bin.confidence)}, accuracy {format_percent(bin.accuracy)}"),
        ]
        tooltips.append(render_tooltip_strip(bin.low, bin.high, (bin.low + bin.high) / 2, rows))
    shapes.append(h("path", d="M0 1000L1000 0", class_="diagonal"))
    values = "; ".join(
        f"confidence {format_percent(bin.confidence, 0)}, accuracy {format_percent(bin.accuracy, 0)} ({bin.count})"
        for bin in full
    )
    percent = partial(format_percent, digits=0)
    plot = render_plot(shapes, UNIT_SCALE, UNIT_SCALE, percent, percent, f"{title}: {values}", tooltips)
    counts = h("svg", histogram, viewBox="0 0 1000 100", preserveAspectRatio="none", aria_hidden="true")
    return h(
        "figure",
        h("figcaption", h("h3", title)),
        plot,
        h("div", counts, class_="counts"),
        h("p", f"confidence; below, the number of {unit}s", class_="axis"),
        class_="chart square",
    )


def select_evaluation(run: RunDirectory) -> Evaluated | None:
    """Return the split to show errors of: the run's own, unless only another split has stored images."""
    if run.evaluation and run.evaluation.images:
        return run.evaluation
    return next((e for e in run.evaluations.values() if e.images), run.evaluation)


def render_mistakes(evaluation: EvaluatedSplit, labels: list[str]) -> list[Markup]:
    """Return cards of the most confident errors: image, prediction with its probability, and true class."""
    wrong = find_confident_mistakes(evaluation.logits, evaluation.targets, len(evaluation.logits))
    total = f"{format_count(len(evaluation.targets))} {evaluation.split} {evaluation.media}s"
    if not len(wrong):
        return [h("p", f"None: all {total} are classified correctly.")]
    shown = wrong[:MAX_CARDS]
    has_images = any(int(index) in evaluation.images for index in shown)
    more = len(shown) < len(wrong)
    which = f"The {len(shown)} most confident of {len(wrong):,}" if more else f"All {len(wrong)}"
    cards = [_render_card(evaluation, int(index), labels, has_images) for index in shown]
    return [h("p", f"{which}, of {total}."), h("div", cards, class_="cards" if has_images else "cards bare")]


def _render_card(evaluation: EvaluatedSplit, index: int, labels: list[str], with_image: bool) -> Markup:
    caption = _multilabel_caption if evaluation.is_multilabel else _single_label_caption
    file, frame = evaluation.image_name(index), None
    if with_image:
        image = embed_image(evaluation.images.get(index), f"The {evaluation.media} {file}")
        frame = h("div", image or h("span", "image not stored", class_="lacking"), class_="frame")
    words = caption(evaluation, index, labels)
    return h("figure", frame, h("figcaption", words, h("p", isolate(file), class_="file")), class_="card")


def _single_label_caption(evaluation: EvaluatedSplit, index: int, labels: list[str]) -> list[Markup]:
    predictions = evaluation.predictions
    lines = [
        ("predicted", predictions.predicted[index], predictions.confidence[index], "said"),
        ("true", predictions.targets[index], np.exp(-predictions.loss[index]), "is"),
    ]
    return [
        h("p", h("span", word), h("b", isolate(labels[int(k)])), h("i", format_percent(float(p))), class_=css_class)
        for word, k, p, css_class in lines
    ]


def _multilabel_caption(evaluation: EvaluatedSplit, index: int, labels: list[str]) -> list[Markup]:
    logits, targets = evaluation.logits[index], evaluation.targets[index]
    worst, probability = find_worst_label(logits, targets)
    word = "missed" if targets[worst] else "predicted"
    extra = [k for k in np.flatnonzero(sigmoid(logits) >= 0.5) if not targets[k] and k != worst]
    name = h("b", isolate(labels[worst]), f" and {len(extra)} more" if extra else "")
    true_labels = join_markup([isolate(labels[k]) for k in np.flatnonzero(targets)], ", ")
    return [
        h("p", h("span", word), name, h("i", format_percent(probability)), class_="said"),
        h("p", h("span", "true"), h("b", true_labels or "none"), class_="is"),
    ]


def embed_image(image: Path | bytes | None, alt: str) -> Markup | None:
    """Return a small image as a data URI, or None if it is missing, unreadable or of a format that browsers do not show."""
    if image is None:
        return None
    try:
        data = image if isinstance(image, bytes) else image.read_bytes()
        with Image.open(BytesIO(data)) as opened:
            kind, size = opened.format, opened.size
    except (OSError, ValueError):  # the card shows that there is no image
        return None
    if kind not in BROWSER_FORMATS:
        return None
    source = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode('ascii')}"
    return h("img", src=source, alt=alt, class_="few-pixels" if max(size) <= PIXELATED_SIZE else None)

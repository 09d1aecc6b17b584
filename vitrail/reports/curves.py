"""Training curves of a run: loss, score, learning rate, gradient norm, and the signals of self-supervised training."""

from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.charts.lines import ChartLine, extract_points, render_line_chart
from vitrail.reports.html import Markup
from vitrail.reports.run import MethodText, RunDirectory
from vitrail.utils.scores import METRICS, format_score
from vitrail.utils.text import format_number, format_percent, is_number

SUPERVISED_LOSS_NOTE = "The training loss is measured with augmentation, so it may be above the validation loss."
SPREAD_NOTE = (
    "0: all samples have the same feature direction; 1: directions are spread evenly. It often falls at first; a fall to a "
    "small fraction of its start is bad."
)
RANK_NOTE = (
    "Number of directions in which the features differ. It often falls at first; rising later is good, a fall to "
    "a few is bad."
)
ENTROPY_NOTE = (
    "Mean entropy of the teacher’s output for one image, over log K. It rises at first and should fall then; staying at 1, a "
    "uniform output, is bad."
)
DIVERSITY_NOTE = (
    "Entropy of the teacher’s mean output over all images, over log K. High is good; near 0 every image gets the same "
    "output. Diversity minus entropy is the information that outputs hold about images."
)
SIGNAL_CHARTS = {  # title, colour, interpretation
    "spread": ("Feature spread", 1, SPREAD_NOTE),
    "rank": ("Effective rank", 3, RANK_NOTE),
    "teacher_entropy": ("Teacher entropy", 5, ENTROPY_NOTE),
    "teacher_diversity": ("Teacher diversity", 4, DIVERSITY_NOTE),
}


def describe_method(run: RunDirectory) -> MethodText:
    """Return the texts that the run's objective stored; runs of an earlier version have only the key of their method."""
    return MethodText(**run.metadata.get("method_text", {"name": run.method}))


def render_training_charts(run: RunDirectory) -> list[Markup | None]:
    """Return the charts of a supervised run; None where its logs have no data."""
    return [_render_loss_chart(run, SUPERVISED_LOSS_NOTE), render_score_chart(run), *_render_optimizer_charts(run)]


def render_signal_charts(run: RunDirectory) -> list[Markup | None]:
    """Return the charts of a self-supervised run; None where its logs have no data."""
    loss = _render_loss_chart(run, describe_method(run).loss_note)
    signals = [_render_signal_chart(run, key) for key in SIGNAL_CHARTS]
    return [_render_knn_chart(run), loss, *signals, *_render_optimizer_charts(run)]


def _render_loss_chart(run: RunDirectory, note: str) -> Markup | None:
    lines = [
        ChartLine("training", extract_points(run.training, "epoch", "loss"), 2),
        ChartLine("validation", extract_points(run.validation, "epoch", "loss"), 1, dots=True),
    ]
    return render_line_chart("Loss", lines, note=note)


def _render_optimizer_charts(run: RunDirectory) -> list[Markup | None]:
    lr, norm = (extract_points(run.training, "epoch", key) for key in ("lr", "grad_norm"))
    return [
        render_line_chart("Learning rate", [ChartLine("learning rate", lr, 3)]),
        render_line_chart("Gradient norm", [ChartLine("norm", norm, 5)]),
    ]


def render_score_chart(run: RunDirectory) -> Markup | None:
    """Return the validation score of each epoch with its 95 % interval, the best epoch ringed."""
    points = extract_points(run.validation, "epoch", run.score_name)
    if not points:
        return None
    images, band = count_validation_images(run), []
    if images and run.score_name == "top1":
        band = _interval_band(points, images)
    best = max(points, key=lambda point: point[1])
    metric = METRICS[run.score_name]
    return render_line_chart(
        f"{metric.title}, validation",
        [ChartLine(metric.title, points, 1, dots=True, band=band)],
        format_y=format_percent_tick if metric.is_share else format_number,
        mark=(*best, f"best: {format_score(run.score_name, best[1])} after epoch {best[0]:,.0f}"),
        note=f"The {'band' if len(band) > 1 else 'line'} is the 95 % interval for {images:,} {run.media}s."
        if band
        else "",
    )


def _interval_band(points: list[tuple[float, float]], images: float) -> list[tuple[float, float, float]]:
    return [(x, *wilson_interval(y * images, images)) for x, y in points if 0 <= y <= 1]


def format_percent_tick(value: float) -> str:
    """Return a percentage with one decimal, or none if it is a whole number."""
    return format_percent(value, 0 if abs(100 * value - round(100 * value)) < 1e-9 else 1)


def count_validation_images(run: RunDirectory) -> int | None:
    """Return the number of validation images, or None if it is unknown."""
    if "validation" in run.evaluations:
        return len(run.evaluations["validation"])
    images = ((run.get("data", "splits") or {}).get("validation") or {}).get("images")
    return images if isinstance(images, int) and images > 0 else None


def _render_signal_chart(run: RunDirectory, key: str) -> Markup | None:
    title, colour, note = SIGNAL_CHARTS[key]
    points = extract_points(run.validation, "epoch", key)
    lines = [ChartLine(title.lower(), points, colour, dots=True)]
    return render_line_chart(title, lines, note=note, mark=find_collapse_point(run, points))


def find_collapse_point(run: RunDirectory, points: list[tuple[float, float]]) -> tuple[float, float, str] | None:
    """Return the point at which a collapse was detected, with its label."""
    if not run.collapse:
        return None
    epochs = [row.get("epoch") for row in run.validation if row.get("step") == run.collapse.get("step")]
    return next(((*point, "collapse detected") for point in points if point[0] in epochs), None)


def _render_knn_chart(run: RunDirectory) -> Markup | None:
    """Return the k-NN accuracy over the run, with those of raw pixels and of the untrained model as reference lines."""
    points = extract_points(run.validation, "epoch", "knn")
    if not points:
        return None
    summary = run.summary or {}
    images, first, last = summary.get("images"), points[0][0], points[-1][0]
    band = _interval_band(points, images) if is_number(images) and images > 0 else []
    levels = [("raw pixels", summary.get("knn_pixels"), 2, "7 4"), ("untrained", summary.get("knn_random"), 6, "2 4")]
    lines = [
        ChartLine("features", points, 1, dots=True, band=band),
        *(
            ChartLine(label, [(first, float(level)), (last, float(level))], colour, dashes=dashes)
            for label, level, colour, dashes in levels
            if is_number(level)
        ),
    ]
    note = f"Accuracy of a vote of the nearest training {run.media}s. It should rise and exceed the reference lines."
    note += f" The band is the 95 % interval for {images:,} {run.media}s." if len(band) > 1 else ""
    return render_line_chart("k-NN accuracy", lines, format_y=format_percent_tick, note=note)

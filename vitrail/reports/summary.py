"""The top of a run's page: headline, description, tiles and the table of metrics."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from vitrail.reports.charts.lines import render_bar
from vitrail.reports.curves import describe_method
from vitrail.reports.document import render_heading
from vitrail.reports.html import Markup, h, isolate, join_markup, render_table
from vitrail.reports.kept import describe_weights
from vitrail.reports.run import RunDirectory
from vitrail.utils import text
from vitrail.utils.scores import METRICS, SCORES, find_score, format_score, format_score_interval

DIRECTIONS = ("over-confident", "under-confident")
MULTILABEL_TOP1_LABEL = "Top-1 precision"  # fraction of images whose highest logit is one of their labels
NOTHING_MEASURED = "not finished, no metrics yet"


def get_data_name(run: RunDirectory) -> str:
    """Return the name of the data: the last part of its path."""
    where = run.get("data", "where")
    return (PurePath(str(where)).name or str(where)) if where else "unknown data"


def describe_run(run: RunDirectory) -> str:
    """Return "Ti/16 fine-tuned on clothing"."""
    model = run.get("model", "name") or "A model"
    if run.is_pretraining:
        with_method = f" with {describe_method(run).name}" if run.method else ""
        return f"{model} pretrained{with_method} on {get_data_name(run)}"
    how = "fine-tuned" if run.get("model", "init") else "trained from scratch"
    return f"{model} {how} on {get_data_name(run)}"


def format_headline(run: RunDirectory) -> str:
    """Return "Ti/16 fine-tuned on clothing: top-1 accuracy 87.4 % (83.5–90.5) on 341 images"."""
    if run.is_pretraining:
        return f"{describe_run(run)}: {format_pretraining_result(run)}"
    if run.is_finished or run.evaluation:
        result = format_result(run.split_metrics(run.split or ""), run.score_name, run.media)
        return f"{describe_run(run)}: {result}" if result else describe_run(run)
    rows = [row for row in run.validation if row.get(run.score_name) is not None]
    if not rows:
        return f"{describe_run(run)}: {NOTHING_MEASURED}"
    score = format_result({run.score_name: rows[-1][run.score_name]}, run.score_name)
    return f"{describe_run(run)}: not finished, {score} after epoch {text.format_count(rows[-1].get('epoch'))}"


def format_result(metrics: dict[str, Any], score_name: str, media: str = "image") -> str:
    """Return "top-1 accuracy 87.4 % (83.5–90.5) on 341 images", or "" without a score."""
    score, images = metrics.get(score_name), metrics.get("images")
    if score is None:
        return ""
    ends = format_score_interval(score_name, metrics.get("interval"))
    result = f"{METRICS[score_name].phrase} {format_score(score_name, score)}" + (f" ({ends})" if ends else "")
    return result + (f" on {text.format_image_count(images, media)}" if images else "")


def format_pretraining_result(run: RunDirectory) -> str:
    """Return "k-NN accuracy 46.2 % (44.8–47.6), raw pixels 35.0 %", or other signals where k-NN was not measured."""
    if run.collapse:
        return f"collapsed at step {text.format_count(run.collapse.get('step'))}"
    last = run.summary or (run.validation[-1] if run.validation else {})
    state = "" if run.is_finished else "not finished, "
    after = "" if run.is_finished or not last else f" after epoch {last.get('epoch', 0):g}"
    if text.is_number(last.get("knn")):
        interval = (
            f" ({text.format_interval(last['knn_interval'])})" if text.is_interval(last.get("knn_interval")) else ""
        )
        pixels = (
            f", raw pixels {text.format_percent(last['knn_pixels'])}" if text.is_number(last.get("knn_pixels")) else ""
        )
        return f"{state}k-NN accuracy {text.format_percent(last['knn'])}{interval}{pixels}{after}"
    names = {"loss": "loss", "rank": "effective rank"}
    parts = [f"{name} {text.format_number(last[key])}" for key, name in names.items() if text.is_number(last.get(key))]
    if not parts:
        return "no metrics" if run.is_finished else NOTHING_MEASURED
    return f"{state}{', '.join(parts)}{after}"


def render_opening(run: RunDirectory) -> list[Markup | None]:
    """Return kicker, headline, description and warnings."""
    started = run.get("started")
    kicker = (run.get("recipe_name"), run.name, text.format_datetime(started) if started else None)
    heading = render_heading(kicker, format_headline(run), render_run_lead(run))
    return [*heading, _render_state(run), _render_problems(run)]


def render_run_lead(run: RunDirectory) -> Markup:
    """Return sentences on the model, the data and the length of training."""
    model, sentences = run.get("model") or {}, []
    if model.get("name"):
        size = model.get("image_size")
        images = f" at {size[0]}×{size[1]} pixels" if isinstance(size, list) and len(size) == 2 else ""
        count = (
            f" with {text.format_large_number(model.get('parameters'))} parameters" if model.get("parameters") else ""
        )
        init = [", initialised from ", isolate(model["init"])] if model.get("init") else [", trained from scratch"]
        sentences.append(join_markup([isolate(model["name"]), count, images, init, "."]))
    splits = run.get("data", "splits")
    if isinstance(splits, dict) and splits:
        purposes = {key: "training" if key == "train" else key for key in splits}
        counts = [
            f"{text.format_count((splits[key] or {}).get('images'))} {purpose}" for key, purpose in purposes.items()
        ]
        labels = run.get("labels")
        classes = f", {len(labels):,} classes" if isinstance(labels, list) and labels else ""
        if run.metadata.get("task") == "captions":
            classes = ""
        if run.metadata.get("task") == "numbers" and isinstance(labels, list) and labels:
            classes = f", learning {', '.join(map(str, labels))}"
        if classes and run.is_pretraining:
            classes += " (labels are used for evaluation only)"
        task = ", multi-label" if run.is_multilabel else ""
        data = [f"{run.media.capitalize()}s of ", isolate(get_data_name(run)), f": {', '.join(counts)}{classes}{task}."]
        sentences.append(join_markup(data))
    summary = run.summary or {}
    if summary.get("steps"):
        stops = {"early": ", stopped early without further improvement", "collapse": ", stopped after a collapse"}
        weights = {"ema": ", EMA weights kept", "best": ", best weights kept"}
        details = stops.get(str(summary.get("stopped")), "") + weights.get(str(summary.get("weights")), "")
        duration = text.format_duration(summary.get("seconds"))
        sentences.append(f"{text.format_count(summary['steps'])} steps in {duration}{details}.")
        if weights := describe_weights(summary):
            kept, others = weights
            name = "not kept" if summary.get("weights") == "best" else "best.safetensors"
            sentences.append(f"model.safetensors: {kept}. {name.capitalize()}: {others}.")
    return join_markup(sentences, " ")


def _render_state(run: RunDirectory) -> Markup | None:
    if run.is_finished:
        return _render_convergence(run.summary or {})
    rows = run.training or run.validation
    last = f" up to step {text.format_count(rows[-1]['step'])}" if rows else ""
    return h("p", h("strong", "This run has not finished."), f" The page shows its results{last}.", class_="notice")


def _render_convergence(summary: dict[str, Any]) -> Markup | None:
    """Return the notice of a training that a time budget cut short, or None."""
    if summary.get("converged") is not False:
        return None
    steps, total = (text.format_count(summary.get(key)) for key in ("steps", "recipe_steps"))
    cut = f" The time budget allowed {steps} of the recipe’s {total} steps, and the loss had not stopped falling."
    return h("p", h("strong", "This training has not converged."), cut, class_="notice")


def _render_problems(run: RunDirectory) -> Markup | None:
    problems = list(run.problems)
    if run.summary and run.evaluation:
        written, computed = run.summary.get(run.score_name), run.evaluation.metrics[run.score_name]
        if text.is_number(written) and text.is_number(computed) and abs(written - computed) > 5e-4:
            shown = [format_score(run.score_name, value, 2) for value in (written, computed)]
            stored = f"{shown[1]} from the stored logits: the latter is shown"
            problems.append(f"{shown[0]} in summary.json, {stored}")
    if not problems:
        return None
    items = h("ul", [h("li", problem) for problem in problems])
    return h("div", h("strong", "Some files of the run could not be read."), items, class_="notice")


def render_run_tiles(run: RunDirectory) -> Markup | None:
    """Return the tiles of the most important metrics."""
    tiles = render_metric_tiles(run.split_metrics(run.split or ""), run.score_name)
    return render_tiles(*tiles, render_time_tile(run.summary or {}, run.media))


def format_run_temperature(run: RunDirectory) -> str:
    """Return the temperature of the run's model, or "" if none was fitted."""
    return text.format_temperature((run.summary or {}).get("calibration"))


def render_tiles(*tiles: Markup | None) -> Markup | None:
    """Return the tiles side by side, or None if there are none."""
    return h("div", tiles, class_="tiles") if any(tiles) else None


def render_time_tile(summary: dict[str, Any], media: str) -> Markup | None:
    """Return the tile of the training time, or None if it is unknown."""
    if not text.is_number(summary.get("seconds")):
        return None
    speed = summary.get("images_per_second")
    note = f"{text.format_number(speed)} {media}s/s" if text.is_number(speed) else ""
    return render_tile("Training time", text.format_duration(summary["seconds"]), None, None, note)


def render_metric_tiles(metrics: dict[str, Any], score: str) -> list[Markup]:
    """Return the tiles of the main metrics, the score first."""
    tiles = []
    for key in (score, *(name for name, metric in METRICS.items() if metric.has_tile)):
        if text.is_number(metrics.get(key)):
            label, is_share = METRICS[key].label, METRICS[key].is_share
            bar = metrics[key] if METRICS[key].has_bar else None
            value = _format_metric(metrics, key, is_share)[0] if not is_share else text.format_percent(metrics[key])
            if key == "calibration_error" and metrics.get("calibration_direction") in DIRECTIONS:
                label += f" ({metrics['calibration_direction']})"
            ends = get_interval(metrics, key)
            shown = _format_metric(metrics, key, is_share)[1] if not is_share else text.format_interval(ends)
            tiles.append(render_tile(label, value, bar, ends, shown=shown))
    return tiles


def get_interval(metrics: dict[str, Any], key: str) -> Any:
    """Return the interval of a metric, or None. `interval` belongs to the score."""
    return metrics.get("interval" if key == find_score(metrics) else f"{key}_interval")


def render_tile(
    label: str, value: str, share: float | None, interval: Any, note: str = "", shown: str | None = None
) -> Markup:
    """Return a tile with a value, its label, and its interval or a note; `shown` is the interval as text."""
    ends = (float(interval[0]), float(interval[1])) if text.is_interval(interval) else None
    under = f"95{text.NO_BREAK_SPACE}%: {shown or text.format_interval(ends)}" if ends else note
    clipped = None if ends is None else (max(0.0, ends[0]), max(0.0, ends[1]))
    bar = None if share is None else render_bar(max(0.0, share), 1, clipped)
    below = h("p", under, class_="under") if under else None
    return h("div", h("p", label, class_="what"), h("p", value, class_="value"), bar, below, class_="tile")


def render_metrics(run: RunDirectory) -> Markup | None:
    """Return the table of all metrics of all evaluated splits, or None."""
    metrics = {split: run.split_metrics(split) for split in ("validation", "test", "train")}
    metrics = {split: values for split, values in metrics.items() if text.is_number(values.get(run.score_name))}
    return render_metric_table(metrics, "Metrics of each split", run.media) if metrics else None


def render_metric_table(metrics_by_column: dict[str, dict[str, Any]], caption: str, media: str) -> Markup:
    """Return a table with a row per metric and two columns, value and interval, per name."""
    columns = list(metrics_by_column.values())
    rows = [
        [f"{media.capitalize()}s", *_flatten((text.format_count(metrics.get("images")), "") for metrics in columns)]
    ]
    for label, pairs in format_metrics(columns):
        rows.append([label, *_flatten((h("b", value), h("span", ends, class_="quiet")) for value, ends in pairs)])
    head = ["", *_flatten((isolate(name), f"95{text.NO_BREAK_SPACE}%") for name in metrics_by_column)]
    return render_table(head, rows, caption=caption, numeric_from=1, fit=True)


def _flatten(pairs: Iterable[Iterable[Any]]) -> list[Any]:
    return [cell for pair in pairs for cell in pair]


def format_metrics(columns: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the label of each metric that was measured, with its value and interval in each column."""
    rows = []
    for key, metric in METRICS.items():
        label, share = metric.label, metric.is_share
        if any(text.is_number(metrics.get(key)) for metrics in columns):
            if key == "top1" and any("map" in metrics for metrics in columns):
                label = MULTILABEL_TOP1_LABEL
            rows.append((label, [_format_metric(metrics, key, share) for metrics in columns]))
    return rows


def _format_metric(metrics: dict[str, Any], key: str, share: bool) -> tuple[str, str]:
    value, interval = metrics.get(key), get_interval(metrics, key)
    if share:
        return text.format_percent(value, 2 if key == "calibration_error" else 1), text.format_interval(interval)
    if key in SCORES:
        return format_score(key, value), format_score_interval(key, interval)
    digits = 4 if key in ("mae", "rmse") else 3
    ends = [text.format_number(end, digits) for end in interval] if text.is_interval(interval) else []
    return text.format_number(value, 4), "–".join(ends)


def render_interval_note(score: str, media: str) -> Markup:
    """Return the note on how the intervals of a run with this score are computed."""
    if score == "miou":
        return h("p", "95 % intervals: bootstrap over images. Means are over the classes that occur.", class_="note")
    if score == "image_to_text_1":
        what = "Recall at k: whether one of the k most similar captions, or images, belongs to it."
        return h("p", f"{what} 95 % intervals: Wilson’s, over different images or captions.", class_="note")
    if score == "r2":
        what = "R² is the share of the targets’ variance that is explained: 1 is perfect, 0 as good as their mean."
        return h("p", f"{what} 95 % intervals: bootstrap over {media}s.", class_="note")
    methods = (
        "accuracies; Wilson’s with an effective sample size for means over classes; "
        f"a bootstrap over {media}s for cross-entropy and calibration error."
    )
    if score == "map":
        methods = (
            f"top-1 precision; a bootstrap over {media}s for all other metrics, which is somewhat narrow for labels with few "
            f"{media}s."
        )
    bias = f"With few {media}s the calibration error is biased upwards: the true value is likely in the lower half."
    return h("p", f"95 % intervals: Wilson’s for {methods} {bias}", class_="note")

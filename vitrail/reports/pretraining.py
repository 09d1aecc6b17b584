"""Report page of self-supervised runs: k-NN accuracy, signals, reconstructions, collapse alarm, commands for next steps."""

import re
import shlex
from pathlib import Path
from typing import Any

from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.charts.lines import render_barred, render_chart_grid
from vitrail.reports.curves import describe_method, render_signal_charts
from vitrail.reports.document import PageSection
from vitrail.reports.facts import render_code
from vitrail.reports.html import Markup, h, join_markup, render_table
from vitrail.reports.predictions import embed_image
from vitrail.reports.run import RunDirectory
from vitrail.reports.summary import render_opening, render_tile, render_tiles, render_time_tile
from vitrail.reports.verdict import format_verdict, read_differences
from vitrail.utils import text

KnnScores = dict[str, tuple[float, tuple[float, float] | None]]  # accuracy and interval by key of KNN_SOURCES

MAX_RECONSTRUCTIONS = 12
RECONSTRUCTION_PARTS = {"original": "image", "masked": "masked input", "reconstructed": "reconstruction"}
KNN_SOURCES = {"knn": "these features", "knn_random": "the untrained model", "knn_pixels": "raw pixels"}
OPTION_PATTERN = re.compile(r"--(?:set \S+=\S+|[a-z-]+ \S+)(?<![.,;:)])")  # in an advice: --set objective.centre=0.9


def render_pretraining_top(run: RunDirectory) -> list[Markup | None]:
    """Return headline, description, collapse alarm, verdict and tiles."""
    return [*render_opening(run), render_collapse_alarm(run), render_verdict(run), render_pretraining_tiles(run)]


def build_pretraining_sections(run: RunDirectory) -> list[PageSection]:
    """Return the sections of a self-supervised run that it has data for."""
    charts = render_chart_grid(render_signal_charts(run))
    return [
        ("results", "Results", "k-NN accuracy of the features", render_knn_table(run)),
        ("signals", "Signals", "Training curves", [charts]),
        ("reconstructions", "Reconstructions", f"Reconstructions of masked {run.media}s", render_reconstructions(run)),
        ("next", "Next", "Next steps", render_next_steps(run)),
    ]


def find_reconstructions(directory: Path) -> list[tuple[int, dict[str, Path]]]:
    """Return number and files by part of each stored reconstruction, in order."""
    files_by_number: dict[int, dict[str, Path]] = {}
    for path in sorted((directory / "evaluation" / "reconstructions").glob("*.png")):
        number, _, part = path.stem.partition("-")
        if part in RECONSTRUCTION_PARTS and number.isdecimal():
            files_by_number.setdefault(int(number), {})[part] = path
    return sorted(files_by_number.items())


def render_reconstructions(run: RunDirectory) -> list[Markup | None]:
    """Return image, masked input and reconstruction of each stored sample, side by side."""
    rows = []
    for number, files in find_reconstructions(run.directory)[:MAX_RECONSTRUCTIONS]:
        figures = []
        for part, title in RECONSTRUCTION_PARTS.items():
            caption = run.media if part == "original" else title
            image = embed_image(files.get(part), f"{run.media.capitalize()} {number}: {caption}")
            frame = h("div", image or h("span", "not stored", class_="lacking"), class_="frame")
            figures.append(h("figure", frame, h("figcaption", caption)))
        rows.append(h("div", figures, class_="triple"))
    return [h("p", describe_method(run).reconstruction_note), h("div", rows, class_="triples")] if rows else []


def collect_knn_scores(summary: dict[str, Any]) -> KnnScores:
    """Return each measured k-NN accuracy with its interval: as stored, else Wilson's for the number of images."""
    images, scores = summary.get("images"), {}
    for key in KNN_SOURCES:
        value, interval = summary.get(key), summary.get(f"{key}_interval")
        if not text.is_number(value):
            continue
        ends = (interval[0], interval[1]) if text.is_interval(interval) else None
        if ends is None and text.is_number(images) and images >= 1 and 0 <= value <= 1:
            ends = wilson_interval(value * images, images)
        scores[key] = (value, ends)
    return scores


def render_knn_table(run: RunDirectory) -> list[Markup | None]:
    """Return the k-NN accuracies as a table with bars, and a comparison in words."""
    summary = run.summary or {}
    scores, differences = collect_knn_scores(summary), read_differences(summary)
    if "knn" not in scores:
        return []
    rows = []
    for key, (value, interval) in scores.items():
        cell = render_barred(value, text.format_percent(value), 1 if key == "knn" else 2, interval)
        rows.append([KNN_SOURCES[key], cell, text.format_interval(interval) or "–"])
    images = summary.get("images")
    count = (
        f" Measured on {text.format_image_count(images, run.media)} of the {run.split} split."
        if isinstance(images, int)
        else ""
    )
    method = (
        f"Each {run.media} gets the class that its nearest training {run.media}s vote for; nothing is trained for that."
    )
    paired = " The intervals of differences, at the top, are paired: of the same samples." if differences else ""
    head = ["nearest neighbours of", "accuracy", f"95{text.NO_BREAK_SPACE}%"]
    return [
        h("p", format_knn_verdict(scores)) if len(scores) > 1 and not differences else None,
        render_table(head, rows, caption="k-NN accuracy", numeric_from=1, fit=True),
        h("p", f"{method} Wilson’s 95 % intervals.{paired}{count}", class_="note"),
    ]


def format_knn_verdict(scores: KnnScores) -> str:
    """Return the difference to raw pixels and to the untrained model, and whether intervals overlap."""
    accuracy, interval = scores["knn"]
    parts, overlapping = [], []
    for key in ("knn_pixels", "knn_random"):
        if key in scores:
            reference, other = scores[key]
            points = 100 * (accuracy - reference)
            parts.append(f"{abs(points):.1f} points {'above' if points >= 0 else 'below'} {KNN_SOURCES[key]}")
            if interval and other and interval[0] <= other[1] and other[0] <= interval[1]:
                overlapping.append(KNN_SOURCES[key])
    note = f" The interval overlaps with that of {' and '.join(overlapping)}: the difference may be chance."
    return f"The features are {' and '.join(parts)}.{note if overlapping else ''}"


def render_next_steps(run: RunDirectory) -> list[Markup | None]:
    """Return commands to fine-tune, probe, inspect and convert the model; after a collapse, the command to retry."""
    if run.collapse:
        retry = format_retry_command(run.get("command"), str(run.collapse.get("advice", "")))
        note = "The weights of a collapsed run are of little use. Train again with the advice applied:"
        return [h("p", note), render_code(retry)] if retry else []
    if not run.is_finished:
        return []
    data, model = str(run.get("data", "where") or "DATA"), str(run.directory / "model.safetensors")
    labels = run.get("labels")
    labelled = data if isinstance(labels, list) and labels else "LABELLED"
    steps = [
        ("Fine-tune it with labels; a few per class may be enough.", ["train", labelled, "--init", model]),
        ("Measure the frozen features with probes.", ["evaluate", model, labelled, "--probe", "knn,linear"]),
        (
            "Draw its attention maps.",
            ["inspect", model, "IMAGE.jpg" if run.media == "image" else "VIDEO.mp4", "--out", "inspection"],
        ),
        ("Convert the weights for another library.", ["convert", model, "features.safetensors", "--to", "timm"]),
    ]
    parts: list[Markup | None] = [
        h("div", h("p", purpose), render_code(shlex.join(["vitrail", *command])), class_="step")
        for purpose, command in steps
    ]
    if labelled == "LABELLED":
        parts.append(h("p", "LABELLED is a folder with one folder of images per class.", class_="note"))
    return parts


def format_retry_command(command: Any, advice: str) -> str:
    """Return the command with the advised options in place of its own and without --out, whose directory exists."""
    options = [option.split(" ", 1) for option in OPTION_PATTERN.findall(advice)]
    if not isinstance(command, list) or not command or not options:
        return ""
    words = [str(word) for word in command]
    for flag, value in [*options, ["--out", ""]]:
        words = remove_option(words, flag, value.partition("=")[0] if flag == "--set" else "")
    return shlex.join([*words, *(word for option in options for word in option)])


def remove_option(words: list[str], flag: str, field: str) -> list[str]:
    """Return the words without an option, `--lr 3` or `--lr=3`; of --set, without that of the field."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        is_joined = word.startswith(f"{flag}=")
        value = word.partition("=")[2] if is_joined else rest[0] if rest else ""
        if (is_joined or word == flag) and (not field or value.partition("=")[0] == field):
            rest = rest if is_joined else rest[1:]
        else:
            kept.append(word)
    return kept


def render_advice(advice: str) -> Markup:
    """Return an advice with its options as code."""
    parts, end = [], 0
    for match in OPTION_PATTERN.finditer(advice):
        parts += [advice[end : match.start()], h("code", match.group())]
        end = match.end()
    return join_markup([*parts, advice[end:]])


def render_collapse_alarm(run: RunDirectory) -> Markup | None:
    """Return step, cause and advice of a collapse, or None."""
    collapse = run.collapse
    if not collapse:
        return None
    stopped = (run.summary or {}).get("stopped") == "collapse"
    outcome = "training was stopped" if stopped else "training continued"
    cause, advice = str(collapse.get("cause") or ""), str(collapse.get("advice") or "")
    parts = [
        h("p", h("strong", f"Collapse detected at step {text.format_count(collapse.get('step'))}"), f"; {outcome}."),
        h("p", h("b", "Likely cause: "), f"{cause}.") if cause else None,
        h("p", h("b", "What to change: "), render_advice(advice), ".") if advice else None,
    ]
    return h("div", parts, class_="notice alarm", role="alert")


def render_verdict(run: RunDirectory) -> Markup | None:
    """Return the verdict on the features, and what to try; None for runs of earlier versions."""
    sentences = format_verdict(run.summary or {})
    if not sentences:
        return None
    features, *rest = sentences
    advice = rest if not run.collapse else []  # the alarm has it already
    parts = [h("p", h("strong", features)), *(h("p", render_advice(sentence)) for sentence in advice)]
    return h("div", parts, class_="notice verdict" if rest else "notice verdict better")


def render_pretraining_tiles(run: RunDirectory) -> Markup | None:
    """Return the tiles of the final signals, or of the last validation of an unfinished run."""
    last: dict[str, Any] = (run.summary or {}) if run.is_finished else (run.validation[-1] if run.validation else {})
    scores, labels = collect_knn_scores(last), {"knn": "k-NN accuracy", "knn_pixels": "k-NN accuracy of raw pixels"}
    measured = [key for key in labels if key in scores]
    tiles = [render_tile(labels[key], text.format_percent(scores[key][0]), *scores[key]) for key in measured]
    numbers = {} if tiles else {"loss": ("Loss", "lower is better")}
    numbers |= {"rank": ("Effective rank", "of the features"), "spread": ("Feature spread", "0: all the same, 1: even")}
    for key, (label, note) in numbers.items():
        if text.is_number(last.get(key)):
            tiles.append(render_tile(label, text.format_number(last[key]), None, None, note))
    return render_tiles(*tiles, render_time_tile(last, run.media))

"""Terminal output of a training run: one status line on a terminal, plain lines elsewhere."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.cli.text.messages import spell_options
from vitrail.cli.text.progress import StatusDisplay, format_clock
from vitrail.utils.scores import METRICS, find_score, format_score_interval
from vitrail.utils.text import (
    NO_BREAK_SPACE,
    format_calibration,
    format_number,
    format_percent,
    format_temperature,
)

Record = dict[str, Any]


class TrainingDisplay(StatusDisplay):
    """Display of a run's records: validation results stay on the screen, the step is the status line."""

    def __init__(self, quiet: bool = False, flags: Mapping[str, str] | None = None) -> None:
        super().__init__(quiet)
        self.flags = flags or {}  # of the command, as `spell_options` takes them
        self.steps = self.per_epoch = 0
        self.media = "image"  # of the data
        self.train: Record = {}
        self.stage, self.stage_start = "", self.last_shown

    def on_record(self, record: Record) -> None:
        """Show one record of the run."""
        kind = record.get("kind")
        if kind == "begin":
            self.steps, self.per_epoch = record["steps"], record["steps_per_epoch"]
            self.media = record["media"]
        elif kind == "train":
            self.train = record
        elif kind == "timing":
            self.show_step(record)
        elif kind == "validation":
            self.print_line(format_validation(record))
        elif kind == "skipped":
            self.print_line(f"step {record['step']} skipped: {record['why']}")
        elif kind == "stopping":
            self.print_line("stopping after this step")
        elif kind == "note":
            self.print_line(spell_options(record["text"], self.flags))

    def show_step(self, timing: Record) -> None:
        """Show epoch, step, loss, learning rate, throughput and time left."""
        step, speed, train = timing["step"], timing["images_per_second"], self.train
        if train and (self.terminal or time.monotonic() - self.last_shown > 10 or step == self.steps):
            left = format_clock(timing["seconds_left"])
            epoch = (
                f"epoch {train['epoch']:.2f}/{self.steps / max(1, self.per_epoch):.4g}  step {step:,}/{self.steps:,}"
            )
            values = f"loss {train['loss']:.4f}  lr {train['lr']:.3g}  {speed:,.0f} {self.media}s/s"
            self.show_status(f"{epoch}  {values}  {left} left")

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage outside training, such as listing, checking or decoding."""
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.stage_start = stage, now
        if self.terminal and now - self.stage_start >= 2 and now - self.last_shown >= 0.1:
            self.show_status(f"{stage}: {done:,}{f' of {total:,}' if total else ''}")


SIGNAL_FORMATS = {  # name and format of the signals of self-supervised training
    "loss": ("loss", "{:.4f}"),
    "knn": ("k-NN", "{:.2%}"),
    "rank": ("rank", "{:.1f}"),
    "spread": ("spread", "{:.3f}"),
    "teacher_entropy": ("teacher entropy", "{:.3f}"),
}


def format_value(score: str, value: float) -> str:
    """Return the value of a score, as a percentage unless it is none."""
    return f"{100 * value:.2f} %" if METRICS[score].is_share else f"{value:.4f}"


def format_validation(record: Record) -> str:
    """Return the line of a validation: the score, or without labels the signals that were measured."""
    if "rank" in record:
        signals = [(name, form.format(record[key])) for key, (name, form) in SIGNAL_FORMATS.items() if key in record]
        result = "  ".join(map(" ".join, signals)).replace("%", " %")
    else:
        score = find_score(record)
        result = f"validation {METRICS[score].short} {format_value(score, record.get(score, 0))}"
        if "text_to_image_1" in record:
            result += f"  text→image {format_value('text_to_image_1', record['text_to_image_1'])}"
        result += f"  MAE {format_number(record['mae'], 4)}" if "mae" in record else ""
        result += f"  loss {record['loss']:.4f}" if "loss" in record else ""
    best = "  best so far" if record.get("best") else ""
    return f"epoch {record['epoch']:>6g}  step {record['step']:>7,}  {result}{best}"


def format_outcome(summary: dict[str, Any], directory: Path) -> str:
    """Return the result with its interval, the time, and the paths of model and report."""
    summary = defaultdict(lambda: math.nan, summary)  # a run whose weights are not finite lacks some
    speed = f"{summary['images_per_second']:,.0f} {get_media(summary)}s/s"
    duration = f"after {format_clock(summary['seconds'])} of training at {speed}"
    result = format_self_supervised(summary) if "method" in summary else format_supervised(summary)
    files = format_files(summary, directory)
    return "\n".join([f"{result}, {duration}", *format_features(summary), *format_confidence(summary), *files])


def format_rounds(summary: dict[str, Any]) -> str:
    """Return a line for each round of self-training: the predicted labels that were learnt, and the accuracy."""
    lines = []
    for one in summary["self_training"]["rounds"]:
        split = "test" if "test" in one["scores"] else "validation"
        metrics = one["scores"][split]
        score, right = find_score(metrics), one["correct"]
        name = (
            f"round {one['number']}" if one["number"] else ("labels alone" if one["name"] == "round-0" else "teacher")
        )
        taken = "" if not one["number"] else f"{one['taken']:,} predicted labels"
        taken += "" if right is None else f", {format_percent(right / max(1, one['taken']))} right"
        kept = "  kept" if one["name"] == summary["self_training"]["best"] else ""
        lines.append(
            f"{name:<13} {split} {METRICS[score].short} {format_value(score, metrics[score])}  {taken}{kept}".rstrip()
        )
    return "\n".join(lines).replace(NO_BREAK_SPACE, " ")


def get_media(summary: Mapping[str, Any]) -> str:
    """Return what the samples of a run are: image, video or sound; runs of earlier versions have images."""
    return summary.get("media", "image")


def format_confidence(summary: dict[str, Any]) -> list[str]:
    """Return the lines on the calibration and the temperature; none where they are unknown."""
    direction, temperature = format_calibration(summary), format_temperature(summary.get("calibration"))
    error = f"calibration error {format_percent(summary.get('calibration_error'))}"
    lines = [f"{direction[0].upper()}{direction[1:]} ({error})"] if direction else []
    lines += [f"Temperature {temperature}"] if temperature else []
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def format_features(summary: dict[str, Any]) -> list[str]:
    """Return the verdict on the features of a self-supervised run; none for other runs."""
    from vitrail.reports.verdict import format_verdict

    return format_verdict(summary)


def format_files(summary: dict[str, Any], directory: Path) -> list[str]:
    """Return the paths of model and report, and of the best weights where others were kept."""
    from vitrail.reports.kept import describe_weights

    kept, others = describe_weights(summary) or ("", "")
    lines = [f"model   {directory / 'model.safetensors'}" + (f" ({kept})" if kept else "")]
    if kept and summary["weights"] == "best":
        lines.append(f"        {others}")
    elif kept:
        lines.append(f"best    {directory / 'best.safetensors'} ({others})")
    return [*lines, f"report  {directory / 'report.html'}"]


def format_supervised(summary: dict[str, Any]) -> str:
    """Return the score with its interval."""
    score, (low, high) = find_score(summary), summary.get("interval", (0.0, 1.0))
    result = (
        f"{METRICS[score].title} {format_value(score, summary[score])} ({format_score_interval(score, (low, high))})"
    )
    result += f", MAE {format_number(summary['mae'], 4)}" if "mae" in summary else ""
    if "text_to_image_1" in summary:
        result += f", text-to-image {format_value('text_to_image_1', summary['text_to_image_1'])}"
    return f"{result} on {summary['images']:,} {summary['split']} {get_media(summary)}s"


def format_self_supervised(summary: dict[str, Any]) -> str:
    """Return the k-NN accuracy of the features if there are labels, else the loss and the rank."""
    if "knn" not in summary:
        similarity = f"cosine {summary['cosine']:.3f} with the teacher's features" if "cosine" in summary else None
        return f"{summary['method']}: {similarity or 'loss {loss:.4f}'.format(**summary)}, rank {summary['rank']:.1f}"
    low, high = summary.get("knn_interval", (0.0, 1.0))
    return (
        f"{summary['method']}: k-NN accuracy {100 * summary['knn']:.2f} % ({100 * low:.1f}–{100 * high:.1f}) on "
        f"{summary['images']:,} held-out {get_media(summary)}s (raw pixels {100 * summary['knn_pixels']:.1f} %, "
        f"untrained network {100 * summary['knn_random']:.1f} %)"
    )

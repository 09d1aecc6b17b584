"""Terminal output of a training run: one status line on a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def format_duration(seconds: float) -> str:
    """Return seconds as 1:05, 12:00 or 3:20:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TrainingDisplay:
    """Display of a run's records. Validation results stay on the screen; the status line is overwritten."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self.steps = self.per_epoch = 0
        self.train: Record = {}
        self.stage_start = self.last_shown = time.monotonic()
        self.stage = ""

    def on_record(self, record: Record) -> None:
        """Show one record of the run."""
        kind = record.get("kind")
        if kind == "begin":
            self.steps, self.per_epoch = record["steps"], record["steps_per_epoch"]
        elif kind == "train":
            self.train = record
        elif kind == "timing":
            self.show_status(record)
        elif kind == "validation":
            self.print_line(self.format_validation(record))
        elif kind == "skipped":
            self.print_line(f"step {record['step']} skipped: {record['why']}")
        elif kind == "stopping":
            self.print_line("stopping after this step; a checkpoint is saved")
        elif kind == "note":
            self.print_line(record["text"])

    def format_validation(self, record: Record) -> str:
        """Return the line of a validation."""
        if "rank" in record:
            return self.format_signals(record)
        score = f"mAP {100 * record['map']:.2f} %" if "map" in record else f"top-1 {100 * record.get('top1', 0):.2f} %"
        best = "  best so far" if record.get("best") else ""
        return f"epoch {record['epoch']:>6g}  step {record['step']:>7,}  validation {score}  loss {record['loss']:.4f}{best}"

    def format_signals(self, record: Record) -> str:
        """Return the line of a validation without labels, with the signals that were measured."""
        formats = {
            "loss": ("loss", "{:.4f}"),
            "knn": ("k-NN", "{:.2%}"),
            "rank": ("rank", "{:.1f}"),
            "spread": ("spread", "{:.3f}"),
            "teacher_entropy": ("teacher entropy", "{:.3f}"),
        }
        signals = [f"{name} {form.format(record[key])}" for key, (name, form) in formats.items() if key in record]
        best = "  best so far" if record.get("best") else ""
        return f"epoch {record['epoch']:>6g}  step {record['step']:>7,}  {'  '.join(signals).replace('%', ' %')}{best}"

    def show_status(self, timing: Record) -> None:
        """Show epoch, step, loss, learning rate, images per second and time left."""
        if not self.train or self.quiet:
            return
        step, speed = timing["step"], timing["images_per_second"]
        left = (self.steps - step) * timing["seconds"] / max(1, step)
        epochs = self.steps / max(1, self.per_epoch)
        line = (
            f"epoch {self.train['epoch']:.2f}/{epochs:g}  step {step:,}/{self.steps:,}  loss {self.train['loss']:.4f}  "
            f"lr {self.train['lr']:.3g}  {speed:,.0f} images/s  {format_duration(left)} left"
        )
        if self.terminal:
            width = shutil.get_terminal_size().columns
            self.write(f"\r\033[K{line[: width - 1]}", end="")
        elif time.monotonic() - self.last_shown > 10 or step == self.steps:
            self.last_shown = time.monotonic()
            self.write(line)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage outside training, such as listing, checking or decoding."""
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.stage_start = stage, now
        if self.quiet or not self.terminal or now - self.stage_start < 2 or now - self.last_shown < 0.1:
            return
        self.last_shown = now
        of = f" of {total:,}" if total else ""
        self.write(f"\r\033[K{stage}: {done:,}{of}", end="")

    def print_line(self, line: str) -> None:
        """Print a line that stays on the screen."""
        if self.quiet:
            return
        self.clear()
        self.write(line)

    def clear(self) -> None:
        """Erase the status line."""
        if self.terminal and not self.quiet:
            self.write("\r\033[K", end="")

    def write(self, text: str, end: str = "\n") -> None:
        """Write to standard error; if the pipe is closed, the run continues without output."""
        try:
            print(text, end=end, file=sys.stderr, flush=True)
        except BrokenPipeError:
            self.quiet = True


def format_outcome(summary: dict[str, Any], directory: Path) -> str:
    """Return the result with its interval, the time, and the paths of model and report."""
    duration = (
        f"after {format_duration(summary['seconds'])} of training at {summary['images_per_second']:,.0f} images/s"
    )
    result = format_self_supervised(summary) if "method" in summary else format_supervised(summary)
    return f"{result}, {duration}\nmodel   {directory / 'model.safetensors'}\nreport  {directory / 'report.html'}"


def format_supervised(summary: dict[str, Any]) -> str:
    """Return the accuracy, or the mAP, with its interval."""
    name, value = ("mAP", summary["map"]) if "map" in summary else ("Top-1 accuracy", summary["top1"])
    low, high = summary.get("interval", (0.0, 1.0))
    return f"{name} {100 * value:.2f} % ({100 * low:.1f}–{100 * high:.1f}) on {summary['images']:,} {summary['split']} images"


def format_self_supervised(summary: dict[str, Any]) -> str:
    """Return the k-NN accuracy of the features if there are labels, else the loss and the rank."""
    if "knn" not in summary:
        similarity = f"cosine {summary['cosine']:.3f} with the teacher's features" if "cosine" in summary else None
        return f"{summary['method']}: {similarity or 'loss {loss:.4f}'.format(**summary)}, rank {summary['rank']:.1f}"
    low, high = summary["knn_interval"]
    return (
        f"{summary['method']}: k-NN accuracy {100 * summary['knn']:.2f} % ({100 * low:.1f}–{100 * high:.1f}) on "
        f"{summary['images']:,} held-out images (raw pixels {100 * summary['knn_pixels']:.1f} %, "
        f"untrained network {100 * summary['knn_random']:.1f} %)"
    )

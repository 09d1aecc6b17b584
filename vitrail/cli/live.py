"""What a training run says while it goes: one line that renews itself on a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from typing import Any

Record = dict[str, Any]


def duration(seconds: float) -> str:
    """1:05, 12:00, 3:20:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Live:
    """Hears the run's records. Validation results stay on the screen; the line of training is overwritten."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self.steps = self.per_epoch = 0
        self.train: Record = {}
        self.began = self.shown = time.monotonic()
        self.doing = ""

    def hear(self, record: Record) -> None:
        """One record of the run."""
        kind = record.get("kind")
        if kind == "begin":
            self.steps, self.per_epoch = record["steps"], record["steps_per_epoch"]
        elif kind == "train":
            self.train = record
        elif kind == "timing":
            self.status(record)
        elif kind == "validation":
            self.say(self.validation(record))
        elif kind == "skipped":
            self.say(f"step {record['step']} was skipped: {record['why']}")
        elif kind == "stopping":
            self.say("stopped after this step; everything is saved")
        elif kind == "note":
            self.say(record["text"])

    def validation(self, record: Record) -> str:
        """A line with the results of a validation."""
        if "rank" in record:
            return self.signals(record)
        score = f"mAP {100 * record['map']:.2f} %" if "map" in record else f"top-1 {100 * record.get('top1', 0):.2f} %"
        best = "  best so far" if record.get("best") else ""
        return f"epoch {record['epoch']:>6g}  step {record['step']:>7,}  validation {score}  loss {record['loss']:.4f}{best}"

    def signals(self, record: Record) -> str:
        """A line with what a validation without labels found; what was not measured is left out."""
        shown = {
            "loss": ("loss", "{:.4f}"),
            "knn": ("k-NN", "{:.2%}"),
            "rank": ("rank", "{:.1f}"),
            "spread": ("spread", "{:.3f}"),
            "teacher_entropy": ("teacher entropy", "{:.3f}"),
        }
        told = [f"{word} {form.format(record[key])}" for key, (word, form) in shown.items() if key in record]
        best = "  best so far" if record.get("best") else ""
        return f"epoch {record['epoch']:>6g}  step {record['step']:>7,}  {'  '.join(told).replace('%', ' %')}{best}"

    def status(self, timing: Record) -> None:
        """Epoch, step, loss, rate, images per second and time left."""
        if not self.train or self.quiet:
            return
        step, rate = timing["step"], timing["images_per_second"]
        left = (self.steps - step) * timing["seconds"] / max(1, step)
        epochs = self.steps / max(1, self.per_epoch)
        line = (
            f"epoch {self.train['epoch']:.2f}/{epochs:g}  step {step:,}/{self.steps:,}  loss {self.train['loss']:.4f}  "
            f"lr {self.train['lr']:.3g}  {rate:,.0f} images/s  {duration(left)} left"
        )
        if self.terminal:
            width = shutil.get_terminal_size().columns
            self.put(f"\r\033[K{line[: width - 1]}", end="")
        elif time.monotonic() - self.shown > 10 or step == self.steps:
            self.shown = time.monotonic()
            self.put(line)

    def progress(self, doing: str, done: int, total: int) -> None:
        """Something before or after training that takes long: listing, checking, decoding."""
        now = time.monotonic()
        if doing != self.doing:
            self.doing, self.began = doing, now
        if self.quiet or not self.terminal or now - self.began < 2 or now - self.shown < 0.1:
            return
        self.shown = now
        of = f" of {total:,}" if total else ""
        self.put(f"\r\033[K{doing}: {done:,}{of}", end="")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        self.clear()
        self.put(line)

    def clear(self) -> None:
        """An empty line, for what comes next."""
        if self.terminal and not self.quiet:
            self.put("\r\033[K", end="")

    def put(self, text: str, end: str = "\n") -> None:
        """Says something; a run outlives its audience."""
        try:
            print(text, end=end, file=sys.stderr, flush=True)
        except BrokenPipeError:
            self.quiet = True

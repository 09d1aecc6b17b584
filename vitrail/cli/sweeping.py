"""What a study says while its cells run: finished ones as lines that stay, and below them what is going on now."""

import shutil
import sys
import time
from typing import Any

from vitrail.cli.live import duration

Record = dict[str, Any]
REST = 30.0  # seconds between words where nobody looks at a terminal


class Sweeping:
    """Hears the runners' records."""

    def __init__(self, quiet: bool = False, runners: int = 1) -> None:
        self.quiet, self.runners = quiet, runners
        self.terminal = sys.stderr.isatty()
        self.state: Record = {"known": 0, "done": 0, "failed": 0, "seconds_left": None}
        self.running: dict[str, Record] = {}  # by cell
        self.drawn = 0  # lines that will be drawn over
        self.shown = time.monotonic()

    def hear(self, record: Record) -> None:
        """One record: of a cell, of a run in one, or of the study."""
        kind, cell = record.get("kind"), record.get("cell")
        if kind == "state":
            # Each runner counts for itself, and none of them forgets: the highest count is the newest.
            if record["done"] >= self.state["done"]:
                self.state = record
        elif kind == "cell":
            self.cell(record)
        elif kind == "note" and cell is None:
            self.say(record["text"])
        elif cell is not None and kind in ("begin", "train", "progress", "validation"):
            self.running.setdefault(cell, {}).update(record)
        self.draw()

    def progress(self, doing: str, done: int, total: int) -> None:
        """Before the first cell: the data is read and checked."""
        self.running["data"] = {"label": "data", "doing": doing, "done": done, "total": total}
        self.draw()
        if total and done >= total:
            self.running.pop("data", None)

    def cell(self, record: Record) -> None:
        """A cell begins, or ends one way or another."""
        what, label = record["what"], record["label"]
        if what == "begins":
            self.running[record["cell"]] = dict(record)
            return
        self.running.pop(record["cell"], None)
        if what == "done":
            self.state = self.state | {"done": self.state["done"] + 1}
            scores = [f"{name} {100 * record[name]:5.1f} %" for name in ("validation", "test") if name in record]
            found = "  ".join([*scores, duration(record["seconds"])])
            self.say(f"{self.state['done']:>3}/{max(self.state['known'], self.state['done'])}  {label:<48}  {found}")
        elif what == "failed":
            self.say(f"failed   {label}: {record['line']}")
        else:
            self.say(f"left     {label}: another runner has it")

    def lines(self) -> list[str]:
        """What is going on now."""
        state, left = self.state, self.state["seconds_left"]
        head = f"{state['done']} of {state['known']} cells that are known"
        head += f", {state['failed']} failed" if state["failed"] else ""
        head += f", about {duration(left / self.runners)} left for them" if left else ""
        return [head, *(f"  {doing(record)}" for record in self.running.values())]

    def draw(self) -> None:
        """The lines over the last ones, on a terminal; elsewhere one now and then."""
        now = time.monotonic()
        if self.quiet or now - self.shown < (0.1 if self.terminal else REST):
            return
        self.shown = now
        if not self.terminal:
            self.put("  ".join(self.lines()) + "\n")
            return
        self.clear()
        width = shutil.get_terminal_size().columns
        lines = [line[: width - 1] for line in self.lines()]
        self.put("".join(f"{line}\n" for line in lines))
        self.drawn = len(lines)

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.clear()
            self.put(f"{line}\n")

    def clear(self) -> None:
        """Takes away what was drawn last."""
        if self.drawn:
            self.put(f"\033[{self.drawn}A\033[J")
            self.drawn = 0

    def put(self, text: str) -> None:
        """Says something; a study outlives its audience."""
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except BrokenPipeError:
            self.quiet = True


def doing(record: Record) -> str:
    """What a cell is at."""
    text = record.get("label", "")
    if record.get("kind") == "progress" or "steps" not in record:
        of = f" of {record['total']:,}" if record.get("total") else ""
        return f"{text}  {record['doing']} {record['done']:,}{of}" if "doing" in record else text
    loss = f"  loss {record['loss']:.4f}" if "loss" in record else ""
    return f"{text}  step {record.get('step', 0):,}/{record['steps']:,}{loss}"

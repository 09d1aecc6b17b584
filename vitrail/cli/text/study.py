"""Terminal output of `vitrail paper`: finished cells as lines that stay, below them the running ones."""

import textwrap
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vitrail.cli.text.progress import StatusDisplay, format_clock
from vitrail.utils.text import format_table

if TYPE_CHECKING:
    from vitrail.studies.study import Answer, Study, StudyScale
    from vitrail.studies.sweep import Sweep, SweepState


Record = dict[str, Any]
PLAIN_INTERVAL_SECONDS = 30.0  # between status lines if standard error is not a terminal


class SweepDisplay(StatusDisplay):
    """Display of the records of all runners: finished cells as lines that stay, below them the running ones."""

    def __init__(self, quiet: bool = False, runners: int = 1) -> None:
        super().__init__(quiet)
        self.runners = runners
        self.state: Record = {"known": 0, "done": 0, "failed": 0, "seconds_left": None}
        self.running: dict[str, Record] = {}  # by cell

    def on_record(self, record: Record) -> None:
        """Show one record of a cell, of a run in a cell, or of the study."""
        kind, cell = record.get("kind"), record.get("cell")
        if kind == "state":
            # Each runner counts for itself and counts only rise: the highest count is the newest.
            if record["done"] >= self.state["done"]:
                self.state = record
        elif kind == "cell":
            self.on_cell(record)
        elif kind == "note" and cell is None:
            self.print_line(record["text"])
        elif cell is not None and kind in ("begin", "train", "progress", "validation"):
            self.running.setdefault(cell, {}).update(record)
        self.draw()

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show the progress of reading and checking the data, before the first cell."""
        self.running["data"] = {"label": "data", "doing": stage, "done": done, "total": total}
        self.draw()
        if total and done >= total:
            self.running.pop("data", None)

    def on_cell(self, record: Record) -> None:
        """Show the start or the end of a cell."""
        event, label = record["what"], record["label"]
        if event == "begins":
            self.running[record["cell"]] = dict(record)
            return
        self.running.pop(record["cell"], None)
        if event == "done":
            self.state = self.state | {"done": self.state["done"] + 1}
            scores = [f"{name} {100 * record[name]:5.1f} %" for name in ("validation", "test") if name in record]
            outcome = "  ".join([*scores, format_clock(record["seconds"])])
            done, known = self.state["done"], max(self.state["known"], self.state["done"])
            self.print_line(f"{done:>3}/{known}  {label:<48}  {outcome}")
        elif event == "failed":
            self.print_line(f"failed   {label}: {record['line']}")
        else:
            self.print_line(f"skipped  {label}: taken by another runner")

    def draw(self) -> None:
        """Show the status lines; where standard error is not a terminal, at long intervals."""
        if time.monotonic() - self.last_shown < (0.1 if self.terminal else PLAIN_INTERVAL_SECONDS):
            return
        state, left = self.state, self.state["seconds_left"]
        heading = f"{state['done']} of {state['known']} known cells"
        heading += f", {state['failed']} failed" if state["failed"] else ""
        heading += f", about {format_clock(left / self.runners)} left" if left else ""
        self.show_status(heading, *(f"  {describe_activity(record)}" for record in self.running.values()))


def describe_activity(record: Record) -> str:
    """Return the status of a running cell."""
    text = record.get("label", "")
    if record.get("kind") == "progress" or "steps" not in record:
        of = f" of {record['total']:,}" if record.get("total") else ""
        return f"{text}  {record['doing']} {record['done']:,}{of}" if "doing" in record else text
    loss = f"  loss {record['loss']:.4f}" if "loss" in record else ""
    return f"{text}  step {record.get('step', 0):,}/{record['steps']:,}{loss}"


WIDTH, INDENT = 100, 14
PHASE_NAMES = {  # singular and plural of the cells of a phase
    "tune": ("learning rate trial", "learning rate trials"),
    "base": ("pretrained model", "pretrained models"),
    "final": ("final run", "final runs"),
}


def fill_paragraph(name: str, text: str) -> str:
    """Return a wrapped paragraph with its name in the margin."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{name:<{INDENT}}", subsequent_indent=" " * INDENT)


def format_study(study: "Study") -> str:
    """Return a study as a few lines."""
    facts = {"question": study.question, "reference": study.reference, "paper": study.paper_finding}
    for name, scale in study.scales.items():
        facts[name] = f"{format_scale_time(scale)}; {scale.data}, seeds: {scale.seeds}"
    return "\n".join([study.name, *(fill_paragraph(f"  {name}", text) for name, text in facts.items())])


def format_scale_time(scale: "StudyScale") -> str:
    """Return the duration of a scale, and whether it is measured or estimated."""
    return f"{format_minutes(scale.minutes)} on {scale.hardware} ({'measured' if scale.is_measured else 'estimated'})"


def format_minutes(minutes: float) -> str:
    """Return a duration as about 40 seconds, 12 minutes, 5 hours or 3 days."""
    for size, word in ((24 * 60, "days"), (60, "hours"), (1, "minutes")):
        if minutes >= 2 * size:
            return f"about {round(minutes / size)} {word}"
    return f"about {max(1, round(60 * minutes))} seconds"


def format_plan(sweep: "Sweep", state: "SweepState") -> list[str]:
    """Return the plan of a study: its cells, the missing ones and the duration."""
    phases = Counter(state.cells[name].phase for name in state.missing)
    parts = ", ".join(f"{count} {PHASE_NAMES[phase][count > 1]}" for phase, count in phases.items())
    done = f", {len(state.results)} of them finished" if state.results else ""
    more = "; further cells depend on their results" if phases.keys() - {"final"} else ""
    scale = sweep.setup.scale
    data = "" if sweep.setup.data.where == scale.data else f" with {scale.data}"
    return [
        f"{sweep.study.name} at {sweep.scale} scale on {sweep.setup.data.where}: {sweep.study.question}",
        f"{len(state.cells)} known cells{done}; to run: {parts or 'none'}{more}",
        f"the study takes {format_scale_time(scale)}{data}",
    ]


def format_answer(study: "Study", answer: "Answer | None") -> list[str]:
    """Return the table, our finding, the paper's, the agreement and the limits."""
    if answer is None:
        return ["no finding yet: too few cells are finished"]
    paragraphs = [("finding", answer.finding), ("paper", f"{study.paper_finding} ({study.reference})")]
    paragraphs += [("agreement", answer.agreement), ("limits", answer.limits), *(("note", n) for n in answer.notes)]
    table = format_table([answer.columns, *answer.rows])
    return [*table, "", *(fill_paragraph(name, text) for name, text in paragraphs)]


def format_missing(state: "SweepState") -> list[str]:
    """Return the failed and the missing cells as lines."""
    lines = [f"failed  {name}: {failed.line}" for name, failed in state.failed.items()]
    waiting = len(state.missing) - len(state.failed)
    if state.failed:
        plural = "s" * (len(state.failed) > 1)
        lines.append(f"{len(state.failed)} cell{plural} failed; the same command runs the failed cell{plural} again")
    if waiting:
        lines.append(f"{len(state.results)} of {len(state.cells)} known cells are finished, {waiting} to run")
    return lines

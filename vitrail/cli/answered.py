"""What a study found, in the lines that its command prints; and what studies there are."""

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.studies.study import Answer, Scale, Study
    from vitrail.studies.sweep import State, Sweep

WIDTH, INDENT = 100, 14
PHASES = {  # what cells of a phase are, one and several of them
    "tune": ("try of a learning rate", "tries of learning rates"),
    "base": ("model to begin with", "models to begin with"),
    "final": ("run that is reported", "runs that are reported"),
}


def filled(name: str, text: str) -> str:
    """A named paragraph."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{name:<{INDENT}}", subsequent_indent=" " * INDENT)


def described(study: "Study") -> str:
    """A study in a few lines."""
    lines = [study.name, filled("  asks", study.question), filled("  where", study.where)]
    lines.append(filled("  they found", study.found))
    for name, scale in study.scales.items():
        lines.append(filled(f"  {name}", f"{lasting(scale)}; {scale.data}, seeds: {scale.seeds}"))
    return "\n".join(lines)


def lasting(scale: "Scale") -> str:
    """About how long a scale takes, and whether anybody looked at a clock."""
    return f"{in_words(scale.minutes)} on {scale.on} ({'measured' if scale.measured else 'reckoned'})"


def in_words(minutes: float) -> str:
    """40 seconds, 12 minutes, 5 hours, 3 days."""
    for size, word in ((24 * 60, "days"), (60, "hours"), (1, "minutes")):
        if minutes >= 2 * size:
            return f"about {round(minutes / size)} {word}"
    return f"about {max(1, round(60 * minutes))} seconds"


def announced(sweep: "Sweep", state: "State") -> list[str]:
    """What is about to run, before anything does."""
    phases: dict[str, int] = {}
    for name in state.missing:
        phases[state.cells[name].phase] = phases.get(state.cells[name].phase, 0) + 1
    parts = ", ".join(f"{count} {PHASES[phase][count > 1]}" for phase, count in phases.items())
    done = f", {len(state.results)} of them finished" if state.results else ""
    more = ". Others follow from their results" if phases.keys() - {"final"} else ""
    scale = sweep.setup.scale
    return [
        f"{sweep.study.name} at {sweep.scale} scale on {sweep.setup.data.where}: {sweep.study.question}",
        f"{len(state.cells)} cells are known{done}; to run: {parts or 'none'}{more}",
        f"all of it takes {lasting(scale)}" + ("" if sweep.setup.data.where == scale.data else f" with {scale.data}"),
    ]


def answered(study: "Study", answer: "Answer | None") -> list[str]:
    """Table, finding, the paper's, agreement, limits."""
    if answer is None:
        return ["too little is finished to say anything yet"]
    lines = [*table(answer.columns, answer.rows), "", filled("we found", answer.finding)]
    lines += [filled("they found", f"{study.found} ({study.where})"), filled("agreement", answer.agreement)]
    lines.append(filled("limits", answer.limits))
    return lines + [filled("note", note) for note in answer.notes]


def table(columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> list[str]:
    """Columns under their names."""
    everything = (columns, *rows)
    widths = [max(len(row[place]) for row in everything) for place in range(len(columns))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in everything
    ]


def left_over(state: "State") -> list[str]:
    """What has no result, and why."""
    lines = [f"failed  {name}: {failed.line}" for name, failed in state.failed.items()]
    waiting = len(state.missing) - len(state.failed)
    if state.failed:
        several = len(state.failed) > 1
        lines.append(
            f"{len(state.failed)} cell{'s' * several} failed; the same command tries {'them' if several else 'it'} again"
        )
    if waiting:
        lines.append(
            f"{len(state.results)} of {len(state.cells)} cells that are known are finished, {waiting} are to be run"
        )
    return lines

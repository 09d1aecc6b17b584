"""Documentation page of a study: Markdown with charts as SVG files."""

import html
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from vitrail.reports.charts.canvas import format_tick
from vitrail.reports.charts.figure import render_svg
from vitrail.studies.record import AGREEMENT_LABELS, StudyRecord, first_numeric_column, format_point, read_record
from vitrail.studies.report import TuningScores, collect_tuning_scores
from vitrail.studies.study import Answer
from vitrail.utils.text import format_count, format_duration, is_number


def write_page(study_directory: str | Path, docs_directory: str | Path) -> Path:
    """Write NAME.md, NAME-1.svg … and NAME-1-dark.svg … from a study's study.json, and return the page's path."""
    record, docs = read_record(Path(study_directory)), Path(docs_directory)
    if docs.exists() and not docs.is_dir():
        raise ValueError(f"{docs} is a file: choose a directory with --out")
    docs.mkdir(parents=True, exist_ok=True)
    for old in docs.glob(f"{record.name}-*.svg"):  # of an earlier version with more charts
        if re.fullmatch(r"\d+(-dark)?", old.stem.removeprefix(f"{record.name}-")):
            old.unlink()
    for k, chart in enumerate(record.answer.charts if record.answer else (), start=1):
        (docs / f"{record.name}-{k}.svg").write_text(render_svg(chart), encoding="utf-8")
        (docs / f"{record.name}-{k}-dark.svg").write_text(render_svg(chart, dark=True), encoding="utf-8")
    path = docs / f"{record.name}.md"
    path.write_text(render_markdown(record), encoding="utf-8")
    return path


def render_markdown(record: StudyRecord) -> str:
    """Return the page as Markdown."""
    answer = record.answer
    parts = [
        f"# {escape_markdown(record.question)}",
        f"`{record.name}`, {escape_markdown(record.where)}. [All studies](README.md)",
        f"**The paper found:** {escape_markdown(record.found)}",
    ]
    if not record.is_finished:
        parts.append(f"**Not finished:** {len(record.results)} of {record.known} planned runs.")
    if answer is None:
        parts.append(f"**Found here:** no finding yet: {escape_markdown(record.why_not)}.")
    else:
        parts += [
            f"**Found here:** {escape_markdown(answer.finding)}",
            f"**Verdict:** {AGREEMENT_LABELS[answer.agreement]}.",
            *render_charts(record.name, answer),
            render_table(answer.columns, answer.rows),
            *map(escape_markdown, answer.notes),
            f"**Limits of this scale:** {escape_markdown(answer.limits)}",
        ]
    command = " ".join(shlex.join(record.command).split())  # one line, even if a name has a line break
    parts += ["## How it was run", f"```console\n$ {command}\n```", render_setup(record)]
    for phase, what in (("base", "Learning rates tried in pre-training"), ("tune", "Learning rates tried")):
        if chosen := render_tuning(collect_tuning_scores(record.results, phase)):
            parts.append(f"<details><summary>{what}, by validation accuracy</summary>\n\n{chosen}\n\n</details>")
    if record.failed:
        lines = [
            f"- {escape_markdown(format_point(tuple(f.at.items())))}: {escape_markdown(f.line)}" for f in record.failed
        ]
        parts.append("Failed runs:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def render_charts(name: str, answer: Answer) -> list[str]:
    """Return an HTML picture element for each chart, in light and dark."""
    return [
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-{k}-dark.svg">'
        f'<img alt="{html.escape(chart.title)}" src="{name}-{k}.svg"></picture>'
        for k, chart in enumerate(answer.charts, start=1)
    ]


def render_setup(record: StudyRecord) -> str:
    """Return the table of data, seeds, time and machine."""
    machine = record.machine
    where = f"{machine.get('processor')}, {machine.get('cores')} cores, GPU: {machine.get('GPU')}"
    judged = f", evaluated on {format_count(record.test)} test images" if record.test else ""
    facts = (
        ("scale", record.scale),
        (
            "data",
            f"{Path(record.data).name}: {format_count(record.train)} training images{judged}, {record.classes} classes",
        ),
        (
            "runs",
            f"{len(record.results)} of {record.known}" + (f", {len(record.failed)} failed" if record.failed else ""),
        ),
        ("seeds", ", ".join(map(str, record.seeds)) or "none yet"),
        *((("trained", record.trained),) if record.trained else ()),
        ("compute time", f"{format_duration(record.seconds)}, all runs"),
        ("machine", f"{where}; PyTorch {machine.get('torch')}, vitrail {machine.get('vitrail')}"),
    )
    return render_table(("", ""), facts)


def render_tuning(tuning_scores: TuningScores) -> str:
    """Return the table of tuning runs; the chosen learning rate is bold."""
    if not tuning_scores.families:
        return ""
    head = [*tuning_scores.names, *(format_tick(float(lr)) if is_number(lr) else str(lr) for lr in tuning_scores.lrs)]
    body = []
    for point in tuning_scores.families:
        best, scores = (
            tuning_scores.best_lr(point),
            {lr: tuning_scores.format_score(point, lr) for lr in tuning_scores.lrs},
        )
        cells = [f"**{score}**" if lr == best else score for lr, score in scores.items()]
        body.append("| " + " | ".join([*map(escape_markdown, tuning_scores.family_cells(point)), *cells]) + " |")
    return "\n".join([render_table(head, ()), *body]) + (
        f"\n\n{tuning_scores.edge_note}" if tuning_scores.edge_note else ""
    )


def render_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; numeric columns are aligned right if there are more than two columns."""
    first = first_numeric_column(body) if len(head) > 2 else len(head)
    aligned = ["---:" if column >= first else "---" for column in range(len(head))]
    lines = [map(escape_markdown, head), aligned, *(map(escape_markdown, row) for row in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape_markdown(text: str) -> str:
    """Return text on one line, with Markdown's special characters escaped."""
    safe = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", safe)

"""A study as a page of the documentation: Markdown, with its charts as SVG files beside it."""

import html
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from vitrail.report.words import count, duration, is_number
from vitrail.studies.drawing import svg
from vitrail.studies.drawing.canvas import amount
from vitrail.studies.record import VERDICTS, Record, in_words, numbers_from, read_record
from vitrail.studies.study import Answer
from vitrail.studies.tries import Tries, tries


def write_page(study_directory: str | Path, docs_directory: str | Path) -> Path:
    """From a study's study.json to NAME.md and NAME-1.svg … (and for dark pages, NAME-1-dark.svg). Gives the page's path."""
    record, docs = read_record(Path(study_directory)), Path(docs_directory)
    if docs.exists() and not docs.is_dir():
        raise ValueError(f"{docs} is a file: give the name of a directory")
    docs.mkdir(parents=True, exist_ok=True)
    for old in docs.glob(f"{record.name}-*.svg"):  # of a study with more charts
        if re.fullmatch(r"\d+(-dark)?", old.stem.removeprefix(f"{record.name}-")):
            old.unlink()
    for k, chart in enumerate(record.answer.charts if record.answer else (), start=1):
        (docs / f"{record.name}-{k}.svg").write_text(svg(chart), encoding="utf-8")
        (docs / f"{record.name}-{k}-dark.svg").write_text(svg(chart, dark=True), encoding="utf-8")
    path = docs / f"{record.name}.md"
    path.write_text(markdown(record), encoding="utf-8")
    return path


def markdown(record: Record) -> str:
    """The page's text."""
    answer = record.answer
    parts = [
        f"# {plain(record.question)}",
        f"`{record.name}`, {plain(record.where)}. [All studies](README.md)",
        f"**The paper found:** {plain(record.found)}",
    ]
    if not record.finished:
        parts.append(f"**Not finished:** {len(record.results)} of the {record.known} runs that are planned by now.")
    if answer is None:
        parts.append(f"**Found here:** nothing yet: {plain(record.why_not)}.")
    else:
        parts += [
            f"**Found here:** {plain(answer.finding)}",
            f"**Verdict:** {VERDICTS[answer.agreement]}.",
            *pictures(record.name, answer),
            rows(answer.columns, answer.rows),
            *map(plain, answer.notes),
            f"**What this scale cannot show:** {plain(answer.limits)}",
        ]
    command = " ".join(shlex.join(record.command).split())  # on one line, which no name can end
    parts += ["## How it was run", f"```console\n$ {command}\n```", about(record)]
    for phase, what in (("base", "Rates tried in pre-training"), ("tune", "Rates tried")):
        if chosen := tuning(tries(record.results, phase)):
            parts.append(f"<details><summary>{what}, by validation accuracy</summary>\n\n{chosen}\n\n</details>")
    if record.failed:
        lines = [f"- {plain(in_words(tuple(f.at.items())))}: {plain(f.line)}" for f in record.failed]
        parts.append("Runs that failed:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def pictures(name: str, answer: Answer) -> list[str]:
    """Each chart, as light or dark as the page."""
    return [
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-{k}-dark.svg">'
        f'<img alt="{html.escape(chart.title)}" src="{name}-{k}.svg"></picture>'
        for k, chart in enumerate(answer.charts, start=1)
    ]


def about(record: Record) -> str:
    """Data, seeds, time and machine."""
    machine = record.machine
    where = f"{machine.get('processor')}, {machine.get('cores')} cores, GPU: {machine.get('GPU')}"
    judged = f", judged on {count(record.test)} test pictures" if record.test else ""
    facts = (
        ("scale", record.scale),
        (
            "data",
            f"{Path(record.data).name}: {count(record.train)} training pictures{judged}, {record.classes} classes",
        ),
        (
            "runs",
            f"{len(record.results)} of {record.known}" + (f", {len(record.failed)} failed" if record.failed else ""),
        ),
        ("seeds", ", ".join(map(str, record.seeds)) or "none yet"),
        *((("trained", record.trained),) if record.trained else ()),
        ("computing", f"{duration(record.seconds)}, all runs together"),
        ("machine", f"{where}; PyTorch {machine.get('torch')}, vitrail {machine.get('vitrail')}"),
    )
    return rows(("", ""), facts)


def tuning(found: Tries) -> str:
    """What was tried for each family; what was chosen is bold."""
    if not found.families:
        return ""
    head = [*found.names, *(amount(float(rate)) if is_number(rate) else str(rate) for rate in found.rates)]
    body = []
    for place in found.families:
        best, scores = found.chosen(place), {rate: found.score(place, rate) for rate in found.rates}
        cells = [f"**{said}**" if rate == best else said for rate, said in scores.items()]
        body.append("| " + " | ".join([*map(plain, found.words(place)), *cells]) + " |")
    return "\n".join([rows(head, ()), *body]) + (f"\n\n{found.edges}" if found.edges else "")


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers are aligned right, where there are more than two."""
    first = numbers_from(body) if len(head) > 2 else len(head)
    aligned = ["---:" if column >= first else "---" for column in range(len(head))]
    lines = [map(plain, head), aligned, *(map(plain, row) for row in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    safe = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", safe)

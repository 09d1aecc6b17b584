"""A study's page, report.html: what the paper found, what was found here, and all that it was found from."""

import shlex
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from vitrail.report.facts import definitions
from vitrail.report.markup import Markup, h, name, table
from vitrail.report.opening import tile
from vitrail.report.page import Part, document, write_page
from vitrail.report.words import SPACE, count, duration, is_number, percent, when
from vitrail.studies.drawing import figure
from vitrail.studies.drawing.canvas import amount
from vitrail.studies.record import VERDICTS, Record, in_words, numbers_from, recorded, write_record
from vitrail.studies.study import Answer, Result, Setup, Study
from vitrail.studies.sweep import Failed
from vitrail.studies.tries import Tries, tries


def write(
    study: Study,
    setup: Setup,
    results: Sequence[Result],
    failed: Sequence[Failed],
    directory: Path,
    settings: Sequence[str] = (),
) -> Answer | None:
    """Writes study.json and report.html of a study as far as it is; gives the answer, if there is one by now."""
    record = recorded(study, setup, results, failed, settings)
    write_record(record, directory)
    write_page(page(record), directory / "report.html")
    return record.answer


def page(record: Record) -> str:
    """The page of one study."""
    kicker = ("a study of the paper", record.name, record.where, when(record.written))
    top = [
        h("p", [h("span", name(text)) for text in kicker], class_="kicker"),
        h("h1", record.question),
        h("div", paper(record), here(record), class_="findings"),
        state(record),
        tiles(record),
    ]
    answer = record.answer
    parts: list[Part] = [
        ("results", "Results", "What was measured", measured(answer)),
        ("limits", "Limits", "What this scale cannot show", [h("p", answer.limits)] if answer else []),
        (
            "tuning",
            "Tuning",
            "How rates were chosen",
            [*tuning(tries(record.results, "base"), "In pre-training every"), *tuning(tries(record.results))],
        ),
        ("failures", "Failures", "Runs that failed", [failures(record)]),
        ("runs", "Runs", "Every run", [runs(record)]),
        ("again", "Again", "How it was run, and how to run it again", again(record)),
    ]
    seed = f"{record.name} {record.scale} {record.data}"
    return document(f"{record.name}: {record.question}", seed, top, parts, "the study’s name, scale and data", style())


def paper(record: Record) -> Markup:
    """What the authors found."""
    return h(
        "div",
        h("h2", "The paper found"),
        h("p", unbroken(record.found)),
        h("p", record.where, class_="note"),
        class_="finding",
    )


def here(record: Record) -> Markup:
    """What was found here, and whether that is the same."""
    answer = record.answer
    where = f"scale {record.scale}, {count(record.train)} training pictures"
    about = h("p", where, " of ", name(data_name(record)), class_="note")
    if answer is None:
        said = h("p", f"Nothing yet: {record.why_not}.")
        return h("div", h("h2", "Found here"), said, about, class_="finding ours")
    kind = answer.agreement.replace(" ", "-")
    badge = h("p", h("span", VERDICTS[answer.agreement], class_=f"badge {kind}"))
    found = h("p", unbroken(answer.finding), class_="said")
    return h("div", h("h2", "Found here"), badge, found, about, class_=f"finding ours {kind}")


def state(record: Record) -> Markup | None:
    """That not all of it is there, where that is so."""
    if record.finished:
        return None
    left = record.known - len(record.results)
    known = f"{len(record.results)} of the {record.known} runs that are planned by now have a result"
    broken = f"; {len(record.failed)} failed" if record.failed else ""
    said = " The same command goes on with it." if left > len(record.failed) else " The same command tries them again."
    return h("p", h("strong", "This study has not finished."), f" {known}{broken}.", said, class_="notice")


def tiles(record: Record) -> Markup:
    """The few facts to take away."""
    runs_done = f"{len(record.results)} of {record.known}"
    judged = f"{count(record.train)} to learn from" + (f", {count(record.test)} to judge by" if record.test else "")
    return h(
        "div",
        tile("Runs finished", runs_done, None, None, f"{len(record.failed)} failed" if record.failed else ""),
        tile("Seeds of each", str(len(record.seeds) or "–"), None, None, ", ".join(map(str, record.seeds))),
        tile("Computing", duration(record.seconds), None, None, "all runs together"),
        tile("Pictures", data_name(record), None, None, judged),
        class_="tiles",
    )


def data_name(record: Record) -> str:
    return Path(record.data).name or record.data


def measured(answer: Answer | None) -> list[Markup | None]:
    """Charts, the table, notes."""
    if answer is None:
        return []
    drawn = h("div", [figure(chart) for chart in answer.charts], class_="drawn") if answer.charts else None
    rows = [[unbroken(cell) for cell in row] for row in answer.rows]
    caption, first = "Results, with 95 % intervals where they are given", numbers_from(answer.rows)
    numbers = table([*answer.columns], rows, caption=caption, numbers=first)
    told = (
        f"Intervals are of 95{SPACE}%: over seeds where there are three or more, else of so many test pictures, which says "
        "nothing of other seeds. Test pictures had no part in choosing what was run."
    )
    return [drawn, numbers, *[h("p", unbroken(note)) for note in answer.notes], h("p", told, class_="note")]


def unbroken(text: str) -> str:
    """The same with numbers and their units on one line."""
    return text.replace(" %", f"{SPACE}%")


def tuning(found: Tries, every: str = "Every") -> list[Markup | None]:
    """What was tried for each family, on validation pictures, and what was chosen."""
    if not found.families:
        return []
    rows = []
    for place in found.families:
        best, scores = found.chosen(place), {rate: found.score(place, rate) for rate in found.rates}
        marked = [h("b", said, " ✓", title="chosen") if rate == best else said for rate, said in scores.items()]
        rows.append([*map(name, found.words(place)), *marked])
    head = [*found.names, *(amount(float(rate)) if is_number(rate) else str(rate) for rate in found.rates)]
    seeds = "with one seed" if found.seeds == 1 else f"by the mean of {found.seeds} seeds"
    return [
        h(
            "p",
            f"{every} family has the same number of tries. They are compared on validation pictures, {seeds}; the best, ✓, is "
            f"then run with all seeds. {found.edges}",
        ),
        table(head, rows, caption="Validation accuracy by family and rate", numbers=len(found.names), fit=True),
    ]


def failures(record: Record) -> Markup | None:
    """Runs that ended with an error, and which."""
    if not record.failed:
        return None
    rows = [[name(f"{f.phase}: {in_words(tuple(f.at.items()))}"), h("code", name(f.line))] for f in record.failed]
    return table(["run", "what it said"], rows, caption="Runs that failed, and why")


def runs(record: Record) -> Markup | None:
    """Every result with its scores and its time."""
    if not record.results:
        return None
    rows = [
        [
            name(in_words(tuple(result.at.items()))),
            result.phase,
            *(score(result, split) for split in ("validation", "test")),
            (duration(result.seconds), result.seconds),
        ]
        for result in record.results
    ]
    head = ["run", "phase", "validation", "test", "time"]
    made = table(head, rows, caption="Every run", numbers=2, sortable=True)
    return h("details", h("summary", f"{len(rows):,} runs"), made, open=len(rows) <= 12)


def score(result: Result, split: str) -> tuple[str, float]:
    """A run's accuracy, and what it is sorted by."""
    value = result.numbers.get(split)
    return (percent(value), float(value)) if is_number(value) else ("–", -1.0)


def again(record: Record) -> list[Markup | None]:
    """The command, and where it ran."""
    command = h("pre", h("code", shlex.join(record.command)), tabindex="0")
    facts = {"scale": f"{record.scale}, meant for {record.on}", "data": record.data, "classes": record.classes}
    facts |= {"trained": record.trained} if record.trained else {}
    facts |= {"seeds": ", ".join(map(str, record.seeds)), "computing": duration(record.seconds), **record.machine}
    where = "The machine is the one that wrote this page. study.json, beside it, holds every number."
    return [command, definitions(facts), h("p", where, class_="note after")]


@cache
def style() -> str:
    return (files("vitrail.studies") / "report.css").read_text(encoding="utf-8").strip()

"""The reports of a study: an HTML page with finding, charts, tables, tuning and runs, and a Markdown page for documentation."""

import html
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from vitrail.reports.charts.canvas import format_tick
from vitrail.reports.charts.figure import render_figure, render_svg
from vitrail.reports.document import PageSection, read_resource, render_document, write_html
from vitrail.reports.facts import render_definitions
from vitrail.reports.html import Markup, h, isolate, render_table
from vitrail.reports.summary import render_tile
from vitrail.studies.record import StudyRecord, build_record, family_key, read_record, write_record
from vitrail.studies.study import AGREEMENT_LABELS, Answer, Results, Setting, Study, StudySetup, format_point
from vitrail.studies.sweep import FailedCell
from vitrail.utils.text import NO_BREAK_SPACE, format_count, format_datetime, format_duration, format_percent, is_number

T = TypeVar("T")
FamilyKey = tuple[tuple[str, Setting], ...]


class TuningScores:
    """Validation scores by family and learning rate, one per seed; families in order of appearance, learning rates sorted.

    Base models (phase "base") are tuned with the first seed only, and not in every study.
    """

    def __init__(self, results: Results, phase: str = "tune") -> None:
        self.families: dict[FamilyKey, dict[Setting, list[float]]] = {}
        for result in results:
            if result.phase == phase and (phase == "tune" or ("rate" in result.at and result.at.get("seed") == 0)):
                value = result.numbers.get("validation")
                score = float(value) if is_number(value) and not result.numbers.get("diverged") else math.nan
                scores = self.families.setdefault(family_key(result.at), {})
                scores.setdefault(result.at.get("rate"), []).append(score)
        lrs = {lr for scores in self.families.values() for lr in scores}
        if phase != "tune" and len(lrs) < 2:
            self.families, lrs = {}, set()
        self.lrs = sorted(lrs, key=lambda lr: (not is_number(lr), lr if is_number(lr) else 0.0))

    @property
    def seeds(self) -> int:
        """Return the number of seeds of each tuning run."""
        return max((len(values) for scores in self.families.values() for values in scores.values()), default=0)

    @property
    def names(self) -> list[str]:
        """Return the setting names of the families; ["family"] if families have different settings."""
        kinds = {tuple(name for name, _ in point) for point in self.families}
        return list(kinds.pop()) if len(kinds) == 1 and () not in kinds else ["family"]

    @property
    def head(self) -> list[str]:
        """Return the column names of the table of scores."""
        return [*self.names, *(format_tick(float(lr)) if is_number(lr) else str(lr) for lr in self.lrs)]

    def list_rows(self, format_name: Callable[[str], T], mark: Callable[[str], T]) -> list[list[str | T]]:
        """Return the rows of the table of scores, with the chosen learning rate's score marked."""
        return [
            [
                *map(format_name, self.family_cells(family)),
                *(mark(score) if lr == best else score for lr in self.lrs for score in [self.format_score(family, lr)]),
            ]
            for family in self.families
            for best in [self.best_lr(family)]
        ]

    def family_cells(self, family: FamilyKey) -> list[str]:
        """Return the table cells of a family, one for each name."""
        if self.names == ["family"] and [name for name, _ in family] != ["family"]:
            return [format_point(dict(family)) or "all"]
        return [f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else str(v) for _, v in family]

    def format_score(self, family: FamilyKey, lr: Setting) -> str:
        """Return the mean over seeds as text, "diverged" if a seed diverged."""
        values = self.families[family].get(lr)
        if not values:
            return "–"
        return "diverged" if any(math.isnan(value) for value in values) else format_percent(fmean(values))

    def best_lr(self, family: FamilyKey) -> Setting:
        """Return the learning rate with the best validation mean, the lowest of ties; None while tuning runs are missing."""
        scores, n_lrs = self.families[family], max(map(len, self.families.values()))
        if len(scores) < n_lrs or any(len(values) < self.seeds for values in scores.values()):
            return None
        means = {lr: fmean(scores[lr]) for lr in self.lrs if lr in scores}
        finite = [lr for lr in means if not math.isnan(means[lr])]
        return max(finite, key=lambda lr: means[lr], default=None)  # the first of ties

    @property
    def edge_note(self) -> str:
        """Return a warning if the best learning rate is the lowest or highest tried, else ""."""
        best: list[Setting] = [lr for point in self.families if (lr := self.best_lr(point)) is not None]
        if len(self.lrs) < 2:
            return ""
        ends = (("lowest", best.count(self.lrs[0])), ("highest", best.count(self.lrs[-1])))
        parts = " and ".join(f"the {end} tried for {count} of {len(best)}" for end, count in ends if count)
        return f"The best learning rate is {parts}: better values may lie outside the range." if parts else ""


def write_report(
    study: Study,
    setup: StudySetup,
    results: Results,
    failed: Sequence[FailedCell],
    directory: Path,
    settings: Sequence[str] = (),
) -> Answer | None:
    """Write study.json and report.html of a study's current state, and return the answer if there is one."""
    record = build_record(study, setup, results, failed, settings)
    write_record(record, directory)
    write_html(render_page(record), directory / "report.html")
    return record.answer


def render_page(record: StudyRecord) -> str:
    """Return the HTML page of a study."""
    kicker = ("a study of the paper", record.name, record.where, format_datetime(record.written))
    top = [
        h("p", [h("span", isolate(text)) for text in kicker], class_="kicker"),
        h("h1", record.question),
        h("div", render_paper_finding(record), render_finding(record), class_="findings"),
        render_state(record),
        render_tiles(record),
    ]
    answer = record.answer
    pretraining = render_tuning(TuningScores(record.results, "base"), "In pre-training every")
    tuning = [*pretraining, *render_tuning(TuningScores(record.results), "Every")]
    parts: list[PageSection] = [
        ("results", "Results", "Measurements", render_measurements(answer)),
        ("limits", "Limits", "Limits of this scale", [h("p", answer.limits)] if answer else []),
        ("tuning", "Tuning", "Selection of learning rates", tuning),
        ("failures", "Failures", "Runs that failed", [render_failures(record)]),
        ("runs", "Runs", "All runs", [render_runs(record)]),
        ("again", "Reproduce", "Command and machine", render_command(record)),
    ]
    title, seed = f"{record.name}: {record.question}", f"{record.name} {record.scale} {record.data}"
    style = read_resource("vitrail.studies", "report.css")
    return render_document(title, seed, top, parts, "the study’s name, scale and data", style)


def render_paper_finding(record: StudyRecord) -> Markup:
    """Return the box with the authors' finding."""
    found, where = h("p", join_units(record.found)), h("p", record.where, class_="note")
    return h("div", h("h2", "The paper found"), found, where, class_="finding")


def render_finding(record: StudyRecord) -> Markup:
    """Return the box with the finding here and its verdict."""
    answer = record.answer
    where = f"scale {record.scale}, {format_count(record.train)} training images"
    about = h("p", where, " of ", isolate(format_data_name(record)), class_="note")
    if answer is None:
        reason = h("p", f"No finding yet: {record.why_not}.")
        return h("div", h("h2", "Found here"), reason, about, class_="finding ours")
    kind = answer.agreement.replace(" ", "-")
    badge = h("p", h("span", AGREEMENT_LABELS[answer.agreement], class_=f"badge {kind}"))
    finding = h("p", join_units(answer.finding), class_="said")
    return h("div", h("h2", "Found here"), badge, finding, about, class_=f"finding ours {kind}")


def render_state(record: StudyRecord) -> Markup | None:
    """Return a notice if the study is not finished."""
    if record.is_finished:
        return None
    state = f" {len(record.results)} of {record.known} planned runs have a result"
    state += f"; {len(record.failed)} failed." if record.failed else "."
    advice = "Resume it" if record.known - len(record.results) > len(record.failed) else "Retry them"
    strong = h("strong", "This study is not finished.")
    return h("p", strong, state, f" {advice} with the same command.", class_="notice")


def render_tiles(record: StudyRecord) -> Markup:
    """Return the tiles: runs, seeds, compute time, data."""
    failed = f"{len(record.failed)} failed" if record.failed else ""
    splits = f"{format_count(record.train)} for training"
    splits += f", {format_count(record.test)} for test" if record.test else ""
    tiles = (
        ("Runs finished", f"{len(record.results)} of {record.known}", failed),
        ("Seeds", str(len(record.seeds) or "–"), ", ".join(map(str, record.seeds))),
        ("Compute time", format_duration(record.seconds), "all runs"),
        ("Images", format_data_name(record), splits),
    )
    return h("div", [render_tile(label, value, None, None, note) for label, value, note in tiles], class_="tiles")


def format_data_name(record: StudyRecord) -> str:
    return Path(record.data).name or record.data


def render_measurements(answer: Answer | None) -> list[Markup | None]:
    """Return charts, table and notes."""
    if answer is None:
        return []
    charts = h("div", [render_figure(chart) for chart in answer.charts], class_="drawn") if answer.charts else None
    rows = [[join_units(cell) for cell in row] for row in answer.rows]
    caption, first = "Results with 95 % intervals", first_numeric_column(answer.rows)
    numbers = render_table([*answer.columns], rows, caption=caption, numeric_from=first)
    method = (
        f"95{NO_BREAK_SPACE}% intervals: over seeds with three or more seeds, else over test images, which does not cover other "
        "seeds. Test images were not used to select anything."
    )
    return [charts, numbers, *[h("p", join_units(note)) for note in answer.notes], h("p", method, class_="note")]


def join_units(text: str) -> str:
    """Return the text with a no-break space between numbers and %."""
    return text.replace(" %", f"{NO_BREAK_SPACE}%")


def render_tuning(tuning: TuningScores, which: str) -> list[Markup | None]:
    """Return the table of tuning runs; the chosen learning rate is marked."""
    if not tuning.families:
        return []
    rows = tuning.list_rows(isolate, lambda score: h("b", score, " ✓", title="chosen"))
    seeds = "with one seed" if tuning.seeds == 1 else f"by the mean of {tuning.seeds} seeds"
    about = (
        f"{which} family has the same number of tuning runs. They are compared on validation images, {seeds}; the best (✓) "
        f"is then run with all seeds. {tuning.edge_note}"
    )
    caption = "Validation accuracy by family and rate"
    return [h("p", about), render_table(tuning.head, rows, caption=caption, numeric_from=len(tuning.names), fit=True)]


def render_failures(record: StudyRecord) -> Markup | None:
    """Return the table of failed runs with their errors."""
    if not record.failed:
        return None
    rows = [[isolate(f"{f.phase}: {format_point(f.at)}"), h("code", isolate(f.line))] for f in record.failed]
    return render_table(["run", "error"], rows, caption="Failed runs")


def render_runs(record: StudyRecord) -> Markup | None:
    """Return the table of all runs with scores and time."""
    if not record.results:
        return None
    rows = [
        [
            isolate(format_point(result.at)),
            result.phase,
            *(format_run_score(result.numbers.get(split)) for split in ("validation", "test")),
            (format_duration(result.seconds), result.seconds),
        ]
        for result in record.results
    ]
    head = ["run", "phase", "validation", "test", "time"]
    table = render_table(head, rows, caption="All runs", numeric_from=2, sortable=True)
    return h("details", h("summary", f"{len(rows):,} runs"), table, open=len(rows) <= 12)


def format_run_score(value: Any) -> tuple[str, float]:
    """Return a run's accuracy as text, and its sort key."""
    return (format_percent(value), float(value)) if is_number(value) else ("–", -1.0)


def render_command(record: StudyRecord) -> list[Markup | None]:
    """Return the command and the machine."""
    command = h("pre", h("code", shlex.join(record.command)), tabindex="0")
    facts = {"scale": f"{record.scale}, for {record.on}", "data": record.data, "classes": record.classes}
    facts |= {"trained": record.trained} if record.trained else {}
    facts |= {"seeds": ", ".join(map(str, record.seeds)), "compute time": format_duration(record.seconds)}
    facts |= record.machine
    where = "The machine is the one that wrote this page. study.json holds all numbers."
    return [command, render_definitions(facts), h("p", where, class_="note after")]


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
        for suffix in ("", "-dark"):
            svg = render_svg(chart, dark=bool(suffix))
            (docs / f"{record.name}-{k}{suffix}.svg").write_text(svg, encoding="utf-8")
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
            render_markdown_table(answer.columns, answer.rows),
            *map(escape_markdown, answer.notes),
            f"**Limits of this scale:** {escape_markdown(answer.limits)}",
        ]
    command = " ".join(shlex.join(record.command).split())  # one line, even if a name has a line break
    parts += ["## How it was run", f"```console\n$ {command}\n```", render_markdown_setup(record)]
    for phase, what in (("base", "Learning rates tried in pre-training"), ("tune", "Learning rates tried")):
        if chosen := render_markdown_tuning(TuningScores(record.results, phase)):
            parts.append(f"<details><summary>{what}, by validation accuracy</summary>\n\n{chosen}\n\n</details>")
    if record.failed:
        lines = [f"- {escape_markdown(format_point(f.at))}: {escape_markdown(f.line)}" for f in record.failed]
        parts.append("Failed runs:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def render_charts(name: str, answer: Answer) -> list[str]:
    """Return an HTML picture element for each chart, in light and dark."""
    return [
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-{k}-dark.svg">'
        f'<img alt="{html.escape(chart.title)}" src="{name}-{k}.svg"></picture>'
        for k, chart in enumerate(answer.charts, start=1)
    ]


def render_markdown_setup(record: StudyRecord) -> str:
    """Return the table of data, seeds, time and machine."""
    machine = record.machine
    where = f"{machine.get('processor')}, {machine.get('cores')} cores, GPU: {machine.get('GPU')}"
    judged = f", evaluated on {format_count(record.test)} test images" if record.test else ""
    images = f"{format_count(record.train)} training images{judged}, {record.classes} classes"
    failed = f", {len(record.failed)} failed" if record.failed else ""
    facts = {
        "scale": record.scale,
        "data": f"{Path(record.data).name}: {images}",
        "runs": f"{len(record.results)} of {record.known}{failed}",
        "seeds": ", ".join(map(str, record.seeds)) or "none yet",
        "trained": record.trained,
        "compute time": f"{format_duration(record.seconds)}, all runs",
        "machine": f"{where}; PyTorch {machine.get('torch')}, vitrail {machine.get('vitrail')}",
    }
    return render_markdown_table(("", ""), [fact for fact in facts.items() if fact != ("trained", "")])


def render_markdown_tuning(tuning: TuningScores) -> str:
    """Return the table of tuning runs; the chosen learning rate is bold."""
    if not tuning.families:
        return ""
    rows = tuning.list_rows(escape_markdown, lambda score: f"**{score}**")
    lines = [render_markdown_table(tuning.head, ()), *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + (f"\n\n{tuning.edge_note}" if tuning.edge_note else "")


def render_markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; numeric columns are aligned right if there are more than two columns."""
    first = first_numeric_column(body) if len(head) > 2 else len(head)
    aligned = ["---:" if column >= first else "---" for column in range(len(head))]
    lines = [map(escape_markdown, head), aligned, *(map(escape_markdown, row) for row in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def first_numeric_column(rows: Sequence[Sequence[str]]) -> int:
    """Return the index from which on all columns are numeric (aligned right). Column 0 holds names."""
    width = len(rows[0]) if rows else 1

    def counts(column: int) -> bool:
        cells = [row[column] for row in rows if row[column] not in ("", "–")]
        return all(any(letter.isdigit() for letter in cell) for cell in cells)

    return next((column for column in range(1, width) if all(map(counts, range(column, width)))), width)


def escape_markdown(text: str) -> str:
    """Return text on one line, with Markdown's special characters escaped."""
    safe = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", safe)

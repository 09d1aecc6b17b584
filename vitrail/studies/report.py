"""The HTML report of a study: the paper's finding, the finding here, charts, tables, tuning and runs."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from vitrail.reports.charts.canvas import format_tick
from vitrail.reports.charts.figure import render_figure
from vitrail.reports.document import PageSection, render_document, write_html
from vitrail.reports.facts import render_definitions
from vitrail.reports.html import Markup, h, isolate, render_table
from vitrail.reports.summary import render_tile
from vitrail.studies.record import (
    AGREEMENT_LABELS,
    StudyRecord,
    build_record,
    family_key,
    first_numeric_column,
    format_point,
    write_record,
)
from vitrail.studies.study import Answer, CellResult, Setting, Study, StudySetup
from vitrail.studies.sweep import FailedCell
from vitrail.utils.text import NO_BREAK_SPACE, format_count, format_datetime, format_duration, format_percent, is_number

FamilyKey = tuple[tuple[str, Setting], ...]


@dataclass
class TuningScores:
    """Validation scores by family and learning rate, one per seed; families in order of appearance, learning rates sorted."""

    families: dict[FamilyKey, dict[Setting, list[float]]] = field(default_factory=dict)
    lrs: list[Setting] = field(default_factory=list)

    @property
    def seeds(self) -> int:
        """Return the number of seeds of each tuning run."""
        return max((len(values) for scores in self.families.values() for values in scores.values()), default=0)

    @property
    def names(self) -> list[str]:
        """Return the setting names of the families; ["family"] if families have different settings."""
        kinds = {tuple(name for name, _ in point) for point in self.families}
        return list(kinds.pop()) if len(kinds) == 1 and () not in kinds else ["family"]

    def family_cells(self, family: FamilyKey) -> list[str]:
        """Return the table cells of a family, one for each name."""
        if self.names == ["family"] and [name for name, _ in family] != ["family"]:
            return [format_point(family) or "all"]
        return [
            f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            for _, value in family
        ]

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
        return max(finite, key=lambda lr: means[lr]) if finite else None  # the first of ties

    @property
    def edge_note(self) -> str:
        """Return a warning if the best learning rate is the lowest or highest tried, else ""."""
        best: list[Setting] = [lr for point in self.families if (lr := self.best_lr(point)) is not None]
        if len(self.lrs) < 2:
            return ""
        ends = (("lowest", best.count(self.lrs[0])), ("highest", best.count(self.lrs[-1])))
        parts = " and ".join(f"the {end} tried for {count} of {len(best)}" for end, count in ends if count)
        return f"The best learning rate is {parts}: better values may lie outside the range." if parts else ""


def collect_tuning_scores(results: Sequence[CellResult], phase: str = "tune") -> TuningScores:
    """Return the tuning scores of a phase. Base models are tuned with the first seed only, and not in every study."""
    tuning = TuningScores()
    for result in results:
        if result.phase == phase and (phase == "tune" or ("rate" in result.at and result.at.get("seed") == 0)):
            value = result.numbers.get("validation")
            score = float(value) if is_number(value) and not result.numbers.get("diverged") else math.nan
            lr = result.at.get("rate")
            tuning.families.setdefault(family_key(result.at), {}).setdefault(lr, []).append(score)
            if lr not in tuning.lrs:
                tuning.lrs.append(lr)
    if phase != "tune" and len(tuning.lrs) < 2:
        return TuningScores()
    tuning.lrs.sort(key=lambda lr: (not is_number(lr), lr if is_number(lr) else 0.0))
    return tuning


def write_report(
    study: Study,
    setup: StudySetup,
    results: Sequence[CellResult],
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
    parts: list[PageSection] = [
        ("results", "Results", "Measurements", render_measurements(answer)),
        ("limits", "Limits", "Limits of this scale", [h("p", answer.limits)] if answer else []),
        (
            "tuning",
            "Tuning",
            "Selection of learning rates",
            [
                *render_tuning(collect_tuning_scores(record.results, "base"), "In pre-training every"),
                *render_tuning(collect_tuning_scores(record.results)),
            ],
        ),
        ("failures", "Failures", "Runs that failed", [render_failures(record)]),
        ("runs", "Runs", "All runs", [render_runs(record)]),
        ("again", "Reproduce", "Command and machine", render_command(record)),
    ]
    seed = f"{record.name} {record.scale} {record.data}"
    return render_document(
        f"{record.name}: {record.question}", seed, top, parts, "the study’s name, scale and data", read_style()
    )


def render_paper_finding(record: StudyRecord) -> Markup:
    """Return the box with the authors' finding."""
    return h(
        "div",
        h("h2", "The paper found"),
        h("p", join_units(record.found)),
        h("p", record.where, class_="note"),
        class_="finding",
    )


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
    left = record.known - len(record.results)
    finished = f"{len(record.results)} of {record.known} planned runs have a result"
    failed = f"; {len(record.failed)} failed" if record.failed else ""
    advice = " Resume it" if left > len(record.failed) else " Retry them"
    advice += " with the same command."
    return h("p", h("strong", "This study is not finished."), f" {finished}{failed}.", advice, class_="notice")


def render_tiles(record: StudyRecord) -> Markup:
    """Return the tiles: runs, seeds, compute time, data."""
    runs_done = f"{len(record.results)} of {record.known}"
    splits = f"{format_count(record.train)} for training" + (
        f", {format_count(record.test)} for test" if record.test else ""
    )
    return h(
        "div",
        render_tile("Runs finished", runs_done, None, None, f"{len(record.failed)} failed" if record.failed else ""),
        render_tile("Seeds", str(len(record.seeds) or "–"), None, None, ", ".join(map(str, record.seeds))),
        render_tile("Compute time", format_duration(record.seconds), None, None, "all runs"),
        render_tile("Images", format_data_name(record), None, None, splits),
        class_="tiles",
    )


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


def render_tuning(tuning_scores: TuningScores, which: str = "Every") -> list[Markup | None]:
    """Return the table of tuning runs; the chosen learning rate is marked."""
    if not tuning_scores.families:
        return []
    rows = []
    for point in tuning_scores.families:
        best, scores = (
            tuning_scores.best_lr(point),
            {lr: tuning_scores.format_score(point, lr) for lr in tuning_scores.lrs},
        )
        marked = [h("b", score, " ✓", title="chosen") if lr == best else score for lr, score in scores.items()]
        rows.append([*map(isolate, tuning_scores.family_cells(point)), *marked])
    head = [*tuning_scores.names, *(format_tick(float(lr)) if is_number(lr) else str(lr) for lr in tuning_scores.lrs)]
    seeds = "with one seed" if tuning_scores.seeds == 1 else f"by the mean of {tuning_scores.seeds} seeds"
    return [
        h(
            "p",
            f"{which} family has the same number of tuning runs. They are compared on validation images, {seeds}; the best (✓) "
            f"is then run with all seeds. {tuning_scores.edge_note}",
        ),
        render_table(
            head,
            rows,
            caption="Validation accuracy by family and rate",
            numeric_from=len(tuning_scores.names),
            fit=True,
        ),
    ]


def render_failures(record: StudyRecord) -> Markup | None:
    """Return the table of failed runs with their errors."""
    if not record.failed:
        return None
    rows = [
        [isolate(f"{f.phase}: {format_point(tuple(f.at.items()))}"), h("code", isolate(f.line))] for f in record.failed
    ]
    return render_table(["run", "error"], rows, caption="Failed runs")


def render_runs(record: StudyRecord) -> Markup | None:
    """Return the table of all runs with scores and time."""
    if not record.results:
        return None
    rows = [
        [
            isolate(format_point(tuple(result.at.items()))),
            result.phase,
            *(format_run_score(result, split) for split in ("validation", "test")),
            (format_duration(result.seconds), result.seconds),
        ]
        for result in record.results
    ]
    head = ["run", "phase", "validation", "test", "time"]
    table = render_table(head, rows, caption="All runs", numeric_from=2, sortable=True)
    return h("details", h("summary", f"{len(rows):,} runs"), table, open=len(rows) <= 12)


def format_run_score(result: CellResult, split: str) -> tuple[str, float]:
    """Return a run's accuracy as text, and its sort key."""
    value = result.numbers.get(split)
    return (format_percent(value), float(value)) if is_number(value) else ("–", -1.0)


def render_command(record: StudyRecord) -> list[Markup | None]:
    """Return the command and the machine."""
    command = h("pre", h("code", shlex.join(record.command)), tabindex="0")
    facts = {"scale": f"{record.scale}, for {record.on}", "data": record.data, "classes": record.classes}
    facts |= {"trained": record.trained} if record.trained else {}
    facts |= {
        "seeds": ", ".join(map(str, record.seeds)),
        "compute time": format_duration(record.seconds),
        **record.machine,
    }
    where = "The machine is the one that wrote this page. study.json holds all numbers."
    return [command, render_definitions(facts), h("p", where, class_="note after")]


@cache
def read_style() -> str:
    return (files("vitrail.studies") / "report.css").read_text(encoding="utf-8").strip()

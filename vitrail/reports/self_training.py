"""The page of self-training: accuracy round by round, and the predicted labels that were learnt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from vitrail.reports.charts.canvas import Chart, Series
from vitrail.reports.charts.figure import render_figure
from vitrail.reports.compare import compare_runs
from vitrail.reports.document import PageSection, build_verdict_section, render_document, render_heading, write_html
from vitrail.reports.html import Markup, h, render_table
from vitrail.utils.scores import METRICS, find_score, format_score, format_score_interval
from vitrail.utils.text import format_percent

NOTE = "The round with the best score on validation images is kept; test images take no part in that choice."


@dataclass(frozen=True)
class Round:
    """A finished round: its run and scores, and the predicted labels that it learnt."""

    number: int  # 0: without predicted labels
    name: str  # of the run's directory, or the teacher that was given
    scores: Mapping[str, Mapping[str, Any]]  # of validation and test
    taken: int = 0  # images with a predicted label
    copies: int = 0  # these, with repetitions
    per_class: Mapping[str, int] = field(default_factory=dict)
    correct: int | None = None  # predicted labels that are right, where that is known


@dataclass(frozen=True)
class SelfTrainingRecord:
    """All rounds, and the one that is kept."""

    data: str
    unlabelled: str
    labelled: int  # training images with labels
    images: int  # without
    threshold: float
    best: str
    rounds: tuple[Round, ...]


def write_self_training_report(directory: Path, record: SelfTrainingRecord) -> Path:
    """Write report.html into the directory of the rounds, and return its path."""
    path = directory / "report.html"
    write_html(render_self_training(directory, record), path)
    return path


def render_self_training(directory: Path, record: SelfTrainingRecord) -> str:
    """Return the page."""
    split = last_split(record)
    first = record.rounds[0]
    best = next(one for one in record.rounds if one.name == record.best)
    name = find_score(best.scores[split])
    title = f"Self-training on {PurePath(record.data).name}: {METRICS[name].phrase} {describe_score(best, split)}"
    base = "with the labels alone" if first.name.startswith("round-") else "of the teacher"
    lead = (
        f"{describe_score(first, split)} {base}, {describe_score(best, split)} with predicted labels, on {split} images. "
        f"{record.labelled:,} images have labels; {record.images:,} have none, and their predicted label is learnt where the "
        f"confidence is at least {record.threshold:g}."
    )
    top = render_heading(("self-training", directory.name), title, lead)
    sections: list[PageSection] = [
        ("results", "Results", "Rounds", [render_rounds(record), h("p", NOTE, class_="note")]),
        ("chart", "Accuracy", "Accuracy by round", [render_score_chart(record, split)]),
        ("labels", "Labels", "Predicted labels of each class", [render_class_chart(record)]),
        *build_tests(directory, record),
    ]
    return render_document(title, f"{record.data} {record.unlabelled}", top, sections, "the names of the data")


def last_split(record: SelfTrainingRecord) -> str:
    """Return the split that results are reported on: test if there is one."""
    return "test" if all("test" in one.scores for one in record.rounds) else "validation"


def describe_score(one: Round, split: str) -> str:
    """Return "87.4 % (83.5–90.5)"."""
    metrics = one.scores[split]
    name = find_score(metrics)
    ends = format_score_interval(name, metrics.get("interval"))
    return format_score(name, metrics[name]) + (f" ({ends})" if ends else "")


def describe_round(one: Round, record: SelfTrainingRecord) -> str:
    """Return the name of a round, with the mark of the one that is kept."""
    if not one.name.startswith("round-"):
        return f"teacher {PurePath(one.name).name}"
    name = "labels alone" if one.number == 0 else f"round {one.number}"
    return f"{name}, kept" if one.name == record.best else name


def render_rounds(record: SelfTrainingRecord) -> Markup:
    """Return the table of the rounds."""
    splits = [split for split in ("validation", "test") if all(split in one.scores for one in record.rounds)]
    known = any(one.correct is not None for one in record.rounds)
    head = ["round", "predicted labels", "with copies", *(["of these right"] if known else []), *splits]
    rows = []
    for one in record.rounds:
        right = "–" if one.correct is None else f"{one.correct:,} ({format_percent(one.correct / max(1, one.taken))})"
        scores = [describe_score(one, split) for split in splits]
        counts = [f"{one.taken:,}", f"{one.copies:,}"] if one.number else ["–", "–"]
        rows.append([describe_round(one, record), *counts, *([right] if known else []), *scores])
    return render_table(head, rows, caption="Rounds of self-training", numeric_from=1)


def render_score_chart(record: SelfTrainingRecord, split: str) -> Markup:
    """Return the chart of accuracy by round, with intervals."""
    names = [describe_round(one, record) for one in record.rounds]
    metrics = [one.scores[split] for one in record.rounds]
    ends = [each.get("interval") or (each[find_score(each)],) * 2 for each in metrics]
    series = Series(
        split,
        tuple(names),
        tuple(float(each[find_score(each)]) for each in metrics),
        tuple(float(low) for low, _ in ends),
        tuple(float(high) for _, high in ends),
    )
    return render_figure(Chart(f"Score on {split} images", "dots", (series,), y_name=f"{split} images, 95 % interval"))


def render_class_chart(record: SelfTrainingRecord) -> Markup | None:
    """Return the number of predicted labels of each class, by round."""
    series = tuple(
        Series(f"round {one.number}", tuple(one.per_class), tuple(map(float, one.per_class.values())))
        for one in record.rounds
        if one.per_class
    )
    if not series:
        return None
    return render_figure(Chart("Images learnt with a predicted label", "bars", series, y_name="images", percent=False))


def build_tests(directory: Path, record: SelfTrainingRecord) -> list[PageSection]:
    """Return the section of the paired test of the kept round against the labels alone, if there are two runs to compare."""
    first = record.rounds[0]
    if not first.name.startswith("round-") or first.name == record.best:
        return []
    comparison = compare_runs([directory / first.name, directory / record.best])
    verdicts = zip(comparison.verdicts, (pair.is_significant for pair in comparison.pairs), strict=True)
    return [build_verdict_section(verdicts)]

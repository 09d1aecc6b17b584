"""Results class by class, and which classes are taken for which."""

from typing import Any

import numpy as np

from vitrail.evaluate import several, single
from vitrail.evaluate.intervals import wilson
from vitrail.report.charts import bar
from vitrail.report.markup import Markup, h, name, table
from vitrail.report.matrix import confusion_matrix
from vitrail.report.run import Evaluation
from vitrail.report.words import count, percent, span

MOST_ROWS = 40  # of a table that stands open
WEAKEST = 20
MOST_MATRIX = 30
PAIRS = 20


def classes(evaluation: Evaluation, labels: list[str]) -> list[Markup]:
    """A row for each class, the weakest first; where there are very many, the weakest, and all behind a click.

    A class that no picture has and that was never said has no row.
    """
    rows = _several(evaluation, labels) if evaluation.several else _single(evaluation, labels)
    head = (
        ["class", "pictures", "average precision", "precision", "recall", "F1"]
        if evaluation.several
        else ["class", "pictures", "right (recall)", "95 %", "precision", "F1"]
    )
    if len(rows) <= MOST_ROWS:
        return [table(head, rows, caption="Results of each class", numbers=1, sortable=True)]
    return [
        h("h3", f"The {WEAKEST} weakest of {len(rows):,}"),
        table(head, rows[:WEAKEST], caption="The weakest classes", numbers=1, sortable=True),
        h(
            "details",
            h("summary", f"All {len(rows):,} classes"),
            table(head, rows, caption="Results of each class", numbers=1, sortable=True),
        ),
    ]


def _single(evaluation: Evaluation, labels: list[str]) -> list[list]:
    found = single.per_class(evaluation.verdicts)
    order = np.lexsort((-found["support"], found["recall"]))  # numbers first: nan sorts last
    rows = []
    for k in order[(found["support"] + found["said"])[order] > 0]:
        support, right = int(found["support"][k]), int(found["right"][k])
        within = wilson(right, support) if support else None
        rows.append(
            [
                (name(labels[k]), labels[k]),
                (count(support), support),
                _share(found["recall"][k], within),
                (span(within, 0) if within else "–", within[0] if within else -1),
                _share(found["precision"][k]),
                _share(found["f1"][k]),
            ]
        )
    return rows


def _several(evaluation: Evaluation, labels: list[str]) -> list[list]:
    found = several.per_class(evaluation.logits, evaluation.targets)
    order = np.lexsort((-found["support"], found["average_precision"]))
    return [
        [
            (name(labels[k]), labels[k]),
            (count(int(found["support"][k])), int(found["support"][k])),
            _share(found["average_precision"][k], bars=True),
            *(_share(found[key][k]) for key in ("precision", "recall", "f1")),
        ]
        for k in order[(found["support"] + found["said"])[order] > 0]
    ]


def _share(value: Any, within: tuple[float, float] | None = None, bars: bool = False) -> tuple[Markup | str, float]:
    if np.isnan(value):
        return "–", -1.0
    if within is None and not bars:
        return percent(float(value)), float(value)
    return h("span", bar(float(value), 1, within), h("span", percent(float(value))), class_="barred"), float(value)


def confusion(evaluation: Evaluation, labels: list[str]) -> list[Markup]:
    """The matrix for few classes; for many, the pairs that are mixed up most often."""
    verdicts = evaluation.verdicts
    pairs = single.confused_pairs(verdicts, 3 if verdicts.classes <= MOST_MATRIX else PAIRS)
    if verdicts.classes <= MOST_MATRIX:
        worst = []
        if pairs and verdicts.classes > 2 and pairs[0][2] > 1:
            truth, said, often = pairs[0]
            worst = [
                h(
                    "p",
                    "Most often mixed up: ",
                    name(labels[truth]),
                    " taken for ",
                    name(labels[said]),
                    f", {often:,}×.",
                )
            ]
        return [*worst, confusion_matrix(single.confusion(verdicts), labels)]
    if not pairs:
        return [h("p", "No picture was taken for another class.")]
    support = single.per_class(verdicts)["support"]
    rows = [
        [
            (name(labels[truth]), labels[truth]),
            (name(labels[said]), labels[said]),
            (count(often), often),
            (percent(often / support[truth], 0), often / support[truth]),
        ]
        for truth, said, often in pairs
    ]
    head = ["is", "was taken for", "pictures", "of that class"]
    note = h("p", f"A matrix of {verdicts.classes:,} classes would not be legible; these are the commonest mistakes.")
    return [note, table(head, rows, caption="Classes most often confused", numbers=2, sortable=True)]

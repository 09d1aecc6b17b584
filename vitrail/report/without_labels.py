"""Runs that learnt without labels, side by side: their signals, and where their recipes differ."""

from typing import TYPE_CHECKING, Any

from vitrail.report.charts import Line, line_chart, of_rows, thinned
from vitrail.report.curves import percent_ticks
from vitrail.report.headline import METHODS
from vitrail.report.markup import Markup, h, join, name, plain, table
from vitrail.report.neighbours import found
from vitrail.report.run import Run
from vitrail.report.signals import SIGNALS
from vitrail.report.words import count, duration, is_number, number, percent, span

if TYPE_CHECKING:
    from vitrail.report.compare import Comparison

DASHES = ("", "7 4", "2 4", "10 3 2 3")
MOST_POINTS = 100
KNOWN = ("loss", "knn", "knn_pixels", "knn_random", "spread", "rank", "teacher_entropy", "teacher_diversity")
NOTE = (
    "Losses of different methods measure different things: compare them within a method only. Intervals that overlap "
    "leave it open which run is better."
)


def row(run: Run) -> dict[str, Any]:
    """A run's numbers, ready for JSON: of its end, else of its last look."""
    summary = run.summary or {}
    last = (run.validation[-1] if run.validation else {}) | summary
    within = found(last).get("knn", (None, None))[1]
    return {
        "method": run.method or None,
        "split": run.split or "validation",
        **{key: last[key] if is_number(last.get(key)) else None for key in KNOWN},
        "interval": list(within) if within else None,
        "stopped": summary.get("stopped"),
        "collapse": run.collapse,
    }


def scores(comparison: "Comparison") -> list[Markup]:
    """A line for each run."""
    rows = []
    for place, each in enumerate(comparison.names):
        row = comparison.row(place)
        rows.append(
            [
                (join([name(each), h("span", f" {state(row)}", class_="quiet") if state(row) else None]), each),
                METHODS.get(str(row["method"]), row["method"] or "–"),
                (percent(row["knn"]), -1 if row["knn"] is None else row["knn"]),
                span(row["interval"]) or "–",
                *((percent(row[key]), row[key] or 0) for key in ("knn_pixels", "knn_random")),
                *((number(row[key]), row[key] or 0) for key in ("loss", "rank", "spread")),
                (duration(row["seconds"]), row["seconds"] or 0),
                (count(row["steps"]), row["steps"] or 0),
            ]
        )
    head = [
        "run",
        "method",
        "k-NN",
        "95 %",
        "pixels",
        "untrained",
        "loss",
        "rank",
        "spread",
        "time",
        "steps",
    ]
    return [
        table(head, rows, caption="Signals of the runs", numbers=2, sortable=True),
        h("p", NOTE, class_="note"),
    ]


def state(row: dict[str, Any]) -> str:
    """What is to be known of a run before its numbers are compared."""
    if row["collapse"]:
        return f"collapsed at step {count(row['collapse'].get('step'))}"
    return "" if row["finished"] else "not finished"


def lines(comparison: "Comparison") -> list[list[str]]:
    """The same for a terminal."""
    rows = [["run", "method", "k-NN", "95 %", "pixels", "untrained", "loss", "rank", "spread", "time", "steps", ""]]
    for place in range(len(comparison.runs)):
        row = comparison.row(place)
        rows.append(
            [
                plain(row["name"]),
                str(row["method"] or "–"),
                percent(row["knn"]),
                span(row["interval"]) or "–",
                *(percent(row[key]) for key in ("knn_pixels", "knn_random")),
                *(number(row[key]) for key in ("loss", "rank", "spread")),
                duration(row["seconds"]),
                count(row["steps"]),
                state(row),
            ]
        )
    return rows


def curves(comparison: "Comparison") -> list[Markup | None]:
    """Each signal of all runs over one another."""

    def over(rows: str, key: str) -> list[Line]:
        return [
            Line(
                each,
                thinned(of_rows(getattr(run, rows), "epoch", key), MOST_POINTS),
                1 + place % 6,
                dashes=DASHES[place % 4],
            )
            for place, (each, run) in enumerate(zip(comparison.names, comparison.runs, strict=True))
        ]

    return [
        line_chart("Right by nearest neighbours", over("validation", "knn"), x_name="epoch", value=percent_ticks),
        line_chart("Loss on validation", over("validation", "loss"), x_name="epoch"),
        *(
            line_chart(title, over("validation", key), x_name="epoch", note=note)
            for key, (title, _, note) in SIGNALS.items()
        ),
        line_chart("Learning rate", over("training", "lr"), x_name="epoch"),
    ]

"""The page, and the lines for a terminal, of several runs side by side."""

from typing import Any

from vitrail.report import without_labels
from vitrail.report.charts import Line, bar, line_chart, of_rows, thinned
from vitrail.report.compare import Comparison, Pair
from vitrail.report.curves import percent_ticks
from vitrail.report.differences import brief
from vitrail.report.headline import data_name
from vitrail.report.markup import Markup, h, join, name, plain, table
from vitrail.report.words import count, duration, number, percent, span

DASHES = ("", "7 4", "2 4", "10 3 2 3")
MOST_POINTS = 100  # of a line: several noisy ones over each other hide what differs
MOST_WIDTH = 36  # of a recipe's value in the terminal


def title(comparison: Comparison) -> str:
    """What is compared."""
    data = dict.fromkeys(data_name(run) for run in comparison.runs)
    return f"{len(comparison.runs)} runs on {' and '.join(data)}" if len(data) < 3 else f"{len(comparison.runs)} runs"


def page(comparison: Comparison) -> str:
    """Scores, verdicts, curves over one another, and where the recipes differ."""
    from vitrail.report.page import document

    names = comparison.names
    top = [
        h("p", h("span", "side by side"), class_="kicker"),
        h("h1", title(comparison)),
        h("p", join([name(each) for each in names], ", "), class_="lead"),
    ]
    differ = ("recipes", "Recipes", "Where the recipes differ", [_differences(comparison)])
    if comparison.runs[0].pretraining:
        charts = h("div", without_labels.curves(comparison), class_="charts")
        parts = [
            ("scores", "Signals", "Signals at the end", without_labels.scores(comparison)),
            differ,
            ("curves", "Curves", "How training went", [charts]),
        ]
        return document(title(comparison), " ".join(names), top, parts)
    parts = [
        ("scores", "Scores", "Scores", [_scores(comparison)]),
        ("chance", "Chance", "More than chance?", _verdicts(comparison)),
        differ,
        ("curves", "Curves", "How training went", [h("div", _curves(comparison), class_="charts")]),
    ]
    return document(title(comparison), " ".join(names), top, parts)


def _scores(comparison: Comparison) -> Markup:
    rows = []
    for place, each in enumerate(comparison.names):
        row = comparison.row(place)
        interval = tuple(row["interval"]) if row["interval"] else None
        score = row["score"]
        shown = h("span", bar(score or 0, 1, interval), h("span", percent(score)), class_="barred")
        state = None if row["finished"] else h("span", " not finished", class_="quiet")
        rows.append(
            [
                (join([name(each), state]), each),
                f"{'mAP' if row['score_name'] == 'map' else 'top-1'}, {row['split']}",
                (shown, -1 if score is None else score),
                span(interval) or "–",
                (duration(row["seconds"]), row["seconds"] or 0),
                (number(row["images_per_second"]), row["images_per_second"] or 0),
                (count(row["steps"]), row["steps"] or 0),
            ]
        )
    head = ["run", "measure", "score", "95 %", "time", "pictures a second", "steps"]
    return table(head, rows, caption="Scores of the runs", numbers=2, sortable=True)


def verdict(pair: Pair, names: list[str]) -> str:
    """What a pair of runs comes to, in a sentence."""
    first, second = names[pair.first], names[pair.second]
    found = pair.found
    if found is None:
        return f"{first} and {second} cannot be compared picture by picture: {pair.why_not}."
    points, low, high = (100 * value for value in (found.difference, *found.interval))
    ahead, behind = (second, first) if points >= 0 else (first, second)
    if points < 0:
        points, low, high = -points, -high, -low
    only = (found.second_only, found.first_only) if ahead == second else (found.first_only, found.second_only)
    said = "beyond chance" if found.beyond_chance else "within chance"
    if not points and not any(only):
        return f"{first} and {second} get the same pictures right."
    counted = f"it alone gets {only[0]:,} of {found.pictures:,} {pair.split} pictures right, {behind} alone {only[1]:,}"
    likely = ""
    if found.chance is not None:
        likely = f"; McNemar’s mid-p {'below 0.001' if found.chance < 0.001 else f'{found.chance:.3f}'}"
    within = f"{low:.1f} to {high:.1f}".replace("-", "−")
    return f"{ahead} is {points:.1f} points ahead of {behind} ({within}), {said}: {counted}{likely}."


def many(comparisons: int) -> str:
    """A word of caution where there are several tests, or none."""
    if comparisons < 2:
        return ""
    return (
        f"Each of these {comparisons} comparisons is judged at 5 % by itself: between equals, chance alone puts one or more "
        f"of them beyond chance up to {min(100, 5 * comparisons)} times of a hundred."
    )


def _verdicts(comparison: Comparison) -> list[Markup | None]:
    items = [
        h(
            "li",
            verdict(pair, comparison.names),
            class_="beyond" if pair.found and pair.found.beyond_chance else "within",
        )
        for pair in comparison.pairs
    ]
    what = "It is two trained models that are judged here: another seed of the same recipe may differ by as much."
    caution = many(sum(pair.found is not None for pair in comparison.pairs))
    return [
        h("ul", items, class_="verdicts"),
        h("p", what, class_="note"),
        h("p", caution, class_="note") if caution else None,
    ]


def _differences(comparison: Comparison) -> Markup:
    if not comparison.differences:
        return h("p", "Nowhere: the recipes are the same.")
    rows = [
        [h("code", key), *(h("code", brief(value)) for value in values)]
        for key, values in comparison.differences.items()
    ]
    heads = [name(each) for each in comparison.names]
    return table(["field", *heads], rows, caption="Fields in which the recipes differ")


def _curves(comparison: Comparison) -> list[Markup | None]:
    def lines(rows: str, y: str | None) -> list[Line]:
        return [
            Line(
                each,
                thinned(of_rows(getattr(run, rows), "epoch", y or run.score_name), MOST_POINTS),
                1 + place % 6,
                dashes=DASHES[place // 6 % len(DASHES)] if len(comparison.runs) > 6 else DASHES[place % len(DASHES)],
            )
            for place, (each, run) in enumerate(zip(comparison.names, comparison.runs, strict=True))
        ]

    score = " or ".join(dict.fromkeys("mAP" if run.several else "right (top-1)" for run in comparison.runs))
    return [
        line_chart(f"On validation: {score}", lines("validation", None), x_name="epoch", value=percent_ticks),
        line_chart("Loss on validation", lines("validation", "loss"), x_name="epoch"),
        line_chart("Loss in training", lines("training", "loss"), x_name="epoch"),
        line_chart("Learning rate", lines("training", "lr"), x_name="epoch"),
    ]


def text(comparison: Comparison) -> str:
    """The comparison for a terminal."""
    if comparison.runs[0].pretraining:
        made = _aligned(without_labels.lines(comparison), right=set(range(2, 11)))
        return "\n".join([*made, *_differing(comparison), "", without_labels.NOTE]).replace("\u00a0", " ")
    rows = [["run", "score", "95 %", "measure", "time", "images/s", "steps"]]
    for place in range(len(comparison.runs)):
        row = comparison.row(place)
        measure = f"{row['score_name']}, {row['split']}" + ("" if row["finished"] else ", not finished")
        rows.append(
            [
                plain(row["name"]),
                percent(row["score"]),
                span(row["interval"]) or "–",
                measure,
                duration(row["seconds"]),
                number(row["images_per_second"]),
                count(row["steps"]),
            ]
        )
    made = _aligned(rows, right={1, 2, 4, 5, 6})
    made += _differing(comparison)
    made += ["", *(plain(verdict(pair, comparison.names)) for pair in comparison.pairs)]
    caution = many(sum(pair.found is not None for pair in comparison.pairs))
    made += [caution] if caution else []
    return "\n".join(made).replace("\u00a0", " ")


def _differing(comparison: Comparison) -> list[str]:
    if not comparison.differences:
        return ["", "The recipes are the same."]
    rows = [["recipe", *map(plain, comparison.names)]]
    rows += [[key, *(_short(value) for value in values)] for key, values in comparison.differences.items()]
    return ["", *_aligned(rows, right=set())]


def _short(value: Any) -> str:
    shown = plain(brief(value))
    return shown if len(shown) <= MOST_WIDTH else shown[: MOST_WIDTH - 1] + "…"


def _aligned(rows: list[list[str]], right: set[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

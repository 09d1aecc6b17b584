"""Comparison of several runs as an HTML page and as text for the terminal."""

from typing import Any

from vitrail.reports.charts.lines import ChartLine, downsample_points, extract_points, render_bar, render_line_chart
from vitrail.reports.compare import PairComparison, RunComparison
from vitrail.reports.curves import SIGNAL_CHARTS, format_percent_tick
from vitrail.reports.document import PageSection, render_document
from vitrail.reports.html import Markup, clean_text, h, isolate, join_markup, render_table
from vitrail.reports.run import format_value
from vitrail.reports.summary import METHOD_NAMES, get_data_name
from vitrail.utils.text import (
    format_count,
    format_duration,
    format_interval,
    format_number,
    format_percent,
    format_table,
)

LINE_DASHES = ("", "7 4", "2 4", "10 3 2 3")
MAX_COMPARED_POINTS = 100
MAX_VALUE_WIDTH = 36  # characters of a recipe value in the terminal
PRETRAINING_NOTE = (
    "Losses of different methods are not comparable. Where intervals overlap, the runs do not clearly differ."
)
SEED_NOTE = "This compares two trained models: another seed of the same recipe may differ by as much."
PRETRAINING_HEAD = ["run", "method", "k-NN", "95 %", "pixels", "untrained", "loss", "rank", "spread", "time", "steps"]
SUPERVISED_HEAD = ["run", "metric", "score", "95 %", "time", "images/s", "steps"]


def build_score_rows(comparison: RunComparison) -> list[list[tuple[str, Any]]]:
    """Return a row per run: pairs of the shown text and the sort key, under PRETRAINING_HEAD or SUPERVISED_HEAD."""
    rows = []
    for index in range(len(comparison.runs)):
        run = comparison.summarise_run(index)
        time = format_duration(run["seconds"]), run["seconds"] or 0
        steps = format_count(run["steps"]), run["steps"] or 0
        interval = format_interval(run["interval"]) or "–"
        if comparison.runs[0].is_pretraining:
            method = METHOD_NAMES.get(str(run["method"]), run["method"] or "–")
            cells = [(method, method), (format_percent(run["knn"]), -1 if run["knn"] is None else run["knn"])]
            cells.append((interval, interval))
            cells += [(format_percent(run[key]), run[key] or 0) for key in ("knn_pixels", "knn_random")]
            cells += [(format_number(run[key]), run[key] or 0) for key in ("loss", "rank", "spread")]
        else:
            metric = f"{'mAP' if run['score_name'] == 'map' else 'top-1'}, {run['split']}"
            score = format_percent(run["score"]), -1 if run["score"] is None else run["score"]
            speed = format_number(run["images_per_second"]), run["images_per_second"] or 0
            rows.append([(run["name"], run["name"]), (metric, metric), score, (interval, interval), time, speed, steps])
            continue
        rows.append([(run["name"], run["name"]), *cells, time, steps])
    return rows


def format_state(summary: dict[str, Any]) -> str:
    """Return "collapsed at step 100", "not finished" or "" for a finished run."""
    if summary.get("collapse"):
        return f"collapsed at step {format_count(summary['collapse'].get('step'))}"
    return "" if summary["finished"] else "not finished"


def render_scores(comparison: RunComparison) -> list[Markup | None]:
    """Return the table of scores."""
    pretraining = comparison.runs[0].is_pretraining
    rows: list[list[Any]] = []
    for index, cells in enumerate(build_score_rows(comparison)):
        run, row = comparison.summarise_run(index), list[Any](cells)
        state = format_state(run)
        name = join_markup([isolate(run["name"]), h("span", f" {state}", class_="quiet") if state else None])
        row[0] = (name, run["name"])
        if not pretraining:
            interval = tuple(run["interval"]) if run["interval"] else None
            bar = render_bar(run["score"] or 0, 1, interval)
            row[2] = (h("span", bar, h("span", cells[2][0]), class_="barred"), cells[2][1])
        rows.append(row)
    head = PRETRAINING_HEAD if pretraining else SUPERVISED_HEAD
    table = render_table([*head], rows, caption="Scores of the runs", numeric_from=2, sortable=True)
    return [table, h("p", PRETRAINING_NOTE, class_="note") if pretraining else None]


def render_curves(comparison: RunComparison) -> list[Markup | None]:
    """Return the training curves of all runs in common charts."""

    def lines(log: str, key: str | None) -> list[ChartLine]:
        many = len(comparison.runs) > 6
        return [
            ChartLine(
                name,
                downsample_points(
                    extract_points(getattr(run, log), "epoch", key or run.score_name), MAX_COMPARED_POINTS
                ),
                1 + index % 6,
                dashes=LINE_DASHES[(index // 6 if many else index) % len(LINE_DASHES)],
            )
            for index, (name, run) in enumerate(zip(comparison.names, comparison.runs, strict=True))
        ]

    if comparison.runs[0].is_pretraining:
        title, key = "k-NN accuracy", "knn"
        others = [
            render_line_chart(signal_title, lines("validation", signal), x_label="epoch", note=note)
            for signal, (signal_title, _, note) in SIGNAL_CHARTS.items()
        ]
    else:
        names = dict.fromkeys("mAP" if run.is_multilabel else "top-1 accuracy" for run in comparison.runs)
        title, key = f"Validation {' or '.join(names)}", None
        others = [render_line_chart("Training loss", lines("training", "loss"), x_label="epoch")]
    return [
        render_line_chart(title, lines("validation", key), x_label="epoch", format_y=format_percent_tick),
        render_line_chart("Validation loss", lines("validation", "loss"), x_label="epoch"),
        *others,
        render_line_chart("Learning rate", lines("training", "lr"), x_label="epoch"),
    ]


def format_comparison_title(comparison: RunComparison) -> str:
    """Return "3 runs on clothing"."""
    data = dict.fromkeys(get_data_name(run) for run in comparison.runs)
    return f"{len(comparison.runs)} runs on {' and '.join(data)}" if len(data) < 3 else f"{len(comparison.runs)} runs"


def render_comparison_page(comparison: RunComparison) -> str:
    """Return the page: scores, significance of differences, differences of the recipes, training curves."""
    names = comparison.names
    title = format_comparison_title(comparison)
    top = [
        h("p", h("span", "comparison"), class_="kicker"),
        h("h1", title),
        h("p", join_markup([isolate(name) for name in names], ", "), class_="lead"),
    ]
    sections: list[PageSection] = [("scores", "Scores", "Scores", render_scores(comparison))]
    if not comparison.runs[0].is_pretraining:
        verdicts = _render_verdicts(comparison)
        sections.append(("chance", "Significance", "Statistical significance of the differences", verdicts))
    sections += [
        ("recipes", "Recipes", "Differences of the recipes", [_render_differences(comparison)]),
        ("curves", "Curves", "Training curves", [h("div", render_curves(comparison), class_="charts")]),
    ]
    return render_document(title, " ".join(names), top, sections)


def format_pair_verdict(pair: PairComparison, names: list[str]) -> str:
    """Return the result of the paired test of two runs as a sentence."""
    first, second = names[pair.first], names[pair.second]
    test = pair.test
    if test is None:
        return f"{first} and {second} cannot be compared image by image: {pair.reason}."
    points, low, high = (100 * value for value in (test.difference, *test.interval))
    ahead, behind = (second, first) if points >= 0 else (first, second)
    if points < 0:
        points, low, high = -points, -high, -low
    only = (test.second_only, test.first_only) if ahead == second else (test.first_only, test.second_only)
    if not points and not any(only):
        return f"{first} and {second} classify the same images correctly."
    verdict = "significant" if test.is_significant else "not significant"
    p_value = ""
    if test.p_value is not None:
        p_value = f" (McNemar’s mid-p {'< 0.001' if test.p_value < 0.001 else f'{test.p_value:.3f}'})"
    interval = f"{low:.1f} to {high:.1f}".replace("-", "−")
    counts = (
        f"of {test.images:,} {pair.split} images, {only[0]:,} are correct only in {ahead}, {only[1]:,} only in {behind}"
    )
    return f"{ahead} is {points:.1f} points ahead of {behind} ({interval}), {verdict}{p_value}: {counts}."


def format_multiple_testing_note(comparisons: int) -> str:
    """Return the note on several tests at 5 %, or "" for one."""
    if comparisons < 2:
        return ""
    return (
        f"Each of these {comparisons} comparisons is tested at 5 %, without correction: between equal models, the probability "
        f"of at least one significant difference is up to {min(100, 5 * comparisons)} %."
    )


def _multiple_testing_note(comparison: RunComparison) -> str:
    return format_multiple_testing_note(sum(pair.test is not None for pair in comparison.pairs))


def _render_verdicts(comparison: RunComparison) -> list[Markup | None]:
    items = [
        h(
            "li",
            format_pair_verdict(pair, comparison.names),
            class_="beyond" if pair.test and pair.test.is_significant else "within",
        )
        for pair in comparison.pairs
    ]
    notes = [note for note in (SEED_NOTE, _multiple_testing_note(comparison)) if note]
    return [h("ul", items, class_="verdicts"), *(h("p", note, class_="note") for note in notes)]


def _render_differences(comparison: RunComparison) -> Markup:
    if not comparison.differences:
        return h("p", "The recipes are equal.")
    rows = [
        [h("code", key), *(h("code", format_value(value)) for value in values)]
        for key, values in comparison.differences.items()
    ]
    names = [isolate(name) for name in comparison.names]
    return render_table(["field", *names], rows, caption="Fields in which the recipes differ")


def format_run_comparison(comparison: RunComparison) -> str:
    """Return the comparison as text for the terminal."""
    pretraining = comparison.runs[0].is_pretraining
    rows = [[*(PRETRAINING_HEAD if pretraining else SUPERVISED_HEAD), ""]]
    for index, cells in enumerate(build_score_rows(comparison)):
        rows.append([*(clean_text(text) for text, _ in cells), format_state(comparison.summarise_run(index))])
    lines = format_table(rows, right=range(2, len(rows[0]) - 1))
    lines += _format_differences(comparison)
    if pretraining:
        lines += ["", PRETRAINING_NOTE]
    else:
        lines += ["", *(clean_text(format_pair_verdict(pair, comparison.names)) for pair in comparison.pairs)]
        lines += filter(None, [_multiple_testing_note(comparison)])
    return "\n".join(lines).replace("\u00a0", " ")


def _format_differences(comparison: RunComparison) -> list[str]:
    if not comparison.differences:
        return ["", "The recipes are equal."]
    rows = [["recipe", *map(clean_text, comparison.names)]]
    rows += [[key, *(_shorten_value(value) for value in values)] for key, values in comparison.differences.items()]
    return ["", *format_table(rows)]


def _shorten_value(value: Any) -> str:
    text = clean_text(format_value(value))
    return text if len(text) <= MAX_VALUE_WIDTH else text[: MAX_VALUE_WIDTH - 1] + "…"

"""Comparison of several runs: scores, differences of the recipes and paired tests, as values, page and text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.metrics.paired import PairedTest
from vitrail.reports.charts import lines as charts
from vitrail.reports.curves import SIGNAL_CHARTS, describe_method, format_percent_tick
from vitrail.reports.document import PageSection, build_verdict_section, render_document, render_heading
from vitrail.reports.html import Markup, clean_text, h, isolate, join_markup, render_table
from vitrail.reports.pretraining import collect_knn_scores
from vitrail.reports.run import ABSENT, Evaluated, RunDirectory, find_differences, format_value, read_run
from vitrail.reports.summary import get_data_name
from vitrail.utils import text as formatting
from vitrail.utils.scores import METRICS, format_score, format_score_interval
from vitrail.utils.text import format_count, format_number, format_percent, is_interval, is_number

MAX_RUNS_ALL_PAIRS = 4  # up to so many runs, all pairs are compared; of more, each run with the best
MAX_COMPARED_POINTS = 100
MAX_VALUE_WIDTH = 36  # characters of a recipe value in the terminal
LINE_DASHES = ("", "7 4", "2 4", "10 3 2 3")
PRETRAINING_METRICS = (
    *("loss", "knn", "knn_pixels", "knn_random", "spread", "rank"),
    *("teacher_entropy", "teacher_diversity"),
)
PRETRAINING_NOTE = (
    "Losses of different methods are not comparable. Where intervals overlap, the runs do not clearly differ."
)
SEED_NOTE = "This compares two trained models: another seed of the same recipe may differ by as much."


@dataclass(frozen=True)
class PairComparison:
    """Paired test of two runs on the same images, or the reason why there is none."""

    first: int  # index of the run
    second: int
    split: str
    test: PairedTest | None
    reason: str = ""

    @property
    def is_significant(self) -> bool:
        return self.test is not None and self.test.is_significant


@dataclass(frozen=True)
class RunComparison:
    """Runs in the given order, with the differences of their recipes and the paired tests."""

    runs: list[RunDirectory]
    names: list[str]
    differences: dict[str, list[Any]]
    pairs: list[PairComparison]

    @property
    def is_pretraining(self) -> bool:
        return self.runs[0].is_pretraining

    @cached_property
    def summaries(self) -> list[dict[str, Any]]:
        """Return the numbers of each run for JSON."""
        return [self._summarise_run(index) for index in range(len(self.runs))]

    def _summarise_run(self, index: int) -> dict[str, Any]:
        run = self.runs[index]
        summary = run.summary or {}
        differing = {key: values[index] for key, values in self.differences.items()}
        return {
            "name": self.names[index],
            "directory": str(run.directory),
            "finished": run.is_finished,
            **(summarise_pretraining_run(run) if run.is_pretraining else summarise_supervised_run(run)),
            "seconds": summary.get("seconds"),
            "media": run.media,
            "images_per_second": summary.get("images_per_second"),
            "steps": summary.get("steps") or (run.training[-1]["step"] if run.training else None),
            "differs": {key: None if value is ABSENT else value for key, value in differing.items()},
        }

    @property
    def media(self) -> str:
        """Return what the samples of the first run are: image or video."""
        return self.runs[0].media

    @property
    def verdicts(self) -> list[str]:
        """Return the results of the paired tests as sentences."""
        return [format_pair_verdict(pair, self.names) for pair in self.pairs]

    @property
    def caution(self) -> str:
        """Return the note on several tests at 5 %, or ""."""
        return format_multiple_testing_note(sum(pair.test is not None for pair in self.pairs))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {"runs": self.summaries, "pairs": [pair_to_dict(pair, self.names) for pair in self.pairs]}


def summarise_supervised_run(run: RunDirectory) -> dict[str, Any]:
    """Return the final score of a supervised run, or that of its last validation if it is unfinished."""
    metrics = run.split_metrics(run.split or "")
    score = metrics.get(run.score_name)
    if score is None and run.validation:
        score = run.validation[-1].get(run.score_name)
    interval = metrics.get("interval")
    return {
        "split": run.split or "validation",
        "score_name": run.score_name,
        "score": score if is_number(score) else None,
        "interval": list(interval) if is_interval(interval) else None,
        "images": metrics.get("images"),
    }


def summarise_pretraining_run(run: RunDirectory) -> dict[str, Any]:
    """Return the final signals of a self-supervised run, or those of its last validation if it is unfinished."""
    summary = run.summary or {}
    last = (run.validation[-1] if run.validation else {}) | summary
    interval = collect_knn_scores(last).get("knn", (None, None))[1]
    return {
        "method": run.method or None,
        "method_name": describe_method(run).name or "–",
        "split": run.split or "validation",
        **{key: last[key] if is_number(last.get(key)) else None for key in PRETRAINING_METRICS},
        "interval": list(interval) if interval else None,
        "stopped": summary.get("stopped"),
        "collapse": run.collapse,
        "verdict": summary.get("verdict"),
    }


def pair_to_dict(pair: PairComparison, names: list[str]) -> dict[str, Any]:
    """Return a paired comparison for JSON."""
    runs: dict[str, Any] = {"first": names[pair.first], "second": names[pair.second], "split": pair.split}
    test = pair.test
    if test is None:
        return runs | {"compared": False, "reason": pair.reason}
    return runs | {
        "compared": True,
        "pictures": test.images,
        "first_only": test.first_only,
        "second_only": test.second_only,
        "difference": test.difference,
        "interval": list(test.interval),
        "chance": test.p_value,
        "beyond_chance": test.is_significant,
    }


def compare_runs(directories: Sequence[str | Path]) -> RunComparison:
    """Read the runs and compare them."""
    if len(directories) < 2:
        raise ValueError(f"a comparison needs at least 2 runs, got {len(directories)}")
    runs = [read_run(directory) for directory in directories]
    paths = [run.directory.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        twice = next(run.directory for run in runs if paths.count(run.directory.resolve()) > 1)
        raise ValueError(f"{twice} is given twice: give each run once")
    if len({run.is_pretraining for run in runs}) > 1:
        one, other = (next(run.directory for run in runs if run.is_pretraining is kind) for kind in (True, False))
        raise ValueError(f"{one} is a pretraining run and {other} is not: compare runs of one kind")
    comparison = RunComparison(runs, _unique_names(runs), diff_runs(runs), [])
    if comparison.is_pretraining:
        return comparison
    pairs = list(combinations(range(len(runs)), 2))
    if len(runs) > MAX_RUNS_ALL_PAIRS:
        scores = [-1.0 if summary["score"] is None else summary["score"] for summary in comparison.summaries]
        best = scores.index(max(scores))
        pairs = [(index, best) for index in range(len(runs)) if index != best]
    comparison.pairs.extend(_compare_pair(runs, first, second) for first, second in pairs)
    return comparison


def diff_runs(runs: list[RunDirectory]) -> dict[str, list[Any]]:
    """Return the fields in which recipes, data and initial weights differ, with the value of each run."""
    differences = dict(find_differences([run.recipe if run.recipe is not None else {} for run in runs]))
    for key, path in {"data": ("data", "where"), "init": ("model", "init")}.items():
        values = [run.get(*path) for run in runs]
        if key not in differences and len(set(map(str, values))) > 1:
            differences[key] = values
    return differences


def _unique_names(runs: list[RunDirectory]) -> list[str]:
    """Return the names of the directories, with as many parent directories as make them unique."""
    parts = [run.directory.resolve().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _compare_pair(runs: list[RunDirectory], first: int, second: int) -> PairComparison:
    one, two = runs[first], runs[second]
    split = one.split if one.split and one.split == two.split else "validation"
    test = _test_pair(one, two, split)
    if isinstance(test, str):
        return PairComparison(first, second, split, None, test)
    return PairComparison(first, second, split, test)


def _test_pair(one: RunDirectory, two: RunDirectory, split: str) -> PairedTest | str:
    """Return the paired test of two runs, or the reason why there is none."""
    a, b = one.evaluations.get(split), two.evaluations.get(split)
    if a is None or b is None:
        return f"{(one if a is None else two).name} has no stored logits of its {split} split"
    kinds = [(type(e), e.is_multilabel, e.n_classes) for e in (a, b)]
    if one.get("labels") != two.get("labels") or kinds[0] != kinds[1]:
        return "their classes differ"
    order = _match_images(a, b)
    return order if isinstance(order, str) else a.compare(b, order)  # type: ignore[arg-type]  # of one kind


def _match_images(a: Evaluated, b: Evaluated) -> np.ndarray | str:
    """Return the index in `b` of each image of `a`, or the reason why there is none."""
    if not a.names or not b.names:
        return f"the names of their {a.media}s were not stored"
    if a.names == b.names:
        return np.arange(len(a.names))
    if len(set(a.names)) < len(a.names) or set(a.names) != set(b.names) or len(a.names) != len(b.names):
        return f"they were evaluated on different {a.media}s"
    indices = {name: index for index, name in enumerate(b.names)}
    return np.array([indices[name] for name in a.names])


def format_pair_verdict(pair: PairComparison, names: list[str]) -> str:
    """Return the result of the paired test of two runs as a sentence."""
    first, second = names[pair.first], names[pair.second]
    test = pair.test
    if test is None:
        return f"{first} and {second} have no paired comparison: {pair.reason}."
    factor = 100 if test.score is None else 1
    points, low, high = (factor * value for value in (test.difference, *test.interval))
    ahead, behind, only = second, first, (test.second_only, test.first_only)
    if points < 0:
        points, low, high = -points, -high, -low
        ahead, behind, only = behind, ahead, only[::-1]
    if not points and not any(only):
        alike = "are correct on the same samples" if test.counted == "correct" else "are equal on every sample"
        return f"{first} and {second} {alike}."
    verdict = "significant" if test.is_significant else "not significant"
    if test.p_value is not None:
        verdict += f" (McNemar’s mid-p {'< 0.001' if test.p_value < 0.001 else f'{test.p_value:.3f}'})"
    digits = 1 if test.score is None else 3
    interval = f"{low:.{digits}f} to {high:.{digits}f}".replace("-", "−")
    counts = f"{only[0]:,} are correct only in {ahead}, {only[1]:,} only in {behind}"
    if test.counted == "better":
        counts = f"{ahead} is better on {only[0]:,}, {behind} on {only[1]:,}"
    images = f"of {test.images:,} {pair.split} samples"
    lead = f"is {points:.1f} points ahead of" if test.score is None else f"has {points:.3f} more {test.score} than"
    return f"{ahead} {lead} {behind} ({interval}), {verdict}: {images}, {counts}."


def format_multiple_testing_note(comparisons: int) -> str:
    """Return the note on several tests at 5 %, or "" for one."""
    if comparisons < 2:
        return ""
    return (
        f"Each of these {comparisons} comparisons is tested at 5 %, without correction: between equal models, the probability "
        f"of at least one significant difference is up to {min(100, 5 * comparisons)} %."
    )


def format_state(summary: dict[str, Any]) -> str:
    """Return "collapsed at step 100", "not finished" or "" for a finished run."""
    if summary.get("collapse"):
        return f"collapsed at step {format_count(summary['collapse'].get('step'))}"
    return "" if summary["finished"] else "not finished"


def build_score_rows(comparison: RunComparison) -> list[dict[str, tuple[str, Any]]]:
    """Return the cells of each run by column: the shown text and the sort key."""

    def cell(value: Any, format_value: Callable[[Any], str]) -> tuple[str, Any]:
        return format_value(value), -1 if value is None else value

    rows = []
    for run in comparison.summaries:
        score = run.get("score_name", "")
        interval = format_score_interval(score, run["interval"]) or "–", (run["interval"] or [-1])[0]
        row = {"run": (run["name"], run["name"])}
        if comparison.is_pretraining:
            row["method"] = (run["method_name"], run["method_name"])
            row |= {"k-NN": cell(run["knn"], format_percent), "95 %": interval}
            row |= {"pixels": cell(run["knn_pixels"], format_percent)}
            row |= {"untrained": cell(run["knn_random"], format_percent)}
            row |= {key: cell(run[key], format_number) for key in ("loss", "rank", "spread")}
        else:
            metric = f"{METRICS[run['score_name']].short}, {run['split']}"
            shown = cell(run["score"], partial(format_score, score))
            row |= {"metric": (metric, metric), "score": shown, "95 %": interval}
        row["time"] = cell(run["seconds"], formatting.format_duration)
        if not comparison.is_pretraining:
            row[f"{comparison.media}s/s"] = cell(run["images_per_second"], format_number)
        rows.append(row | {"steps": cell(run["steps"], format_count)})
    return rows


def render_comparison(runs: Sequence[str | Path]) -> str:
    """Return the page that compares several runs."""
    return render_comparison_page(compare_runs(runs))


def render_comparison_page(comparison: RunComparison) -> str:
    """Return the page: scores, significance of differences, differences of the recipes, training curves."""
    data = dict.fromkeys(get_data_name(run) for run in comparison.runs)
    title = f"{len(comparison.runs)} runs" + (f" on {' and '.join(data)}" if len(data) < 3 else "")
    names = join_markup([isolate(name) for name in comparison.names], ", ")
    verdicts = [(text, pair.is_significant) for text, pair in zip(comparison.verdicts, comparison.pairs, strict=True)]
    sections: list[PageSection] = [
        ("scores", "Scores", "Scores", render_scores(comparison)),
        build_verdict_section(verdicts, SEED_NOTE, comparison.caution),
        ("recipes", "Recipes", "Differences of the recipes", [_render_differences(comparison)]),
        ("curves", "Curves", "Training curves", [charts.render_chart_grid(render_curves(comparison))]),
    ]
    return render_document(title, " ".join(comparison.names), render_heading(("comparison",), title, names), sections)


def render_scores(comparison: RunComparison) -> list[Markup | None]:
    """Return the table of scores."""
    score_rows = build_score_rows(comparison)
    rows: list[list[Any]] = []
    for run, cells in zip(comparison.summaries, score_rows, strict=True):
        state = format_state(run)
        name = join_markup([isolate(run["name"]), h("span", f" {state}", class_="quiet") if state else None])
        row = cells | {"run": (name, run["name"])}
        if "score" in cells:
            text, key = cells["score"]
            row["score"] = charts.render_barred(run["score"] or 0, text, 1, clip_interval(run["interval"])), key
        rows.append(list(row.values()))
    table = render_table([*score_rows[0]], rows, caption="Scores of the runs", numeric_from=2, sortable=True)
    return [table, h("p", PRETRAINING_NOTE, class_="note") if comparison.is_pretraining else None]


def clip_interval(interval: Sequence[float] | None) -> tuple[float, float] | None:
    """Return an interval for a bar, from 0 on: R² may be negative."""
    return None if interval is None else (max(0.0, interval[0]), max(0.0, interval[1]))


def _render_differences(comparison: RunComparison) -> Markup:
    if not comparison.differences:
        return h("p", "The recipes are equal.")
    differences = comparison.differences.items()
    rows = [[h("code", key), *(h("code", format_value(value)) for value in values)] for key, values in differences]
    head = ["field", *map(isolate, comparison.names)]
    return render_table(head, rows, caption="Fields in which the recipes differ")


def render_curves(comparison: RunComparison) -> list[Markup | None]:
    """Return the training curves of all runs in common charts."""
    runs = list(zip(comparison.names, comparison.runs, strict=True))
    dash_step = 6 if len(runs) > 6 else 1

    def chart(title: str, log: str, key: str = "", **options: Any) -> Markup | None:
        lines = []
        for index, (name, run) in enumerate(runs):
            points = charts.extract_points(getattr(run, log), "epoch", key or run.score_name)
            dashes = LINE_DASHES[index // dash_step % len(LINE_DASHES)]
            points = charts.downsample_points(points, MAX_COMPARED_POINTS)
            lines.append(charts.ChartLine(name, points, 1 + index % 6, dashes=dashes))
        return charts.render_line_chart(title, lines, **options)

    if comparison.is_pretraining:
        score = chart("k-NN accuracy", "validation", "knn", format_y=format_percent_tick)
        signals = SIGNAL_CHARTS.items()
        others = [chart(title, "validation", signal, note=note) for signal, (title, _, note) in signals]
    else:
        scores = [run.score_name for run in comparison.runs]
        names = dict.fromkeys(METRICS[name].phrase for name in scores)
        format_y = format_percent_tick if all(METRICS[name].is_share for name in scores) else format_number
        score = chart(f"Validation {' or '.join(names)}", "validation", format_y=format_y)
        others = [chart("Training loss", "training", "loss")]
    losses = chart("Validation loss", "validation", "loss")
    return [score, losses, *others, chart("Learning rate", "training", "lr")]


def format_run_comparison(comparison: RunComparison) -> str:
    """Return the comparison as text for the terminal."""
    score_rows = build_score_rows(comparison)
    rows = [[*score_rows[0], ""]]
    for run, cells in zip(comparison.summaries, score_rows, strict=True):
        rows.append([*(clean_text(text) for text, _ in cells.values()), format_state(run)])
    lines = [*formatting.format_table(rows, right=range(2, len(rows[0]) - 1)), ""]
    if comparison.differences:
        rows = [["recipe", *map(clean_text, comparison.names)]]
        rows += [[key, *map(_shorten_value, values)] for key, values in comparison.differences.items()]
        lines += formatting.format_table(rows)
    else:
        lines.append("The recipes are equal.")
    notes = [PRETRAINING_NOTE] if comparison.is_pretraining else [*comparison.verdicts, comparison.caution]
    return "\n".join([*lines, "", *(clean_text(note) for note in notes if note)]).replace("\u00a0", " ")


def _shorten_value(value: Any) -> str:
    text = clean_text(format_value(value))
    return text if len(text) <= MAX_VALUE_WIDTH else text[: MAX_VALUE_WIDTH - 1] + "…"

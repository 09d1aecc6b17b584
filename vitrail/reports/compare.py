"""Comparison of several runs: scores, differences of the recipes, and paired tests on the same images."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.metrics.paired import PairedTest, compare_correct, compare_map
from vitrail.reports.pretraining import collect_knn_scores
from vitrail.reports.run import ABSENT, EvaluatedSplit, RunDirectory, find_differences, read_run
from vitrail.utils.text import is_interval, is_number


def diff_runs(runs: list[RunDirectory]) -> dict[str, list[Any]]:
    """Return the fields in which recipes, data and initial weights differ, with the value of each run."""
    others = {
        "data": [run.get("data", "where") for run in runs],
        "init": [run.get("model", "init") for run in runs],
    }
    differences = dict(find_differences([run.recipe if run.recipe is not None else {} for run in runs]))
    return differences | {
        key: values for key, values in others.items() if key not in differences and len(set(map(str, values))) > 1
    }


MAX_RUNS_ALL_PAIRS = 4  # up to so many runs, all pairs are compared; of more, each run with the best
PRETRAINING_METRICS = (
    *("loss", "knn", "knn_pixels", "knn_random", "spread", "rank"),
    *("teacher_entropy", "teacher_diversity"),
)


@dataclass(frozen=True)
class PairComparison:
    """Paired test of two runs on the same images, or the reason why there is none."""

    first: int  # index of the run
    second: int
    split: str
    test: PairedTest | None
    reason: str = ""


@dataclass(frozen=True)
class RunComparison:
    """Runs in the given order, with the differences of their recipes and the paired tests."""

    runs: list[RunDirectory]
    names: list[str]
    differences: dict[str, list[Any]]
    pairs: list[PairComparison]

    def summarise_run(self, index: int) -> dict[str, Any]:
        """Return the numbers of a run for JSON."""
        run = self.runs[index]
        summary = run.summary or {}
        return {
            "name": self.names[index],
            "directory": str(run.directory),
            "finished": run.is_finished,
            **(summarise_pretraining_run(run) if run.is_pretraining else summarise_supervised_run(run)),
            "seconds": summary.get("seconds"),
            "images_per_second": summary.get("images_per_second"),
            "steps": summary.get("steps") or (run.training[-1]["step"] if run.training else None),
            "differs": {
                key: None if values[index] is ABSENT else values[index] for key, values in self.differences.items()
            },
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {
            "runs": [self.summarise_run(index) for index in range(len(self.runs))],
            "pairs": [pair_to_dict(pair, self.names) for pair in self.pairs],
        }


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
        "interval": list(interval or ()) if is_interval(interval) else None,
        "images": metrics.get("images"),
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
    if runs[0].is_pretraining:
        return comparison
    scores = [comparison.summarise_run(index)["score"] for index in range(len(runs))]
    best = max(range(len(runs)), key=lambda index: -1.0 if scores[index] is None else scores[index])
    if len(runs) <= MAX_RUNS_ALL_PAIRS:
        pairs = list(combinations(range(len(runs)), 2))
    else:
        pairs = [(index, best) for index in range(len(runs)) if index != best]
    comparison.pairs.extend(_compare_pair(runs, first, second) for first, second in pairs)
    return comparison


def render_comparison(runs: Sequence[str | Path]) -> str:
    """Return the page that compares several runs."""
    from vitrail.reports.compare_page import render_comparison_page

    return render_comparison_page(compare_runs(runs))


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
    a, b = one.evaluations.get(split), two.evaluations.get(split)
    if a is None or b is None:
        missing = first if a is None else second
        return PairComparison(
            first, second, split, None, f"{runs[missing].name} has no stored logits of its {split} split"
        )
    if (
        one.get("labels") != two.get("labels")
        or a.is_multilabel != b.is_multilabel
        or a.logits.shape[1] != b.logits.shape[1]
    ):
        return PairComparison(first, second, split, None, "their classes differ")
    order = _match_images(a, b)
    if isinstance(order, str):
        return PairComparison(first, second, split, None, order)
    if not np.array_equal(a.targets, b.targets[order]):
        return PairComparison(first, second, split, None, "their images have different labels")
    if a.is_multilabel:
        return PairComparison(first, second, split, compare_map(a.logits, b.logits[order], a.targets))
    return PairComparison(first, second, split, compare_correct(a.predictions.correct, b.predictions.correct[order]))


def _match_images(a: EvaluatedSplit, b: EvaluatedSplit) -> np.ndarray | str:
    """Return the index in `b` of each image of `a`, or the reason why there is none."""
    if not a.names or not b.names:
        return "the names of their images were not stored"
    if a.names == b.names:
        return np.arange(len(a.names))
    if len(set(a.names)) < len(a.names) or set(a.names) != set(b.names) or len(a.names) != len(b.names):
        return "they were evaluated on different images"
    indices = {name: index for index, name in enumerate(b.names)}
    return np.array([indices[name] for name in a.names])


def summarise_pretraining_run(run: RunDirectory) -> dict[str, Any]:
    """Return the final signals of a self-supervised run, or those of its last validation if it is unfinished."""
    summary = run.summary or {}
    last = (run.validation[-1] if run.validation else {}) | summary
    interval = collect_knn_scores(last).get("knn", (None, None))[1]
    return {
        "method": run.method or None,
        "split": run.split or "validation",
        **{key: last[key] if is_number(last.get(key)) else None for key in PRETRAINING_METRICS},
        "interval": list(interval) if interval else None,
        "stopped": summary.get("stopped"),
        "collapse": run.collapse,
    }

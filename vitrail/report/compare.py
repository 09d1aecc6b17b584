"""Several runs side by side: their scores, where their recipes differ, and whether a difference is more than chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.evaluate.paired import Paired, compare_map, compare_right
from vitrail.report import without_labels
from vitrail.report.differences import ABSENT, of_runs
from vitrail.report.run import Evaluation, Run, read_run
from vitrail.report.words import is_interval, is_number

ALL_PAIRS = 4  # runs of which each is compared with each; of more, each with the best


@dataclass(frozen=True)
class Pair:
    """Two runs on the same pictures; or why they cannot be compared so."""

    first: int  # of the comparison's runs
    second: int
    split: str
    found: Paired | None
    why_not: str = ""


@dataclass(frozen=True)
class Comparison:
    """Runs in the order they were given."""

    runs: list[Run]
    names: list[str]
    differences: dict[str, list[Any]]
    pairs: list[Pair]

    def row(self, place: int) -> dict[str, Any]:
        """A run's numbers, ready for JSON."""
        run = self.runs[place]
        about = {"name": self.names[place], "directory": str(run.directory), "finished": run.finished}
        summary = run.summary or {}
        beside = {
            "seconds": summary.get("seconds"),
            "images_per_second": summary.get("images_per_second"),
            "steps": summary.get("steps") or (run.training[-1]["step"] if run.training else None),
            "differs": {
                key: None if values[place] is ABSENT else values[place] for key, values in self.differences.items()
            },
        }
        return about | (without_labels.row(run) if run.pretraining else judged(run)) | beside

    def as_dict(self) -> dict[str, Any]:
        """Everything for machines."""
        return {
            "runs": [self.row(place) for place in range(len(self.runs))],
            "pairs": [pair_as_dict(pair, self.names) for pair in self.pairs],
        }


def judged(run: Run) -> dict[str, Any]:
    """The score of a run that learnt labels: of its end, else of its last look."""
    measured = run.measured(run.split or "")
    score = measured.get(run.score_name)
    if score is None and run.validation:  # not finished: the last look
        score = run.validation[-1].get(run.score_name)
    interval = measured.get("interval")
    return {
        "split": run.split or "validation",
        "score_name": run.score_name,
        "score": score if is_number(score) else None,
        "interval": list(interval or ()) if is_interval(interval) else None,
        "images": measured.get("images"),
    }


def pair_as_dict(pair: Pair, names: list[str]) -> dict[str, Any]:
    """Two compared, ready for JSON."""
    told: dict[str, Any] = {"first": names[pair.first], "second": names[pair.second], "split": pair.split}
    if pair.found is None:
        return told | {"compared": False, "reason": pair.why_not}
    found = pair.found
    return told | {
        "compared": True,
        "pictures": found.pictures,
        "first_only": found.first_only,
        "second_only": found.second_only,
        "difference": found.difference,
        "interval": list(found.interval),
        "chance": found.chance,
        "beyond_chance": found.beyond_chance,
    }


def compare_runs(directories: Sequence[str | Path]) -> Comparison:
    """Reads the runs and compares them."""
    if len(directories) < 2:
        raise ValueError("a comparison needs at least two runs")
    runs = [read_run(directory) for directory in directories]
    seen = [run.directory.resolve() for run in runs]
    if len(set(seen)) < len(seen):
        twice = next(run.directory for run in runs if seen.count(run.directory.resolve()) > 1)
        raise ValueError(f"{twice} is given twice: name each run once")
    if len({run.pretraining for run in runs}) > 1:
        one, other = (next(run.directory for run in runs if run.pretraining is kind) for kind in (True, False))
        raise ValueError(f"{one} learnt without labels and {other} with them: compare runs of one kind")
    comparison = Comparison(runs, _names(runs), of_runs(runs), [])
    if runs[0].pretraining:
        return comparison
    scores = [comparison.row(place)["score"] for place in range(len(runs))]
    best = max(range(len(runs)), key=lambda place: -1.0 if scores[place] is None else scores[place])
    if len(runs) <= ALL_PAIRS:
        places = list(combinations(range(len(runs)), 2))
    else:
        places = [(place, best) for place in range(len(runs)) if place != best]
    comparison.pairs.extend(_compared(runs, first, second) for first, second in places)
    return comparison


def compare(runs: Sequence[str | Path]) -> str:
    """The page of several runs side by side."""
    from vitrail.report.side_by_side import page

    return page(compare_runs(runs))


def _names(runs: list[Run]) -> list[str]:
    """Directories' names; with as much of their path as it takes to tell them apart."""
    parts = [run.directory.resolve().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):  # ends: no two runs are in the same place
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _compared(runs: list[Run], first: int, second: int) -> Pair:
    one, two = runs[first], runs[second]
    split = one.split if one.split and one.split == two.split else "validation"
    a, b = one.evaluations.get(split), two.evaluations.get(split)
    if a is None or b is None:
        lacking = first if a is None else second
        return Pair(first, second, split, None, f"{runs[lacking].name} kept no logits of its {split} split")
    if one.part("labels") != two.part("labels") or a.several != b.several or a.logits.shape[1] != b.logits.shape[1]:
        return Pair(first, second, split, None, "their classes differ")
    order = _same_pictures(a, b)
    if isinstance(order, str):
        return Pair(first, second, split, None, order)
    if not np.array_equal(a.targets, b.targets[order]):
        return Pair(first, second, split, None, "their pictures have different labels")
    if a.several:
        return Pair(first, second, split, compare_map(a.logits, b.logits[order], a.targets))
    return Pair(first, second, split, compare_right(a.verdicts.right, b.verdicts.right[order]))


def _same_pictures(a: Evaluation, b: Evaluation) -> np.ndarray | str:
    """Where in `b` each picture of `a` is; or why there is no such order."""
    if not a.names or not b.names:
        return "the names of their pictures were not kept"
    if a.names == b.names:
        return np.arange(len(a.names))
    if len(set(a.names)) < len(a.names) or set(a.names) != set(b.names) or len(a.names) != len(b.names):
        return "they were judged on different pictures"
    places = {name: place for place, name in enumerate(b.names)}
    return np.array([places[name] for name in a.names])

"""Measures of pictures with several labels each: average precision, and F1 at a probability of one half."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.evaluate.calibration import calibration_error
from vitrail.evaluate.intervals import RESAMPLES, bootstrap, mean_of_numbers
from vitrail.evaluate.verdicts import checked

WORK = 4 * 10**8  # numbers that a bootstrap may go through: beyond it, fewer resamples


class Ranking:
    """One class's pictures from the surest to the least sure, with equals taken together."""

    def __init__(self, scores: np.ndarray, targets: np.ndarray) -> None:
        self.order = np.argsort(-scores, kind="stable")
        self.hit = targets[self.order] > 0
        ranked = scores[self.order]
        self.ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # last of each group of equals

    def average_precision(self, times: np.ndarray | None = None) -> np.ndarray:
        """The mean of precision over the steps of recall; for each row of `times`, [b, n], how often each was drawn."""
        weight = np.ones((1, len(self.hit)), np.int64) if times is None else times[:, self.order]
        found = np.cumsum(weight * self.hit, axis=1)[:, self.ends]
        taken = np.cumsum(weight, axis=1)[:, self.ends]
        gained = np.diff(found, axis=1, prepend=0)
        precision = np.divide(found, taken, out=np.zeros(found.shape), where=taken > 0)
        positives = found[:, -1]
        total = (gained * precision).sum(1)
        return np.divide(total, positives, out=np.full(len(total), np.nan), where=positives > 0)


def average_precision(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of each class, [K]; not a number for a class that no picture has."""
    logits, targets = checked(logits, targets)
    return np.array([Ranking(logits[:, k], targets[:, k]).average_precision()[0] for k in range(logits.shape[1])])


def mean_average_precision(rankings: list[Ranking], times: np.ndarray | None = None) -> np.ndarray:
    """Over the classes that some picture has; one value for each row of `times`."""
    return mean_of_numbers(np.stack([ranking.average_precision(times) for ranking in rankings], axis=-1))


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Sigmoid in double precision, without overflow."""
    wide = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1, small) / (1 + small)


def per_class(logits: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """For each class, [K]: how many have it, average precision, and precision, recall and F1 at one half."""
    logits, targets = checked(logits, targets)
    said, truth = logits >= 0, targets > 0
    support, spoken, right = truth.sum(0), said.sum(0), (said & truth).sum(0)
    with np.errstate(invalid="ignore"):
        return {
            "support": support,
            "said": spoken,
            "right": right,
            "average_precision": average_precision(logits, targets),
            "recall": right / support,
            "precision": right / spoken,
            "f1": 2 * right / (support + spoken),
        }


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> float:
    """Binary cross-entropy in nats, the mean over pictures and classes."""
    wide = np.asarray(logits, np.float64)
    return float((np.maximum(wide, 0) - wide * targets + np.log1p(np.exp(-np.abs(wide)))).mean())


def several(logits: np.ndarray, targets: np.ndarray, intervals: bool) -> Iterator[tuple[str, Any]]:
    """The measures, one after another."""
    logits, targets = checked(logits, targets)
    count, classes = logits.shape
    there = np.flatnonzero((targets > 0).any(0))
    if not len(there):
        raise ValueError(f"none of the {count} pictures has a label: mAP has no meaning")
    rankings = [Ranking(logits[:, k], targets[:, k]) for k in there]
    yield "images", count
    yield "map", float(mean_average_precision(rankings)[0])
    if intervals:
        resamples = int(np.clip(WORK // (count * classes), 100, RESAMPLES))
        yield "interval", bootstrap(lambda times: mean_average_precision(rankings, times), count, resamples)
    yield "loss", cross_entropy(logits, targets)
    of_class = per_class(logits, targets)
    yield "f1", float(of_class["f1"][there].mean())
    right, said, support = (int(of_class[name].sum()) for name in ("right", "said", "support"))
    yield "micro_f1", 2 * right / (said + support)
    yield "calibration_error", calibration_error(probabilities(logits).ravel(), (targets > 0).ravel())

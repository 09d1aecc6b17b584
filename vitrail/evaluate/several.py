"""Measures of pictures with several labels each: average precision, and F1 at a probability of one half."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.evaluate.calibration import calibration_error, gaps, interval_around
from vitrail.evaluate.intervals import affordable, mean_of_numbers, middle, resampled
from vitrail.evaluate.verdicts import blocks, checked


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


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Binary cross-entropy of each picture in nats, [n]: the mean over classes."""
    wide = np.asarray(logits, np.float64)
    return (np.maximum(wide, 0) - wide * targets + np.log1p(np.exp(-np.abs(wide)))).mean(1)


def f1_resampled(said: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """F1 of resamples, [resamples]: the mean over classes, of those that a resample has."""
    right, either = (said & truth).astype(np.float32), (said.astype(np.float32) + truth)  # [n, K]

    def f1(times: np.ndarray) -> np.ndarray:
        weights = times.astype(np.float32)
        hits, count = weights @ right, weights @ either
        return mean_of_numbers(np.divide(2 * hits, count, out=np.full(hits.shape, np.nan, np.float32), where=count > 0))

    return resampled(f1, len(said), affordable(said.size))


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
        resamples = affordable(count * classes)
        yield "interval", middle(resampled(lambda times: mean_average_precision(rankings, times), count, resamples))
    loss = cross_entropy(logits, targets)
    yield "loss", float(loss.mean())
    of_class = per_class(logits, targets)
    yield "f1", float(of_class["f1"][there].mean())
    right, said, support = (int(of_class[name].sum()) for name in ("right", "said", "support"))
    yield "micro_f1", 2 * right / (said + support)
    error = calibration_error(probabilities(logits).ravel(), (targets > 0).ravel())
    yield "calibration_error", error
    if intervals and count > 1:
        spoken, truth = logits >= 0, targets > 0
        yield "f1_interval", middle(f1_resampled(spoken[:, there], truth[:, there]))
        apart = np.concatenate([gaps(probabilities(logits[rows]), truth[rows]) for rows in blocks(logits)])
        counts = ((spoken & truth).sum(1), spoken.sum(1) + truth.sum(1))
        each = np.column_stack([loss, *counts, apart])  # [n, 3 + bins]
        drawn = resampled(lambda times: times @ each / count, count, affordable(count))
        yield "loss_interval", middle(drawn[:, 0])
        # A resample that has no label and says none has no F1.
        yield "micro_f1_interval", middle(2 * drawn[:, 1] / np.where(drawn[:, 2] > 0, drawn[:, 2], np.nan))
        yield "calibration_error_interval", interval_around(error, np.abs(drawn[:, 3:]).sum(1))

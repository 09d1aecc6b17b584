"""Measures of pictures with one label each."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.evaluate.calibration import calibration_error, gaps, interval_around
from vitrail.evaluate.intervals import affordable, f1_interval, middle, recall_interval, resampled, wilson
from vitrail.evaluate.verdicts import Verdicts


def confusion(verdicts: Verdicts) -> np.ndarray:
    """Pictures of each class (rows) by what was said (columns), [K, K]."""
    cells = verdicts.truth * verdicts.classes + verdicts.said
    return np.bincount(cells, minlength=verdicts.classes**2).reshape(verdicts.classes, verdicts.classes)


def confused_pairs(verdicts: Verdicts, count: int) -> list[tuple[int, int, int]]:
    """The commonest mistakes: (class, what was said, how often), most often first. Needs no [K, K] matrix."""
    wrong = ~verdicts.right
    cells, often = np.unique(verdicts.truth[wrong] * verdicts.classes + verdicts.said[wrong], return_counts=True)
    first = np.argsort(-often, kind="stable")[:count]
    return [(int(cells[i] // verdicts.classes), int(cells[i] % verdicts.classes), int(often[i])) for i in first]


def per_class(verdicts: Verdicts) -> dict[str, np.ndarray]:
    """For each class, [K]: how many there are, how many were right, and precision, recall (its accuracy) and F1.

    Without pictures of a class its recall is not a number; neither is its precision when it was never said.
    """
    support = np.bincount(verdicts.truth, minlength=verdicts.classes)
    said = np.bincount(verdicts.said, minlength=verdicts.classes)
    right = np.bincount(verdicts.truth[verdicts.right], minlength=verdicts.classes)
    with np.errstate(invalid="ignore"):
        return {
            "support": support,
            "said": said,
            "right": right,
            "recall": right / support,
            "precision": right / said,
            "f1": 2 * right / (support + said),
        }


def single(verdicts: Verdicts, intervals: bool) -> Iterator[tuple[str, Any]]:
    """The measures, one after another."""
    count, right = len(verdicts.truth), int(verdicts.right.sum())
    classes = per_class(verdicts)
    there = classes["support"] > 0
    yield "images", count
    yield "top1", right / count
    if intervals:
        yield "interval", list(wilson(right, count))
    if verdicts.classes > 5:
        yield "top5", float((verdicts.place < 5).mean())
        if intervals:
            yield "top5_interval", list(wilson(int((verdicts.place < 5).sum()), count))
    yield "loss", float(verdicts.loss.mean())
    error = calibration_error(verdicts.sure, verdicts.right)
    if intervals and count > 1:
        each = np.column_stack([verdicts.loss, gaps(verdicts.sure, verdicts.right)])  # [n, 1 + bins]
        drawn = resampled(lambda times: times @ each / count, count, affordable(count))
        yield "loss_interval", middle(drawn[:, 0])
        yield "calibration_error_interval", interval_around(error, np.abs(drawn[:, 1:]).sum(1))
    yield "balanced_accuracy", float(classes["recall"][there].mean())
    if intervals:
        yield "balanced_accuracy_interval", recall_interval(classes["support"][there], classes["right"][there])
    yield "f1", float(classes["f1"][there].mean())
    if intervals:
        yield "f1_interval", f1_interval(classes["support"], classes["right"], classes["said"])
    yield "calibration_error", error

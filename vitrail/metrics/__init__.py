"""Metrics of one split, computed from its logits and targets."""

from typing import Any

import numpy as np

from vitrail.metrics.accuracy import iter_single_label_metrics, predict_classes, validate_logits
from vitrail.metrics.calibration import sigmoid
from vitrail.metrics.multilabel import iter_multilabel_metrics

__all__ = ["compute_metrics", "find_confident_mistakes", "find_worst_label", "score_name"]


def compute_metrics(logits: np.ndarray, targets: np.ndarray, *, intervals: bool = True) -> dict[str, Any]:
    """Return name and value of every metric, ready for JSON.

    Targets [n] are one class per image: `top1`, `interval` and more. Targets [n, K] of 0 and 1 are multi-label: `map`, with
    `interval` from a seeded bootstrap. `intervals=False` skips the intervals, for fast validation in every epoch.
    """
    logits, targets = validate_logits(logits, targets)
    if targets.ndim == 2:
        return dict(iter_multilabel_metrics(logits, targets, intervals))
    return dict(iter_single_label_metrics(predict_classes(logits, targets), intervals))


def score_name(multilabel: bool) -> str:
    """Return the name of the metric that a run is selected by."""
    return "map" if multilabel else "top1"


def find_confident_mistakes(logits: np.ndarray, targets: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of at most `count` wrong predictions, most confident first; ties in order of index."""
    logits, targets = validate_logits(logits, targets)
    if targets.ndim == 1:
        predictions = predict_classes(logits, targets)
        # Softmax rounds to 1 for large logits; the loss orders these.
        wrong = np.flatnonzero(~predictions.correct)
        order = np.lexsort((-predictions.loss[wrong], -predictions.confidence[wrong]))
    else:
        error = np.where((logits >= 0) != (targets > 0), np.abs(logits.astype(np.float64)), -1).max(1)
        wrong = np.flatnonzero(error >= 0)
        order = np.argsort(-error[wrong], kind="stable")
    return wrong[order][:count]


def find_worst_label(logits: np.ndarray, targets: np.ndarray) -> tuple[int, float]:
    """Return the most confidently wrong label of one multi-label image, and its predicted probability."""
    worst = int(np.where((logits >= 0) != (targets > 0), np.abs(logits), -np.inf).argmax())
    return worst, float(sigmoid(logits[worst]))

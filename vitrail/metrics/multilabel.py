"""Metrics of multi-label classification: average precision, and F1 at a probability of 0.5."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.metrics.accuracy import compute_rates, iter_row_blocks, validate_logits
from vitrail.metrics.calibration import (
    calibration_error,
    calibration_interval,
    compute_calibration_gaps,
    measure_confidence,
    sigmoid,
)
from vitrail.metrics.intervals import bootstrap, choose_resamples, mean_ignoring_nan, percentile_interval


class Ranking:
    """Images ordered by the score of one class, highest first, with equal scores grouped."""

    def __init__(self, scores: np.ndarray, targets: np.ndarray) -> None:
        self.order = np.argsort(-scores, kind="stable")
        self.is_positive = targets[self.order] > 0
        ranked = scores[self.order]
        self.tie_ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # last of each group of equals

    def average_precision(self, counts: np.ndarray | None = None) -> np.ndarray:
        """Return the average precision, for each row of `counts`, [b, n]: the multiplicity of each image in a resample."""
        weight = np.ones((1, len(self.is_positive)), np.int64) if counts is None else counts[:, self.order]
        true_positives = np.cumsum(weight * self.is_positive, axis=1)[:, self.tie_ends]
        retrieved = np.cumsum(weight, axis=1)[:, self.tie_ends]
        gained = np.diff(true_positives, axis=1, prepend=0)
        precision = np.divide(true_positives, retrieved, out=np.zeros(retrieved.shape), where=retrieved > 0)
        positives = true_positives[:, -1]
        total = (gained * precision).sum(1)
        return np.divide(total, positives, out=np.full(len(total), np.nan), where=positives > 0)


def average_precision(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the average precision of each class, [K]; NaN for a class without images."""
    logits, targets = validate_logits(logits, targets)
    return np.array([Ranking(logits[:, k], targets[:, k]).average_precision()[0] for k in range(logits.shape[1])])


def mean_average_precision(rankings: list[Ranking], counts: np.ndarray | None = None) -> np.ndarray:
    """Return mAP over the classes that have images; one value per row of `counts`."""
    return mean_ignoring_nan(np.stack([ranking.average_precision(counts) for ranking in rankings], axis=-1))


def compute_label_metrics(logits: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Return support, average precision, and at 0.5 predictions, hits, recall, precision and F1 of each class, [K]."""
    logits, targets = validate_logits(logits, targets)
    positive, truth = logits >= 0, targets > 0
    rates = compute_rates(truth.sum(0), positive.sum(0), (positive & truth).sum(0))
    return rates | {"average_precision": average_precision(logits, targets)}


def binary_cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the binary cross-entropy of each image in nats, [n], the mean over classes."""
    double = np.asarray(logits, np.float64)
    return (np.maximum(double, 0) - double * targets + np.log1p(np.exp(-np.abs(double)))).mean(1)


def bootstrap_f1(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return macro F1 of resamples, [resamples], over the classes that a resample has."""
    correct, total = (predicted & truth).astype(np.float32), (predicted.astype(np.float32) + truth)  # [n, K]

    def f1(counts: np.ndarray) -> np.ndarray:
        weights = counts.astype(np.float32)
        hits, sums = weights @ correct, weights @ total
        return mean_ignoring_nan(np.divide(2 * hits, sums, out=np.full(hits.shape, np.nan, np.float32), where=sums > 0))

    return bootstrap(f1, len(predicted), choose_resamples(predicted.size))


def iter_multilabel_metrics(logits: np.ndarray, targets: np.ndarray, intervals: bool) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each metric."""
    logits, targets = validate_logits(logits, targets)
    count, classes = logits.shape
    present = np.flatnonzero((targets > 0).any(0))
    if not len(present):
        raise ValueError(f"none of the {count} images has a label: mAP is undefined")
    rankings = [Ranking(logits[:, k], targets[:, k]) for k in present]
    yield "images", count
    yield "map", float(mean_average_precision(rankings)[0])
    if intervals:
        resamples = choose_resamples(count * classes)
        values = bootstrap(lambda counts: mean_average_precision(rankings, counts), count, resamples)
        yield "interval", percentile_interval(values)
    loss = binary_cross_entropy(logits, targets)
    yield "loss", float(loss.mean())
    by_class = compute_label_metrics(logits, targets)
    yield "f1", float(by_class["f1"][present].mean())
    correct, predicted, support = (int(by_class[name].sum()) for name in ("right", "said", "support"))
    yield "micro_f1", 2 * correct / (predicted + support)
    scores = sigmoid(logits)
    error = calibration_error(scores.ravel(), (targets > 0).ravel())
    yield "calibration_error", error
    # Of each label, the confidence is that of the decision at 0.5: the probability of the label or of its absence.
    yield from measure_confidence(np.maximum(scores, 1 - scores), (logits >= 0) == (targets > 0)).items()
    if intervals and count > 1:
        positive, truth = logits >= 0, targets > 0
        yield "f1_interval", percentile_interval(bootstrap_f1(positive[:, present], truth[:, present]))
        blocks = iter_row_blocks(logits)
        gaps = np.concatenate([compute_calibration_gaps(sigmoid(logits[rows]), truth[rows]) for rows in blocks])
        hits, sums = (positive & truth).sum(1), positive.sum(1) + truth.sum(1)
        values = np.column_stack([loss, hits, sums, gaps])  # [n, 3 + bins]
        means = bootstrap(lambda counts: counts @ values / count, count, choose_resamples(count))
        yield "loss_interval", percentile_interval(means[:, 0])
        # F1 of a resample without labels and predictions is undefined.
        yield "micro_f1_interval", percentile_interval(2 * means[:, 1] / np.where(means[:, 2] > 0, means[:, 2], np.nan))
        yield "calibration_error_interval", calibration_interval(error, np.abs(means[:, 3:]).sum(1))

"""Metrics of single-label classification: accuracy, per-class results, confusion."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.metrics import intervals
from vitrail.metrics.calibration import (
    calibration_error,
    calibration_interval,
    compute_calibration_gaps,
    measure_confidence,
)

BLOCK = 2**22  # values processed at once, so that 50,000 × 1,000 logits need no second copy


@dataclass(frozen=True)
class ClassPredictions:
    """Predictions of n images, [n] each."""

    targets: np.ndarray  # int64: true class
    predicted: np.ndarray  # int64: class with the highest logit, the first of equals
    confidence: np.ndarray  # float64: softmax probability of the predicted class
    loss: np.ndarray  # float64: cross-entropy, in nats
    rank: np.ndarray  # int64: number of classes ranked above the true one
    classes: int

    @property
    def correct(self) -> np.ndarray:
        return self.predicted == self.targets


def validate_logits(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both as arrays; raise ValueError if their shapes do not match or logits are not finite."""
    logits, targets = np.asarray(logits), np.asarray(targets)
    if logits.ndim != 2 or targets.ndim not in (1, 2) or len(logits) != len(targets):
        shapes = f"logits {list(logits.shape)} and targets {list(targets.shape)}"
        raise ValueError(f"{shapes}: expected [n, K] and [n] or [n, K]")
    if not len(logits):
        raise ValueError("no images to evaluate")
    if targets.ndim == 2 and targets.shape != logits.shape:
        raise ValueError(f"{logits.shape[1]} logits but {targets.shape[1]} targets per image")
    if targets.ndim == 1 and not (targets.min() >= 0 and targets.max() < logits.shape[1]):
        raise ValueError(f"targets must be 0 to {logits.shape[1] - 1}, got {targets.min()} to {targets.max()}")
    for rows in iter_row_blocks(logits):
        if not np.isfinite(logits[rows]).all():
            bad = rows.start + int(np.flatnonzero(~np.isfinite(logits[rows]).all(1))[0])
            raise ValueError(f"the logits of image {bad} are not finite: the model cannot be evaluated")
    return logits, targets


def iter_row_blocks(logits: np.ndarray) -> Iterator[slice]:
    """Yield slices of rows of at most BLOCK values."""
    step = max(1, BLOCK // max(1, logits.shape[1]))
    return (slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step))


def predict_classes(logits: np.ndarray, targets: np.ndarray) -> ClassPredictions:
    """Return predictions, confidences, losses and ranks from logits [n, K] and targets [n]."""
    logits, targets = validate_logits(logits, targets)
    n, classes = logits.shape
    predicted, rank = np.empty(n, np.int64), np.empty(n, np.int64)
    confidence, loss = np.empty(n), np.empty(n)
    column = np.arange(classes)
    for rows in iter_row_blocks(logits):
        block, truth = logits[rows].astype(np.float64), targets[rows].astype(np.int64)[:, None]
        true_logit = np.take_along_axis(block, truth, 1)
        predicted[rows] = block.argmax(1)
        rank[rows] = ((block > true_logit) | ((block == true_logit) & (column < truth))).sum(1)
        highest = block.max(1)
        total = np.exp(block - highest[:, None]).sum(1)
        confidence[rows] = 1 / total
        loss[rows] = np.log(total) + highest - true_logit[:, 0]
    return ClassPredictions(targets.astype(np.int64), predicted, confidence, loss, rank, classes)


def confusion_matrix(predictions: ClassPredictions) -> np.ndarray:
    """Return counts by true class (rows) and predicted class (columns), [K, K]."""
    cells = predictions.targets * predictions.classes + predictions.predicted
    return np.bincount(cells, minlength=predictions.classes**2).reshape(predictions.classes, predictions.classes)


def find_confused_pairs(predictions: ClassPredictions, count: int) -> list[tuple[int, int, int]]:
    """Return the most frequent errors as (true class, predicted class, count), without a [K, K] matrix."""
    wrong = ~predictions.correct
    cells = predictions.targets[wrong] * predictions.classes + predictions.predicted[wrong]
    cells, counts = np.unique(cells, return_counts=True)
    first = np.argsort(-counts, kind="stable")[:count]
    return [(*divmod(int(cells[i]), predictions.classes), int(counts[i])) for i in first]


def compute_class_metrics(predictions: ClassPredictions) -> dict[str, np.ndarray]:
    """Return support, number of predictions and hits, recall, precision and F1 of each class, [K]; NaN where undefined."""
    columns = (predictions.targets, predictions.predicted, predictions.targets[predictions.correct])
    return compute_rates(*(np.bincount(column, minlength=predictions.classes) for column in columns))


def compute_rates(support: np.ndarray, predicted: np.ndarray, correct: np.ndarray) -> dict[str, np.ndarray]:
    """Return these counts of each class, [K], under their stored names, with recall, precision and F1."""
    with np.errstate(invalid="ignore"):
        counts = {"support": support, "said": predicted, "right": correct}
        rates = {"recall": correct / support, "precision": correct / predicted}
        return counts | rates | {"f1": 2 * correct / (support + predicted)}


def iter_single_label_metrics(predictions: ClassPredictions, with_intervals: bool) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each metric."""
    count, correct = len(predictions.targets), int(predictions.correct.sum())
    classes = compute_class_metrics(predictions)
    present = classes["support"] > 0
    yield "images", count
    yield "top1", correct / count
    if with_intervals:
        yield "interval", list(intervals.wilson_interval(correct, count))
    if predictions.classes > 5:
        yield "top5", float((predictions.rank < 5).mean())
        if with_intervals:
            yield "top5_interval", list(intervals.wilson_interval(int((predictions.rank < 5).sum()), count))
    yield "loss", float(predictions.loss.mean())
    error = calibration_error(predictions.confidence, predictions.correct)
    if with_intervals and count > 1:
        gaps = compute_calibration_gaps(predictions.confidence, predictions.correct)
        values = np.column_stack([predictions.loss, gaps])  # [n, 1 + bins]
        means = intervals.bootstrap(lambda counts: counts @ values / count, count, intervals.choose_resamples(count))
        yield "loss_interval", intervals.percentile_interval(means[:, 0])
        yield "calibration_error_interval", calibration_interval(error, np.abs(means[:, 1:]).sum(1))
    yield "balanced_accuracy", float(classes["recall"][present].mean())
    if with_intervals:
        counts = (classes[name][present] for name in ("support", "right"))
        yield "balanced_accuracy_interval", intervals.recall_interval(*counts)
    yield "f1", float(classes["f1"][present].mean())
    if with_intervals:
        yield "f1_interval", intervals.f1_interval(classes["support"], classes["right"], classes["said"])
    yield "calibration_error", error
    yield from measure_confidence(predictions.confidence, predictions.correct).items()

"""Probabilities of logits, the order of classes, and calibration: agreement of confidence and accuracy, in bins.

B images, K classes. Classes are ranked by logits: sigmoid and softmax round to exactly 0 or 1 long before logits become equal.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 15
SMALL_GAP = 0.01  # difference of mean confidence and accuracy that is neither over- nor under-confident


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid in float64, without overflow."""
    wide = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1, small) / (1 + small)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis in float64, without overflow."""
    wide = np.asarray(logits, np.float64)
    exponentials = np.exp(wide - wide.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def probabilities(logits: np.ndarray, multilabel: bool) -> np.ndarray:
    """Return float64 probabilities of logits [K] or [B, K]: one sigmoid per class if `multilabel`, else a softmax."""
    return sigmoid(logits) if multilabel else softmax(logits)


def rank_classes(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` largest logits on the last axis, largest first; ties keep the class order."""
    return np.argsort(-np.asarray(logits, np.float64), axis=-1, kind="stable")[..., :count]


def top_classes(logits: np.ndarray, multilabel: bool, count: int) -> list[tuple[int, float]]:
    """Return the index and probability of the `count` classes of one image, [K], with the largest logits."""
    scores = probabilities(logits, multilabel)
    return [(index, float(scores[index])) for index in rank_classes(logits, count).tolist()]


@dataclass(frozen=True)
class ReliabilityBin:
    """Samples of one confidence bin."""

    low: float
    high: float
    count: int
    confidence: float  # mean; NaN in an empty bin
    accuracy: float  # NaN in an empty bin


def compute_reliability(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> list[ReliabilityBin]:
    """Return bins of equal width from 0 to 1; a value on an edge belongs to the bin below it."""
    edges, index = np.linspace(0, 1, bins + 1), assign_bins(confidence, bins)
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(index, weights=confidence, minlength=bins) / count
        accuracy = np.bincount(index, weights=correct.astype(np.float64), minlength=bins) / count
    columns = (edges[:-1], edges[1:], count, mean_confidence, accuracy)
    return [ReliabilityBin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def assign_bins(confidence: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Return the bin index of each confidence."""
    return np.clip(np.searchsorted(np.linspace(0, 1, bins + 1), confidence, side="left") - 1, 0, bins - 1)


def compute_calibration_gaps(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return what each image ([n], or [n, K] labels) adds to the gap of confidence and accuracy in each bin, [n, bins].

    The calibration error is the sum over bins of the absolute means over images.
    """
    n, labels = len(confidence), confidence.size // len(confidence)
    cells = assign_bins(confidence).reshape(n, labels) + BINS * np.arange(n)[:, None]
    gaps = (confidence - correct).reshape(n, labels) / labels
    return np.bincount(cells.ravel(), weights=gaps.ravel(), minlength=n * BINS).reshape(n, BINS)


def calibration_interval(error: float, resampled_errors: np.ndarray) -> list[float]:
    """Return the 95 % interval of a calibration error: the upper half of its resamples, mirrored.

    With few images the error is biased upwards, and resampling adds the bias again: the true value is likely lower.
    """
    half = max(0.0, float(np.percentile(resampled_errors, 97.5)) - error)
    return [max(0.0, error - half), min(1.0, error + half)]


def calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> float:
    """Return the expected calibration error: the mean over images of |confidence − accuracy| of their bin."""
    full = [bin for bin in compute_reliability(confidence, correct, bins) if bin.count]
    return sum(bin.count * abs(bin.confidence - bin.accuracy) for bin in full) / len(confidence)


def measure_confidence(confidence: np.ndarray, correct: np.ndarray) -> dict[str, Any]:
    """Return the mean confidence of images ([n], or [n, K] labels), its gap to the accuracy, and the direction of the gap.

    The direction is "neither" if the gap is below one percentage point, or if its 95 % interval over images includes 0.
    """
    gaps = (confidence - correct).reshape(len(confidence), -1).mean(1)
    gap = float(gaps.mean())
    error = float(gaps.std(ddof=1)) / len(gaps) ** 0.5 if len(gaps) > 1 else np.inf
    is_clear = abs(gap) > max(SMALL_GAP, 1.96 * error)
    direction = "neither" if not is_clear else "over-confident" if gap > 0 else "under-confident"
    return {"mean_confidence": float(confidence.mean()), "confidence_gap": gap, "calibration_direction": direction}

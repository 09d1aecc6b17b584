"""Confident learning: which labels are probably wrong, and how many (Northcutt, Jiang and Chuang 2021, JAIR 70).

n images with given labels in K classes, and probabilities [n, K] of classifiers that have not seen the image they predict.

The threshold of a class is the mean probability of the class over the images that are labelled with it (the paper's equation 2):
an image counts as a confident member of a class whose probability reaches the threshold, so that a class that is predicted with
less confidence than others is not disadvantaged. Of several such classes the most probable one counts (equation 1). The table of
given and confident classes is the confident joint; each row, scaled to the number of labels of its class, estimates the joint
distribution of given and true labels (equation 3). What lies off its diagonal is the noise.
"""

from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-6  # of a comparison with a threshold, which is a mean of the same probabilities


@dataclass(frozen=True)
class ConfidentJoint:
    """The counts of given (rows) and confident (columns) classes, and what they estimate."""

    counts: np.ndarray  # int64 [K, K]
    thresholds: np.ndarray  # [K]; NaN for a class without labels
    confident: np.ndarray  # int64 [n]: the class whose member an image confidently is, or -1
    joint: np.ndarray  # [K, K], sums to 1: share of images with this given and this true label

    @property
    def noise_rate(self) -> float:
        """Return the estimated share of wrong labels."""
        return float(max(0.0, 1.0 - np.trace(self.joint)))

    @property
    def class_noise(self) -> np.ndarray:
        """Return the estimated share of wrong labels among the labels of each class, [K]; NaN for a class without labels."""
        given = self.joint.sum(1)
        wrong = given - np.diag(self.joint)
        return np.divide(wrong, given, out=np.full(len(given), np.nan), where=given > 0)


def compute_thresholds(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the mean probability of each class over the images labelled with it, [K]; NaN for a class without labels."""
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes)
    own = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    sums = np.bincount(labels, own, minlength=classes)
    return np.divide(sums, counts, out=np.full(classes, np.nan), where=counts > 0)


def estimate_joint(labels: np.ndarray, probabilities: np.ndarray) -> ConfidentJoint:
    """Return the confident joint of labels [n] and out-of-sample probabilities [n, K], and the joint that it estimates."""
    check_inputs(labels, probabilities)
    classes = probabilities.shape[1]
    thresholds = compute_thresholds(labels, probabilities)
    reached = probabilities >= thresholds - TOLERANCE  # a comparison with NaN is False
    confident = np.where(reached.any(1), np.where(reached, probabilities, -1.0).argmax(1), -1)
    known = confident >= 0
    cells = labels[known] * classes + confident[known]
    counts = np.bincount(cells, minlength=classes**2).reshape(classes, classes)
    given = np.bincount(labels, minlength=classes).astype(np.float64)
    # A class whose images are never confident members of any class says nothing: its labels count as right.
    weights = counts.astype(np.float64)
    np.fill_diagonal(weights, np.maximum(np.diag(weights), 1.0))
    joint = weights * (given / weights.sum(1))[:, None]
    return ConfidentJoint(counts, thresholds, confident, joint / joint.sum())


def find_suspects(labels: np.ndarray, probabilities: np.ndarray, joint: ConfidentJoint) -> np.ndarray:
    """Return which labels are suspected, bool [n]: those that two rules of the paper agree on ("C + NR").

    By noise rate: of the images with given class i, the estimated number n·Q[i, j] of true class j, with the largest p[j] - p[i].
    By class: of the images with given class i, the estimated number of wrong labels, with the smallest p[i]. A label that is
    the most probable class is never suspected.
    """
    by_rate, by_class = np.zeros(len(labels), dtype=bool), np.zeros(len(labels), dtype=bool)
    counts = np.rint(joint.joint * len(labels)).astype(np.int64)
    np.fill_diagonal(counts, 0)
    for i in np.flatnonzero(counts.any(1)):
        mine = np.flatnonzero(labels == i)
        own = probabilities[mine, i]
        by_class[mine[np.argsort(own, kind="stable")[: counts[i].sum()]]] = True
        for j in np.flatnonzero(counts[i]):
            gaps = probabilities[mine, j] - own
            by_rate[mine[np.argsort(-gaps, kind="stable")[: counts[i, j]]]] = True
    return by_rate & by_class & (probabilities.argmax(1) != labels)


def compute_margins(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the probability of the label minus the highest of the other classes, [n], from -1 to 1."""
    rows = np.arange(len(labels))
    others = probabilities.astype(np.float64).copy()
    own = others[rows, labels]
    others[rows, labels] = -np.inf
    return own - others.max(1)


def check_inputs(labels: np.ndarray, probabilities: np.ndarray) -> None:
    """Raise ValueError unless labels [n] are indices of the columns of probabilities [n, K], K >= 2, n >= 1."""
    if probabilities.ndim != 2 or probabilities.shape[1] < 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(f"labels {labels.shape} need probabilities [n, K] of 2 classes or more: {probabilities.shape}")
    if not len(labels):
        raise ValueError("no labels")
    if labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise ValueError(f"labels must be 0 to {probabilities.shape[1] - 1}, got {labels.min()} to {labels.max()}")
    if not np.isfinite(probabilities).all():
        raise ValueError("the probabilities are not finite")

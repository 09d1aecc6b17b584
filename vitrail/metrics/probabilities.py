"""Conversion of logits to probabilities, and the order of classes. B images, K classes.

Classes are ranked by logits: sigmoid and softmax round to exactly 0 or 1 long before logits become equal.
"""

import numpy as np


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

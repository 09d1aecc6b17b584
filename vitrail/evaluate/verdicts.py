"""What a model said of each picture, and how sure it was: all that single-label measures need. n pictures, K classes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK = 2**22  # numbers worked on at once: a thousand classes and fifty thousand pictures need no second copy


@dataclass(frozen=True)
class Verdicts:
    """One entry for each picture, [n]."""

    truth: np.ndarray  # int64: the class it is
    said: np.ndarray  # int64: the class with the highest logit; the first of equals
    sure: np.ndarray  # float64: softmax of what was said
    loss: np.ndarray  # float64: cross-entropy, in nats
    place: np.ndarray  # int64: how many classes came before the right one
    classes: int

    @property
    def right(self) -> np.ndarray:
        return self.said == self.truth


def checked(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as arrays that fit each other, or an error that says why they do not."""
    logits, targets = np.asarray(logits), np.asarray(targets)
    if logits.ndim != 2 or targets.ndim not in (1, 2) or len(logits) != len(targets):
        raise ValueError(f"logits {list(logits.shape)} and targets {list(targets.shape)}: [n, K] and [n] or [n, K] fit")
    if not len(logits):
        raise ValueError("no pictures to evaluate")
    if targets.ndim == 2 and targets.shape != logits.shape:
        raise ValueError(f"{logits.shape[1]} logits and {targets.shape[1]} targets for each picture")
    if targets.ndim == 1 and not (targets.min() >= 0 and targets.max() < logits.shape[1]):
        raise ValueError(f"targets {targets.min()} to {targets.max()}, but there are {logits.shape[1]} classes from 0")
    for rows in blocks(logits):
        if not np.isfinite(logits[rows]).all():
            bad = rows.start + int(np.flatnonzero(~np.isfinite(logits[rows]).all(1))[0])
            raise ValueError(f"the logits of picture {bad} are not finite: the model cannot be evaluated")
    return logits, targets


def blocks(logits: np.ndarray) -> Iterator[slice]:
    """Rows a block at a time."""
    step = max(1, BLOCK // max(1, logits.shape[1]))
    return (slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step))


def judge(logits: np.ndarray, targets: np.ndarray) -> Verdicts:
    """The verdicts on pictures that have one label each."""
    logits, targets = checked(logits, targets)
    n, classes = logits.shape
    said, place = np.empty(n, np.int64), np.empty(n, np.int64)
    sure, loss = np.empty(n), np.empty(n)
    column = np.arange(classes)
    for rows in blocks(logits):
        part, truth = logits[rows].astype(np.float64), targets[rows].astype(np.int64)[:, None]
        mine = np.take_along_axis(part, truth, 1)
        said[rows] = part.argmax(1)
        place[rows] = ((part > mine) | ((part == mine) & (column < truth))).sum(1)
        highest = part.max(1)
        total = np.exp(part - highest[:, None]).sum(1)
        sure[rows] = 1 / total
        loss[rows] = np.log(total) + highest - mine[:, 0]
    return Verdicts(targets.astype(np.int64), said, sure, loss, place, classes)

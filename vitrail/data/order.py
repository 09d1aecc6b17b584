"""In which order an epoch takes its pictures: a function of (seed, epoch), whoever asks and however often."""

import numpy as np

from vitrail.data.chance import ORDER, uniforms

WINDOW = 8  # shards that are mixed with each other


def shuffled(count: int, seed: int, epoch: int, shards: np.ndarray | None = None) -> np.ndarray:
    """Every picture once, int64 [n]. With shards: these in random order, and their pictures mixed within a window of them."""
    draws = uniforms(seed, epoch, np.arange(count), 1, ORDER)[:, 0]
    if shards is None:
        return draws.argsort(kind="stable")
    known, shard = np.unique(shards, return_inverse=True)
    turn = uniforms(seed, epoch, np.arange(len(known)), 1, ORDER + 1)[:, 0].argsort(kind="stable").argsort()
    return np.lexsort((draws, turn[shard] // WINDOW))


def drawn(weights: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """As many as there are pictures, with replacement, each as often as its weight says.

    A picture's second time gets a number of its own, index + n, and so on, so that its chance is another.
    """
    count = len(weights)
    ends = np.cumsum(weights, dtype=np.float64)
    draws = uniforms(seed, epoch, np.arange(count), 1, ORDER)[:, 0] * ends[-1]
    chosen = np.searchsorted(ends, draws, side="right").clip(0, count - 1)
    by_picture = chosen.argsort(kind="stable")
    ordered = chosen[by_picture]
    first = np.searchsorted(ordered, ordered)
    times = np.empty(count, dtype=np.int64)
    times[by_picture] = np.arange(count) - first
    return chosen + count * times


def balanced(targets: np.ndarray) -> np.ndarray:
    """A weight for each picture, with which every class is drawn as often as any other.

    Of several labels, the rarest counts; a picture without any is drawn as if it were of the commonest.
    """
    if targets.ndim == 1:
        return 1.0 / np.bincount(targets)[targets]
    rare = 1.0 / np.maximum(1, targets.sum(0, dtype=np.int64))
    weights = (targets * rare).max(1)
    return np.where(weights > 0, weights, rare.min())


def checked(weights: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Weights for pictures, from those of pictures or of classes."""
    weights = np.asarray(weights, dtype=np.float64)
    count, classes = len(targets), targets.shape[1] if targets.ndim == 2 else int(targets.max(initial=-1)) + 1
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("sampling weights: give a list of numbers that are 0 or more, not all 0")
    if len(weights) == count:
        return weights
    if len(weights) < classes or (len(weights) > classes and targets.ndim == 2):
        raise ValueError(
            f"{len(weights)} sampling weights for {count} pictures of {classes} classes: give one for each"
        )
    if targets.ndim == 1:
        return weights[targets]
    return (targets * weights).max(1)

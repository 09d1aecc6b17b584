"""Order and weights of the samples of an epoch."""

import numpy as np

from vitrail.data.rng import ORDER_STREAM, random_uniform

SHARD_WINDOW = 8  # shards whose images are mixed with each other


def shuffle_indices(count: int, seed: int, epoch: int, shards: np.ndarray | None = None) -> np.ndarray:
    """Return a permutation of the images, int64 [n]. With shards: shuffle the shards, then images within a window."""
    draws = random_uniform(seed, epoch, np.arange(count), 1, ORDER_STREAM)[:, 0]
    if shards is None:
        return draws.argsort(kind="stable")
    known, shard = np.unique(shards, return_inverse=True)
    shard_rank = random_uniform(seed, epoch, np.arange(len(known)), 1, ORDER_STREAM + 1)[:, 0].argsort(kind="stable")
    return np.lexsort((draws, shard_rank.argsort()[shard] // SHARD_WINDOW))


def sample_with_replacement(weights: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Draw as many images as there are, with replacement, in proportion to their weights.

    The k-th repetition of an image is index + k * n, so that every repetition is augmented differently.
    """
    count = len(weights)
    ends = np.cumsum(weights, dtype=np.float64)
    draws = random_uniform(seed, epoch, np.arange(count), 1, ORDER_STREAM)[:, 0] * ends[-1]
    chosen = np.searchsorted(ends, draws, side="right").clip(0, count - 1)
    by_image = chosen.argsort(kind="stable")
    ordered = chosen[by_image]
    first = np.searchsorted(ordered, ordered)
    times = np.empty(count, dtype=np.int64)
    times[by_image] = np.arange(count) - first
    return chosen + count * times


def compute_balanced_weights(targets: np.ndarray) -> np.ndarray:
    """Return image weights under which every class is drawn equally often.

    With several labels the rarest counts; an image without labels gets the weight of the most frequent class.
    """
    if targets.ndim == 1:
        return 1.0 / np.bincount(targets)[targets]
    rare = 1.0 / np.maximum(1, targets.sum(0, dtype=np.int64))
    weights = (targets * rare).max(1)
    return np.where(weights > 0, weights, rare.min())


def resolve_weights(weights: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return weights per image from weights per image or per class."""
    weights = np.asarray(weights, dtype=np.float64)
    count, classes = len(targets), targets.shape[1] if targets.ndim == 2 else int(targets.max(initial=-1)) + 1
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("sampling weights must be a list of finite numbers >= 0, not all 0")
    if len(weights) == count:
        return weights
    if len(weights) < classes or (len(weights) > classes and targets.ndim == 2):
        raise ValueError(f"{len(weights)} sampling weights for {count} images of {classes} classes: give one each")
    if targets.ndim == 1:
        return weights[targets]
    return (targets * weights).max(1)

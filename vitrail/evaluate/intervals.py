"""How far a number may be from the truth, having been measured on so many pictures."""

import math
from collections.abc import Callable

import numpy as np

Z = 1.959963984540054  # of the normal distribution, for 95 %
RESAMPLES = 1000


def wilson(right: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a proportion: holds its promise for few pictures and near 0 and 1, and stays inside."""
    if count < 1:
        raise ValueError("an interval needs at least one picture")
    share, square = right / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    # At the ends the formula gives 0 and 1 but for rounding.
    return (0.0 if right <= 0 else max(0.0, middle - half)), (1.0 if right >= count else min(1.0, middle + half))


def bootstrap_recall(support: np.ndarray, right: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> list[float]:
    """The 95 % interval of balanced accuracy, by drawing as many pictures anew from those there are.

    Only how many of each class were right matters, so what is drawn is these counts and not the pictures.
    """
    count = int(support.sum())
    cells = np.concatenate([right, support - right]).astype(np.float64) / count
    drawn = np.random.default_rng(seed).multinomial(count, cells, size=resamples)  # [resamples, 2 K]
    hits, misses = np.split(drawn, 2, axis=1)
    of_class = hits + misses
    with np.errstate(invalid="ignore"):
        recall = np.where(of_class > 0, hits / of_class, np.nan)
    return _middle(mean_of_numbers(recall))


def bootstrap(
    measure: Callable[[np.ndarray], np.ndarray], count: int, resamples: int = RESAMPLES, seed: int = 0
) -> list[float]:
    """The 95 % interval of a measure that is told, [b, n], how often each picture was drawn, and gives b values."""
    generator, values = np.random.default_rng(seed), []
    for start in range(0, resamples, 50):
        times = min(50, resamples - start)
        values.append(measure(generator.multinomial(count, np.full(count, 1 / count), size=times)))
    return _middle(np.concatenate(values))


def mean_of_numbers(values: np.ndarray) -> np.ndarray:
    """The mean along the last axis of what is a number; not a number where nothing is."""
    there = ~np.isnan(values)
    count, total = there.sum(-1), np.where(there, values, 0).sum(-1)
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def _middle(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.nanpercentile(values, [2.5, 97.5])]

"""How far a number may be from the truth, having been measured on so many pictures."""

import math
from collections.abc import Callable

import numpy as np

Z = 1.959963984540054  # of the normal distribution, for 95 %
RESAMPLES = 1000
WORK = 4 * 10**8  # numbers that a bootstrap may go through: beyond it, fewer resamples
TOWARDS = 4  # pictures' worth of what all classes have in common


def wilson(right: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval for a proportion: holds its promise for few pictures and near 0 and 1, and stays inside."""
    if count < 1:
        raise ValueError("an interval needs at least one picture")
    share, square = right / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    # At the ends the formula gives 0 and 1 but for rounding.
    return (0.0 if right <= 0 else max(0.0, middle - half)), (1.0 if right >= count else min(1.0, middle + half))


def as_share(value: float, spread: float, pictures: float) -> list[float]:
    """Wilson's interval of a value from 0 to 1, for as many pictures as would give a share of them this standard deviation.

    Where it has none, as with nothing wrong, it is that of so many `pictures`.
    """
    known = value * (1 - value) / spread**2 if spread > 0 and 0 < value < 1 else pictures
    known = max(1.0, known)
    return list(wilson(value * known, known))


def shrunk(support: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How likely a picture of each class is to be right, [K]: the class's share, drawn towards that of all where it has few."""
    return (right + TOWARDS * right.sum() / support.sum()) / (support + TOWARDS)


def recall_interval(support: np.ndarray, right: np.ndarray) -> list[float]:
    """The 95 % interval of balanced accuracy, of classes with pictures, [K]. With one picture to a class it is Wilson's.

    A class of one picture tells nothing of its own spread, and a bootstrap makes it none: so it borrows that of all.
    """
    share, classes = shrunk(support, right), len(support)
    # What shrinking takes from the spread: exact where all classes are equally hard.
    spread = share * (1 - share) / (1 - support / (support + TOWARDS) ** 2)
    return as_share(float((right / support).mean()), math.sqrt((spread / support).sum()) / classes, alike(support))


def f1_interval(
    support: np.ndarray, right: np.ndarray, said: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> list[float]:
    """The 95 % interval of F1, the mean over classes that have pictures; all are [K], also of classes that have none.

    Drawn anew: how many of each class are right, and which classes the wrong ones are taken for.
    """
    there, wrongly = support > 0, said - right
    share, generator = shrunk(support[there], right[there]), np.random.default_rng(seed)
    value, spread = float((2 * right / np.maximum(1, support + said))[there].mean()), 0.0
    if wrongly.any() and right.any():
        hits = generator.binomial(support[there], share, size=(resamples, len(share)))  # [resamples, K there]
        taken = generator.multinomial(support.sum() - hits.sum(1), wrongly / wrongly.sum())[:, there]
        spread = float((2 * hits / (support[there] + hits + taken)).mean(1).std())
    return as_share(value, spread, alike(support[there]))


def alike(support: np.ndarray) -> float:
    """As many pictures as tell a share as surely as the mean over classes of so many does, were all classes alike."""
    return len(support) ** 2 / float((1 / support).sum())


def resampled(
    measure: Callable[[np.ndarray], np.ndarray], count: int, resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """The values, [resamples, …], of a measure that is told, [b, n], how often each picture was drawn, and gives b of them."""
    generator, values = np.random.default_rng(seed), []
    for start in range(0, resamples, 50):
        drawn = (generator.integers(count, size=count) for _ in range(min(50, resamples - start)))
        values.append(measure(np.stack([np.bincount(each, minlength=count) for each in drawn])))
    return np.concatenate(values)


def affordable(numbers: int) -> int:
    """How many resamples of so many numbers there is time for."""
    return int(np.clip(WORK // max(1, numbers), 100, RESAMPLES))


def mean_of_numbers(values: np.ndarray) -> np.ndarray:
    """The mean along the last axis of what is a number; not a number where nothing is."""
    there = ~np.isnan(values)
    count, total = there.sum(-1), np.where(there, values, 0).sum(-1)
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def middle(values: np.ndarray) -> list[float]:
    """What 95 % of the values lie within."""
    return [float(value) for value in np.nanpercentile(values, [2.5, 97.5])]

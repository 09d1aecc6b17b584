"""Whether two models differ beyond chance, judged on the same pictures."""

import math
from dataclasses import dataclass

import numpy as np

from vitrail.evaluate.intervals import affordable
from vitrail.evaluate.several import Ranking, mean_average_precision


@dataclass(frozen=True)
class Paired:
    """Two models on the same pictures."""

    pictures: int
    first_only: int  # pictures that only the first got right
    second_only: int
    difference: float  # second minus first, of the score
    interval: tuple[float, float]  # 95 %, of the difference
    chance: float | None  # mid-p: how likely so uneven a split is between equals; None for mAP

    @property
    def beyond_chance(self) -> bool:
        """At 5 %: by McNemar's test, or by an interval that leaves zero out."""
        if self.chance is not None:
            return self.chance < 0.05
        return self.interval[0] > 0 or self.interval[1] < 0


def mcnemar(first_only: int, second_only: int) -> float:
    """McNemar's test, exact with the mid-p correction: two-sided, from the binomial with one half."""
    count, fewer = first_only + second_only, min(first_only, second_only)
    if first_only == second_only:
        # The two tails meet in the middle; with mid-p each loses half of the middle.
        return 1.0
    log_half = -count * math.log(2)

    def mass(k: int) -> float:
        return math.exp(math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + log_half)

    return min(1.0, 2 * sum(mass(k) for k in range(fewer)) + mass(fewer))


def compare_right(first: np.ndarray, second: np.ndarray) -> Paired:
    """From which pictures, [n], each of the two got right."""
    count = len(first)
    lost, won = int((first & ~second).sum()), int((~first & second).sum())
    difference = (won - lost) / count
    # Normal interval of a paired difference, with one half added to each cell so that it never has no width.
    spread = math.sqrt((won + lost + 1) - (won - lost) ** 2 / count) / count
    interval = (max(-1.0, difference - 1.96 * spread), min(1.0, difference + 1.96 * spread))
    return Paired(count, lost, won, difference, interval, mcnemar(lost, won))


def compare_map(first: np.ndarray, second: np.ndarray, targets: np.ndarray, seed: int = 0) -> Paired:
    """From both models' logits, [n, K]: each resample of pictures gives a difference of mAP."""
    count, classes = targets.shape
    there = np.flatnonzero((targets > 0).any(0))
    one, two = ([Ranking(logits[:, k], targets[:, k]) for k in there] for logits in (first, second))
    generator, differences = np.random.default_rng(seed), []
    resamples = affordable(2 * count * classes)
    for start in range(0, resamples, 50):
        times = generator.multinomial(count, np.full(count, 1 / count), size=min(50, resamples - start))
        differences.append(mean_average_precision(two, times) - mean_average_precision(one, times))
    low, high = np.percentile(np.concatenate(differences), [2.5, 97.5])
    whole = float(mean_average_precision(two)[0] - mean_average_precision(one)[0])
    right = [((logits >= 0) == (targets > 0)).all(1) for logits in (first, second)]
    lost, won = int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum())
    return Paired(count, lost, won, whole, (float(low), float(high)), None)

"""Paired tests of two models on the same images: McNemar's test for accuracy, a bootstrap for mAP.

Those of masks and of numbers are in segmentation.py and regression.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.metrics.intervals import choose_resamples
from vitrail.metrics.multilabel import Ranking, mean_average_precision


@dataclass(frozen=True)
class PairedTest:
    """Result of a paired test."""

    images: int
    first_only: int  # images that only the first model classifies correctly, or on which it is better
    second_only: int
    difference: float  # score of the second minus that of the first
    interval: tuple[float, float]  # 95 %, of the difference
    p_value: float | None  # mid-p of McNemar's test; None for a bootstrap
    counted: Literal["correct", "better"] = "correct"  # what `first_only` and `second_only` count
    score: str | None = None  # name of a score that is no percentage, so that its difference is not in points

    @property
    def is_significant(self) -> bool:
        """Return whether the difference is significant at 5 %, by McNemar's test or by an interval without zero."""
        if self.p_value is not None:
            return self.p_value < 0.05
        return self.interval[0] > 0 or self.interval[1] < 0


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of McNemar's exact test with the mid-p correction."""
    count, fewer = first_only + second_only, min(first_only, second_only)
    if first_only == second_only:
        # The tails meet in the middle, and mid-p removes half of it from each.
        return 1.0
    log_half = -count * math.log(2)

    def mass(k: int) -> float:
        return math.exp(math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + log_half)

    return min(1.0, 2 * sum(mass(k) for k in range(fewer)) + mass(fewer))


def compare_correct(first: np.ndarray, second: np.ndarray) -> PairedTest:
    """Test the difference of accuracy from boolean correctness per image, [n] each."""
    count = len(first)
    lost, won = int((first & ~second).sum()), int((~first & second).sum())
    difference = (won - lost) / count
    # Normal interval of a paired difference, with 0.5 added to each cell so that its width is never 0.
    spread = math.sqrt((won + lost + 1) - (won - lost) ** 2 / count) / count
    interval = (max(-1.0, difference - 1.96 * spread), min(1.0, difference + 1.96 * spread))
    return PairedTest(count, lost, won, difference, interval, mcnemar(lost, won))


def compare_map(first: np.ndarray, second: np.ndarray, targets: np.ndarray, seed: int = 0) -> PairedTest:
    """Test the difference of mAP from the logits of both models, [n, K], by a bootstrap over images."""
    count, classes = targets.shape
    present = np.flatnonzero((targets > 0).any(0))
    one, two = ([Ranking(logits[:, k], targets[:, k]) for k in present] for logits in (first, second))
    generator, differences = np.random.default_rng(seed), []
    resamples = choose_resamples(2 * count * classes)
    for start in range(0, resamples, 50):
        counts = generator.multinomial(count, np.full(count, 1 / count), size=min(50, resamples - start))
        differences.append(mean_average_precision(two, counts) - mean_average_precision(one, counts))
    low, high = np.percentile(np.concatenate(differences), [2.5, 97.5])
    difference = float(mean_average_precision(two)[0] - mean_average_precision(one)[0])
    correct = [((logits >= 0) == (targets > 0)).all(1) for logits in (first, second)]
    lost, won = int((correct[0] & ~correct[1]).sum()), int((~correct[0] & correct[1]).sum())
    return PairedTest(count, lost, won, difference, (float(low), float(high)), None)

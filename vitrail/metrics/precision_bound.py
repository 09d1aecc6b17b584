"""Thresholds of confidence that hold a precision, by a one-sided bound and not by the point estimate.

n validation images, sorted by the confidence of their predictions.

The images above a threshold are right or wrong independently of each other, given their confidences. So the exact bound of
Clopper and Pearson holds for their mean precision (Hoeffding 1956: a sum of independent trials of different probabilities
deviates no more than a binomial). Several thresholds are tested in a fixed order, from the strictest to the loosest, until
one fails: no correction for their number is needed (fixed-sequence testing, as in Angelopoulos et al. 2021, Learn then Test).
"""

import math
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95  # of the bound
STEPS = 40  # thresholds that are tested, at most


@dataclass(frozen=True)
class ThresholdFit:
    """A threshold whose precision holds, or None and the best that was reached."""

    threshold: float | None
    count: int  # validation images at or above the threshold; without one, of the first test
    errors: int  # wrong ones among them
    bound: float  # lower one-sided bound of their precision
    images: int  # validation images in all
    needed: int  # images without any error that would be needed

    @property
    def precision(self) -> float:
        """Return the point estimate."""
        return (self.count - self.errors) / self.count if self.count else math.nan


def bound_precision(count: int, errors: int, level: float = LEVEL) -> float:
    """Return the lower one-sided bound of Clopper and Pearson for a precision with `errors` among `count` predictions."""
    from scipy.stats import beta

    return 0.0 if errors >= count else float(beta.ppf(1 - level, count - errors, errors + 1))


def count_needed(target: float, errors: int = 0, level: float = LEVEL) -> int:
    """Return how many predictions with so many errors prove a precision of `target`."""
    if not 0 < target < 1:
        raise ValueError(f"the precision target must be above 0 and below 1, got {target:g}")
    low, high = errors, errors + 1
    while bound_precision(high, errors, level) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound_precision(middle, errors, level) >= target else (middle, high)
    return high


def find_threshold(confidence: np.ndarray, correct: np.ndarray, target: float, level: float = LEVEL) -> ThresholdFit:
    """Return the lowest confidence [n] at which predictions that are `correct` [n] hold the target, by their bound.

    The strictest threshold that is tested leaves a tenth of the images, or so many that one error is allowed, whichever are
    more; all images if there are fewer.
    """
    needed, n = count_needed(target, 0, level), len(confidence)
    order = np.argsort(-confidence, kind="stable")
    ranked, errors = confidence[order], np.cumsum(~correct[order].astype(bool))
    start = min(n, max(count_needed(target, 1, level), math.ceil(n / 10)))
    best: ThresholdFit | None = None
    first = ThresholdFit(None, start, int(errors[start - 1]) if n else 0, 0.0, n, needed)
    if n >= needed:
        sizes = np.unique(np.linspace(start, n, STEPS).astype(int))
        # All images of one confidence are above a threshold, or none.
        sizes = np.unique([int(np.searchsorted(-ranked, -ranked[size - 1], side="right")) for size in sizes])
        for size in sizes.tolist():
            wrong = int(errors[size - 1])
            fit = ThresholdFit(float(ranked[size - 1]), size, wrong, bound_precision(size, wrong, level), n, needed)
            first = first if best or size != sizes[0] else ThresholdFit(None, size, wrong, fit.bound, n, needed)
            if fit.bound < target:
                break
            best = fit
    elif n:
        wrong = int(errors[-1])
        first = ThresholdFit(None, n, wrong, bound_precision(n, wrong, level), n, needed)
    return best or first

"""Confidence intervals of metrics: Wilson's, effective sample sizes for class means, bootstrap."""

import math
from collections.abc import Callable

import numpy as np

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
RESAMPLES = 1000
MAX_BOOTSTRAP_WORK = 4 * 10**8  # values processed by a bootstrap: above it, fewer resamples
PRIOR_COUNT = 4  # pseudo-images per class with the pooled accuracy


def wilson_interval(correct: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion; it has the nominal coverage for few images and near 0 and 1."""
    if count < 1:
        raise ValueError(f"an interval needs at least 1 image, got {count}")
    share, square = correct / count, Z_95 * Z_95 / count
    middle = (share + square / 2) / (1 + square)
    half = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    # At the ends the exact result is 0 or 1; the formula has rounding errors.
    return (0.0 if correct <= 0 else max(0.0, middle - half)), (1.0 if correct >= count else min(1.0, middle + half))


def wilson_interval_from_std(value: float, std: float, fallback_count: float) -> list[float]:
    """Return Wilson's interval of a value from 0 to 1, for the number of images whose proportion has this deviation.

    Without a deviation, for example without errors, the number is `fallback_count`.
    """
    count = max(1.0, value * (1 - value) / std**2 if std > 0 and 0 < value < 1 else fallback_count)
    return list(wilson_interval(value * count, count))


def shrink_recall(support: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return the recall of each class, [K], shrunk towards the pooled accuracy for classes with few images."""
    return (correct + PRIOR_COUNT * correct.sum() / support.sum()) / (support + PRIOR_COUNT)


def recall_interval(support: np.ndarray, correct: np.ndarray) -> list[float]:
    """Return the 95 % interval of balanced accuracy over classes with images, [K]; with one image per class it is Wilson's.

    A class of one image has no variance of its own (a bootstrap gives 0), so the pooled one is used.
    """
    share, classes = shrink_recall(support, correct), len(support)
    # Correct the variance for the shrinkage: exact if all classes are equally hard.
    spread = share * (1 - share) / (1 - support / (support + PRIOR_COUNT) ** 2)
    value, std = float((correct / support).mean()), math.sqrt((spread / support).sum()) / classes
    return wilson_interval_from_std(value, std, effective_sample_size(support))


def f1_interval(
    support: np.ndarray, correct: np.ndarray, predicted: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> list[float]:
    """Return the 95 % interval of macro F1 over classes with images; inputs are [K], including classes without images.

    Resampled are the number of hits of each class and the predicted classes of the errors.
    """
    present, false_positives = support > 0, predicted - correct
    recall, generator = shrink_recall(support[present], correct[present]), np.random.default_rng(seed)
    value, std = float((2 * correct / np.maximum(1, support + predicted))[present].mean()), 0.0
    if false_positives.any() and correct.any():
        hits = generator.binomial(support[present], recall, size=(resamples, len(recall)))  # [resamples, K present]
        errors = support.sum() - hits.sum(1)
        false = generator.multinomial(errors, false_positives / false_positives.sum())[:, present]
        std = float((2 * hits / (support[present] + hits + false)).mean(1).std())
    return wilson_interval_from_std(value, std, effective_sample_size(support[present]))


def effective_sample_size(support: np.ndarray) -> float:
    """Return the number of images whose accuracy has the variance of the mean over equally hard classes of this support."""
    return len(support) ** 2 / float((1 / support).sum())


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], count: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the statistic of each resample, [resamples, …]; it gets counts [b, n] of each image and returns b values."""
    generator, values = np.random.default_rng(0), []
    for start in range(0, resamples, 50):
        samples = (generator.integers(count, size=count) for _ in range(min(50, resamples - start)))
        values.append(statistic(np.stack([np.bincount(sample, minlength=count) for sample in samples])))
    return np.concatenate(values)


def choose_resamples(numbers: int) -> int:
    """Return the number of resamples within MAX_BOOTSTRAP_WORK, 100 to RESAMPLES."""
    return int(np.clip(MAX_BOOTSTRAP_WORK // max(1, numbers), 100, RESAMPLES))


def mean_ignoring_nan(values: np.ndarray) -> np.ndarray:
    """Return the mean along the last axis without NaN; NaN if there is no number."""
    valid = ~np.isnan(values)
    count, total = valid.sum(-1), np.where(valid, values, 0).sum(-1)
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def percentile_interval(values: np.ndarray) -> list[float]:
    """Return the interval that holds 95 % of the values."""
    return [float(value) for value in np.nanpercentile(values, [2.5, 97.5])]

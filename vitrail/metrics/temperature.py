"""Temperature scaling (Guo et al. 2017): one number that divides all logits, so that confidence agrees with accuracy.

n images, K classes. The temperature T minimises the cross-entropy of the probabilities of logits / T. The accuracy does not
change. Targets are smoothed by 1/(n + 1) towards equal probabilities, similar to Platt's method, so that T is finite even if all
n predictions are correct.

T is kept only where it helps on images that it was not fitted on: by cross-validation over the images.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitrail.metrics.accuracy import iter_row_blocks, predict_classes, validate_logits
from vitrail.metrics.calibration import calibration_error, sigmoid
from vitrail.metrics.multilabel import binary_cross_entropy

LOWEST, HIGHEST = 0.01, 100.0  # temperatures
FOLDS = 5
MIN_IMAGES = 4 * FOLDS
MAX_ITERATIONS, TOLERANCE = 100, 1e-10


@dataclass(frozen=True)
class TemperatureFit:
    """The chosen temperature, and what it changes on images that it was not fitted on (cross-validation)."""

    temperature: float  # of the model: the fitted one, or 1 where that does not help
    fitted: float  # over all images
    images: int
    loss_before: float  # cross-entropy in nats
    loss_after: float  # of each image with the temperature of the other folds
    gain_error: float  # standard error of the difference
    calibration_error_before: float
    calibration_error_after: float  # as `loss_after`
    reason: str  # for the choice

    @property
    def is_scaled(self) -> bool:
        return self.temperature != 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"folds": FOLDS}


def choose_temperature(logits: np.ndarray, targets: np.ndarray, seed: int = 0) -> TemperatureFit:
    """Fit a temperature to logits [n, K] and targets [n] or [n, K], and decide by cross-validation whether it is kept.

    It is kept if the mean cross-entropy of held-out images falls by more than the standard error of that difference. Near the
    minimum the gain is |z| / 2 standard errors, where z is the z-score of T = 1. So |z| is above 2, and well calibrated logits
    keep T = 1 in about 95 of 100 cases.
    """
    logits, targets = validate_logits(logits, targets)
    n = len(logits)
    before, error_before = score_images(logits, targets)
    if n < MIN_IMAGES:
        values = (float(before.mean()), float(before.mean()), 0.0, error_before, error_before)
        return TemperatureFit(1.0, 1.0, n, *values, f"{n} samples are too few, at least {MIN_IMAGES} are needed")
    fold = np.empty(n, np.int64)
    fold[np.random.default_rng(seed).permutation(n)] = np.arange(n) % FOLDS
    scaled = np.empty(logits.shape, np.float32)
    for k in range(FOLDS):
        others = fold != k
        scaled[~others] = logits[~others] / fit_temperature(logits[others], targets[others])
    after, error_after = score_images(scaled, targets)
    gains = before - after
    gain, gain_error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(n))
    fitted, helps = fit_temperature(logits, targets), gain > gain_error
    change = f"the held-out loss {'falls' if gain > 0 else 'rises'} by {abs(gain):.4f} ± {gain_error:.4f}"
    values = (float(before.mean()), float(after.mean()), gain_error, error_before, error_after)
    return TemperatureFit(fitted if helps else 1.0, fitted, n, *values, change)


def score_images(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the cross-entropy of each image, [n], and the expected calibration error."""
    if targets.ndim == 2:
        return binary_cross_entropy(logits, targets), calibration_error(sigmoid(logits).ravel(), targets.ravel() > 0)
    predictions = predict_classes(logits, targets)
    return predictions.loss, calibration_error(predictions.confidence, predictions.correct)


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the temperature with the lowest cross-entropy, from LOWEST to HIGHEST.

    The cross-entropy is convex in 1 / T. Newton's method finds the zero of its slope, with a bisection where a step leaves
    the interval that contains it.
    """
    low, high = 1 / HIGHEST, 1 / LOWEST
    if compute_slope(logits, targets, low)[0] >= 0:
        return 1.0 if np.ptp(logits, axis=-1).max() == 0 else HIGHEST
    if compute_slope(logits, targets, high)[0] <= 0:
        return LOWEST
    inverse = 1.0
    for _ in range(MAX_ITERATIONS):
        slope, curvature = compute_slope(logits, targets, inverse)
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        step = inverse - slope / curvature if curvature > 0 else low
        step = step if low < step < high else (low * high) ** 0.5
        if abs(step - inverse) <= TOLERANCE * inverse:
            return 1 / step
        inverse = step
    return 1 / inverse


def compute_slope(logits: np.ndarray, targets: np.ndarray, inverse: float) -> tuple[float, float]:
    """Return the first and the second derivative of the summed cross-entropy by 1 / T, at `inverse`."""
    rest = 1 / (len(logits) + 1)  # of the further image
    slope = curvature = 0.0
    for rows in iter_row_blocks(logits):
        block = logits[rows].astype(np.float64)
        if targets.ndim == 2:
            p, truth = sigmoid(inverse * block), (1 - rest) * (targets[rows] > 0) + rest / 2
            slope += float((block * (p - truth)).sum())
            curvature += float((block**2 * p * (1 - p)).sum())
            continue
        block -= block.max(1, keepdims=True)
        p = np.exp(inverse * block)
        p /= p.sum(1, keepdims=True)
        mean = (p * block).sum(1)
        true = np.take_along_axis(block, targets[rows].astype(np.int64)[:, None], 1)[:, 0]
        slope += float((mean - (1 - rest) * true - rest * block.mean(1)).sum())
        curvature += float(((p * block**2).sum(1) - mean**2).sum())
    return slope, curvature

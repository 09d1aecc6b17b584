"""Few-shot accuracy of frozen features by regularised least squares in closed form (section 4.1 of the paper).

The features of a few images per class are mapped to targets in {-1, 1}^K. Details follow the authors' code (big_vision,
evaluators/fewshot_lsr.py): features are standardised over the sampled images, the bias is a constant feature of 100 so that it
is hardly penalised, the penalty is 2^10, and the images of fewer shots are a subset of those of more. Double precision.
n images, m queries, D features, K classes.
"""

import math
from dataclasses import dataclass

import numpy as np

SHOTS, DRAWS, PENALTY, BIAS = (1, 5, 10, 25), 5, 2.0**10, 100.0
EPSILON = 1e-5  # added to standard deviations


@dataclass(frozen=True)
class FewShotResult:
    """Accuracies for one number of shots over several random samples."""

    shots: int
    accuracies: tuple[float, ...]
    images: int  # per sample: fewer than shots × K if classes have fewer images
    scarce_classes: tuple[int, ...] = ()  # classes with fewer images than shots: all their images are used

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return Student's 95 % interval of the mean over samples, None for one; it ignores the sampling of test images."""
        if len(self.accuracies) < 2:
            return None
        from scipy.stats import t

        spread = float(np.std(self.accuracies, ddof=1)) / math.sqrt(len(self.accuracies))
        half = float(t.ppf(0.975, len(self.accuracies) - 1)) * spread
        return max(0.0, self.mean - half), min(1.0, self.mean + half)


def evaluate_few_shot(
    train: np.ndarray,  # [n, D]
    targets: np.ndarray,  # [n]
    queries: np.ndarray,  # [m, D]
    truth: np.ndarray,  # [m]
    classes: int,
    shots: int,
    draws: int = DRAWS,
    seed: int = 0,
) -> FewShotResult:
    """Return the accuracy with `shots` images per class over samples with the seeds `seed`, `seed + 1`, …

    If no class has more images than that, all samples are equal and only one is evaluated.
    """
    if targets.ndim != 1:
        raise ValueError("few-shot needs single-label targets: use knn or linear for multi-label data")
    if draws < 1 or shots < 1:
        raise ValueError(f"draws and shots must be >= 1, got {draws} and {shots}")
    counts = np.bincount(targets, minlength=classes)
    n_samples = draws if counts.max() > shots else 1
    samples = [sample_shots(targets, classes, shots, seed + k) for k in range(n_samples)]
    predicted = [predict_least_squares(train[s], targets[s], queries, classes).argmax(1) for s in samples]
    accuracies = tuple(float((labels == truth).mean()) for labels in predicted)
    return FewShotResult(shots, accuracies, len(samples[0]), tuple(int(k) for k in np.flatnonzero(counts < shots)))


def sample_shots(targets: np.ndarray, classes: int, shots: int, seed: int) -> np.ndarray:
    """Return the indices of `shots` random images of each class, or of all if a class has fewer; class by class."""
    generator = np.random.default_rng(seed)
    return np.concatenate([generator.permutation(np.flatnonzero(targets == k))[:shots] for k in range(classes)])


def predict_least_squares(
    train: np.ndarray, targets: np.ndarray, queries: np.ndarray, classes: int, penalty: float = PENALTY
) -> np.ndarray:
    """Fit to the training features and return the outputs of the queries, [m, K]."""
    double = train.astype(np.float64)
    mean, deviation = double.mean(0), double.std(0) + EPSILON

    def standardise(features: np.ndarray) -> np.ndarray:
        rows = (features.astype(np.float64) - mean) / deviation
        return np.concatenate((rows, np.full((len(rows), 1), BIAS)), 1)  # [·, D + 1]

    x = standardise(train)
    y = np.where(np.arange(classes) == targets[:, None], 1.0, -1.0)  # [n, K]
    if len(x) >= x.shape[1]:
        w = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
    else:  # the same w from the smaller matrix
        w = x.T @ np.linalg.solve(x @ x.T + penalty * np.eye(len(x)), y)
    return standardise(queries) @ w

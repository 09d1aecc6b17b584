"""Differences between two models' outputs for the same images: of a checkpoint and its export, of fp32 and a lower precision.

Each task compares its outputs with what is here. n images, K classes, F features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.metrics.calibration import probabilities
from vitrail.utils.json import Finite


@dataclass(frozen=True)
class TargetStatistics:
    """Mean and standard deviation of the training targets of a model, [M] each, in its model file."""

    mean: tuple[Finite, ...]
    std: tuple[Finite, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError("statistics of targets must be a mean and a standard deviation > 0 for each")


@dataclass(frozen=True)
class PairedScore:
    """Accuracy (mAP for multi-label data, mIoU for masks, R² for numbers) of two models, with 95 % intervals."""

    measure: str
    first: float
    second: float
    first_interval: tuple[float, float] | None
    second_interval: tuple[float, float] | None
    difference: float  # second minus first
    difference_interval: tuple[float, float]


@dataclass(frozen=True)
class OutputComparison:
    """Difference between two models' outputs for the same images."""

    what: str  # logits, features, or numbers
    largest_difference: float
    largest: float  # absolute output of the first model
    agreement: float | None = None  # fraction of images with the same prediction; None without classes
    agreement_interval: tuple[float, float] | None = None
    score: PairedScore | None = None
    confidence_shift: float | None = None  # second minus first, of the mean probability of the predictions
    least_cosine: float | None = None  # of features
    of_pixels: bool = False  # whether the agreement is that of pixels, not of images
    relative: float | None = None  # of numbers: the largest difference, in standard deviations of the target
    mean_relative: float | None = None  # of numbers: the mean difference
    rounding: float = 0.0  # of numbers: what float32 may change, in standard deviations

    @property
    def compared(self) -> str:
        """Return what the agreement is a fraction of."""
        return "pixels" if self.of_pixels else "predictions"

    def measure_loss(self) -> tuple[float, str]:
        """Return the points of accuracy lost, or the per cent of changed predictions or features, and what they measure."""
        if self.score is not None:
            return max(0.0, -100 * self.score.difference), self.score.measure
        if self.mean_relative is not None:
            return 100 * self.mean_relative, self.what
        share = self.agreement if self.agreement is not None else self.least_cosine or 0.0
        return 100 * (1 - share), self.compared if self.agreement is not None else self.what

    def describe(self) -> str:
        """Return the agreement as a phrase."""
        if self.agreement is not None:
            return f"{100 * self.agreement:.4g} % same {self.compared}"
        if self.mean_relative is not None:
            return f"numbers changed by {100 * self.mean_relative:.2g} % of their standard deviation on average"
        return f"{self.what} with a cosine of at least {self.least_cosine:.4f}"


def compare_features(first: np.ndarray, second: np.ndarray) -> OutputComparison:
    """Compare the features of two models, [n, F] both, by the cosine of each image."""
    check_shapes(first, second, "features")
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    least = float(((a * b).sum(1) / np.maximum(lengths, 1e-12)).min())
    return OutputComparison("features", *measure_difference(first, second), least_cosine=least)


def check_shapes(first: np.ndarray, second: np.ndarray, what: str) -> None:
    """Raise ValueError for outputs of different shapes."""
    if first.shape != second.shape:
        raise ValueError(f"{what} differ in shape: {list(first.shape)} and {list(second.shape)}")


def measure_difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return the largest difference, infinite if the second outputs are not finite, and the largest of the first outputs."""
    difference = float(np.abs(first - second).max()) if np.isfinite(second).all() else math.inf
    return difference, float(np.abs(first).max())


def mean_confidence(logits: np.ndarray, several: bool = False) -> float:
    """Return the mean probability of the predictions: the most probable class, or the presence or absence of each."""
    chances = probabilities(logits, several)
    return float(np.maximum(chances, 1 - chances).mean() if several else chances.max(1).mean())


def read_interval(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    """Return the interval of a mIoU or R²; None of a single image, which has none."""
    low, high = interval or (None, None)
    return None if low is None or high is None else (low, high)

"""Compare the outputs and the speed of an exported file with those of its model, on the same images.

B images, K classes, F features.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import Runtime
from vitrail.metrics.calibration import probabilities
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.linear import score_logits
from vitrail.metrics.paired import compare_correct, compare_map


def generate_images(preprocessing: Preprocessing, count: int, seed: int = 0) -> np.ndarray:
    """Return synthetic images of gradients, waves, noise and boxes, uint8 [count, C, H, W]."""
    rng = np.random.default_rng(seed)
    height, width = preprocessing.size
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    images = np.empty((count, preprocessing.channels, height, width), np.uint8)
    for index in range(count):
        for channel in range(preprocessing.channels):
            slope, wave = rng.normal(size=2), rng.uniform(2, 40, size=2)
            values = 128 + 60 * (slope[0] * y + slope[1] * x)
            values += rng.uniform(0, 50) * np.sin(wave[0] * y + wave[1] * x + rng.uniform(0, 6))
            values += rng.uniform(0, 40) * rng.normal(size=values.shape)
            images[index, channel] = values.clip(0, 255)
        for _ in range(rng.integers(1, 5)):  # boxes of one colour
            top, left = rng.integers(height), rng.integers(width)
            below, right = top + 1 + rng.integers(height), left + 1 + rng.integers(width)
            images[index, :, top:below, left:right] = rng.integers(256, size=(preprocessing.channels, 1, 1))
    return images


def time_interleaved(
    runs: Mapping[str, Callable[[], Any]], rounds: int = 15, seconds: float = 10.0
) -> dict[str, list[float]]:
    """Return the seconds of each function in each round, in rotating order, after a warm-up round.

    There are at least 3 rounds, and fewer than `rounds` if they would take longer than `seconds`.
    """
    names = list(runs)
    start = time.perf_counter()
    for name in names:
        runs[name]()
    rounds = max(3, min(rounds, int(seconds / max(1e-9, time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in names}
    for shift in range(rounds):
        for name in names[shift % len(names) :] + names[: shift % len(names)]:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return times


BATCH_SIZE = 16  # for throughput; latency is measured with one image
MAX_LOGIT_DIFFERENCE = 1e-3  # for fp32
MAX_ACCURACY_LOSS, MAX_CHANGED_PREDICTIONS = 1.0, 5.0  # percentage points, for lower precisions
MAX_CONFIDENCE_SHIFT = 2.0  # percentage points of the mean confidence, for lower precisions
MIN_COSINE = 0.99  # of the features of an image, for lower precisions
MIN_SPEEDUP = 1.05  # less is reported as not faster


@dataclass(frozen=True)
class VerificationImages:
    """Preprocessed images, with their labels if known."""

    pixels: np.ndarray  # uint8 [B, C, H, W]
    source: str  # description of their origin
    targets: np.ndarray | None = None  # class indices [B], or [B, K] of 0 and 1


@dataclass(frozen=True)
class PairedScore:
    """Accuracy (mAP for multi-label data) of two models, with 95 % intervals."""

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

    what: str  # logits, or features
    largest_difference: float
    largest: float  # absolute output of the first model
    agreement: float | None = None  # fraction of images with the same prediction; None without classes
    agreement_interval: tuple[float, float] | None = None
    score: PairedScore | None = None
    confidence_shift: float | None = None  # second minus first, of the mean probability of the predictions
    least_cosine: float | None = None  # of features

    def measure_loss(self) -> tuple[float, str]:
        """Return the points of accuracy lost, or the per cent of changed predictions or features, and what they measure."""
        if self.score is not None:
            return max(0.0, -100 * self.score.difference), self.score.measure
        share = self.agreement if self.agreement is not None else self.least_cosine or 0.0
        return 100 * (1 - share), "predictions" if self.agreement is not None else self.what

    def describe(self) -> str:
        """Return the agreement as a phrase."""
        if self.agreement is not None:
            return f"{100 * self.agreement:.4g} % same predictions"
        return f"{self.what} with a cosine of at least {self.least_cosine:.4f}"


@dataclass(frozen=True)
class SizeComparison:
    """Comparison on generated images of another size than the model's."""

    size: tuple[int, int]
    compared: OutputComparison


@dataclass(frozen=True)
class Tolerances:
    """Largest accepted differences: of logits in fp32, else of accuracy or predictions in percentage points."""

    logits: float | None
    points: float | None
    points_unlabelled: float | None
    confidence: float = math.inf  # percentage points of the mean confidence

    def find_violations(self, comparison: OutputComparison) -> list[str]:
        """Return the reasons why a comparison exceeds the tolerances; empty if it does not."""
        if not math.isfinite(comparison.largest_difference):
            return ["its outputs are not finite"]
        if self.logits is not None:
            limit = self.logits * (1.0 if comparison.what == "logits" else max(1.0, comparison.largest))
            violations, largest = [], comparison.largest_difference
            if largest > limit:
                violations.append(f"{comparison.what} differ by {largest:.3g}, more than {limit:.3g}")
            if comparison.agreement is not None and comparison.agreement < 1:
                violations.append(f"{1 - comparison.agreement:.2%} of the predictions changed")
            return violations
        if comparison.score is not None and self.points is not None:
            lost = -100 * comparison.score.difference
            message = f"{comparison.score.measure} falls by {lost:.2f} points, more than {self.points:g}"
            return [message] if lost > self.points + 1e-9 else self.find_miscalibration(comparison)
        if comparison.agreement is not None and self.points_unlabelled is not None:
            changed = 100 * (1 - comparison.agreement)
            message = f"{changed:.2f} % of the predictions changed, more than {self.points_unlabelled:g} %"
            return [message] if changed > self.points_unlabelled + 1e-9 else self.find_miscalibration(comparison)
        if comparison.least_cosine is not None and comparison.least_cosine < MIN_COSINE:
            return [f"{comparison.what} have a cosine of only {comparison.least_cosine:.4f}, less than {MIN_COSINE}"]
        relative = comparison.largest_difference / max(1e-9, comparison.largest)
        return [] if relative <= 0.1 else [f"features differ by {relative:.1%} of the largest, more than 10 %"]

    def find_miscalibration(self, comparison: OutputComparison) -> list[str]:
        """Return the change of the mean confidence if it exceeds the tolerance: with the same accuracy, calibration changes."""
        shift = 100 * abs(comparison.confidence_shift or 0.0)
        message = f"the mean confidence changed by {shift:.2f} points, more than {self.confidence:g}"
        return [message] if shift > self.confidence + 1e-9 else []


def tolerances_for(precision: str, tolerance: float | None = None) -> Tolerances:
    """Return the tolerances of a precision; `tolerance` replaces the default (logits in fp32, else percentage points)."""
    if tolerance is not None and not (0 <= tolerance < math.inf):
        raise ValueError(f"--tolerance must be >= 0 and finite, got {tolerance}")
    if precision == "fp32":
        return Tolerances(MAX_LOGIT_DIFFERENCE if tolerance is None else tolerance, None, None)
    points = (MAX_ACCURACY_LOSS, MAX_CHANGED_PREDICTIONS) if tolerance is None else (tolerance, tolerance)
    return Tolerances(None, *points, max(MAX_CONFIDENCE_SHIFT, tolerance or 0.0))


@dataclass(frozen=True)
class RuntimeSpeed:
    """Speed of one runtime, measured interleaved with the others of the same report."""

    latency: float  # seconds for one image
    throughput: float  # images per second in batches of 16


@dataclass(frozen=True)
class VerificationReport:
    """Comparison of an exported file with its model."""

    file: str
    runtime: str
    precision: str
    images: int
    source: str
    compared: OutputComparison
    features: OutputComparison | None  # beside logits
    bytes: int
    bytes_before: int
    speeds: Mapping[str, RuntimeSpeed]  # of the model, the file, and the file in fp32 if it has another precision
    refusals: tuple[str, ...] = ()
    unmerged: OutputComparison | None = None  # compared with the model without token merging
    at_sizes: tuple[SizeComparison, ...] = ()  # of a file for any size
    kept: tuple[str, ...] = ()  # layers left in fp32 in an int8 file
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {"passed": self.passed, **asdict(self)}


def compare_outputs(
    first: np.ndarray,
    second: np.ndarray,
    targets: np.ndarray | None = None,
    several: bool = False,
    what: str = "logits",
) -> OutputComparison:
    """Compare two outputs, both [B, K] logits or [B, F] features."""
    if first.shape != second.shape:
        raise ValueError(f"{what} differ in shape: {list(first.shape)} and {list(second.shape)}")
    difference = float(np.abs(first - second).max()) if np.isfinite(second).all() else math.inf
    largest = float(np.abs(first).max())
    if what != "logits":
        return OutputComparison(what, difference, largest, least_cosine=least_cosine(first, second))
    same = ((first >= 0) == (second >= 0)).all(1) if several else first.argmax(1) == second.argmax(1)
    score = None if targets is None else score_pair(first, second, targets)
    interval = wilson_interval(float(same.sum()), len(same))
    shift = (
        mean_confidence(second, several) - mean_confidence(first, several) if math.isfinite(difference) else math.nan
    )
    return OutputComparison(what, difference, largest, float(same.mean()), interval, score, shift)


def mean_confidence(logits: np.ndarray, several: bool) -> float:
    """Return the mean probability of the predictions: the most probable class, or the presence or absence of each."""
    chances = probabilities(logits, several)
    return float(np.maximum(chances, 1 - chances).mean() if several else chances.max(1).mean())


def least_cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Return the least cosine of the features of an image, [B, F] both."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / np.maximum(lengths, 1e-12)).min())


def score_pair(first: np.ndarray, second: np.ndarray, targets: np.ndarray) -> PairedScore:
    """Return the accuracy or mAP of both outputs, and their paired difference."""
    if targets.ndim == 2:
        paired = compare_map(first, second, targets)
        one, two = score_logits(first, targets), score_logits(second, targets)
        return PairedScore("mAP", one, two, None, None, paired.difference, paired.interval)
    correct = [logits.argmax(1) == targets for logits in (first, second)]
    paired, count = compare_correct(correct[0], correct[1]), len(targets)
    one, two = (float(row.sum()) for row in correct)
    intervals = wilson_interval(one, count), wilson_interval(two, count)
    return PairedScore("accuracy", one / count, two / count, *intervals, paired.difference, paired.interval)


def measure_speeds(
    runtimes: Mapping[str, Runtime], pixels: np.ndarray, seconds: float = 10.0
) -> dict[str, RuntimeSpeed]:
    """Return latency and throughput of each runtime, measured interleaved."""
    batch = np.concatenate([pixels] * -(-BATCH_SIZE // len(pixels)))[:BATCH_SIZE]

    def median_seconds(images: np.ndarray, rounds: int) -> dict[str, float]:
        calls = {name: partial(runtime, images) for name, runtime in runtimes.items()}
        samples = time_interleaved(calls, rounds, seconds / 2)
        return {name: statistics.median(times) for name, times in samples.items()}

    single, batched = median_seconds(batch[:1], 31), median_seconds(batch, 11)
    return {name: RuntimeSpeed(single[name], BATCH_SIZE / batched[name]) for name in runtimes}


def describe_missing_speedup(
    speeds: Mapping[str, RuntimeSpeed], file: str, baseline: str, precision: str
) -> str | None:
    """Return a note if a lower precision is not faster on this machine, else None."""
    gain = speeds[file].throughput / speeds[baseline].throughput
    if gain >= MIN_SPEEDUP:
        return None
    return f"{precision} is not faster here: {gain:.2f}× the throughput of the same file in fp32"

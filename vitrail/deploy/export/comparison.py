"""Compare the outputs and the speed of an exported file with those of its model, on the same images.

The task of the model says what is kept of its outputs and how they are compared. B images, K classes, C channels, H×W pixels.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import LOG_ENERGIES, ModelContract, OutputKind, Runtime
from vitrail.tasks.comparison import OutputComparison, compare_features


def generate_images(preprocessing: Preprocessing, count: int, seed: int = 0) -> np.ndarray:
    """Return synthetic images of gradients, waves, noise and boxes, uint8 [count, C, H, W]; of clips, they move sideways.

    Of sounds they are spectrograms, float32 [count, 1, mel bins, frames].
    """
    if (clip := preprocessing.clip) is not None:
        stills = generate_images(replace(preprocessing, clip=None), count, seed)
        return np.stack([np.roll(stills, 2 * frame, axis=-1) for frame in range(clip.frames)], axis=-3)
    if preprocessing.sound is not None:
        grey = generate_images(replace(preprocessing, sound=None), count, seed)
        low, high = LOG_ENERGIES
        return (low + (high - low) * grey / 255).astype(np.float32)
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
CLIP_BATCH_FRAMES = 32  # of the clips that are computed at once
MAX_LOGIT_DIFFERENCE = 1e-3  # for fp32
MAX_ACCURACY_LOSS, MAX_CHANGED_PREDICTIONS = 1.0, 5.0  # percentage points, for lower precisions
MAX_CONFIDENCE_SHIFT = 2.0  # percentage points of the mean confidence, for lower precisions
MIN_COSINE = 0.99  # of the features of an image, for lower precisions
MIN_SPEEDUP = 1.05  # less is reported as not faster
MIN_PIXEL_AGREEMENT = 0.999  # of the predicted masks in fp32: at edges, logits may be equal up to rounding
MAX_CHANGED_PIXELS = 1.0  # per cent, for lower precisions
MAX_BATCH_BYTES = 2**29  # of maps of logits


@dataclass(frozen=True)
class VerificationImages:
    """Preprocessed images, with their labels if known."""

    pixels: np.ndarray  # uint8 [B, C, H, W], of clips [B, C, T, H, W]
    source: str  # description of their origin
    targets: np.ndarray | None = None  # class indices [B], or [B, K] of 0 and 1, or masks [B, H, W]


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
    pixels: float = 100 * (1 - MIN_PIXEL_AGREEMENT)  # per cent of changed pixels of masks

    def find_violations(self, comparison: OutputComparison) -> list[str]:
        """Return the reasons why a comparison exceeds the tolerances; empty if it does not."""
        if not math.isfinite(comparison.largest_difference):
            return ["its outputs are not finite"]
        if comparison.relative is not None:
            return self.find_changed_numbers(comparison)
        if self.logits is not None:
            is_absolute = comparison.what == "logits" and not comparison.of_pixels
            limit = self.logits * (1.0 if is_absolute else max(1.0, comparison.largest))
            violations, largest = [], comparison.largest_difference
            if largest > limit:
                violations.append(f"{comparison.what} differ by {largest:.3g}, more than {limit:.3g}")
            least = 1 - self.pixels / 100 if comparison.of_pixels else 1
            if comparison.agreement is not None and comparison.agreement < least:
                violations.append(f"{1 - comparison.agreement:.2%} of the {comparison.compared} changed")
            return violations
        if comparison.score is not None and self.points is not None:
            lost = -100 * comparison.score.difference
            message = f"{comparison.score.measure} falls by {lost:.2f} points, more than {self.points:g}"
            return [message] if lost > self.points + 1e-9 else self.find_miscalibration(comparison)
        if comparison.agreement is not None and self.points_unlabelled is not None:
            changed, limit = 100 * (1 - comparison.agreement), self.points_unlabelled
            limit = self.pixels if comparison.of_pixels else limit
            message = f"{changed:.2f} % of the {comparison.compared} changed, more than {limit:g} %"
            return [message] if changed > limit + 1e-9 else self.find_miscalibration(comparison)
        if comparison.least_cosine is not None and comparison.least_cosine < MIN_COSINE:
            return [f"{comparison.what} have a cosine of only {comparison.least_cosine:.4f}, less than {MIN_COSINE}"]
        relative = comparison.largest_difference / max(1e-9, comparison.largest)
        return [] if relative <= 0.1 else [f"features differ by {relative:.1%} of the largest, more than 10 %"]

    def find_changed_numbers(self, comparison: OutputComparison) -> list[str]:
        """Return how numbers changed, if more than in float their rounding allows, or in lower precision R² or their mean."""
        relative, mean = comparison.relative or 0.0, 100 * (comparison.mean_relative or 0.0)
        if self.logits is not None:
            limit = max(self.logits, comparison.rounding)
            message = f"numbers differ by {relative:.3g} standard deviations, more than {limit:.3g}"
            return [message] if relative > limit else []
        if comparison.score is not None and self.points is not None:
            lost, most = -comparison.score.difference, self.points / 100
            return [f"R² falls by {lost:.4f}, more than {most:g}"] if lost > most + 1e-9 else []
        most = self.points_unlabelled if self.points_unlabelled is not None else MAX_CHANGED_PREDICTIONS
        message = f"numbers changed by {mean:.2f} % of their standard deviation on average, more than {most:g} %"
        return [message] if mean > most + 1e-9 else []

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
    pixels = MAX_CHANGED_PIXELS if tolerance is None else tolerance
    return Tolerances(None, *points, max(MAX_CONFIDENCE_SHIFT, tolerance or 0.0), pixels)


@dataclass(frozen=True)
class RuntimeSpeed:
    """Speed of one runtime, measured interleaved with the others of the same report."""

    latency: float  # seconds for one image
    throughput: float  # images per second in batches


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
    batch_size: int = BATCH_SIZE  # of the throughput
    media: str = "image"  # what the images are

    @property
    def passed(self) -> bool:
        return not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {"passed": self.passed, **asdict(self)}


def compare_outputs(
    contract: ModelContract, output_kind: OutputKind, first: Any, second: Any, targets: np.ndarray | None = None
) -> OutputComparison:
    """Compare what is kept of the outputs of two models by the task of their contract; features by their cosine."""
    if output_kind == "features":
        return compare_features(first, second)
    return contract.task.compare_outputs(first, second, targets, contract.statistics)


def choose_batch_size(contract: ModelContract) -> int:
    """Return the number of images that are computed at once: fewer of clips, or if the outputs are large maps."""
    if (clip := contract.preprocessing.clip) is not None:
        return max(1, CLIP_BATCH_FRAMES // clip.frames)
    (height, width), classes = contract.preprocessing.size, len(contract.labels or ())
    fitting = MAX_BATCH_BYTES // (4 * max(1, classes) * height * width)
    return max(1, min(BATCH_SIZE, fitting)) if contract.task.has_maps else BATCH_SIZE


def measure_speeds(
    runtimes: Mapping[str, Runtime], pixels: np.ndarray, seconds: float = 10.0, batch_size: int = BATCH_SIZE
) -> dict[str, RuntimeSpeed]:
    """Return latency and throughput of each runtime, measured interleaved."""
    batch = np.concatenate([pixels] * -(-batch_size // len(pixels)))[:batch_size]

    def median_seconds(images: np.ndarray, rounds: int) -> dict[str, float]:
        calls = {name: partial(runtime, images) for name, runtime in runtimes.items()}
        samples = time_interleaved(calls, rounds, seconds / 2)
        return {name: statistics.median(times) for name, times in samples.items()}

    single, batched = median_seconds(batch[:1], 31), median_seconds(batch, 11)
    return {name: RuntimeSpeed(single[name], batch_size / batched[name]) for name in runtimes}


def describe_missing_speedup(
    speeds: Mapping[str, RuntimeSpeed], file: str, baseline: str, precision: str
) -> str | None:
    """Return a note if a lower precision is not faster on this machine, else None."""
    gain = speeds[file].throughput / speeds[baseline].throughput
    if gain >= MIN_SPEEDUP:
        return None
    return f"{precision} is not faster here: {gain:.2f}× the throughput of the same file in fp32"

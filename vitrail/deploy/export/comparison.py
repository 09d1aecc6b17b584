"""Compare the outputs and the speed of an exported file with those of its model, on the same images.

Maps of logits, [B, K, H, W], are too large to keep for all images: `reduce_outputs` keeps the predicted masks, and the logits of
pixels on a grid. B images, K classes, F features, H×W pixels, P pixels of a grid.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import ModelContract, Runtime
from vitrail.metrics.calibration import probabilities
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.linear import score_logits
from vitrail.metrics.paired import compare_correct, compare_map
from vitrail.metrics.regression import compare_regression, summarise_regression
from vitrail.metrics.segmentation import compare_masks, compute_mask_metrics, count_confusion, sum_pixels
from vitrail.tasks.numbers import TargetStatistics


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
MIN_PIXEL_AGREEMENT = 0.999  # of the predicted masks in fp32: at edges, logits may be equal up to rounding
MAX_CHANGED_PIXELS = 1.0  # per cent, for lower precisions
ROUNDINGS = 8  # of a number in float32: few, but its standard deviation may be small beside it
GRID_SIDE = 32  # pixels, at most, of the grid whose logits are compared
MAX_BATCH_BYTES = 2**29  # of maps of logits


@dataclass(frozen=True)
class VerificationImages:
    """Preprocessed images, with their labels if known."""

    pixels: np.ndarray  # uint8 [B, C, H, W]
    source: str  # description of their origin
    targets: np.ndarray | None = None  # class indices [B], or [B, K] of 0 and 1, or masks [B, H, W]


@dataclass(frozen=True)
class MaskOutputs:
    """Outputs of a segmentation model, reduced to what is compared."""

    masks: np.ndarray  # uint8 [B, H, W]
    logits: np.ndarray  # float32 [B · P, K]; NaN where an output of the batch is not finite

    @staticmethod
    def join(parts: "Sequence[MaskOutputs]") -> "MaskOutputs":
        """Return the outputs of several batches as one."""
        return MaskOutputs(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("masks", "logits")))


def reduce_outputs(outputs: np.ndarray) -> MaskOutputs:
    """Return the masks of maps of logits [B, K, H, W], and the logits of pixels on a grid."""
    height, width = outputs.shape[2:]
    grid = outputs[:, :, :: -(-height // GRID_SIDE), :: -(-width // GRID_SIDE)]
    logits = np.moveaxis(grid, 1, -1).reshape(-1, outputs.shape[1]).copy()
    if not np.isfinite(outputs).all():
        logits[:] = np.nan
    return MaskOutputs(outputs.argmax(1).astype(np.uint8), logits)


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

    @property
    def passed(self) -> bool:
        return not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {"passed": self.passed, **asdict(self)}


def compare_outputs(
    first: np.ndarray | MaskOutputs,
    second: np.ndarray | MaskOutputs,
    targets: np.ndarray | None = None,
    several: bool = False,
    what: str = "logits",
    statistics: TargetStatistics | None = None,
) -> OutputComparison:
    """Compare two outputs, both [B, K] logits, [B, F] features, masks, or with statistics of targets [B, M] numbers."""
    if isinstance(first, MaskOutputs) and isinstance(second, MaskOutputs):
        return compare_mask_outputs(first, second, targets)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    if first.shape != second.shape:
        raise ValueError(f"{what} differ in shape: {list(first.shape)} and {list(second.shape)}")
    difference = float(np.abs(first - second).max()) if np.isfinite(second).all() else math.inf
    largest = float(np.abs(first).max())
    if what != "logits":
        return OutputComparison(what, difference, largest, least_cosine=least_cosine(first, second))
    if statistics is not None:
        return compare_numbers(first, second, targets, statistics)
    same = ((first >= 0) == (second >= 0)).all(1) if several else first.argmax(1) == second.argmax(1)
    score = None if targets is None else score_pair(first, second, targets)
    interval = wilson_interval(float(same.sum()), len(same))
    shift = (
        mean_confidence(second, several) - mean_confidence(first, several) if math.isfinite(difference) else math.nan
    )
    return OutputComparison(what, difference, largest, float(same.mean()), interval, score, shift)


def compare_numbers(
    first: np.ndarray, second: np.ndarray, targets: np.ndarray | None, statistics: TargetStatistics
) -> OutputComparison:
    """Compare the numbers of two models, [B, M], in standard deviations of the targets."""
    if not np.isfinite(second).all():
        return OutputComparison("numbers", math.inf, float(np.abs(first).max()), relative=math.inf)
    one, two, std = first.astype(np.float64), second.astype(np.float64), np.array(statistics.std)
    difference = np.abs(one - two) / std
    score = None
    if targets is not None and len(targets) > 1 and (targets.std(0) > 0).any():
        before, after = (summarise_regression(values, targets) for values in (one, two))
        ends, paired = (read_interval(before), read_interval(after)), compare_regression(one, two, targets)
        score = PairedScore("R²", before["r2"], after["r2"], *ends, paired.difference, paired.interval)
    return OutputComparison(
        "numbers",
        float(np.abs(one - two).max()),
        float(np.abs(one).max()),
        score=score,
        relative=float(difference.max()),
        mean_relative=float(difference.mean()),
        rounding=float((ROUNDINGS * np.finfo(np.float32).eps * np.abs(one).max(0) / std).max()),
    )


def compare_mask_outputs(
    first: MaskOutputs, second: MaskOutputs, targets: np.ndarray | None = None
) -> OutputComparison:
    """Compare the masks of two models at every pixel, and their logits at the pixels of a grid."""
    if first.masks.shape != second.masks.shape or first.logits.shape != second.logits.shape:
        shapes = " and ".join(str([len(one.masks), *one.masks.shape[1:]]) for one in (first, second))
        raise ValueError(f"masks differ in shape: {shapes}")
    same, largest = float((first.masks == second.masks).mean()), float(np.abs(first.logits).max())
    if not np.isfinite(second.logits).all():
        return OutputComparison("logits", math.inf, largest, same, of_pixels=True)
    difference = float(np.abs(first.logits - second.logits).max())
    shift = mean_confidence(second.logits, False) - mean_confidence(first.logits, False)
    score = None if targets is None else score_masks(first, second, targets)
    return OutputComparison("logits", difference, largest, same, None, score, shift, of_pixels=True)


def score_masks(first: MaskOutputs, second: MaskOutputs, targets: np.ndarray) -> PairedScore:
    """Return the mIoU of both models on masks [B, H, W], and their paired difference."""
    classes = first.logits.shape[1]
    confusions = (
        np.stack([count_confusion(mask, target, classes) for mask, target in zip(one.masks, targets, strict=True)])
        for one in (first, second)
    )
    pixels = [sum_pixels(counts) for counts in confusions]
    one, two = (compute_mask_metrics(counts) for counts in pixels)
    paired = compare_masks(*pixels)
    intervals = read_interval(one), read_interval(two)
    return PairedScore("mIoU", one["miou"], two["miou"], *intervals, paired.difference, paired.interval)


def read_interval(metrics: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the interval of the mIoU or R²; None of a single image, which has none."""
    low, high = metrics.get("miou_interval") or metrics.get("r2_interval") or (None, None)
    return None if low is None or high is None else (low, high)


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


def choose_batch_size(contract: ModelContract) -> int:
    """Return the number of images that are computed at once: fewer if the outputs are large maps."""
    (height, width), classes = contract.preprocessing.size, len(contract.labels or ())
    fitting = MAX_BATCH_BYTES // (4 * max(1, classes) * height * width)
    return BATCH_SIZE if contract.target_kind != "masks" else max(1, min(BATCH_SIZE, fitting))


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

"""95 % intervals of accuracies and differences, and their text in tables, findings and charts.

With three or more seeds the interval is Student's over seeds, on the same test images. With one or two seeds it is Wilson's over
the test images, widened to contain every seed, and a difference is clear only if it exceeds TRAINING_NOISE. If the number of
test images is unknown as well, the bounds are NaN and no difference is clear.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from vitrail.metrics.intervals import wilson_interval
from vitrail.studies.study import Agreement, Chart, Results, Series, Setting

MIN_SEEDS = 3  # for an interval over seeds
TRAINING_NOISE = 0.01  # assumed effect of another seed where fewer were run: one point
NO_VALUE = "–"  # in a table cell without a value
TEST_ACCURACIES = ("test", "five-shot")  # numbers that are accuracies on test images


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int  # seeds


@dataclass(frozen=True)
class Difference:
    """The first minus the second, with its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int = MIN_SEEDS  # the smaller number of the two

    @property
    def is_clear(self) -> bool:
        """Return True if the interval excludes zero and, with few seeds, the mean exceeds the training noise."""
        return (self.low > 0 or self.high < 0) and (self.seeds >= MIN_SEEDS or abs(self.mean) > TRAINING_NOISE)

    @property
    def is_gain(self) -> bool:
        """Return True if the difference is clear and positive."""
        return self.is_clear and self.mean > 0

    @property
    def is_loss(self) -> bool:
        """Return True if the difference is clear and negative."""
        return self.is_clear and self.mean < 0

    @property
    def agreement(self) -> Agreement:
        """Return the verdict on a paper that found a gain."""
        return "agrees" if self.is_gain else "disagrees" if self.is_loss else "no difference"

    @property
    def negated(self) -> "Difference":
        """Return the second minus the first."""
        return Difference(-self.mean, -self.high, -self.low, self.seeds)


def estimate_mean(values: Sequence[float], n_images: int | None = None) -> Estimate:
    """Return the mean over seeds with its interval. `n_images` is the test set's size if the values are accuracies."""
    if not values:
        raise ValueError("an interval needs at least one value")
    mean = fmean(values)
    if len(values) >= MIN_SEEDS:
        low, high = student_interval(values, n_images)
        return Estimate(mean, *((low, high) if n_images is None else (max(0.0, low), min(1.0, high))), len(values))
    if n_images is None:
        return Estimate(mean, math.nan, math.nan, len(values))
    low, high = wilson_interval(mean * n_images, n_images)
    return Estimate(mean, min(low, *values), max(high, *values), len(values))


def estimate_difference(first: Sequence[float], second: Sequence[float], n_images: int | None = None) -> Difference:
    """Return first minus second: paired by seed if both have as many seeds, else with Welch's interval."""
    if not first or not second:
        raise ValueError("a difference needs at least one value of each")
    mean, seeds = fmean(first) - fmean(second), min(len(first), len(second))
    paired = [a - b for a, b in zip(first, second, strict=True)] if len(first) == len(second) else []
    if len(paired) >= MIN_SEEDS:
        return Difference(fmean(paired), *student_interval(paired, n_images))
    if seeds >= MIN_SEEDS:
        half = _welch_half_width(first, second, n_images)
        return Difference(mean, mean - half, mean + half)
    if n_images is None:
        return Difference(mean, math.nan, math.nan, seeds)
    differences = paired or [a - b for a in first for b in second]
    low, high = _newcombe_interval(fmean(first), fmean(second), n_images)
    return Difference(mean, min(low, *differences), max(high, *differences), seeds)


def estimate_reduction(before: Difference, after: Difference) -> Difference:
    """Return before minus after, treating the two differences as independent."""
    mean = before.mean - after.mean
    down = math.hypot(before.mean - before.low, after.high - after.mean)
    up = math.hypot(before.high - before.mean, after.mean - after.low)
    return Difference(mean, mean - down, mean + up, min(before.seeds, after.seeds))


def student_interval(values: Sequence[float], n_images: int | None = None) -> tuple[float, float]:
    """Return Student's 95 % interval of the mean of two or more values."""
    half = _t_quantile(len(values) - 1) * _standard_deviation(values, n_images) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def _standard_deviation(values: Sequence[float], n_images: int | None) -> float:
    # An accuracy is resolved to one image at best, even if all seeds agree.
    return max(stdev(values), 1 / n_images if n_images else 0.0)


def _t_quantile(degrees: float) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def _welch_half_width(first: Sequence[float], second: Sequence[float], n_images: int | None) -> float:
    """Return half the width of Welch's interval of a difference between means."""
    parts = [(_standard_deviation(values, n_images) ** 2 / len(values), len(values)) for values in (first, second)]
    whole = sum(part for part, _ in parts)
    if whole == 0:
        return 0.0
    return _t_quantile(whole**2 / sum(part**2 / (n - 1) for part, n in parts)) * math.sqrt(whole)


def _newcombe_interval(first: float, second: float, n_images: int) -> tuple[float, float]:
    """Return Newcombe's interval of a difference of two independent proportions, built from Wilson's."""
    (low, high), (under, over) = (wilson_interval(mean * n_images, n_images) for mean in (first, second))
    apart = first - second
    return apart - math.hypot(first - low, over - second), apart + math.hypot(high - first, second - under)


def is_beyond_chance(n_clear: int, n_comparisons: int, false_positive_rate: float = 0.05) -> bool:
    """Return True if `n_clear` clear results among `n_comparisons` have a binomial p-value of 0.05 or less."""
    from scipy.stats import binom

    return n_clear > 0 and float(binom.sf(n_clear - 1, n_comparisons, false_positive_rate)) <= 0.05


def group_values(
    results: Results, *names: str, phase: str = "final", number: str = "test"
) -> dict[tuple[Setting, ...], list[float]]:
    """Return the values of a number grouped by the named settings, in order of appearance; sorted by seed in each group."""
    groups: dict[tuple[Setting, ...], list[tuple[int, float]]] = {}
    for result in results:
        if result.phase == phase and result.numbers.get(number) is not None:
            seed = result.at.get("seed")
            pair = (seed if isinstance(seed, int) else 0, float(result.numbers[number]))
            groups.setdefault(tuple(result.at.get(name) for name in names), []).append(pair)
    return {point: [value for _, value in sorted(pairs)] for point, pairs in groups.items()}


class Scores(dict[Any, list[float]]):
    """One number of the runs of a study: the values of all seeds, in order, by grid point.

    A key is the value of the named setting, or the tuple of values of several. With `order`, only the points in it are kept, in
    that order. Accuracies on test images have intervals over these images (`n_images`), other numbers over seeds only.
    """

    def __init__(
        self, results: Results, *names: str, number: str = "test", phase: str = "final", order: Iterable | None = None
    ) -> None:
        groups = {_single(point): v for point, v in group_values(results, *names, phase=phase, number=number).items()}
        kept = groups if order is None else [point for point in order if point in groups]
        super().__init__((point, groups[point]) for point in kept)
        self.n_images = count_test_images(results) if number in TEST_ACCURACIES else None
        finals = [result.at for result in reversed(results) if result.phase == "final" and "rate" in result.at]
        self._lrs = {_single([at.get(name) for name in names]): at["rate"] for at in finals}  # the first of each point

    def find_missing(self, required: Iterable[Any]) -> list[Any]:
        """Return the required grid points without a value."""
        return [point for point in required if point not in self]

    def estimate(self, point: Any) -> Estimate:
        """Return the mean at a grid point with its interval."""
        return estimate_mean(self[point], self.n_images)

    def subtract(self, first: Any, second: Any) -> Difference:
        """Return the values at the first grid point minus those at the second."""
        return estimate_difference(self[first], self[second], self.n_images)

    def compare(self, reference: Any) -> dict[Any, Difference]:
        """Return every other grid point minus the reference."""
        return {point: self.subtract(point, reference) for point in self if point != reference}

    def format(self, point: Any) -> str:
        """Return the mean accuracy at a grid point with its interval; a dash if there is none."""
        return format_accuracy(self.get(point), self.n_images)

    def format_change(self, point: Any, reference: Any) -> str:
        """Return the difference from a reference in points; a dash if either has no value, and for the reference itself."""
        is_known = point != reference and point in self and reference in self
        return format_points(self.subtract(point, reference)) if is_known else NO_VALUE

    def format_lr(self, point: Any) -> str:
        """Return the learning rate of the final runs at a grid point."""
        return f"{self._lrs[point]:g}" if point in self._lrs else NO_VALUE

    def format_row(self, point: Any, reference: Any) -> tuple[str, str, str]:
        """Return the table cells of a grid point: learning rate, accuracy, difference from a reference."""
        return self.format_lr(point), self.format(point), self.format_change(point, reference)

    def series(self, label: str, points: Mapping[Any, float | str] | None = None) -> Series:
        """Return means and intervals of all grid points, or of those in `points`, which gives their x."""
        x = {point: point for point in self} if points is None else points
        return build_series(label, {x[point]: self[point] for point in x}, self.n_images)

    def lines(self, title: str, lines: Mapping[str, Mapping[Any, float]], x_name: str, y_name: str = "top-1") -> Chart:
        """Return a chart with a line for every label that has grid points, given with their x on a logarithmic axis."""
        series = tuple(self.series(label, points) for label, points in lines.items() if points)
        return Chart(title, "lines", series, x_name, y_name, x_log=True)

    def dots(self, title: str, label: str = "test", y_name: str = "top-1") -> Chart:
        """Return a chart with a dot for every grid point."""
        return Chart(title, "dots", (self.series(label),), y_name=y_name)


def _single(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def format_percent(estimate: Estimate, digits: int = 1) -> str:
    """Return text such as 71.3 % (70.1–72.5); without an interval if it is unknown."""
    mean = f"{100 * estimate.mean:.{digits}f} %"
    if math.isnan(estimate.low):
        return mean
    return f"{mean} ({100 * estimate.low:.{digits}f}–{100 * estimate.high:.{digits}f})"


def format_points(difference: Difference, digits: int = 1) -> str:
    """Return text such as +2.1 points (+1.2 to +3.0)."""
    return _format_bounds(difference, "+", 100, digits, " points")


def count_test_images(results: Results) -> int | None:
    """Return the number of test images; None if no result has it."""
    return min((r.numbers["pictures"] for r in results if r.phase == "final" and "pictures" in r.numbers), default=None)


def build_series(label: str, values: Mapping[float | str, Sequence[float]], n_images: int | None) -> Series:
    """Return the mean and interval over seeds at every x. `n_images` is None for values that are not accuracies."""
    estimates = [estimate_mean(seeds, n_images) for seeds in values.values()]
    mean, low, high = (tuple(getattr(e, name) for e in estimates) for name in ("mean", "low", "high"))
    return Series(label, tuple(values), mean, low, high)


def format_accuracy(values: Sequence[float] | None, n_images: int | None = None) -> str:
    """Return a mean accuracy with its interval; a dash for no values."""
    return format_percent(estimate_mean(values, n_images)) if values else NO_VALUE


def format_estimate(estimate: Estimate) -> str:
    """Return text such as 0.62 (0.55 to 0.69); without an interval if it is unknown."""
    return _format_bounds(estimate, "")


def format_signed(difference: Difference) -> str:
    """Return text such as +0.10 (+0.05 to +0.15)."""
    return _format_bounds(difference, "+")


def _format_bounds(estimate: Estimate | Difference, sign: str, factor: int = 1, digits: int = 2, unit: str = "") -> str:
    values = (estimate.mean, estimate.low, estimate.high)
    # Adding 0.0 turns -0.0 into 0.0.
    mean, low, high = (f"{round(factor * v, digits) + 0.0:{sign}.{digits}f}".replace("-", "−") for v in values)
    return f"{mean}{unit}" if math.isnan(estimate.low) else f"{mean}{unit} ({low} to {high})"

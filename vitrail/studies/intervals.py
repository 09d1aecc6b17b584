"""How sure a study's numbers are: 95 % intervals over seeds, or of so many test pictures where there are few seeds.

Student's interval tells what another seed would have given, on the same pictures. One or two seeds tell nothing of that: then
the interval is Wilson's for the test pictures, widened to hold what each seed gave, and a difference is clear only if it is
larger than what chance of training may make. Where neither is known, it is not a number, and no difference is clear.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from vitrail.evaluate.intervals import wilson
from vitrail.studies.study import Result, Setting

FEW = 3  # seeds from which on their spread tells something
NOISE = 0.01  # what another seed may change, as far as anybody knows who has fewer: one point


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
    seeds: int = FEW  # of the one that has fewer

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out; with few seeds, which it knows nothing of, by more than chance of training."""
        return (self.low > 0 or self.high < 0) and (self.seeds >= FEW or abs(self.mean) > NOISE)

    @property
    def opposite(self) -> "Difference":
        """The second minus the first."""
        return Difference(-self.mean, -self.high, -self.low, self.seeds)


def estimate(values: Sequence[float], pictures: int | None = None) -> Estimate:
    """The mean of what the seeds gave. `pictures` is how many the values are shares of; without it they may be anything."""
    if not values:
        raise ValueError("an interval needs at least one value")
    mean = fmean(values)
    if len(values) >= FEW:
        low, high = student(values, pictures)
        return Estimate(mean, *((low, high) if pictures is None else (max(0.0, low), min(1.0, high))), len(values))
    if pictures is None:
        return Estimate(mean, math.nan, math.nan, len(values))
    low, high = wilson(mean * pictures, pictures)
    return Estimate(mean, min(low, *values), max(high, *values), len(values))


def difference(first: Sequence[float], second: Sequence[float], pictures: int | None = None) -> Difference:
    """First minus second: seed by seed where both have as many of them, else by Welch's interval."""
    if not first or not second:
        raise ValueError("a difference needs at least one value of each")
    mean, seeds = fmean(first) - fmean(second), min(len(first), len(second))
    paired = [a - b for a, b in zip(first, second, strict=True)] if len(first) == len(second) else []
    if len(paired) >= FEW:
        return Difference(fmean(paired), *student(paired, pictures))
    if seeds >= FEW:
        half = _welch(first, second, pictures)
        return Difference(mean, mean - half, mean + half)
    if pictures is None:
        return Difference(mean, math.nan, math.nan, seeds)
    seen = paired or [a - b for a in first for b in second]
    low, high = _newcombe(fmean(first), fmean(second), pictures)
    return Difference(mean, min(low, *seen), max(high, *seen), seeds)


def shrunk(before: Difference, after: Difference) -> Difference:
    """How much smaller a difference became, as if both were independent."""
    mean = before.mean - after.mean
    down = math.hypot(before.mean - before.low, after.high - after.mean)
    up = math.hypot(before.high - before.mean, after.mean - after.low)
    return Difference(mean, mean - down, mean + up, min(before.seeds, after.seeds))


def student(values: Sequence[float], pictures: int | None = None) -> tuple[float, float]:
    """Student's 95 % interval of the mean of two values or more."""
    half = _quantile(len(values) - 1) * _spread(values, pictures) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def _spread(values: Sequence[float], pictures: int | None) -> float:
    # No share is known better than to one picture: seeds that agree by chance on few pictures do not make it certain.
    return max(stdev(values), 1 / pictures if pictures else 0.0)


def _quantile(degrees: float) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def _welch(first: Sequence[float], second: Sequence[float], pictures: int | None) -> float:
    """Half of the interval of a difference between means of unequal numbers of seeds."""
    parts = [(_spread(values, pictures) ** 2 / len(values), len(values)) for values in (first, second)]
    whole = sum(part for part, _ in parts)
    if whole == 0:
        return 0.0
    return _quantile(whole**2 / sum(part**2 / (n - 1) for part, n in parts)) * math.sqrt(whole)


def _newcombe(first: float, second: float, pictures: int) -> tuple[float, float]:
    """Newcombe's interval of a difference of two shares, made of Wilson's of each. It takes the two for independent."""
    (low, high), (under, over) = wilson(first * pictures, pictures), wilson(second * pictures, pictures)
    apart = first - second
    return apart - math.hypot(first - low, over - second), apart + math.hypot(high - first, second - under)


def beyond_chance(clear: int, of: int, each: float = 0.05) -> bool:
    """Whether so many of several comparisons are clear that chance, which makes each one so with that share, seldom does it."""
    from scipy.stats import binom

    return clear > 0 and float(binom.sf(clear - 1, of, each)) <= 0.05


def grouped(
    results: Sequence[Result], *names: str, phase: str = "final", number: str = "test"
) -> dict[tuple[Setting, ...], list[float]]:
    """The values of a number by the settings that are named, in order of first appearance; within a group, by seed."""
    groups: dict[tuple[Setting, ...], list[tuple[int, float]]] = {}
    for result in results:
        if result.phase == phase and result.numbers.get(number) is not None:
            seed = result.at.get("seed")
            pair = (seed if isinstance(seed, int) else 0, float(result.numbers[number]))
            groups.setdefault(tuple(result.at.get(name) for name in names), []).append(pair)
    return {place: [value for _, value in sorted(pairs)] for place, pairs in groups.items()}


def percent(found: Estimate, digits: int = 1) -> str:
    """71.3 % (70.1–72.5); without an interval where none is known."""
    mean = f"{100 * found.mean:.{digits}f} %"
    if math.isnan(found.low):
        return mean
    return f"{mean} ({100 * found.low:.{digits}f}–{100 * found.high:.{digits}f})"


def points(found: Difference, digits: int = 1) -> str:
    """+2.1 points (+1.2 to +3.0), of a difference between shares."""
    values = (found.mean, found.low, found.high)
    # What rounds to nothing has no sign of its own.
    mean, low, high = (f"{round(100 * value, digits) + 0.0:+.{digits}f}".replace("-", "−") for value in values)
    return f"{mean} points" if math.isnan(found.low) else f"{mean} points ({low} to {high})"

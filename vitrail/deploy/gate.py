"""The gate: an exported file beside the model it was made from, on the same pictures. What differs too much does not pass.

B pictures, K classes, F features.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vitrail.deploy.runtime import Runtime
from vitrail.deploy.timing import interleaved, medians
from vitrail.evaluate.intervals import wilson
from vitrail.evaluate.paired import compare_map, compare_right
from vitrail.evaluate.several import Ranking, mean_average_precision

BATCH = 16  # of throughput; latency is of one picture
LOGITS = 1e-3  # how far logits may be apart in float
POINTS, POINTS_UNLABELLED = 1.0, 5.0  # of accuracy that may be lost by rounding; of answers that may change
SLOWER = 1.05  # what is less is no gain
Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Shown:
    """Pictures as a model takes them, and what they show, where that is known."""

    pixels: np.ndarray  # uint8 [B, C, H, W]
    source: str  # where they come from, in words
    targets: np.ndarray | None = None  # [B] in the model's outputs, or [B, K] of 0 and 1


@dataclass(frozen=True)
class Score:
    """Accuracy (or mAP, where pictures have several labels) of both, with 95 % intervals."""

    measure: str
    first: float
    second: float
    first_interval: tuple[float, float] | None
    second_interval: tuple[float, float] | None
    difference: float  # second minus first
    difference_interval: tuple[float, float]


@dataclass(frozen=True)
class Compared:
    """Two models' answers to the same pictures."""

    what: str  # logits, or features
    largest_difference: float
    largest: float  # value of the first model, to hold the difference against
    agreement: float | None = None  # share of pictures with the same answer; None without classes
    agreement_interval: tuple[float, float] | None = None
    score: Score | None = None


@dataclass(frozen=True)
class AtSize:
    """Both on a few generated pictures of another size than the model's own."""

    size: tuple[int, int]
    compared: Compared


@dataclass(frozen=True)
class Limits:
    """What may differ: logits, or points of accuracy where weights are rounded on purpose."""

    logits: float | None
    points: float | None
    points_unlabelled: float | None

    def refusals(self, found: Compared) -> list[str]:
        """Why this does not pass; nothing if it does."""
        if not math.isfinite(found.largest_difference):
            return ["it gives numbers that are not finite"]
        if self.logits is not None:
            most = self.logits * (1.0 if found.what == "logits" else max(1.0, found.largest))
            said = []
            if found.largest_difference > most:
                said.append(f"{found.what} differ by {found.largest_difference:.3g}, more than {most:.3g}")
            if found.agreement is not None and found.agreement < 1:
                said.append(f"{1 - found.agreement:.2%} of the answers changed")
            return said
        if found.score is not None and self.points is not None:
            lost = -100 * found.score.difference
            few = f"{found.score.measure} falls by {lost:.2f} points, more than {self.points:g}"
            return [few] if lost > self.points + 1e-9 else []
        if found.agreement is not None and self.points_unlabelled is not None:
            changed = 100 * (1 - found.agreement)
            few = f"{changed:.2f} % of the answers changed, more than {self.points_unlabelled:g} %"
            return [few] if changed > self.points_unlabelled + 1e-9 else []
        apart = found.largest_difference / max(1e-9, found.largest)
        return [] if apart <= 0.1 else [f"features differ by {apart:.1%} of the largest, more than 10 %"]


def limits(precision: str, tolerance: float | None = None) -> Limits:
    """Logits within 1e-3 and the same answers in float; a point of accuracy for what is rounded, unless told otherwise."""
    if tolerance is not None and not (0 <= tolerance < math.inf):
        raise ValueError(f"--tolerance {tolerance}: 0 or more")
    if precision == "fp32":
        return Limits(LOGITS if tolerance is None else tolerance, None, None)
    points = (POINTS, POINTS_UNLABELLED) if tolerance is None else (tolerance, tolerance)
    return Limits(None, *points)


@dataclass(frozen=True)
class Speed:
    """Measured in turns with the others of the same proof."""

    latency: float  # seconds for one picture
    throughput: float  # pictures a second, sixteen at once


@dataclass(frozen=True)
class Proof:
    """What was found when the file stood beside the model."""

    file: str
    runtime: str
    precision: str
    pictures: int
    source: str
    compared: Compared
    features: Compared | None  # beside logits
    bytes: int
    bytes_before: int
    speeds: Mapping[str, Speed]  # the model, the file, and the file in float where it is not
    refusals: tuple[str, ...] = ()
    unmerged: Compared | None = None  # against the model whose tokens are not merged
    at_sizes: tuple[AtSize, ...] = ()  # of a file for pictures of any size
    kept: tuple[str, ...] = ()  # layers that stay in float, of an int8 model
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"passed": self.passed, **asdict(self)}


def answers(runtime: Runtime, pixels: np.ndarray, told: Told | None = None, doing: str = "") -> np.ndarray:
    """Of all pictures, a batch at a time."""
    parts = []
    for start in range(0, len(pixels), BATCH):
        parts.append(runtime(pixels[start : start + BATCH]))
        if told:
            told(doing, min(len(pixels), start + BATCH), len(pixels))
    return np.concatenate(parts)


def compare(
    first: np.ndarray,
    second: np.ndarray,
    targets: np.ndarray | None = None,
    several: bool = False,
    what: str = "logits",
) -> Compared:
    """How far the second answers, [B, K] or [B, F], are from the first."""
    if first.shape != second.shape:
        raise ValueError(f"{what} of the shapes {list(first.shape)} and {list(second.shape)} cannot be compared")
    apart = float(np.abs(first - second).max()) if np.isfinite(second).all() else math.inf
    largest = float(np.abs(first).max())
    if what != "logits":
        return Compared(what, apart, largest)
    same = ((first >= 0) == (second >= 0)).all(1) if several else first.argmax(1) == second.argmax(1)
    score = None
    if targets is not None:
        score = scored(first, second, targets)
    return Compared(what, apart, largest, float(same.mean()), wilson(float(same.sum()), len(same)), score)


def scored(first: np.ndarray, second: np.ndarray, targets: np.ndarray) -> Score:
    """Both held against what the pictures show."""
    if targets.ndim == 2:
        paired, there = compare_map(first, second, targets), np.flatnonzero(targets.any(0))
        one, two = (
            float(mean_average_precision([Ranking(logits[:, k], targets[:, k]) for k in there])[0])
            for logits in (first, second)
        )
        return Score("mAP", one, two, None, None, paired.difference, paired.interval)
    right = [logits.argmax(1) == targets for logits in (first, second)]
    paired, count = compare_right(right[0], right[1]), len(targets)
    one, two = (float(each.sum()) for each in right)
    return Score(
        "accuracy",
        one / count,
        two / count,
        wilson(one, count),
        wilson(two, count),
        paired.difference,
        paired.interval,
    )


def measured(runtimes: Mapping[str, Runtime], pixels: np.ndarray, seconds: float = 10.0) -> dict[str, Speed]:
    """Latency and throughput of each, in turns."""
    many = np.concatenate([pixels] * -(-BATCH // len(pixels)))[:BATCH]
    one = many[:1]
    single, whole = (
        medians(
            interleaved(
                {name: lambda run=run, these=these: run(these) for name, run in runtimes.items()},
                rounds,
                seconds / 2,
            )
        )
        for these, rounds in ((one, 31), (many, 11))
    )
    return {name: Speed(single[name], BATCH / whole[name]) for name in runtimes}


def not_faster(speeds: Mapping[str, Speed], file: str, plain: str, precision: str) -> str | None:
    """A sentence where a smaller precision gains nothing on this machine."""
    gain = speeds[file].throughput / speeds[plain].throughput
    if gain >= SLOWER:
        return None
    return f"{precision} is not faster here: {gain:.2f}× the pictures a second of the same file in float"

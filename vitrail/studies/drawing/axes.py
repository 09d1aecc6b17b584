"""The axes of a chart: where a value lies, and what is written beside it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitrail.report.markup import Markup
from vitrail.report.scale import Scale, scale
from vitrail.studies.drawing.canvas import SMALL, Palette, amount, power, rule, share, text, width_of, wrapped

Place = float | str
MOST = 9  # values along x that are written themselves


@dataclass(frozen=True)
class Across:
    """The horizontal axis. Names stand in their order; numbers where they are, or where their logarithm is."""

    named: tuple[str, ...]
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]
    left: float  # pixels
    right: float

    def place(self, value: Place) -> float:
        if self.named:
            at = (self.named.index(str(value)) + 0.5) / len(self.named)
        else:
            at = (self._scaled(float(value)) - self.low) / (self.high - self.low)
        return self.left + at * (self.right - self.left)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def drawn(self, bottom: float, palette: Palette) -> tuple[list[Markup], float]:
        """Its line and what is written below it, and how far down that reaches."""
        parts, deepest = [rule(self.left, bottom, self.right, bottom, palette.quiet)], bottom + 18
        if self.named:
            room = (self.right - self.left) / len(self.named) - 6
            for label in self.named:
                lines = wrapped(label, room, SMALL, 3)
                for k, line in enumerate(lines):
                    parts.append(text(self.place(label), bottom + 18 + 15 * k, line, palette.quiet, SMALL, "middle"))
                deepest = max(deepest, bottom + 18 + 15 * (len(lines) - 1))
            return parts, deepest
        end, large = -math.inf, max(self.ticks, default=0) >= 1e9
        for tick in self.ticks:
            x, said = self.place(tick), power(tick) if large and tick else amount(tick)
            half = width_of(said, SMALL) / 2
            parts.append(rule(x, bottom, x, bottom + 4, palette.quiet))
            if x - half > end + 6:
                parts.append(text(x, bottom + 18, said, palette.quiet, SMALL, "middle"))
                end = x + half
        return parts, deepest


def across(values: Sequence[Place], log: bool, left: float, right: float, room: float = 0.04) -> Across:
    """The axis that holds these values; `room` is the part of it that is left free at each end."""
    if any(isinstance(value, str) for value in values):
        return Across(tuple(dict.fromkeys(map(str, values))), 0, 1, False, (), left, right)
    numbers = sorted({float(value) for value in values if math.isfinite(float(value))}) or [0.0, 1.0]
    log = log and numbers[0] > 0
    low, high = (math.log10(numbers[0]), math.log10(numbers[-1])) if log else (numbers[0], numbers[-1])
    free = (high - low) * room or 0.5
    ticks = (
        numbers if len(numbers) <= MOST else _powers(low, high) if log else scale(numbers, parts=6, tight=True).ticks
    )
    return Across((), low - free, high + free, log, tuple(ticks), left, right)


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms; with twos and fives where they are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    fronts = (1,) if high - low > 3 else (1, 3) if high - low > 1.5 else (1, 2, 5)
    found = [front * 10.0**power for power in powers for front in fronts]
    return [value for value in found if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def written(axis: Scale, percent: bool) -> Callable[[float], str]:
    """How the ticks of an axis of values are written."""
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else 1.0
    if percent:
        return lambda tick: share(tick, step)
    digits = next((d for d in range(4) if abs(step * 10**d - round(step * 10**d)) < 1e-6), None)
    return amount if digits is None or step >= 1000 else lambda tick: f"{tick:.{digits}f}"

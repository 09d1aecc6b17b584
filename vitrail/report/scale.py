"""From values to places in a drawing, and round numbers to write beside them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A range of values, and the round ones among them."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one; never outside."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def step_of(width: float, parts: int) -> float:
    """1, 2, 2.5 or 5 times a power of ten, so that about so many fit."""
    rough = width / parts
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def scale(values: Iterable[float], *, parts: int = 4, whole: bool = False, tight: bool = False) -> Scale:
    """A scale that holds all values. `whole` puts ticks on whole numbers; `tight` ends where the values end."""
    found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(found), max(found)
    if not tight and 0 < low < 0.4 * high:
        low = 0.0
    if high - low < 1e-12 * max(1.0, abs(high)):
        room = 0.5 if whole or tight else max(abs(high) * 0.1, 1e-9)
        low, high = (max(0.0, low - room) if low >= 0 else low - room), high + room
    step = step_of(high - low, parts)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    ticks = tuple(k * step for k in range(first, last + 1))
    return Scale(low, high, ticks) if tight else Scale(ticks[0], ticks[-1], ticks)

"""The learning rate as a pure function of the step, between 0 and 1 of its highest value."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Warmup:
    """What all schedules share: the rate rises linearly over the first steps."""

    warmup: int = 0  # steps

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"a warm-up of {self.warmup} steps: give 0 or more")

    def factor(self, step: int, total: int) -> float:
        """The part of the full rate that step `step` (from 0) of `total` is done with."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.after(step, total)

    def after(self, step: int, total: int) -> float:
        """The same once the warm-up is over."""
        raise AssertionError("a schedule says how the rate goes on")

    def passed(self, step: int, total: int) -> float:
        """How much of what follows the warm-up has passed, 0 to 1."""
        return min(1.0, (step - self.warmup) / max(1, total - self.warmup))


@dataclass(frozen=True)
class Cosine(Warmup):
    """Half a cosine, down to `end` of the full rate."""

    end: float = 0.0

    def after(self, step: int, total: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * self.passed(step, total))) / 2


@dataclass(frozen=True)
class Linear(Warmup):
    """A straight line down to `end` of the full rate."""

    end: float = 0.0

    def after(self, step: int, total: int) -> float:
        return 1 - (1 - self.end) * self.passed(step, total)


@dataclass(frozen=True)
class Constant(Warmup):
    """The full rate throughout, and a straight line to zero over the last `cooldown` steps."""

    cooldown: int = 0

    def after(self, step: int, total: int) -> float:
        return min(1.0, (total - step) / self.cooldown) if self.cooldown else 1.0


ScheduleSlot = Cosine | Linear | Constant

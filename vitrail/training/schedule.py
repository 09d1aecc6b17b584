"""Learning rate schedules: a factor from 0 to 1 as a pure function of the step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Warmup:
    """Base of the schedules: a linear rise over the first steps."""

    warmup: int = 0  # steps

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup must be >= 0 steps, got {self.warmup}")

    def factor(self, step: int, total: int) -> float:
        """Return the factor of step `step` (from 0) of `total`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.factor_after_warmup(step, total)

    def factor_after_warmup(self, step: int, total: int) -> float:
        """Return the factor of a step after the warm-up."""
        raise NotImplementedError

    def progress_after_warmup(self, step: int, total: int) -> float:
        """Return the fraction of the steps after the warm-up that has passed."""
        return min(1.0, (step - self.warmup) / max(1, total - self.warmup))


@dataclass(frozen=True)
class Cosine(Warmup):
    """Half a cosine, down to `end`."""

    end: float = 0.0

    def factor_after_warmup(self, step: int, total: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * self.progress_after_warmup(step, total))) / 2


@dataclass(frozen=True)
class Linear(Warmup):
    """A straight line down to `end`."""

    end: float = 0.0

    def factor_after_warmup(self, step: int, total: int) -> float:
        return 1 - (1 - self.end) * self.progress_after_warmup(step, total)


@dataclass(frozen=True)
class Constant(Warmup):
    """Constant, with a straight line to zero over the last `cooldown` steps."""

    cooldown: int = 0

    def factor_after_warmup(self, step: int, total: int) -> float:
        return min(1.0, (total - step) / self.cooldown) if self.cooldown else 1.0


ScheduleSlot = Cosine | Linear | Constant

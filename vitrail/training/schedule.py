"""Functions of the step: learning rate schedules, a factor from 0 to 1, and the exponential moving average of the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.utils.averages import move_averages
from vitrail.utils.json import check_fields


@dataclass(frozen=True)
class Warmup:
    """Base of the schedules: a linear rise over the first steps."""

    warmup: int = 0  # steps

    def __post_init__(self) -> None:
        check_fields(self, ">= 0", "warmup")

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


@dataclass(frozen=True)
class EMA:
    """Decay of the EMA (Polyak averaging); with `warmup` it is smaller in the first steps."""

    decay: float = 0.9999
    warmup: bool = True

    def __post_init__(self) -> None:
        check_fields(self, ">= 0 and < 1", "decay")

    def decay_at(self, step: int) -> float:
        """Return the decay at step `step`, from 0."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class WeightAverage:
    """The averaged weights, with the layout and sharding of the weights."""

    def __init__(self, spec: EMA, loss_module: nn.Module) -> None:
        self.spec = spec
        # Running statistics belong to their weights, so they are averaged too.
        buffers = {name: b for name, b in loss_module.named_buffers() if b.is_floating_point() and b.numel()}
        self.live = {name: p for name, p in loss_module.named_parameters() if p.requires_grad} | buffers
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.live.items()}

    def update(self, step: int) -> None:
        """Move the averages towards the weights."""
        move_averages(list(self.tensors.values()), list(self.live.values()), 1 - self.spec.decay_at(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averaged weights into the model, and restore the trained ones afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.live.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.tensors[name])
            self.tensors[name].copy_(kept)

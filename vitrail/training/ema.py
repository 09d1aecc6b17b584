"""Exponential moving average (EMA) of the weights (Polyak averaging)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.utils.json import check_fields


@dataclass(frozen=True)
class EMA:
    """Decay of the EMA; with `warmup` it is smaller in the first steps."""

    decay: float = 0.9999
    warmup: bool = True

    def __post_init__(self) -> None:
        check_fields(self, ">= 0 and < 1", "decay")

    def decay_at(self, step: int) -> float:
        """Return the decay at step `step`, from 0."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class WeightAverage:
    """The averaged weights, with the layout and sharding of the weights."""

    def __init__(self, spec: EMA, task: nn.Module) -> None:
        self.spec = spec
        # Running statistics belong to their weights, so they are averaged too.
        buffers = {name: b for name, b in task.named_buffers() if b.is_floating_point() and b.numel()}
        self.live = {name: p for name, p in task.named_parameters() if p.requires_grad} | buffers
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        for name, parameter in self.live.items():
            self.tensors[name].lerp_(parameter.detach(), 1 - self.spec.decay_at(step))

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

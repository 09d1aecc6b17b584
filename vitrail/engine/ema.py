"""The exponential moving average of a model's weights, which is often better than the weights (Polyak averaging)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class EMA:
    """How much of the average a step keeps; less in the first steps, when the weights still change a lot."""

    decay: float = 0.9999
    warmup: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"an average that keeps {self.decay} of itself: it is at least 0 and below 1")

    def at(self, step: int) -> float:
        """What is kept at step `step`, from 0."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class Average:
    """The averaged weights, laid out (and, over many processes, sharded) as the weights themselves."""

    def __init__(self, spec: EMA, task: nn.Module) -> None:
        self.spec = spec
        # Running statistics belong to the weights they were taken with, so they are averaged too.
        buffers = {name: b for name, b in task.named_buffers() if b.is_floating_point() and b.numel()}
        self.live = {name: p for name, p in task.named_parameters() if p.requires_grad} | buffers
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        for name, parameter in self.live.items():
            self.tensors[name].lerp_(parameter.detach(), 1 - self.spec.at(step))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averaged weights stand in the model; the trained ones come back afterwards."""
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

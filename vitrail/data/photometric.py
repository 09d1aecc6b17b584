"""Changes that happen to some pictures and leave every pixel in its place: blurred, grey, solarised."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.data import operations
from vitrail.data.chance import Chance, Chances
from vitrail.data.crops import check_range, check_rate


@dataclass(frozen=True)
class Blur:
    """A Gaussian blur, with a deviation drawn evenly from `radius`, in pixels. Below 0.3 of one there is nothing to see."""

    rate: float = 0.5
    radius: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        check_rate("blur", self.rate)
        check_range("blur radius", self.radius, 0, 1000)

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return self.batch(pixels[None], Chances.single(chance))[0]

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        draws, (low, high) = chances.uniforms(2), self.radius
        chosen = draws[:, 0] < self.rate
        deviations = torch.from_numpy(low + (high - low) * draws[chosen, 1])
        return changed(pixels, chosen, lambda some: operations.smooth(some, deviations))


@dataclass(frozen=True)
class Grey:
    """The colours are taken away; there are as many channels as before."""

    rate: float = 0.2

    def __post_init__(self) -> None:
        check_rate("grey", self.rate)

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return operations.grey(pixels) if chance.at(0) < self.rate else pixels

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        return changed(pixels, chances.uniforms(1)[:, 0] < self.rate, operations.grey)


@dataclass(frozen=True)
class Solarise:
    """What is at least as bright as the threshold is inverted."""

    rate: float = 0.2
    threshold: int = 128

    def __post_init__(self) -> None:
        check_rate("solarise", self.rate)
        if not 0 <= self.threshold <= 256:
            raise ValueError(f"solarise from {self.threshold} on: use 0 to 256")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return operations.solarise(pixels, self.threshold) if chance.at(0) < self.rate else pixels

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        chosen = chances.uniforms(1)[:, 0] < self.rate
        return changed(pixels, chosen, lambda some: operations.solarise(some, self.threshold))


def changed(pixels: Tensor, chosen: np.ndarray, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The chosen pictures of a batch changed, the others as they are."""
    if not chosen.any():
        return pixels
    places, out = torch.from_numpy(np.flatnonzero(chosen)), pixels.clone()
    out[places] = change(pixels[places])
    return out

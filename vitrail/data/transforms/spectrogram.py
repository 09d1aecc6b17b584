"""Augmentation of log-mel spectrograms, float32 [1, mel bins, frames]."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.rng import SampleRandom
from vitrail.data.transforms.crops import check_limits


@dataclass(frozen=True)
class SpecAugment:
    """Random stripes of time and of frequency, replaced by the mean of the spectrogram (Park et al. 2019).

    Each of the `time_masks` covers up to a fraction `time` of the frames, each of the `frequency_masks` up to a fraction
    `frequency` of the mel bins.
    """

    time: float = 0.2
    frequency: float = 0.2
    time_masks: int = 1
    frequency_masks: int = 1

    def __post_init__(self) -> None:
        check_limits("SpecAugment", self, time=1, frequency=1, time_masks=64, frequency_masks=64)

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        mean, masked = pixels.mean(), pixels.clone()
        for mask in range(self.time_masks + self.frequency_masks):
            is_time = mask < self.time_masks
            length = pixels.shape[2 if is_time else 1]
            width = int(rng.uniform_at(2 * mask) * ((self.time if is_time else self.frequency) * length + 1))
            start = int(rng.uniform_at(2 * mask + 1) * (length - width + 1))
            masked[(..., slice(start, start + width)) if is_time else (0, slice(start, start + width))] = mean
        return masked


@dataclass(frozen=True)
class SpectrogramWarp:
    """Random change of speed, pitch and loudness, as between speakers.

    The spectrogram is stretched in time by up to a factor of 1 + `speed`, or shrunk by as much, shifted by up to `pitch` mel
    bins, and made louder or quieter by up to `gain` decibels. Outside of it the nearest value is repeated.
    """

    speed: float = 0.2
    pitch: float = 4.0  # mel bins
    gain: float = 6.0  # dB

    def __post_init__(self) -> None:
        check_limits("SpectrogramWarp", self, speed=4, pitch=256, gain=60)

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        factor = math.exp((2 * rng.uniform_at(0) - 1) * math.log1p(self.speed))
        shift = (2 * rng.uniform_at(1) - 1) * self.pitch
        gain = (2 * rng.uniform_at(2) - 1) * self.gain * math.log(10) / 10  # of the natural logarithm of the energy
        matrix = torch.tensor([[[factor, 0.0, 0.0], [0.0, 1.0, 2 * shift / pixels.shape[1]]]])
        grid = F.affine_grid(matrix, [1, *pixels.shape], align_corners=False)
        return F.grid_sample(pixels[None], grid, padding_mode="border", align_corners=False)[0] + gain


SpectrogramSlot = SpecAugment | SpectrogramWarp

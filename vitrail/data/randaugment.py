"""RandAugment: a few changes out of fifteen, all of one magnitude."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.data import operations
from vitrail.data.affine import Matrix, affine, rotation, unmoved
from vitrail.data.chance import Chance, Chances
from vitrail.data.crops import check_rate
from vitrail.data.preprocessing import Pair

CHANGES = (
    *("autocontrast", "equalise", "invert", "rotate", "posterise", "solarise", "solarise-add", "colour", "contrast"),
    *("brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y"),
)


@dataclass(frozen=True)
class RandAugment:
    """`layers` random changes out of fifteen, all of one magnitude (Cubuk et al. 2020), by timm's scales.

    A magnitude of 10 is as far as the paper's ranges go; more goes on beyond. Each layer happens at `rate`: 0.5 is timm's,
    1 the paper's and big_vision's. With `spread`, the magnitude is drawn around its value by that deviation. `increasing`
    lets every change grow with the magnitude; without it, posterise and solarise grow weaker, and colour, contrast,
    brightness and sharpness go from weaker over unchanged to stronger, as in the first implementations.
    """

    layers: int = 2
    magnitude: float = 9.0
    spread: float = 0.0
    rate: float = 0.5
    increasing: bool = False
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bicubic"
    fill: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.layers <= 20:
            raise ValueError(f"RandAugment with {self.layers} layers: use 0 to 20")
        if not 0 <= self.magnitude <= 30:
            raise ValueError(f"RandAugment of magnitude {self.magnitude}: use a number from 0 to 30; 10 is much")
        if not 0 <= self.spread <= 30:
            raise ValueError(f"RandAugment of spread {self.spread}: use a number from 0 to 30")
        check_rate("RandAugment", self.rate)
        if self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise ValueError(f"unknown interpolation {self.interpolation!r}: use nearest, bilinear or bicubic")
        if not 0 <= self.fill <= 255:
            raise ValueError(f"RandAugment fills with {self.fill}: use 0 to 255")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        for change, level, sign in self.chosen(chance):
            pixels = self.changed(pixels, change, level, sign)
        return pixels

    def chosen(self, chance: Chance) -> Iterator[tuple[str, float, int]]:
        """The changes of a picture in their order, each with its level and its sign."""
        for layer in range(self.layers):
            kind, happens, sign, near, far = (chance.at(5 * layer + place) for place in range(5))
            if happens < self.rate:
                magnitude = self.magnitude
                if self.spread:
                    bell = math.sqrt(-2 * math.log(1 - near)) * math.cos(2 * math.pi * far)
                    magnitude = min(max(magnitude + self.spread * bell, 0.0), max(10.0, self.magnitude))
                yield CHANGES[int(kind * len(CHANGES))], magnitude / 10, 1 if sign < 0.5 else -1

    def moves(self, size: Pair, chances: Chances) -> np.ndarray:
        """Where each point comes from, [B, 3, 3]: see `places`."""
        found = unmoved(len(chances.indices))
        height, width = size
        for row, index in enumerate(chances.indices.tolist()):
            for change, level, sign in self.chosen(Chance(chances.seed, chances.epoch, index, chances.stream)):
                matrix = self.matrix(change, level, sign, height, width)
                if matrix is not None:
                    a, b, c, d, e, f = matrix  # in pixels
                    step = ((a, b * height / width, c / width), (d * width / height, e, f / height), (0, 0, 1))
                    found[row] @= np.array(step)
        return found

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        """Pictures that have the same change in the same layer go together."""
        if self.spread:
            alone = (Chance(chances.seed, chances.epoch, i, chances.stream) for i in chances.indices.tolist())
            return torch.stack([self.picture(each, chance) for each, chance in zip(pixels, alone, strict=True)])
        draws = chances.uniforms(5 * self.layers).reshape(len(pixels), self.layers, 5)
        kinds = (draws[..., 0] * len(CHANGES)).astype(np.int64) * 2 + (draws[..., 2] >= 0.5)
        kinds[draws[..., 1] >= self.rate] = -1
        out = pixels.clone()
        for layer in range(self.layers):
            for kind in np.unique(kinds[:, layer]).tolist():
                if kind >= 0:
                    rows = torch.from_numpy(np.flatnonzero(kinds[:, layer] == kind))
                    sign = -1 if kind % 2 else 1
                    out[rows] = self.changed(out[rows], CHANGES[kind // 2], self.magnitude / 10, sign)
        return out

    def changed(self, pixels: Tensor, change: str, level: float, sign: int) -> Tensor:
        """One change at a level: 1 is magnitude 10. `sign` is where it could go either way."""
        factor = max(0.1, 1 + sign * 0.9 * level) if self.increasing else 0.1 + 1.8 * level
        match change:
            case "autocontrast":
                return operations.autocontrast(pixels)
            case "equalise":
                return operations.equalise(pixels)
            case "invert":
                return operations.invert(pixels)
            case "posterise":
                kept = 4 - int(4 * level) if self.increasing else int(4 * level)
                return operations.posterise(pixels, max(1, kept))  # none kept would be a black picture
            case "solarise":
                threshold = min(256, int(256 * level))
                return operations.solarise(pixels, 256 - threshold if self.increasing else threshold)
            case "solarise-add":
                return operations.solarise_add(pixels, min(128, int(110 * level)))
            case "colour":
                return operations.saturation(pixels, factor)
            case "contrast":
                return operations.contrast(pixels, factor)
            case "brightness":
                return operations.brightness(pixels, factor)
            case "sharpness":
                return operations.sharpness(pixels, factor)
            case _:
                matrix = self.matrix(change, level, sign, *pixels.shape[-2:])
                assert matrix is not None
                return affine(pixels, matrix, self.interpolation, self.fill)

    def matrix(self, change: str, level: float, sign: int, height: int, width: int) -> Matrix | None:
        """From where the pixels come after a change that moves them; nothing where it only changes their colours."""
        match change:
            case "rotate":
                return rotation(sign * 30 * level, height, width)
            case "shear-x":
                return 1, sign * 0.3 * level, 0, 0, 1, 0
            case "shear-y":
                return 1, 0, 0, sign * 0.3 * level, 1, 0
            case "translate-x":
                return 1, 0, sign * 0.45 * level * width, 0, 1, 0
            case "translate-y":
                return 1, 0, 0, 0, 1, sign * 0.45 * level * height
        return None

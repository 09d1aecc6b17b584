"""What happens to a picture once its part is cut out: slots that choose by chance and leave the doing to `operations`.

Every slot takes one picture or a whole batch, with the same numbers for both. 3-Augment, made for photographs, takes pictures
one by one.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data import operations
from vitrail.data.affine import affine, rotation
from vitrail.data.chance import Chance, Chances, bits
from vitrail.data.crops import ATTEMPTS, Fit, RandomResizedCrop, SimpleCrop, check_range, reflected

WITHIN = 2**16  # streams of a slot's own parts


def check_rate(what: str, rate: float) -> None:
    """Refuses what is no probability."""
    if not 0 <= rate <= 1:
        raise ValueError(f"{what} rate {rate}: use a number from 0 to 1")


@dataclass(frozen=True)
class Flip:
    """Left and right change places."""

    rate: float = 0.5

    def __post_init__(self) -> None:
        check_rate("flip", self.rate)

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return pixels.flip(-1) if chance.at(0) < self.rate else pixels

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        chosen = torch.from_numpy(chances.uniforms(1)[:, 0] < self.rate)
        return torch.where(chosen[:, None, None, None], pixels.flip(-1), pixels)


@dataclass(frozen=True)
class PadCrop:
    """A shift by up to `padding` pixels, for small pictures: what comes in from outside is black, or mirrored."""

    padding: int = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __post_init__(self) -> None:
        if not 0 <= self.padding <= 1024:
            raise ValueError(f"padding {self.padding}: use 0 to 1,024 pixels")
        if self.mode not in ("zero", "reflect"):
            raise ValueError(f"unknown padding {self.mode!r}: use zero or reflect")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return self.batch(pixels[None], Chances.single(chance))[0]

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        pad, (height, width) = self.padding, pixels.shape[-2:]
        around = (pad, pad, pad, pad)
        padded = F.pad(pixels, around) if self.mode == "zero" else reflected(pixels, around)
        out = torch.empty_like(pixels)
        shifts = (chances.uniforms(2) * (2 * self.padding + 1)).astype(np.int64).tolist()
        for place, (top, left) in enumerate(shifts):
            out[place] = padded[place, :, top : top + height, left : left + width]
        return out


@dataclass(frozen=True)
class ColourJitter:
    """Brightness, contrast, saturation and hue, each by a random factor, in random order.

    A factor is between 1 - amount and 1 + amount; the hue turns by up to its amount of a full turn, at most a half.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation", "hue"):
            most = 0.5 if name == "hue" else 10.0
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"colour jitter {name} {getattr(self, name)}: use a number from 0 to {most:g}")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        order, factors = self._choices(Chances.single(chance))
        for kind in order[0].tolist():
            if self.amounts[kind]:
                pixels = JITTERS[kind](pixels, float(factors[0, kind]))
        return pixels

    @property
    def amounts(self) -> tuple[float, ...]:
        return self.brightness, self.contrast, self.saturation, self.hue

    def _choices(self, chances: Chances) -> tuple[np.ndarray, np.ndarray]:
        """Which change comes when, and how much of it: both [B, 4]."""
        draws = chances.uniforms(8)
        amounts = np.array(self.amounts[:3])
        low, high = np.maximum(0, 1 - amounts), 1 + amounts
        factors = np.concatenate((low + (high - low) * draws[:, 4:7], self.hue * (2 * draws[:, 7:] - 1)), axis=1)
        return draws[:, :4].argsort(1, kind="stable"), factors.astype(np.float32)

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        order, factors = self._choices(chances)
        out = pixels.clone()
        for turn in range(4):
            for kind, change in enumerate(JITTERS):
                chosen = np.flatnonzero(order[:, turn] == kind)
                if self.amounts[kind] and len(chosen):
                    factor = torch.from_numpy(factors[chosen, kind])[:, None, None, None]
                    place = torch.from_numpy(chosen)
                    out[place] = change(out[place], factor)
        return out


JITTERS = (operations.brightness, operations.contrast, operations.saturation, operations.hue)


@dataclass(frozen=True)
class RandomErasing:
    """A rectangle of random area and proportions is replaced by noise or by zeros (Zhong et al. 2017).

    The noise is near to normal, with the mean and the deviation that photographs have, so that it is about standard
    normal after normalisation, as timm's "pixel".
    """

    rate: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    mode: Literal["noise", "zeros"] = "noise"

    def __post_init__(self) -> None:
        check_rate("erasing", self.rate)
        check_range("erasing area", self.area, 0, 1)
        check_range("erasing ratio", self.ratio, 0, 1000)
        if self.mode not in ("noise", "zeros"):
            raise ValueError(f"unknown erasing {self.mode!r}: use noise or zeros")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return self.batch(pixels[None], Chances.single(chance))[0]

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        draws = chances.uniforms(3 + 2 * ATTEMPTS)
        chosen = np.flatnonzero(draws[:, 0] < self.rate)
        out = pixels.clone() if len(chosen) else pixels
        for place in chosen:
            box = self._box(pixels.shape[-2], pixels.shape[-1], draws[place, 1:])
            if box is not None:
                top, left, h, w = box
                shape = (pixels.shape[1], h, w)
                out[place, :, top : top + h, left : left + w] = (
                    self._noise(shape, chances, int(chances.indices[place])) if self.mode == "noise" else 0
                )
        return out

    def _box(self, height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int] | None:
        low, high = (math.log(r) for r in self.ratio)
        for attempt in range(ATTEMPTS):
            area = height * width * (self.area[0] + (self.area[1] - self.area[0]) * draws[2 + 2 * attempt])
            ratio = math.exp(low + (high - low) * draws[3 + 2 * attempt])
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < h < height and 0 < w < width:
                return int(draws[0] * (height - h + 1)), int(draws[1] * (width - w + 1)), h, w
        return None

    def _noise(self, shape: tuple[int, int, int], chances: Chances, index: int) -> Tensor:
        """Sums of four random bytes, scaled: a bell to the eye, for a quarter of the price."""
        count = math.prod(shape)
        found = bits(chances.seed, chances.epoch, np.array([index]), (count + 1) // 2, chances.stream + WITHIN)
        sums = found.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.int32)[:count]
        spread = 0.225 * 255 / math.sqrt(4 * (256**2 - 1) / 12)
        values = 0.45 * 255 + (sums - 510) * spread
        return torch.from_numpy(values.round().clip(0, 255).astype(np.uint8).reshape(shape))


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
        for layer in range(self.layers):
            kind, happens, sign, near, far = (chance.at(5 * layer + place) for place in range(5))
            if happens < self.rate:
                magnitude = self.magnitude
                if self.spread:
                    bell = math.sqrt(-2 * math.log(1 - near)) * math.cos(2 * math.pi * far)
                    magnitude = min(max(magnitude + self.spread * bell, 0.0), max(10.0, self.magnitude))
                change = CHANGES[int(kind * len(CHANGES))]
                pixels = self.changed(pixels, change, magnitude / 10, 1 if sign < 0.5 else -1)
        return pixels

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
        height, width = pixels.shape[-2:]
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
            case "rotate":
                matrix = rotation(sign * 30 * level, height, width)
            case "shear-x":
                matrix = (1, sign * 0.3 * level, 0, 0, 1, 0)
            case "shear-y":
                matrix = (1, 0, 0, sign * 0.3 * level, 1, 0)
            case "translate-x":
                matrix = (1, 0, sign * 0.45 * level * width, 0, 1, 0)
            case _:
                matrix = (1, 0, 0, 0, 1, sign * 0.45 * level * height)
        return affine(pixels, matrix, self.interpolation, self.fill)


CHANGES = (
    *("autocontrast", "equalise", "invert", "rotate", "posterise", "solarise", "solarise-add", "colour", "contrast"),
    *("brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y"),
)


@dataclass(frozen=True)
class ThreeAugment:
    """Grey, solarised or blurred, one of the three; then colour jitter (Touvron et al. 2022, DeiT III)."""

    jitter: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 10:
            raise ValueError(f"3-Augment with jitter {self.jitter}: use a number from 0 to 10")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        choice = int(3 * chance.at(0))
        if choice == 0:
            pixels = operations.grey(pixels)
        elif choice == 1:
            pixels = operations.solarise(pixels, 128)
        else:
            pixels = operations.blur(pixels, 0.1 + 1.9 * chance.at(1))
        jitter = ColourJitter(self.jitter, self.jitter, self.jitter)
        return jitter.picture(pixels, chance.of(chance.stream + WITHIN))


ChangeSlot = Flip | PadCrop | ColourJitter | RandomErasing | RandAugment | ThreeAugment
AugmentSlot = RandomResizedCrop | SimpleCrop | Fit | ChangeSlot

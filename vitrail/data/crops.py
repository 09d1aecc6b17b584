"""Which part of a picture is taken: the slots that a pipeline begins with."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.chance import Chance, Chances
from vitrail.data.decode import Box, Decoded, Opened, cut, resize
from vitrail.data.preprocessing import FILTERS, Pair

Part = tuple[float, float, float, float]  # top, left, height and width of a part, in shares of the picture's sides
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
ATTEMPTS = 10  # of a random crop to fit in the picture, as everywhere since Szegedy et al. 2015


def check_size(size: Pair, interpolation: str = "bicubic") -> None:
    """Refuses what is no size, or no way of resizing."""
    if min(size) < 1 or max(size) > 65_536:
        raise ValueError(f"augmentation size {size}: each side is 1 to 65,536 pixels")
    if interpolation not in FILTERS:
        raise ValueError(f"unknown interpolation {interpolation!r}: use {', '.join(FILTERS)}")


def check_range(what: str, pair: tuple[float, float], low: float, high: float) -> None:
    """Refuses a range that is empty or leaves its bounds."""
    if not low < pair[0] <= pair[1] <= high:
        raise ValueError(f"{what} {pair}: two numbers above {low:g}, up to {high:g}, the smaller first")


def check_rate(what: str, rate: float) -> None:
    """Refuses what is no probability."""
    if not 0 <= rate <= 1:
        raise ValueError(f"{what} rate {rate}: use a number from 0 to 1")


@dataclass(frozen=True)
class RandomResizedCrop:
    """A part of random area and proportions, resized (Szegedy et al. 2015). `scale` is of the area, `ratio` width to height."""

    size: tuple[int, int] = (224, 224)
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)
        check_range("crop scale", self.scale, 0, 1)
        check_range("crop ratio", self.ratio, 0, 1000)

    def box(self, height: int, width: int, chance: Chance) -> Box:
        """The part that is taken, always inside the picture."""
        low, high = (math.log(r) for r in self.ratio)
        for attempt in range(ATTEMPTS):
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * chance.at(2 * attempt))
            ratio = math.exp(low + (high - low) * chance.at(2 * attempt + 1))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = int(chance.at(2 * ATTEMPTS) * (height - h + 1))
                left = int(chance.at(2 * ATTEMPTS + 1) * (width - w + 1))
                return Box(top, left, h, w)
        return middle(height, width, min(max(width / height, self.ratio[0]), self.ratio[1]))

    def boxes(self, height: int, width: int, chances: Chances) -> np.ndarray:
        """The same for many pictures of one size: top, left, height and width, int64 [B, 4]."""
        draws, (low, high) = chances.uniforms(2 * ATTEMPTS + 2), (math.log(r) for r in self.ratio)
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * draws[:, 0:-2:2])
        ratio = np.exp(low + (high - low) * draws[:, 1:-2:2])
        wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))  # [B, ATTEMPTS]
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        rows, first = np.arange(len(draws)), fits.argmax(1)
        h, w = tall[rows, first], wide[rows, first]
        found = np.stack((draws[:, -2] * (height - h + 1), draws[:, -1] * (width - w + 1), h, w), 1).astype(np.int64)
        other = middle(height, width, min(max(width / height, self.ratio[0]), self.ratio[1]))
        found[~fits.any(1)] = (other.top, other.left, other.height, other.width)
        return found

    def part(self, height: int, width: int, chance: Chance) -> Part:
        """What the crop shows of a picture of this size."""
        return shares(self.box(height, width, chance), height, width)

    def picture(self, source: Opened | Decoded, chance: Chance) -> Tensor:
        return cut(source, self.box(*source.size, chance), self.size, self.interpolation)

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        """The same for pictures of one size, uint8 [B, H, W, C] to [B, C, h, w]: boxes of one size are resized at once."""
        alike: dict[Pair, list[tuple[int, int, int]]] = {}
        for row, (top, left, h, w) in enumerate(self.boxes(pixels.shape[1], pixels.shape[2], chances).tolist()):
            alike.setdefault((h, w), []).append((row, top, left))
        out = torch.empty((len(pixels), pixels.shape[3], *self.size), dtype=torch.uint8)
        for (h, w), found in alike.items():
            parts = [pixels[row, top : top + h, left : left + w] for row, top, left in found]
            rows = torch.tensor([row for row, _, _ in found])
            out[rows] = resize(torch.stack(parts), self.size, self.interpolation)
        return out


@dataclass(frozen=True)
class SimpleCrop:
    """The whole picture resized over the size, a little padding reflected around it, and a random part of that (DeiT III)."""

    size: tuple[int, int] = (224, 224)
    padding: int = 4
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)
        if not 0 <= self.padding < min(self.size):
            raise ValueError(f"crop padding {self.padding}: use 0 to {min(self.size) - 1}, less than the size")

    def corner(self, height: int, width: int, chance: Chance) -> tuple[int, int, int, int]:
        """Top and left of the crop in the resized picture, and that one's height and width."""
        h, w = self.size
        scale = max(h / height, w / width)
        tall, wide = max(h, round(height * scale)), max(w, round(width * scale))
        top = int(chance.at(0) * (tall - h + 2 * self.padding + 1)) - self.padding
        left = int(chance.at(1) * (wide - w + 2 * self.padding + 1)) - self.padding
        return top, left, tall, wide

    def part(self, height: int, width: int, chance: Chance) -> Part:
        """What the crop shows of a picture of this size; its padding lies outside of it."""
        top, left, tall, wide = self.corner(height, width, chance)
        return top / tall, left / wide, self.size[0] / tall, self.size[1] / wide

    def picture(self, source: Opened | Decoded, chance: Chance) -> Tensor:
        (height, width), (h, w) = source.size, self.size
        scale = max(h / height, w / width)
        top, left, tall, wide = self.corner(height, width, chance)
        around = (max(0, -left), max(0, left + w - wide), max(0, -top), max(0, top + h - tall))
        y, x = top + around[2], left + around[0]
        rows, columns = h - around[2] - around[3], w - around[0] - around[1]
        box = within(y / scale, x / scale, rows / scale, columns / scale, height, width)
        pixels = cut(source, box, (rows, columns), self.interpolation)
        return reflected(pixels, around)


@dataclass(frozen=True)
class Fit:
    """Nothing random: the middle of the picture in the size's proportions, resized."""

    size: tuple[int, int] = (224, 224)
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)

    def box(self, height: int, width: int, chance: Chance) -> Box:
        """The part that is taken."""
        return middle(height, width, self.size[1] / self.size[0])

    def part(self, height: int, width: int, chance: Chance) -> Part:
        """What the crop shows of a picture of this size."""
        return shares(self.box(height, width, chance), height, width)

    def picture(self, source: Opened | Decoded, chance: Chance) -> Tensor:
        return cut(source, self.box(*source.size, chance), self.size, self.interpolation)

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        """The same for pictures of one size, uint8 [B, H, W, C] to [B, C, h, w]."""
        box = middle(pixels.shape[1], pixels.shape[2], self.size[1] / self.size[0])
        part = pixels[:, box.top : box.top + box.height, box.left : box.left + box.width]
        return resize(part, self.size, self.interpolation)


CropSlot = RandomResizedCrop | SimpleCrop | Fit


def middle(height: int, width: int, ratio: float) -> Box:
    """The largest part of these proportions, width to height, from the middle."""
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def shares(box: Box, height: int, width: int) -> Part:
    """A box in shares of the picture's sides."""
    return box.top / height, box.left / width, box.height / height, box.width / width


def within(top: float, left: float, tall: float, wide: float, height: int, width: int) -> Box:
    """The nearest box of whole pixels inside the picture."""
    h, w = min(height, max(1, round(tall))), min(width, max(1, round(wide)))
    return Box(min(max(0, round(top)), height - h), min(max(0, round(left)), width - w), h, w)


def reflected(pixels: Tensor, around: tuple[int, int, int, int]) -> Tensor:
    """Mirrored at its edges by so many pixels left, right, above and below; repeated where it is too small for that."""
    if not any(around):
        return pixels
    height, width = pixels.shape[-2:]
    mode = "reflect" if max(around[:2]) < width and max(around[2:]) < height else "replicate"
    lead = pixels if pixels.ndim == 4 else pixels[None]
    out = F.pad(lead.float(), around, mode=mode).to(torch.uint8)  # torch pads bytes by constants only
    return out if pixels.ndim == 4 else out[0]

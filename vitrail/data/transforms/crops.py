"""Crops: the first step of a training pipeline.

A crop of a source with a mask has it as last channel, cut by the same box; padding is IGNORED there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.dataset import IGNORED
from vitrail.data.decode import Box, DecodedImage, LazyImage, crop_and_resize, resize
from vitrail.data.preprocessing import FILTERS, ImageSize
from vitrail.data.rng import BatchRandom, SampleRandom

RelativeBox = tuple[float, float, float, float]  # top, left, height, width as fractions of the image
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
MAX_CROP_ATTEMPTS = 10  # attempts to fit a random crop into the image, as in Szegedy et al. 2015


def check_size(size: ImageSize, interpolation: str = "bicubic") -> None:
    """Raise an error if the size or the interpolation is invalid."""
    if min(size) < 1 or max(size) > 65_536:
        raise ValueError(f"augmentation size: each side must be 1 to 65,536 pixels, got {size}")
    if interpolation not in FILTERS:
        raise ValueError(f"unknown interpolation {interpolation!r}: use {', '.join(FILTERS)}")


def check_range(name: str, pair: tuple[float, float], low: float, high: float) -> None:
    """Raise an error if a range is empty or exceeds its bounds."""
    if not low < pair[0] <= pair[1] <= high:
        raise ValueError(f"{name} must be two increasing numbers > {low:g} and <= {high:g}, got {pair}")


def check_limits(owner: str, slot: object, **limits: float) -> None:
    """Raise an error if one of the named fields of a slot is not between 0 and its limit."""
    for name, limit in limits.items():
        if not 0 <= getattr(slot, name) <= limit:
            raise ValueError(f"{owner} {name} must be 0 to {limit:g}, got {getattr(slot, name)}")


class BoxCrop:
    """Base of crops that cut one box and resize it."""

    size: tuple[int, int]
    interpolation: Interpolation

    def sample_box(self, height: int, width: int, rng: SampleRandom) -> Box:
        """Sample the box for an image of this size."""
        raise NotImplementedError

    def sample_relative_box(self, height: int, width: int, rng: SampleRandom) -> RelativeBox:
        """Sample the box for an image of this size, relative to it."""
        box = self.sample_box(height, width, rng)
        return box.top / height, box.left / width, box.height / height, box.width / width

    def apply(self, source: LazyImage | DecodedImage, rng: SampleRandom) -> Tensor:
        return crop_and_resize(source, self.sample_box(*source.size, rng), self.size, self.interpolation)


@dataclass(frozen=True)
class RandomResizedCrop(BoxCrop):
    """A box of random area and aspect ratio, resized (Szegedy et al. 2015). `scale` is the area, `ratio` width / height."""

    size: tuple[int, int] = (224, 224)
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)
        check_range("crop scale", self.scale, 0, 1)
        check_range("crop ratio", self.ratio, 0, 1000)

    def sample_box(self, height: int, width: int, rng: SampleRandom) -> Box:
        """Sample the box, always inside the image."""
        low, high = (math.log(r) for r in self.ratio)
        for attempt in range(MAX_CROP_ATTEMPTS):
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * rng.uniform_at(2 * attempt))
            ratio = math.exp(low + (high - low) * rng.uniform_at(2 * attempt + 1))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = int(rng.uniform_at(2 * MAX_CROP_ATTEMPTS) * (height - h + 1))
                left = int(rng.uniform_at(2 * MAX_CROP_ATTEMPTS + 1) * (width - w + 1))
                return Box(top, left, h, w)
        return centre_box(height, width, min(max(width / height, self.ratio[0]), self.ratio[1]))

    def sample_boxes(self, height: int, width: int, rng: BatchRandom) -> np.ndarray:
        """Sample the boxes of images of one size: top, left, height and width, int64 [B, 4]."""
        draws, (low, high) = rng.uniform(2 * MAX_CROP_ATTEMPTS + 2), (math.log(r) for r in self.ratio)
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * draws[:, 0:-2:2])
        ratio = np.exp(low + (high - low) * draws[:, 1:-2:2])
        wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))  # [B, ATTEMPTS]
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        rows, first = np.arange(len(draws)), fits.argmax(1)
        h, w = tall[rows, first], wide[rows, first]
        boxes = np.stack((draws[:, -2] * (height - h + 1), draws[:, -1] * (width - w + 1), h, w), 1).astype(np.int64)
        centre = centre_box(height, width, min(max(width / height, self.ratio[0]), self.ratio[1]))
        boxes[~fits.any(1)] = (centre.top, centre.left, centre.height, centre.width)
        return boxes

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        """Crop images of one size, uint8 [B, H, W, C] to [B, C, h, w]; boxes of equal size are resized together."""
        by_size: dict[ImageSize, list[tuple[int, int, int]]] = {}
        for row, (top, left, h, w) in enumerate(self.sample_boxes(pixels.shape[1], pixels.shape[2], rng).tolist()):
            by_size.setdefault((h, w), []).append((row, top, left))
        out = torch.empty((len(pixels), pixels.shape[3], *self.size), dtype=torch.uint8)
        for (h, w), boxes in by_size.items():
            crops = [pixels[row, top : top + h, left : left + w] for row, top, left in boxes]
            rows = torch.tensor([row for row, _, _ in boxes])
            out[rows] = resize(torch.stack(crops), self.size, self.interpolation)
        return out


class PaddedCrop:
    """Base of crops that resize the image, keeping its aspect ratio, and cut a window that may exceed it."""

    size: tuple[int, int]
    interpolation: Interpolation

    def sample_scale(self, height: int, width: int, rng: SampleRandom) -> float:
        """Sample the factor by which an image of this size is resized."""
        raise NotImplementedError

    def sample_corner(self, height: int, width: int, rng: SampleRandom) -> tuple[int, int, int, int]:
        """Sample the top and left of the crop in the resized image; return them with its height and width."""
        raise NotImplementedError

    def pad(self, pixels: Tensor, padding: Sequence[int]) -> Tensor:
        """Pad an image [C, H, W] left, right, top and bottom."""
        raise NotImplementedError

    def sample_relative_box(self, height: int, width: int, rng: SampleRandom) -> RelativeBox:
        """Sample the box for an image of this size, relative to it; padding lies outside of [0, 1]."""
        top, left, tall, wide = self.sample_corner(height, width, rng)
        return top / tall, left / wide, self.size[0] / tall, self.size[1] / wide

    def apply(self, source: LazyImage | DecodedImage, rng: SampleRandom) -> Tensor:
        (height, width), (h, w) = source.size, self.size
        scale = self.sample_scale(height, width, rng)
        top, left, tall, wide = self.sample_corner(height, width, rng)
        padding = (max(0, -left), max(0, left + w - wide), max(0, -top), max(0, top + h - tall))
        y, x = top + padding[2], left + padding[0]
        rows, columns = h - padding[2] - padding[3], w - padding[0] - padding[1]
        box = clip_box(y / scale, x / scale, rows / scale, columns / scale, height, width)
        cropped = crop_and_resize(source, box, (rows, columns), self.interpolation)
        if source.mask is None or not any(padding):
            return self.pad(cropped, padding)
        return torch.cat((self.pad(cropped[:-1], padding), F.pad(cropped[-1:], padding, value=IGNORED)))


@dataclass(frozen=True)
class SimpleCrop(PaddedCrop):
    """The image resized to cover the size, reflect-padded, and cropped at random (DeiT III)."""

    size: tuple[int, int] = (224, 224)
    padding: int = 4
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)
        if not 0 <= self.padding < min(self.size):
            raise ValueError(f"crop padding must be 0 to {min(self.size) - 1}, less than the size, got {self.padding}")

    def sample_scale(self, height: int, width: int, rng: SampleRandom) -> float:
        return max(self.size[0] / height, self.size[1] / width)

    def sample_corner(self, height: int, width: int, rng: SampleRandom) -> tuple[int, int, int, int]:
        (h, w), scale = self.size, self.sample_scale(height, width, rng)
        tall, wide = max(h, round(height * scale)), max(w, round(width * scale))
        top = int(rng.uniform_at(0) * (tall - h + 2 * self.padding + 1)) - self.padding
        left = int(rng.uniform_at(1) * (wide - w + 2 * self.padding + 1)) - self.padding
        return top, left, tall, wide

    def pad(self, pixels: Tensor, padding: Sequence[int]) -> Tensor:
        return reflect_pad(pixels, padding)


@dataclass(frozen=True)
class ScaleJitter(PaddedCrop):
    """The image resized by a random factor, and cropped or padded at random: the usual augmentation of segmentation.

    At a factor of 1, the image just covers the size. Below, it may be smaller, and `fill` is the value around it.
    """

    size: tuple[int, int] = (224, 224)
    factor: tuple[float, float] = (0.5, 2.0)
    interpolation: Interpolation = "bilinear"
    fill: int = 128

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)
        check_range("scale jitter factor", self.factor, 0, 100)
        check_limits("scale jitter", self, fill=255)

    def sample_scale(self, height: int, width: int, rng: SampleRandom) -> float:
        low, high = self.factor
        return max(self.size[0] / height, self.size[1] / width) * (low + (high - low) * rng.uniform_at(0))

    def sample_corner(self, height: int, width: int, rng: SampleRandom) -> tuple[int, int, int, int]:
        scale = self.sample_scale(height, width, rng)
        tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
        margins = tall - self.size[0], wide - self.size[1]  # negative where the image is too small
        top, left = (
            int(rng.uniform_at(1 + axis) * (abs(margin) + 1)) * (1 if margin > 0 else -1)
            for axis, margin in enumerate(margins)
        )
        return top, left, tall, wide

    def pad(self, pixels: Tensor, padding: Sequence[int]) -> Tensor:
        return F.pad(pixels, tuple(padding), value=self.fill)


@dataclass(frozen=True)
class Fit(BoxCrop):
    """The largest centred box with the aspect ratio of the size, resized; not random."""

    size: tuple[int, int] = (224, 224)
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)

    def sample_box(self, height: int, width: int, rng: SampleRandom) -> Box:
        """Return the box."""
        return centre_box(height, width, self.size[1] / self.size[0])

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        """Crop images of one size, uint8 [B, H, W, C] to [B, C, h, w]."""
        box = centre_box(pixels.shape[1], pixels.shape[2], self.size[1] / self.size[0])
        crop = pixels[:, box.top : box.top + box.height, box.left : box.left + box.width]
        return resize(crop, self.size, self.interpolation)


CropSlot = RandomResizedCrop | SimpleCrop | ScaleJitter | Fit


def centre_box(height: int, width: int, ratio: float) -> Box:
    """Return the largest centred box with this ratio of width to height."""
    w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def clip_box(top: float, left: float, tall: float, wide: float, height: int, width: int) -> Box:
    """Return the nearest box of whole pixels inside the image."""
    h, w = min(height, max(1, round(tall))), min(width, max(1, round(wide)))
    return Box(min(max(0, round(top)), height - h), min(max(0, round(left)), width - w), h, w)


def reflect_pad(pixels: Tensor, padding: Sequence[int]) -> Tensor:
    """Pad left, right, top and bottom by reflection; replicate the edge where the image is too small."""
    if not any(padding):
        return pixels
    height, width = pixels.shape[-2:]
    mode = "reflect" if max(padding[:2]) < width and max(padding[2:]) < height else "replicate"
    batch = pixels if pixels.ndim == 4 else pixels[None]
    out = F.pad(batch.float(), padding, mode=mode).to(torch.uint8)  # torch pads uint8 with constants only
    return out if pixels.ndim == 4 else out[0]

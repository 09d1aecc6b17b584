"""Augmentations after the crop: slots that sample parameters and apply `operations`.

Every slot takes one image or a batch, with the same random numbers for both; ThreeAugment takes single images only. A slot
with `move_mask` can be used for images with masks: it moves the pixels of a mask as those of its image, or none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.dataset import IGNORED
from vitrail.data.preprocessing import ImageSize
from vitrail.data.rng import BatchRandom, SampleRandom, random_bits
from vitrail.data.transforms import crops, operations
from vitrail.data.transforms.crops import (
    Fit,
    RandomResizedCrop,
    ScaleJitter,
    SimpleCrop,
    check_limits,
    check_range,
    reflect_pad,
)
from vitrail.data.transforms.operations import rotate_hue, scale_brightness, scale_contrast, scale_saturation
from vitrail.data.transforms.randaugment import RandAugment
from vitrail.data.transforms.spectrogram import SpectrogramSlot
from vitrail.data.transforms.user import UserTransform

SUBSTREAM_OFFSET = 2**16  # offset of the streams within a slot
JITTER_OPERATIONS = (scale_brightness, scale_contrast, scale_saturation, rotate_hue)


class Photometric:
    """Base of steps that change colours only."""

    def move_mask(self, mask: Tensor, rng: SampleRandom) -> Tensor:
        """Return the mask as it is."""
        return mask


class BatchStep:
    """Base of steps that process a single image as a batch of one."""

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        raise NotImplementedError

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        return self.apply_batch(pixels[None], BatchRandom.from_sample(rng))[0]


class RandomStep:
    """Base of steps that change a fraction `rate` of the images, without further random numbers."""

    rate: float

    def __post_init__(self) -> None:
        check_limits(type(self).__name__.lower(), self, rate=1)

    def change(self, pixels: Tensor) -> Tensor:
        """Return one changed image or a batch of them."""
        raise NotImplementedError

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        return self.change(pixels) if rng.uniform_at(0) < self.rate else pixels

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        return apply_to_selected(pixels, rng.uniform(1)[:, 0] < self.rate, self.change)


@dataclass(frozen=True)
class Blur(Photometric, BatchStep):
    """Gaussian blur with a standard deviation sampled uniformly from `radius`, in pixels. Below 0.3 it is invisible."""

    rate: float = 0.5
    radius: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        check_limits("blur", self, rate=1)
        check_range("blur radius", self.radius, 0, 1000)

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        draws, (low, high) = rng.uniform(2), self.radius
        chosen = draws[:, 0] < self.rate
        deviations = torch.from_numpy(low + (high - low) * draws[chosen, 1])
        return apply_to_selected(pixels, chosen, lambda images: operations.blur_batch(images, deviations))


@dataclass(frozen=True)
class Grey(Photometric, RandomStep):
    """Removal of colour; the number of channels stays."""

    rate: float = 0.2

    def change(self, pixels: Tensor) -> Tensor:
        return operations.convert_to_grey(pixels)


@dataclass(frozen=True)
class Solarise(Photometric, RandomStep):
    """Inversion of values at or above the threshold."""

    rate: float = 0.2
    threshold: int = 128

    def __post_init__(self) -> None:
        check_limits("solarise", self, rate=1, threshold=256)

    def change(self, pixels: Tensor) -> Tensor:
        return operations.solarise(pixels, self.threshold)


@dataclass(frozen=True)
class Flip(RandomStep):
    """Horizontal flip."""

    rate: float = 0.5

    def change(self, pixels: Tensor) -> Tensor:
        return pixels.flip(-1)

    def move_mask(self, mask: Tensor, rng: SampleRandom) -> Tensor:
        """Flip the mask, uint8 [H, W], of a flipped image."""
        return self.apply(mask, rng)

    def affine_matrices(self, size: ImageSize, rng: BatchRandom) -> np.ndarray:
        """Return the matrices from output to input positions, [B, 3, 3]: see `compute_crop_transforms`."""
        matrices = operations.identity_matrices(len(rng.indices))
        matrices[rng.uniform(1)[:, 0] < self.rate, 0] = (-1, 0, 1)
        return matrices


def apply_to_selected(pixels: Tensor, selected: np.ndarray, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply the operation to the selected images of a batch."""
    if not selected.any():
        return pixels
    rows, out = torch.from_numpy(np.flatnonzero(selected)), pixels.clone()
    out[rows] = operation(pixels[rows])
    return out


@dataclass(frozen=True)
class PadCrop(BatchStep):
    """Random shift by up to `padding` pixels, for small images, with zero or reflection padding."""

    padding: int = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __post_init__(self) -> None:
        if not 0 <= self.padding <= 1024:
            raise ValueError(f"padding must be 0 to 1,024 pixels, got {self.padding}")
        if self.mode not in ("zero", "reflect"):
            raise ValueError(f"unknown padding {self.mode!r}: use zero or reflect")

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        padding = [self.padding] * 4
        return self._crop(F.pad(pixels, padding) if self.mode == "zero" else reflect_pad(pixels, padding), rng)

    def move_mask(self, mask: Tensor, rng: SampleRandom) -> Tensor:
        """Shift the mask, uint8 [H, W]; padding is IGNORED in both modes."""
        padded = F.pad(mask[None], [self.padding] * 4, value=IGNORED)
        return self._crop(padded, BatchRandom.from_sample(rng))[0]

    def affine_matrices(self, size: ImageSize, rng: BatchRandom) -> np.ndarray:
        """Return the matrices from output to input positions, [B, 3, 3]: see `compute_crop_transforms`."""
        matrices = operations.identity_matrices(len(rng.indices))
        matrices[:, 1::-1, 2] = (self._sample_corners(rng) - self.padding) / size
        return matrices

    def _crop(self, padded: Tensor, rng: BatchRandom) -> Tensor:
        """Crop padded images or masks [B, ..., H, W] at their random corners."""
        height, width = (side - 2 * self.padding for side in padded.shape[-2:])
        out = torch.empty((*padded.shape[:-2], height, width), dtype=torch.uint8)
        for row, (top, left) in enumerate(self._sample_corners(rng).tolist()):
            out[row] = padded[row, ..., top : top + height, left : left + width]
        return out

    def _sample_corners(self, rng: BatchRandom) -> np.ndarray:
        """Sample the top and left in the padded image, int64 [B, 2]."""
        return (rng.uniform(2) * (2 * self.padding + 1)).astype(np.int64)


@dataclass(frozen=True)
class Warp(BatchStep):
    """Small random rotation, zoom, shear and shift, for small images that must not be flipped, like digits.

    Each parameter is uniform between plus and minus its amount. Outside is black.
    """

    turn: float = 12.0  # degrees
    zoom: float = 0.12
    shear: float = 0.1
    shift: float = 0.06  # fraction of the side

    def __post_init__(self) -> None:
        check_limits("warp", self, turn=180, zoom=0.9, shear=1, shift=1)

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        height, width = pixels.shape[-2:]
        parameters = torch.from_numpy(self._sample_parameters(rng)).float()
        turn, zoom, shear, across, down = parameters[:, :, None, None].unbind(1)  # [B, 1, 1] each
        y = ((torch.arange(height) + 0.5) * 2 / height - 1)[None, :, None]
        x = ((torch.arange(width) + 0.5) * 2 / width - 1)[None, None]
        cos, sin = turn.cos() * (1 + zoom), turn.sin() * (1 + zoom)
        grid = torch.stack((cos * x + (shear - sin) * y + across, sin * x + cos * y + down), -1)  # [B, H, W, 2]
        moved = F.grid_sample(pixels.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return moved.round_().clamp_(0, 255).to(torch.uint8)

    def affine_matrices(self, size: ImageSize, rng: BatchRandom) -> np.ndarray:
        """Return the matrices from output to input positions, [B, 3, 3]: see `compute_crop_transforms`."""
        turn, zoom, shear, across, down = self._sample_parameters(rng).T
        cos, sin = np.cos(turn) * (1 + zoom), np.sin(turn) * (1 + zoom)
        matrices = operations.identity_matrices(len(rng.indices))
        for row, (along_x, along_y, shift) in enumerate(((cos, shear - sin, across), (sin, cos, down))):
            # Parameters are for coordinates in [-1, 1]; the matrix is for [0, 1].
            matrices[:, row] = np.stack((along_x, along_y, (shift + 1 - along_x - along_y) / 2), 1)
        return matrices

    def move_mask(self, mask: Tensor, rng: SampleRandom) -> Tensor:
        """Sample the mask, uint8 [H, W], at the nearest pixels; outside is IGNORED."""
        height, width = mask.shape
        matrix = self.affine_matrices((height, width), BatchRandom.from_sample(rng))[0]
        (a, b, c), (d, e, f) = matrix[:2].tolist()  # in fractions of the sides
        return operations.move_mask(mask, (a, b * width / height, c * width, d * height / width, e, f * height))

    def _sample_parameters(self, rng: BatchRandom) -> np.ndarray:
        """Sample rotation, zoom, shear and the shifts in x and y, [B, 5]."""
        amounts = np.array([math.radians(self.turn), self.zoom, self.shear, 2 * self.shift, 2 * self.shift])
        return (2 * rng.uniform(5) - 1) * amounts


@dataclass(frozen=True)
class Rotate:
    """Rotation around the centre by an angle from a range of degrees, counter-clockwise, for a fraction `rate` of the images.

    `fill` is the value outside of the image.
    """

    degrees: tuple[float, float] = (-10.0, 10.0)
    rate: float = 1.0
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    fill: int = 128

    def __post_init__(self) -> None:
        low, high = self.degrees
        if not -360 <= low <= high <= 360:
            raise ValueError(f"rotation degrees must be two increasing numbers from -360 to 360, got {self.degrees}")
        if self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise ValueError(f"unknown interpolation {self.interpolation!r}: use nearest, bilinear or bicubic")
        check_limits("rotation", self, rate=1, fill=255)

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        angle = self._sample_angle(rng)
        if not angle:
            return pixels
        matrix = operations.rotation_matrix(angle, pixels.shape[-2], pixels.shape[-1])
        return operations.apply_affine(pixels, matrix, self.interpolation, self.fill)

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        out = torch.empty_like(pixels)
        for row, sample_rng in enumerate(rng.samples()):
            out[row] = self.apply(pixels[row], sample_rng)
        return out

    def move_mask(self, mask: Tensor, rng: SampleRandom) -> Tensor:
        """Rotate the mask, uint8 [H, W], by the nearest pixels; outside is IGNORED."""
        angle = self._sample_angle(rng)
        return operations.move_mask(mask, operations.rotation_matrix(angle, *mask.shape)) if angle else mask

    def affine_matrices(self, size: ImageSize, rng: BatchRandom) -> np.ndarray:
        """Return the matrices from output to input positions, [B, 3, 3]: see `compute_crop_transforms`."""
        angles = map(self._sample_angle, rng.samples())
        return np.stack([operations.relative_matrix(operations.rotation_matrix(a, *size), size) for a in angles])

    def _sample_angle(self, rng: SampleRandom) -> float:
        low, high = self.degrees
        return low + (high - low) * rng.uniform_at(1) if rng.uniform_at(0) < self.rate else 0.0


@dataclass(frozen=True)
class ColourJitter(Photometric):
    """Random brightness, contrast, saturation and hue, in random order, for a fraction `rate` of the images.

    Factors are in [1 - amount, 1 + amount]; the hue rotates by up to its amount of a full turn, at most 0.5.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_limits("colour jitter", self, rate=1, brightness=10, contrast=10, saturation=10, hue=0.5)

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        if rng.uniform_at(8) >= self.rate:
            return pixels
        draws = [rng.uniform_at(position) for position in range(8)]
        order = sorted((kind for kind in range(4) if self.amounts[kind]), key=draws.__getitem__)

        def jitter(values: Tensor) -> Tensor:
            for kind in order:
                values = JITTER_OPERATIONS[kind](values, self._scale_factor(kind, draws[4 + kind]))
            return values

        return operations.change_colours(pixels, jitter)

    @property
    def amounts(self) -> tuple[float, ...]:
        return self.brightness, self.contrast, self.saturation, self.hue

    def _scale_factor(self, kind: int, draw: float) -> float:
        """Return the factor of one operation, as `_sample_factors` computes it, without arrays."""
        if kind == 3:
            return float(np.float32(self.hue * (2 * draw - 1)))
        low, high = max(0, 1 - self.amounts[kind]), 1 + self.amounts[kind]
        return float(np.float32(low + (high - low) * draw))

    def _sample_factors(self, rng: BatchRandom) -> tuple[np.ndarray, np.ndarray]:
        """Sample the order of the operations and their factors, both [B, 4]."""
        draws = rng.uniform(8)
        amounts = np.array(self.amounts[:3])
        low, high = np.maximum(0, 1 - amounts), 1 + amounts
        factors = np.concatenate((low + (high - low) * draws[:, 4:7], self.hue * (2 * draws[:, 7:] - 1)), axis=1)
        return draws[:, :4].argsort(1, kind="stable"), factors.astype(np.float32)

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        order, factors = self._sample_factors(rng)
        selected = rng.uniform(9)[:, 8] < self.rate

        def jitter(values: Tensor) -> Tensor:
            for position in range(4):
                for kind, operation in enumerate(JITTER_OPERATIONS):
                    rows = np.flatnonzero((order[:, position] == kind) & selected)
                    if self.amounts[kind] and len(rows):
                        factor = torch.from_numpy(factors[rows, kind])[:, None, None, None]
                        index = torch.from_numpy(rows)
                        values[index] = operation(values[index], factor)
            return values

        return operations.change_colours(pixels, jitter)


@dataclass(frozen=True)
class RandomErasing(BatchStep):
    """A random rectangle replaced by noise or zeros (Zhong et al. 2017).

    The noise is approximately normal, with the mean and deviation of photographs, so that it is about standard normal after
    normalisation, like timm's "pixel" mode.
    """

    rate: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    mode: Literal["noise", "zeros"] = "noise"

    def __post_init__(self) -> None:
        check_limits("erasing", self, rate=1)
        check_range("erasing area", self.area, 0, 1)
        check_range("erasing ratio", self.ratio, 0, 1000)
        if self.mode not in ("noise", "zeros"):
            raise ValueError(f"unknown erasing mode {self.mode!r}: use noise or zeros")

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        draws = rng.uniform(3 + 2 * crops.MAX_CROP_ATTEMPTS)
        rows = np.flatnonzero(draws[:, 0] < self.rate)
        out = pixels.clone() if len(rows) else pixels
        for row in rows:
            box = self._sample_box(pixels.shape[-2], pixels.shape[-1], draws[row, 1:])
            if box is not None:
                top, left, h, w = box
                region = out[row, :, top : top + h, left : left + w]
                region[:] = self._sample_noise(region.shape, rng, rng.indices[row]) if self.mode == "noise" else 0
        return out

    def _sample_box(self, height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int] | None:
        low, high = (math.log(r) for r in self.ratio)
        for attempt in range(crops.MAX_CROP_ATTEMPTS):
            area = height * width * (self.area[0] + (self.area[1] - self.area[0]) * draws[2 + 2 * attempt])
            ratio = math.exp(low + (high - low) * draws[3 + 2 * attempt])
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < h < height and 0 < w < width:
                return int(draws[0] * (height - h + 1)), int(draws[1] * (width - w + 1)), h, w
        return None

    def _sample_noise(self, shape: tuple[int, ...], rng: BatchRandom, index: int) -> Tensor:
        """Sample sums of four random bytes, scaled: approximately normal, at a quarter of the cost."""
        count = math.prod(shape)
        bits = random_bits(rng.seed, rng.epoch, np.array([index]), (count + 1) // 2, rng.stream + SUBSTREAM_OFFSET)
        sums = bits.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.int32)[:count]
        spread = 0.225 * 255 / math.sqrt(4 * (256**2 - 1) / 12)
        values = 0.45 * 255 + (sums - 510) * spread
        return torch.from_numpy(values.round().clip(0, 255).astype(np.uint8).reshape(shape))


@dataclass(frozen=True)
class ThreeAugment(Photometric):
    """One of grey, solarise and blur, then colour jitter (Touvron et al. 2022, DeiT III)."""

    jitter: float = 0.3

    def __post_init__(self) -> None:
        check_limits("3-Augment", self, jitter=10)

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        choice = int(3 * rng.uniform_at(0))
        if choice == 0:
            pixels = operations.convert_to_grey(pixels)
        elif choice == 1:
            pixels = operations.solarise(pixels, 128)
        else:
            pixels = operations.blur_image(pixels, 0.1 + 1.9 * rng.uniform_at(1))
        jitter = ColourJitter(self.jitter, self.jitter, self.jitter)
        return jitter.apply(pixels, rng.with_stream(rng.stream + SUBSTREAM_OFFSET))


GeometricSlot = Flip | PadCrop | Warp | Rotate
ChangeSlot = GeometricSlot | ColourJitter | RandomErasing | RandAugment | ThreeAugment | Blur | Grey | Solarise
AugmentSlot = RandomResizedCrop | SimpleCrop | ScaleJitter | Fit | ChangeSlot | SpectrogramSlot | UserTransform

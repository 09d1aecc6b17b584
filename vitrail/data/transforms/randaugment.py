"""RandAugment (Cubuk et al. 2020)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.data.preprocessing import ImageSize
from vitrail.data.rng import BatchRandom, SampleRandom
from vitrail.data.transforms import operations
from vitrail.data.transforms.crops import check_limits
from vitrail.data.transforms.operations import (
    AffineMatrix,
    apply_affine,
    identity_matrices,
    move_mask,
    relative_matrix,
    rotation_matrix,
)

OPERATIONS = ("autocontrast", "equalise", "invert", "rotate", "posterise", "solarise", "solarise-add", "colour")
OPERATIONS += ("contrast", "brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y")


@dataclass(frozen=True)
class RandAugment:
    """`layers` random operations out of fifteen, all of one magnitude (Cubuk et al. 2020), with timm's scales.

    Magnitude 10 is the end of the paper's ranges; higher values extrapolate. Each layer is applied with probability `rate`:
    0.5 in timm, 1 in the paper and big_vision. With `spread`, the magnitude is normal with that deviation. With `increasing`,
    every operation grows with the magnitude; without, posterise and solarise weaken with it, and colour, contrast,
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
        check_limits("RandAugment", self, layers=20, magnitude=30, spread=30, rate=1, fill=255)
        if self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise ValueError(f"unknown interpolation {self.interpolation!r}: use nearest, bilinear or bicubic")

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        for operation, level, sign in self.sample_operations(rng):
            pixels = self.apply_operation(pixels, operation, level, sign)
        return pixels

    def sample_operations(self, rng: SampleRandom) -> Iterator[tuple[str, float, int]]:
        """Yield the operations of an image in order, each with its level and sign."""
        for layer in range(self.layers):
            kind, applied, sign, u1, u2 = (rng.uniform_at(5 * layer + position) for position in range(5))
            if applied < self.rate:
                magnitude = self.magnitude
                if self.spread:
                    normal = math.sqrt(-2 * math.log(1 - u1)) * math.cos(2 * math.pi * u2)  # Box-Muller
                    magnitude = min(max(magnitude + self.spread * normal, 0.0), max(10.0, self.magnitude))
                yield OPERATIONS[int(kind * len(OPERATIONS))], magnitude / 10, 1 if sign < 0.5 else -1

    def affine_matrices(self, size: ImageSize, rng: BatchRandom) -> np.ndarray:
        """Return the matrices from output to input positions, [B, 3, 3]: see `compute_crop_transforms`."""
        matrices = identity_matrices(len(rng.indices))
        for row, sample_rng in enumerate(rng.samples()):
            for matrix in self.sample_matrices(size, sample_rng):
                matrices[row] @= relative_matrix(matrix, size)
        return matrices

    def move_mask(self, mask: Tensor, rng: SampleRandom) -> Tensor:
        """Move the mask, uint8 [H, W], by the geometric operations in turn; outside is IGNORED."""
        for matrix in self.sample_matrices((mask.shape[0], mask.shape[1]), rng):
            mask = move_mask(mask, matrix)
        return mask

    def sample_matrices(self, size: ImageSize, rng: SampleRandom) -> Iterator[AffineMatrix]:
        """Yield the matrices of an image's geometric operations in order."""
        for operation in self.sample_operations(rng):
            matrix = self.operation_matrix(*operation, *size)
            if matrix is not None:
                yield matrix

    def apply_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        """Augment a batch; images with the same operation in the same layer are processed together."""
        if self.spread:
            return torch.stack([self.apply(image, each) for image, each in zip(pixels, rng.samples(), strict=True)])
        draws = rng.uniform(5 * self.layers).reshape(len(pixels), self.layers, 5)
        kinds = (draws[..., 0] * len(OPERATIONS)).astype(np.int64) * 2 + (draws[..., 2] >= 0.5)
        kinds[draws[..., 1] >= self.rate] = -1
        out = pixels.clone()
        for layer in range(self.layers):
            for kind in np.unique(kinds[:, layer]).tolist():
                if kind >= 0:
                    rows = torch.from_numpy(np.flatnonzero(kinds[:, layer] == kind))
                    sign = -1 if kind % 2 else 1
                    out[rows] = self.apply_operation(out[rows], OPERATIONS[kind // 2], self.magnitude / 10, sign)
        return out

    def apply_operation(self, pixels: Tensor, operation: str, level: float, sign: int) -> Tensor:
        """Apply one operation at a level (1 is magnitude 10), in the direction of `sign` if it has one."""
        factor = max(0.1, 1 + sign * 0.9 * level) if self.increasing else 0.1 + 1.8 * level
        match operation:
            case "autocontrast" | "equalise" | "invert":
                return getattr(operations, operation)(pixels)
            case "posterise":
                kept = 4 - int(4 * level) if self.increasing else int(4 * level)
                return operations.posterise(pixels, max(1, kept))  # 0 bits would give a black image
            case "solarise":
                threshold = min(256, int(256 * level))
                return operations.solarise(pixels, 256 - threshold if self.increasing else threshold)
            case "solarise-add":
                return operations.solarise_add(pixels, min(128, int(110 * level)))
            case "colour":
                return operations.adjust_saturation(pixels, factor)
            case "contrast" | "brightness" | "sharpness":
                return getattr(operations, f"adjust_{operation}")(pixels, factor)
            case _:
                matrix = self.operation_matrix(operation, level, sign, *pixels.shape[-2:])
                assert matrix is not None
                return apply_affine(pixels, matrix, self.interpolation, self.fill)

    def operation_matrix(self, operation: str, level: float, sign: int, height: int, width: int) -> AffineMatrix | None:
        """Return the affine matrix of a geometric operation, or None for a colour operation."""
        matrices: dict[str, AffineMatrix] = {
            "rotate": rotation_matrix(sign * 30 * level, height, width),
            "shear-x": (1, sign * 0.3 * level, 0, 0, 1, 0),
            "shear-y": (1, 0, 0, sign * 0.3 * level, 1, 0),
            "translate-x": (1, 0, sign * 0.45 * level * width, 0, 1, 0),
            "translate-y": (1, 0, 0, 0, 1, sign * 0.45 * level * height),
        }
        return matrices.get(operation)

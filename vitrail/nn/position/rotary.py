"""Rotary positions: queries and keys rotated by the row and the column of their patch, of clips also by its step in time.

The product q·k then depends on the offset between two patches only. N patches, T tokens, d the width of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.nn.position.added import Learned1D
from vitrail.nn.position.base import (
    LayerPosition,
    Position,
    PositionEmbedding,
    Rotation,
    check_width,
    resampling_field,
)
from vitrail.nn.resampling import Resampling
from vitrail.nn.shape import EncoderShape, Grid

PERIOD_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RotaryEmbedding(PositionEmbedding):
    """Rotation of the value pairs of q and k by angles that subclasses compute. Prefix tokens are not rotated."""

    halves: ClassVar[bool] = False  # value i is paired with value i + d/2, otherwise with its neighbour

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__(shape)
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor

    def compute_angles(self, grid: Grid) -> tuple[Tensor, ...]:
        """Return the angles along each axis: of an image, of every row, [h, d/4], and of every column, [w, d/4]."""
        raise NotImplementedError

    def order_angles(self, *angles: Tensor) -> tuple[Tensor, ...]:
        """Return the angles along each axis in the order of the pairs that they rotate: rows first."""
        return angles

    def layer_positions(self, grid: Grid, keep: Tensor | None) -> Iterator[LayerPosition]:
        yield from repeat(LayerPosition(rotation=self.compute_rotation(grid, keep)), self.shape.depth)

    def compute_rotation(self, grid: Grid, keep: Tensor | None) -> Rotation:
        last = len(grid) - 1
        places = [(*[None] * axis, slice(None), *[None] * (last - axis)) for axis in range(len(grid))]
        spread = [
            angle[place].expand(*grid, -1) for angle, place in zip(self.compute_angles(grid), places, strict=True)
        ]
        angle = torch.cat(self.order_angles(*spread), -1).flatten(0, last).unsqueeze(0)  # [1, N, d/2]
        if keep is not None:
            angle = F.embedding(keep, angle[0])
        angle = F.pad(angle, (0, 0, self.shape.prefix, 0)).unsqueeze(1)  # [1 or B, 1, T, d/2]
        cosine, sine = angle.cos().to(self._like.dtype), angle.sin().to(self._like.dtype)
        if self.halves:
            return Rotation(torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1), True)
        return Rotation(cosine.repeat_interleave(2, -1), torch.stack((-sine, sine), -1).flatten(-2), False)

    def arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self._like.device, dtype=torch.float32)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (a, b) of the last dimension to (a cos - b sin, b cos + a sin)."""
    if rotation.halves:
        a, b = x.chunk(2, -1)
        crossed = torch.cat((b, a), -1)
    else:
        crossed = torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return torch.addcmul(x * rotation.cosine, crossed, rotation.sine)


class AxialRotation(RotaryEmbedding):
    """Angles that grow with the number of the row and of the column; columns first ("RoPE axial", Heo et al. 2024)."""

    def __init__(self, shape: EncoderShape, theta: float) -> None:
        super().__init__(shape)
        self.theta = theta

    def compute_angles(self, grid: Grid) -> tuple[Tensor, Tensor]:
        d = self.shape.head_width
        omega = self.theta ** -(self.arange(d // 4) * 4 / d)  # [d/4]
        return self.arange(grid[0])[:, None] * omega, self.arange(grid[1])[:, None] * omega

    def order_angles(self, *angles: Tensor) -> tuple[Tensor, ...]:
        return angles[::-1]


class ClipRotation(RotaryEmbedding):
    """Angles that grow with the step in time, the row and the column, for ⌊d/6⌋ pairs each; further pairs are not rotated
    (as in V-JEPA 2, Assran et al. 2025)."""

    def __init__(self, shape: EncoderShape, theta: float) -> None:
        super().__init__(shape)
        self.theta = theta

    def compute_angles(self, grid: Grid) -> tuple[Tensor, ...]:
        pairs = self.shape.head_width // 6
        omega = self.theta ** -(self.arange(pairs) / pairs)
        return tuple(self.arange(side)[:, None] * omega for side in grid)

    def order_angles(self, *angles: Tensor) -> tuple[Tensor, ...]:
        rest = self.shape.head_width // 2 - 3 * (self.shape.head_width // 6)
        return (*angles, angles[0].new_zeros(*angles[0].shape[:-1], rest))


class NormalisedRotation(RotaryEmbedding):
    """Angles of the patches' centres in coordinates from -1 to 1, whatever the image size (DINOv3, Siméoni et al. 2025)."""

    halves = True

    def __init__(self, shape: EncoderShape, periods: tuple[float, ...]) -> None:
        super().__init__(shape)
        self.periods = periods

    def compute_angles(self, grid: Grid) -> tuple[Tensor, Tensor]:
        periods = torch.tensor(self.periods, device=self._like.device)  # [d/4]
        rows, columns = ((self.arange(side) + 0.5) / side * 2 - 1 for side in grid)
        return 2 * math.pi * rows[:, None] / periods, 2 * math.pi * columns[:, None] / periods


class ReferenceRotation(RotaryEmbedding):
    """A learned table at the stem, and angles by the place in a reference grid that every image is stretched to (EVA-02)."""

    def __init__(self, shape: EncoderShape, theta: float, reference: int, learned: PositionEmbedding) -> None:
        super().__init__(shape)
        self.theta, self.reference, self.learned = theta, reference, learned

    def stem_embedding(self, grid: Grid, keep: Tensor | None) -> Tensor | None:
        return self.learned.stem_embedding(grid, keep)

    def compute_angles(self, grid: Grid) -> tuple[Tensor, Tensor]:
        d = self.shape.head_width
        omega = self.theta ** -(self.arange(d // 4) * 4 / d)  # [d/4]
        rows, columns = (self.arange(side) / side * self.reference for side in grid)
        return rows[:, None] * omega, columns[:, None] * omega


@dataclass(frozen=True)
class Rotary2D(Position):
    """Queries and keys rotated by row and column, in every layer."""

    theta: float = 100.0

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("2-D rotary", shape.head_width, 4, "head width")
        return AxialRotation(shape, self.theta)


@dataclass(frozen=True)
class Rotary3D(Position):
    """Queries and keys of clips rotated by step in time, row and column, in every layer."""

    axes: ClassVar[tuple[int, ...]] = (3,)
    theta: float = 10_000.0

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("3-D rotary", shape.head_width, 2, "head width")
        if shape.head_width < 6:
            raise ValueError(f"3-D rotary positions need a head width of at least 6, got {shape.head_width}")
        return ClipRotation(shape, self.theta)


@dataclass(frozen=True)
class RotaryDINOv3(Position):
    """DINOv3's rotation by normalised coordinates. `precision` is that of the periods: Meta's release has them rounded to
    bfloat16; timm and transformers compute them in float32."""

    theta: float = 100.0
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.precision not in PERIOD_DTYPES:
            raise ValueError(f"precision of the periods must be float32 or bfloat16, got {self.precision!r}")

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("2-D rotary", shape.head_width, 4, "head width")
        return NormalisedRotation(shape, self.compute_periods(shape.head_width))

    def compute_periods(self, head_width: int) -> tuple[float, ...]:
        """Return the periods of the d/4 frequencies, in units of half an image side."""
        exponents = torch.arange(head_width // 4, device="cpu", dtype=torch.float32) * 4 / head_width
        periods = (self.theta**exponents).to(PERIOD_DTYPES[self.precision])
        return tuple(periods.tolist())


@dataclass(frozen=True)
class RotaryEVA02(Position):
    """EVA-02's learned table at the stem and rotation in every layer, in the coordinates of a grid of `reference`²."""

    theta: float = 10_000.0
    reference: int = 16
    resampling: Resampling = resampling_field()

    def build(self, shape: EncoderShape) -> PositionEmbedding:
        check_width("2-D rotary", shape.head_width, 4, "head width")
        return ReferenceRotation(shape, self.theta, self.reference, self.learned.build(shape))

    @property
    def learned(self) -> Learned1D:
        """Return the slot of the table."""
        return Learned1D(resampling=self.resampling)

    def resize_tensors(self, tensors: dict[str, Tensor], shape: EncoderShape, grid: Grid) -> dict[str, Tensor]:
        resized = self.learned.resize_tensors({"weight": tensors["learned.weight"]}, shape, grid)
        return {"learned.weight": resized["weight"]}

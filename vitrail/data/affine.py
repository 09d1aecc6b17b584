"""Turning, shearing and shifting: every pixel comes from where a matrix says, by Pillow's arithmetic.

A shear or a shift moves rows, or columns, along themselves, so it needs neighbours on one line only: four products for a
pixel in place of Pillow's sixteen, and all pixels at once. What is left, rotation, is Pillow's own.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.preprocessing import FILTERS

# From where a pixel comes: x' = a x + b y + c, y' = d x + e y + f.
Matrix = tuple[float, float, float, float, float, float]
BARELY = 2e-4  # what single precision may lack of a whole number, before the rest is cut off


def unmoved(count: int) -> np.ndarray:
    """So many matrices by which every point comes from where it is, [n, 3, 3]."""
    return np.tile(np.eye(3), (count, 1, 1))


def affine(pixels: Tensor, matrix: Matrix, interpolation: str, fill: int) -> Tensor:
    """uint8 [..., C, H, W] from where the matrix says; from outside comes the fill."""
    a, b, c, d, e, f = matrix
    if interpolation != "nearest" and a == e == 1:
        planes = pixels.flatten(0, -3)
        if d == f == 0:
            return along_rows(planes, b, c, interpolation, fill).view(pixels.shape)
        if b == c == 0:
            flipped = along_rows(planes.transpose(1, 2).contiguous(), d, f, interpolation, fill)
            return flipped.transpose(1, 2).contiguous().view(pixels.shape)
    if pixels.ndim == 4:
        return torch.stack([affine(each, matrix, interpolation, fill) for each in pixels])
    image = Image.fromarray(_channels_last(pixels))
    filling = fill if pixels.shape[0] == 1 else (fill,) * pixels.shape[0]
    size, affinely = (pixels.shape[2], pixels.shape[1]), Image.Transform.AFFINE
    moved = np.array(image.transform(size, affinely, matrix, FILTERS[interpolation], fillcolor=filling))
    return torch.from_numpy(moved if moved.ndim == 3 else moved[..., None]).permute(2, 0, 1).contiguous()


def along_rows(pixels: Tensor, slope: float, shift: float, interpolation: str, fill: int) -> Tensor:
    """Each row y of [C, H, W] moved along itself by slope · y + shift."""
    channels, height, width = pixels.shape
    offsets = slope * (np.arange(height) + 0.5) + shift  # [H]
    whole = np.floor(offsets).astype(np.int64)
    part = torch.from_numpy(offsets - whole).float()[:, None]  # [H, 1]
    canvas = np.empty(
        (channels, height, width + 3), dtype=np.uint8
    )  # each row from one neighbour before it to two after
    source = pixels.numpy()
    for top, bottom, begin in runs(whole):
        first = begin - 1
        left, right = min(max(0, -first), width + 3), max(min(width + 3, width - first), 0)
        rows = source[:, top:bottom]
        if left < right:
            canvas[:, top:bottom, left:right] = rows[..., left + first : right + first]
        canvas[:, top:bottom, :left] = rows[..., :1]
        canvas[:, top:bottom, max(left, right) :] = rows[..., -1:]
    near = torch.from_numpy(canvas).float()
    if interpolation == "bilinear":
        out = near[..., 1 : width + 1] * (1 - part)
        out.addcmul_(near[..., 2 : width + 2], part)
    else:  # Keys' cubic convolution with a = -1
        square, cube = part * part, part * part * part
        out = near[..., :width] * (2 * square - part - cube)
        out.addcmul_(near[..., 1 : width + 1], 1 - 2 * square + cube)
        out.addcmul_(near[..., 2 : width + 2], part + square - cube)
        out.addcmul_(near[..., 3 : width + 3], cube - square)
    out = out.add_(BARELY).clamp_(0, 255).to(torch.uint8)
    for top, bottom, nearest in runs(np.floor(offsets + 0.5).astype(np.int64)):  # pixels whose centre is outside
        if nearest:
            outside = slice(0, -nearest) if nearest < 0 else slice(max(0, width - nearest), width)
            out[:, top:bottom, outside] = fill
    return out


def runs(values: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Where equal values begin and end, and the value."""
    begins = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    yield from zip(begins[:-1], begins[1:], values[begins[:-1]].tolist(), strict=True)


def rotation(degrees: float, height: int, width: int) -> Matrix:
    """Counter-clockwise around the middle."""
    angle = -math.radians(degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


def _channels_last(pixels: Tensor) -> np.ndarray:
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    return array[..., 0] if array.shape[-1] == 1 else array

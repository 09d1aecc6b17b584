"""From an opened picture to the pixels of a crop, decoding no more than the crop needs.

A JPEG can be decoded at a half, a quarter or an eighth of its size for little more than the price of reading its bits. The
crop is chosen from the header alone; then the file is decoded at the smallest scale at which the crop still has as many
pixels as are wanted of it. Where a camera was held upright, the crop is meant in the turned picture and cut from the stored one.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.data.preprocessing import FILTERS, Pair, plain

# What can be wrong with a picture, once `opening.named` has sorted it.
UNREADABLE = (OSError, ValueError, MemoryError, Image.DecompressionBombError)
ORIENTATION = 0x0112  # EXIF's tag
REDUCTIONS = (8, 4, 2)


@dataclass(frozen=True)
class Box:
    """A part of a picture in whole pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Decoded:
    """A picture in memory, as it was stored: pixels uint8 [H, W, C], and how it is to be turned."""

    pixels: Tensor
    orientation: int = 1

    @property
    def stored(self) -> Pair:
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def size(self) -> Pair:
        """Height and width when turned."""
        return turned(self.stored, self.orientation)

    def part(self, box: Box, size: Pair) -> tuple[Tensor, Box]:
        return self.pixels, box


@dataclass(frozen=True)
class Reduced(Decoded):
    """A picture in memory that was decoded at a smaller scale, for crops that are meant in the whole one."""

    whole: Pair = (0, 0)  # height and width at full scale, as stored
    scale: int = 1

    @property
    def stored(self) -> Pair:
        return self.whole

    def part(self, box: Box, size: Pair) -> tuple[Tensor, Box]:
        frame = (self.pixels.shape[0], self.pixels.shape[1])
        return self.pixels, reduced(box, self.scale, frame, size)


@dataclass(frozen=True)
class Opened:
    """A picture of which only the header is read, so that a JPEG can be decoded at the scale that a crop needs."""

    image: Image.Image
    channels: int
    orientation: int = 1

    @property
    def stored(self) -> Pair:
        return self.image.height, self.image.width

    @property
    def size(self) -> Pair:
        """Height and width when turned."""
        return turned(self.stored, self.orientation)

    def decoded(self) -> Decoded:
        """All of it."""
        return Decoded(as_tensor(plain(self.image, self.channels)), self.orientation)

    def reduced_for(self, parts: list[tuple[Box, Pair]]) -> Decoded:
        """All of it, decoded once, no larger than is needed for the most demanding of several crops and their sizes."""
        stored, image = self.stored, self.image
        scale = min(
            self.reduction(stored_box(box, stored, self.orientation), turned(size, self.orientation))
            for box, size in parts
        )
        if scale == 1:
            return self.decoded()
        image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))
        return Reduced(as_tensor(plain(image, self.channels)), self.orientation, stored, scale)

    def part(self, box: Box, size: Pair) -> tuple[Tensor, Box]:
        """Pixels [H, W, C] that hold at least the box, and where it is in them. Both are in the stored frame."""
        image, scale = self.image, self.reduction(box, size)
        if scale > 1:
            image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))
            box = reduced(box, scale, (image.height, image.width), size)
        image = plain(image, self.channels)
        return as_tensor(image.crop((box.left, box.top, box.left + box.width, box.top + box.height))), Box(
            0, 0, box.height, box.width
        )

    def reduction(self, box: Box, size: Pair) -> int:
        """How many times smaller the file can be decoded, with a crop that is not smaller than the size wanted."""
        if not reducible(self.image):
            return 1
        fits = (s for s in REDUCTIONS if box.height // s >= size[0] and box.width // s >= size[1])
        return next(fits, 1)


def opened(image: Image.Image, channels: int, turn: bool) -> Opened:
    """A picture that a store has opened."""
    if not image.height or not image.width:
        raise ValueError(f"a picture of {image.width}×{image.height} pixels")
    return Opened(image, channels, orientation(image) if turn else 1)


def orientation(image: Image.Image) -> int:
    """How the camera was held, as EXIF counts it: 1 is upright, and so is what makes no sense."""
    if "exif" not in image.info and image.format in ("JPEG", "MPO", "PNG", "WEBP", None):
        return 1
    value = image.getexif().get(ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def reducible(image: Image.Image) -> bool:
    """Whether this file can be decoded at a smaller scale: it is a JPEG and has not been decoded yet."""
    return image.format in ("JPEG", "MPO") and bool(getattr(image, "tile", None))


def turned(size: Pair, orientation: int) -> Pair:
    """Height and width after turning."""
    return (size[1], size[0]) if orientation >= 5 else size


# Turning is mirroring the stored rows, the stored columns, or both, and then, from 5 on, letting them change places.
_ROWS, _COLUMNS = (3, 4, 6, 7), (2, 3, 7, 8)


def stored_box(box: Box, stored: Pair, orientation: int) -> Box:
    """Where a box of the turned picture is in the stored one."""
    if orientation >= 5:
        box = Box(box.left, box.top, box.width, box.height)
    top = stored[0] - box.top - box.height if orientation in _ROWS else box.top
    left = stored[1] - box.left - box.width if orientation in _COLUMNS else box.left
    return Box(top, left, box.height, box.width)


def turn(pixels: Tensor, orientation: int) -> Tensor:
    """Stored pixels [C, h, w] as they are to be seen."""
    mirrored = [axis for axis, which in ((1, _ROWS), (2, _COLUMNS)) if orientation in which]
    pixels = pixels.flip(mirrored) if mirrored else pixels
    return pixels.transpose(1, 2) if orientation >= 5 else pixels


def reduced(box: Box, scale: int, frame: Pair, size: Pair) -> Box:
    """The box in a frame that was decoded so many times smaller, in whole pixels and never smaller than the size."""
    height = min(frame[0], max(size[0], round(box.height / scale)))
    width = min(frame[1], max(size[1], round(box.width / scale)))
    top, left = min(round(box.top / scale), frame[0] - height), min(round(box.left / scale), frame[1] - width)
    return Box(top, left, height, width)


def cut(source: Opened | Decoded, box: Box, size: Pair, interpolation: str) -> Tensor:
    """The box of the turned picture at this size, uint8 [C, h, w]."""
    stored_size = turned(size, source.orientation)
    pixels, inside = source.part(stored_box(box, source.stored, source.orientation), stored_size)
    pixels = pixels[inside.top : inside.top + inside.height, inside.left : inside.left + inside.width]
    resized = resize(pixels, stored_size, interpolation)
    return resized if source.orientation == 1 else turn(resized, source.orientation).contiguous()


def resize(pixels: Tensor, size: Pair, interpolation: str) -> Tensor:
    """uint8 [..., H, W, C] to uint8 [..., C, h, w], averaging what it shrinks.

    torch's kernels for bytes do what Pillow's do, to 1 of 255 mostly, several times faster.
    """
    first = pixels.movedim(-1, -3)
    if tuple(first.shape[-2:]) == tuple(size):
        return first.contiguous()
    if interpolation in ("bilinear", "bicubic"):
        images = first if first.ndim == 4 else first.unsqueeze(0)
        resized = F.interpolate(images, size=size, mode=interpolation, antialias=True)
        return (resized if first.ndim == 4 else resized[0]).contiguous()
    if pixels.ndim == 4:
        return torch.stack([resize(each, size, interpolation) for each in pixels])
    array = pixels[..., 0].numpy() if pixels.shape[2] == 1 else np.ascontiguousarray(pixels.numpy())
    image = Image.fromarray(array).resize((size[1], size[0]), FILTERS[interpolation])
    return as_tensor(image).permute(2, 0, 1).contiguous()


def as_tensor(image: Image.Image) -> Tensor:
    """A grey, RGB or RGBA picture as uint8 [H, W, C]."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(image.getbands()))

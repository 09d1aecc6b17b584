"""Decode images to uint8 tensors, no larger than the crop needs.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size at little cost. The crop is chosen from the header; then the file is
decoded at the smallest scale at which the crop has as many pixels as wanted. With an EXIF orientation, the crop is defined
in the upright image and cut from the stored one. The mask of an image is cut with it, and becomes the last channel.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError, features
from torch import Tensor

from vitrail.data.preprocessing import FILTERS, PIL_MODES, ImageSize, convert_image, resize_mask

# Accepted formats and suffixes. Other formats that Pillow opens are excluded: some start external programs.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "BMP": (".bmp", ".dib"),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k", ".jpf", ".jpx"),
}
IMAGE_SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)

# Exceptions that Pillow's decoders raise on corrupt files.
DECODER_ERRORS = (SyntaxError, struct.error, zlib.error, EOFError, IndexError, KeyError, TypeError, AttributeError)
DECODER_ERRORS += (OverflowError, ZeroDivisionError, NotImplementedError, RuntimeError, AssertionError)
# Errors of an image inside `name_image_errors`.
IMAGE_ERRORS = (OSError, ValueError, MemoryError, Image.DecompressionBombError)
EXIF_ORIENTATION = 0x0112  # EXIF tag
DRAFT_SCALES = (8, 4, 2)


@cache
def supported_formats() -> tuple[str, ...]:
    """Return the accepted formats that this build of Pillow supports."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def name_image_errors(name: str, formats: Sequence[str] = tuple(FORMATS)) -> Iterator[None]:
    """Convert decoding errors to an OSError, ValueError or DecompressionBombError that names the image."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise Image.DecompressionBombError(f"{name}: too large to decode safely ({error})") from None
    except UnidentifiedImageError as error:
        if str(error).startswith(name):  # named before: the frame of a video
            raise
        raise UnidentifiedImageError(f"{name}: not an image, or none of {', '.join(formats)}") from None
    except OSError as error:
        if error.strerror:  # keeps errno, so that a missing file stays a FileNotFoundError
            raise OSError(error.errno, error.strerror, name) from None
        if name in str(error):
            raise
        raise OSError(f"{name}: {error}") from None
    except ValueError as error:
        raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from None
    except DECODER_ERRORS as error:
        raise OSError(f"{name}: broken ({type(error).__name__}: {error})") from error


def open_image(source: str | BinaryIO, name: str, formats: Sequence[str] = tuple(FORMATS)) -> Image.Image:
    """Open an image of one of these formats and read only its header."""
    with name_image_errors(name, formats):
        return Image.open(source, formats=[each for each in supported_formats() if each in formats])


def format_image_error(error: BaseException, name: str) -> str:
    """Return the error in one line without the image's name."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix(f"{name}: ")


@dataclass(frozen=True)
class Box:
    """A rectangle in whole pixels."""

    top: int
    left: int
    height: int
    width: int

    def enlarge(self, scale: int) -> "Box":
        """Return the box in an image that is `scale` times as large."""
        return Box(scale * self.top, scale * self.left, scale * self.height, scale * self.width)


class ImageSource:
    """Base of images in memory and in files: the stored size, the EXIF orientation, and the mask if there is one."""

    orientation: int
    mask: np.ndarray | None  # uint8 [H, W], as the image is stored

    @property
    def stored_size(self) -> ImageSize:
        raise NotImplementedError

    @property
    def size(self) -> ImageSize:
        """Return the upright height and width."""
        return orient_size(self.stored_size, self.orientation)


@dataclass(frozen=True)
class DecodedImage(ImageSource):
    """An image in memory: stored pixels uint8 [H, W, C], the EXIF orientation, and the scale if it is reduced.

    Boxes refer to the full scale, of which `full_size` is the stored height and width.
    """

    pixels: Tensor
    orientation: int = 1
    full_size: ImageSize | None = None
    scale: int = 1
    mask: np.ndarray | None = None

    @property
    def stored_size(self) -> ImageSize:
        return self.full_size or (self.pixels.shape[0], self.pixels.shape[1])

    def read_region(self, box: Box, size: ImageSize) -> tuple[Tensor, Box]:
        """Return the pixels [h, w, C] of the box, and the box that they show, both as stored."""
        frame = (self.pixels.shape[0], self.pixels.shape[1])
        inside = box if self.scale == 1 else scale_box(box, self.scale, frame, size)
        pixels = self.pixels[inside.top : inside.top + inside.height, inside.left : inside.left + inside.width]
        return pixels, inside.enlarge(self.scale)


@dataclass(frozen=True)
class LazyImage(ImageSource):
    """An image of which only the header is read, so that a JPEG can be decoded at the scale a crop needs."""

    image: Image.Image
    channels: int
    orientation: int = 1
    mask: np.ndarray | None = None

    @property
    def stored_size(self) -> ImageSize:
        return self.image.height, self.image.width

    def decode(self) -> DecodedImage:
        """Decode the whole image."""
        pixels = decode_plain_jpeg(self.image, self.channels)
        if pixels is None:
            pixels = image_to_tensor(convert_image(self.image, self.channels))
        return DecodedImage(pixels, self.orientation, mask=self.mask)

    def decode_for_crops(self, crops: list[tuple[Box, ImageSize]]) -> DecodedImage:
        """Decode the image once, at the smallest scale that suffices for all (box, size) crops."""
        stored, turn = self.stored_size, self.orientation
        stored_crops = ((to_stored_box(box, stored, turn), orient_size(size, turn)) for box, size in crops)
        scale = min(self.find_draft_scale(box, size) for box, size in stored_crops)
        self.reduce(scale)
        return DecodedImage(self.decode().pixels, turn, stored, scale)

    def reduce(self, scale: int) -> None:
        """Set the scale divisor at which the file is decoded."""
        if scale > 1:
            self.image.draft(None, (max(1, self.image.width // scale), max(1, self.image.height // scale)))

    def read_region(self, box: Box, size: ImageSize) -> tuple[Tensor, Box]:
        """Return the pixels [h, w, C] of the box, and the box that they show, both as stored.

        At a reduced scale, the box is rounded to whole pixels of that scale.
        """
        scale = self.find_draft_scale(box, size)
        self.reduce(scale)
        if scale > 1:
            box = scale_box(box, scale, self.stored_size, size)
        pixels = decode_plain_jpeg(self.image, self.channels)
        if pixels is not None:
            region = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        else:
            image = convert_image(self.image, self.channels)
            region = image_to_tensor(image.crop((box.left, box.top, box.left + box.width, box.top + box.height)))
        return region, box.enlarge(scale)

    def find_draft_scale(self, box: Box, size: ImageSize) -> int:
        """Return the largest scale divisor at which the crop has at least the wanted size."""
        if not is_reducible(self.image):
            return 1
        fits = (s for s in DRAFT_SCALES if box.height // s >= size[0] and box.width // s >= size[1])
        return next(fits, 1)


@cache
def find_simplejpeg() -> Any:
    """Return the module simplejpeg if it is installed and Pillow has the same decoder, libjpeg-turbo; else None."""
    try:
        import simplejpeg  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return simplejpeg if features.check_feature("libjpeg_turbo") else None


def decode_plain_jpeg(image: Image.Image, channels: int) -> Tensor | None:
    """Decode an opened JPEG with simplejpeg, uint8 [H, W, C], to the pixels that Pillow gives.

    Return None where Pillow has to decode: other formats, colour spaces and scales, and files with any flaw, so that Pillow
    decides which of them are readable.
    """
    simplejpeg, file = find_simplejpeg(), getattr(image, "fp", None)
    if simplejpeg is None or file is None or image.format != "JPEG" or not is_reducible(image):
        return None
    if image.mode != PIL_MODES.get(channels) or getattr(image, "decoderconfig", None):  # a reduced scale is set
        return None
    file.seek(0)
    data = file.read()
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if (width, height) != image.size or (space, channels) not in (("YCbCr", 3), ("Gray", 1)):
            return None
        return torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB" if channels == 3 else "GRAY"))
    except ValueError:
        return None


def start_decoding(image: Image.Image, channels: int, turn: bool, mask: np.ndarray | None = None) -> LazyImage:
    """Wrap an opened image, with the mask of the upright image, uint8 [H, W]."""
    if not image.height or not image.width:
        raise ValueError(f"empty image: {image.width}×{image.height} pixels")
    if not turn and mask is None:
        return LazyImage(image, channels)
    orientation = read_orientation(image)
    if mask is not None:
        mask = to_stored_mask(mask, (image.height, image.width), orientation)
    return LazyImage(image, channels, orientation if turn else 1, mask)


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 (upright) if it is missing or invalid."""
    if "exif" not in image.info and image.format in ("JPEG", "MPO", "PNG", "WEBP", None):
        return 1
    value = image.getexif().get(EXIF_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def is_reducible(image: Image.Image) -> bool:
    """Return True if the file can be decoded at a reduced scale: a JPEG that is not decoded yet."""
    return image.format in ("JPEG", "MPO") and bool(getattr(image, "tile", None))


def orient_size(size: ImageSize, orientation: int) -> ImageSize:
    """Return the height and width after applying the EXIF orientation."""
    return (size[1], size[0]) if orientation >= 5 else size


# An orientation flips the stored rows, the stored columns or both; from 5 on it also transposes.
_FLIPPED_ROWS, _FLIPPED_COLUMNS = (3, 4, 6, 7), (2, 3, 7, 8)


def to_stored_box(box: Box, stored_size: ImageSize, orientation: int) -> Box:
    """Convert a box of the upright image to the stored image."""
    if orientation >= 5:
        box = Box(box.left, box.top, box.width, box.height)
    top = stored_size[0] - box.top - box.height if orientation in _FLIPPED_ROWS else box.top
    left = stored_size[1] - box.left - box.width if orientation in _FLIPPED_COLUMNS else box.left
    return Box(top, left, box.height, box.width)


def orient_pixels(pixels: Tensor, orientation: int) -> Tensor:
    """Apply the EXIF orientation to stored pixels [C, h, w]."""
    flipped = [axis for axis, values in ((1, _FLIPPED_ROWS), (2, _FLIPPED_COLUMNS)) if orientation in values]
    pixels = pixels.flip(flipped) if flipped else pixels
    return pixels.transpose(1, 2) if orientation >= 5 else pixels


def to_stored_mask(mask: np.ndarray, stored_size: ImageSize, orientation: int) -> np.ndarray:
    """Convert the mask of the upright image to the stored image; raise ValueError if it has another size."""
    if mask.shape != orient_size(stored_size, orientation):
        got, want = (f"{w}×{h}" for h, w in (mask.shape, orient_size(stored_size, orientation)))
        raise ValueError(f"its mask has {got} pixels, the image {want}: both must have the same size")
    mask = mask.T if orientation >= 5 else mask
    mask = mask[::-1] if orientation in _FLIPPED_ROWS else mask
    return mask[:, ::-1] if orientation in _FLIPPED_COLUMNS else mask


def scale_box(box: Box, scale: int, frame: ImageSize, size: ImageSize) -> Box:
    """Convert a box to a frame decoded at 1/scale, in whole pixels and at least as large as `size`."""
    height = min(frame[0], max(size[0], round(box.height / scale)))
    width = min(frame[1], max(size[1], round(box.width / scale)))
    top, left = min(round(box.top / scale), frame[0] - height), min(round(box.left / scale), frame[1] - width)
    return Box(top, left, height, width)


def crop_and_resize(source: LazyImage | DecodedImage, box: Box, size: ImageSize, interpolation: str) -> Tensor:
    """Return the box of the upright image at this size, uint8 [C, h, w]; with a mask, [C + 1, h, w]."""
    stored_size = orient_size(size, source.orientation)
    pixels, shown = source.read_region(to_stored_box(box, source.stored_size, source.orientation), stored_size)
    resized = resize(pixels, stored_size, interpolation)
    if source.mask is not None:
        mask = resize_mask(source.mask, stored_size, (shown.top, shown.left, shown.height, shown.width))
        resized = torch.cat((resized, torch.from_numpy(np.array(mask, order="C"))[None]))
    return resized if source.orientation == 1 else orient_pixels(resized, source.orientation).contiguous()


def resize(pixels: Tensor, size: ImageSize, interpolation: str) -> Tensor:
    """Resize uint8 [..., H, W, C] to uint8 [..., C, h, w] with antialiasing.

    torch's uint8 kernels match Pillow's mostly within 1 of 255 and are several times faster.
    """
    channels_first = pixels.movedim(-1, -3)
    if tuple(channels_first.shape[-2:]) == tuple(size):
        return channels_first.contiguous()
    if interpolation in ("bilinear", "bicubic"):
        images = channels_first if channels_first.ndim == 4 else channels_first.unsqueeze(0)
        resized = F.interpolate(images, size=size, mode=interpolation, antialias=True)
        return (resized if channels_first.ndim == 4 else resized[0]).contiguous()
    if pixels.ndim == 4:
        return torch.stack([resize(image, size, interpolation) for image in pixels])
    array = pixels[..., 0].numpy() if pixels.shape[2] == 1 else np.ascontiguousarray(pixels.numpy())
    image = Image.fromarray(array).resize((size[1], size[0]), FILTERS[interpolation])
    return image_to_tensor(image).permute(2, 0, 1).contiguous()


def image_to_tensor(image: Image.Image) -> Tensor:
    """Convert a grey, RGB or RGBA image to uint8 [H, W, C]."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(image.getbands()))

"""Images as Python values: paths, bytes, PIL images, arrays and tensors, converted to PIL images."""

import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.decode import open_image

ImageLike = str | os.PathLike[str] | bytes | Image.Image | np.ndarray | Tensor
KINDS = "a path, bytes, a PIL image, an array [H, W, C] or a tensor [C, H, W]"
CHANNELS = (1, 3, 4)
CONVERTED_MODES = {"HSV": "RGB", "RGBa": "RGBA", "La": "LA"}  # that TIFF does not hold


class NotAnImageError(ValueError):
    """Raised for a value that stands for no image: another type, shape or range of values."""


def is_image(value: object) -> bool:
    """Return True if the value has a type that stands for one image; shape and content are not checked."""
    return isinstance(value, str | os.PathLike | bytes | Image.Image | np.ndarray | Tensor)


def name_image(value: object) -> str:
    """Return the name of an image in messages: its path, or "the image"."""
    return os.fspath(value) if isinstance(value, str | os.PathLike) else "the image"


def to_image(value: Any, name: str) -> Image.Image:
    """Return the image of a value; of a file or bytes, only the header is decoded.

    Arrays are [H, W] or [H, W, C], tensors [H, W] or [C, H, W]: uint8, 16-bit grey, bool, or floating point from 0 to 1.
    """
    if isinstance(value, Mapping) and {"bytes", "path"} & set(value):  # undecoded images of Hugging Face datasets
        value = value.get("bytes") or value.get("path")
        if value is None:
            raise OSError(f"{name}: the row has no image")
    if isinstance(value, Image.Image):
        return value.copy()  # a caller may close it
    if isinstance(value, str | os.PathLike):
        return open_image(os.path.expanduser(os.fspath(value)), name)
    if isinstance(value, bytes | bytearray):
        return open_image(io.BytesIO(value), name)
    if isinstance(value, Tensor):
        return array_to_image(tensor_to_array(value, name), name)
    if isinstance(value, np.ndarray):
        return array_to_image(value, name)
    raise NotAnImageError(f"{name} is of type {type(value).__name__}: give {KINDS}")


def tensor_to_array(value: Tensor, name: str) -> np.ndarray:
    """Return a tensor [H, W] or [C, H, W] as an array [H, W] or [H, W, C]."""
    pixels = value.detach().cpu()
    if pixels.dtype == torch.bfloat16:
        pixels = pixels.float()
    if pixels.ndim == 3 and pixels.shape[0] in CHANNELS:
        return pixels.permute(1, 2, 0).numpy()
    if pixels.ndim != 2:
        shape = list(pixels.shape)
        raise NotAnImageError(f"{name} has the shape {shape}: a tensor is [H, W] or [C, H, W] with 1, 3 or 4 channels")
    return pixels.numpy()


def array_to_image(pixels: np.ndarray, name: str) -> Image.Image:
    """Return the image of an array [H, W] or [H, W, C]."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in CHANNELS)) or not pixels.size:
        hint = "; give array.transpose(1, 2, 0)" if pixels.ndim == 3 and pixels.shape[0] in CHANNELS else ""
        shape = list(pixels.shape)
        raise NotAnImageError(
            f"{name} has the shape {shape}: an array is [H, W] or [H, W, C], 1, 3 or 4 channels{hint}"
        )
    if pixels.dtype == np.uint16 and pixels.ndim == 2:
        return Image.fromarray(pixels)
    return Image.fromarray(np.ascontiguousarray(to_bytes(pixels, name)))


def to_bytes(pixels: np.ndarray, name: str) -> np.ndarray:
    """Return pixels as uint8: as they are, bool as 0 and 255, floating point from 0 to 1 scaled to 255."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    if not np.issubdtype(pixels.dtype, np.floating):
        raise NotAnImageError(f"{name} has the type {pixels.dtype}: give uint8, or floating point from 0 to 1")
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):  # also NaN
        values = f"{name} has floating-point values from {low:g} to {high:g}"
        raise NotAnImageError(f"{values}: give uint8, or 0 to 1 (without Normalize)")
    return np.rint(pixels * 255).astype(np.uint8)


def encode_image(value: Any, name: str) -> bytes:
    """Return the encoded bytes of an image: those of its file, or its pixels as an uncompressed TIFF."""
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | os.PathLike):
        with open(os.path.expanduser(os.fspath(value)), "rb") as file:
            return file.read()
    image, out = to_image(value, name), io.BytesIO()
    if image.mode in CONVERTED_MODES:
        image = image.convert(CONVERTED_MODES[image.mode])
    image.info = {}  # a compression or an orientation would be stored too
    image.save(out, "TIFF")
    return out.getvalue()

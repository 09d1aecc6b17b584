"""Decoding of untrusted image files to the model's input pixels.

The size in the header is checked before decoding, so a small file cannot allocate gigabytes. Only formats that Pillow
decodes itself are opened, none that starts another program.
"""

import io
import logging

import numpy as np
from PIL import Image

from vitrail.data.decode import IMAGE_ERRORS, name_image_errors, open_image
from vitrail.data.preprocessing import Preprocessing
from vitrail.serve.body import ImagePart
from vitrail.serve.limits import MemoryTrimmer, RequestRefused

log = logging.getLogger("vitrail.serve")
MAX_JPEG_SCANS = 200  # of a progressive JPEG; usual files have about ten
SCAN_MARKER = b"\xff\xda"  # start of a scan; cannot occur inside one
TILE_TAGS = (322, 323)  # TIFF tags of tile width and height; a tile is decoded whole
DEEP_MEMORY_FACTOR = 4  # memory of images with more than 8 bits relative to others


class ImageDecoder:
    """Decodes clients' images up to a number of pixels."""

    def __init__(self, max_pixels: int, memory: MemoryTrimmer) -> None:
        self.max_pixels, self.memory = max_pixels, memory

    def __call__(self, part: ImagePart, preprocessing: Preprocessing) -> np.ndarray:
        """Return the preprocessed pixels, uint8 [C, H, W]; raise RequestRefused for an invalid image."""
        name, data = part.name or "the image", part.data
        self.memory.record(len(data))
        if data.startswith(b"\xff\xd8") and data.count(SCAN_MARKER) > MAX_JPEG_SCANS:
            raise RequestRefused(422, f"{name}: more than {MAX_JPEG_SCANS} JPEG scans")
        try:
            with open_image(io.BytesIO(data), name) as image:
                check_pixels(image, name, self.max_pixels)
                self.memory.record(image.width * image.height)
                with name_image_errors(name):
                    return preprocessing.to_pixels(image).numpy()
        except Image.DecompressionBombError:
            message = f"{name}: too many pixels, the limit is {self.max_pixels / 1e6:g} million"
            raise RequestRefused(413, message) from None
        except IMAGE_ERRORS as error:
            raise RequestRefused(422, format_error(error)) from None
        except RequestRefused:
            raise
        except Exception:  # a bug in a decoder must not end the thread
            log.exception("unexpected error while decoding an image")
            raise RequestRefused(422, f"{name}: cannot be decoded") from None


def check_pixels(image: Image.Image, name: str, max_pixels: int) -> None:
    """Refuse images that would take too much memory."""
    width, height = image.size
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    tags = getattr(image, "tag_v2", None) or {}
    across, down = (tags.get(tag, 0) for tag in TILE_TAGS)
    tile = across * down if isinstance(across, int) and isinstance(down, int) else 0
    if max(width * height, tile) * (DEEP_MEMORY_FACTOR if deep else 1) > max_pixels:
        raise RequestRefused(
            413,
            f"{name}: {width}×{height} pixels{' of more than 8 bits' if deep else ''}, "
            f"the limit is {max_pixels / (DEEP_MEMORY_FACTOR if deep else 1) / 1e6:g} million",
        )


def format_error(error: BaseException) -> str:
    """Return an error as one short line."""
    return " ".join(str(error).split())[:300] or "the image is invalid"

"""Inspection of one image: reads it completely, detects its format and problems, and makes a thumbnail for comparison."""

import hashlib
import io
import os
import re
import stat
import warnings
import zlib
from dataclasses import dataclass, replace
from typing import ClassVar

from PIL import Image, UnidentifiedImageError

from vitrail.data.dataset import Images
from vitrail.data.decode import DECODER_ERRORS, FORMATS, read_orientation, supported_formats

THUMB_SIDE = 9  # side of the grey thumbnail that images are compared by
MAX_FILE_BYTES = 2**30  # larger files are not read

# First bytes of image formats, and of files that are often found in their place.
IMAGE_SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"GIF8": "GIF", b"BM": "BMP"}
IMAGE_SIGNATURES |= {b"II*\0": "TIFF", b"MM\0*": "TIFF", b"\0\0\0\x0cjP  ": "JPEG2000", b"\xffO\xffQ": "JPEG2000"}
OTHER_SIGNATURES = {b"%PDF": "a PDF", b"PK\x03\x04": "a ZIP archive", b"\x1f\x8b": "gzipped data", b"<?xml": "XML"}
OTHER_SIGNATURES |= dict.fromkeys((b"<!DOCTYPE html", b"<!doctype html", b"<html"), "a web page")
OTHER_SIGNATURES |= {b"<svg": "an SVG drawing", b"%!PS": "PostScript", b"8BPS": "a Photoshop document"}
OTHER_SIGNATURES |= {b"\x1aE\xdf\xa3": "a video", b"version https://git-lfs": "a Git LFS pointer: run git lfs pull"}


@dataclass(frozen=True)
class ImageInspection:
    """The result of inspecting one image."""

    UNREADABLE: ClassVar[str] = "unreadable"  # the problem of an image at which the decoder crashed
    problem: str = ""  # one of UNUSABLE_KINDS, or "" if it is usable
    detail: str = ""
    digest: bytes = b""  # of the stored bytes, 16 bytes
    thumb: bytes = b""  # THUMB_SIDE × THUMB_SIDE grey values; empty if not decoded
    format: str = ""
    mode: str = ""  # Pillow's mode; +alpha for a transparent palette or colour
    width: int = 0
    height: int = 0
    turned: bool = False  # by its EXIF orientation
    animated: bool = False
    passing: bool = False  # transient: permissions, disk or memory errors

    def is_valid(self) -> bool:
        """Return True if the sizes of a cached result fit the arrays of a scan."""
        blobs = len(self.digest) in (0, 16) and len(self.thumb) in (0, THUMB_SIDE * THUMB_SIDE)
        return blobs and min(self.width, self.height) >= 0 and max(self.width, self.height) < 2**31

    def has_wrong_suffix(self, path: str) -> bool:
        """Return True if the path has the suffix of another format."""
        suffix = os.path.splitext(path)[1].lower()
        expected = next((name for name, suffixes in FORMATS.items() if suffix in suffixes), None)
        return not self.problem and expected is not None and self.format not in (expected, "MPO", "DIB")


def inspect_image(images: Images, index: int) -> ImageInspection:
    """Inspect one image. Problems are returned, not raised."""
    item = int(images.items[index])
    try:
        if rejected := _reject_special_file(images.store, item):
            return rejected
        data = images.store.data(item)
    except (OSError, ValueError, *DECODER_ERRORS) as error:
        return ImageInspection("unreadable", format_error(error), passing=True)
    return inspect_bytes(data)


def _reject_special_file(store: object, item: int) -> ImageInspection | None:
    """Reject what must not be opened: a pipe would block, a disk image would fill the memory."""
    path = getattr(store, "path", None)
    if path is None:
        return None
    status = os.stat(path(item))
    if not stat.S_ISREG(status.st_mode):
        return ImageInspection("not-an-image", "a pipe, socket, device or folder")
    if status.st_size > MAX_FILE_BYTES:
        return ImageInspection("bomb", f"a file of {status.st_size / 2**30:.1f} GB")
    return None


def inspect_bytes(data: bytes) -> ImageInspection:
    """Inspect the bytes of an image."""
    if not data:
        return ImageInspection("zero-byte", "empty file")
    digest = hashlib.blake2b(data, digest_size=16).digest()
    kind = sniff_format(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is a finding of its own
            image = Image.open(io.BytesIO(data), formats=supported_formats())
            mode = image.mode + ("+alpha" if "transparency" in image.info else "")
            inspection = ImageInspection("", "", digest, b"", image.format or kind, mode, *image.size)
            if truncation := _find_truncation(data, kind):
                return replace(inspection, problem=truncation[0], detail=truncation[1])
            animated = kind != "JPEG" and bool(getattr(image, "is_animated", False))  # a JPEG may hold a preview
            return replace(inspection, turned=_has_exif_rotation(image), animated=animated, thumb=make_thumb(image))
    except Image.DecompressionBombError as error:
        return ImageInspection("bomb", _format_bomb_error(error), digest)
    except UnidentifiedImageError:
        if kind in FORMATS:
            return ImageInspection("unreadable", f"starts like {kind}, but is not valid {kind}", digest)
        return ImageInspection("not-an-image", kind, digest)
    except (OSError, ValueError, MemoryError, *DECODER_ERRORS) as error:
        text = format_error(error)
        if "truncated" in text.lower() or "broken data stream" in text or _find_truncation(data, kind):
            return ImageInspection("truncated", f"ends after {len(data):,} bytes, before the end of the image", digest)
        return ImageInspection("unreadable", text, digest, passing=isinstance(error, MemoryError))


def sniff_format(data: bytes) -> str:
    """Return the format by the first bytes, or a description of other content."""
    if name := next((name for magic, name in IMAGE_SIGNATURES.items() if data.startswith(magic)), None):
        return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return "AVIF" if b"avi" in data[8:64] else "a video, or HEIC"
    if data[:1] == b"P" and data[1:2] in b"1234567" and data[2:3].isspace():
        return "PPM"
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    if name := next((name for magic, name in OTHER_SIGNATURES.items() if head.startswith(magic)), None):
        return name
    if not data.strip(b"\0"):
        return f"{len(data):,} zeros"
    try:
        text = data[:64].decode()
        return f"text: {' '.join(text.split())[:40]!r}" if text.isprintable() or text.split() else "unknown content"
    except UnicodeDecodeError:
        return "unknown content"


def _find_truncation(data: bytes, kind: str) -> tuple[str, str] | None:
    """Find truncation that a decoder may not notice: trailing zeros, missing or damaged chunks."""
    if kind == "JPEG" and not data.endswith(b"\xff\xd9"):
        zeros = len(data) - len(data.rstrip(b"\0"))
        if zeros > 64 and b"\xff\xd9" not in data[-zeros - 2 : len(data) - zeros + 1]:
            return "truncated", f"the last {zeros:,} bytes are zeros"
    if kind == "PNG":
        return _check_png_chunks(data)
    if kind == "WEBP" and (size := int.from_bytes(data[4:8], "little") + 8) > len(data):
        return "truncated", f"{len(data):,} bytes of {size:,}"
    return None


def _check_png_chunks(data: bytes) -> tuple[str, str] | None:
    """Check the checksum of every PNG chunk, up to the end chunk."""
    view, start = memoryview(data), 8
    while start + 12 <= len(data):
        size = int.from_bytes(view[start : start + 4], "big")
        if start + 12 + size > len(data):
            break
        name = bytes(view[start + 4 : start + 8])
        checksum = int.from_bytes(view[start + 8 + size : start + 12 + size], "big")
        if zlib.crc32(view[start + 4 : start + 8 + size]) != checksum:
            return "unreadable", f"checksum error in chunk {name.decode('ascii', 'replace')}"
        if name == b"IEND":
            return None
        start += 12 + size
    return "truncated", f"ends after {len(data):,} bytes, without an end chunk"


def make_thumb(image: Image.Image) -> bytes:
    """Decode the image at the smallest scale of its format and average it to a grey thumbnail."""
    image.draft("L", (4 * THUMB_SIDE, 4 * THUMB_SIDE))  # a JPEG is still read to its end, with less arithmetic
    image.load()
    if image.mode.startswith("I;16"):
        image = image.convert("I")
    if image.mode in ("I", "F"):
        low, high = (float(value) for value in image.convert("F").getextrema())  # pyright: ignore[reportArgumentType]
        small = image.convert("F").resize((THUMB_SIDE, THUMB_SIDE), Image.Resampling.BOX)
        scale = 255 / max(1e-6, high - low)
        return small.point(lambda value: value * scale - low * scale).convert("L").tobytes()
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        rgba = image.convert("RGBA")
        image = Image.new("RGB", rgba.size)
        image.paste(rgba, mask=rgba.getchannel("A"))
    return image.convert("L").resize((THUMB_SIDE, THUMB_SIDE), Image.Resampling.BOX).tobytes()


def _has_exif_rotation(image: Image.Image) -> bool:
    try:
        return read_orientation(image) != 1
    except (OSError, ValueError, *DECODER_ERRORS):
        return False  # a broken EXIF entry is ignored


def _format_bomb_error(error: Image.DecompressionBombError) -> str:
    """Return Pillow's error with the pixels and the limit in millions."""
    numbers = [f"{int(number) / 1e6:,.0f}" for number in re.findall(r"\d+", str(error))]
    return "{} megapixels exceed the limit of {}".format(*numbers) if len(numbers) == 2 else format_error(error)


def format_error(error: BaseException) -> str:
    """Return an error in one short line."""
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, FileNotFoundError):
        return "missing file or broken link"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:160] or type(error).__name__

"""Pictures from files and bytes, where everything that can be wrong with one is an OSError that names it."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

# What a picture is known by. Other formats that Pillow opens are left out on purpose: some start other programs.
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
SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)

# What Pillow's readers let out when a file is broken: they were written for files that are not.
BROKEN = (SyntaxError, struct.error, zlib.error, EOFError, IndexError, KeyError, TypeError, AttributeError)
BROKEN += (OverflowError, ZeroDivisionError, NotImplementedError, RuntimeError, AssertionError)


@cache
def formats() -> tuple[str, ...]:
    """Those of the formats that this build of Pillow knows."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Whatever goes wrong with a picture inside is an OSError, a ValueError or a DecompressionBombError with its name."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise Image.DecompressionBombError(f"{name}: too large to decode safely ({error})") from None
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"{name}: not an image, or none of {', '.join(FORMATS)}") from None
    except OSError as error:
        if name in str(error) and not error.strerror:
            raise
        raise _same(error, name) from None
    except ValueError as error:
        raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from None
    except BROKEN as error:
        raise OSError(f"{name}: broken ({type(error).__name__}: {error})") from error


def _same(error: OSError, name: str) -> OSError:
    """The error with its own kind and number, so that a missing file stays a FileNotFoundError."""
    if error.strerror:
        return OSError(error.errno, error.strerror, name)
    return OSError(f"{name}: {error}")


def opened(source: str | BinaryIO, name: str) -> Image.Image:
    """A picture of which no more than the header has been read."""
    with named(name):
        return Image.open(source, formats=formats())


def reason(error: BaseException, name: str) -> str:
    """Why, in one line without the name."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix(f"{name}: ")

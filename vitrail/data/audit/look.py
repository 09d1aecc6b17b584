"""One picture, read once from beginning to end: whether it can be, what it is, and how it looks from afar."""

import hashlib
import io
import os
import re
import stat
import warnings
import zlib
from dataclasses import dataclass, replace

from PIL import Image, UnidentifiedImageError

from vitrail.data.opening import BROKEN, FORMATS, formats
from vitrail.data.pictures import Pictures

SIDE = 9  # of the tiny grey picture that looks are compared by
MOST_BYTES = 2**30  # of a file that is read at all
ORIENTATION = 0x0112  # the EXIF entry

# What content gives itself away by: the pictures, and what is often found in their place.
PICTURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\0\x0cjP  ": "JPEG2000",
}
OTHERS = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "gzipped data",
    b"<svg": "an SVG drawing",
    b"<!DOCTYPE html": "a web page",
    b"<!doctype html": "a web page",
    b"<html": "a web page",
    b"<?xml": "XML",
    b"%!PS": "PostScript",
    b"8BPS": "a Photoshop document",
    b"\x1aE\xdf\xa3": "a video",
    b"version https://git-lfs": "a Git LFS pointer: the picture was never fetched (git lfs pull)",
}


@dataclass(frozen=True)
class Look:
    """What was seen of one picture."""

    problem: str = ""  # why it cannot be used, one of findings.UNUSABLE; "" if it can
    detail: str = ""
    digest: bytes = b""  # of the bytes as they are stored, 16 bytes
    thumb: bytes = b""  # SIDE × SIDE grey values; none for what could not be decoded
    format: str = ""
    mode: str = ""  # Pillow's, and +alpha where a palette or a colour is transparent
    width: int = 0
    height: int = 0
    turned: bool = False  # by its EXIF orientation
    animated: bool = False
    passing: bool = False  # it may be readable another time: permissions, a disk or a memory that was short

    def misnamed(self, path: str) -> bool:
        """Whether a path ends like another format's files."""
        suffix = os.path.splitext(path)[1].lower()
        told = next((name for name, suffixes in FORMATS.items() if suffix in suffixes), None)
        return not self.problem and told is not None and self.format not in (told, "MPO", "DIB")


def look(pictures: Pictures, index: int) -> Look:
    """Reads one picture. Nothing that is wrong with it is raised."""
    item = int(pictures.items[index])
    try:
        if refusal := _unfit(pictures.store, item):
            return refusal
        data = pictures.store.data(item)
    except (OSError, ValueError, *BROKEN) as error:
        return Look("unreadable", _words(error), passing=True)
    return looked_at(data)


def _unfit(store: object, item: int) -> Look | None:
    """What must not even be opened: a pipe would wait for ever, a disk image fill the memory."""
    path = getattr(store, "path", None)
    if path is None:
        return None
    found = os.stat(path(item))
    if not stat.S_ISREG(found.st_mode):
        return Look("not-an-image", "not a file: a pipe, a socket, a device or a folder")
    if found.st_size > MOST_BYTES:
        return Look("bomb", f"a file of {found.st_size / 2**30:.1f} GB")
    return None


def looked_at(data: bytes) -> Look:
    """The same for bytes."""
    if not data:
        return Look("zero-byte", "no content")
    digest = hashlib.blake2b(data, digest_size=16).digest()
    kind = sniffed(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is judged with the other findings; the rest is Pillow's to say
            picture = Image.open(io.BytesIO(data), formats=formats())
            seen = Look("", "", digest, b"", picture.format or kind, _mode(picture), *picture.size)
            if cut := _cut(data, kind):
                return replace(seen, problem=cut[0], detail=cut[1])
            animated = (
                bool(getattr(picture, "is_animated", False)) and kind != "JPEG"
            )  # a camera's JPEG may hold a preview
            return replace(seen, turned=_turned(picture), animated=animated, thumb=_thumb(picture))
    except Image.DecompressionBombError as error:
        return Look("bomb", _pixels(error), digest)
    except UnidentifiedImageError:
        if kind in FORMATS:
            return Look("unreadable", f"begins like {kind} and does not go on like it", digest)
        return Look("not-an-image", kind, digest)
    except (OSError, ValueError, MemoryError, *BROKEN) as error:
        text = _words(error)
        if "truncated" in text.lower() or "broken data stream" in text or _cut(data, kind):
            return Look("truncated", f"ends after {len(data):,} bytes, before the picture does", digest)
        return Look("unreadable", text, digest, passing=isinstance(error, MemoryError))


def sniffed(data: bytes) -> str:
    """The format by the first bytes, or in words what it is instead."""
    for magic, name in PICTURES.items():
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return "AVIF" if b"avi" in data[8:64] else "a video, or HEIC"
    if data[:1] == b"P" and data[1:2] in b"1234567" and data[2:3].isspace():
        return "PPM"
    if data[:4] == b"\xffO\xffQ":
        return "JPEG2000"
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, name in OTHERS.items():
        if head.startswith(magic):
            return name
    if not data.strip(b"\0"):
        return f"{len(data):,} zeros"
    try:
        text = data[:64].decode()
        return f"text: {' '.join(text.split())[:40]!r}" if text.isprintable() or text.split() else "unknown content"
    except UnicodeDecodeError:
        return "unknown content"


def _cut(data: bytes, kind: str) -> tuple[str, str] | None:
    """What a decoder may not notice: zeros where a download stopped, chunks that are missing or changed."""
    if kind == "JPEG" and not data.endswith(b"\xff\xd9"):
        zeros = len(data) - len(data.rstrip(b"\0"))
        if zeros > 64 and b"\xff\xd9" not in data[-zeros - 2 : len(data) - zeros + 1]:
            return "truncated", f"its last {zeros:,} bytes are zeros"
    if kind == "PNG":
        return _png(data)
    if kind == "WEBP" and (told := int.from_bytes(data[4:8], "little") + 8) > len(data):
        return "truncated", f"{len(data):,} bytes of {told:,}"
    return None


def _png(data: bytes) -> tuple[str, str] | None:
    """Every chunk of a PNG against its checksum, as far as its end mark."""
    view, at = memoryview(data), 8
    while at + 12 <= len(data):
        size = int.from_bytes(view[at : at + 4], "big")
        if at + 12 + size > len(data):
            break
        name = bytes(view[at + 4 : at + 8])
        if zlib.crc32(view[at + 4 : at + 8 + size]) != int.from_bytes(view[at + 8 + size : at + 12 + size], "big"):
            return "unreadable", f"the checksum of its chunk {name.decode('ascii', 'replace')} does not match"
        if name == b"IEND":
            return None
        at += 12 + size
    return "truncated", f"ends after {len(data):,} bytes, without its end mark"


def _thumb(picture: Image.Image) -> bytes:
    """All of the picture decoded, at the smallest scale the format has, and averaged into SIDE × SIDE grey values."""
    picture.draft("L", (4 * SIDE, 4 * SIDE))  # a JPEG is still read to its end: only the arithmetic gets less
    picture.load()
    if picture.mode.startswith("I;16"):
        picture = picture.convert("I")
    if picture.mode in ("I", "F"):
        low, high = (float(value) for value in picture.convert("F").getextrema())  # pyright: ignore[reportArgumentType]
        small = picture.convert("F").resize((SIDE, SIDE), Image.Resampling.BOX)
        return (
            small.point(lambda value: value * (255 / max(1e-6, high - low)) - low * 255 / max(1e-6, high - low))
            .convert("L")
            .tobytes()
        )
    if "transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        whole = picture.convert("RGBA")
        picture = Image.new("RGB", whole.size)
        picture.paste(whole, mask=whole.getchannel("A"))
    return picture.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX).tobytes()


def _mode(picture: Image.Image) -> str:
    return picture.mode + ("+alpha" if "transparency" in picture.info else "")


def _turned(picture: Image.Image) -> bool:
    if "exif" not in picture.info and picture.format != "TIFF":
        return False
    try:
        return picture.getexif().get(ORIENTATION, 1) not in (0, 1)
    except (OSError, ValueError, *BROKEN):
        return False  # a picture with a broken EXIF entry is as good as one without


def _pixels(error: Image.DecompressionBombError) -> str:
    """Pillow's refusal, which names the pixels and its limit, in millions."""
    numbers = [f"{int(number) / 1e6:,.0f}" for number in re.findall(r"\d+", str(error))]
    return "{} megapixels: above {}, nothing is decoded".format(*numbers) if len(numbers) == 2 else _words(error)


def _words(error: BaseException) -> str:
    """An error in one short line."""
    if isinstance(error, MemoryError):
        return "too large for the memory"
    if isinstance(error, FileNotFoundError):
        return "there is no such file, or it links to nowhere"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:160] or type(error).__name__

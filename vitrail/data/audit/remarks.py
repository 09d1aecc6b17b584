"""From what was seen of each picture by itself to findings."""

from collections.abc import Iterator

import numpy as np
from PIL import Image

from vitrail.data.audit.findings import Finding, finding
from vitrail.data.audit.look import Look
from vitrail.data.audit.seen import Seen, in_memory
from vitrail.data.sources.folders import HIDDEN, NOT_AN_IMAGE, OUTSIDE

TINY = 8  # pixels: a side below this is no photograph
MODES = {  # in words
    "RGB": "colour",
    "L": "grey",
    "1": "black and white, 1 bit",
    "P": "a palette",
    "RGBA": "with transparency",
    "LA": "grey with transparency",
    "CMYK": "CMYK, made for printing",
    "YCbCr": "YCbCr",
    "LAB": "CIELAB",
    "I;16": "16 bits of grey",
    "I;16B": "16 bits of grey",
    "I": "32 bits of grey",
    "F": "floating point",
}


def remarks(split: str, seen: Seen, tiny: int = TINY) -> Iterator[Finding]:
    """What each picture of a split gives reason to say."""
    pictures = seen.pictures
    if in_memory(pictures.store):
        return
    for index, one in sorted(seen.remarkable.items()):
        path = pictures.name(index)
        for kind, detail in _said(one):
            yield finding(kind, path, detail, (split, index))
    for index, name in sorted(seen.misnamed.items()):
        yield finding("wrong-suffix", pictures.name(index), f"is {name}", (split, index))
    for index in np.flatnonzero(seen.decoded & (seen.sizes.min(1) < tiny)).tolist():
        width, height = seen.sizes[index].tolist()
        yield finding("tiny", pictures.name(index), f"{width}×{height} pixels", (split, index))
    most = Image.MAX_IMAGE_PIXELS
    if most:
        for index in np.flatnonzero(seen.decoded & (seen.sizes.astype(np.int64).prod(1) > most)).tolist():
            width, height = seen.sizes[index].tolist()
            detail = f"{width}×{height}, {width * height / 1e6:,.0f} megapixels"
            yield finding("large", pictures.name(index), detail, (split, index))


def passed_over(why: str) -> str:
    """The kind of what a source did not take, by the reason that it gives."""
    if why == HIDDEN:
        return "hidden"
    if why == OUTSIDE or "HEIC" in why:
        return "outside"
    return "other-file" if why.startswith(NOT_AN_IMAGE) else "passed-over"


def _said(one: Look) -> Iterator[tuple[str, str]]:
    if one.problem:
        yield one.problem, one.detail
        return
    base, plus, _ = one.mode.partition("+")
    if one.mode not in ("RGB", "L"):
        yield "mode", MODES.get(base, base) + (" with transparency" if plus else "")
    if one.turned:
        yield "turned", f"{one.width}×{one.height} as stored"
    if one.animated:
        yield "animated", one.format

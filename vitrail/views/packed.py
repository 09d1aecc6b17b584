"""What a page needs of a picture, small enough to be part of it: bytes with a scale for each row, in base64."""

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image

from vitrail.analysis.between import CELLS, coarse
from vitrail.nn.shape import Grid
from vitrail.report.markup import plain
from vitrail.views.shown import Shown

THUMB = 144  # pixels across
FIGURE = 1280  # pixels across a figure that is set on the page
PAGE = 38_000_000  # characters that a page may take, about
REST = 500_000  # of them for a picture's pixels and figures
FEWEST = 16  # cells, however many pictures there are


def cells_for(pictures: int, layers: int, heads: int, grid: Grid) -> int:
    """Cells that attention between patches may have in each of so many pictures, so that a page stays small."""
    patches = grid[0] * grid[1]
    maps = patches * (layers * heads + 5 * (layers + 1))  # bytes of attention; of colours, lengths and likeness
    left = (PAGE / pictures - REST) * 3 / 4 - maps  # base64 writes 3 bytes as 4 characters
    cells = math.isqrt(max(0, int(left / (layers * heads)))) - 2  # n cells take n² bytes, and 4 n for their scales
    return max(FEWEST, min(CELLS, cells))


def quantised(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values from 0, [..., n], as bytes and the largest of each row, [...]: a value is off by 1/510 of it at most."""
    values = np.asarray(values, dtype=np.float32)
    largest = values.max(-1)
    codes = values / np.where(largest > 0, largest, 1)[..., None] * 255
    return codes.round().astype(np.uint8), largest.astype(np.float32)


def text(values: np.ndarray) -> str:
    """An array's bytes in base64, little-endian."""
    return base64.b64encode(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()).decode(
        "ascii"
    )


def rows(values: np.ndarray) -> dict[str, str]:
    """Rows of values as the page reads them."""
    codes, largest = quantised(values)
    return {"codes": text(codes), "largest": text(largest)}


def above(values: np.ndarray) -> dict[str, Any]:
    """Rows of any values, counted from the least of each."""
    low = values.min(1)
    return {**rows(values - low[:, None]), "low": [float(f"{value:.5g}") for value in low]}


def picture(shown: Shown) -> dict[str, Any]:
    """Everything that the page draws of one picture, in JSON's kinds of value."""
    seen = shown.seen
    h, w = seen.grid
    made: dict[str, Any] = {
        "name": plain(shown.name),
        "image": image(shown.pixels),
        "thumb": image(shown.pixels, THUMB),
        "grid": [h, w],
        "reader": seen.reader,
        "at": None if seen.at is None else list(seen.at),
        "said": [{"name": plain(name), "odds": round(odds, 4)} for _, name, odds in shown.said(5)],
    }
    if seen.attention is not None:
        made["attention"] = rows(seen.attention.reshape(*seen.attention.shape[:2], h * w))
    if seen.between is not None and seen.between_grid is not None:
        made["between"] = rows(seen.between)
        a, b = made["cells"] = list(seen.between_grid)
        made["side"] = coarse(seen.grid, a * b)[1]  # patches along the side of a cell
    for name in ("rollout", "relevance"):
        values = getattr(seen, name)
        if values is not None:
            made[name] = rows(values.reshape(1, h * w).clip(0))
    if seen.target is not None:
        made["target"] = plain(shown.label(seen.target))
    if seen.colours is not None:
        made["colours"] = text((seen.colours.clip(0, 1) * 255).round().astype(np.uint8))
    if seen.norms is not None:
        made["norms"] = above(seen.norms.reshape(len(seen.norms), h * w))
    if seen.similar is not None:
        made["similar"] = above(seen.similar.reshape(len(seen.similar), h * w))
    if seen.distance is not None:
        made["distance"] = [[round(float(value), 1) for value in layer] for layer in seen.distance]
    return made


def figure(png: bytes) -> str:
    """A figure as a data address, at a size for the page."""
    with Image.open(io.BytesIO(png)) as opened:
        return image(np.asarray(opened.convert("RGB")), FIGURE)


def image(pixels: np.ndarray, across: int | None = None) -> str:
    """A picture as a data address: small ones as they are, larger ones as JPEG."""
    made = Image.fromarray(pixels)
    if across and max(made.size) > across:
        made.thumbnail((across, across), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    kind = "PNG" if max(made.size) <= 64 else "JPEG"
    made.save(file, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"

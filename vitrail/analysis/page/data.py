"""Data of one image for the page, quantised to bytes with one scale per row, in base64."""

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image

from vitrail.analysis.figures.image_view import ImageView
from vitrail.analysis.heads import MAX_CELLS, coarsen_grid
from vitrail.nn.shape import Grid
from vitrail.reports.html import clean_text

THUMBNAIL_SIZE = 144  # pixels
FIGURE_SIZE = 1280  # pixels of an embedded figure
MAX_PAGE_CHARACTERS = 38_000_000  # approximate size of a page
IMAGE_RESERVE_CHARACTERS = 500_000  # per image, for its pixels and figures
MIN_CELLS = 16


def choose_cells(images: int, layers: int, heads: int, grid: Grid) -> int:
    """Return the number of cells for the attention between patches that keeps the page below its maximal size."""
    patches = grid[0] * grid[1]
    maps = patches * (layers * heads + 5 * (layers + 1))  # bytes of attention; of colours, norms and similarity
    # base64 writes 3 bytes as 4 characters.
    remaining = (MAX_PAGE_CHARACTERS / images - IMAGE_RESERVE_CHARACTERS) * 3 / 4 - maps
    cells = math.isqrt(max(0, int(remaining / (layers * heads)))) - 2  # n cells take n² bytes, and 4 n for their scales
    return max(MIN_CELLS, min(MAX_CELLS, cells))


def quantise_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return non-negative values [..., n] as bytes, and the maximum of each row [...]; the error is at most 1/510 of it."""
    values = np.asarray(values, dtype=np.float32)
    largest = values.max(-1)
    codes = values / np.where(largest > 0, largest, 1)[..., None] * 255
    return codes.round().astype(np.uint8), largest.astype(np.float32)


def encode_base64(values: np.ndarray) -> str:
    """Return the little-endian bytes of an array in base64."""
    data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes()
    return base64.b64encode(data).decode("ascii")


def encode_rows(values: np.ndarray) -> dict[str, str]:
    """Return rows of non-negative values for the page."""
    codes, largest = quantise_rows(values)
    return {"codes": encode_base64(codes), "largest": encode_base64(largest)}


def encode_offset_rows(values: np.ndarray) -> dict[str, Any]:
    """Return rows of any values for the page, relative to the minimum of each."""
    low = values.min(1)
    return {**encode_rows(values - low[:, None]), "low": [float(f"{value:.5g}") for value in low]}


def pack_image(view: ImageView) -> dict[str, Any]:
    """Return all data of one image for the page, ready for JSON."""
    trace = view.trace
    h, w = trace.grid
    packed: dict[str, Any] = {
        "name": clean_text(view.name),
        "image": encode_image(view.pixels),
        "thumb": encode_image(view.pixels, THUMBNAIL_SIZE),
        "grid": [h, w],
        "reader": trace.reader,
        "at": None if trace.at is None else list(trace.at),
        "predictions": [{"name": clean_text(name), "score": round(p, 4)} for _, name, p in view.top_predictions(5)],
    }
    if trace.attention is not None:
        packed["attention"] = encode_rows(trace.attention.reshape(*trace.attention.shape[:2], h * w))
    if trace.between is not None and trace.between_grid is not None:
        packed["between"] = encode_rows(trace.between)
        a, b = packed["cells"] = list(trace.between_grid)
        packed["side"] = coarsen_grid(trace.grid, a * b)[1]  # patches along the side of a cell
    for name in ("rollout", "relevance"):
        if (values := getattr(trace, name)) is not None:
            packed[name] = encode_rows(values.reshape(1, h * w).clip(0))
    if trace.target is not None:
        packed["target"] = clean_text(view.label(trace.target))
    if trace.colours is not None:
        packed["colours"] = encode_base64((trace.colours.clip(0, 1) * 255).round().astype(np.uint8))
    for name in ("norms", "similar"):
        if (values := getattr(trace, name)) is not None:
            packed[name] = encode_offset_rows(values.reshape(len(values), h * w))
    if view.axes is not None:
        packed["axes"] = view.axes.to_page()
        if "side" in packed:  # rows were counted from the bottom when they were summed to cells
            packed["lift"] = -h % packed["side"]
    if trace.distance is not None:
        packed["distance"] = [[round(float(value), 1) for value in layer] for layer in trace.distance]
    return packed


def encode_figure(png: bytes) -> str:
    """Return a figure as a data URI at the size for the page."""
    with Image.open(io.BytesIO(png)) as opened:
        return encode_image(np.asarray(opened.convert("RGB")), FIGURE_SIZE)


def encode_image(pixels: np.ndarray, max_size: int | None = None) -> str:
    """Return an image as a data URI: PNG up to 64 pixels, else JPEG."""
    image = Image.fromarray(pixels)
    if max_size and max(image.size) > max_size:
        image.thumbnail((max_size, max_size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    kind = "PNG" if max(image.size) <= 64 else "JPEG"
    image.save(file, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return encode_data_uri(file.getvalue(), kind.lower())


def encode_data_uri(data: bytes, kind: str = "png") -> str:
    """Return an image file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"

"""Thumbnails of a map in sheets: large images of many small ones, which a page holds as a few strings.

Neighbours on the map share a sheet, so a page that shows a part of the map decodes a few sheets only.
"""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, features

from vitrail.data.dataset import Store
from vitrail.data.decode import IMAGE_ERRORS
from vitrail.deploy.map import THUMBNAIL_SIZES
from vitrail.deploy.search.thumbnails import draw_still, shrink_image
from vitrail.utils.devices import available_cores
from vitrail.utils.progress import ProgressCallback

SHEET_SIZE = 1024  # pixels
MAX_BYTES = 24 * 2**20  # of all sheets; a third more as text on the page
BYTES_PER_PIXEL = 0.42  # of a thumbnail, for the choice of the size; photographs took 0.28 to 0.39
QUALITY = 62
GREY = (127, 127, 127)  # around a thumbnail that is no square
PROGRESS_STEP = 64  # thumbnails between two calls of the progress


@dataclass
class Atlas:
    """Sheets of thumbnails, and where each point's is."""

    size: int  # of a cell, pixels
    kind: str = "webp"
    sheets: list[bytes] = field(default_factory=list)
    cells: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [n]: number of the cell, or -1
    shapes: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.uint8))  # uint8 [n, 2]: width, height
    unreadable: int = 0

    @property
    def per_row(self) -> int:
        return SHEET_SIZE // self.size

    @property
    def count(self) -> int:
        """Return the number of thumbnails."""
        return int((self.cells >= 0).sum())

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.sheets))

    def add_sheet(self, rows: np.ndarray, images: Sequence[Image.Image | None], room: int) -> int:
        """Add a sheet of the thumbnails of these points that can be read, if it fits into `room` bytes; return its size."""
        drawn = [(row, image) for row, image in zip(rows.tolist(), images, strict=True) if image is not None]
        self.unreadable += len(images) - len(drawn)
        if not drawn:
            return 0
        sheet = Image.new("RGB", (SHEET_SIZE, -(-len(drawn) // self.per_row) * self.size), GREY)
        first = len(self.sheets) * self.per_row**2
        for number, (_, image) in enumerate(drawn):
            sheet.paste(image, (number % self.per_row * self.size, number // self.per_row * self.size))
        data = encode_sheet(sheet, self.kind)
        if len(data) <= room:
            self.sheets.append(data)
            for number, (row, image) in enumerate(drawn):
                self.cells[row], self.shapes[row] = first + number, image.size
        return len(data)


def choose_size(count: int) -> int:
    """Return the largest size at which thumbnails of all points should fit."""
    fitting = (size for size in THUMBNAIL_SIZES if count * size * size * BYTES_PER_PIXEL <= MAX_BYTES)
    return next(fitting, THUMBNAIL_SIZES[-1])


def build_atlas(
    store: Store | None,
    items: np.ndarray,  # int64 [n]: indices into the store, or -1
    points: np.ndarray,  # [n, 2]
    size: int | None = None,  # None: by the number of points
    limit: int | None = None,  # most thumbnails; None: as many as fit
    progress: ProgressCallback | None = None,
    max_bytes: int = MAX_BYTES,
) -> Atlas:
    """Draw the thumbnails of as many points as fit into `max_bytes`; of more points, evenly spaced ones have one."""
    known = np.flatnonzero(items >= 0) if store is not None else np.zeros(0, np.int64)
    count = len(known) if limit is None else min(limit, len(known))
    size = size or choose_size(count)
    atlas = Atlas(size, "webp" if features.check("webp") else "jpeg")
    atlas.cells = np.full(len(items), -1, np.int32)
    atlas.shapes = np.zeros((len(items), 2), np.uint8)
    if not count or store is None:
        return atlas
    chosen = known[np.linspace(0, len(known) - 1, count).round().astype(np.int64)]
    rest = chosen[np.argsort(order_on_curve(points[chosen]), kind="stable")]
    rest = thin_out(rest, int(max_bytes / (size * size * BYTES_PER_PIXEL)))
    done, total, room = 0, len(rest), max_bytes
    pool = ThreadPoolExecutor(available_cores())
    try:
        while len(rest):
            part, rest = rest[: atlas.per_row**2], rest[atlas.per_row**2 :]
            images: list[Image.Image | None] = []
            for image in pool.map(lambda row: draw_thumbnail(store, int(items[row]), size), part.tolist()):
                images.append(image)
                done += 1
                if progress and (done % PROGRESS_STEP == 0 or done == total):
                    progress("drawing thumbnails", done, total)
            nbytes = atlas.add_sheet(part, images, room)
            room -= nbytes
            if room < 0:
                break
            rest = thin_out(rest, int(room / max(1, nbytes) * len(part)))  # if thumbnails are larger than expected
    finally:
        pool.shutdown(cancel_futures=True)
    return atlas


def thin_out(rows: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` evenly spaced rows."""
    return rows if count >= len(rows) else rows[np.linspace(0, len(rows) - 1, count).round().astype(np.int64)]


def draw_thumbnail(store: Store, item: int, size: int) -> Image.Image | None:
    """Return the thumbnail of an item, None if it is unreadable."""
    try:
        with store.open(item) as opened, draw_still(opened) as image:
            return shrink_image(image, size)
    except IMAGE_ERRORS:
        return None


def encode_sheet(sheet: Image.Image, kind: str) -> bytes:
    """Return a sheet in WebP, or in JPEG where Pillow has no WebP."""
    buffer = io.BytesIO()
    sheet.save(buffer, kind.upper(), quality=QUALITY)
    return buffer.getvalue()


def order_on_curve(points: np.ndarray) -> np.ndarray:
    """Return the position of each point on a Z-order curve over the map, uint64 [n]: near numbers are near points."""
    low, high = points.min(0), points.max(0)
    cells = ((points - low) / np.maximum(high - low, 1e-12) * 65_535).astype(np.uint64)
    code = np.zeros(len(points), np.uint64)
    for bit in range(16):
        for axis in range(2):
            code |= ((cells[:, axis] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(2 * bit + axis)
    return code

"""Heat maps over greyscale images, resizing of maps, and mosaics of tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.Image import Resampling

from vitrail.reports.colours import HEAT_CMAP, MARK_COLOUR, apply_cmap

DPI = 220  # of all figures
MAP_STRENGTH = 0.6  # of a map over an image: 0 is the image, 1 hides most of it where values are high
PixelSize = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Mosaic:
    """Tiles in rows and columns on a background, with the centre of each row and column in pixels."""

    pixels: np.ndarray  # uint8 [H, W, 3]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    tile: PixelSize  # of each

    @property
    def inches(self) -> tuple[float, float]:
        """Return width and height on a sheet, in inches."""
        return self.pixels.shape[1] / DPI, self.pixels.shape[0] / DPI


def fit_tile_size(grid: tuple[int, ...], max_tile: int) -> PixelSize:
    """Return the tile size in pixels for a grid: a whole number of pixels per patch if it fits, else a smaller grid."""
    scale = max_tile // max(grid) or max_tile / max(grid)
    return max(1, round(grid[0] * scale)), max(1, round(grid[1] * scale))


def build_mosaic(
    tiles: Sequence[Sequence[np.ndarray]],
    gap: int = 4,
    background: tuple[int, int, int] = (255, 255, 255),
    extra_gaps: dict[int, int] | None = None,
) -> Mosaic:
    """Return rows of tiles, uint8 [h, w, 3], all of one size. `extra_gaps` adds pixels after some rows."""
    h, w = tiles[0][0].shape[:2]
    extra_gaps = extra_gaps or {}
    tops = [row * (h + gap) + sum(extra_gaps.get(above, 0) for above in range(row)) for row in range(len(tiles))]
    lefts = [column * (w + gap) for column in range(max(map(len, tiles)))]
    pixels = np.full((tops[-1] + h, lefts[-1] + w, 3), background, dtype=np.uint8)
    for top, row in zip(tops, tiles, strict=True):
        for left, tile in zip(lefts, row, strict=False):
            pixels[top : top + h, left : left + w] = tile
    return Mosaic(pixels, tuple(top + h / 2 for top in tops), tuple(left + w / 2 for left in lefts), (h, w))


def resize_image(pixels: np.ndarray, size: PixelSize) -> np.ndarray:
    """Return an image, uint8 [H, W, 3], at another size."""
    if pixels.shape[:2] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size[1], size[0]), Resampling.LANCZOS))


def resize_blocks(values: np.ndarray, size: PixelSize) -> np.ndarray:
    """Return a map [h, w, …] at another size, each patch a uniform block; patches smaller than a pixel are averaged."""
    h, w = values.shape[:2]
    if size[0] < h or size[1] < w:
        return resize_smooth(values, size, Resampling.BOX)
    rows, columns = np.arange(size[0]) * h // size[0], np.arange(size[1]) * w // size[1]
    return values[rows][:, columns]


def resize_smooth(values: np.ndarray, size: PixelSize, resampling: Resampling = Resampling.BICUBIC) -> np.ndarray:
    """Return a map [h, w] or [h, w, C] at another size, interpolated."""
    if values.ndim == 3:
        return np.stack([resize_smooth(values[..., k], size, resampling) for k in range(values.shape[2])], -1)
    resized = Image.fromarray(values.astype(np.float32)).resize((size[1], size[0]), resampling)
    return np.asarray(resized).clip(values.min(), values.max())


def make_background(pixels: np.ndarray, strength: float = MAP_STRENGTH) -> np.ndarray:
    """Return the image as a background of maps, nearly grey and darker, float [H, W, 3] in 0…255, as the pages do."""
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    less = 0.78 * min(1.0, strength / MAP_STRENGTH)  # colours of the image would be taken for those of the map
    return 18 * strength + (1 - 0.28 * strength) * (less * grey[..., None] + (1 - less) * pixels)


def overlay_heat(
    pixels: np.ndarray, heat: np.ndarray, cmap: str = HEAT_CMAP, strength: float = MAP_STRENGTH
) -> np.ndarray:
    """Return a map of values 0 to 1, [H, W], over the image, uint8 [H, W, 3]; strength 0 is the image itself."""
    alpha = strength * (0.12 + 0.76 * heat.clip(0, 1) ** 0.8)[..., None]
    return ((1 - alpha) * make_background(pixels, strength) + alpha * apply_cmap(heat, cmap)).round().astype(np.uint8)


def outline_patch(pixels: np.ndarray, box: tuple[float, float, float, float] | None, thickness: int = 2) -> np.ndarray:
    """Return the image with a patch outlined in white with a dark border, visible on any colour."""
    if box is None:
        return pixels
    outlined = pixels.copy()
    height, width = outlined.shape[:2]
    left, top = round(box[0] * width), round(box[1] * height)
    right, bottom = max(left + 1, round((box[0] + box[2]) * width)), max(top + 1, round((box[1] + box[3]) * height))
    for grow, colour in ((thickness + 1, (20, 18, 24)), (thickness, MARK_COLOUR)):
        inner = outlined[top:bottom, left:right].copy()
        outlined[max(0, top - grow) : bottom + grow, max(0, left - grow) : right + grow] = colour
        outlined[top:bottom, left:right] = inner
    return outlined

"""Maps over pictures: the picture stays legible in grey, and what the map says glows on it."""

import numpy as np
from PIL import Image

from vitrail.views.colours import HEAT, MARK, coloured

Size = tuple[int, int]  # height, width


def resized(pixels: np.ndarray, size: Size) -> np.ndarray:
    """A picture uint8 [H, W, 3] at another size."""
    if pixels.shape[:2] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.LANCZOS))


def blocks(values: np.ndarray, size: Size) -> np.ndarray:
    """A map [h, w, …] at another size, every patch an even block; where patches are smaller than pixels, their mean."""
    h, w = values.shape[:2]
    if size[0] < h or size[1] < w:
        return soft(values, size, Image.Resampling.BOX)
    rows, columns = np.arange(size[0]) * h // size[0], np.arange(size[1]) * w // size[1]
    return values[rows][:, columns]


def soft(values: np.ndarray, size: Size, how: Image.Resampling = Image.Resampling.BICUBIC) -> np.ndarray:
    """A map [h, w] or [h, w, C] at another size, without steps."""
    if values.ndim == 3:
        return np.stack([soft(values[..., k], size, how) for k in range(values.shape[2])], -1)
    made = Image.fromarray(values.astype(np.float32)).resize((size[1], size[0]), how)
    return np.asarray(made).clip(values.min(), values.max())


def ground(pixels: np.ndarray) -> np.ndarray:
    """The picture as what maps are drawn on: nearly grey, a little darker, float [H, W, 3] in 0…255."""
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    return 18 + 0.72 * (0.78 * grey[..., None] + 0.22 * pixels)


def over(pixels: np.ndarray, heat: np.ndarray, name: str = HEAT) -> np.ndarray:
    """A map with values between 0 and 1, [H, W] as the picture, drawn over it: uint8 [H, W, 3]."""
    part = (0.12 + 0.76 * heat.clip(0, 1) ** 0.8)[..., None]
    return ((1 - part) * ground(pixels) + part * coloured(heat, name)).round().astype(np.uint8)


def marked(pixels: np.ndarray, box: tuple[float, float, float, float] | None, line: int = 2) -> np.ndarray:
    """The picture with a patch outlined: light, with a dark line around it, so that it shows on everything."""
    if box is None:
        return pixels
    made = pixels.copy()
    height, width = made.shape[:2]
    left, top = round(box[0] * width), round(box[1] * height)
    right, bottom = max(left + 1, round((box[0] + box[2]) * width)), max(top + 1, round((box[1] + box[3]) * height))
    for grow, colour in ((line + 1, (20, 18, 24)), (line, MARK)):
        inner = made[top:bottom, left:right].copy()
        made[max(0, top - grow) : bottom + grow, max(0, left - grow) : right + grow] = colour
        made[top:bottom, left:right] = inner
    return made

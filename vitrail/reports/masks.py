"""Drawing of masks: colours of classes, overlays on photographs, legends, and PNG files with a palette.

A mask is uint8 [H, W] of class indices, or IGNORED.
"""

import math
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.metrics.segmentation import IGNORED
from vitrail.reports.charts.canvas import LIGHT, shorten_text
from vitrail.reports.html import Markup, h, isolate
from vitrail.utils.colours import Colour, format_colour, parse_colour
from vitrail.utils.text import format_percent

# The hues of the charts in their order, as light as an overlay needs, then yellow, sky and brown: distinct also with
# deuteranopia and protanopia, by lightness where hues coincide.
FIRST_COLOURS = ("#2a6fe0", "#f28c1e", "#0f9d77", "#eb3f36", "#a98be8", "#f5dc4a", "#7fd4f5", "#7a4a2b")
BACKGROUND_COLOUR = "#6a6670"  # the neutral grey of the charts
BACKGROUND_NAMES = frozenset({"background", "bg", "other", "others", "unlabeled", "unlabelled", "void", "none"})
IGNORED_COLOUR = "#e5e1d8"
OPACITY = 0.55
OUTLINE = 0.004  # width of the line between regions, of the image's diagonal


def choose_colours(labels: Sequence[str]) -> tuple[Colour, ...]:
    """Return a colour for each class. It depends on the index alone, but classes such as "background" are grey."""
    grey, palette = parse_colour(BACKGROUND_COLOUR), make_palette(len(labels))
    return tuple(
        grey if name.lower() in BACKGROUND_NAMES else colour for name, colour in zip(labels, palette, strict=True)
    )


@cache
def make_palette(count: int) -> tuple[Colour, ...]:
    """Return `count` distinct colours; a longer palette begins with the shorter one.

    After the first eight, each is the colour of a grid that is farthest from all before it, in OKLab.
    """
    colours = [parse_colour(text) for text in FIRST_COLOURS][:count]
    if count <= len(FIRST_COLOURS):
        return tuple(colours)
    levels = np.arange(16, 256, 17)
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)
    lab = to_oklab(grid)
    lightness, chroma = lab[:, 0], np.hypot(lab[:, 1], lab[:, 2])
    usable = (lightness > 0.4) & (lightness < 0.92) & (chroma > 0.06) & (chroma < 0.22)  # neither grey nor neon
    grid, lab = grid[usable], lab[usable]
    known = to_oklab(np.array([*colours, parse_colour(BACKGROUND_COLOUR)]))
    nearest = np.linalg.norm(lab[:, None] - known, axis=2).min(1)
    while len(colours) < count:
        chosen = int(nearest.round(9).argmax())
        colours.append((int(grid[chosen, 0]), int(grid[chosen, 1]), int(grid[chosen, 2])))
        nearest = np.minimum(nearest, np.linalg.norm(lab - lab[chosen], axis=1))
    return tuple(colours)


def to_oklab(colours: np.ndarray) -> np.ndarray:
    """Return sRGB colours [n, 3] of 0 to 255 in OKLab, where distances are those that are seen (Ottosson 2020)."""
    share = np.asarray(colours, np.float64) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    to_cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    to_cones.append([0.0883024619, 0.2817188376, 0.6299787005])
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    to_lab.append([0.0259040371, 0.7827717662, -0.8086757660])
    return np.cbrt(linear @ np.array(to_cones).T) @ np.array(to_lab).T


def overlay_mask(
    image: np.ndarray,
    mask: np.ndarray,
    colours: Sequence[Colour],
    opacity: float = OPACITY,
    *,
    outline: float = OUTLINE,
    hidden: Sequence[int] = (),
) -> np.ndarray:
    """Return an image, uint8 [H, W, 3], with its classes in their colours, uint8 [H, W, 3].

    Their edges are lines in full colour, so that they are seen on dark photographs too: `outline` is the width of the line
    between two classes relative to the diagonal, 0 draws none. Ignored pixels and the classes of `hidden` stay as they are.
    """
    if image.shape != (*mask.shape, 3):
        raise ValueError(
            f"the image is {list(image.shape)} and the mask {list(mask.shape)}: expected [H, W, 3] and [H, W]"
        )
    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity must be 0 to 1, got {opacity}")
    table, weight = make_colour_table(colours), np.zeros(256, np.uint16)
    weight[: len(colours)] = round(256 * opacity)
    weight[list(hidden)] = 0
    tint = (table * weight[:, None])[mask]
    result = ((image * (256 - weight[mask])[..., None] + tint + 128) >> 8).astype(np.uint8)
    if outline:
        line = find_outline(mask, max(2, round(outline * math.hypot(*mask.shape)))) & (weight > 0)[mask]
        result[line] = table[mask[line]]
    return result


def make_colour_table(colours: Sequence[Colour]) -> np.ndarray:
    """Return the colour of every value of a mask, uint8 [256, 3]; values without a class are black."""
    if len(colours) > IGNORED:
        raise ValueError(f"a mask has at most {IGNORED} classes, got {len(colours)} colours")
    table = np.zeros((256, 3), np.uint8)
    table[: len(colours)] = np.array(colours, np.uint8).reshape(-1, 3)
    table[IGNORED] = parse_colour(IGNORED_COLOUR)
    return table


def find_outline(mask: np.ndarray, width: int = 2) -> np.ndarray:
    """Return the pixels on lines of this width between regions, bool [H, W]; the edge of the image is none."""
    from scipy.ndimage import maximum_filter1d

    line = np.zeros(mask.shape, np.uint8)  # the pixels after a change
    line[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    line[1:] |= mask[1:] != mask[:-1]
    for axis in (0, 1):
        line = maximum_filter1d(line, width, axis, mode="constant", origin=width % 2 - 1)
    return line > 0


def encode_palette_png(mask: np.ndarray, colours: Sequence[Colour]) -> bytes:
    """Return a PNG file whose pixels are the values of the mask, with the colours as its palette."""
    image = Image.fromarray(np.ascontiguousarray(mask, np.uint8))
    image.putpalette(make_colour_table(colours).tobytes())
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def measure_shares(mask: np.ndarray) -> dict[int, float]:
    """Return the share of each class that a mask has in its pixels that are not ignored, largest first."""
    counts = np.bincount(mask.ravel(), minlength=256)[:IGNORED]
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    return {int(k): float(counts[k] / counts.sum()) for k in order}


def render_legend(labels: Sequence[str], colours: Sequence[Colour], shares: dict[int, float] | None = None) -> Markup:
    """Return the names of classes beside their colours: all classes, or those of `measure_shares` with their share."""
    entries = []
    for k in range(len(labels)) if shares is None else shares:
        swatch = h("i", class_="swatch", style=f"background:{format_colour(colours[k])}", aria_hidden="true")
        share = None if shares is None else h("span", format_percent(shares[k]), class_="n")
        entries.append(h("li", swatch, isolate(labels[k]), share))
    return h("ul", entries, class_="legend classes", aria_label="Classes and their colours")


def append_legend(
    image: np.ndarray, labels: Sequence[str], colours: Sequence[Colour], shares: dict[int, float]
) -> np.ndarray:
    """Return an image, uint8 [H, W, 3], with a legend of the classes of `measure_shares` below it."""
    height, width, _ = image.shape
    size = max(9, min(28, round(0.034 * min(height, width) + 4)))  # of the text, in pixels
    font, gap = load_font(size), size
    entries, x, y = [], gap, gap
    for k, share in shares.items():
        text = shorten_text(f"{labels[k]}  {format_percent(share)}", width - 2 * gap - 1.5 * size, size)
        length = 1.5 * size + font.getlength(text)
        if x > gap and x + length > width - gap:
            x, y = gap, y + 1.7 * size
        entries.append((x, y, text, colours[k]))
        x += length + gap
    strip = Image.new("RGB", (width, round(y + size + gap) if entries else 0), LIGHT.background)
    drawing = ImageDraw.Draw(strip)
    for x, y, text, colour in entries:
        box = (round(x), round(y), round(x) + size, round(y) + size)
        drawing.rounded_rectangle(box, radius=size / 5, fill=colour, outline=LIGHT.text, width=max(1, size // 14))
        drawing.text((x + 1.5 * size, y + size / 2), text, LIGHT.text, font, anchor="lm")
    return np.concatenate([image, np.asarray(strip).reshape(-1, width, 3)])


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Return the sans-serif font of the figures, DejaVu Sans, which has most alphabets."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)

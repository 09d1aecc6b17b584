"""How heads differ: how widely each looks, how alike two of a layer are, and which frequencies a layer keeps."""

import math

import numpy as np

from vitrail.views.aside import about
from vitrail.views.colours import BLUE, INK, LIKE, ORANGE, QUIET, coloured, scaled, table
from vitrail.views.mosaic import Mosaic, mosaic, tile_size
from vitrail.views.overlay import blocks
from vitrail.views.sheet import DPI, HEAD, MARGIN, Sheet, shortened
from vitrail.views.shown import Shown

COLUMNS = 12
WIDE, PLOT = 10.6, 2.5


def draw(shown: Shown) -> bytes:
    """Entropy by layer, the spectrum by layer, and a matrix for each layer."""
    seen = shown.seen
    assert seen.entropy is not None
    assert seen.alike is not None
    depth, heads = seen.entropy.shape
    tiles = tiles_of(seen.alike, round(DPI * (WIDE / min(depth, COLUMNS) - 0.06)))
    high = tiles.pixels.shape[0] / DPI
    sheet = Sheet(
        2 * MARGIN + 0.45 + WIDE,
        HEAD + 0.3 + PLOT + 1.0 + high + 0.6,
        "How the heads differ",
        about(shown, shortened(shown.name), f"{heads} heads in each of {depth} layers"),
    )
    left = MARGIN + 0.45
    half = (WIDE - 0.9) / 2
    _entropy(sheet, shown, left, HEAD + 0.3, half)
    _spectrum(sheet, shown, left + half + 0.9, HEAD + 0.3, half)
    top = HEAD + 0.3 + PLOT + 1.0
    sheet.text(left, top - 0.3, "How alike the heads of a layer are", size=9, colour=INK, baseline="center")
    sheet.key(left + WIDE - 2.0, top - 0.36, 2.0, LIKE, "nothing in common", "the same")
    sheet.tiles(left, top + 0.12, tiles)
    for layer in range(depth):
        row, column = divmod(layer, COLUMNS)
        sheet.text(
            left + tiles.columns[column] / DPI,
            top + 0.17 + (tiles.rows[row] + tiles.tile[0] / 2) / DPI,
            f"layer {layer + 1}",
            size=6.8,
            colour=QUIET,
            align="center",
        )
    return sheet.png()


def tiles_of(alike: np.ndarray, most: int) -> Mosaic:
    """A matrix for each layer, [L, H, H]."""
    depth, heads = alike.shape[:2]
    size = tile_size((heads, heads), max(8, most))
    drawn = [blocks(coloured(scaled(layer, 0.0, 1.0), LIKE), size) for layer in alike]
    lines = [drawn[start : start + COLUMNS] for start in range(0, depth, COLUMNS)]
    return mosaic(lines, gap=round(0.06 * DPI), apart=dict.fromkeys(range(len(lines)), round(0.22 * DPI)))


def _entropy(sheet: Sheet, shown: Shown, left: float, top: float, wide: float) -> None:
    entropy = shown.seen.entropy
    assert entropy is not None
    depth, heads = entropy.shape
    tokens = shown.seen.grid[0] * shown.seen.grid[1] + shown.seen.prefix
    axes = sheet.axes(left, top, wide, PLOT)
    sheet.text(left, top - 0.16, "How widely each head looks", size=9, colour=INK, baseline="center")
    aside = np.linspace(-0.2, 0.2, heads) * min(1.0, heads / 6) if heads > 1 else np.zeros(1)
    axes.plot(
        (np.arange(1, depth + 1)[:, None] + aside).ravel(),
        entropy.ravel(),
        "o",
        color=BLUE,
        markersize=3.8,
        markeredgewidth=0,
        alpha=0.85,
        label="a head",
    )
    axes.plot(range(1, depth + 1), entropy.mean(1), color=ORANGE, linewidth=1.6, label="mean")
    most = math.log(tokens)
    axes.axhline(most, color=QUIET, linewidth=0.8, linestyle=(0, (4, 4)), label=f"all {tokens:,} tokens alike")
    axes.set_ylim(0, most * 1.08)
    axes.set_xlim(0.5, depth + 0.5)
    axes.set_xticks([1, *range(2 if depth <= 16 else 3, depth + 1, 1 if depth <= 16 else 2 if depth <= 32 else 4)])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer", fontsize=8, color=INK)
    axes.set_ylabel("entropy of attention, nats", fontsize=8, color=INK)
    axes.legend(frameon=False, fontsize=7, labelcolor=QUIET, loc="lower right", handlelength=1.6)


def _spectrum(sheet: Sheet, shown: Shown, left: float, top: float, wide: float) -> None:
    spectrum, frequencies = shown.seen.spectrum, shown.seen.frequencies
    if spectrum is None or frequencies is None:
        return
    axes = sheet.axes(left, top, wide - 0.55, PLOT)
    sheet.text(left, top - 0.16, "Which frequencies each layer keeps", size=9, colour=INK, baseline="center")
    colours = table(LIKE)[np.linspace(0, 235, len(spectrum)).round().astype(int)] / 255
    for layer, (line, colour) in enumerate(zip(spectrum, colours, strict=True)):
        axes.plot(frequencies, line, color=tuple(colour), linewidth=1.2, label=str(layer))
    axes.set_xlim(0, 1)
    axes.set_xlabel("frequency, in units of π for a step of one patch", fontsize=8, color=INK)
    axes.set_ylabel("log amplitude, less that of frequency 0", fontsize=8, color=INK)
    bar = np.repeat(table(LIKE)[np.linspace(235, 0, 200).round().astype(int)][:, None], 12, axis=1)
    inset = sheet.axes(left + wide - 0.36, top, 0.11, PLOT)
    inset.imshow(bar, aspect="auto", interpolation="nearest")
    inset.set_axis_off()
    for share, word in ((1.0, "0"), (0.0, str(len(spectrum) - 1))):
        sheet.text(left + wide - 0.2, top + share * PLOT, word, size=7, colour=QUIET, baseline="center")
    sheet.text(left + wide - 0.2, top + PLOT / 2, "layer", size=7, colour=QUIET, rotation=90, baseline="center")

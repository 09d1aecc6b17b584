"""The way of the picture in, equation 1: cut into patches, each made a token, and told where it is."""

import numpy as np
import torch

from vitrail.analysis.tokens import colours
from vitrail.views.aside import about
from vitrail.views.colours import INK, QUIET
from vitrail.views.mosaic import mosaic
from vitrail.views.overlay import blocks, resized
from vitrail.views.sheet import HEAD, MARGIN, Sheet
from vitrail.views.shown import Shown

SIDE, BETWEEN, PIXELS = 2.05, 0.5, 480


def draw(shown: Shown) -> bytes:
    """A panel for each step, with what it is called and its shape."""
    seen = shown.seen
    assert seen.embedded is not None
    (h, w), depth = seen.grid, seen.embedded.shape[2]
    high = SIDE * shown.pixels.shape[0] / shown.pixels.shape[1]
    height, width = shown.pixels.shape[:2]
    number = h * w
    size = (max(1, round(PIXELS * height / width)), PIXELS)
    added = seen.positions is not None
    summed = seen.embedded + seen.positions if seen.positions is not None else seen.embedded
    before = f"+ {seen.prefix} before them" if seen.prefix else "nothing before them"
    steps: list[tuple[str, np.ndarray, str, str]] = [
        ("", resized(shown.pixels, size), "the picture x", f"{height}×{width}×{shown.channels} values"),
        ("→", cut(shown, size), "patches xₚ", f"{number:,} of {_values(shown)}"),
        (
            "→ E" if shown.linear else "→",
            blocks(principal(seen.embedded), size),
            "tokens xₚ E" if shown.linear else "tokens, by convolutions",
            f"{number:,}×{depth:,} values",
        ),
    ]
    if added:
        assert seen.positions is not None
        steps += [
            ("+", blocks(principal(seen.positions), size), "positions Eₚₒₛ", f"{number:,}×{depth:,} values"),
            ("=", blocks(principal(summed), size), "z₀", f"{number + seen.prefix:,}×{depth:,}: {number:,} {before}"),
        ]
    sheet = Sheet(
        2 * MARGIN + len(steps) * SIDE + (len(steps) - 1) * BETWEEN,
        HEAD + high + (0.78 if added else 1.0),
        "How the picture comes in",
        about(shown, "tokens, positions and sums by their first three principal components, as red, green and blue"),
    )
    for place, (sign, pixels, word, shape) in enumerate(steps):
        left = MARGIN + place * (SIDE + BETWEEN)
        sheet.picture(left, HEAD, SIDE, pixels)
        sheet.text(left - BETWEEN / 2, HEAD + high / 2, sign, size=13, colour=INK, align="center", baseline="center")
        sheet.text(left, HEAD + high + 0.12, word, size=8.4, colour=INK)
        sheet.text(left, HEAD + high + 0.32, shape, size=7, colour=QUIET)
    if not added:
        said = "No positions are added to the tokens: this model tells places in its attention, or not at all."
        sheet.text(MARGIN, HEAD + high + 0.62, said, size=7.2, colour=QUIET)
    return sheet.png()


def _values(shown: Shown) -> str:
    """What is in a patch; convolutions see beyond its edges."""
    side, channels = shown.seen.patch, shown.channels
    return (
        f"{side}×{side}×{channels} = {channels * side**2:,}"
        if shown.linear
        else f"{side}×{side} pixels, with surroundings"
    )


def cut(shown: Shown, size: tuple[int, int], ground: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    """The picture cut into its patches, a little apart, at this size."""
    h, w = shown.seen.grid
    each = max(2, min(size[0] // h, size[1] // w) * 4 // 5)
    small = resized(shown.pixels, (h * each, w * each))
    gap = max(1, each // 5)
    tiles = [
        [small[row * each : (row + 1) * each, column * each : (column + 1) * each] for column in range(w)]
        for row in range(h)
    ]
    return resized(mosaic(tiles, gap, ground).pixels, size)


def principal(values: np.ndarray) -> np.ndarray:
    """Vectors [h, w, D] as colours [h, w, 3] by their first three principal components; uint8."""
    found = colours(torch.from_numpy(values).flatten(0, 1)).numpy()  # [n, 3] in 0…1
    return (found * 255).round().astype(np.uint8).reshape(*values.shape[:2], 3)

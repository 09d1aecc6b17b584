"""Rollout and relevance: one map for the whole way through the model, beside the picture and over it."""

import numpy as np

from vitrail.views.aside import about
from vitrail.views.colours import HEAT, INK, QUIET, coloured, scaled
from vitrail.views.overlay import blocks, over, resized, soft
from vitrail.views.sheet import HEAD, MARGIN, Sheet, shortened
from vitrail.views.shown import Shown

SIDE, GAP, PIXELS = 2.75, 0.3, 600


def draw_rollout(shown: Shown) -> bytes:
    """Attention rollout, appendix D of the paper."""
    assert shown.seen.rollout is not None
    return _draw(
        shown,
        shown.seen.rollout,
        "What reaches the output, by attention rollout",
        "attention of all layers multiplied, with the residual path; the mean over heads",
        "rollout",
    )


def draw_relevance(shown: Shown) -> bytes:
    """Relevance for a class: attention weighted by its gradient."""
    seen = shown.seen
    assert seen.relevance is not None
    target = "the likeliest class" if seen.target is None else shown.label(seen.target)
    return _draw(
        shown,
        seen.relevance,
        f"What speaks for {shortened(target, 40)}",
        "attention weighted by the gradient of this class, over all layers",
        "relevance",
    )


def map_over(shown: Shown, values: np.ndarray, pixels: int) -> np.ndarray:
    """A map over the picture, this many pixels across, without steps between patches; dark is its least value."""
    height, width = shown.pixels.shape[:2]
    size = (max(1, round(pixels * height / width)), pixels)
    return over(resized(shown.pixels, size), soft(scaled(values), size))


def _draw(shown: Shown, values: np.ndarray, title: str, how: str, what: str) -> bytes:
    height, width = shown.pixels.shape[:2]
    high = SIDE * height / width
    sheet = Sheet(2 * MARGIN + 3 * SIDE + 2 * GAP, HEAD + high + 1.0, title, about(shown, how))
    size = (max(1, round(PIXELS * height / width)), PIXELS)
    top = HEAD - 0.02
    panels = (
        (resized(shown.pixels, size), shortened(shown.name), shown.verdict),
        (blocks(coloured(scaled(values, 0.0), HEAT), size), "The map, a square for each patch", ""),
        (map_over(shown, values, PIXELS), "The map over the picture", "smoothed; dark is its least value"),
    )
    for place, (pixels, word, second) in enumerate(panels):
        left = MARGIN + place * (SIDE + GAP)
        sheet.picture(left, top, SIDE, pixels)
        sheet.text(left, top + high + 0.1, word, size=7.6, colour=INK)
        sheet.text(left, top + high + 0.28, shortened(second, 44), size=7.2, colour=QUIET)
    left = MARGIN + SIDE + GAP
    sheet.key(left, top + high + 0.36, SIDE, HEAT, "0", f"{values.max():.3g} ({what})")
    return sheet.png()

"""Mean attention distance of every head by layer: figure 7 (right) of the paper."""

import numpy as np

from vitrail.analysis.seen import Distances
from vitrail.views.colours import BLUE, INK, ORANGE, QUIET
from vitrail.views.sheet import HEAD, MARGIN, Sheet, shortened


def draw(found: Distances, model: str, patch: int | None = None) -> bytes:
    """A dot for each head, a thin line for how far pictures differ, and the mean of the heads."""
    depth, heads = found.mean.shape
    sheet = Sheet(
        7.2,
        5.0,
        "How far attention reaches, layer by layer",
        "  ·  ".join(
            (
                shortened(model, 48),
                f"{found.pictures:,} picture{'' if found.pictures == 1 else 's'}",
                f"{found.size[1]}×{found.size[0]} pixels",
            )
        ),
    )
    axes = sheet.axes(MARGIN + 0.45, HEAD + 0.25, 7.2 - 2 * MARGIN - 0.45, 5.0 - HEAD - 0.95)
    aside = np.linspace(-0.22, 0.22, heads) if heads > 1 else np.zeros(1)
    across = np.arange(1, depth + 1)[:, None] + aside[None] * min(
        1.0, heads / 6
    )  # heads that agree do not hide each other
    if found.pictures > 1:
        axes.vlines(
            across.ravel(),
            (found.mean - found.spread).ravel(),
            (found.mean + found.spread).ravel(),
            color=BLUE,
            alpha=0.28,
            linewidth=0.8,
        )
    axes.plot(
        across.ravel(),
        found.mean.ravel(),
        "o",
        color=BLUE,
        markersize=4.2,
        markeredgewidth=0,
        alpha=0.85,
        label="a head",
    )
    axes.plot(
        np.arange(1, depth + 1), found.mean.mean(1), color=ORANGE, linewidth=1.8, label="mean of the heads", zorder=3
    )
    if patch:
        axes.axhline(patch, color=QUIET, linewidth=0.8, linestyle=(0, (4, 4)), label=f"a patch, {patch} pixels")
    step = 1 if depth <= 16 else 2 if depth <= 32 else 4
    axes.set_xticks([1, *range(1 + step, depth + 1, step)])
    axes.set_xlim(0.5, depth + 0.5)
    most = float((found.mean + found.spread * (found.pictures > 1)).max())
    axes.set_ylim(0, 1.06 * (most or patch or 1))  # a picture of one patch has no distances
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer", fontsize=8, color=INK)
    axes.set_ylabel("mean attention distance, pixels", fontsize=8, color=INK)
    axes.legend(
        frameon=False,
        fontsize=7.5,
        labelcolor=QUIET,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=3,
        borderaxespad=0.2,
        handlelength=1.6,
    )
    return sheet.png()

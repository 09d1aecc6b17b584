"""Patch tokens layer by layer: principal components as colours, likeness with a chosen patch, lengths."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.views.aside import WIDTH, about, aside
from vitrail.views.colours import BLUE, INK, LENGTH, LIKE, ORANGE, QUIET, RED, VIOLET, coloured, scaled
from vitrail.views.mosaic import Mosaic, mosaic, tile_size
from vitrail.views.overlay import blocks, marked
from vitrail.views.sheet import DPI, HEAD, MARGIN, Sheet
from vitrail.views.shown import Shown

LABELS, PLOT = 0.75, 1.9


def draw(shown: Shown, layers: Sequence[int] | None = None) -> bytes:
    """A column for each layer, 0 being z_0; a row for each of what there is; and all lengths as a plot."""
    seen = shown.seen
    assert seen.norms is not None
    shows = [0, *layers] if layers else list(range(len(seen.norms)))
    tiles, rows = rows_of(shown, shows, round(DPI * min(1.2, max(0.36, 10.6 / len(shows)))))
    wide, high = max(3.2, tiles.pixels.shape[1] / DPI), tiles.pixels.shape[0] / DPI
    left, top = MARGIN + WIDTH + 0.35 + LABELS, HEAD + 0.32
    beside = WIDTH * shown.pixels.shape[0] / shown.pixels.shape[1] + 1.9
    sheet = Sheet(
        left + wide + MARGIN,
        max(top + high + 0.65 + PLOT + 0.6, top + beside),
        "What becomes of the patches",
        about(shown, "layer 0 is the embedding with positions"),
    )
    end = aside(sheet, MARGIN, top, shown, mark=seen.at is not None)
    if seen.similar is not None:
        sheet.key(
            MARGIN,
            end + 0.25,
            WIDTH,
            LIKE,
            f"{least(seen.similar):.1f}".replace("-", "−"),
            "1",
            "cosine with the outlined patch",
        )
        end += 0.55
    sheet.key(MARGIN, end + 0.25, WIDTH, LENGTH, "shortest", "longest", "length, in each layer")
    sheet.text(left, HEAD + 0.02, "layer", size=7, colour=QUIET, baseline="center")
    sheet.tiles(left, top, tiles, rows, [str(layer) for layer in shows])
    _lengths(sheet, shown, left, top + high + 0.65, wide)
    return sheet.png()


def rows_of(shown: Shown, layers: Sequence[int], most: int, gap: int = 4) -> tuple[Mosaic, list[str]]:
    """The maps as tiles, and what each row shows."""
    seen = shown.seen
    size = tile_size(seen.grid, most)
    line = max(1, most // 110)
    rows: list[list[np.ndarray]] = []
    names: list[str] = []
    if seen.colours is not None:
        whole = (seen.colours.clip(0, 1) * 255).round().astype(np.uint8)
        rows.append([blocks(whole[layer], size) for layer in layers])
        names.append("components")
    if seen.similar is not None:
        drawn = coloured(scaled(seen.similar, least(seen.similar), 1.0), LIKE)
        rows.append([marked(blocks(drawn[layer], size), shown.box, line) for layer in layers])
        names.append("likeness")
    if seen.norms is not None:
        rows.append([blocks(coloured(scaled(seen.norms[layer]), LENGTH), size) for layer in layers])
        names.append("length")
    return mosaic(rows, gap, apart=dict.fromkeys(range(len(rows)), gap)), names


def least(similar: np.ndarray) -> float:
    """Where the scale of likeness begins: below its least value, in tenths, so that small differences show."""
    return max(-1.0, math.floor(10 * float(similar.min())) / 10)


def outliers(norms: np.ndarray) -> np.ndarray:
    """Which patch tokens [..., h, w] are more than twice as long as the middle one of their layer: where models keep notes."""
    return norms > 2 * np.median(norms, axis=(-2, -1), keepdims=True)


def _lengths(sheet: Sheet, shown: Shown, left: float, top: float, wide: float) -> None:
    """Every token's length by layer: patches as dots, the tokens before them as lines."""
    norms, prefix = shown.seen.norms, shown.seen.prefix_norms
    assert norms is not None
    axes = sheet.axes(left, top, wide, PLOT)
    depth = len(norms)
    flat, far = norms.reshape(depth, -1), outliers(norms).reshape(depth, -1)
    layer = np.repeat(np.arange(depth)[:, None], flat.shape[1], axis=1)
    sway = layer + np.random.default_rng(0).uniform(-0.16, 0.16, layer.shape)
    style: dict[str, Any] = {"markeredgewidth": 0, "linestyle": "none", "marker": "o"}
    axes.plot(sway[~far], flat[~far], color=BLUE, alpha=0.3, label="patches", markersize=1.8, **style)
    if far.any():
        said = "patches twice as long as most"
        axes.plot(sway[far], flat[far], color=RED, alpha=0.9, label=said, markersize=3.2, **style)
    if prefix is not None and prefix.shape[1]:
        names = ("class token", "distillation token") if shown.seen.reader == "class token" else ()
        for token in range(min(prefix.shape[1], 8)):
            name = names[token] if token < min(len(names), prefix.shape[1]) and prefix.shape[1] <= 2 else None
            name = name or (f"token {token + 1} before the patches")
            colour = (ORANGE, VIOLET, *[QUIET] * 8)[token]
            axes.plot(range(depth), prefix[:, token], color=colour, linewidth=1.3, label=name if token < 3 else None)
    axes.set_yscale("log")
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_xticks(range(0, depth, 1 if depth <= 20 else 2))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer", fontsize=8, color=INK)
    axes.set_ylabel("length of the token", fontsize=8, color=INK)
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(
        frameon=False,
        fontsize=7,
        labelcolor=QUIET,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=4,
        borderaxespad=0.1,
    )

"""Figures of the patch embedding and of the patch tokens by layer: components, similarity, norms."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vitrail.analysis.figures.image_view import IMAGE_WIDTH, ImageView, draw_side_image, format_subtitle
from vitrail.analysis.figures.overlay import (
    Mosaic,
    build_mosaic,
    fit_tile_size,
    outline_patch,
    resize_blocks,
    resize_image,
)
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet
from vitrail.analysis.tokens import token_colours
from vitrail.reports.colours import (
    BLUE,
    INK,
    MUTED,
    NORM_CMAP,
    ORANGE,
    RED,
    SIMILARITY_CMAP,
    VIOLET,
    apply_cmap,
    rescale,
)

STEP_WIDTH, STEP_GAP, STEP_PIXELS = 2.05, 0.5, 480


def draw_patches(view: ImageView) -> bytes:
    """Draw a panel per step of equation 1, with its name and shape."""
    seen = view.trace
    assert seen.embedded is not None
    (h, w), depth = seen.grid, seen.embedded.shape[2]
    high = STEP_WIDTH * view.pixels.shape[0] / view.pixels.shape[1]
    height, width = view.pixels.shape[:2]
    number = h * w
    size = (max(1, round(STEP_PIXELS * height / width)), STEP_PIXELS)
    added = seen.positions is not None
    summed = seen.embedded + seen.positions if seen.positions is not None else seen.embedded
    before = f"+ {seen.prefix} before them" if seen.prefix else "nothing before them"
    steps: list[tuple[str, np.ndarray, str, str]] = [
        ("", resize_image(view.pixels, size), "image x", f"{height}×{width}×{view.channels} values"),
        ("→", cut_patches(view, size), "patches xₚ", f"{number:,} of {_format_patch_values(view)}"),
        (
            "→ E" if view.is_linear_embedding else "→",
            resize_blocks(colour_by_components(seen.embedded), size),
            "tokens xₚ E" if view.is_linear_embedding else "tokens, by convolutions",
            f"{number:,}×{depth:,} values",
        ),
    ]
    if added:
        assert seen.positions is not None
        steps += [
            (
                "+",
                resize_blocks(colour_by_components(seen.positions), size),
                "positions Eₚₒₛ",
                f"{number:,}×{depth:,} values",
            ),
            (
                "=",
                resize_blocks(colour_by_components(summed), size),
                "z₀",
                f"{number + seen.prefix:,}×{depth:,}: {number:,} {before}",
            ),
        ]
    sheet = Sheet(
        2 * MARGIN + len(steps) * STEP_WIDTH + (len(steps) - 1) * STEP_GAP,
        HEADING_HEIGHT + high + (0.78 if added else 1.0),
        "Patch embedding",
        format_subtitle(view, "tokens, positions and sums by three principal components, as red, green and blue"),
    )
    for index, (sign, pixels, name, shape) in enumerate(steps):
        left = MARGIN + index * (STEP_WIDTH + STEP_GAP)
        sheet.draw_image(left, HEADING_HEIGHT, STEP_WIDTH, pixels)
        sheet.draw_text(
            left - STEP_GAP / 2, HEADING_HEIGHT + high / 2, sign, size=13, colour=INK, align="center", baseline="center"
        )
        sheet.draw_text(left, HEADING_HEIGHT + high + 0.12, name, size=8.4, colour=INK)
        sheet.draw_text(left, HEADING_HEIGHT + high + 0.32, shape, size=7, colour=MUTED)
    if not added:
        note = "No position embedding is added to the tokens: this model uses positions in its attention, or none."
        sheet.draw_text(MARGIN, HEADING_HEIGHT + high + 0.62, note, size=7.2, colour=MUTED)
    return sheet.to_png()


def _format_patch_values(shown: ImageView) -> str:
    """Return the shape of a patch; convolutions see beyond its edges."""
    side, channels = shown.trace.patch, shown.channels
    return (
        f"{side}×{side}×{channels} = {channels * side**2:,}"
        if shown.is_linear_embedding
        else f"{side}×{side} pixels, with surroundings"
    )


def cut_patches(
    view: ImageView, size: tuple[int, int], background: tuple[int, int, int] = (255, 255, 255)
) -> np.ndarray:
    """Return the image cut into its patches, with gaps, at this size."""
    h, w = view.trace.grid
    each = max(2, min(size[0] // h, size[1] // w) * 4 // 5)
    small = resize_image(view.pixels, (h * each, w * each))
    gap = max(1, each // 5)
    tiles = [
        [small[row * each : (row + 1) * each, column * each : (column + 1) * each] for column in range(w)]
        for row in range(h)
    ]
    return resize_image(build_mosaic(tiles, gap, background).pixels, size)


def colour_by_components(values: np.ndarray) -> np.ndarray:
    """Return vectors [h, w, D] as colours, uint8 [h, w, 3], by their first three principal components."""
    colours = token_colours(torch.from_numpy(values).flatten(0, 1)).numpy()  # [n, 3] in 0…1
    return (colours * 255).round().astype(np.uint8).reshape(*values.shape[:2], 3)


LABEL_WIDTH, PLOT_HEIGHT = 0.75, 1.9


def draw_tokens(view: ImageView, layers: Sequence[int] | None = None) -> bytes:
    """Draw a column per layer (0 is z_0), a row per map, and a plot of all norms."""
    seen = view.trace
    assert seen.norms is not None
    shows = [0, *layers] if layers else list(range(len(seen.norms)))
    tiles, rows = build_token_rows(view, shows, round(DPI * min(1.2, max(0.36, 10.6 / len(shows)))))
    wide, high = max(3.2, tiles.pixels.shape[1] / DPI), tiles.pixels.shape[0] / DPI
    left, top = MARGIN + IMAGE_WIDTH + 0.35 + LABEL_WIDTH, HEADING_HEIGHT + 0.32
    beside = IMAGE_WIDTH * view.pixels.shape[0] / view.pixels.shape[1] + 1.9
    sheet = Sheet(
        left + wide + MARGIN,
        max(top + high + 0.65 + PLOT_HEIGHT + 0.6, top + beside),
        "Patch tokens by layer",
        format_subtitle(view, "layer 0 is the embedding with positions"),
    )
    end = draw_side_image(sheet, MARGIN, top, view, mark=seen.at is not None)
    if seen.similar is not None:
        sheet.draw_colour_bar(
            MARGIN,
            end + 0.25,
            IMAGE_WIDTH,
            SIMILARITY_CMAP,
            f"{similarity_floor(seen.similar):.1f}".replace("-", "−"),
            "1",
            "cosine similarity with the outlined patch",
        )
        end += 0.55
    sheet.draw_colour_bar(MARGIN, end + 0.25, IMAGE_WIDTH, NORM_CMAP, "minimum", "maximum", "norm, in each layer")
    sheet.draw_text(left, HEADING_HEIGHT + 0.02, "layer", size=7, colour=MUTED, baseline="center")
    sheet.draw_mosaic(left, top, tiles, rows, [str(layer) for layer in shows])
    _plot_norms(sheet, view, left, top + high + 0.65, wide)
    return sheet.to_png()


def build_token_rows(view: ImageView, layers: Sequence[int], max_tile: int, gap: int = 4) -> tuple[Mosaic, list[str]]:
    """Return the maps as tiles, and the name of each row."""
    seen = view.trace
    size = fit_tile_size(seen.grid, max_tile)
    line = max(1, max_tile // 110)
    rows: list[list[np.ndarray]] = []
    names: list[str] = []
    if seen.colours is not None:
        whole = (seen.colours.clip(0, 1) * 255).round().astype(np.uint8)
        rows.append([resize_blocks(whole[layer], size) for layer in layers])
        names.append("components")
    if seen.similar is not None:
        drawn = apply_cmap(rescale(seen.similar, similarity_floor(seen.similar), 1.0), SIMILARITY_CMAP)
        rows.append([outline_patch(resize_blocks(drawn[layer], size), view.patch_box, line) for layer in layers])
        names.append("similarity")
    if seen.norms is not None:
        rows.append([resize_blocks(apply_cmap(rescale(seen.norms[layer]), NORM_CMAP), size) for layer in layers])
        names.append("norm")
    return build_mosaic(rows, gap, extra_gaps=dict.fromkeys(range(len(rows)), gap)), names


def similarity_floor(similarity: np.ndarray) -> float:
    """Return the lower end of the similarity scale: the minimum rounded down to tenths."""
    return max(-1.0, math.floor(10 * float(similarity.min())) / 10)


def find_outliers(norms: np.ndarray) -> np.ndarray:
    """Return which patch tokens [..., h, w] have more than twice the median norm of their layer."""
    return norms > 2 * np.median(norms, axis=(-2, -1), keepdims=True)


def _plot_norms(sheet: Sheet, shown: ImageView, left: float, top: float, wide: float) -> None:
    """Plot the norm of every token by layer: patches as dots, prefix tokens as lines."""
    norms, prefix = shown.trace.norms, shown.trace.prefix_norms
    assert norms is not None
    axes = sheet.add_axes(left, top, wide, PLOT_HEIGHT)
    depth = len(norms)
    flat, far = norms.reshape(depth, -1), find_outliers(norms).reshape(depth, -1)
    layer = np.repeat(np.arange(depth)[:, None], flat.shape[1], axis=1)
    sway = layer + np.random.default_rng(0).uniform(-0.16, 0.16, layer.shape)
    style: dict[str, Any] = {"markeredgewidth": 0, "linestyle": "none", "marker": "o"}
    axes.plot(sway[~far], flat[~far], color=BLUE, alpha=0.3, label="patches", markersize=1.8, **style)
    if far.any():
        label = "patches above twice the median"
        axes.plot(sway[far], flat[far], color=RED, alpha=0.9, label=label, markersize=3.2, **style)
    if prefix is not None and prefix.shape[1]:
        names = ("class token", "distillation token") if shown.trace.reader == "class token" else ()
        for token in range(min(prefix.shape[1], 8)):
            name = names[token] if token < min(len(names), prefix.shape[1]) and prefix.shape[1] <= 2 else None
            name = name or f"prefix token {token + 1}"
            colour = (ORANGE, VIOLET, *[MUTED] * 8)[token]
            axes.plot(range(depth), prefix[:, token], color=colour, linewidth=1.3, label=name if token < 3 else None)
    axes.set_yscale("log")
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_xticks(range(0, depth, 1 if depth <= 20 else 2))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer", fontsize=8, color=INK)
    axes.set_ylabel("norm of the token", fontsize=8, color=INK)
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(
        frameon=False,
        fontsize=7,
        labelcolor=MUTED,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=4,
        borderaxespad=0.1,
    )

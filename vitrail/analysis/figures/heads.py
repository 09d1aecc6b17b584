"""Figures of attention distance, and of entropy, similarity and token spectrum by layer."""

import math

import numpy as np

from vitrail.analysis.figures.image_view import ImageView, format_subtitle
from vitrail.analysis.figures.overlay import Mosaic, build_mosaic, fit_tile_size, resize_blocks
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, shorten_name
from vitrail.analysis.results import AttentionDistances
from vitrail.reports.colours import BLUE, INK, MUTED, ORANGE, SIMILARITY_CMAP, apply_cmap, colour_table, rescale
from vitrail.utils.text import format_image_count


def draw_distance(distances: AttentionDistances, model: str, patch: int | None = None) -> bytes:
    """Draw a dot per head, its standard deviation over images, and the mean over heads."""
    depth, heads = distances.mean.shape
    sheet = Sheet(
        7.2,
        5.0,
        "Mean attention distance by layer",
        "  ·  ".join(
            (
                shorten_name(model, 48),
                format_image_count(distances.pictures),
                f"{distances.size[1]}×{distances.size[0]} pixels",
            )
        ),
    )
    axes = sheet.add_axes(MARGIN + 0.45, HEADING_HEIGHT + 0.25, 7.2 - 2 * MARGIN - 0.45, 5.0 - HEADING_HEIGHT - 0.95)
    aside = np.linspace(-0.22, 0.22, heads) if heads > 1 else np.zeros(1)
    across = np.arange(1, depth + 1)[:, None] + aside[None] * min(1.0, heads / 6)  # so that equal heads do not overlap
    if distances.pictures > 1:
        axes.vlines(
            across.ravel(),
            (distances.mean - distances.spread).ravel(),
            (distances.mean + distances.spread).ravel(),
            color=BLUE,
            alpha=0.28,
            linewidth=0.8,
        )
    axes.plot(
        across.ravel(),
        distances.mean.ravel(),
        "o",
        color=BLUE,
        markersize=4.2,
        markeredgewidth=0,
        alpha=0.85,
        label="head",
    )
    axes.plot(
        np.arange(1, depth + 1), distances.mean.mean(1), color=ORANGE, linewidth=1.8, label="mean over heads", zorder=3
    )
    if patch:
        axes.axhline(patch, color=MUTED, linewidth=0.8, linestyle=(0, (4, 4)), label=f"patch size, {patch} pixels")
    step = 1 if depth <= 16 else 2 if depth <= 32 else 4
    axes.set_xticks([1, *range(1 + step, depth + 1, step)])
    axes.set_xlim(0.5, depth + 0.5)
    most = float((distances.mean + distances.spread * (distances.pictures > 1)).max())
    axes.set_ylim(0, 1.06 * (most or patch or 1))  # an image of one patch has no distances
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer", fontsize=8, color=INK)
    axes.set_ylabel("mean attention distance, pixels", fontsize=8, color=INK)
    axes.legend(
        frameon=False,
        fontsize=7.5,
        labelcolor=MUTED,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=3,
        borderaxespad=0.2,
        handlelength=1.6,
    )
    return sheet.to_png()


MATRIX_COLUMNS = 12
SHEET_WIDTH, PLOT_HEIGHT = 10.6, 2.5


def draw_heads(view: ImageView) -> bytes:
    """Draw entropy by layer, spectrum by layer, and the similarity matrix of each layer."""
    trace = view.trace
    assert trace.entropy is not None
    assert trace.alike is not None
    depth, heads = trace.entropy.shape
    tiles = tile_matrices(trace.alike, round(DPI * (SHEET_WIDTH / min(depth, MATRIX_COLUMNS) - 0.06)))
    high = tiles.pixels.shape[0] / DPI
    sheet = Sheet(
        2 * MARGIN + 0.45 + SHEET_WIDTH,
        HEADING_HEIGHT + 0.3 + PLOT_HEIGHT + 1.0 + high + 0.6,
        "Differences between heads",
        format_subtitle(view, shorten_name(view.name), f"{heads} heads in each of {depth} layers"),
    )
    left = MARGIN + 0.45
    half = (SHEET_WIDTH - 0.9) / 2
    _plot_entropy(sheet, view, left, HEADING_HEIGHT + 0.3, half)
    _plot_layer_spectra(sheet, view, left + half + 0.9, HEADING_HEIGHT + 0.3, half)
    top = HEADING_HEIGHT + 0.3 + PLOT_HEIGHT + 1.0
    sheet.draw_text(left, top - 0.3, "Similarity of the heads of a layer", size=9, colour=INK, baseline="center")
    sheet.draw_colour_bar(left + SHEET_WIDTH - 2.0, top - 0.36, 2.0, SIMILARITY_CMAP, "disjoint", "equal")
    sheet.draw_mosaic(left, top + 0.12, tiles)
    for layer in range(depth):
        row, column = divmod(layer, MATRIX_COLUMNS)
        sheet.draw_text(
            left + tiles.columns[column] / DPI,
            top + 0.17 + (tiles.rows[row] + tiles.tile[0] / 2) / DPI,
            f"layer {layer + 1}",
            size=6.8,
            colour=MUTED,
            align="center",
        )
    return sheet.to_png()


def tile_matrices(similarity: np.ndarray, max_tile: int) -> Mosaic:
    """Return the matrices [L, H, H] as tiles."""
    depth, heads = similarity.shape[:2]
    size = fit_tile_size((heads, heads), max(8, max_tile))
    drawn = [resize_blocks(apply_cmap(rescale(layer, 0.0, 1.0), SIMILARITY_CMAP), size) for layer in similarity]
    lines = [drawn[start : start + MATRIX_COLUMNS] for start in range(0, depth, MATRIX_COLUMNS)]
    return build_mosaic(lines, gap=round(0.06 * DPI), extra_gaps=dict.fromkeys(range(len(lines)), round(0.22 * DPI)))


def _plot_entropy(sheet: Sheet, shown: ImageView, left: float, top: float, wide: float) -> None:
    entropy = shown.trace.entropy
    assert entropy is not None
    depth, heads = entropy.shape
    tokens = shown.trace.grid[0] * shown.trace.grid[1] + shown.trace.prefix
    axes = sheet.add_axes(left, top, wide, PLOT_HEIGHT)
    sheet.draw_text(left, top - 0.16, "Entropy of each head", size=9, colour=INK, baseline="center")
    aside = np.linspace(-0.2, 0.2, heads) * min(1.0, heads / 6) if heads > 1 else np.zeros(1)
    axes.plot(
        (np.arange(1, depth + 1)[:, None] + aside).ravel(),
        entropy.ravel(),
        "o",
        color=BLUE,
        markersize=3.8,
        markeredgewidth=0,
        alpha=0.85,
        label="head",
    )
    axes.plot(range(1, depth + 1), entropy.mean(1), color=ORANGE, linewidth=1.6, label="mean")
    most = math.log(tokens)
    axes.axhline(most, color=MUTED, linewidth=0.8, linestyle=(0, (4, 4)), label=f"uniform over {tokens:,} tokens")
    axes.set_ylim(0, most * 1.08)
    axes.set_xlim(0.5, depth + 0.5)
    axes.set_xticks([1, *range(2 if depth <= 16 else 3, depth + 1, 1 if depth <= 16 else 2 if depth <= 32 else 4)])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer", fontsize=8, color=INK)
    axes.set_ylabel("entropy of attention, nats", fontsize=8, color=INK)
    axes.legend(frameon=False, fontsize=7, labelcolor=MUTED, loc="lower right", handlelength=1.6)


def _plot_layer_spectra(sheet: Sheet, shown: ImageView, left: float, top: float, wide: float) -> None:
    spectrum, frequencies = shown.trace.spectrum, shown.trace.frequencies
    if spectrum is None or frequencies is None:
        return
    axes = sheet.add_axes(left, top, wide - 0.55, PLOT_HEIGHT)
    sheet.draw_text(left, top - 0.16, "Token spectrum of each layer", size=9, colour=INK, baseline="center")
    colours = colour_table(SIMILARITY_CMAP)[np.linspace(0, 235, len(spectrum)).round().astype(int)] / 255
    for layer, (line, colour) in enumerate(zip(spectrum, colours, strict=True)):
        axes.plot(frequencies, line, color=tuple(colour), linewidth=1.2, label=str(layer))
    axes.set_xlim(0, 1)
    axes.set_xlabel("frequency, units of π per patch", fontsize=8, color=INK)
    axes.set_ylabel("log amplitude, relative to frequency 0", fontsize=8, color=INK)
    bar = np.repeat(colour_table(SIMILARITY_CMAP)[np.linspace(235, 0, 200).round().astype(int)][:, None], 12, axis=1)
    inset = sheet.add_axes(left + wide - 0.36, top, 0.11, PLOT_HEIGHT)
    inset.imshow(bar, aspect="auto", interpolation="nearest")
    inset.set_axis_off()
    for share, word in ((1.0, "0"), (0.0, str(len(spectrum) - 1))):
        sheet.draw_text(left + wide - 0.2, top + share * PLOT_HEIGHT, word, size=7, colour=MUTED, baseline="center")
    sheet.draw_text(
        left + wide - 0.2, top + PLOT_HEIGHT / 2, "layer", size=7, colour=MUTED, rotation=90, baseline="center"
    )

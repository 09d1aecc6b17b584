"""Figures of attention distance, and of entropy, similarity and token spectrum by layer."""

import math
from typing import TYPE_CHECKING

import numpy as np

from vitrail.analysis.figures.image_view import ImageView, describe_input
from vitrail.analysis.figures.overlay import Mosaic, build_mosaic, fit_tile_size, resize_blocks
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, draw_legend, shorten_name
from vitrail.analysis.results import AttentionDistances
from vitrail.analysis.stages import StagedTrace, stack_heads
from vitrail.reports.colours import BLUE, MUTED, ORANGE, SIMILARITY_CMAP, apply_cmap, colour_table, rescale
from vitrail.utils.text import format_image_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED = (0, (4, 4))


def plot_heads(axes: "Axes", values: np.ndarray, spread: np.ndarray | None = None) -> None:
    """Plot a dot per head by layer, [L, H], with its standard deviation, and the mean over heads."""
    depth, heads = values.shape
    layers = np.arange(1, depth + 1)
    aside = np.linspace(-0.22, 0.22, heads) if heads > 1 else np.zeros(1)
    across = (layers[:, None] + aside[None] * min(1.0, heads / 6)).ravel()  # so that equal heads do not overlap
    if spread is not None:
        low, high = (values - spread).ravel(), (values + spread).ravel()
        axes.vlines(across, low, high, color=BLUE, alpha=0.28, linewidth=0.8)
    dots = {"markersize": 4.2, "markeredgewidth": 0, "alpha": 0.85}
    axes.plot(across, values.ravel(), "o", color=BLUE, label="head", **dots)
    axes.plot(layers, np.nanmean(values, 1), color=ORANGE, linewidth=1.8, label="mean over heads", zorder=3)
    step = 1 if depth <= 16 else 2 if depth <= 32 else 4
    axes.set_xticks([1, *range(1 + step, depth + 1, step)])
    axes.set_xlim(0.5, depth + 0.5)


def draw_distance(distances: AttentionDistances, model: str, patch: int | None = None) -> bytes:
    """Draw a dot per head, its standard deviation over images, and the mean over heads."""
    size = f"{distances.size[1]}×{distances.size[0]} pixels"
    facts = shorten_name(model, 48), format_image_count(distances.pictures), size
    sheet = Sheet(7.2, 5.0, "Mean attention distance by layer", *facts)
    left, top = MARGIN + 0.45, HEADING_HEIGHT + 0.25
    bounds = left, top, 7.2 - MARGIN - left, 4.3 - top
    axes = sheet.add_axes(*bounds, x="layer", y="mean attention distance, pixels", x_grid=False)
    spread = distances.spread if distances.pictures > 1 else None
    plot_heads(axes, distances.mean, spread)
    if patch:
        axes.axhline(patch, color=MUTED, linewidth=0.8, linestyle=DASHED, label=f"patch size, {patch} pixels")
    most = float(np.nanmax(distances.mean if spread is None else distances.mean + spread))
    axes.set_ylim(0, 1.06 * (most or patch or 1))  # an image of one patch has no distances
    above = {"bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}
    draw_legend(axes, "lower left", ncols=3, handlelength=1.6, **above)
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
    left, plot_top, half = MARGIN + 0.45, HEADING_HEIGHT + 0.3, (SHEET_WIDTH - 0.9) / 2
    top = plot_top + PLOT_HEIGHT + 1.0
    facts = *describe_input(view), shorten_name(view.name), f"{heads} heads in each of {depth} layers"
    sheet = Sheet(left + SHEET_WIDTH + MARGIN, top + tiles.inches[1] + 0.6, "Differences between heads", *facts)
    _plot_entropy(sheet, view, left, plot_top, half)
    _plot_layer_spectra(sheet, view, left + half + 0.9, plot_top, half)
    sheet.draw_text(left, top - 0.3, "Similarity of the heads of a layer", size=9, baseline="center")
    sheet.draw_colour_bar(left + SHEET_WIDTH - 2.0, top - 0.36, 2.0, SIMILARITY_CMAP, "disjoint", "equal")
    sheet.draw_mosaic(left, top + 0.12, tiles)
    for layer in range(depth):
        row, column = divmod(layer, MATRIX_COLUMNS)
        under = top + 0.17 + (tiles.rows[row] + tiles.tile[0] / 2) / DPI
        sheet.draw_label(left + tiles.columns[column] / DPI, under, f"layer {layer + 1}", size=6.8, align="center")
    return sheet.to_png()


def draw_staged_heads(view: ImageView, trace: StagedTrace) -> bytes:
    """Draw entropy and distance of each head by layer, with those of uniform attention inside the windows."""
    entropy, distance = (
        stack_heads(getattr(layer, name) for layer in trace.layers) for name in ("entropy", "distance")
    )
    left, top, half = MARGIN + 0.45, HEADING_HEIGHT + 0.3, (SHEET_WIDTH - 0.9) / 2
    facts = *describe_input(view), shorten_name(view.name), "later stages have more heads"
    sheet = Sheet(left + SHEET_WIDTH + MARGIN, top + PLOT_HEIGHT + 0.7, "Differences between heads", *facts)
    sheet.draw_text(left, top - 0.16, "Entropy of each head", size=9, baseline="center")
    axes = sheet.add_axes(left, top, half, PLOT_HEIGHT, x="layer", y="entropy of attention, nats", x_grid=False)
    plot_heads(axes, entropy)
    uniform = [math.log(layer.key_cells.shape[1]) for layer in trace.layers]
    layers = range(1, len(uniform) + 1)
    label = "uniform in a window" if trace.has_windows else "uniform attention"
    axes.step(layers, uniform, where="mid", color=MUTED, linewidth=0.8, linestyle=DASHED, label=label)
    axes.set_ylim(0, max(uniform) * 1.08 or 1)
    draw_legend(axes, "lower right", 7, handlelength=1.6)
    other = left + half + 0.9
    sheet.draw_text(other, top - 0.16, "Attention distance of each head", size=9, baseline="center")
    axes = sheet.add_axes(other, top, half, PLOT_HEIGHT, x="layer", y="mean attention distance, pixels", x_grid=False)
    plot_heads(axes, distance)
    axes.set_ylim(0, 1.06 * (float(np.nanmax(distance)) or 1))
    return sheet.to_png()


def tile_matrices(similarity: np.ndarray, max_tile: int) -> Mosaic:
    """Return the matrices [L, H, H] as tiles."""
    depth, heads = similarity.shape[:2]
    size = fit_tile_size((heads, heads), max(8, max_tile))
    tiles = [resize_blocks(apply_cmap(rescale(layer, 0.0, 1.0), SIMILARITY_CMAP), size) for layer in similarity]
    rows = [tiles[start : start + MATRIX_COLUMNS] for start in range(0, depth, MATRIX_COLUMNS)]
    return build_mosaic(rows, gap=round(0.06 * DPI), extra_gaps=dict.fromkeys(range(len(rows)), round(0.22 * DPI)))


def _plot_entropy(sheet: Sheet, view: ImageView, left: float, top: float, width: float) -> None:
    entropy = view.trace.entropy
    assert entropy is not None
    sheet.draw_text(left, top - 0.16, "Entropy of each head", size=9, baseline="center")
    axes = sheet.add_axes(left, top, width, PLOT_HEIGHT, x="layer", y="entropy of attention, nats", x_grid=False)
    plot_heads(axes, entropy)
    tokens = view.trace.grid[0] * view.trace.grid[1] + view.trace.prefix
    uniform = math.log(tokens)
    axes.axhline(uniform, color=MUTED, linewidth=0.8, linestyle=DASHED, label=f"uniform over {tokens:,} tokens")
    axes.set_ylim(0, uniform * 1.08)
    draw_legend(axes, "lower right", 7, handlelength=1.6)


def _plot_layer_spectra(sheet: Sheet, view: ImageView, left: float, top: float, width: float) -> None:
    spectrum, frequencies = view.trace.spectrum, view.trace.frequencies
    if spectrum is None or frequencies is None:
        return
    sheet.draw_text(left, top - 0.16, "Token spectrum of each layer", size=9, baseline="center")
    x, y = "frequency, units of π per patch", "log amplitude, relative to frequency 0"
    axes = sheet.add_axes(left, top, width - 0.55, PLOT_HEIGHT, x, y)
    table = colour_table(SIMILARITY_CMAP)[:236]  # without the lightest colours
    colours = table[np.linspace(0, 235, len(spectrum)).round().astype(int)] / 255
    for values, colour in zip(spectrum, colours, strict=True):
        axes.plot(frequencies, values, color=tuple(colour), linewidth=1.2)
    axes.set_xlim(0, 1)
    sheet.draw_image(left + width - 0.36, top, 0.11, np.repeat(table[::-1, None], 12, axis=1), PLOT_HEIGHT)
    for share, text in ((1.0, "0"), (0.0, str(len(spectrum) - 1))):
        sheet.draw_label(left + width - 0.2, top + share * PLOT_HEIGHT, text, baseline="center")
    sheet.draw_label(left + width - 0.2, top + PLOT_HEIGHT / 2, "layer", rotation=90, baseline="center")

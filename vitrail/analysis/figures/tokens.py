"""Figures of the patch embedding and of the patch tokens by layer: components, similarity, norms."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from vitrail.analysis.figures import overlay
from vitrail.analysis.figures.image_view import IMAGE_WIDTH, ImageView, describe_input, draw_side_image
from vitrail.analysis.figures.overlay import Mosaic, PixelSize, build_mosaic, outline_patch, resize_blocks, resize_image
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet, draw_legend
from vitrail.analysis.tokens import token_colours
from vitrail.reports import colours
from vitrail.reports.colours import NORM_CMAP, SIMILARITY_CMAP, apply_cmap, rescale

STEP_WIDTH, STEP_GAP, STEP_PIXELS = 2.05, 0.5, 480


def draw_patches(view: ImageView) -> bytes:
    """Draw a panel per step of equation 1, with its name and shape."""
    trace, linear = view.trace, view.is_linear_embedding
    assert trace.embedded is not None
    patches, side, channels = trace.grid[0] * trace.grid[1], trace.patch, view.channels
    height, width = view.pixels.shape[:2]
    rows, columns = (height, width) if view.axes is None else (view.axes.bins, view.axes.columns)
    size = view.fit_width(STEP_PIXELS)

    def draw_vectors(vectors: np.ndarray) -> np.ndarray:
        return resize_blocks(colour_by_components(vectors), size)

    # Convolutions see beyond the edges of a patch.
    area, values = f"{side}×{side}", channels * side**2
    patch = f"{area}×{channels} = {values:,}" if linear else f"{area} pixels, with surroundings"
    tokens = f"{patches:,}×{trace.embedded.shape[2]:,} values"
    projected = "tokens xₚ E" if linear else "tokens, by convolutions"
    steps = [  # sign before the panel, pixels, name, shape
        ("", resize_image(view.pixels, size), f"{view.noun} x", f"{rows}×{columns}×{channels} values"),
        ("→", cut_patches(view, size), "patches xₚ", f"{patches:,} of {patch}"),
        ("→ E" if linear else "→", draw_vectors(trace.embedded), projected, tokens),
    ]
    if trace.positions is not None:
        before = f"+ {trace.prefix} before them" if trace.prefix else "nothing before them"
        shape = f"{patches + trace.prefix:,}×{trace.embedded.shape[2]:,}: {patches:,} {before}"
        steps.append(("+", draw_vectors(trace.positions), "positions Eₚₒₛ", tokens))
        steps.append(("=", draw_vectors(trace.embedded + trace.positions), "z₀", shape))
    top, under = HEADING_HEIGHT, HEADING_HEIGHT + STEP_WIDTH * height / width
    sheet_width = 2 * MARGIN + len(steps) * STEP_WIDTH + (len(steps) - 1) * STEP_GAP
    sheet_height = under + (1.0 if trace.positions is None else 0.78)
    facts = *describe_input(view), "tokens, positions and sums by three principal components, as red, green and blue"
    sheet = Sheet(sheet_width, sheet_height, "Patch embedding", *facts)
    for index, (sign, pixels, name, shape) in enumerate(steps):
        left = MARGIN + index * (STEP_WIDTH + STEP_GAP)
        sheet.draw_image(left, top, STEP_WIDTH, pixels)
        sheet.draw_text(left - STEP_GAP / 2, (top + under) / 2, sign, size=13, align="center", baseline="center")
        sheet.draw_text(left, under + 0.12, name, size=8.4)
        sheet.draw_label(left, under + 0.32, shape)
    if trace.positions is None:
        note = "No position embedding is added to the tokens: this model uses positions in its attention, or none."
        sheet.draw_label(MARGIN, under + 0.62, note, size=7.2)
    return sheet.to_png()


def cut_patches(view: ImageView, size: PixelSize, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
    """Return the image cut into its patches, with gaps, at this size."""
    h, w = view.trace.grid
    side = max(2, min(size[0] // h, size[1] // w) * 4 // 5)
    small = resize_image(view.pixels, (h * side, w * side))
    tiles = [np.split(row, w, axis=1) for row in np.split(small, h)]
    return resize_image(build_mosaic(tiles, max(1, side // 5), background).pixels, size)


def colour_by_components(values: np.ndarray) -> np.ndarray:
    """Return vectors [h, w, D] as colours, uint8 [h, w, 3], by their first three principal components."""
    components = token_colours(torch.from_numpy(values).flatten(0, 1)).numpy()  # [n, 3] in 0…1
    return (components * 255).round().astype(np.uint8).reshape(*values.shape[:2], 3)


LABEL_WIDTH, PLOT_HEIGHT = 0.75, 1.9


def draw_tokens(view: ImageView, layers: Sequence[int] | None = None) -> bytes:
    """Draw a column per layer (0 is z_0), a row per map, and a plot of all norms."""
    trace = view.trace
    assert trace.norms is not None
    numbers = [0, *layers] if layers else list(range(len(trace.norms)))
    tiles, rows = build_token_rows(view, numbers, round(DPI * min(1.2, max(0.36, 10.6 / len(numbers)))))
    width, height = max(3.2, tiles.inches[0]), tiles.inches[1]
    left, top = MARGIN + IMAGE_WIDTH + 0.35 + LABEL_WIDTH, HEADING_HEIGHT + 0.32
    beside = IMAGE_WIDTH * view.pixels.shape[0] / view.pixels.shape[1] + 1.9
    size = left + width + MARGIN, top + max(height + 0.65 + PLOT_HEIGHT + 0.6, beside)
    sheet = Sheet(*size, "Patch tokens by layer", *describe_input(view), "layer 0 is the embedding with positions")
    end = draw_side_image(sheet, MARGIN, top, view, mark=trace.at is not None)
    if trace.similar is not None:
        low, label = f"{similarity_floor(trace.similar):.1f}", "cosine similarity with the outlined patch"
        sheet.draw_colour_bar(MARGIN, end + 0.25, IMAGE_WIDTH, SIMILARITY_CMAP, low.replace("-", "−"), "1", label)
        end += 0.55
    sheet.draw_colour_bar(MARGIN, end + 0.25, IMAGE_WIDTH, NORM_CMAP, "minimum", "maximum", "norm, in each layer")
    sheet.draw_label(left, HEADING_HEIGHT + 0.02, "layer", baseline="center")
    sheet.draw_mosaic(left, top, tiles, rows, [str(layer) for layer in numbers])
    _plot_norms(sheet, view, left, top + height + 0.65, width)
    return sheet.to_png()


def build_token_rows(view: ImageView, layers: Sequence[int], max_tile: int, gap: int = 4) -> tuple[Mosaic, list[str]]:
    """Return the maps as tiles, and the name of each row."""
    trace = view.trace
    size = overlay.fit_tile_size(trace.grid, max_tile)
    rows: dict[str, list[np.ndarray]] = {}
    if trace.colours is not None:
        components = (trace.colours.clip(0, 1) * 255).round().astype(np.uint8)
        rows["components"] = [resize_blocks(components[layer], size) for layer in layers]
    if trace.similar is not None:
        maps = apply_cmap(rescale(trace.similar, similarity_floor(trace.similar), 1.0), SIMILARITY_CMAP)
        box, line = view.patch_box, max(1, max_tile // 110)
        rows["similarity"] = [outline_patch(resize_blocks(maps[layer], size), box, line) for layer in layers]
    if trace.norms is not None:
        rows["norm"] = [resize_blocks(apply_cmap(rescale(trace.norms[layer]), NORM_CMAP), size) for layer in layers]
    return build_mosaic(list(rows.values()), gap, extra_gaps=dict.fromkeys(range(len(rows)), gap)), list(rows)


def similarity_floor(similarity: np.ndarray) -> float:
    """Return the lower end of the similarity scale: the minimum rounded down to tenths."""
    return max(-1.0, math.floor(10 * float(similarity.min())) / 10)


def find_outliers(norms: np.ndarray) -> np.ndarray:
    """Return which patch tokens [..., h, w] have more than twice the median norm of their layer."""
    return norms > 2 * np.median(norms, axis=(-2, -1), keepdims=True)


def _plot_norms(sheet: Sheet, view: ImageView, left: float, top: float, width: float) -> None:
    """Plot the norm of every token by layer: patches as dots, prefix tokens as lines."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    norms, prefix = view.trace.norms, view.trace.prefix_norms
    assert norms is not None
    depth = len(norms)
    values, outlier = norms.reshape(depth, -1), find_outliers(norms).reshape(depth, -1)
    layer = np.repeat(np.arange(depth)[:, None], values.shape[1], axis=1)
    across = layer + np.random.default_rng(0).uniform(-0.16, 0.16, layer.shape)
    axes = sheet.add_axes(left, top, width, PLOT_HEIGHT, x="layer", y="norm of the token", x_grid=False)
    dots = (
        (~outlier, {"color": colours.BLUE, "alpha": 0.3, "label": "patches", "markersize": 1.8}),
        (outlier, {"color": colours.RED, "alpha": 0.9, "label": "patches above twice the median", "markersize": 3.2}),
    )
    for chosen, style in dots:
        if chosen.any():
            axes.plot(across[chosen], values[chosen], "o", markeredgewidth=0, **style)
    for token in range(0 if prefix is None else min(prefix.shape[1], 8)):
        assert prefix is not None
        name = f"prefix token {token + 1}"
        if view.trace.reader in ("class token", "output tokens") and prefix.shape[1] <= 2:
            name = ("class token", "distillation token")[token]
        colour = (colours.ORANGE, colours.VIOLET, *[colours.MUTED] * 6)[token]
        axes.plot(range(depth), prefix[:, token], color=colour, linewidth=1.3, label=name if token < 3 else None)
    axes.set_yscale("log")
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_xticks(range(0, depth, 1 if depth <= 20 else 2))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    draw_legend(axes, "lower left", 7, bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.1)

"""Figures of models whose layers have grids of their own: attention in windows, and token maps of every layer.

L layers, H heads of a layer, h×w cells of its grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vitrail.analysis.figures import overlay
from vitrail.analysis.figures.image_view import IMAGE_WIDTH, ImageView, describe_input, draw_side_image
from vitrail.analysis.figures.overlay import (
    Mosaic,
    PixelSize,
    build_mosaic,
    make_background,
    outline_patch,
    overlay_heat,
)
from vitrail.analysis.figures.sheet import DPI, HEADING_HEIGHT, MARGIN, Sheet
from vitrail.analysis.figures.tokens import similarity_floor
from vitrail.analysis.stages import LayerTrace, StagedTrace
from vitrail.reports.colours import HEAT_CMAP, NORM_CMAP, SIMILARITY_CMAP, apply_cmap, rescale

Box = tuple[int, int, int, int]  # top, left, bottom and right, in pixels of the image
LINE_COLOUR = np.array((255.0, 255.0, 255.0))
LABEL_WIDTH = 0.55  # inches, for row labels
BLANK = 255


@dataclass(frozen=True)
class StagedView(ImageView):
    """One image to draw, with the arrays of every layer."""

    staged: StagedTrace = field(default_factory=lambda: StagedTrace((1, 1)))

    @property
    def patch_box(self) -> tuple[float, float, float, float] | None:
        """Return left, top, width and height of the selected patch of the embedding as fractions of the image."""
        if self.staged.pixel is None:
            return None
        stride, (height, width) = self.staged.strides[0], self.staged.size
        x, y = (side // stride * stride for side in self.staged.pixel)
        return x / width, y / height, stride / width, stride / height


def draw_windows(view: StagedView, layers: Sequence[int] | None = None, at: bool = False) -> bytes:
    """Draw a row per layer (of `layers`, from 1): the mean over heads with the windows over the image, then every head.

    The maps are the attention that each cell receives or, with `at`, that of the selected cell, enlarged to its window.
    """
    trace = view.staged
    layers = list(layers or range(1, len(trace.layers) + 1))
    tiles, heads = build_window_rows(view, layers, round(DPI * min(1.15, max(0.6, 13.0 / len(layers)))), at)
    left, top = MARGIN + IMAGE_WIDTH + 0.35 + LABEL_WIDTH, HEADING_HEIGHT + 0.32
    width, height = tiles.inches
    beside = IMAGE_WIDTH * view.pixels.shape[0] / view.pixels.shape[1] + 1.5
    title, notes = "Attention from one position" if at else "Attention received", ["each map from 0 to its own maximum"]
    if trace.has_windows:
        title = "Attention inside windows, from one position" if at else "Attention received inside windows"
        notes.append("lines are windows")
    size = left + max(width, 3.4) + MARGIN, HEADING_HEIGHT + max(height + 0.78, beside)
    sheet = Sheet(*size, title, *describe_input(view), *notes)
    end = draw_side_image(sheet, MARGIN, top, view, mark=at)
    label = "attention weight" if at else "attention received"
    sheet.draw_colour_bar(MARGIN, end + 0.3, IMAGE_WIDTH, HEAT_CMAP, "0", "maximum", f"{label} in each map")
    names = ["mean over heads", "its window"][: len(tiles.columns)]
    sheet.draw_mosaic(left, top, tiles, columns=names)
    sheet.draw_label(left + heads / DPI, top - 0.06, "heads from 1, in two lines", baseline="bottom")
    for middle, layer in zip(tiles.rows, layers, strict=True):
        traced, across = trace.layers[layer - 1], {"align": "right", "baseline": "center"}
        sheet.draw_text(left - 0.1, top + middle / DPI - 0.07, f"layer {layer}", size=7, **across)
        sheet.draw_label(
            left - 0.1, top + middle / DPI + 0.07, f"{traced.grid[0]}×{traced.grid[1]}", size=6.5, **across
        )
    return sheet.to_png()


def build_window_rows(
    view: StagedView, layers: Sequence[int], max_tile: int, at: bool = False, gap: int = 4
) -> tuple[Mosaic, int]:
    """Return the tiles of each layer in a row, and where the heads begin, in pixels.

    First the mean over heads on the image; with `at`, the window of the selected cell, if there are windows; then the heads
    in two lines.
    """
    zooms = at and view.staged.has_windows
    chosen = [view.staged.layers[layer - 1] for layer in layers]
    large = overlay.fit_tile_size(view.pixels.shape[:2], max_tile)
    zoom = (min(large), min(large))
    small = (min(large) - gap) // 2, (min(large) - gap) // 2
    if not zooms:
        small = (large[0] - gap) // 2, (large[1] - gap) // 2
    start = large[1] + gap + (zoom[1] + gap if zooms else 0) + 2 * gap
    most = max(-(-len(layer.received) // 2) for layer in chosen)
    shape = len(chosen) * (large[0] + 2 * gap) - 2 * gap, start + most * (small[1] + gap) - gap, 3
    pixels, rows = np.full(shape, BLANK, dtype=np.uint8), []
    for number, layer in enumerate(chosen):
        top, maps, whole = number * (large[0] + 2 * gap), select_maps(layer, at), (0, 0, *view.staged.size)
        rows.append(top + large[0] / 2)
        put_tile(pixels, top, 0, draw_tile(view, layer, maps.mean(0), whole, large))
        box = frame_window(view, layer) if zooms else whole
        if zooms:
            put_tile(pixels, top, large[1] + gap, draw_tile(view, layer, maps.mean(0), box, zoom))
        for head, values in enumerate(maps):
            line, column = divmod(head, -(-len(maps) // 2))
            place = top + line * (small[0] + gap), start + column * (small[1] + gap)
            put_tile(pixels, *place, draw_tile(view, layer, values, box, small))
    columns = large[1] / 2, large[1] + gap + zoom[1] / 2
    return Mosaic(pixels, tuple(rows), columns[: 2 if zooms else 1], large), start


def put_tile(pixels: np.ndarray, top: int, left: int, tile: np.ndarray) -> None:
    """Draw a tile on a canvas."""
    pixels[top : top + tile.shape[0], left : left + tile.shape[1]] = tile


def tile_means(view: StagedView, layers: Sequence[int], max_tile: int, at: bool = False, gap: int = 1) -> Mosaic:
    """Return the mean over heads of these layers side by side."""
    size, whole = overlay.fit_tile_size(view.pixels.shape[:2], max_tile), (0, 0, *view.staged.size)
    chosen = [view.staged.layers[layer - 1] for layer in layers]
    return build_mosaic([[draw_tile(view, one, select_maps(one, at).mean(0), whole, size) for one in chosen]], gap)


def select_maps(layer: LayerTrace, at: bool) -> np.ndarray:
    """Return the maps of the heads of a layer, [H, a, b]."""
    maps = layer.attention_at if at else layer.received
    assert maps is not None
    return maps


def frame_window(view: StagedView, layer: LayerTrace) -> Box:
    """Return a square around the window of the selected cell, with a cell of its surroundings, inside the image."""
    assert layer.attention_at is not None
    rows, columns = np.nonzero(~np.isnan(layer.attention_at[0]))
    stride, (height, width) = layer.key_stride, view.staged.size
    side = min(height, width, (int(max(np.ptp(rows), np.ptp(columns))) + 3) * stride)
    top = int(np.clip((rows.min() + rows.max() + 1) * stride // 2 - side // 2, 0, height - side))
    left = int(np.clip((columns.min() + columns.max() + 1) * stride // 2 - side // 2, 0, width - side))
    return top, left, top + side, left + side


def sample_cells(values: np.ndarray, stride: int, box: Box, size: PixelSize) -> np.ndarray:
    """Return the values of cells, [h, w, …], at the pixels of a tile of this size that shows a box of the image."""
    rows, columns = (
        ((np.arange(count) + 0.5) * (high - low) / count + low).astype(int) // stride
        for count, low, high in ((size[0], box[0], box[2]), (size[1], box[1], box[3]))
    )
    return values[rows.clip(0, values.shape[0] - 1)][:, columns.clip(0, values.shape[1] - 1)]


def draw_tile(view: StagedView, layer: LayerTrace, values: np.ndarray, box: Box, size: PixelSize) -> np.ndarray:
    """Return a map over a box of the image: heat where there are values, the image where they are NaN, lines at windows."""
    part = overlay.resize_image(view.pixels[box[0] : box[2], box[1] : box[3]], size)
    heat = sample_cells(rescale(values, 0.0), layer.key_stride, box, size)
    inside = ~np.isnan(heat)[..., None]
    tile = np.where(inside, overlay_heat(part, np.nan_to_num(heat)), make_background(part, 1.0).round())
    edge = find_edges(sample_cells(layer.windows, layer.stride, box, size), line=max(1, min(size) // 140))
    strength = 0.55 if inside.all() else 0.3
    tile = np.where(edge[..., None], (1 - strength) * tile + strength * LINE_COLOUR, tile).round().astype(np.uint8)
    if layer.at is None or (not np.isnan(values).any() and layer.windows.max()):
        return tile
    (top, left, bottom, right), (row, column) = box, layer.at
    x, y, side = column * layer.stride - left, row * layer.stride - top, layer.stride
    return outline_patch(
        tile, (x / (right - left), y / (bottom - top), side / (right - left), side / (bottom - top)), 1
    )


def find_edges(windows: np.ndarray, line: int = 1) -> np.ndarray:
    """Return the pixels at borders between windows, bool [H, W], as lines of `line` pixels."""
    edge = np.zeros(windows.shape, dtype=bool)
    down, across = windows[1:] != windows[:-1], windows[:, 1:] != windows[:, :-1]
    for step in range(line):
        edge[1 + step :] |= down[: len(down) - step]
        edge[:, 1 + step :] |= across[:, : across.shape[1] - step]
    return edge


def draw_staged_tokens(view: StagedView, layers: Sequence[int] | None = None) -> bytes:
    """Draw a column per layer (0 is the embedding), a row per map of its tokens."""
    trace = view.staged
    assert trace.norms is not None
    numbers = [0, *layers] if layers else list(range(len(trace.norms)))
    tiles, rows = build_staged_token_rows(view, numbers, round(DPI * min(1.2, max(0.5, 10.6 / len(numbers)))))
    left, top = MARGIN + IMAGE_WIDTH + 0.35 + 0.75, HEADING_HEIGHT + 0.45
    beside = IMAGE_WIDTH * view.pixels.shape[0] / view.pixels.shape[1] + 1.9
    size = left + max(3.2, tiles.inches[0]) + MARGIN, top + max(tiles.inches[1] + 0.5, beside)
    sheet = Sheet(*size, "Tokens by layer", *describe_input(view), "layer 0 is the embedding")
    end = draw_side_image(sheet, MARGIN, top, view, mark=trace.pixel is not None)
    if trace.similar is not None:
        low = f"{similarity_floor(np.concatenate([m.ravel() for m in trace.similar])):.1f}".replace("-", "−")
        label = "cosine similarity with the outlined cell"
        sheet.draw_colour_bar(MARGIN, end + 0.25, IMAGE_WIDTH, SIMILARITY_CMAP, low, "1", label)
        end += 0.55
    sheet.draw_colour_bar(MARGIN, end + 0.25, IMAGE_WIDTH, NORM_CMAP, "minimum", "maximum", "norm, in each layer")
    sheet.draw_label(left, HEADING_HEIGHT + 0.02, "layer, and its grid below", baseline="center")
    sheet.draw_mosaic(left, top, tiles, rows, [str(number) for number in numbers])
    for middle, number in zip(tiles.columns, numbers, strict=True):
        grid = "×".join(map(str, trace.norms[number].shape))
        sheet.draw_label(left + middle / DPI, top + tiles.inches[1] + 0.06, grid, size=6.5, align="center")
    return sheet.to_png()


def build_staged_token_rows(
    view: StagedView, layers: Sequence[int], max_tile: int, gap: int = 4
) -> tuple[Mosaic, list[str]]:
    """Return the token maps as tiles, and the name of each row."""
    trace, rows = view.staged, dict[str, list[np.ndarray]]()
    size, box = overlay.fit_tile_size(trace.size, max_tile), (0, 0, *trace.size)

    def draw_row(maps: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [sample_cells(maps[layer], trace.strides[layer], box, size) for layer in layers]

    if trace.colours is not None:
        rows["components"] = draw_row([(m.clip(0, 1) * 255).round().astype(np.uint8) for m in trace.colours])
    if trace.similar is not None and trace.pixel is not None:
        low = similarity_floor(np.concatenate([m.ravel() for m in trace.similar]))
        tiles = draw_row([apply_cmap(rescale(m, low, 1.0), SIMILARITY_CMAP) for m in trace.similar])
        (height, width), (x, y) = trace.size, trace.pixel
        rows["similarity"] = []
        for layer, tile in zip(layers, tiles, strict=True):
            side = trace.strides[layer]
            cell = x // side * side / width, y // side * side / height, side / width, side / height
            rows["similarity"].append(outline_patch(tile, cell, max(1, max_tile // 110)))
    if trace.norms is not None:
        rows["norm"] = draw_row([apply_cmap(rescale(m), NORM_CMAP) for m in trace.norms])
    return build_mosaic(list(rows.values()), gap, extra_gaps=dict.fromkeys(range(len(rows)), gap)), list(rows)

"""Views as terminal graphics: the tiles of the figures, smaller, with a legend."""

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

import numpy as np
from PIL import Image

from vitrail.analysis.figures import attention, tokens, windows
from vitrail.analysis.figures.image_view import ImageView
from vitrail.analysis.figures.overlay import build_mosaic, outline_patch, resize_image
from vitrail.analysis.figures.weights import tile_filters, tile_positions
from vitrail.analysis.figures.windows import StagedView
from vitrail.analysis.results import AttentionDistances, ModelView, PrincipalFilters, space_evenly
from vitrail.analysis.sounds import SoundAxes
from vitrail.utils.text import format_image_count

ColourDepth = Literal["true", "256", "none"]
DENSITY_CHARACTERS = " .:-=+*#%@"
MAX_COLUMNS = 160
AXIS_MARGIN = 5  # characters before a spectrogram: its frequencies


def detect_colour_depth(stream: TextIO, environment: Mapping[str, str] | None = None) -> ColourDepth:
    """Return the colour depth of a stream: "none" if it is no terminal or NO_COLOR is set."""
    variables = os.environ if environment is None else environment
    if not stream.isatty() or variables.get("NO_COLOR") or variables.get("TERM", "dumb") == "dumb":
        return "none"
    true = variables.get("COLORTERM", "").lower() in ("truecolor", "24bit") or "direct" in variables.get("TERM", "")
    return "true" if true else "256"


def get_terminal_width() -> int:
    """Return the usable width in characters."""
    return max(20, min(MAX_COLUMNS, shutil.get_terminal_size((80, 24)).columns - 1))


def render_pixels(pixels: np.ndarray, columns: int, depth: ColourDepth) -> list[str]:
    """Return an image, uint8 [H, W, 3], as lines of at most `columns` characters; it is never enlarged."""
    height, width = pixels.shape[:2]
    across = min(columns, width)
    down = max(1, round(height * across / width))
    down += down % 2
    if (down, across) != (height, width):
        pixels = np.asarray(Image.fromarray(pixels).resize((across, down), Image.Resampling.BOX))
    upper, lower = pixels[0::2], pixels[1::2]
    if depth == "none":
        light = (upper.astype(float) + lower) @ np.array([0.299, 0.587, 0.114]) / 2
        steps = (light / 256 * len(DENSITY_CHARACTERS)).astype(int)
        return ["".join(DENSITY_CHARACTERS[k] for k in row).rstrip() for row in steps]
    lines = []
    for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
        line, before = "", ("", "")
        for top, bottom in zip(above, below, strict=True):
            codes = _colour_code(38, top, depth), _colour_code(48, bottom, depth)  # the upper half; the background
            changed = "".join(new for new, old in zip(codes, before, strict=True) if new != old)
            line, before = f"{line}{changed}▀", codes
        lines.append(f"{line}\033[0m")
    return lines


def _colour_code(layer: int, colour: list[int], depth: ColourDepth) -> str:
    """Return the escape code of a colour for the foreground, 38, or the background, 48."""
    if depth == "true":
        return f"\033[{layer};2;{colour[0]};{colour[1]};{colour[2]}m"
    return f"\033[{layer};5;{nearest_colour_index(colour)}m"


def nearest_colour_index(colour: list[int]) -> int:
    """Return the nearest of the 256 colours: of the 6×6×6 cube or of the grey steps."""
    levels = (0, 95, 135, 175, 215, 255)
    cube = [min(range(6), key=lambda k: abs(levels[k] - value)) for value in colour]
    grey = min(23, max(0, round((sum(colour) / 3 - 8) / 10)))
    far_cube = sum((levels[k] - value) ** 2 for k, value in zip(cube, colour, strict=True))
    far_grey = sum((8 + 10 * grey - value) ** 2 for value in colour)
    return 232 + grey if far_grey < far_cube else 16 + 36 * cube[0] + 6 * cube[1] + cube[2]


def render_dot_plot(values: np.ndarray, columns: int, unit: str) -> list[str]:
    """Return a line per layer with a mark per head, [L, H], from 0 to the maximum, and the mean."""
    room = max(10, columns - 22)
    most = float(np.nanmax(values))
    most = most if most > 1e-12 else 1.0
    lines = []
    for layer, row in enumerate(values, start=1):
        cells = ["·"] * room
        row = row[~np.isnan(row)]  # heads that a layer does not have
        for value in row:
            cells[min(room - 1, int(max(0.0, value) / most * (room - 1)))] = "●"
        lines.append(f"layer {layer:>2}  {''.join(cells)}  {row.mean():6.1f}")
    lines.append(f"{'':10}0{f'{most:.3g} {unit}':>{room - 1}}  {'mean':>6}")
    return lines


TERMINAL_VIEWS = ("attention", "rollout", "relevance", "distance", "positions", "filters", "tokens", "heads", "patches")
DARK_BACKGROUND = (16, 15, 20)
MAX_HEADS_SHOWN = 4  # with more heads, only their mean is shown


def render_image_view(
    image_view: ImageView, view: str, columns: int, depth: ColourDepth, layers: Sequence[int] | None = None
) -> list[str]:
    """Return a view of one image with its legend."""
    trace = image_view.trace
    if view == "heads":
        assert trace.entropy is not None
        return [*render_dot_plot(trace.entropy, columns, "nats"), "entropy of attention: one dot per head"]
    if isinstance(image_view, StagedView) and view in ("attention", "tokens"):
        draw = _draw_windows if view == "attention" else _draw_staged_tokens
        pixels, legend = draw(image_view, columns, layers)
    elif view == "attention":
        pixels, legend = _draw_attention(image_view, columns, layers)
    elif view == "tokens":
        pixels, legend = _draw_tokens(image_view, columns, layers)
    elif view == "patches":
        pixels, legend = _draw_patches(image_view, columns)
    else:
        values = trace.rollout if view == "rollout" else trace.relevance
        assert values is not None
        target = "" if trace.target is None else f" for {image_view.label(trace.target)}"
        name = "attention rollout over all layers" if view == "rollout" else f"gradient-weighted relevance{target}"
        margin = 0 if image_view.axes is None else AXIS_MARGIN
        over = attention.overlay_map(image_view, values, min(64, (columns - margin - 1) // 2))
        pixels = _place_side_by_side(resize_image(image_view.pixels, over.shape[:2]), over)
        legend = f"the {image_view.noun}, and {name}: light is high"
        if image_view.axes is not None:
            lines = render_pixels(pixels, columns - margin, depth)
            return [*_write_axes(lines, image_view.axes, over.shape[1], 2), legend]
    if image_view.axes is not None and view != "patches":
        legend += f"; from left to right {image_view.axes.describe()}, low frequencies at the bottom"
    return [*render_pixels(pixels, columns, depth), legend]


def _write_axes(lines: list[str], axes: SoundAxes, width: int, copies: int) -> list[str]:
    """Return the lines of a drawing with frequencies before them and times below each of its copies side by side."""
    marks = {min(len(lines) - 1, int(place * len(lines))): text for place, text in reversed(axes.hertz_ticks)}
    marks[0] = marks.get(0, "Hz")
    below = [" "] * (copies * (width + 1))
    for copy in range(copies):
        for place, text in axes.second_ticks:
            start = copy * (width + 1) + min(max(0, round(place * width) - len(text) // 2), width - len(text) - 2)
            text += " s" if place == axes.second_ticks[-1][0] else ""
            if all(cell == " " for cell in below[max(0, start - 1) : start + len(text)]):
                below[start : start + len(text)] = text
    numbered = [f"{marks.get(row, ''):>{AXIS_MARGIN - 1}} {line}" for row, line in enumerate(lines)]
    return [*numbered, (" " * AXIS_MARGIN + "".join(below)).rstrip()]


def _place_side_by_side(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return build_mosaic([[left, right]], gap=1, background=DARK_BACKGROUND).pixels


def render_model_view(result: ModelView, columns: int, depth: ColourDepth) -> list[str]:
    """Return a view of the model itself with its legend."""
    if isinstance(result, AttentionDistances):
        legend = f"mean attention distance over {format_image_count(result.pictures)}: one dot per head"
        return [*render_dot_plot(result.mean, columns, "pixels"), legend]
    if isinstance(result, PrincipalFilters):
        tiles = tile_filters(result, max(4, (columns - 6) // 7), gap=1)
        name = f"the first {len(result.tiles)} principal filters of the {result.source}"
        legend = f"{name}: {100 * result.explained.sum():.0f} % of its variance"
    elif result.kind == "none":
        return ["this model has no position embedding"]
    elif result.kind == "query":
        return ["the position bias of this model is a product with the query: it has no map without an image"]
    elif result.similarity is not None:
        max_positions = max(2, (columns + 1) // (result.grid[1] + 1))
        tiles = tile_positions(result, max(result.grid), gap=1, max_positions=max_positions)
        legend = "cosine similarity of position embeddings with all others: dark −1, light 1"
    else:
        tiles = tile_positions(result, columns if result.turn is not None else max(6, columns // 4), gap=1)
        quantity = "attention bias" if result.bias is not None else "mean cosine of the rotation"
        legend = f"{quantity} by offset: violet below 0, orange above"
    return [*render_pixels(tiles.pixels, columns, depth), legend]


def _choose_layers(view: ImageView, columns: int, layers: Sequence[int]) -> tuple[list[int], int]:
    """Return as many of the layers, evenly spaced, as fit side by side, and the size of their tiles."""
    grid = view.trace.grid
    tile = min(max(grid), columns)
    across = max(1, (columns + 1) // (tile * grid[1] // max(grid) + 1))
    return [layers[k] for k in space_evenly(len(layers), across)], tile


def _draw_attention(view: ImageView, columns: int, layers: Sequence[int] | None) -> tuple[np.ndarray, str]:
    at = view.trace.attention_at is not None
    depth, heads = attention.get_maps(view, at).shape[:2]
    numbers, tile = _choose_layers(view, columns, layers or range(1, depth + 1))
    show_heads = heads <= MAX_HEADS_SHOWN
    tiles = attention.overlay_maps(view, numbers, tile, at, gap=1, heads=show_heads)
    rows = f"mean over heads, then heads 1 to {heads}" if show_heads else "mean over heads"
    query = attention.format_query(view, at)
    return tiles.pixels, f"attention of the {query}: layers {', '.join(map(str, numbers))}; {rows}"


def _draw_tokens(view: ImageView, columns: int, layers: Sequence[int] | None) -> tuple[np.ndarray, str]:
    assert view.trace.norms is not None
    numbers, tile = _choose_layers(view, columns, [0, *layers] if layers else range(len(view.trace.norms)))
    tiles, names = tokens.build_token_rows(view, numbers, tile, gap=1)
    return tiles.pixels, f"patch tokens after layers {', '.join(map(str, numbers))}: {', '.join(names)}"


def _draw_windows(view: StagedView, columns: int, layers: Sequence[int] | None) -> tuple[np.ndarray, str]:
    at, count = view.staged.pixel is not None, len(view.staged.layers)
    across = max(1, columns // 38)
    chosen = layers or range(1, count + 1)
    numbers = [chosen[k] for k in space_evenly(len(chosen), across)]
    tiles = windows.tile_means(view, numbers, (columns + 1) // len(numbers) - 1, at)
    what = (
        f"attention from pixel {view.staged.pixel[0]},{view.staged.pixel[1]}"
        if view.staged.pixel
        else "attention received"
    )
    where = ", inside windows" if view.staged.has_windows else ""
    return tiles.pixels, f"{what}{where}: layers {', '.join(map(str, numbers))}; mean over heads"


def _draw_staged_tokens(view: StagedView, columns: int, layers: Sequence[int] | None) -> tuple[np.ndarray, str]:
    chosen = [0, *layers] if layers else range(len(view.staged.strides))
    numbers = [chosen[k] for k in space_evenly(len(chosen), max(1, columns // 30))]
    tiles, names = windows.build_staged_token_rows(view, numbers, (columns + 1) // len(numbers) - 1, gap=1)
    return tiles.pixels, f"tokens after layers {', '.join(map(str, numbers))}: {', '.join(names)}"


def _draw_patches(view: ImageView, columns: int) -> tuple[np.ndarray, str]:
    embedded = view.trace.embedded
    assert embedded is not None
    height, width = view.fit_width(min(64, (columns - 1) // 2))
    size = max(2, height), width
    cut = outline_patch(tokens.cut_patches(view, size, DARK_BACKGROUND), view.patch_box, 1)
    pixels = _place_side_by_side(cut, resize_image(tokens.colour_by_components(embedded), size))
    h, w = view.trace.grid
    patches = f"{h * w:,} patches of {view.trace.patch}×{view.trace.patch} pixels"
    return pixels, f"{patches}, and their tokens of {embedded.shape[2]:,} values by three principal components"

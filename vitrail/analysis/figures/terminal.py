"""Views as terminal graphics: the tiles of the figures, smaller, with a legend."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TextIO

import numpy as np
from PIL import Image

from vitrail.analysis.figures import attention, tokens
from vitrail.analysis.figures.attention import overlay_map
from vitrail.analysis.figures.image_view import ImageView
from vitrail.analysis.figures.overlay import build_mosaic, outline_patch, resize_image
from vitrail.analysis.figures.tokens import colour_by_components, cut_patches
from vitrail.analysis.figures.weights import tile_filters, tile_positions
from vitrail.analysis.results import AttentionDistances, PositionMaps, PrincipalFilters, space_evenly
from vitrail.utils.text import format_image_count

ColourDepth = Literal["true", "256", "none"]
DENSITY_CHARACTERS = " .:-=+*#%@"
MAX_COLUMNS = 160


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
    paint = _truecolour_code if depth == "true" else _indexed_code
    return [_render_half_blocks(above, below, paint) for above, below in zip(upper, lower, strict=True)]


def _render_half_blocks(above: np.ndarray, below: np.ndarray, paint: Callable[[int, list[int]], str]) -> str:
    """Return one line of half blocks; colour codes are written only where colours change."""
    parts, before = [], ("", "")
    for top, bottom in zip(above.tolist(), below.tolist(), strict=True):
        colours = paint(38, top), paint(48, bottom)  # 38: foreground, the upper half; 48: background
        parts += [new for new, old in zip(colours, before, strict=True) if new != old]
        before = colours
        parts.append("▀")
    return "".join(parts) + "\033[0m"


def _truecolour_code(where: int, colour: list[int]) -> str:
    return f"\033[{where};2;{colour[0]};{colour[1]};{colour[2]}m"


def _indexed_code(where: int, colour: list[int]) -> str:
    return f"\033[{where};5;{nearest_colour_index(colour)}m"


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
    most = float(values.max())
    most = most if most > 1e-12 else 1.0
    lines = []
    for layer, row in enumerate(values, start=1):
        cells = ["·"] * room
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
    match view:
        case "attention":
            return _render_attention(image_view, columns, depth, layers)
        case "rollout":
            return _render_overlay(
                image_view, image_view.trace.rollout, columns, depth, "attention rollout over all layers"
            )
        case "relevance":
            target = "" if image_view.trace.target is None else f" for {image_view.label(image_view.trace.target)}"
            return _render_overlay(
                image_view, image_view.trace.relevance, columns, depth, f"gradient-weighted relevance{target}"
            )
        case "tokens":
            return _render_tokens(image_view, columns, depth, layers)
        case "heads":
            assert image_view.trace.entropy is not None
            return [
                *render_dot_plot(image_view.trace.entropy, columns, "nats"),
                "entropy of attention: one dot per head",
            ]
    return _render_patches(image_view, columns, depth)


def render_model_view(
    result: AttentionDistances | PositionMaps | PrincipalFilters, columns: int, depth: ColourDepth
) -> list[str]:
    """Return a view of the model itself with its legend."""
    if isinstance(result, AttentionDistances):
        legend = f"mean attention distance over {format_image_count(result.pictures)}: one dot per head"
        return [*render_dot_plot(result.mean, columns, "pixels"), legend]
    if isinstance(result, PrincipalFilters):
        tiles = tile_filters(result, max(4, (columns - 6) // 7), gap=1)
        legend = f"the first {len(result.tiles)} principal filters of the {result.source}"
        variance = f"{100 * result.explained.sum():.0f} % of its variance"
        return [*render_pixels(tiles.pixels, columns, depth), f"{legend}: {variance}"]
    if result.kind == "none":
        return ["this model has no position embedding"]
    if result.similarity is not None:
        max_positions = max(2, (columns + 1) // (result.grid[1] + 1))
        tiles = tile_positions(result, max(result.grid), gap=1, max_positions=max_positions)
        legend = "cosine similarity of position embeddings with all others: dark −1, light 1"
        return [*render_pixels(tiles.pixels, columns, depth), legend]
    tiles = tile_positions(result, columns if result.turn is not None else max(6, columns // 4), gap=1)
    quantity = "attention bias" if result.bias is not None else "mean cosine of the rotation"
    return [*render_pixels(tiles.pixels, columns, depth), f"{quantity} by offset: orange below 0, violet above"]


def _render_attention(shown: ImageView, wide: int, depth: ColourDepth, layers: Sequence[int] | None) -> list[str]:
    maps, at = shown.trace.attention, shown.trace.attention_at is not None
    assert maps is not None
    grid = shown.trace.grid
    tile = min(max(grid), wide)
    across = max(1, (wide + 1) // (tile * grid[1] // max(grid) + 1))
    numbers = list(layers or range(1, len(maps) + 1))
    numbers = [numbers[k] for k in space_evenly(len(numbers), across)]
    made = attention.overlay_maps(shown, numbers, tile, at, gap=1, heads=maps.shape[1] <= MAX_HEADS_SHOWN)
    query = shown.trace.reader
    if at and shown.trace.at is not None:
        query = f"patch in row {shown.trace.at[0] + 1}, column {shown.trace.at[1] + 1}"
    rows = (
        f"mean over heads, then heads 1 to {maps.shape[1]}" if maps.shape[1] <= MAX_HEADS_SHOWN else "mean over heads"
    )
    legend = f"attention of the {query}: layers {', '.join(map(str, numbers))}; {rows}"
    return [*render_pixels(made.pixels, wide, depth), legend]


def _render_overlay(shown: ImageView, values: np.ndarray | None, wide: int, depth: ColourDepth, what: str) -> list[str]:
    assert values is not None
    over = overlay_map(shown, values, min(64, (wide - 1) // 2))
    pair = build_mosaic([[resize_image(shown.pixels, over.shape[:2]), over]], gap=1, background=DARK_BACKGROUND)
    return [*render_pixels(pair.pixels, wide, depth), f"the image, and {what}: light is high"]


def _render_tokens(shown: ImageView, wide: int, depth: ColourDepth, layers: Sequence[int] | None) -> list[str]:
    assert shown.trace.norms is not None
    grid = shown.trace.grid
    tile = min(max(grid), wide)
    numbers = [0, *layers] if layers else list(range(len(shown.trace.norms)))
    numbers = [numbers[k] for k in space_evenly(len(numbers), max(1, (wide + 1) // (tile + 1)))]
    made, names = tokens.build_token_rows(shown, numbers, tile, gap=1)
    return [
        *render_pixels(made.pixels, wide, depth),
        f"patch tokens after layers {', '.join(map(str, numbers))}: {', '.join(names)}",
    ]


def _render_patches(shown: ImageView, wide: int, depth: ColourDepth) -> list[str]:
    embedded = shown.trace.embedded
    assert embedded is not None
    width = min(64, (wide - 1) // 2)
    size = (max(2, round(width * shown.pixels.shape[0] / shown.pixels.shape[1])), width)
    whole = cut_patches(shown, size, DARK_BACKGROUND)
    pair = build_mosaic(
        [[outline_patch(whole, shown.patch_box, 1), resize_image(colour_by_components(embedded), size)]],
        gap=1,
        background=DARK_BACKGROUND,
    )
    h, w = shown.trace.grid
    patches = f"{h * w:,} patches of {shown.trace.patch}×{shown.trace.patch} pixels"
    legend = f"{patches}, and their tokens of {embedded.shape[2]:,} values by three principal components"
    return [*render_pixels(pair.pixels, wide, depth), legend]

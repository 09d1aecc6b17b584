"""Each view as lines for a terminal: the same tiles as in the figures, smaller, with a line that says what they are."""

from collections.abc import Sequence

import numpy as np

from vitrail.analysis.seen import Distances, Filters, Positions
from vitrail.views import attention, filtered, placed, tokens
from vitrail.views.explained import map_over
from vitrail.views.mosaic import mosaic
from vitrail.views.overlay import marked, resized
from vitrail.views.patches import cut, principal
from vitrail.views.shown import Shown
from vitrail.views.terminal import Depth, drawn, strip

VIEWS = ("attention", "rollout", "relevance", "distance", "positions", "filters", "tokens", "heads", "patches")
DARK = (16, 15, 20)
FEW_HEADS = 4  # more are shown as their mean


def of_picture(shown: Shown, view: str, wide: int, depth: Depth, layers: Sequence[int] | None = None) -> list[str]:
    """One picture's view, with its legend."""
    match view:
        case "attention":
            return _attention(shown, wide, depth, layers)
        case "rollout":
            return _over(shown, shown.seen.rollout, wide, depth, "attention rollout over all layers")
        case "relevance":
            said = "" if shown.seen.target is None else f" for {shown.label(shown.seen.target)}"
            return _over(shown, shown.seen.relevance, wide, depth, f"gradient-weighted relevance{said}")
        case "tokens":
            return _tokens(shown, wide, depth, layers)
        case "heads":
            assert shown.seen.entropy is not None
            return [*strip(shown.seen.entropy, wide, "nats"), "entropy of attention: a dot for each head"]
    return _patches(shown, wide, depth)


def of_model(found: Distances | Positions | Filters, wide: int, depth: Depth) -> list[str]:
    """A view of the model itself, with its legend."""
    if isinstance(found, Distances):
        said = f"mean attention distance over {found.pictures:,} picture{'' if found.pictures == 1 else 's'}"
        return [*strip(found.mean, wide, "pixels"), f"{said}: a dot for each head"]
    if isinstance(found, Filters):
        tiles = filtered.tiles_of(found, max(4, (wide - 6) // 7), gap=1)
        said = f"the first {len(found.tiles)} principal filters of the {found.source}"
        return [*drawn(tiles.pixels, wide, depth), f"{said}: {100 * found.explained.sum():.0f} % of its variance"]
    if found.kind == "none":
        return ["this model has no positions: its attention sees a set of patches"]
    if found.similarity is not None:
        many = max(2, (wide + 1) // (found.grid[1] + 1))
        tiles = placed.tiles_of(found, max(found.grid), gap=1, many=many)
        return [*drawn(tiles.pixels, wide, depth), "cosine of position embeddings with all others: dark −1, light 1"]
    tiles = placed.tiles_of(found, wide if found.turn is not None else max(6, wide // 4), gap=1)
    what = "bias of attention" if found.bias is not None else "mean cosine of the turn"
    return [*drawn(tiles.pixels, wide, depth), f"{what} by offset: orange below 0, violet above"]


def _attention(shown: Shown, wide: int, depth: Depth, layers: Sequence[int] | None) -> list[str]:
    maps, at = shown.seen.attention, shown.seen.attention_at is not None
    assert maps is not None
    grid = shown.seen.grid
    tile = min(max(grid), wide)
    across = max(1, (wide + 1) // (tile * grid[1] // max(grid) + 1))
    numbers = list(layers or range(1, len(maps) + 1))
    numbers = [numbers[k] for k in placed.spread_over(len(numbers), across)]
    made = attention.maps_over(shown, numbers, tile, at, gap=1, heads=maps.shape[1] <= FEW_HEADS)
    who = shown.seen.reader
    if at and shown.seen.at is not None:
        who = f"patch in row {shown.seen.at[0] + 1}, column {shown.seen.at[1] + 1}"
    rows = f"mean of the heads, then heads 1 to {maps.shape[1]}" if maps.shape[1] <= FEW_HEADS else "mean of the heads"
    legend = f"attention of the {who}: layers {', '.join(map(str, numbers))}; {rows}"
    return [*drawn(made.pixels, wide, depth), legend]


def _over(shown: Shown, values: np.ndarray | None, wide: int, depth: Depth, what: str) -> list[str]:
    assert values is not None
    each = min(64, (wide - 1) // 2)
    over = map_over(shown, values, each)
    pair = mosaic([[resized(shown.pixels, over.shape[:2]), over]], gap=1, ground=DARK)
    return [*drawn(pair.pixels, wide, depth), f"the picture, and {what}: light is much"]


def _tokens(shown: Shown, wide: int, depth: Depth, layers: Sequence[int] | None) -> list[str]:
    assert shown.seen.norms is not None
    grid = shown.seen.grid
    tile = min(max(grid), wide)
    numbers = [0, *layers] if layers else list(range(len(shown.seen.norms)))
    numbers = [numbers[k] for k in placed.spread_over(len(numbers), max(1, (wide + 1) // (tile + 1)))]
    made, names = tokens.rows_of(shown, numbers, tile, gap=1)
    return [
        *drawn(made.pixels, wide, depth),
        f"patch tokens after layers {', '.join(map(str, numbers))}: {', '.join(names)}",
    ]


def _patches(shown: Shown, wide: int, depth: Depth) -> list[str]:
    embedded = shown.seen.embedded
    assert embedded is not None
    each = min(64, (wide - 1) // 2)
    size = (max(2, round(each * shown.pixels.shape[0] / shown.pixels.shape[1])), each)
    whole = cut(shown, size, DARK)
    pair = mosaic([[marked(whole, shown.box, 1), resized(principal(embedded), size)]], gap=1, ground=DARK)
    h, w = shown.seen.grid
    said = f"{h * w:,} patches of {shown.seen.patch}×{shown.seen.patch} pixels, and their tokens of {embedded.shape[2]:,} values"
    return [*drawn(pair.pixels, wide, depth), f"{said} by three principal components"]

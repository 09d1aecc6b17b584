"""How a model tells where a patch is: figure 7 (centre) of the paper, and its kin for biases and turns."""

import numpy as np

from vitrail.analysis.seen import Positions
from vitrail.views.colours import INK, LIKE, QUIET, SIGNED, coloured, scaled
from vitrail.views.mosaic import Mosaic, mosaic, tile_size
from vitrail.views.overlay import blocks
from vitrail.views.sheet import DPI, HEAD, MARGIN, Sheet, shortened

MOST = 16  # rows and columns of positions that are drawn of a larger grid
LABELS = 0.5


def draw(found: Positions, model: str) -> bytes | None:
    """The figure of its kind, or None for a model without positions."""
    match found.kind:
        case "added":
            return _added(found, model)
        case "bias":
            return _bias(found, model)
        case "rotary":
            return _rotary(found, model)
    return None


def spread_over(count: int, most: int = MOST) -> list[int]:
    """So many of the first numbers, evenly, the first and the last among them."""
    return sorted({round(k) for k in np.linspace(0, count - 1, min(count, most))})


def tiles_of(found: Positions, most: int, gap: int = 7, many: int = MOST) -> Mosaic:
    """The maps as tiles of at most so many pixels; of positions that are added, `many` rows and columns of them."""
    if found.similarity is not None:
        rows, columns = (spread_over(side, many) for side in found.grid)
        size = tile_size(found.grid, most)
        shown = found.similarity[np.ix_(rows, columns)]  # chosen before colouring: of a large grid, few are drawn
        drawn = coloured(scaled(shown, -1.0, 1.0), LIKE)  # [rows, columns, h, w, 3]
        return mosaic([[blocks(tile, size) for tile in line] for line in drawn], gap)
    if found.bias is not None:
        size = tile_size((found.bias.shape[2], found.bias.shape[3]), most)
        reach = _reach(found.bias)
        drawn = coloured(scaled(found.bias, -reach, reach), SIGNED)
        return mosaic([[blocks(tile, size) for tile in line] for line in drawn], gap)
    assert found.turn is not None
    size = tile_size((found.turn.shape[0], found.turn.shape[1]), most)
    return mosaic([[blocks(coloured(scaled(found.turn, -1.0, 1.0), SIGNED), size)]], gap)


def _reach(values: np.ndarray) -> float:
    return max(1e-9, float(np.quantile(np.abs(values), 0.998)))  # one wild offset is not to make all others pale


def _added(found: Positions, model: str) -> bytes:
    rows, columns = (spread_over(side) for side in found.grid)
    tiles = tiles_of(found, round(DPI * 6.6 / max(len(rows), len(columns))))
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    part = "" if (len(rows), len(columns)) == found.grid else f"{len(rows)}×{len(columns)} of them are drawn"
    sheet = Sheet(
        2 * MARGIN + LABELS + wide + 0.95,
        HEAD + high + 0.95,
        "Position embeddings: each with all others",
        "  ·  ".join(
            filter(None, (shortened(model, 48), f"a grid of {found.grid[0]}×{found.grid[1]} positions", part))
        ),
    )
    left, top = MARGIN + LABELS, HEAD
    sheet.tiles(left, top, tiles, [str(k + 1) for k in rows], [str(k + 1) for k in columns], below=True)
    sheet.text(left + wide / 2, top + high + 0.3, "column of the patch", size=8, colour=INK, align="center")
    sheet.text(MARGIN, top + high / 2, "row of the patch", size=8, rotation=90, baseline="center", align="center")
    _upright(sheet, left + wide + 0.3, top, high, LIKE, ("−1", "0", "1"), "cosine similarity")
    return sheet.png()


def _bias(found: Positions, model: str) -> bytes:
    assert found.bias is not None
    tables, heads = found.bias.shape[:2]
    tiles = tiles_of(found, round(DPI * min(1.6, max(0.36, min(9.5 / heads, 9.0 / tables)))))
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    reach = _reach(found.bias)
    sheet = Sheet(
        max(5.6, 2 * MARGIN + 0.7 + wide + 0.95),
        HEAD + high + 0.85,
        "Relative positions: what is added to attention",
        f"{shortened(model, 48)}  ·  by offset in rows and columns; the middle is the patch itself",
    )
    layers = [f"layer {k + 1}" for k in range(tables)] if tables > 1 else ["all layers"]
    left, top = MARGIN + 0.7, HEAD + 0.2
    sheet.tiles(left, top, tiles, layers, [f"head {k + 1}" if heads <= 12 else str(k + 1) for k in range(heads)])
    _upright(sheet, left + wide + 0.3, top, max(high, 1.2), SIGNED, (f"−{reach:.2g}", "0", f"{reach:.2g}"), "bias")
    return sheet.png()


def _rotary(found: Positions, model: str) -> bytes:
    tiles = tiles_of(found, round(DPI * 4.2))
    wide, high = tiles.pixels.shape[1] / DPI, tiles.pixels.shape[0] / DPI
    sheet = Sheet(
        2 * MARGIN + LABELS + wide + 1.0,
        HEAD + high + 0.95,
        "Rotary positions: how much two places agree",
        f"{shortened(model, 48)}  ·  by offset; the middle is the patch itself",
    )
    left, top = MARGIN + LABELS, HEAD
    h, w = found.grid
    sheet.tiles(left, top, tiles)
    for share, down, across in ((0.0, 1 - h, 1 - w), (0.5, 0, 0), (1.0, h - 1, w - 1)):
        sheet.text(
            left - 0.08,
            top + share * high,
            f"{down:+d}" if down else "0",
            size=7,
            colour=QUIET,
            align="right",
            baseline="center",
        )
        sheet.text(
            left + share * wide,
            top + high + 0.08,
            f"{across:+d}" if across else "0",
            size=7,
            colour=QUIET,
            align="center",
        )
    sheet.text(left + wide / 2, top + high + 0.3, "columns apart", size=8, colour=INK, align="center")
    sheet.text(MARGIN, top + high / 2, "rows apart", size=8, rotation=90, baseline="center", align="center")
    _upright(sheet, left + wide + 0.3, top, high, SIGNED, ("−1", "0", "1"), "mean cosine of the turn")
    return sheet.png()


def _upright(
    sheet: Sheet, left: float, top: float, height: float, name: str, marks: tuple[str, str, str], what: str
) -> None:
    """A colour map as an upright bar."""
    bar = np.repeat(coloured(np.linspace(1, 0, 256), name)[:, None], 10, axis=1)
    width = 0.13
    axes = sheet.axes(left, top, width, height)
    axes.imshow(bar, aspect="auto", interpolation="nearest")
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    for share, word in zip((1.0, 0.5, 0.0), marks, strict=True):
        sheet.text(left + width + 0.06, top + share * height, word, size=7, colour=QUIET, baseline="center")
    sheet.text(left + width + 0.36, top + height / 2, what, size=7.5, colour=QUIET, rotation=90, baseline="center")

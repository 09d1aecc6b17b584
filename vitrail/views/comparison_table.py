"""Two models side by side in a terminal: a row for each depth, a pair of columns for each measure."""

from collections.abc import Callable

import numpy as np

from vitrail.report.markup import plain
from vitrail.views.compared import READ, Comparison, Side

NONE = "·"
Column = tuple[str, str, Callable[[Side], np.ndarray], int, str]  # name, unit, values by layer, its first layer, format


def columns(found: Comparison) -> list[Column]:
    """What is shown of each layer."""
    made: list[Column] = [
        (
            "distance",
            "px" if found.one_size else "% of width",
            lambda side: found.reach(side).mean(1),
            1,
            ".0f" if found.one_size else ".1f",
        ),
        ("diversity", "heads", lambda side: side.profile.diversity.mean(1), 1, ".3f"),
        ("mutual inf.", "query, key", lambda side: side.profile.mutual.mean(1), 1, ".3f"),
        ("high freq.", "Δ log", lambda side: side.high, 0, ".2f"),
    ]
    if all(side.probe is not None for side in found.sides):
        made.append(("probe", "top-1 %", lambda side: 100 * side.probe.top1 if side.probe else np.empty(0), 0, ".1f"))
    return made


def rows(found: Comparison) -> list[list[str]]:
    """A row for each depth that one of them has, and under every measure a cell of A and one of B."""
    made = []
    for depth in sorted({side.at(layer) for side in found.sides for layer in range(side.depth + 1)}):
        shown = f"{int(depth * found.sides[0].depth)}" if found.one_depth else f"{100 * float(depth):.0f} %"
        cells = [shown]
        for _, _, values, first, form in columns(found):
            for side in found.sides:
                layer = depth * side.depth
                there = layer.denominator == 1 and layer >= first
                value = float(values(side)[int(layer) - first]) if there else float("nan")
                cells.append(f"{value:{form}}".replace("-", "−") if np.isfinite(value) else NONE)
        made.append(cells)
    return made


def table(found: Comparison) -> list[str]:
    """The models, the rows, and what is to be known of them."""
    made, wide = columns(found), 7
    lines = [about(side) for side in found.sides] + [""]
    first = "layer" if found.one_depth else "depth"
    lines.append(" " * 6 + "".join(f"{name:>{2 * wide}}" for name, *_ in made))
    lines.append(" " * 6 + "".join(f"{unit:>{2 * wide}}" for _, unit, *_ in made))
    lines.append(f"{first:>6}" + "".join(f"{letter:>{wide}}" for letter in ("A", "B")) * len(made))
    lines = [line.rstrip() for line in lines]
    for row in rows(found):
        lines.append(f"{row[0]:>6}" + "".join(f"{cell:>{wide}}" for cell in row[1:]))
    return [*lines, "", *told(found)]


def about(side: Side) -> str:
    """A model in a line."""
    height, width = side.profile.size
    heads = f"{side.heads} head{'' if side.heads == 1 else 's'}"
    layers = f"{side.depth} layer{'' if side.depth == 1 else 's'}"
    return f"{side.letter}  {plain(side.name)}: {layers} of {heads}, {width}×{height} pixels"


def told(found: Comparison) -> list[str]:
    """What the numbers were measured on."""
    counted = f"{found.pictures:,} picture{'' if found.pictures == 1 else 's'}"
    lines = [f"attention and frequencies over {counted} of {plain(found.where)}"]
    probe = found.sides[0].probe
    if probe is None:
        return [*lines, f"no probe: {plain(found.no_probe)}", *map(plain, found.notes)]
    lines.append(
        f"probes of the {READ} of each layer: {probe.classes} classes, fitted to {probe.fitted:,} pictures, judged on "
        f"{probe.judged:,}"
    )
    for side in found.sides:
        assert side.probe is not None
        best = int(side.probe.top1.argmax())
        low, high = 100 * side.probe.intervals[best]
        lines.append(
            f"{side.letter} is read best after layer {best} of {side.depth}: {100 * side.probe.top1[best]:.1f} % "
            f"({low:.1f}–{high:.1f})"
        )
    lines.append(f"always saying the commonest class would get {100 * probe.commonest:.1f} % right")
    return [*lines, *map(plain, found.notes)]

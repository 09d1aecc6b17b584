"""Views in a terminal: two pixels to a character, in as many colours as there are."""

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

import numpy as np
from PIL import Image

Depth = Literal["true", "256", "none"]
DENSITY = " .:-=+*#%@"
MOST_COLUMNS = 160


def depth_of(stream: TextIO, environment: Mapping[str, str] | None = None) -> Depth:
    """How many colours a stream shows: none where nobody looks, or where they are not wanted."""
    said = os.environ if environment is None else environment
    if not stream.isatty() or said.get("NO_COLOR") or said.get("TERM", "dumb") == "dumb":
        return "none"
    true = said.get("COLORTERM", "").lower() in ("truecolor", "24bit") or "direct" in said.get("TERM", "")
    return "true" if true else "256"


def columns() -> int:
    """Characters across."""
    return max(20, min(MOST_COLUMNS, shutil.get_terminal_size((80, 24)).columns - 1))


def drawn(pixels: np.ndarray, wide: int, depth: Depth) -> list[str]:
    """A picture, uint8 [H, W, 3], as lines no longer than `wide` characters; it is made smaller and never larger."""
    height, width = pixels.shape[:2]
    across = min(wide, width)
    down = max(1, round(height * across / width))
    down += down % 2
    if (down, across) != (height, width):
        pixels = np.asarray(Image.fromarray(pixels).resize((across, down), Image.Resampling.BOX))
    upper, lower = pixels[0::2], pixels[1::2]
    if depth == "none":
        light = (upper.astype(float) + lower) @ np.array([0.299, 0.587, 0.114]) / 2
        steps = (light / 256 * len(DENSITY)).astype(int)
        return ["".join(DENSITY[k] for k in row).rstrip() for row in steps]
    paint = _true if depth == "true" else _indexed
    return [_line(above, below, paint) for above, below in zip(upper, lower, strict=True)]


def _line(above: np.ndarray, below: np.ndarray, paint: Callable[[int, list[int]], str]) -> str:
    """One line of half blocks; colours are said again only where they change."""
    made, before = [], ("", "")
    for top, bottom in zip(above.tolist(), below.tolist(), strict=True):
        colours = paint(38, top), paint(48, bottom)  # 38 is the upper half, which is written; 48 is behind it
        made += [new for new, old in zip(colours, before, strict=True) if new != old]
        before = colours
        made.append("▀")
    return "".join(made) + "\033[0m"


def _true(where: int, colour: list[int]) -> str:
    return f"\033[{where};2;{colour[0]};{colour[1]};{colour[2]}m"


def _indexed(where: int, colour: list[int]) -> str:
    return f"\033[{where};5;{nearest(colour)}m"


def nearest(colour: list[int]) -> int:
    """The nearest of the 256 colours: a cube of six values each way, or a step of grey."""
    levels = (0, 95, 135, 175, 215, 255)
    cube = [min(range(6), key=lambda k: abs(levels[k] - value)) for value in colour]
    grey = min(23, max(0, round((sum(colour) / 3 - 8) / 10)))
    far_cube = sum((levels[k] - value) ** 2 for k, value in zip(cube, colour, strict=True))
    far_grey = sum((8 + 10 * grey - value) ** 2 for value in colour)
    return 232 + grey if far_grey < far_cube else 16 + 36 * cube[0] + 6 * cube[1] + cube[2]


def strip(values: np.ndarray, wide: int, unit: str) -> list[str]:
    """A line for each layer with a mark for each head, [L, H], from 0 to the largest; and the mean."""
    room = max(10, wide - 22)
    most = float(values.max())
    most = most if most > 1e-12 else 1.0  # where all are 0 any axis does, and one that people can read is best
    lines = []
    for layer, row in enumerate(values, start=1):
        cells = ["·"] * room
        for value in row:
            cells[min(room - 1, int(max(0.0, value) / most * (room - 1)))] = "●"
        lines.append(f"layer {layer:>2}  {''.join(cells)}  {row.mean():6.1f}")
    lines.append(f"{'':10}0{f'{most:.3g} {unit}':>{room - 1}}  {'mean':>6}")
    return lines

"""Colours as text, "#rrggbb"."""

import re
from collections.abc import Sequence

Colour = tuple[int, int, int]  # red, green, blue, from 0 to 255
HEX_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")


def is_colour(text: str) -> bool:
    """Return whether a text is "#rrggbb"."""
    return HEX_COLOUR.fullmatch(text) is not None


def parse_colour(text: str) -> Colour:
    """Return the red, green and blue of "#rrggbb"; raise ValueError for anything else."""
    if not is_colour(text):
        raise ValueError(f"a colour must be #rrggbb, got {text!r}")
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:], 16)


def format_colour(colour: Sequence[int]) -> str:
    """Return red, green and blue as "#rrggbb"."""
    return "#{:02x}{:02x}{:02x}".format(*colour)

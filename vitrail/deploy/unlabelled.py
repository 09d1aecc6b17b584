"""A few pictures as a model takes them, read as `vitrail predict` reads them: for what needs no labels."""

from collections.abc import Sequence, Set

import numpy as np

from vitrail.data.decode import UNREADABLE
from vitrail.data.opening import named
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.parts import Progress
from vitrail.deploy.inputs import Inputs


def spread(inputs: Inputs, count: int, without: Set[str] = frozenset()) -> list[int]:
    """So many of the pictures, evenly spread over their order; others than those that are named, where enough are left."""
    free = [index for index in range(len(inputs)) if inputs.name(index) not in without] if without else []
    those = free if len(free) >= count else range(len(inputs))
    places = np.linspace(0, len(those) - 1, min(count, len(those))).round().astype(np.int64)
    return [those[place] for place in places.tolist()]


def pixels_of(
    inputs: Inputs, places: Sequence[int], preprocessing: Preprocessing, progress: Progress | None = None
) -> tuple[np.ndarray, list[int]]:
    """uint8 [n, C, H, W] of those that can be read, and which these are."""
    parts, read = [], []
    for number, place in enumerate(places, start=1):
        name = inputs.name(place)
        try:
            with named(name), inputs.open(place) as image:
                parts.append(preprocessing.pixels(image).numpy())
            read.append(place)
        except UNREADABLE:
            pass
        if progress:
            progress("preparing", number, len(places))
    if not read:
        raise ValueError(f"none of the {len(places):,} pictures can be read")
    return np.stack(parts), read

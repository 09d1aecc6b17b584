"""What was seen as arrays by name, for `np.savez`."""

from dataclasses import fields

import numpy as np

from vitrail.analysis.seen import Distances, Filters, Positions, Profile, Seen


def arrays(seen: Seen | Positions | Filters | Distances | Profile) -> dict[str, np.ndarray]:
    """Every field that is there, under its name; numbers, pairs and words as small arrays."""
    found = {field.name: getattr(seen, field.name) for field in fields(seen)}
    return {name: np.asarray(value) for name, value in found.items() if value is not None}

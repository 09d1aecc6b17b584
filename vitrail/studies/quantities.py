"""Numbers that are no shares, as they are told: a correlation, a distance, and what changes them."""

import math

from vitrail.studies.intervals import Difference, Estimate


def number(found: Estimate) -> str:
    """0.62 (0.55 to 0.69); without an interval where none is known."""
    return _written(found, "")


def signed(found: Difference) -> str:
    """+0.10 (+0.05 to +0.15)."""
    return _written(found, "+")


def _written(found: Estimate | Difference, sign: str) -> str:
    values = (found.mean, found.low, found.high)
    # What rounds to nothing has no sign of its own.
    mean, low, high = (f"{round(value, 2) + 0.0:{sign}.2f}".replace("-", "−") for value in values)
    return mean if math.isnan(found.low) else f"{mean} ({low} to {high})"

"""All measures of one split by name."""

from typing import Any

import numpy as np

from vitrail.evaluate.several import several
from vitrail.evaluate.single import single
from vitrail.evaluate.verdicts import checked, judge


def measures(logits: np.ndarray, targets: np.ndarray, *, intervals: bool = True) -> dict[str, Any]:
    """Name and value of every measure, ready for JSON.

    Targets [n] are one class for each picture: `top1`, `interval` and more. Targets [n, K] of 0 and 1 are several: `map`,
    with `interval` from a seeded bootstrap. `intervals=False` leaves the intervals out, for a quick look every epoch.
    """
    logits, targets = checked(logits, targets)
    pairs = single(judge(logits, targets), intervals) if targets.ndim == 1 else several(logits, targets, intervals)
    return dict(pairs)


def score_name(several_labels: bool) -> str:
    """The measure that a run is judged by."""
    return "map" if several_labels else "top1"

"""Whether a model that says 80 % is right 80 times of a hundred."""

from dataclasses import dataclass

import numpy as np

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Pictures about which the model was about equally sure."""

    low: float
    high: float
    count: int
    sure: float  # its mean confidence; nan in an empty bin
    right: float  # how often it was right; nan in an empty bin


def reliability(sure: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Bins of equal width from 0 to 1; a value on an edge belongs to the bin below it."""
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.searchsorted(edges, sure, side="left") - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_sure = np.bincount(place, weights=sure, minlength=bins) / count
        mean_right = np.bincount(place, weights=right.astype(np.float64), minlength=bins) / count
    return [
        Bin(float(edges[i]), float(edges[i + 1]), int(count[i]), float(mean_sure[i]), float(mean_right[i]))
        for i in range(bins)
    ]


def calibration_error(sure: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: how far sureness and being right lie apart, averaged over pictures."""
    full = [bin for bin in reliability(sure, right, bins) if bin.count]
    return sum(bin.count * abs(bin.sure - bin.right) for bin in full) / len(sure)

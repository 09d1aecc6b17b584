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
    edges, place = np.linspace(0, 1, bins + 1), places(sure, bins)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_sure = np.bincount(place, weights=sure, minlength=bins) / count
        mean_right = np.bincount(place, weights=right.astype(np.float64), minlength=bins) / count
    return [
        Bin(float(edges[i]), float(edges[i + 1]), int(count[i]), float(mean_sure[i]), float(mean_right[i]))
        for i in range(bins)
    ]


def places(sure: np.ndarray, bins: int = BINS) -> np.ndarray:
    """The bin of each."""
    return np.clip(np.searchsorted(np.linspace(0, 1, bins + 1), sure, side="left") - 1, 0, bins - 1)


def gaps(sure: np.ndarray, right: np.ndarray) -> np.ndarray:
    """What each picture, [n] or [n, K] labels of it, adds to the distance in each bin, [n, bins]: the calibration error is the
    sum over bins of how far their means over pictures are from zero."""
    n, labels = len(sure), sure.size // len(sure)
    cells = places(sure).reshape(n, labels) + BINS * np.arange(n)[:, None]
    apart = (sure - right).reshape(n, labels) / labels
    return np.bincount(cells.ravel(), weights=apart.ravel(), minlength=n * BINS).reshape(n, BINS)


def interval_around(error: float, drawn: np.ndarray) -> list[float]:
    """The 95 % interval of a calibration error, from its resamples: as far down as they go up.

    Few pictures make it too high, by chance within bins, and drawing from them does so once more: the truth is rather below.
    """
    away = max(0.0, float(np.percentile(drawn, 97.5)) - error)
    return [max(0.0, error - away), min(1.0, error + away)]


def calibration_error(sure: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: how far sureness and being right lie apart, averaged over pictures."""
    full = [bin for bin in reliability(sure, right, bins) if bin.count]
    return sum(bin.count * abs(bin.sure - bin.right) for bin in full) / len(sure)

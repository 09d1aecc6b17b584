"""Convergence of a training, judged by its losses."""

from collections.abc import Sequence

import numpy as np

PARTS = 4  # quarters of the training
MIN_LOSSES = 2 * PARTS
FLAT = 0.1  # of the fall since the first quarter
SMALL = 0.02  # of the loss


def has_converged(losses: Sequence[float]) -> bool:
    """Return whether the losses of a training, in order and evenly spaced, show that it stopped falling.

    The fall from the third to the last quarter, plus two standard errors, must be below a tenth of the fall from the first
    quarter to the last, or below 2 % of the last quarter's mean. So a short and noisy training counts as not converged: its
    losses do not show it.
    """
    quarters = split_losses(losses)
    if quarters is None:
        return False
    fall, error = measure_last_fall(quarters)
    first, last = quarters[0].mean(), quarters[-1].mean()
    return bool(fall + 2 * error < max(FLAT * (first - last), SMALL * abs(last)))


def is_falling(losses: Sequence[float]) -> bool:
    """Return whether the losses of a training, in order and evenly spaced, show that it had not stopped falling.

    The fall from the third to the last quarter must be above two standard errors, and not be so small that `has_converged`
    holds. Of a short and noisy training neither holds.
    """
    quarters = split_losses(losses)
    if quarters is None or has_converged(losses):
        return False
    fall, error = measure_last_fall(quarters)
    return bool(fall > 2 * error)


def split_losses(losses: Sequence[float]) -> list[np.ndarray] | None:
    """Return the quarters of a training, or None where there are too few losses or one is not finite."""
    values = np.asarray(losses, np.float64)
    if len(values) < MIN_LOSSES or not np.isfinite(values).all():
        return None
    return np.array_split(values, PARTS)


def measure_last_fall(quarters: list[np.ndarray]) -> tuple[float, float]:
    """Return the fall of the mean from the third to the last quarter, and its standard error."""
    third, last = quarters[-2:]
    error = sum(quarter.var(ddof=1) / len(quarter) for quarter in (third, last)) ** 0.5
    return float(third.mean() - last.mean()), float(error)

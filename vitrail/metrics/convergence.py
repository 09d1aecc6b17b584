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
    values = np.asarray(losses, np.float64)
    if len(values) < MIN_LOSSES or not np.isfinite(values).all():
        return False
    first, _, third, last = np.array_split(values, PARTS)
    errors = [quarter.var(ddof=1) / len(quarter) for quarter in (third, last)]
    fall = third.mean() - last.mean() + 2 * sum(errors) ** 0.5
    return bool(fall < max(FLAT * (first.mean() - last.mean()), SMALL * abs(last.mean())))

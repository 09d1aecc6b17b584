"""Convergence on constructed losses."""

import numpy as np
import pytest

from vitrail.metrics.convergence import MIN_LOSSES, has_converged

TIME = np.linspace(0, 1, 200)
NOISE = 0.05 * np.random.default_rng(0).normal(size=200)


@pytest.mark.parametrize(
    ("losses", "converged"),
    [
        (0.5 + 2 * np.exp(-10 * TIME), True),  # falls, then stays
        (0.5 + 2 * np.exp(-10 * TIME) + NOISE, True),  # the same with noise
        (0.5 + 2 * np.exp(-1.5 * TIME), False),  # still falls at the end
        (0.5 + 2 * np.exp(-1.5 * TIME) + NOISE, False),
        (2.3 - TIME, False),
        (np.full(200, 0.7), True),  # never moved
        (1.0 + TIME, True),  # rises: more time would not help
        (np.concatenate((0.5 + 2 * np.exp(-10 * TIME[:100]), 0.5 - TIME[:100])), False),  # falls again after a plateau
        (np.where(TIME > 0.9, np.nan, 0.5), False),
    ],
)
def test_losses_that_stopped_falling_have_converged(losses, converged):
    assert has_converged(losses.tolist()) is converged


def test_few_or_noisy_losses_do_not_show_convergence():
    assert not has_converged([0.5] * (MIN_LOSSES - 1))
    assert has_converged([0.5] * MIN_LOSSES)
    noisy = 1.0 + 0.8 * np.random.default_rng(1).normal(size=12)
    assert not has_converged(noisy.tolist())

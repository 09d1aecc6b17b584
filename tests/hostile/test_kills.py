"""Runs and predictions that are killed at random moments end as if they had been left alone."""

import pytest

from tests.hostile.kills import Killing

CASES = 6  # benchmarks/attack.py runs thousands


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "predict"])
def test_kills_change_nothing_and_leave_nothing(kind, tmp_path):
    killing = Killing(kind, tmp_path)
    problems = []
    kills = 0
    for seed in range(CASES):
        count, found = killing.attack(seed)
        kills += count
        problems += found
    assert kills > 0
    assert problems == []

"""Rates as functions of the step."""

import math

import pytest

from vitrail.training.schedule import EMA, Constant, Cosine, Linear, ScheduleSlot


def test_warm_up_rises_to_the_full_learning_rate() -> None:
    schedule = Cosine(warmup=4)
    assert [schedule.factor(step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_is_half_way_in_the_middle() -> None:
    assert Cosine().factor(50, 100) == pytest.approx(0.5)
    assert Cosine().factor(100, 100) == pytest.approx(0.0)
    assert Cosine(end=0.1).factor(100, 100) == pytest.approx(0.1)
    assert Cosine(warmup=20).factor(60, 100) == pytest.approx(0.5)
    assert Cosine().factor(25, 100) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_linear_falls_evenly() -> None:
    assert [Linear().factor(step, 4) for step in range(5)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_constant_cools_down_at_the_end() -> None:
    factors = [Constant(warmup=2, cooldown=4).factor(step, 10) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("schedule", [Cosine(5), Linear(5), Constant(5, cooldown=5)])
def test_factors_stay_between_zero_and_one(schedule: ScheduleSlot) -> None:
    for total in (1, 3, 5, 6, 50):
        assert all(0 <= schedule.factor(step, total) <= 1 for step in range(total))


def test_ema_decay_is_smaller_in_the_first_steps() -> None:
    assert EMA(0.999).decay_at(0) == pytest.approx(0.1)
    assert EMA(0.999).decay_at(10**6) == 0.999
    assert EMA(0.999, warmup=False).decay_at(0) == 0.999

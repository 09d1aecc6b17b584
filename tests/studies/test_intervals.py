"""Intervals of studies: over seeds by Student, over pictures by Wilson, and what is clear."""

import math

import pytest
from scipy.stats import ttest_ind

from vitrail.evaluate.intervals import wilson
from vitrail.studies.intervals import (
    Difference,
    Estimate,
    beyond_chance,
    difference,
    estimate,
    grouped,
    percent,
    points,
)
from vitrail.studies.study import Result


def result(value, phase="final", **at):
    return Result(at, phase, {"test": value}, 1.0)


def test_three_seeds_have_students_interval():
    # Mean 0.72, deviation 0.02; t(0.975, 2) = 4.3027: half is 4.3027 * 0.02 / sqrt(3).
    found = estimate([0.70, 0.72, 0.74], 10_000)
    assert found.mean == pytest.approx(0.72)
    assert (found.low, found.high) == pytest.approx((0.72 - 0.049683, 0.72 + 0.049683), abs=1e-6)
    assert found.n == 3


def test_five_seeds_of_a_number_that_is_no_share():
    # Mean 30, deviation sqrt(2.5); t(0.975, 4) = 2.776445.
    found = estimate([28, 29, 30, 31, 32])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.mean, found.low, found.high) == pytest.approx((30, 30 - half, 30 + half), abs=1e-5)


def test_one_seed_has_wilsons_interval_of_the_pictures():
    found = estimate([0.9], 270)
    assert (found.low, found.high) == wilson(0.9 * 270, 270)


def test_two_seeds_far_apart_lie_within_their_interval():
    found = estimate([0.5, 0.9], 10_000)
    assert (found.low, found.high) == (0.5, 0.9)
    near = estimate([0.70, 0.701], 1_000)
    assert (near.low, near.high) == pytest.approx(wilson(700.5, 1_000))


def test_shares_stay_between_0_and_1_and_other_numbers_need_not():
    assert estimate([0.9, 0.95, 1.0], 100).high == 1.0
    assert estimate([0.9, 0.95, 1.0]).high > 1.0
    assert estimate([0.0, 0.05, 0.1], 100).low == 0.0


def test_seeds_that_agree_by_chance_are_not_certain():
    found = estimate([0.9, 0.9, 0.9], 100)
    assert found.low < 0.9 < found.high
    assert difference([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], 100).clear is False


def test_one_seed_of_nothing_countable_has_no_interval_and_nothing_is_clear():
    found = estimate([12.5])
    assert math.isnan(found.low)
    assert percent(estimate([0.713])) == "71.3 %"
    assert not difference([12.5], [1.0]).clear


def test_differences_are_paired_by_seed():
    # Both vary much from seed to seed, and the second is always a point below.
    first, second = [0.70, 0.80, 0.90], [0.688, 0.790, 0.892]
    found = difference(first, second, 10_000)
    # Differences 0.012, 0.010, 0.008: deviation 0.002.
    half = 4.302653 * 0.002 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((0.01, 0.01 - half, 0.01 + half), abs=1e-6)
    assert found.clear
    assert not difference(
        first, [*second, 0.75], 10_000
    ).clear  # one more of the other: not paired, and lost in the noise


def test_unequal_numbers_of_seeds_have_welchs_interval():
    first, second = [1.0, 2.0, 3.0], [9.0, 11.0, 9.0, 11.5]
    found, known = difference(first, second), ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((known.low, known.high))
    assert found.clear


def test_the_sign_is_first_minus_second():
    assert difference([0.9], [0.5], 100).mean == pytest.approx(0.4)
    assert difference([0.9], [0.5], 100).clear
    assert difference([0.5], [0.9], 100).high < 0


def test_newcombes_interval_of_two_single_seeds():
    found = difference([56 / 70], [42 / 70], 70)
    (low, high), (under, over) = wilson(56, 70), wilson(42, 70)
    assert found.low == pytest.approx(0.2 - math.sqrt((0.8 - low) ** 2 + (over - 0.6) ** 2))
    assert found.high == pytest.approx(0.2 + math.sqrt((high - 0.8) ** 2 + (0.6 - under) ** 2))


def test_two_seeds_that_contradict_each_other_are_not_clear():
    assert difference([0.80, 0.80], [0.70, 0.70], 10_000).clear
    assert not difference([0.80, 0.80], [0.60, 0.81], 10_000).clear


def test_nothing_has_no_interval():
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])
    with pytest.raises(ValueError, match="at least one value of each"):
        difference([1.0], [])


def test_groups_are_in_order_of_appearance_and_their_values_by_seed():
    results = [
        result(0.3, positions="none", seed=1),
        result(0.5, positions="2-D", seed=0),
        result(0.2, positions="none", seed=0),
        result(0.9, phase="tune", positions="none", seed=0),
        Result({"positions": "2-D", "seed": 1}, "final", {"validation": 0.4}, 1.0),
    ]
    assert grouped(results, "positions") == {("none",): [0.2, 0.3], ("2-D",): [0.5]}
    assert grouped(results, "positions", phase="tune") == {("none",): [0.9]}
    assert grouped(results, number="validation") == {(): [0.4]}


def test_estimates_and_differences_in_words():
    assert percent(Estimate(0.713, 0.701, 0.725, 3)) == "71.3 % (70.1–72.5)"
    assert points(Difference(-0.021, -0.03, 0.002)) == "−2.1 points (−3.0 to +0.2)"
    assert points(Difference(-0.0001, -0.02, 0.02)) == "+0.0 points (−2.0 to +2.0)"
    assert points(Difference(0.021, math.nan, math.nan)) == "+2.1 points"


def test_one_of_many_comparisons_is_clear_by_chance():
    assert beyond_chance(1, 1)
    assert not beyond_chance(0, 6)
    assert not beyond_chance(1, 6)  # 26 % by chance
    assert beyond_chance(2, 6)  # 3 %
    assert not beyond_chance(1, 19, 0.025)
    assert beyond_chance(3, 19, 0.025)

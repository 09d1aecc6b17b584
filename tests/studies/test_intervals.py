"""Intervals: Student's over seeds, Wilson's over images, and clear differences."""

import math

import pytest
from scipy.stats import ttest_ind

from vitrail.metrics.intervals import wilson_interval
from vitrail.studies.intervals import (
    Difference,
    Estimate,
    estimate_difference,
    estimate_mean,
    format_percent,
    format_points,
    group_values,
    is_beyond_chance,
)
from vitrail.studies.study import CellResult


def result(value, phase="final", **at):
    return CellResult(at, phase, {"test": value}, 1.0)


def test_three_seeds_use_student_interval():
    # Mean 0.72, deviation 0.02; t(0.975, 2) = 4.3027: half is 4.3027 * 0.02 / sqrt(3).
    found = estimate_mean([0.70, 0.72, 0.74], 10_000)
    assert found.mean == pytest.approx(0.72)
    assert (found.low, found.high) == pytest.approx((0.72 - 0.049683, 0.72 + 0.049683), abs=1e-6)
    assert found.n == 3


def test_five_seeds_of_a_non_accuracy():
    # Mean 30, deviation sqrt(2.5); t(0.975, 4) = 2.776445.
    found = estimate_mean([28, 29, 30, 31, 32])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.mean, found.low, found.high) == pytest.approx((30, 30 - half, 30 + half), abs=1e-5)


def test_one_seed_uses_wilson_interval():
    found = estimate_mean([0.9], 270)
    assert (found.low, found.high) == wilson_interval(0.9 * 270, 270)


def test_interval_contains_both_seeds():
    found = estimate_mean([0.5, 0.9], 10_000)
    assert (found.low, found.high) == (0.5, 0.9)
    near = estimate_mean([0.70, 0.701], 1_000)
    assert (near.low, near.high) == pytest.approx(wilson_interval(700.5, 1_000))


def test_accuracy_interval_is_clipped_to_0_1():
    assert estimate_mean([0.9, 0.95, 1.0], 100).high == 1.0
    assert estimate_mean([0.9, 0.95, 1.0]).high > 1.0
    assert estimate_mean([0.0, 0.05, 0.1], 100).low == 0.0


def test_equal_seeds_keep_an_interval():
    found = estimate_mean([0.9, 0.9, 0.9], 100)
    assert found.low < 0.9 < found.high
    assert estimate_difference([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], 100).is_clear is False


def test_one_seed_without_images_has_no_interval():
    found = estimate_mean([12.5])
    assert math.isnan(found.low)
    assert format_percent(estimate_mean([0.713])) == "71.3 %"
    assert not estimate_difference([12.5], [1.0]).is_clear


def test_differences_are_paired_by_seed():
    # Both vary much from seed to seed, and the second is always a point below.
    first, second = [0.70, 0.80, 0.90], [0.688, 0.790, 0.892]
    found = estimate_difference(first, second, 10_000)
    # Differences 0.012, 0.010, 0.008: deviation 0.002.
    half = 4.302653 * 0.002 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((0.01, 0.01 - half, 0.01 + half), abs=1e-6)
    assert found.is_clear
    assert not estimate_difference(
        first, [*second, 0.75], 10_000
    ).is_clear  # one more of the other: not paired, and lost in the noise


def test_unequal_seeds_use_welch_interval():
    first, second = [1.0, 2.0, 3.0], [9.0, 11.0, 9.0, 11.5]
    found, known = (
        estimate_difference(first, second),
        ttest_ind(first, second, equal_var=False).confidence_interval(0.95),
    )
    assert (found.low, found.high) == pytest.approx((known.low, known.high))
    assert found.is_clear


def test_the_sign_is_first_minus_second():
    assert estimate_difference([0.9], [0.5], 100).mean == pytest.approx(0.4)
    assert estimate_difference([0.9], [0.5], 100).is_clear
    assert estimate_difference([0.5], [0.9], 100).high < 0


def test_newcombe_interval_of_single_seeds():
    found = estimate_difference([56 / 70], [42 / 70], 70)
    (low, high), (under, over) = wilson_interval(56, 70), wilson_interval(42, 70)
    assert found.low == pytest.approx(0.2 - math.sqrt((0.8 - low) ** 2 + (over - 0.6) ** 2))
    assert found.high == pytest.approx(0.2 + math.sqrt((high - 0.8) ** 2 + (0.6 - under) ** 2))


def test_contradicting_seeds_are_not_clear():
    assert estimate_difference([0.80, 0.80], [0.70, 0.70], 10_000).is_clear
    assert not estimate_difference([0.80, 0.80], [0.60, 0.81], 10_000).is_clear


def test_empty_values_are_refused():
    with pytest.raises(ValueError, match="at least one value"):
        estimate_mean([])
    with pytest.raises(ValueError, match="at least one value of each"):
        estimate_difference([1.0], [])


def test_group_values_order():
    results = [
        result(0.3, positions="none", seed=1),
        result(0.5, positions="2-D", seed=0),
        result(0.2, positions="none", seed=0),
        result(0.9, phase="tune", positions="none", seed=0),
        CellResult({"positions": "2-D", "seed": 1}, "final", {"validation": 0.4}, 1.0),
    ]
    assert group_values(results, "positions") == {("none",): [0.2, 0.3], ("2-D",): [0.5]}
    assert group_values(results, "positions", phase="tune") == {("none",): [0.9]}
    assert group_values(results, number="validation") == {(): [0.4]}


def test_format_estimates_and_differences():
    assert format_percent(Estimate(0.713, 0.701, 0.725, 3)) == "71.3 % (70.1–72.5)"
    assert format_points(Difference(-0.021, -0.03, 0.002)) == "−2.1 points (−3.0 to +0.2)"
    assert format_points(Difference(-0.0001, -0.02, 0.02)) == "+0.0 points (−2.0 to +2.0)"
    assert format_points(Difference(0.021, math.nan, math.nan)) == "+2.1 points"


def test_is_beyond_chance():
    assert is_beyond_chance(1, 1)
    assert not is_beyond_chance(0, 6)
    assert not is_beyond_chance(1, 6)  # 26 % by chance
    assert is_beyond_chance(2, 6)  # 3 %
    assert not is_beyond_chance(1, 19, 0.025)
    assert is_beyond_chance(3, 19, 0.025)

"""Intervals, calibration and paired comparisons: known values, and what they promise."""

import numpy as np
import pytest

from tests.evaluate import made
from vitrail.evaluate.calibration import calibration_error, reliability
from vitrail.evaluate.intervals import bootstrap_recall, wilson
from vitrail.evaluate.paired import compare_map, compare_right, mcnemar

stats = pytest.importorskip("scipy.stats", reason="scipy is not installed: pip install 'vitrail[dev]'")


@pytest.mark.parametrize(("right", "count"), [(0, 5), (1, 1), (298, 341), (50, 100), (9_999, 10_000)])
def test_wilson_is_that_of_scipy(right, count):
    theirs = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right, count) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_no_pictures_have_no_interval():
    with pytest.raises(ValueError, match="at least one picture"):
        wilson(0, 0)


def test_bootstrap_of_balanced_accuracy_is_as_drawing_pictures():
    truth = np.repeat([0, 1, 2], [60, 30, 10])
    right = np.random.default_rng(0).random(100) < 0.7
    generator, values = np.random.default_rng(1), []
    for _ in range(2000):
        drawn = generator.integers(100, size=100)
        values.append(np.mean([right[drawn][truth[drawn] == k].mean() for k in range(3)]))
    support = np.bincount(truth)
    found = bootstrap_recall(support, np.bincount(truth[right], minlength=3))
    assert found == pytest.approx(np.percentile(values, [2.5, 97.5]), abs=0.02)


def test_a_model_that_knows_what_it_knows_has_no_calibration_error():
    generator = np.random.default_rng(0)
    sure = generator.uniform(0.5, 1, 200_000)
    assert calibration_error(sure, generator.random(200_000) < sure) < 0.01
    assert calibration_error(np.full(100, 0.9), np.arange(100) < 50) == pytest.approx(0.4)


def test_bins_hold_every_picture_once():
    sure = np.array([0.0, 1.0, 1 / 15, 0.5, 0.999])
    bins = reliability(sure, np.ones(5, bool))
    assert sum(bin.count for bin in bins) == 5
    assert (bins[0].count, bins[-1].count) == (2, 2)
    assert np.isnan(bins[3].right)


@pytest.mark.parametrize(("first", "second"), [(5, 15), (0, 3), (1, 0), (40, 60), (700, 1000)])
def test_mcnemar_is_the_exact_test_with_mid_p(first, second):
    exact = stats.binomtest(first, first + second).pvalue
    middle = stats.binom.pmf(min(first, second), first + second, 0.5)
    assert mcnemar(first, second) == pytest.approx(exact - middle, abs=1e-9)


def test_equals_do_not_differ():
    assert mcnemar(0, 0) == mcnemar(7, 7) == 1.0
    right = np.arange(100) < 80
    found = compare_right(right, right)
    assert not found.beyond_chance
    assert found.interval[0] < 0 < found.interval[1]


def test_a_clear_difference_is_beyond_chance_and_keeps_its_direction():
    first, second = np.arange(200) < 120, np.arange(200) < 160
    found = compare_right(first, second)
    assert (found.first_only, found.second_only) == (0, 40)
    assert found.difference == pytest.approx(0.2)
    assert found.beyond_chance
    assert found.interval[0] > 0


def test_difference_of_map_is_judged_on_the_same_resamples():
    logits, targets = made.several()
    noisy = logits + np.random.default_rng(5).normal(scale=3, size=logits.shape)
    assert not compare_map(logits, logits, targets).beyond_chance
    worse = compare_map(logits, noisy, targets)
    assert worse.beyond_chance
    assert worse.difference < 0
    assert worse.interval[0] < worse.difference < worse.interval[1]

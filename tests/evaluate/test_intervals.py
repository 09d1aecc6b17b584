"""Intervals, calibration and paired comparisons: known values, and what they promise."""

import numpy as np
import pytest

from tests.evaluate import made
from vitrail.evaluate import measures
from vitrail.evaluate.calibration import calibration_error, reliability
from vitrail.evaluate.intervals import f1_interval, recall_interval, wilson
from vitrail.evaluate.paired import compare_map, compare_right, mcnemar

stats = pytest.importorskip("scipy.stats", reason="scipy is not installed: pip install 'vitrail[dev]'")


@pytest.mark.parametrize(("right", "count"), [(0, 5), (1, 1), (298, 341), (50, 100), (9_999, 10_000)])
def test_wilson_is_that_of_scipy(right, count):
    theirs = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right, count) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_no_pictures_have_no_interval():
    with pytest.raises(ValueError, match="at least one picture"):
        wilson(0, 0)


def test_interval_of_balanced_accuracy_is_as_drawing_pictures_where_classes_have_many():
    truth = np.repeat([0, 1, 2], [600, 300, 100])
    right = np.random.default_rng(0).random(1000) < 0.7
    generator, values = np.random.default_rng(1), []
    for _ in range(2000):
        drawn = generator.integers(1000, size=1000)
        values.append(np.mean([right[drawn][truth[drawn] == k].mean() for k in range(3)]))
    support = np.bincount(truth)
    found = recall_interval(support, np.bincount(truth[right], minlength=3))
    assert found == pytest.approx(np.percentile(values, [2.5, 97.5]), abs=0.005)


@pytest.mark.parametrize("right", [0, 1, 162, 200])
def test_one_picture_to_a_class_has_wilsons_interval(right):
    assert recall_interval(np.ones(200, int), (np.arange(200) < right).astype(int)) == pytest.approx(wilson(right, 200))


SUPPORTS = {
    "one each": np.ones(200, int),
    "four each": np.full(50, 4),
    "uneven": np.array([100, 30, 10, 3, 1] * 4),
    "many": np.full(10, 100),
}


@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
@pytest.mark.parametrize("alike", [True, False])
def test_interval_of_balanced_accuracy_holds_the_truth_as_often_as_it_promises(support, alike):
    generator = np.random.default_rng(0)
    share = np.full(len(support), 0.8) if alike else generator.beta(4, 1, len(support))
    held = 0
    for _ in range(1000):
        low, high = recall_interval(support, generator.binomial(support, share))
        held += low <= share.mean() <= high
    assert held >= 920  # 950, less what a thousand draws may be off, and the steps of a share of few pictures


@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_interval_of_f1_holds_the_truth_as_often_as_it_promises(support):
    generator, classes = np.random.default_rng(1), len(support)
    truth = np.repeat(np.arange(classes), support)

    def judged():
        said = np.where(generator.random(len(truth)) < 0.8, truth, generator.integers(classes, size=len(truth)))
        counted = [np.bincount(each, minlength=classes) for each in (truth[said == truth], said)]
        return support, *counted

    def f1(support, right, said):
        return (2 * right / (support + said)).mean()

    expected = np.mean([f1(*judged()) for _ in range(2000)])
    held = 0
    for _ in range(300):
        low, high = f1_interval(*judged(), resamples=200)
        held += low <= expected <= high
    assert held >= 270


def test_with_nothing_wrong_f1_is_as_sure_as_so_many_pictures_make_it():
    support = np.full(5, 20)
    assert f1_interval(support, support, support) == pytest.approx(wilson(100, 100))
    assert f1_interval(support, np.zeros(5, int), np.roll(support, 1)) == pytest.approx(wilson(0, 100))


def test_a_model_that_knows_what_it_knows_has_no_calibration_error():
    generator = np.random.default_rng(0)
    sure = generator.uniform(0.5, 1, 200_000)
    assert calibration_error(sure, generator.random(200_000) < sure) < 0.01
    assert calibration_error(np.full(100, 0.9), np.arange(100) < 50) == pytest.approx(0.4)


def test_interval_of_calibration_error_holds_the_truth_and_the_value():
    generator, held = np.random.default_rng(0), 0
    for _ in range(60):
        sure = generator.uniform(0.6, 1, 300)
        found = measures(*logits_of(sure, generator.random(300) < sure - 0.1))
        low, high = found["calibration_error_interval"]
        assert 0 <= low <= found["calibration_error"] <= high <= 1
        held += low <= 0.1 <= high
    assert held >= 53


def test_interval_of_cross_entropy_is_that_of_a_mean():
    sure = np.random.default_rng(0).uniform(0.6, 1, 2000)
    logits, targets = logits_of(sure, np.random.default_rng(1).random(2000) < sure)
    loss = -np.log(np.where(targets == 0, sure, 1 - sure))
    theirs = stats.t.interval(0.95, 1999, loc=loss.mean(), scale=stats.sem(loss))
    assert measures(logits, targets)["loss_interval"] == pytest.approx(theirs, rel=0.02)


def logits_of(sure, right):
    """Two classes: the first is said, so surely, and is right or is not."""
    return np.stack([np.log(sure), np.log1p(-sure)], 1), np.where(right, 0, 1)


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

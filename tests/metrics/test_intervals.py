"""Intervals, calibration and paired tests: known values and coverage."""

import numpy as np
import pytest

from tests.metrics import made
from vitrail.metrics import compute_metrics
from vitrail.metrics.calibration import calibration_error, compute_reliability
from vitrail.metrics.intervals import f1_interval, recall_interval, wilson_interval
from vitrail.metrics.paired import compare_correct, compare_map, mcnemar

stats = pytest.importorskip("scipy.stats", reason="scipy is not installed: pip install 'vitrail[dev]'")


@pytest.mark.parametrize(("correct", "count"), [(0, 5), (1, 1), (298, 341), (50, 100), (9_999, 10_000)])
def test_wilson_equals_scipy(correct, count):
    theirs = stats.binomtest(correct, count).proportion_ci(method="wilson")
    assert wilson_interval(correct, count) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_an_interval_without_images_is_an_error():
    with pytest.raises(ValueError, match="at least 1 image, got 0"):
        wilson_interval(0, 0)


def test_interval_of_balanced_accuracy_equals_a_bootstrap_for_large_classes():
    truth = np.repeat([0, 1, 2], [600, 300, 100])
    correct = np.random.default_rng(0).random(1000) < 0.7
    generator, values = np.random.default_rng(1), []
    for _ in range(2000):
        drawn = generator.integers(1000, size=1000)
        values.append(np.mean([correct[drawn][truth[drawn] == k].mean() for k in range(3)]))
    support = np.bincount(truth)
    result = recall_interval(support, np.bincount(truth[correct], minlength=3))
    assert result == pytest.approx(np.percentile(values, [2.5, 97.5]), abs=0.005)


@pytest.mark.parametrize("correct", [0, 1, 162, 200])
def test_one_image_per_class_has_wilsons_interval(correct):
    assert recall_interval(np.ones(200, int), (np.arange(200) < correct).astype(int)) == pytest.approx(
        wilson_interval(correct, 200)
    )


SUPPORTS = {
    "one each": np.ones(200, int),
    "four each": np.full(50, 4),
    "uneven": np.array([100, 30, 10, 3, 1] * 4),
    "many": np.full(10, 100),
}


@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
@pytest.mark.parametrize("alike", [True, False])
def test_coverage_of_the_interval_of_balanced_accuracy(support, alike):
    generator = np.random.default_rng(0)
    share = np.full(len(support), 0.8) if alike else generator.beta(4, 1, len(support))
    held = 0
    for _ in range(1000):
        low, high = recall_interval(support, generator.binomial(support, share))
        held += low <= share.mean() <= high
    assert held >= 920  # 950, less the noise of 1,000 simulations and the discreteness of few images


@pytest.mark.parametrize("support", SUPPORTS.values(), ids=SUPPORTS)
def test_coverage_of_the_interval_of_f1(support):
    generator, classes = np.random.default_rng(1), len(support)
    truth = np.repeat(np.arange(classes), support)

    def judged():
        predicted = np.where(generator.random(len(truth)) < 0.8, truth, generator.integers(classes, size=len(truth)))
        counted = [np.bincount(each, minlength=classes) for each in (truth[predicted == truth], predicted)]
        return support, *counted

    def f1(support, correct, predicted):
        return (2 * correct / (support + predicted)).mean()

    expected = np.mean([f1(*judged()) for _ in range(2000)])
    held = 0
    for _ in range(300):
        low, high = f1_interval(*judged(), resamples=200)
        held += low <= expected <= high
    assert held >= 270


def test_interval_of_f1_without_errors():
    support = np.full(5, 20)
    assert f1_interval(support, support, support) == pytest.approx(wilson_interval(100, 100))
    assert f1_interval(support, np.zeros(5, int), np.roll(support, 1)) == pytest.approx(wilson_interval(0, 100))


def test_a_calibrated_model_has_no_calibration_error():
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.5, 1, 200_000)
    assert calibration_error(confidence, generator.random(200_000) < confidence) < 0.01
    assert calibration_error(np.full(100, 0.9), np.arange(100) < 50) == pytest.approx(0.4)


def test_interval_of_calibration_error_contains_truth_and_value():
    generator, held = np.random.default_rng(0), 0
    for _ in range(60):
        confidence = generator.uniform(0.6, 1, 300)
        result = compute_metrics(*logits_of(confidence, generator.random(300) < confidence - 0.1))
        low, high = result["calibration_error_interval"]
        assert 0 <= low <= result["calibration_error"] <= high <= 1
        held += low <= 0.1 <= high
    assert held >= 53


def test_interval_of_cross_entropy_equals_that_of_a_mean():
    confidence = np.random.default_rng(0).uniform(0.6, 1, 2000)
    logits, targets = logits_of(confidence, np.random.default_rng(1).random(2000) < confidence)
    loss = -np.log(np.where(targets == 0, confidence, 1 - confidence))
    theirs = stats.t.interval(0.95, 1999, loc=loss.mean(), scale=stats.sem(loss))
    assert compute_metrics(logits, targets)["loss_interval"] == pytest.approx(theirs, rel=0.02)


def logits_of(confidence, correct):
    """Return logits of two classes: class 0 is predicted with this confidence, correctly or not."""
    return np.stack([np.log(confidence), np.log1p(-confidence)], 1), np.where(correct, 0, 1)


def test_bins_contain_every_image_once():
    confidence = np.array([0.0, 1.0, 1 / 15, 0.5, 0.999])
    bins = compute_reliability(confidence, np.ones(5, bool))
    assert sum(bin.count for bin in bins) == 5
    assert (bins[0].count, bins[-1].count) == (2, 2)
    assert np.isnan(bins[3].accuracy)


@pytest.mark.parametrize(("first", "second"), [(5, 15), (0, 3), (1, 0), (40, 60), (700, 1000)])
def test_mcnemar_equals_the_exact_test_with_mid_p(first, second):
    exact = stats.binomtest(first, first + second).pvalue
    middle = stats.binom.pmf(min(first, second), first + second, 0.5)
    assert mcnemar(first, second) == pytest.approx(exact - middle, abs=1e-9)


def test_equal_models_do_not_differ():
    assert mcnemar(0, 0) == mcnemar(7, 7) == 1.0
    correct = np.arange(100) < 80
    result = compare_correct(correct, correct)
    assert not result.is_significant
    assert result.interval[0] < 0 < result.interval[1]


def test_a_large_difference_is_significant_and_has_its_sign():
    first, second = np.arange(200) < 120, np.arange(200) < 160
    result = compare_correct(first, second)
    assert (result.first_only, result.second_only) == (0, 40)
    assert result.difference == pytest.approx(0.2)
    assert result.is_significant
    assert result.interval[0] > 0


def test_difference_of_map_uses_common_resamples():
    logits, targets = made.several()
    noisy = logits + np.random.default_rng(5).normal(scale=3, size=logits.shape)
    assert not compare_map(logits, logits, targets).is_significant
    worse = compare_map(logits, noisy, targets)
    assert worse.is_significant
    assert worse.difference < 0
    assert worse.interval[0] < worse.difference < worse.interval[1]

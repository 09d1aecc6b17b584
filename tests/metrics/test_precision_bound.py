"""Thresholds that hold a precision by a one-sided bound."""

import numpy as np
import pytest
from scipy.stats import binomtest

from vitrail.metrics.precision_bound import bound_precision, count_needed, find_threshold


@pytest.mark.parametrize(("count", "errors"), [(10, 0), (50, 1), (300, 12), (4, 4)])
def test_the_bound_is_the_exact_one_of_clopper_and_pearson(count, errors):
    exact = binomtest(count - errors, count, alternative="greater").proportion_ci(0.95, "exact").low
    assert bound_precision(count, errors) == pytest.approx(exact, abs=1e-9)


def test_149_images_without_an_error_prove_98_per_cent():
    assert count_needed(0.98) == 149
    assert bound_precision(149, 0) >= 0.98 > bound_precision(148, 0)
    assert count_needed(0.98, 1) == 236


def test_a_perfect_classifier_gets_the_lowest_confidence_as_threshold():
    confidence = np.linspace(0.4, 1, 400)
    fit = find_threshold(confidence, np.ones(400, bool), 0.98)
    assert fit.threshold == pytest.approx(0.4)
    assert (fit.count, fit.errors, fit.images) == (400, 0, 400)


def test_the_threshold_leaves_out_the_uncertain_images():
    """The lower half is right half of the time: the threshold stays above it."""
    confidence, correct = np.linspace(0, 1, 2000), np.ones(2000, bool)
    correct[:1000:2] = False
    fit = find_threshold(confidence, correct, 0.98)
    assert fit.threshold is not None
    assert 0.45 < fit.threshold < 0.55
    assert fit.bound >= 0.98
    assert fit.errors == (~correct[confidence >= fit.threshold]).sum()


def test_the_point_estimate_is_not_enough():
    """98 % of 400 images are right, which proves less than 98 %."""
    correct = np.ones(400, bool)
    correct[::50] = False
    fit = find_threshold(np.random.default_rng(0).random(400), correct, 0.98)
    assert fit.precision >= 0.97
    assert fit.threshold is None


def test_too_few_images_have_no_threshold():
    fit = find_threshold(np.linspace(0.9, 1, 100), np.ones(100, bool), 0.98)
    assert fit.threshold is None
    assert (fit.needed, fit.images) == (149, 100)
    empty = find_threshold(np.zeros(0), np.zeros(0, bool), 0.98)
    assert empty.threshold is None


def test_images_of_one_confidence_are_all_above_the_threshold():
    confidence = np.repeat([0.9, 0.5], [100, 300])
    fit = find_threshold(confidence, np.ones(400, bool), 0.98)
    assert fit.threshold == 0.5
    assert fit.count == 400


def test_the_bound_fails_in_at_most_five_per_cent_of_the_draws():
    """The probability of being right is the confidence: thresholds that promise 90 % hold it in 95 of 100 draws."""
    broken = found = 0
    for seed in range(120):
        generator = np.random.default_rng(seed)
        confidence = generator.uniform(0.5, 1, 500)
        fit = find_threshold(confidence, generator.random(500) < confidence, 0.9)
        if fit.threshold is not None:
            found += 1
            broken += (fit.threshold + 1) / 2 < 0.9  # the true precision above it
    assert found > 20
    assert broken <= 12  # 6 are expected at most; more than 12 of 120 has a probability of 0.8 %


@pytest.mark.parametrize("target", [0, 1, 1.5, -0.2])
def test_a_target_out_of_range_is_an_error(target):
    with pytest.raises(ValueError, match="precision target"):
        find_threshold(np.ones(3), np.ones(3, bool), target)

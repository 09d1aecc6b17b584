"""Metrics of numeric targets against scikit-learn."""

import json

import numpy as np
import pytest

from vitrail.metrics.regression import (
    compare_regression,
    compute_regression_metrics,
    find_largest_errors,
    summarise_regression,
)

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


def make_values(n=80, width=3, seed=0, noise=0.5):
    """Targets of different scales and offsets, and predictions with noise."""
    generator = np.random.default_rng(seed)
    targets = generator.normal(size=(n, width)) * [1, 10, 0.01][:width] + [0, 1000, 5][:width]
    return targets + noise * targets.std(0) * generator.normal(size=(n, width)), targets


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_scikit_learn(seed) -> None:
    predicted, targets = make_values(seed=seed)
    metrics = compute_regression_metrics(predicted, targets)
    for name, function in {
        "mae": sklearn.mean_absolute_error,
        "rmse": sklearn.root_mean_squared_error,
        "r2": sklearn.r2_score,
    }.items():
        assert metrics[name] == pytest.approx(function(targets, predicted))
        assert metrics[f"target_{name}"] == pytest.approx(function(targets, predicted, multioutput="raw_values"))
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["images"] == 80


def test_intervals_equal_those_of_resampling_images() -> None:
    predicted, targets = make_values()
    metrics, drawn = compute_regression_metrics(predicted, targets), []
    generator, names = np.random.default_rng(9), ("mae", "rmse", "r2")
    for _ in range(400):
        rows = generator.integers(80, size=80)
        again = compute_regression_metrics(predicted[rows], targets[rows], intervals=False)
        drawn.append([again[name] for name in names])
    for name, values in zip(names, np.array(drawn).T, strict=True):
        low, high = metrics[f"{name}_interval"]
        assert low < metrics[name] < high
        assert (low, high) == pytest.approx(np.percentile(values, [2.5, 97.5]), rel=0.06), name
    assert metrics == compute_regression_metrics(predicted, targets)


def test_r2_of_a_constant_target_is_undefined_and_left_out() -> None:
    predicted, targets = make_values(width=2)
    whole = compute_regression_metrics(predicted[:, :1], targets[:, :1])["r2"]
    targets[:, 1] = 0.1
    metrics = compute_regression_metrics(predicted, targets)
    assert metrics["target_r2"] == [pytest.approx(whole), None]
    assert metrics["r2"] == pytest.approx(whole)
    alone = compute_regression_metrics(predicted[:, 1:], targets[:, 1:])
    assert alone["r2"] is None
    assert "r2_interval" not in alone
    with pytest.raises(ValueError, match="all targets are constant"):
        compare_regression(predicted[:, 1:], predicted[:, 1:], targets[:, 1:])


def test_one_image_has_no_interval() -> None:
    metrics = compute_regression_metrics(np.array([[1.0]]), np.array([[3.0]]))
    assert (metrics["mae"], metrics["rmse"], metrics["r2"]) == (2.0, 2.0, None)
    assert not any(name.endswith("interval") for name in metrics)


def test_a_better_model_is_significantly_better() -> None:
    weak, targets = make_values(noise=0.6)
    strong, _ = make_values(noise=0.3)
    test = compare_regression(weak, strong, targets)
    scores = [sklearn.r2_score(targets, predicted) for predicted in (weak, strong)]
    assert test.difference == pytest.approx(scores[1] - scores[0])
    assert test.interval[0] < test.difference < test.interval[1]
    assert test.is_significant
    assert (test.images, test.second_only, test.counted) == (80, 80, "better")  # the same noise, halved
    mirrored = compare_regression(strong, weak, targets)
    assert (mirrored.difference, mirrored.first_only) == (pytest.approx(-test.difference), 80)
    assert not compare_regression(weak, weak, targets).is_significant


@pytest.mark.parametrize(
    ("predicted", "targets", "message"),
    [
        (np.zeros((3, 2)), np.zeros((3, 1)), r"predictions \[3, 2\] and targets \[3, 1\]: expected \[n, M\]"),
        (np.zeros(3), np.zeros(3), r"expected \[n, M\]"),
        (np.zeros((0, 1)), np.zeros((0, 1)), "no images"),
        (np.array([[0.0], [np.inf]]), np.zeros((2, 1)), "the predictions of image 1 are not finite"),
        (np.zeros((2, 1)), np.array([[np.nan], [0.0]]), "the targets of image 0 are not finite"),
    ],
)
def test_values_that_cannot_be_evaluated_are_refused(predicted, targets, message) -> None:
    with pytest.raises(ValueError, match=message):
        compute_regression_metrics(predicted, targets)


def test_each_target_has_an_interval() -> None:
    predicted, targets = make_values(noise=0.4)
    metrics = compute_regression_metrics(predicted, targets)
    for name in ("mae", "rmse", "r2"):
        for value, (low, high) in zip(metrics[f"target_{name}"], metrics[f"target_{name}_interval"], strict=True):
            assert low < value < high


def test_errors_of_several_units_are_not_averaged() -> None:
    predicted, targets = make_values(noise=0.4)
    metrics = summarise_regression(predicted, targets)
    assert "r2" in metrics
    assert not {"mae", "rmse", "mae_interval", "rmse_interval"} & set(metrics)
    alone = summarise_regression(predicted[:, :1], targets[:, :1])
    assert (alone["mae"], alone["interval"]) == (alone["target_mae"][0], alone["r2_interval"])


def test_the_largest_errors_count_in_units_of_each_target() -> None:
    targets = np.array([[0.0, 0.0], [1.0, 1000.0], [2.0, 2000.0], [3.0, 3000.0]])
    predicted = targets + np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 500.0], [0.1, 0.0]])
    assert find_largest_errors(predicted, targets, 3).tolist() == [1, 2, 3]
    assert find_largest_errors(np.ones((2, 1)), np.zeros((2, 1)), 5).tolist() == [0, 1]  # a constant target

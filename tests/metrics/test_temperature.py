"""Temperature scaling: the fitted value against other optimisers, the decision, and the direction of the error."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit, log_softmax

from vitrail.metrics import compute_metrics
from vitrail.metrics.temperature import (
    FOLDS,
    HIGHEST,
    LOWEST,
    MIN_IMAGES,
    choose_temperature,
    fit_temperature,
    score_images,
)
from vitrail.utils.text import format_calibration


def draw_single(n: int = 400, classes: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and classes drawn with the probabilities of these logits: perfectly calibrated."""
    generator = np.random.default_rng(seed)
    logits = 2.5 * generator.normal(size=(n, classes))
    return logits.astype(np.float32), (logits + generator.gumbel(size=logits.shape)).argmax(1)


def draw_multilabel(n: int = 200, classes: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = 2 * generator.normal(size=(n, classes)) - 1
    return logits.astype(np.float32), (generator.random(logits.shape) < expit(logits)).astype(np.int64)


def reference_loss(logits: np.ndarray, targets: np.ndarray, temperature: float) -> float:
    """Return the cross-entropy with one further image of a random class, written out without any of our code."""
    rest, scaled = 1 / (len(logits) + 1), logits.astype(np.float64) / temperature
    if targets.ndim == 2:
        soft = (1 - rest) * targets + rest / 2
        return -float((soft * log_expit(scaled) + (1 - soft) * log_expit(-scaled)).sum())
    soft = (1 - rest) * np.eye(logits.shape[1])[targets] + rest / logits.shape[1]
    return -float((soft * log_softmax(scaled, 1)).sum())


@pytest.mark.parametrize("draw", [draw_single, draw_multilabel])
@pytest.mark.parametrize("scale", [0.2, 0.7, 1.0, 3.0])
def test_fitted_temperature_equals_scipy_and_a_grid(draw, scale):
    logits, targets = draw()
    logits = logits * np.float32(scale)
    fitted = fit_temperature(logits, targets)
    found = minimize_scalar(
        lambda log: reference_loss(logits, targets, np.exp(log)), bounds=np.log((LOWEST, HIGHEST)), method="bounded"
    )
    assert fitted == pytest.approx(np.exp(found.x), rel=1e-4)
    grid = np.geomspace(LOWEST, HIGHEST, 2000)
    assert fitted == pytest.approx(min(grid, key=lambda t: reference_loss(logits, targets, t)), rel=4e-3)
    plain = min(grid, key=lambda t: score_images(logits / t, targets)[0].mean())  # without the further image
    assert fitted == pytest.approx(plain, rel=0.05)
    assert fitted == pytest.approx(scale, rel=0.25)


@pytest.mark.parametrize("draw", [draw_single, draw_multilabel])
def test_calibrated_logits_keep_temperature_one(draw):
    scaled = sum(choose_temperature(*draw(n=150, seed=seed)).is_scaled for seed in range(60))
    assert scaled <= 6


@pytest.mark.parametrize("draw", [draw_single, draw_multilabel])
@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_scaling_removes_the_calibration_error_of_held_out_images(draw, scale):
    logits, targets = draw(n=800)
    fit = choose_temperature(logits * np.float32(scale), targets)
    assert fit.temperature == fit.fitted == pytest.approx(scale, rel=0.2)
    assert fit.calibration_error_after < fit.calibration_error_before / 2
    assert fit.loss_before - fit.loss_after > fit.gain_error > 0
    fresh, truth = draw(n=800, seed=1)  # other images of the same model
    before, after = (score_images(fresh * scale / t, truth)[1] for t in (1.0, fit.temperature))
    assert after < before / 2
    assert fit.as_dict()["folds"] == FOLDS


def test_temperature_is_finite_without_errors():
    logits = np.eye(10, dtype=np.float32)[np.arange(100) % 10]
    fit = choose_temperature(logits, np.arange(100) % 10)
    assert LOWEST < fit.temperature < 1
    confidence = compute_metrics(logits / fit.temperature, np.arange(100) % 10)["mean_confidence"]
    assert 0.98 < confidence < 0.999  # about one error in a hundred and one


def test_few_images_and_equal_logits_are_not_scaled():
    logits, targets = draw_single(n=MIN_IMAGES - 1)
    fit = choose_temperature(logits * np.float32(0.1), targets)
    assert (fit.temperature, fit.reason) == (1.0, "19 samples are too few, at least 20 are needed")
    assert choose_temperature(np.zeros((60, 4), np.float32), np.arange(60) % 4).temperature == 1


def test_wrong_predictions_reach_the_highest_temperature():
    logits = 5 * np.eye(4, dtype=np.float32)[np.arange(80) % 4]
    assert fit_temperature(logits, (np.arange(80) + 1) % 4) == HIGHEST


@pytest.mark.parametrize(("scale", "direction"), [(0.3, "under-confident"), (4.0, "over-confident"), (1.0, "neither")])
@pytest.mark.parametrize("draw", [draw_single, draw_multilabel])
def test_direction_of_the_calibration_error(draw, scale, direction):
    logits, targets = draw(n=600)
    metrics = compute_metrics(logits * np.float32(scale), targets, intervals=False)
    assert metrics["calibration_direction"] == direction
    text = format_calibration(metrics)
    assert text.startswith("neither over- nor under-confident: " if direction == "neither" else f"{direction}: ")
    right = targets == logits.argmax(1) if targets.ndim == 1 else (logits >= 0) == targets
    assert metrics["mean_confidence"] - metrics["confidence_gap"] == pytest.approx(right.mean())
    assert f"at {100 * right.mean():.1f}\xa0% accuracy" in text


def test_small_gaps_have_no_direction():
    """A gap below a point is none however many images there are, and a large one may be by chance with few images."""
    confidence = np.log(np.array([[0.905, 0.095]] * 100_000))
    targets = (np.arange(100_000) % 10 == 0).astype(int)
    assert compute_metrics(confidence, targets, intervals=False)["calibration_direction"] == "neither"
    few = compute_metrics(np.log(np.array([[0.8, 0.2]] * 6)), np.array([0, 0, 0, 0, 1, 1]))
    assert few["confidence_gap"] == pytest.approx(0.8 - 4 / 6)
    assert few["calibration_direction"] == "neither"


def test_a_large_gap_on_few_images_is_not_called_calibrated():
    metrics = {"mean_confidence": 0.708, "confidence_gap": 0.279, "calibration_direction": "neither"}
    expected = "too few samples to tell the direction: mean confidence 70.8 % at 42.9 % accuracy"
    assert format_calibration(metrics).replace("\u00a0", " ") == expected

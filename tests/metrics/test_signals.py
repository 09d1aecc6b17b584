"""Spread and effective rank of constructed features."""

import numpy as np
import pytest

from vitrail.metrics.signals import effective_rank, feature_spread


def normal(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def test_evenly_distributed_features_have_a_spread_of_one():
    assert feature_spread(normal(2000, 64)) == pytest.approx(1, abs=0.01)
    assert feature_spread(np.concatenate((np.eye(8), -np.eye(8)))) == pytest.approx(1)


def test_equal_features_have_no_spread_and_no_rank():
    alike = np.tile(normal(1, 16), (50, 1))
    assert feature_spread(alike) == pytest.approx(0, abs=1e-7)
    assert effective_rank(alike) == 0
    assert (feature_spread(np.zeros((5, 3))), effective_rank(np.zeros((5, 3)))) == (0, 0)


def test_spread_of_four_images_by_hand():
    # Four images in the plane, of any length: (1, 0), (1, 0), (0, 1), (0, 1) on the circle.
    features = np.array([[5.0, 0], [0.1, 0], [0, 2], [0, 7]])
    assert feature_spread(features) == pytest.approx(0.5 * np.sqrt(2))


def test_a_common_offset_reduces_the_spread():
    apart = normal(500, 32)
    spreads = [feature_spread(apart + shift) for shift in (0, 1, 10, 100)]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] == pytest.approx(0.01, rel=0.1)  # 1 / 100 of the length differs


def test_spread_is_never_above_one():
    for seed in range(20):
        chance = np.random.default_rng(seed)
        n, d = chance.integers(2, 40, 2)
        assert 0 <= feature_spread(chance.standard_cauchy((n, d))) <= 1


@pytest.mark.parametrize("directions", [1, 3, 10])
def test_rank_is_the_number_of_directions(directions):
    basis = np.linalg.qr(normal(32, directions))[0].T  # [k, D], orthonormal
    features = normal(2000, directions, seed=1) @ basis + 5
    assert effective_rank(features) == pytest.approx(directions, rel=0.02)


def test_rank_is_the_entropy_of_the_singular_values():
    features = normal(300, 40) * np.linspace(0.1, 3, 40)
    values = np.linalg.svd(features - features.mean(0), compute_uv=False)
    shares = values / values.sum()
    assert effective_rank(features) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-5)
    assert effective_rank(features) == pytest.approx(
        effective_rank(features * 1000 + 7), rel=1e-3
    )  # neither size nor mean count


def test_the_number_of_images_bounds_the_rank():
    few = normal(20, 64)
    assert 15 < effective_rank(few) <= 19
    values = np.linalg.svd(few - few.mean(0), compute_uv=False)[:19]
    shares = values / values.sum()
    assert effective_rank(few) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-4)


def test_rounding_errors_have_no_rank():
    assert effective_rank(1 + 1e-7 * normal(200, 32)) == 0
    assert effective_rank(1 + 1e-2 * normal(200, 32)) > 25


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_features_give_nan(bad):
    features = normal(20, 8)
    features[3, 4] = bad
    assert np.isnan(feature_spread(features))
    assert np.isnan(effective_rank(features))


@pytest.mark.filterwarnings("error")
def test_huge_and_half_precision_features_do_not_overflow():
    assert feature_spread(normal(200, 16).astype(np.float64) * 1e200) == pytest.approx(feature_spread(normal(200, 16)))
    assert effective_rank(normal(200, 16).astype(np.float64) * 1e200) == pytest.approx(effective_rank(normal(200, 16)))
    half = (normal(200, 16) * 5000).astype(np.float16)
    assert feature_spread(half) == pytest.approx(feature_spread(normal(200, 16)), rel=1e-2)


def test_one_image_is_an_error():
    for measure in (feature_spread, effective_rank):
        with pytest.raises(ValueError, match="n >= 2"):
            measure(np.ones((1, 4)))

"""Spread and effective rank of features that were made to have them."""

import numpy as np
import pytest

from vitrail.evaluate.signals import rank, spread


def normal(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def test_features_that_point_everywhere_have_a_spread_of_one():
    assert spread(normal(2000, 64)) == pytest.approx(1, abs=0.01)
    assert spread(np.concatenate((np.eye(8), -np.eye(8)))) == pytest.approx(1)


def test_features_that_are_all_alike_have_neither_spread_nor_rank():
    alike = np.tile(normal(1, 16), (50, 1))
    assert spread(alike) == pytest.approx(0, abs=1e-7)
    assert rank(alike) == 0
    assert (spread(np.zeros((5, 3))), rank(np.zeros((5, 3)))) == (0, 0)


def test_spread_is_the_definition_by_hand():
    # Four pictures in the plane, of lengths that do not count: (1, 0), (1, 0), (0, 1), (0, 1) on the circle.
    features = np.array([[5.0, 0], [0.1, 0], [0, 2], [0, 7]])
    assert spread(features) == pytest.approx(0.5 * np.sqrt(2))


def test_a_common_part_draws_spread_towards_nothing():
    apart = normal(500, 32)
    found = [spread(apart + shift) for shift in (0, 1, 10, 100)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(0.01, rel=0.1)  # 1 / 100 of the length differs


def test_spread_is_never_above_one():
    for seed in range(20):
        chance = np.random.default_rng(seed)
        n, d = chance.integers(2, 40, 2)
        assert 0 <= spread(chance.standard_cauchy((n, d))) <= 1


@pytest.mark.parametrize("directions", [1, 3, 10])
def test_rank_is_the_number_of_directions(directions):
    basis = np.linalg.qr(normal(32, directions))[0].T  # [k, D], orthonormal
    features = normal(2000, directions, seed=1) @ basis + 5
    assert rank(features) == pytest.approx(directions, rel=0.02)


def test_rank_is_the_entropy_of_the_singular_values():
    features = normal(300, 40) * np.linspace(0.1, 3, 40)
    values = np.linalg.svd(features - features.mean(0), compute_uv=False)
    shares = values / values.sum()
    assert rank(features) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-5)
    assert rank(features) == pytest.approx(rank(features * 1000 + 7), rel=1e-3)  # neither size nor mean count


def test_fewer_pictures_than_dimensions_bound_the_rank():
    few = normal(20, 64)
    assert 15 < rank(few) <= 19
    values = np.linalg.svd(few - few.mean(0), compute_uv=False)[:19]
    shares = values / values.sum()
    assert rank(few) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-4)


def test_rounding_has_no_directions():
    assert rank(1 + 1e-7 * normal(200, 32)) == 0
    assert rank(1 + 1e-2 * normal(200, 32)) > 25


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_are_not_a_number(bad):
    features = normal(20, 8)
    features[3, 4] = bad
    assert np.isnan(spread(features))
    assert np.isnan(rank(features))


@pytest.mark.filterwarnings("error")
def test_huge_and_half_precision_features_do_not_overflow():
    assert spread(normal(200, 16).astype(np.float64) * 1e200) == pytest.approx(spread(normal(200, 16)))
    assert rank(normal(200, 16).astype(np.float64) * 1e200) == pytest.approx(rank(normal(200, 16)))
    half = (normal(200, 16) * 5000).astype(np.float16)
    assert spread(half) == pytest.approx(spread(normal(200, 16)), rel=1e-2)


def test_one_picture_is_refused():
    for measure in (spread, rank):
        with pytest.raises(ValueError, match="at least two pictures"):
            measure(np.ones((1, 4)))

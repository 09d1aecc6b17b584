"""Chance is a function of (seed, epoch, index, place), and looks random."""

import numpy as np
import pytest

from vitrail.data.chance import Chance, Chances, bits, uniforms


def test_one_after_another_gives_the_numbers_of_the_table():
    table = uniforms(7, 3, np.array([0, 5, 123_456_789]), 6)
    for row, index in zip(table, (0, 5, 123_456_789), strict=True):
        chance = Chance(7, 3, index)
        assert [chance.at(place) for place in range(6)] == row.tolist()


def test_numbers_do_not_depend_on_how_indices_are_batched():
    whole = uniforms(1, 2, np.arange(100), 4)
    apart = np.concatenate([uniforms(1, 2, part, 4) for part in np.array_split(np.arange(100), 7)])
    assert (whole == apart).all()
    assert (uniforms(1, 2, np.arange(100), 9)[:, :4] == whole).all()


@pytest.mark.parametrize("other", [(2, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_another_seed_epoch_or_stream_gives_other_numbers(other):
    seed, epoch, stream = other
    first, second = uniforms(1, 0, np.arange(1000), 1), uniforms(seed, epoch, np.arange(1000), 1, stream)
    assert not (first == second).any()
    assert abs(np.corrcoef(first[:, 0], second[:, 0])[0, 1]) < 0.15


def test_seeds_may_be_negative_or_large():
    for seed in (-1, 2**63, 2**200):
        assert Chance(seed, 0, 3).at(0) == uniforms(seed, 0, np.array([3]), 1)[0, 0]


@pytest.mark.parametrize("axis", ["index", "place", "epoch", "seed"])
def test_numbers_are_uniform_along_every_axis(axis):
    count = 20_000
    if axis == "index":
        draws = uniforms(0, 0, np.arange(count), 1)[:, 0]
    elif axis == "place":
        draws = uniforms(0, 0, np.array([0]), count)[0]
    elif axis == "epoch":
        draws = np.array([Chance(0, epoch, 0).at(0) for epoch in range(count)])
    else:
        draws = np.array([Chance(seed, 0, 0).at(0) for seed in range(count)])
    assert draws.min() >= 0
    assert draws.max() < 1
    found, _ = np.histogram(draws, 50, (0, 1))
    chi = ((found - count / 50) ** 2 / (count / 50)).sum()
    assert 20 < chi < 95  # 49 degrees of freedom: one in 10,000 is outside
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_every_bit_is_set_half_of_the_time():
    found = bits(0, 0, np.arange(10_000), 1)[:, 0]
    share = [float(((found >> np.uint64(place)) & np.uint64(1)).mean()) for place in range(64)]
    assert max(abs(each - 0.5) for each in share) < 0.025


def test_a_batch_has_the_numbers_of_its_samples():
    chances = Chances(4, 2, np.array([9, 1]), stream=3)
    assert chances.uniforms(2)[1].tolist() == [Chance(4, 2, 1, 3).at(0), Chance(4, 2, 1, 3).at(1)]
    assert chances.of(5).uniforms(1)[0, 0] == Chance(4, 2, 9).of(5).at(0)
    assert Chances.single(Chance(4, 2, 9, 3)).uniforms(2).tolist() == chances.uniforms(2)[:1].tolist()

"""Random numbers are a uniform function of (seed, epoch, index, position)."""

import numpy as np
import pytest

from vitrail.data.rng import BatchRandom, SampleRandom, random_bits, random_uniform


def test_scalar_and_vectorised_numbers_agree():
    table = random_uniform(7, 3, np.array([0, 5, 123_456_789]), 6)
    for row, index in zip(table, (0, 5, 123_456_789), strict=True):
        sample_rng = SampleRandom(7, 3, index)
        assert [sample_rng.uniform_at(position) for position in range(6)] == row.tolist()


def test_numbers_do_not_depend_on_how_indices_are_batched():
    whole = random_uniform(1, 2, np.arange(100), 4)
    apart = np.concatenate([random_uniform(1, 2, part, 4) for part in np.array_split(np.arange(100), 7)])
    assert (whole == apart).all()
    assert (random_uniform(1, 2, np.arange(100), 9)[:, :4] == whole).all()


@pytest.mark.parametrize("other", [(2, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_seed_epoch_and_stream_change_the_numbers(other):
    seed, epoch, stream = other
    first, second = random_uniform(1, 0, np.arange(1000), 1), random_uniform(seed, epoch, np.arange(1000), 1, stream)
    assert not (first == second).any()
    assert abs(np.corrcoef(first[:, 0], second[:, 0])[0, 1]) < 0.15


def test_seeds_may_be_negative_or_large():
    for seed in (-1, 2**63, 2**200):
        assert SampleRandom(seed, 0, 3).uniform_at(0) == random_uniform(seed, 0, np.array([3]), 1)[0, 0]


@pytest.mark.parametrize("axis", ["index", "position", "epoch", "seed"])
def test_numbers_are_uniform_along_every_axis(axis):
    count = 20_000
    if axis == "index":
        draws = random_uniform(0, 0, np.arange(count), 1)[:, 0]
    elif axis == "position":
        draws = random_uniform(0, 0, np.array([0]), count)[0]
    elif axis == "epoch":
        draws = np.array([SampleRandom(0, epoch, 0).uniform_at(0) for epoch in range(count)])
    else:
        draws = np.array([SampleRandom(seed, 0, 0).uniform_at(0) for seed in range(count)])
    assert draws.min() >= 0
    assert draws.max() < 1
    found, _ = np.histogram(draws, 50, (0, 1))
    chi = ((found - count / 50) ** 2 / (count / 50)).sum()
    assert 20 < chi < 95  # 49 degrees of freedom: one in 10,000 is outside
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_every_bit_is_unbiased():
    found = random_bits(0, 0, np.arange(10_000), 1)[:, 0]
    share = [float(((found >> np.uint64(position)) & np.uint64(1)).mean()) for position in range(64)]
    assert max(abs(each - 0.5) for each in share) < 0.025


def test_batch_and_sample_numbers_agree():
    batch_rng = BatchRandom(4, 2, np.array([9, 1]), stream=3)
    assert batch_rng.uniform(2)[1].tolist() == [
        SampleRandom(4, 2, 1, 3).uniform_at(0),
        SampleRandom(4, 2, 1, 3).uniform_at(1),
    ]
    assert batch_rng.with_stream(5).uniform(1)[0, 0] == SampleRandom(4, 2, 9).with_stream(5).uniform_at(0)
    assert BatchRandom.from_sample(SampleRandom(4, 2, 9, 3)).uniform(2).tolist() == batch_rng.uniform(2)[:1].tolist()

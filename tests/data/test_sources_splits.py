"""Splits by content are stable and never empty."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.making import encoded, tree
from vitrail.data.sources import load_dataset
from vitrail.data.sources.splits import assign_splits, check_fractions

UNIQUE = st.integers(0, 2**64 - 1)
HASHES = st.lists(st.tuples(UNIQUE, st.integers(0, 3)), min_size=1, max_size=60)
FRACTIONS = st.sampled_from(
    [(0.8, 0.2, 0.0), (0.7, 0.15, 0.15), (0.5, 0.5, 0.0), (0.01, 0.98, 0.01), (0.98, 0.01, 0.01)]
)


def sides(rows, fractions):
    hashed, targets = zip(*rows, strict=True)
    return assign_splits(np.array(hashed, dtype=np.uint64), np.array(targets, dtype=np.int64), 4, fractions)


@given(HASHES, FRACTIONS)
def test_copies_are_in_one_split(rows, fractions):
    dataset = sides(rows + rows[::-1], fractions)
    side = {}
    for (hashed, _), each in zip(rows + rows[::-1], dataset, strict=True):
        assert side.setdefault(hashed, each) == each


@given(st.lists(UNIQUE, min_size=2, max_size=40, unique=True), FRACTIONS)
def test_a_class_of_two_is_in_train_and_validation(hashed, fractions):
    dataset = sides([(each, 0) for each in hashed], fractions)
    assert (dataset == 0).any()
    assert (dataset == 1).any()


@given(st.lists(UNIQUE, min_size=2, max_size=40, unique=True), st.lists(UNIQUE, max_size=40), FRACTIONS)
def test_adding_images_moves_no_others(hashed, more, fractions):
    before = sides([(each, 0) for each in hashed], fractions)
    position, (_, validation, test) = np.array(hashed, dtype=np.uint64) / 2.0**64, fractions
    plain = np.where(position < validation, 1, np.where(position < validation + test, 2, 0))
    wanted = {0, 1, 2} if test else {0, 1}
    if wanted <= set(plain.tolist()):  # no image had to be moved so that the class has one on every side
        assert np.array_equal(before, plain)
        assert np.array_equal(sides([(each, 0) for each in hashed + more], fractions)[: len(hashed)], before)


def test_order_and_names_of_files_do_not_matter(tmp_path):
    first = tree(tmp_path / "one", {f"a/{i}.png": i for i in range(40)})
    second = tree(
        tmp_path / "two", {f"a/{99 - i}.png": i for i in range(40)} | {f"a/more{i}.png": 100 + i for i in range(40)}
    )
    name_sets = [
        {load_dataset(root)["validation"].store.data(int(i)) for i in load_dataset(root)["validation"].items}
        for root in (first, second)
    ]
    old = {encoded(i) for i in range(40)}
    assert name_sets[0] == name_sets[1] & old


def test_progress_is_reported(tmp_path):
    seen = []
    load_dataset(tree(tmp_path, {f"a/{i}.png": i for i in range(5)}), progress=lambda *report: seen.append(report))
    assert ("splitting by content", 5, 5) in seen


def test_an_unreadable_image_is_still_assigned_to_a_split(tmp_path):
    tree(tmp_path, {f"a/{i}.png": i for i in range(5)})
    (tmp_path / "a/gone.png").symlink_to(tmp_path / "nowhere.png")
    dataset = load_dataset(tmp_path)
    assert sum(map(len, dataset.splits.values())) == 6


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.5), (0.0, 1.0, 0.0), (1.2, -0.2, 0.0)])
def test_invalid_fractions_raise(fractions):
    with pytest.raises(ValueError, match="add to 1"):
        check_fractions(fractions)

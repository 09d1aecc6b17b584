"""Division by content: stable, and with something on each side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.making import encoded, tree
from vitrail.data.sources import read
from vitrail.data.sources.parts import assign, checked

UNIQUE = st.integers(0, 2**64 - 1)
HASHES = st.lists(st.tuples(UNIQUE, st.integers(0, 3)), min_size=1, max_size=60)
FRACTIONS = st.sampled_from(
    [(0.8, 0.2, 0.0), (0.7, 0.15, 0.15), (0.5, 0.5, 0.0), (0.01, 0.98, 0.01), (0.98, 0.01, 0.01)]
)


def sides(rows, fractions):
    hashed, targets = zip(*rows, strict=True)
    return assign(np.array(hashed, dtype=np.uint64), np.array(targets, dtype=np.int64), 4, fractions)


@given(HASHES, FRACTIONS)
def test_copies_of_a_picture_are_on_one_side(rows, fractions):
    found = sides(rows + rows[::-1], fractions)
    side = {}
    for (hashed, _), each in zip(rows + rows[::-1], found, strict=True):
        assert side.setdefault(hashed, each) == each


@given(st.lists(UNIQUE, min_size=2, max_size=40, unique=True), FRACTIONS)
def test_a_class_of_two_pictures_has_one_to_train_and_one_to_validate_on(hashed, fractions):
    found = sides([(each, 0) for each in hashed], fractions)
    assert (found == 0).any()
    assert (found == 1).any()


@given(st.lists(UNIQUE, min_size=2, max_size=40, unique=True), st.lists(UNIQUE, max_size=40), FRACTIONS)
def test_adding_pictures_moves_no_other(hashed, more, fractions):
    before = sides([(each, 0) for each in hashed], fractions)
    place, (_, validation, test) = np.array(hashed, dtype=np.uint64) / 2.0**64, fractions
    plain = np.where(place < validation, 1, np.where(place < validation + test, 2, 0))
    wanted = {0, 1, 2} if test else {0, 1}
    if wanted <= set(plain.tolist()):  # no picture had to be moved so that the class has one on every side
        assert np.array_equal(before, plain)
        assert np.array_equal(sides([(each, 0) for each in hashed + more], fractions)[: len(hashed)], before)


def test_order_and_names_of_files_do_not_matter(tmp_path):
    first = tree(tmp_path / "one", {f"a/{i}.png": i for i in range(40)})
    second = tree(
        tmp_path / "two", {f"a/{99 - i}.png": i for i in range(40)} | {f"a/more{i}.png": 100 + i for i in range(40)}
    )
    held = [
        {read(root)["validation"].store.data(int(i)) for i in read(root)["validation"].items}
        for root in (first, second)
    ]
    old = {encoded(i) for i in range(40)}
    assert held[0] == held[1] & old


def test_progress_is_told(tmp_path):
    seen = []
    read(tree(tmp_path, {f"a/{i}.png": i for i in range(5)}), progress=lambda *said: seen.append(said))
    assert ("splitting by content", 5, 5) in seen


def test_an_unreadable_picture_is_left_to_the_audit(tmp_path):
    tree(tmp_path, {f"a/{i}.png": i for i in range(5)})
    (tmp_path / "a/gone.png").symlink_to(tmp_path / "nowhere.png")
    found = read(tmp_path)
    assert sum(map(len, found.splits.values())) == 6


@pytest.mark.parametrize("fractions", [(0.5, 0.5, 0.5), (0.0, 1.0, 0.0), (1.2, -0.2, 0.0)])
def test_fractions_that_are_none_are_refused(fractions):
    with pytest.raises(ValueError, match="add to 1"):
        checked(fractions)

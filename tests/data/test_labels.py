"""The contract of labels: by name, never by place."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.labels import LabelMap, ordered
from vitrail.data.pictures import Pictures
from vitrail.data.sources.pixels import Pixels


def split(names, classes=None, name="validation"):
    """A split of one picture for each name; a tuple of names makes it one of several labels."""
    several = any(isinstance(each, tuple) for each in names)
    classes = classes or ordered(one for each in names for one in (each if several else (each,)))
    store = Pixels(np.zeros((len(names), 2, 2), dtype=np.uint8), ((0, "x"),))
    if several:
        targets = np.array([[one in each for one in classes] for each in names], dtype=np.uint8)
    else:
        targets = np.array([classes.index(each) for each in names], dtype=np.int64)
    return Pictures(store, np.arange(len(names)), targets, tuple(classes), name)


def test_the_map_is_made_from_the_training_split_and_applied_by_name():
    labels = LabelMap.of(split(["bird", "cat", "dog"], name="train"))
    applied = labels.apply(split(["dog", "bird", "cat"], classes=["dog", "cat", "bird"]))
    assert applied.pictures.targets.tolist() == [2, 0, 1]
    assert applied.pictures.classes == labels.names == ("bird", "cat", "dog")
    assert (applied.warnings, applied.left_out) == ((), 0)


def test_a_missing_class_is_named():
    labels = LabelMap(("bird", "cat", "dog"))
    with pytest.raises(ValueError, match="the test split has no picture of 'cat', 'dog': "):
        labels.apply(split(["bird"], name="test"))
    applied = labels.apply(split(["bird", "bird"]), allow=True)
    assert applied.warnings == ("the validation split has no picture of 'cat', 'dog'",)
    assert applied.pictures.targets.tolist() == [0, 0]


def test_a_class_that_is_there_in_name_only_is_missing():
    with pytest.raises(ValueError, match="no picture of 'cat'"):
        LabelMap(("bird", "cat")).apply(split(["bird"], classes=["bird", "cat"]))


def test_a_new_class_is_named_with_the_one_that_was_perhaps_meant():
    labels = LabelMap(("bird", "cat"))
    with pytest.raises(ValueError, match=r"classes that training did not: 'Cat' \(like 'cat'\?\), 'zebra'"):
        labels.apply(split(["bird", "cat", "Cat", "zebra"]))


def test_allowed_new_classes_are_left_out_and_counted_and_indices_do_not_shift():
    labels = LabelMap(("bird", "cat"))
    applied = labels.apply(split(["ant", "bird", "cat", "ant", "zebra"]), allow=True)
    assert applied.pictures.targets.tolist() == [0, 1]
    assert applied.pictures.items.tolist() == [1, 2]
    assert applied.left_out == 3
    assert any("'ant', 'zebra'" in warning for warning in applied.warnings)
    assert any("3 pictures" in warning for warning in applied.warnings)


def test_an_empty_training_class_is_an_error_unless_it_is_allowed():
    train = split(["bird"], classes=["bird", "cat"], name="train")
    with pytest.raises(ValueError, match="the train split has no picture of 'cat'"):
        LabelMap.of(train)
    assert LabelMap.of(train, allow=True).names == ("bird", "cat")


def test_several_labels_are_mapped_by_name_too():
    labels = LabelMap.of(split([("cat", "sofa"), ("dog",)], name="train"))
    applied = labels.apply(split([("dog", "sofa"), ("cat",), ()], classes=["sofa", "dog", "cat"]))
    assert applied.pictures.targets.tolist() == [[0, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_of_several_labels_new_ones_are_dropped_and_pictures_with_no_other_left_out():
    labels = LabelMap(("cat", "dog"))
    given = split([("cat", "zebra"), ("zebra",), ("dog",), ()])
    with pytest.raises(ValueError, match="'zebra'"):
        labels.apply(given)
    applied = labels.apply(given, allow=True)
    assert applied.pictures.targets.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert applied.left_out == 1


def test_shards_follow_the_pictures_that_are_kept():
    given = replace(split(["ant", "cat"]), shards=np.array([7, 8]))
    assert LabelMap(("cat",)).apply(given, allow=True).pictures.shards.tolist() == [8]


def test_long_lists_are_cut_and_counted():
    labels = LabelMap(tuple(f"class {number:02}" for number in range(50)))
    with pytest.raises(ValueError, match="'class 08' and 41 more"):
        labels.apply(split(["class 00"]))


def test_names_twice_or_none_are_no_map():
    with pytest.raises(ValueError, match="twice: 'cat'"):
        LabelMap(("cat", "dog", "cat"))
    with pytest.raises(ValueError, match="no classes"):
        LabelMap(())


def test_a_class_is_found_by_its_name():
    labels = LabelMap(("cat", "dog"))
    assert (labels.index("dog"), len(labels)) == (1, 2)
    with pytest.raises(ValueError, match=r"'Dog' \(like 'dog'\?\): not one of the 2 classes"):
        labels.index("Dog")


def test_an_empty_split_is_an_error():
    with pytest.raises(ValueError, match="no pictures"):
        LabelMap.of(split([], classes=["cat"], name="train"))


@given(st.lists(st.integers(-50, 500)))
def test_numbers_are_in_order_of_value(numbers):
    assert [int(name) for name in ordered(map(str, numbers))] == sorted(set(numbers))


NAMES = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


@given(NAMES, st.data())
def test_a_name_always_gets_the_index_that_training_gave_it(names, data):
    labels = LabelMap(ordered(names))
    chosen = data.draw(st.lists(st.sampled_from([*names, "a new one"]), min_size=1, max_size=20))
    classes = data.draw(st.permutations(sorted(set(chosen))))
    applied = labels.apply(split(chosen, classes=classes), allow=True)
    kept = [each for each in chosen if each in names]
    assert [labels.names[target] for target in applied.pictures.targets] == kept
    assert applied.left_out == len(chosen) - len(kept)

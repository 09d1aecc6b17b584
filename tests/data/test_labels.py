"""Label maps match classes by name."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.dataset import Images
from vitrail.data.labels import LabelMap, sort_class_names
from vitrail.data.sources.arrays import ArrayStore


def split(names, classes=None, name="validation"):
    """Return a split with one image per name; tuples of names make it multi-label."""
    several = any(isinstance(each, tuple) for each in names)
    classes = classes or sort_class_names(one for each in names for one in (each if several else (each,)))
    store = ArrayStore(np.zeros((len(names), 2, 2), dtype=np.uint8), ((0, "x"),))
    if several:
        targets = np.array([[one in each for one in classes] for each in names], dtype=np.uint8)
    else:
        targets = np.array([classes.index(each) for each in names], dtype=np.int64)
    return Images(store, np.arange(len(names)), targets, tuple(classes), name)


def test_labels_are_mapped_by_name():
    labels = LabelMap.from_images(split(["bird", "cat", "dog"], name="train"))
    applied = labels.apply(split(["dog", "bird", "cat"], classes=["dog", "cat", "bird"]))
    assert applied.images.targets.tolist() == [2, 0, 1]
    assert applied.images.classes == labels.names == ("bird", "cat", "dog")
    assert (applied.warnings, applied.n_dropped) == ((), 0)


def test_a_missing_class_is_named():
    labels = LabelMap(("bird", "cat", "dog"))
    with pytest.raises(ValueError, match="the test split has no images of 'cat', 'dog': "):
        labels.apply(split(["bird"], name="test"))
    applied = labels.apply(split(["bird", "bird"]), allow_mismatch=True)
    assert applied.warnings == ("the validation split has no images of 'cat', 'dog'",)
    assert applied.images.targets.tolist() == [0, 0]


def test_a_class_without_images_is_missing():
    with pytest.raises(ValueError, match="no images of 'cat'"):
        LabelMap(("bird", "cat")).apply(split(["bird"], classes=["bird", "cat"]))


def test_a_new_class_is_named_with_the_closest_one():
    labels = LabelMap(("bird", "cat"))
    with pytest.raises(ValueError, match=r"classes not in training: 'Cat' \(like 'cat'\?\), 'zebra'"):
        labels.apply(split(["bird", "cat", "Cat", "zebra"]))


def test_allowed_new_classes_are_dropped_and_counted():
    labels = LabelMap(("bird", "cat"))
    applied = labels.apply(split(["ant", "bird", "cat", "ant", "zebra"]), allow_mismatch=True)
    assert applied.images.targets.tolist() == [0, 1]
    assert applied.images.items.tolist() == [1, 2]
    assert applied.n_dropped == 3
    assert any("'ant', 'zebra'" in warning for warning in applied.warnings)
    assert any("3 images" in warning for warning in applied.warnings)


def test_an_empty_training_class_is_an_error_unless_allowed():
    train = split(["bird"], classes=["bird", "cat"], name="train")
    with pytest.raises(ValueError, match="the train split has no images of 'cat'"):
        LabelMap.from_images(train)
    assert LabelMap.from_images(train, allow_mismatch=True).names == ("bird", "cat")


def test_multi_label_targets_are_mapped_by_name():
    labels = LabelMap.from_images(split([("cat", "sofa"), ("dog",)], name="train"))
    applied = labels.apply(split([("dog", "sofa"), ("cat",), ()], classes=["sofa", "dog", "cat"]))
    assert applied.images.targets.tolist() == [[0, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_new_labels_of_multi_label_data_are_dropped():
    labels = LabelMap(("cat", "dog"))
    given = split([("cat", "zebra"), ("zebra",), ("dog",), ()])
    with pytest.raises(ValueError, match="'zebra'"):
        labels.apply(given)
    applied = labels.apply(given, allow_mismatch=True)
    assert applied.images.targets.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert applied.n_dropped == 1


def test_shards_are_selected_with_the_images():
    given = replace(split(["ant", "cat"]), shards=np.array([7, 8]))
    assert LabelMap(("cat",)).apply(given, allow_mismatch=True).images.shards.tolist() == [8]


def test_long_lists_are_shortened():
    labels = LabelMap(tuple(f"class {number:02}" for number in range(50)))
    with pytest.raises(ValueError, match="'class 08' and 41 more"):
        labels.apply(split(["class 00"]))


def test_duplicate_or_no_names_raise():
    with pytest.raises(ValueError, match="duplicate class names: 'cat'"):
        LabelMap(("cat", "dog", "cat"))
    with pytest.raises(ValueError, match="at least one class"):
        LabelMap(())


def test_an_empty_split_is_an_error():
    with pytest.raises(ValueError, match="no images"):
        LabelMap.from_images(split([], classes=["cat"], name="train"))


@given(st.lists(st.integers(-50, 500)))
def test_numeric_names_are_sorted_by_value(numbers):
    assert [int(name) for name in sort_class_names(map(str, numbers))] == sorted(set(numbers))


NAMES = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


@given(NAMES, st.data())
def test_indices_never_shift(names, data):
    labels = LabelMap(sort_class_names(names))
    chosen = data.draw(st.lists(st.sampled_from([*names, "a new one"]), min_size=1, max_size=20))
    classes = data.draw(st.permutations(sorted(set(chosen))))
    applied = labels.apply(split(chosen, classes=classes), allow_mismatch=True)
    kept = [each for each in chosen if each in names]
    assert [labels.names[target] for target in applied.images.targets] == kept
    assert applied.n_dropped == len(chosen) - len(kept)

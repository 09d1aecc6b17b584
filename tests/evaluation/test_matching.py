"""Matching of data classes to model outputs."""

import numpy as np
import pytest

from vitrail.data.dataset import Images
from vitrail.data.sources.arrays import ArrayStore
from vitrail.evaluation.class_mapping import ClassMap, match_classes


def images(classes, targets=None):
    targets = np.arange(len(classes)) if targets is None else np.array(targets)
    store = ArrayStore(np.zeros((len(targets), 2, 2), np.uint8), ((0, "made"),))
    return Images(store, np.arange(len(targets)), targets, tuple(classes))


def test_classes_match_by_name_not_order():
    data = images(("hat", "shoe"), [0, 1, 1])
    found = match_classes(data, ("shoe", "sock", "hat"), 3)
    assert found.map_targets(data).tolist() == [2, 0, 0]
    assert found.present.tolist() == [0, 2]
    assert found.method == "by name"


def test_names_are_normalised():
    assert match_classes(images(("cafe\u0301 ",)), ("caf\u00e9", "bar"), 2).indices.tolist() == [0]


def test_unknown_classes_are_listed_with_suggestions():
    with pytest.raises(ValueError, match="unknown to the model") as caught:
        match_classes(
            images(("Hats", "golden_retriever", "xylophone", "shoe")), ("hat", "golden retriever, dog", "shoe"), 3
        )
    assert str(caught.value) == (
        "3 of 4 classes are unknown to the model: 'Hats' (like 'hat'?), "
        "'golden_retriever' (like 'golden retriever, dog'?), 'xylophone'; rename them, or use class_map=FILE"
    )


def test_class_without_images_needs_no_match():
    data = images(("hat", "unknown"), [0, 0])
    assert match_classes(data, ("hat", "shoe"), 2).indices.tolist() == [0, -1]


def test_numbers_are_indices_for_models_without_names():
    data = images(("2", "0007"))
    found = match_classes(data, None, 10)
    assert found.map_targets(data).tolist() == [2, 7]
    assert found.labels[7] == "7"
    assert match_classes(data, tuple(f"LABEL_{k}" for k in range(10)), 10).indices.tolist() == [2, 7]


def test_words_need_a_map_for_models_without_names():
    with pytest.raises(ValueError, match="the model has no class names, and 'hat' is not an index: give class_map="):
        match_classes(images(("hat", "3")), None, 10)


def test_index_out_of_range_is_an_error():
    with pytest.raises(ValueError, match="class 10 is out of range: the model's classes are 0 to 9"):
        match_classes(images(("3", "10")), None, 10)


def test_numbers_for_a_model_with_names_need_map_index():
    data = images(("0", "1"))
    with pytest.raises(ValueError, match="class_map='index' if these are the model's indices"):
        match_classes(data, ("hat", "shoe"), 2)
    assert match_classes(data, ("hat", "shoe"), 2, "index").indices.tolist() == [0, 1]
    with pytest.raises(ValueError, match="class_map='index': 'hat' is not an index"):
        match_classes(images(("hat",)), ("hat", "shoe"), 2, "index")


def test_map_is_used_before_names():
    report = ClassMap("map.json", {"Hut": (0,), "cap": (0,)}, {})
    data = images(("Hut", "cap", "shoe"))
    found = match_classes(data, ("hat", "shoe"), 2, report)
    assert found.map_targets(data).tolist() == [0, 0, 1]
    assert found.method == "through map.json"


def test_classes_missing_in_a_map_are_listed_with_suggestions():
    report = ClassMap("index.json", {"n01440764": (0,), "tench": (0,)}, {0: "tench"})
    with pytest.raises(ValueError, match=r"unknown to the model and index.json: 'n01440765' \(like 'n01440764'\?\)"):
        match_classes(images(("n01440765",)), None, 2, report)


def test_ambiguous_name_is_an_error_if_used():
    names = ("crane", "hat", "crane")
    assert match_classes(images(("hat",)), names, 3).indices.tolist() == [1]
    with pytest.raises(ValueError, match="'crane' names two of the model's classes, 0 and 2"):
        match_classes(images(("crane",)), names, 3)


def test_padded_numbers_match_an_index_file():
    report = ClassMap("index.json", {"tench": (0,), "0": (0,)}, {0: "tench"})
    found = match_classes(images(("0000",)), None, 2, report)
    assert found.indices.tolist() == [0]
    assert found.labels == ("tench", "1")


def test_labels_mapped_to_one_output_are_joined():
    data = images(("Hut", "cap", "shoe"), np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]], np.uint8))
    report = ClassMap("map.json", {"Hut": (1,), "cap": (1,)}, {})
    assert match_classes(data, ("shoe", "hat"), 2, report).map_targets(data).tolist() == [[0, 1], [1, 1], [0, 0]]

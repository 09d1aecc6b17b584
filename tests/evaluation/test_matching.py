"""Classes of the data as classes of the model."""

import numpy as np
import pytest

from vitrail.data.pictures import Pictures
from vitrail.data.sources.pixels import Pixels
from vitrail.evaluation.matching import match
from vitrail.evaluation.translation import Translation


def pictures(classes, targets=None):
    targets = np.arange(len(classes)) if targets is None else np.array(targets)
    store = Pixels(np.zeros((len(targets), 2, 2), np.uint8), ((0, "made"),))
    return Pictures(store, np.arange(len(targets)), targets, tuple(classes))


def test_names_decide_and_not_their_order():
    data = pictures(("hat", "shoe"), [0, 1, 1])
    found = match(data, ("shoe", "sock", "hat"), 3)
    assert found.targets(data).tolist() == [2, 0, 0]
    assert found.present.tolist() == [0, 2]
    assert found.how == "by name"


def test_accents_and_spaces_around_do_not_matter():
    assert match(pictures(("cafe\u0301 ",)), ("caf\u00e9", "bar"), 2).places.tolist() == [0]


def test_what_the_model_does_not_know_is_named_with_the_closest():
    with pytest.raises(ValueError, match="does not know") as caught:
        match(pictures(("Hats", "golden_retriever", "xylophone", "shoe")), ("hat", "golden retriever, dog", "shoe"), 3)
    assert str(caught.value) == (
        "the data has 3 of 4 classes that the model does not know: 'Hats' (like 'hat'?), "
        "'golden_retriever' (like 'golden retriever, dog'?), 'xylophone'; rename them, or translate with --map FILE"
    )


def test_a_class_without_a_picture_needs_no_place():
    data = pictures(("hat", "unknown"), [0, 0])
    assert match(data, ("hat", "shoe"), 2).places.tolist() == [0, -1]


def test_without_names_numbers_are_indices():
    data = pictures(("2", "0007"))
    found = match(data, None, 10)
    assert found.targets(data).tolist() == [2, 7]
    assert found.labels[7] == "7"
    assert match(data, tuple(f"LABEL_{k}" for k in range(10)), 10).places.tolist() == [2, 7]


def test_without_names_words_need_a_map():
    with pytest.raises(
        ValueError, match="the model has no class names, and 'hat' cannot be an index of its outputs: --map"
    ):
        match(pictures(("hat", "3")), None, 10)


def test_an_index_beyond_the_outputs_is_refused():
    with pytest.raises(ValueError, match="the class 10 is not one of the model's 10, which are 0 to 9"):
        match(pictures(("3", "10")), None, 10)


def test_numbers_for_a_model_with_names_are_taken_only_when_told():
    data = pictures(("0", "1"))
    with pytest.raises(ValueError, match="--map index, if these are the model's indices"):
        match(data, ("hat", "shoe"), 2)
    assert match(data, ("hat", "shoe"), 2, "index").places.tolist() == [0, 1]
    with pytest.raises(ValueError, match="--map index: 'hat' cannot be an index"):
        match(pictures(("hat",)), ("hat", "shoe"), 2, "index")


def test_a_map_translates_and_the_rest_is_matched_by_name():
    told = Translation("map.json", {"Hut": (0,), "cap": (0,)}, {})
    data = pictures(("Hut", "cap", "shoe"))
    found = match(data, ("hat", "shoe"), 2, told)
    assert found.targets(data).tolist() == [0, 0, 1]
    assert found.how == "through map.json"


def test_what_a_map_leaves_out_is_named_with_the_closest():
    told = Translation("index.json", {"n01440764": (0,), "tench": (0,)}, {0: "tench"})
    with pytest.raises(ValueError, match=r"the model and index.json do not know: 'n01440765' \(like 'n01440764'\?\)"):
        match(pictures(("n01440765",)), None, 2, told)


def test_a_name_of_two_classes_is_refused_where_it_is_used():
    names = ("crane", "hat", "crane")
    assert match(pictures(("hat",)), names, 3).places.tolist() == [1]
    with pytest.raises(ValueError, match="'crane' is the name of two of the model's classes, 0 and 2"):
        match(pictures(("crane",)), names, 3)


def test_padded_numbers_are_found_in_an_index_file():
    told = Translation("index.json", {"tench": (0,), "0": (0,)}, {0: "tench"})
    found = match(pictures(("0000",)), None, 2, told)
    assert found.places.tolist() == [0]
    assert found.labels == ("tench", "1")


def test_several_labels_that_become_one_are_joined():
    data = pictures(("Hut", "cap", "shoe"), np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]], np.uint8))
    told = Translation("map.json", {"Hut": (1,), "cap": (1,)}, {})
    assert match(data, ("shoe", "hat"), 2, told).targets(data).tolist() == [[0, 1], [1, 1], [0, 0]]

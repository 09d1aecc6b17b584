"""Files that say which class of the data is which of the model."""

import json
import re

import pytest

from vitrail.evaluation.translation import read_translation

NAMES = ("tench", "cock", "jay", "crane", "kite")


def read(tmp_path, name, text, names=NAMES, outputs=5):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return read_translation(path, names, outputs)


def test_an_object_gives_names_or_indices(tmp_path):
    found = read(tmp_path, "map.json", {"Schleie": "tench", "Hahn": 1, "Häher": "2"})
    assert found.places == {"Schleie": (0,), "Hahn": (1,), "Häher": (2,)}


def test_a_name_of_the_model_comes_before_a_number(tmp_path):
    assert read(tmp_path, "map.json", {"eins": "1"}, names=("1", "0"), outputs=2).places == {"eins": (0,)}


def test_imagenets_index_file_gives_folders_words_and_numbers(tmp_path):
    index = {"0": ["n01440764", "tench"], "1": ["n01484850", "great_white_shark"]}
    found = read(tmp_path, "imagenet_class_index.json", index, names=None, outputs=2)
    for name in ("n01484850", "great_white_shark", "great white shark", "1"):
        assert found.places[name] == (1,), name
    assert found.labels == {0: "tench", 1: "great white shark"}


def test_synset_lines_are_in_the_order_of_the_outputs(tmp_path):
    text = "n01440764 tench, Tinca tinca\nn01443537 goldfish, Carassius auratus\n"
    found = read(tmp_path, "LOC_synset_mapping.txt", text, names=None, outputs=2)
    for name in ("n01443537", "goldfish", "Carassius auratus", "goldfish, Carassius auratus", "1"):
        assert found.places[name] == (1,), name
    assert found.labels == {0: "tench", 1: "goldfish"}


def test_a_plain_list_names_the_outputs_in_order(tmp_path):
    found = read(tmp_path, "names.txt", "\ufefftench\n great white shark \n", names=None, outputs=2)
    assert found.places == {"tench": (0,), "great white shark": (1,), "0": (0,), "1": (1,)}


def test_names_by_index_as_transformers_and_python_write_them(tmp_path):
    assert read(tmp_path, "id2label.json", {"0": "tench", "1": "cock"}, names=None).places["cock"] == (1,)
    text = "{0: 'tench, Tinca tinca',\n 1: \"lion's mane\"}"
    found = read(tmp_path, "imagenet1000_clsidx_to_labels.txt", text, names=None)
    assert found.places["lion's mane"] == (1,)
    assert found.places["tench"] == found.places["tench, Tinca tinca"] == (0,)
    assert found.labels[0] == "tench, Tinca tinca"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.csv", "data,model\nSchleie,tench\nHahn,1\n"),
        ("map.csv", "Schleie;tench\nHahn;1\n"),
        ("map.tsv", "Schleie\ttench\nHahn\tcock\n"),
        ("map.txt", "Schleie\ttench\nHahn\t1\n"),
    ],
)
def test_tables_of_two_columns(tmp_path, name, text):
    assert read(tmp_path, name, text).places == {"Schleie": (0,), "Hahn": (1,)}


def test_a_word_for_two_classes_keeps_both(tmp_path):
    found = read(tmp_path, "index.json", {"0": ["n02012849", "crane"], "4": ["n03126707", "crane"]}, names=None)
    assert found.places["crane"] == (0, 4)
    assert found.places["n03126707"] == (4,)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("map.json", '{"a": 1, "a": 2}', "names 'a' twice"),
        ("map.csv", "a,1\na,1\n", "names 'a' twice"),
        ("map.json", {"a": 5}, "'a' is given the index 5, and the model has 5 from 0"),
        ("map.json", {"a": -1}, "index -1"),
        ("map.json", {"a": "tensh"}, "'tensh' (like 'tench'?) is no class of the model"),
        ("map.json", {"a": None}, "'a' is given null"),
        ("map.json", {"a": True}, "'a' is given true"),
        ("map.json", '{"a": ', "is no JSON"),
        ("index.json", {"0": ["n0", "a"], "x": ["n1", "b"]}, "'x' is no index"),
        ("index.json", {"7": ["n0", "a"]}, "names the index 7, and the model has 5 classes"),
        ("names.txt", "a\nb\n", "names 2 classes, and the model has 5"),
        ("map.csv", "a,b,c\n", "line 1: 3 cells"),
        ("map.csv", ",\n", "has no row with anything in it"),
        ("map.txt", "{'a': b'tench'}", "'a' is given \"b'tench'\""),
        ("map.txt", "{'a': {b'x': {1, 2}}}", "'a' is given {}"),
        ("map.txt", " \n", "is empty"),
    ],
)
def test_what_cannot_be_meant_is_one_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(tmp_path, name, text)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_a_name_that_the_model_has_twice_needs_an_index(tmp_path):
    with pytest.raises(ValueError, match="'crane' is the name of the model's classes 0 and 1: give the index"):
        read(tmp_path, "map.json", {"a": "crane"}, names=("crane", "crane"), outputs=2)


def test_no_file_and_a_directory_are_told_in_words(tmp_path):
    with pytest.raises(OSError, match=r"^--map .*gone\.json: there is no such file$"):
        read_translation(tmp_path / "gone.json", NAMES, 5)
    with pytest.raises(OSError, match=r"^--map .* is a directory: give a file"):
        read_translation(tmp_path, NAMES, 5)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "map.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        read_translation(path, NAMES, 5)

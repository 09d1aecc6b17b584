"""Mapping files of classes (`--map`)."""

import json
import re

import pytest

from vitrail.evaluation.class_mapping import read_class_map

NAMES = ("tench", "cock", "jay", "crane", "kite")


def read(tmp_path, name, text, names=NAMES, outputs=5):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return read_class_map(path, names, outputs)


def test_json_object_maps_names_or_indices(tmp_path):
    found = read(tmp_path, "map.json", {"Schleie": "tench", "Hahn": 1, "Häher": "2"})
    assert found.indices == {"Schleie": (0,), "Hahn": (1,), "Häher": (2,)}


def test_names_take_precedence_over_indices(tmp_path):
    assert read(tmp_path, "map.json", {"eins": "1"}, names=("1", "0"), outputs=2).indices == {"eins": (0,)}


def test_imagenet_index_file_maps_folders_words_and_numbers(tmp_path):
    index = {"0": ["n01440764", "tench"], "1": ["n01484850", "great_white_shark"]}
    found = read(tmp_path, "imagenet_class_index.json", index, names=None, outputs=2)
    for name in ("n01484850", "great_white_shark", "great white shark", "1"):
        assert found.indices[name] == (1,), name
    assert found.labels == {0: "tench", 1: "great white shark"}


def test_synset_lines_are_in_output_order(tmp_path):
    text = "n01440764 tench, Tinca tinca\nn01443537 goldfish, Carassius auratus\n"
    found = read(tmp_path, "LOC_synset_mapping.txt", text, names=None, outputs=2)
    for name in ("n01443537", "goldfish", "Carassius auratus", "goldfish, Carassius auratus", "1"):
        assert found.indices[name] == (1,), name
    assert found.labels == {0: "tench", 1: "goldfish"}


def test_plain_list_names_outputs_in_order(tmp_path):
    found = read(tmp_path, "names.txt", "\ufefftench\n great white shark \n", names=None, outputs=2)
    assert found.indices == {"tench": (0,), "great white shark": (1,), "0": (0,), "1": (1,)}


def test_names_by_index_of_transformers_and_python(tmp_path):
    assert read(tmp_path, "id2label.json", {"0": "tench", "1": "cock"}, names=None).indices["cock"] == (1,)
    text = "{0: 'tench, Tinca tinca',\n 1: \"lion's mane\"}"
    found = read(tmp_path, "imagenet1000_clsidx_to_labels.txt", text, names=None)
    assert found.indices["lion's mane"] == (1,)
    assert found.indices["tench"] == found.indices["tench, Tinca tinca"] == (0,)
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
def test_two_column_tables(tmp_path, name, text):
    assert read(tmp_path, name, text).indices == {"Schleie": (0,), "Hahn": (1,)}


def test_ambiguous_word_keeps_both_indices(tmp_path):
    found = read(tmp_path, "index.json", {"0": ["n02012849", "crane"], "4": ["n03126707", "crane"]}, names=None)
    assert found.indices["crane"] == (0, 4)
    assert found.indices["n03126707"] == (4,)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("map.json", '{"a": 1, "a": 2}', "lists 'a' twice"),
        ("map.csv", "a,1\na,1\n", "lists 'a' twice"),
        ("map.json", {"a": 5}, "index 5 of 'a' is out of range: classes are 0 to 4"),
        ("map.json", {"a": -1}, "index -1"),
        ("map.json", {"a": "tensh"}, "the model has no class 'tensh' (like 'tench'?)"),
        ("map.json", {"a": None}, "'a' must map to a class name or index, got null"),
        ("map.json", {"a": True}, "'a' must map to a class name or index, got true"),
        ("map.json", '{"a": ', "is not valid JSON"),
        ("index.json", {"0": ["n0", "a"], "x": ["n1", "b"]}, "'x' is not an index"),
        ("index.json", {"7": ["n0", "a"]}, "index 7 is out of range: classes are 0 to 4"),
        ("names.txt", "a\nb\n", "lists 2 classes, but the model has 5"),
        ("map.csv", "a,b,c\n", "line 1: expected two cells, data and model, got 3"),
        ("map.csv", ",\n", "has no rows"),
        ("map.txt", "{'a': b'tench'}", "'a' must map to a class name or index, got \"b'tench'\""),
        ("map.txt", "{'a': {b'x': {1, 2}}}", "'a' must map to a class name or index, got {}"),
        ("map.txt", " \n", "is empty"),
    ],
)
def test_invalid_files_give_one_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(tmp_path, name, text)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_ambiguous_model_name_needs_an_index(tmp_path):
    with pytest.raises(ValueError, match="'crane' names the model's classes 0 and 1: give the index"):
        read(tmp_path, "map.json", {"a": "crane"}, names=("crane", "crane"), outputs=2)


def test_missing_file_and_directory_are_errors(tmp_path):
    with pytest.raises(OSError, match=r"^class_map='.*gone\.json': no such file$"):
        read_class_map(tmp_path / "gone.json", NAMES, 5)
    with pytest.raises(OSError, match=r"^class_map=.* is a directory: give JSON"):
        read_class_map(tmp_path, NAMES, 5)


def test_binary_file_is_an_error(tmp_path):
    path = tmp_path / "map.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_class_map(path, NAMES, 5)

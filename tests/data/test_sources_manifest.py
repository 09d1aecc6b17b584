"""Manifests: lists of paths and labels."""

import csv
import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.making import table, tree
from vitrail.data.sources import load_dataset
from vitrail.data.sources.manifest import split_labels

PICTURES = {f"images/{number}.png": number for number in range(4)}
SPLIT = "path,label,split\nimages/0.png,cat,train\nimages/1.png,dog,train\nimages/2.png,dog,val\n"


def listed(root, text, name="list.csv"):
    tree(root, PICTURES | {name: text if isinstance(text, bytes) else text.encode()})
    return root / name


def test_paths_are_relative_to_the_manifest_and_splits_are_its_own(tmp_path):
    dataset = load_dataset(listed(tmp_path, SPLIT))
    assert (dataset.kind, set(dataset.splits)) == ("manifest", {"train", "validation"})
    assert table(dataset["train"]) == {"cat": [f"{tmp_path}/images/0.png"], "dog": [f"{tmp_path}/images/1.png"]}
    assert dataset["validation"].classes == ("dog",)
    assert dataset["validation"].open(0).size == (8, 6)


@pytest.mark.parametrize("between", [",", ";", "\t"])
@pytest.mark.parametrize(
    "head", ["path,label", "Image,Class", "file_name,TARGET", "filepath,category", "filename,labels"]
)
def test_columns_and_delimiters_are_detected(tmp_path, between, head):
    text = f"{head}\nimages/0.png,a\nimages/1.png,b\n".replace(",", between)
    dataset = load_dataset(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))
    assert dataset["train"].classes == ("a", "b")


def test_byte_order_mark_quotes_and_other_columns(tmp_path):
    text = b'\xef\xbb\xbf"id","path","label"\r\n1,"images/0.png","a, ""b"""\r\n2,images/1.png,c\r\n\r\n'
    dataset = load_dataset(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))
    assert dataset["train"].classes == ('a, "b"', "c")


def test_utf_16_is_read(tmp_path):
    dataset = load_dataset(listed(tmp_path, SPLIT.encode("utf-16")))
    assert len(dataset["train"]) == 2


def test_several_labels_are_separated_by_a_bar(tmp_path):
    text = "path,label\nimages/0.png,cat|sofa\nimages/1.png,dog\nimages/2.png,\nimages/3.png, sofa | dog \n"
    images = load_dataset(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))["train"]
    assert images.classes == ("cat", "dog", "sofa")
    assert images.targets.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert images.count_classes().tolist() == [1, 2, 2]


def test_single_label_mode_keeps_bars_in_names(tmp_path):
    text = "path,label\nimages/0.png,cat|sofa\nimages/1.png,dog\n"
    images = load_dataset(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0), multi_label=False)["train"]
    assert images.classes == ("cat|sofa", "dog")


def test_missing_files_raise_when_opened(tmp_path):
    text = "path,label\nimages/0.png,a\ngone.png,b\n"
    images = load_dataset(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))["train"]
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        images.open(1)


def test_windows_paths_are_read(tmp_path):
    images = load_dataset(listed(tmp_path, "path,label\nimages\\0.png,a\n"), fractions=(1.0, 0.0, 0.0))["train"]
    assert images.open(0).size == (8, 6)


def test_a_folder_with_a_manifest_is_read_as_a_manifest(tmp_path):
    listed(tmp_path, SPLIT, "metadata.csv")
    assert load_dataset(tmp_path).kind == "manifest"


def test_another_csv_does_not_hide_class_folders(tmp_path):
    tree(tmp_path, {"labels.csv": b"number,price\n1,2\n", "train/a/1.png": 1, "val/a/2.png": 2})
    assert load_dataset(tmp_path).kind == "folder"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("images/0.png,cat\nimages/1.png,dog\n", "the first line must name the columns, such as path,label"),
        ("", "the first line must name the columns"),
        ("path,label\n", "lists no images"),
        ("path,colour\nx.png,red\n", "the first line must name the columns"),
        ("path,label\nimages/0.png,cat,3\n", "line 2: 3 cells, the header has 2"),
        ("path,label\nimages/0.png\n", "line 2: 1 cells"),
        ("path,label\n,cat\n", "line 2: no path"),
        ("path,label\nimages/0.png,cat\nimages/1.png,\n", "image 2 has no label"),
        ("path,label,split\nimages/0.png,cat,train\nimages/1.png,cat,later\n", "line 3: unknown split 'later'"),
        ("path,label,split\nimages/0.png,cat,train\nimages/1.png,cat,\n", "line 3: unknown split ''"),
        ("path,label\ncat,images/0.png\n", "column path has no image paths"),
        ("path,label\nhttps://example.org/0.png,a\n", "is a URL"),
        (b"path,label\nimages/\xff\xfe.png,a\n", "is not UTF-8"),
        (b"path,label\nimages/0.png,\0\n", "the first line must name|not readable as CSV"),
    ],
)
def test_invalid_manifests_raise_one_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        load_dataset(listed(tmp_path, text))
    assert "\n" not in str(error.value)


LABEL = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="|"), min_size=1).filter(str.strip)


@given(st.lists(LABEL, min_size=1, max_size=8))
def test_labels_round_trip_through_csv(tmp_path_factory, labels):
    root = tmp_path_factory.mktemp("m")
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["path", "label"])
    writer.writerows([f"{row}.png", label] for row, label in enumerate(labels))
    (root / "m.csv").write_text(out.getvalue(), encoding="utf-8", newline="")
    images = load_dataset(root / "m.csv", fractions=(1.0, 0.0, 0.0), multi_label=False)["train"]
    same = {label: images.classes[target] for label, target in zip(labels, images.targets, strict=True)}
    assert all(unicodedata.normalize("NFC", label.strip()) == name for label, name in same.items())


def test_multi_label_mode_makes_tuples():
    assert split_labels("m", ["a", "b|c", ""], True) == [("a",), ("b", "c"), ()]

"""Manifests: lists of paths and labels."""

import csv
import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.making import table, tree
from vitrail.data.sources import read
from vitrail.data.sources.manifest import separated

PICTURES = {f"pictures/{number}.png": number for number in range(4)}
SPLIT = "path,label,split\npictures/0.png,cat,train\npictures/1.png,dog,train\npictures/2.png,dog,val\n"


def listed(root, text, name="list.csv"):
    tree(root, PICTURES | {name: text if isinstance(text, bytes) else text.encode()})
    return root / name


def test_paths_are_relative_to_the_manifest_and_splits_are_its_own(tmp_path):
    found = read(listed(tmp_path, SPLIT))
    assert (found.kind, set(found.splits)) == ("manifest", {"train", "validation"})
    assert table(found["train"]) == {"cat": [f"{tmp_path}/pictures/0.png"], "dog": [f"{tmp_path}/pictures/1.png"]}
    assert found["validation"].classes == ("dog",)
    assert found["validation"].open(0).size == (8, 6)


@pytest.mark.parametrize("between", [",", ";", "\t"])
@pytest.mark.parametrize(
    "head", ["path,label", "Image,Class", "file_name,TARGET", "filepath,category", "filename,labels"]
)
def test_columns_and_separators_are_found(tmp_path, between, head):
    text = f"{head}\npictures/0.png,a\npictures/1.png,b\n".replace(",", between)
    found = read(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))
    assert found["train"].classes == ("a", "b")


def test_a_byte_order_mark_quotes_and_other_columns_do_no_harm(tmp_path):
    text = b'\xef\xbb\xbf"id","path","label"\r\n1,"pictures/0.png","a, ""b"""\r\n2,pictures/1.png,c\r\n\r\n'
    found = read(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))
    assert found["train"].classes == ('a, "b"', "c")


def test_sixteen_bit_text_is_read(tmp_path):
    found = read(listed(tmp_path, SPLIT.encode("utf-16")))
    assert len(found["train"]) == 2


def test_several_labels_are_separated_by_a_line(tmp_path):
    text = "path,label\npictures/0.png,cat|sofa\npictures/1.png,dog\npictures/2.png,\npictures/3.png, sofa | dog \n"
    pictures = read(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))["train"]
    assert pictures.classes == ("cat", "dog", "sofa")
    assert pictures.targets.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert pictures.counts().tolist() == [1, 2, 2]


def test_a_line_in_a_name_separates_nothing_when_one_label_is_asked_for(tmp_path):
    text = "path,label\npictures/0.png,cat|sofa\npictures/1.png,dog\n"
    pictures = read(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0), several=False)["train"]
    assert pictures.classes == ("cat|sofa", "dog")


def test_missing_files_are_left_to_the_audit(tmp_path):
    text = "path,label\npictures/0.png,a\ngone.png,b\n"
    pictures = read(listed(tmp_path, text), fractions=(1.0, 0.0, 0.0))["train"]
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        pictures.open(1)


def test_backslashes_of_another_system_are_understood(tmp_path):
    pictures = read(listed(tmp_path, "path,label\npictures\\0.png,a\n"), fractions=(1.0, 0.0, 0.0))["train"]
    assert pictures.open(0).size == (8, 6)


def test_a_folder_with_a_manifest_and_its_pictures_is_read_by_it(tmp_path):
    listed(tmp_path, SPLIT, "metadata.csv")
    assert read(tmp_path).kind == "manifest"


def test_a_csv_of_something_else_does_not_hide_class_folders(tmp_path):
    tree(tmp_path, {"labels.csv": b"number,price\n1,2\n", "train/a/1.png": 1, "val/a/2.png": 2})
    assert read(tmp_path).kind == "folder"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pictures/0.png,cat\npictures/1.png,dog\n", "the first line must name the columns, path and label"),
        ("", "the first line must name the columns"),
        ("path,label\n", "lists no pictures"),
        ("path,colour\nx.png,red\n", "the first line must name the columns"),
        ("path,label\npictures/0.png,cat,3\n", "line 2: 3 cells, and the header names 2"),
        ("path,label\npictures/0.png\n", "line 2: 1 cells"),
        ("path,label\n,cat\n", "line 2: no path"),
        ("path,label\npictures/0.png,cat\npictures/1.png,\n", "picture 2 has no label"),
        ("path,label,split\npictures/0.png,cat,train\npictures/1.png,cat,later\n", "line 3: the split 'later'"),
        ("path,label,split\npictures/0.png,cat,train\npictures/1.png,cat,\n", "line 3: the split ''"),
        ("path,label\ncat,pictures/0.png\n", "the column path holds no paths of pictures"),
        ("path,label\nhttps://example.org/0.png,a\n", "is an address"),
        (b"path,label\npictures/\xff\xfe.png,a\n", "is not UTF-8"),
        (b"path,label\npictures/0.png,\0\n", "the first line must name|not readable as CSV"),
    ],
)
def test_bad_manifests_are_refused_in_a_line(tmp_path, text, says):
    with pytest.raises(ValueError, match=says) as error:
        read(listed(tmp_path, text))
    assert "\n" not in str(error.value)


LABEL = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="|"), min_size=1).filter(str.strip)


@given(st.lists(LABEL, min_size=1, max_size=8))
def test_labels_come_back_from_any_csv(tmp_path_factory, labels):
    root = tmp_path_factory.mktemp("m")
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["path", "label"])
    writer.writerows([f"{row}.png", label] for row, label in enumerate(labels))
    (root / "m.csv").write_text(out.getvalue(), encoding="utf-8", newline="")
    pictures = read(root / "m.csv", fractions=(1.0, 0.0, 0.0), several=False)["train"]
    same = {label: pictures.classes[target] for label, target in zip(labels, pictures.targets, strict=True)}
    assert all(unicodedata.normalize("NFC", label.strip()) == name for label, name in same.items())


def test_several_asked_for_makes_tuples_of_all():
    assert separated("m", ["a", "b|c", ""], True) == [("a",), ("b", "c"), ()]

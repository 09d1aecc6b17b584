"""Class folders, with splits and without."""

import os
import pickle
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.making import encoded, table, tree
from vitrail.data.sources import read
from vitrail.data.sources.folders import HIDDEN, LOOP, NOT_AN_IMAGE

SHARED = Path(__file__).parents[3] / "shared" / "data"


def relative(pictures, root):
    return {name: [os.path.relpath(path, root) for path in paths] for name, paths in table(pictures).items()}


@pytest.mark.parametrize("second", ["val", "validation", "valid", "VAL"])
def test_splits_are_called_by_one_name_however_they_are_spelt(tmp_path, second):
    tree(tmp_path, {"Train/a/1.png": 1, "Train/b/2.png": 2, f"{second}/a/3.png": 3, "test/b/4.png": 4})
    found = read(tmp_path)
    assert (found.kind, list(found.splits)) == ("folder", ["train", "validation", "test"])
    assert relative(found["train"], tmp_path) == {"a": ["Train/a/1.png"], "b": ["Train/b/2.png"]}
    assert relative(found["validation"], tmp_path) == {"a": [f"{second}/a/3.png"]}
    assert found["test"].classes == ("b",)
    assert {pictures.split for pictures in found.splits.values()} == {"train", "validation", "test"}


def test_two_folders_for_one_split_are_refused(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2, "valid/a/3.png": 3})
    with pytest.raises(ValueError, match="both val and valid"):
        read(tmp_path)


def test_order_is_sorted_and_pictures_lie_at_any_depth(tmp_path):
    tree(tmp_path, {"train/b/z.png": 1, "train/b/a.JPG": 2, "train/b/deep/er/c.png": 3, "train/a/x.png": 4})
    tree(tmp_path, {"val/a/1.png": 5})
    pictures = read(tmp_path)["train"]
    names = [os.path.relpath(pictures.name(i), tmp_path / "train") for i in range(len(pictures))]
    assert names == ["a/x.png", "b/a.JPG", "b/z.png", "b/deep/er/c.png"]
    assert pictures.targets.tolist() == [0, 1, 1, 1]


def test_classes_that_are_numbers_are_in_the_order_of_their_values(tmp_path):
    tree(tmp_path, {f"train/{number}/x.png": number for number in range(12)} | {"val/0/y.png": 20})
    pictures = read(tmp_path)["train"]
    assert pictures.classes == tuple(map(str, range(12)))
    opened = [np.asarray(pictures.open(i)).sum() for i in range(12)]
    by_class = [opened[pictures.targets.tolist().index(k)] for k in range(12)]
    assert by_class == [np.asarray(Image.open(tmp_path / f"train/{k}/x.png")).sum() for k in range(12)]


def test_hidden_and_tool_folders_are_no_classes_and_are_told(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/cat/.hidden.png": 2, "train/cat/Thumbs.db": b"x", "val/cat/2.png": 3})
    tree(tmp_path, {"train/.git/3.png": 4, "train/.ipynb_checkpoints/1.png": 5, "train/__MACOSX/._1.png": 6})
    tree(
        tmp_path,
        {"train/@eaDir/1.png": 7, ".DS_Store": b"x", "train/cat/__pycache__/x.png": 8, "train/desktop.ini": b"x"},
    )
    found = read(tmp_path)
    assert found["train"].classes == ("cat",)
    assert len(found["train"]) == 1
    told = {os.path.relpath(path, tmp_path): why for path, why in found.passed_over}
    assert set(told.values()) == {HIDDEN}
    assert set(told) >= {"train/.git", "train/__MACOSX", "train/@eaDir", "train/cat/Thumbs.db", "train/cat/.hidden.png"}
    assert set(told) >= {".DS_Store", "train/cat/__pycache__", "train/desktop.ini", "train/.ipynb_checkpoints"}


def test_files_that_are_no_pictures_are_told_and_heic_with_its_remedy(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/cat/note.txt": b"x", "train/cat/2.HEIC": b"x", "val/cat/2.png": 3})
    told = {os.path.basename(path): why for path, why in read(tmp_path).passed_over}
    assert told["note.txt"] == NOT_AN_IMAGE
    assert "JPEG" in told["2.HEIC"]


def test_what_lies_beside_classes_or_splits_is_told(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/stray.png": 2, "val/cat/2.png": 3, "extra/cat/4.png": 4, "top.png": 5})
    told = {os.path.relpath(path, tmp_path) for path, _ in read(tmp_path).passed_over}
    assert told == {"train/stray.png", "extra", "top.png"}


def test_an_empty_class_is_visible(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/dog/": 0, "val/cat/2.png": 3})
    pictures = read(tmp_path)["train"]
    assert pictures.classes == ("cat", "dog")
    assert pictures.counts().tolist() == [1, 0]


def test_links_are_followed_but_not_in_circles(tmp_path):
    tree(tmp_path, {"data/train/cat/1.png": 1, "data/val/cat/2.png": 2, "elsewhere/3.png": 3, "other/4.png": 4})
    os.symlink(tmp_path / "elsewhere", tmp_path / "data/train/dog")
    os.symlink(tmp_path / "other", tmp_path / "data/train/cat/more")
    os.symlink(tmp_path / "data", tmp_path / "data/train/cat/up")
    os.symlink(tmp_path / "data/train/cat", tmp_path / "data/train/cat/self")
    os.symlink(tmp_path / "nowhere", tmp_path / "data/train/cat/broken")
    found = read(tmp_path / "data")
    assert found["train"].counts().tolist() == [2, 1]
    told = {os.path.basename(path): why for path, why in found.passed_over}
    assert told == {"up": LOOP, "self": LOOP, "broken": NOT_AN_IMAGE}


def test_a_class_called_train_among_others_is_a_class(tmp_path):
    tree(tmp_path, {f"{name}/{i}.png": i + 10 * k for k, name in enumerate(("bus", "car", "train")) for i in range(4)})
    assert read(tmp_path)["train"].classes == ("bus", "car", "train")


def test_a_folder_without_splits_is_divided_by_content(tmp_path):
    tree(tmp_path, {f"{name}/{i}.png": i + 100 * k for k, name in enumerate(("a", "b")) for i in range(50)})
    found = read(tmp_path)
    assert set(found.splits) == {"train", "validation"}
    assert len(found["train"]) + len(found["validation"]) == 100
    assert 5 <= len(found["validation"]) <= 40
    assert "split by content: 80 % train, 20 % validation" in found.notes
    third = read(tmp_path, fractions=(0.5, 0.25, 0.25))
    assert set(third.splits) == {"train", "validation", "test"}


def test_train_and_test_alone_give_up_a_part_to_validate_on(tmp_path):
    tree(tmp_path, {f"train/a/{i}.png": i for i in range(30)} | {f"test/a/{i}.png": 100 + i for i in range(4)})
    found = read(tmp_path)
    assert len(found["train"]) + len(found["validation"]) == 30
    assert len(found["test"]) == 4
    assert "divided by content: 90 % train, 10 % validation" in found.notes[0]


def test_own_splits_are_kept_whatever_fractions_are_asked_for(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2})
    found = read(tmp_path, fractions=(0.5, 0.5, 0.0))
    assert len(found["train"]) == 1
    assert "not used" in found.notes[0]


def test_unicode_and_spaces_survive_and_accents_are_spelt_one_way(tmp_path):
    apart = unicodedata.normalize("NFD", "café crème")
    tree(tmp_path, {f"train/{apart}/ein bild ü.png": 1, "train/日本/図 1.png": 2, "val/café crème/x.png": 3})
    found = read(tmp_path)
    assert found["train"].classes == ("café crème", "日本")
    assert found["validation"].classes == ("café crème",)
    assert found["train"].open(1).size == (8, 6)
    assert found["train"].name(1).endswith("日本/図 1.png")


def test_a_file_whose_name_is_no_text_can_be_opened_and_printed(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2})
    with open(os.fsencode(tmp_path) + b"/train/a/\xff.png", "wb") as file:
        file.write(encoded(3))
    pictures = read(tmp_path)["train"]
    assert pictures.name(1).encode("utf-8").endswith(rb"\xff.png")
    assert pictures.open(1).size == (8, 6)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"1.png": 1, "2.png": 2}, "holds 2 pictures and no class folders: use FOLDER/<class>/pictures"),
        ({"train/1.png": 1, "val/2.png": 2}, "train holds 1 pictures and no class folders"),
        ({"train/a/1.png": 1, "val/2.png": 2}, "val holds 1 pictures and no class folders"),
        ({"a/": 0, "b/": 0}, "no picture in any of them"),
        ({"note.txt": b"x"}, "holds no class folders"),
    ],
)
def test_folders_of_another_layout_say_which_work(tmp_path, files, says):
    with pytest.raises(ValueError, match=says):
        read(tree(tmp_path, files))


def test_a_store_survives_pickling_as_worker_processes_need(tmp_path):
    pictures = read(tree(tmp_path, {"train/a/1.png": 1, "train/b/2.png": 2, "val/a/3.png": 3}))["train"]
    again = pickle.loads(pickle.dumps(pictures))
    assert [again.name(i) for i in range(2)] == [pictures.name(i) for i in range(2)]
    assert np.array_equal(np.asarray(again.open(1)), np.asarray(pictures.open(1)))
    assert again.store.stamp(0) == pictures.store.stamp(0)
    assert again.store.data(0) == encoded(1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared photographs")
def test_the_clothing_photographs_are_all_there():
    found = read(SHARED / "clothing")
    assert found["train"].counts().tolist() == [80] * 10
    assert len(found["validation"]) == 341
    assert found["train"].open(0).mode == "RGB"

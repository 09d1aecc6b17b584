"""Class folders, with splits and without."""

import os
import pickle
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.making import encoded, table, tree
from vitrail.data.sources import load_dataset
from vitrail.data.sources.files import SKIP_HIDDEN, SKIP_LOOP, SKIP_NOT_AN_IMAGE

SHARED = Path(__file__).parents[3] / "shared" / "data"


def relative(images, root):
    return {name: [os.path.relpath(path, root) for path in paths] for name, paths in table(images).items()}


@pytest.mark.parametrize("second", ["val", "validation", "valid", "VAL"])
def test_split_names_are_normalised(tmp_path, second):
    tree(tmp_path, {"Train/a/1.png": 1, "Train/b/2.png": 2, f"{second}/a/3.png": 3, "test/b/4.png": 4})
    dataset = load_dataset(tmp_path)
    assert (dataset.kind, list(dataset.splits)) == ("folder", ["train", "validation", "test"])
    assert relative(dataset["train"], tmp_path) == {"a": ["Train/a/1.png"], "b": ["Train/b/2.png"]}
    assert relative(dataset["validation"], tmp_path) == {"a": [f"{second}/a/3.png"]}
    assert dataset["test"].classes == ("b",)
    assert {images.split for images in dataset.splits.values()} == {"train", "validation", "test"}


def test_two_folders_for_one_split_are_refused(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2, "valid/a/3.png": 3})
    with pytest.raises(ValueError, match="val and valid, both the validation split"):
        load_dataset(tmp_path)


def test_images_are_sorted_and_may_lie_at_any_depth(tmp_path):
    tree(tmp_path, {"train/b/z.png": 1, "train/b/a.JPG": 2, "train/b/deep/er/c.png": 3, "train/a/x.png": 4})
    tree(tmp_path, {"val/a/1.png": 5})
    images = load_dataset(tmp_path)["train"]
    names = [os.path.relpath(images.name(i), tmp_path / "train") for i in range(len(images))]
    assert names == ["a/x.png", "b/a.JPG", "b/z.png", "b/deep/er/c.png"]
    assert images.targets.tolist() == [0, 1, 1, 1]


def test_numeric_classes_are_sorted_by_value(tmp_path):
    tree(tmp_path, {f"train/{number}/x.png": number for number in range(12)} | {"val/0/y.png": 20})
    images = load_dataset(tmp_path)["train"]
    assert images.classes == tuple(map(str, range(12)))
    opened = [np.asarray(images.open(i)).sum() for i in range(12)]
    by_class = [opened[images.targets.tolist().index(k)] for k in range(12)]
    assert by_class == [np.asarray(Image.open(tmp_path / f"train/{k}/x.png")).sum() for k in range(12)]


def test_hidden_and_tool_folders_are_skipped(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/cat/.hidden.png": 2, "train/cat/Thumbs.db": b"x", "val/cat/2.png": 3})
    tree(tmp_path, {"train/.git/3.png": 4, "train/.ipynb_checkpoints/1.png": 5, "train/__MACOSX/._1.png": 6})
    tree(
        tmp_path,
        {"train/@eaDir/1.png": 7, ".DS_Store": b"x", "train/cat/__pycache__/x.png": 8, "train/desktop.ini": b"x"},
    )
    dataset = load_dataset(tmp_path)
    assert dataset["train"].classes == ("cat",)
    assert len(dataset["train"]) == 1
    skipped = {os.path.relpath(path, tmp_path): why for path, why in dataset.skipped}
    assert set(skipped.values()) == {SKIP_HIDDEN}
    assert set(skipped) >= {
        "train/.git",
        "train/__MACOSX",
        "train/@eaDir",
        "train/cat/Thumbs.db",
        "train/cat/.hidden.png",
    }
    assert set(skipped) >= {".DS_Store", "train/cat/__pycache__", "train/desktop.ini", "train/.ipynb_checkpoints"}


def test_other_files_are_skipped_with_a_reason(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/cat/note.txt": b"x", "train/cat/2.HEIC": b"x", "val/cat/2.png": 3})
    skipped = {os.path.basename(path): why for path, why in load_dataset(tmp_path).skipped}
    assert skipped["note.txt"] == SKIP_NOT_AN_IMAGE
    assert "JPEG" in skipped["2.HEIC"]


def test_entries_outside_classes_or_splits_are_skipped(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/stray.png": 2, "val/cat/2.png": 3, "extra/cat/4.png": 4, "top.png": 5})
    skipped = {os.path.relpath(path, tmp_path) for path, _ in load_dataset(tmp_path).skipped}
    assert skipped == {"train/stray.png", "extra", "top.png"}


def test_an_empty_class_is_kept(tmp_path):
    tree(tmp_path, {"train/cat/1.png": 1, "train/dog/": 0, "val/cat/2.png": 3})
    images = load_dataset(tmp_path)["train"]
    assert images.classes == ("cat", "dog")
    assert images.count_classes().tolist() == [1, 0]


def test_links_are_followed_without_loops(tmp_path):
    tree(tmp_path, {"data/train/cat/1.png": 1, "data/val/cat/2.png": 2, "elsewhere/3.png": 3, "other/4.png": 4})
    os.symlink(tmp_path / "elsewhere", tmp_path / "data/train/dog")
    os.symlink(tmp_path / "other", tmp_path / "data/train/cat/more")
    os.symlink(tmp_path / "data", tmp_path / "data/train/cat/up")
    os.symlink(tmp_path / "data/train/cat", tmp_path / "data/train/cat/self")
    os.symlink(tmp_path / "nowhere", tmp_path / "data/train/cat/broken")
    dataset = load_dataset(tmp_path / "data")
    assert dataset["train"].count_classes().tolist() == [2, 1]
    skipped = {os.path.basename(path): why for path, why in dataset.skipped}
    assert skipped == {"up": SKIP_LOOP, "self": SKIP_LOOP, "broken": SKIP_NOT_AN_IMAGE}


def test_a_class_called_train_among_others_is_a_class(tmp_path):
    tree(tmp_path, {f"{name}/{i}.png": i + 10 * k for k, name in enumerate(("bus", "car", "train")) for i in range(4)})
    assert load_dataset(tmp_path)["train"].classes == ("bus", "car", "train")


def test_a_folder_without_splits_is_split_by_content(tmp_path):
    tree(tmp_path, {f"{name}/{i}.png": i + 100 * k for k, name in enumerate(("a", "b")) for i in range(50)})
    dataset = load_dataset(tmp_path)
    assert set(dataset.splits) == {"train", "validation"}
    assert len(dataset["train"]) + len(dataset["validation"]) == 100
    assert 5 <= len(dataset["validation"]) <= 40
    assert "split by content: 80 % train, 20 % validation" in dataset.notes
    third = load_dataset(tmp_path, fractions=(0.5, 0.25, 0.25))
    assert set(third.splits) == {"train", "validation", "test"}


def test_train_and_test_get_a_validation_split(tmp_path):
    tree(tmp_path, {f"train/a/{i}.png": i for i in range(30)} | {f"test/a/{i}.png": 100 + i for i in range(4)})
    dataset = load_dataset(tmp_path)
    assert len(dataset["train"]) + len(dataset["validation"]) == 30
    assert len(dataset["test"]) == 4
    assert "divided by content: 90 % train, 10 % validation" in dataset.notes[0]


def test_fractions_do_not_change_existing_splits(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2})
    dataset = load_dataset(tmp_path, fractions=(0.5, 0.5, 0.0))
    assert len(dataset["train"]) == 1
    assert "ignored" in dataset.notes[0]


def test_unicode_names_are_normalised(tmp_path):
    apart = unicodedata.normalize("NFD", "café crème")
    tree(tmp_path, {f"train/{apart}/ein bild ü.png": 1, "train/日本/図 1.png": 2, "val/café crème/x.png": 3})
    dataset = load_dataset(tmp_path)
    assert dataset["train"].classes == ("café crème", "日本")
    assert dataset["validation"].classes == ("café crème",)
    assert dataset["train"].open(1).size == (8, 6)
    assert dataset["train"].name(1).endswith("日本/図 1.png")


def test_a_file_name_that_is_not_utf8_works(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2})
    with open(os.fsencode(tmp_path) + b"/train/a/\xff.png", "wb") as file:
        file.write(encoded(3))
    images = load_dataset(tmp_path)["train"]
    assert images.name(1).encode("utf-8").endswith(rb"\xff.png")
    assert images.open(1).size == (8, 6)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1.png": 1, "2.png": 2}, "has 2 images and no class folders: use FOLDER/<class>/"),
        ({"train/1.png": 1, "val/2.png": 2}, "train has 1 image and no class folders"),
        ({"train/a/1.png": 1, "val/2.png": 2}, "val has 1 image and no class folders"),
        ({"a/": 0, "b/": 0}, "class folders without images"),
        ({"note.txt": b"x"}, "has no class folders"),
    ],
)
def test_unsupported_layouts_name_the_supported_ones(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(tree(tmp_path, files))


def test_a_store_can_be_pickled(tmp_path):
    images = load_dataset(tree(tmp_path, {"train/a/1.png": 1, "train/b/2.png": 2, "val/a/3.png": 3}))["train"]
    again = pickle.loads(pickle.dumps(images))
    assert [again.name(i) for i in range(2)] == [images.name(i) for i in range(2)]
    assert np.array_equal(np.asarray(again.open(1)), np.asarray(images.open(1)))
    assert again.store.stamp(0) == images.store.stamp(0)
    assert again.store.data(0) == encoded(1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared photographs")
def test_the_clothing_photographs_are_read():
    dataset = load_dataset(SHARED / "clothing")
    assert dataset["train"].count_classes().tolist() == [80] * 10
    assert len(dataset["validation"]) == 341
    assert dataset["train"].open(0).mode == "RGB"

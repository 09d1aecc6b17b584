"""Preparation of images with masks for training: what is left out, ignored and refused."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.making import tree
from tests.data.test_sources_masks import pairs, photo, png, values
from vitrail.data.dataset import IGNORED
from vitrail.training.recipe import Data
from vitrail.training.runs.prepare import prepare_data
from vitrail.training.runs.record import fingerprint_splits
from vitrail.utils.json import dataclass_from_json, to_json


def test_bad_pairs_are_left_out_with_a_reason(tmp_path):
    files = pairs("train/", 5) | pairs("val/", 3, first=10) | {"classes.txt": b"sky\nroad\ncar\n"}
    files |= {"train/images/bad.jpg": photo(50), "train/masks/bad.png": png(values(1, size=(4, 4)))}
    prepared = prepare_data(Data(str(tree(tmp_path, files))), cache=False)
    assert prepared.labels.names == ("sky", "road", "car")
    assert {split: len(images) for split, images in prepared.splits.items()} == {"train": 5, "validation": 3}
    ((path, reason),) = prepared.skipped
    assert (Path(path).name, "4×4 pixels, the image has 30×20" in reason) == ("bad.jpg", True)
    np.testing.assert_array_equal(prepared.train.read_mask(0), values(0))
    assert prepared.audit.mask_counts["train"].images.tolist() == [5, 5, 5]


def test_ignored_values_are_part_of_the_recipe(tmp_path):
    data = Data(str(tree(tmp_path, pairs(count=8, choices=(1, 2, 3)))), ignore=(3,))
    assert dataclass_from_json(to_json(data), Data, "data") == data
    prepared = prepare_data(data, cache=False)
    assert prepared.labels.names == ("1", "2")
    assert set(np.unique(prepared.train.read_mask(0))) == {0, 1, IGNORED}
    with pytest.raises(ValueError, match="ignore must be values >= 0"):
        Data("scans", ignore=())


def test_options_of_labels_are_refused(tmp_path):
    root = str(tree(tmp_path, pairs(count=8)))
    for data in (Data(root, per_class=2), Data(root, classes=(0, 2))):
        with pytest.raises(ValueError, match="needs one label per image"):
            prepare_data(data, cache=False)
    with pytest.raises(ValueError, match="has masks: leave out task="):
        prepare_data(Data(root, task="single"), cache=False)


def test_fingerprints_notice_an_edited_mask_and_not_its_time(tmp_path):
    root = tree(tmp_path, pairs("train/", 5) | pairs("val/", 3, first=10))
    before = fingerprint_splits(prepare_data(Data(str(root)), cache=False))
    masks = sorted((root / "train" / "masks").iterdir())
    os.utime(masks[0], (1, 1))  # as a copy may have it
    assert fingerprint_splits(prepare_data(Data(str(root)), cache=False)) == before
    edited = values(0)
    edited[0, 0] = (edited[0, 0] + 1) % 3
    masks[0].write_bytes(png(edited))
    after = fingerprint_splits(prepare_data(Data(str(root)), cache=False))
    assert after["train"] != before["train"]
    assert after["validation"] == before["validation"]

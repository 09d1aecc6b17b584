"""Tar shards."""

import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.making import encoded, pixels, tree
from vitrail.data.sources import load_dataset
from vitrail.data.sources.detect import expand_braces

WHOLE = (1.0, 0.0, 0.0)


def shard(path, members, kind=tarfile.PAX_FORMAT, mode="w"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=kind) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def samples(numbers, label=lambda number: str(number % 3), key="{:04}"):
    for number in numbers:
        yield f"{key.format(number)}.png", encoded(number)
        yield f"{key.format(number)}.cls", label(number).encode()


def written(root):
    shard(root / "train-000000.tar", samples(range(5)))
    shard(root / "train-000001.tar", samples(range(5, 9)))
    shard(root / "val-000000.tar", samples(range(20, 23)))
    return root


@pytest.mark.parametrize("where", ["{}", "{}/*-00000?.tar", "{}/{{train-000000,train-000001,val-000000}}.tar"])
def test_shards_are_found_in_every_layout(tmp_path, where):
    dataset = load_dataset(where.format(written(tmp_path)))
    assert (dataset.kind, set(dataset.splits)) == ("tar", {"train", "validation"})
    train = dataset["train"]
    assert train.classes == ("0", "1", "2")
    assert train.targets.tolist() == [n % 3 for n in range(9)]
    assert train.shards.tolist() == [0] * 5 + [1] * 4
    for number in range(9):
        assert np.array_equal(np.asarray(train.open(number)), pixels(number))
    assert train.name(6).endswith("train-000001.tar:0006.png")
    assert train.store.data(6) == encoded(6)


def test_brace_ranges_are_expanded(tmp_path):
    written(tmp_path)
    dataset = load_dataset(f"{tmp_path}/train-{{000000..000001}}.tar", fractions=WHOLE)
    assert len(dataset["train"]) == 9
    with pytest.raises(FileNotFoundError, match=r"missing file .*train-000002\.tar"):
        load_dataset(f"{tmp_path}/train-{{000000..000002}}.tar")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        load_dataset(f"{tmp_path}/other-*.tar")


@pytest.mark.parametrize("word", ["a{1}.tar", "a{9..1}.tar", "a{0..9999999}.tar", "a{b..c}.tar"])
def test_invalid_braces_raise(word):
    with pytest.raises(ValueError, match="range"):
        expand_braces(word)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 6))
def test_ranges_keep_leading_zeros(first, more, width):
    words = expand_braces(f"x-{{{first:0{width}d}..{first + more}}}.tar")
    assert words == [f"x-{number:0{width}d}.tar" for number in range(first, first + more + 1)]


def test_split_folders_and_folders_in_keys(tmp_path):
    shard(tmp_path / "train/0.tar", samples(range(4), key="a.b/{:04}"))
    shard(tmp_path / "valid/0.tar", samples(range(4, 6), key="a.b/{:04}"))
    dataset = load_dataset(tmp_path)
    assert {name: len(images) for name, images in dataset.splits.items()} == {"train": 4, "validation": 2}
    assert dataset["train"].name(1).endswith("0.tar:a.b/0001.png")


def test_shards_without_a_split_are_split_by_content(tmp_path):
    shard(tmp_path / "0.tar", samples(range(30)))
    dataset = load_dataset(tmp_path)
    assert len(dataset["train"]) + len(dataset["validation"]) == 30
    assert "split by content" in dataset.notes[0]


def test_mixed_split_names_raise(tmp_path):
    shard(tmp_path / "train-0.tar", samples(range(3)))
    shard(tmp_path / "0.tar", samples(range(3, 6)))
    with pytest.raises(ValueError, match="the split of some images"):
        load_dataset(tmp_path)


def test_numeric_labels_are_sorted_by_value(tmp_path):
    shard(tmp_path / "train.tar", samples(range(12), label=str))
    images = load_dataset(tmp_path, fractions=WHOLE)["train"]
    assert images.classes == tuple(map(str, range(12)))
    assert images.targets.tolist() == list(range(12))


def test_a_class_list_beside_the_shards_is_used(tmp_path):
    written(tmp_path)
    (tmp_path / "classes.txt").write_text("zebra\nant\ncat\n")
    assert load_dataset(tmp_path)["train"].classes == ("zebra", "ant", "cat")
    (tmp_path / "classes.txt").write_text("zebra\nant\n")
    with pytest.raises(ValueError, match="has 2 classes, but there is the label 2"):
        load_dataset(tmp_path)


def test_labels_in_cls_and_json(tmp_path):
    members = [("a.jpg", encoded(1, "JPEG")), ("a.cls", b" cat \n"), ("b.png", encoded(2))]
    shard(tmp_path / "train-0.tar", [*members, ("b.json", json.dumps({"width": 8, "class": "dog"}).encode())])
    assert load_dataset(tmp_path, fractions=WHOLE)["train"].classes == ("cat", "dog")
    shard(tmp_path / "train-0.tar", [("a.png", encoded(1)), ("a.json", b'{"labels": ["x", "y"]}')])
    assert load_dataset(tmp_path, fractions=WHOLE)["train"].targets.tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="several labels"):
        load_dataset(tmp_path, multi_label=False)


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_unicode_names_are_read(tmp_path, kind):
    key = "a folder/" * 30 + "ümlaut 図 {:04}"
    shard(tmp_path / "train 図.tar", samples(range(3), key=key), kind)
    images = load_dataset(tmp_path, fractions=WHOLE)["train"]
    assert images.name(2).endswith("ümlaut 図 0002.png")
    assert np.array_equal(np.asarray(images.open(2)), pixels(2))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", encoded(1))], "sample a has no label"),
        ([("a.png", encoded(1)), ("a.txt", b"a cat on a sofa")], r"has a caption \(\.txt\) and no label"),
        ([("a.png", encoded(1)), ("a.json", b'{"width": 8}')], "sample a has no label"),
        ([("a.png", encoded(1)), ("a.json", b"{")], r"a\.json is not a valid label file"),
        ([("a.png", encoded(1)), ("a.cls", b"\xff\xfe")], r"a\.cls is not a valid label file"),
        ([("a.png", encoded(1)), ("a.cls", b"")], "has the label ''"),
        ([("a.png", encoded(1)), ("a.json", b'{"label": 1.5}')], "has the label 1.5"),
        ([("a.cls", b"1")], "has no images"),
    ],
)
def test_incomplete_samples_are_named(tmp_path, members, message):
    shard(tmp_path / "train-0.tar", members)
    with pytest.raises(ValueError, match=message):
        load_dataset(tmp_path)


def test_a_sample_without_an_image_is_skipped(tmp_path):
    shard(tmp_path / "train-0.tar", [*samples(range(2)), ("z.cls", b"1"), (".hidden.png", b"x")])
    dataset = load_dataset(tmp_path, fractions=WHOLE)
    assert len(dataset["train"]) == 2
    assert dataset.skipped == ((f"{tmp_path}/train-0.tar:z", "a sample without an image"),)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_shards_raise_with_the_command(tmp_path, mode):
    shard(tmp_path / "train-0.tar", samples(range(3)), mode=mode)
    with pytest.raises(ValueError, match=r"train-0\.tar is compressed.*decompress it"):
        load_dataset(tmp_path)


@pytest.mark.parametrize("left", [0, 100, 512 + 40, 1024 + 512])
def test_truncated_shards_are_refused_by_name(tmp_path, left):
    path = shard(tmp_path / "train-0.tar", samples(range(20)))
    os.truncate(path, left)
    with pytest.raises(ValueError, match=r"train-0\.tar"):
        load_dataset(tmp_path)


def test_every_truncation_is_detected_unless_only_padding_is_lost(tmp_path):
    path = shard(tmp_path / "train-0.tar", samples(range(4)))
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    for left in range(0, end, 97):
        path.write_bytes(data[:left])
        with pytest.raises(ValueError, match=r"train-0\.tar"):
            load_dataset(tmp_path)


def test_damage_in_the_middle_is_detected(tmp_path):
    path = shard(tmp_path / "train-0.tar", samples(range(20)))
    data = bytearray(path.read_bytes())
    at = data.index(b"0010.png")
    data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged at byte"):
        load_dataset(tmp_path)


def test_a_shard_that_became_shorter_is_named(tmp_path):
    images = load_dataset(written(tmp_path))["train"]
    os.truncate(tmp_path / "train-000001.tar", 600)
    with pytest.raises(OSError, match=r"train-000001\.tar:0008\.png: the shard is shorter"):
        images.open(8)


def test_a_store_can_be_pickled(tmp_path):
    images = pickle.loads(pickle.dumps(load_dataset(written(tmp_path))["train"]))
    assert np.array_equal(np.asarray(images.open(7)), pixels(7))


def test_an_archive_beside_its_unpacked_folders_is_ignored(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2})
    shard(tmp_path / "train.tar", [("train/a/1.png", encoded(1))])
    dataset = load_dataset(tmp_path)
    assert dataset.kind == "folder"
    assert dataset.skipped == ((f"{tmp_path}/train.tar", "not an image"),)

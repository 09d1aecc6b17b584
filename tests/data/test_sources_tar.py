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
from vitrail.data.sources import read
from vitrail.data.sources.patterns import braces

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
def test_shards_are_found_and_read_where_they_lie(tmp_path, where):
    found = read(where.format(written(tmp_path)))
    assert (found.kind, set(found.splits)) == ("tar", {"train", "validation"})
    train = found["train"]
    assert train.classes == ("0", "1", "2")
    assert train.targets.tolist() == [n % 3 for n in range(9)]
    assert train.shards.tolist() == [0] * 5 + [1] * 4
    for number in range(9):
        assert np.array_equal(np.asarray(train.open(number)), pixels(number))
    assert train.name(6).endswith("train-000001.tar:0006.png")
    assert train.store.data(6) == encoded(6)


def test_ranges_in_braces_name_their_files(tmp_path):
    written(tmp_path)
    found = read(f"{tmp_path}/train-{{000000..000001}}.tar", fractions=WHOLE)
    assert len(found["train"]) == 9
    with pytest.raises(FileNotFoundError, match=r"there is no .*train-000002\.tar"):
        read(f"{tmp_path}/train-{{000000..000002}}.tar")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        read(f"{tmp_path}/other-*.tar")


@pytest.mark.parametrize("word", ["a{1}.tar", "a{9..1}.tar", "a{0..9999999}.tar", "a{b..c}.tar"])
def test_braces_that_are_none_are_refused(word):
    with pytest.raises(ValueError, match="range"):
        braces(word)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 6))
def test_a_range_counts_with_its_zeros(first, more, width):
    words = braces(f"x-{{{first:0{width}d}..{first + more}}}.tar")
    assert words == [f"x-{number:0{width}d}.tar" for number in range(first, first + more + 1)]


def test_folders_named_like_splits_and_directories_in_keys(tmp_path):
    shard(tmp_path / "train/0.tar", samples(range(4), key="a.b/{:04}"))
    shard(tmp_path / "valid/0.tar", samples(range(4, 6), key="a.b/{:04}"))
    found = read(tmp_path)
    assert {name: len(pictures) for name, pictures in found.splits.items()} == {"train": 4, "validation": 2}
    assert found["train"].name(1).endswith("0.tar:a.b/0001.png")


def test_shards_without_a_split_are_divided_by_content(tmp_path):
    shard(tmp_path / "0.tar", samples(range(30)))
    found = read(tmp_path)
    assert len(found["train"]) + len(found["validation"]) == 30
    assert "split by content" in found.notes[0]


def test_some_with_a_split_and_some_without_are_refused(tmp_path):
    shard(tmp_path / "train-0.tar", samples(range(3)))
    shard(tmp_path / "0.tar", samples(range(3, 6)))
    with pytest.raises(ValueError, match="for some pictures which split"):
        read(tmp_path)


def test_numbers_are_in_the_order_of_their_values(tmp_path):
    shard(tmp_path / "train.tar", samples(range(12), label=str))
    pictures = read(tmp_path, fractions=WHOLE)["train"]
    assert pictures.classes == tuple(map(str, range(12)))
    assert pictures.targets.tolist() == list(range(12))


def test_names_beside_the_shards_are_used_in_their_order(tmp_path):
    written(tmp_path)
    (tmp_path / "classes.txt").write_text("zebra\nant\ncat\n")
    assert read(tmp_path)["train"].classes == ("zebra", "ant", "cat")
    (tmp_path / "classes.txt").write_text("zebra\nant\n")
    with pytest.raises(ValueError, match="names 2 classes, and there is the label 2"):
        read(tmp_path)


def test_labels_may_be_text_or_json_and_lists_are_several(tmp_path):
    members = [("a.jpg", encoded(1, "JPEG")), ("a.cls", b" cat \n"), ("b.png", encoded(2))]
    shard(tmp_path / "train-0.tar", [*members, ("b.json", json.dumps({"width": 8, "class": "dog"}).encode())])
    assert read(tmp_path, fractions=WHOLE)["train"].classes == ("cat", "dog")
    shard(tmp_path / "train-0.tar", [("a.png", encoded(1)), ("a.json", b'{"labels": ["x", "y"]}')])
    assert read(tmp_path, fractions=WHOLE)["train"].targets.tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="several labels"):
        read(tmp_path, several=False)


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_unicode_work(tmp_path, kind):
    key = "a folder/" * 30 + "ümlaut 図 {:04}"
    shard(tmp_path / "train 図.tar", samples(range(3), key=key), kind)
    pictures = read(tmp_path, fractions=WHOLE)["train"]
    assert pictures.name(2).endswith("ümlaut 図 0002.png")
    assert np.array_equal(np.asarray(pictures.open(2)), pixels(2))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.png", encoded(1))], "the sample a has no label"),
        ([("a.png", encoded(1)), ("a.txt", b"a cat on a sofa")], r"has a caption \(\.txt\) and no label"),
        ([("a.png", encoded(1)), ("a.json", b'{"width": 8}')], "the sample a has no label"),
        ([("a.png", encoded(1)), ("a.json", b"{")], r"a\.json is not readable"),
        ([("a.png", encoded(1)), ("a.cls", b"\xff\xfe")], r"a\.cls is not readable"),
        ([("a.png", encoded(1)), ("a.cls", b"")], "has the label ''"),
        ([("a.png", encoded(1)), ("a.json", b'{"label": 1.5}')], "has the label 1.5"),
        ([("a.cls", b"1")], "holds no pictures"),
    ],
)
def test_samples_that_lack_something_are_named(tmp_path, members, says):
    shard(tmp_path / "train-0.tar", members)
    with pytest.raises(ValueError, match=says):
        read(tmp_path)


def test_a_sample_without_a_picture_is_passed_over_and_told(tmp_path):
    shard(tmp_path / "train-0.tar", [*samples(range(2)), ("z.cls", b"1"), (".hidden.png", b"x")])
    found = read(tmp_path, fractions=WHOLE)
    assert len(found["train"]) == 2
    assert found.passed_over == ((f"{tmp_path}/train-0.tar:z", "a sample without a picture"),)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_shards_are_refused_with_the_remedy(tmp_path, mode):
    shard(tmp_path / "train-0.tar", samples(range(3)), mode=mode)
    with pytest.raises(ValueError, match=r"train-0\.tar is compressed.*unpack it once"):
        read(tmp_path)


@pytest.mark.parametrize("left", [0, 100, 512 + 40, 1024 + 512])
def test_truncated_shards_are_refused_by_name(tmp_path, left):
    path = shard(tmp_path / "train-0.tar", samples(range(20)))
    os.truncate(path, left)
    with pytest.raises(ValueError, match=r"train-0\.tar"):
        read(tmp_path)


def test_every_cut_is_seen_unless_only_padding_is_lost(tmp_path):
    path = shard(tmp_path / "train-0.tar", samples(range(4)))
    data = path.read_bytes()
    end = len(data.rstrip(b"\0"))
    for left in range(0, end, 97):
        path.write_bytes(data[:left])
        with pytest.raises(ValueError, match=r"train-0\.tar"):
            read(tmp_path)


def test_damage_in_the_middle_is_seen(tmp_path):
    path = shard(tmp_path / "train-0.tar", samples(range(20)))
    data = bytearray(path.read_bytes())
    at = data.index(b"0010.png")
    data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-0\.tar is damaged at byte"):
        read(tmp_path)


def test_a_shard_that_became_shorter_is_named(tmp_path):
    pictures = read(written(tmp_path))["train"]
    os.truncate(tmp_path / "train-000001.tar", 600)
    with pytest.raises(OSError, match=r"train-000001\.tar:0008\.png: the shard has become shorter"):
        pictures.open(8)


def test_a_store_survives_pickling(tmp_path):
    pictures = pickle.loads(pickle.dumps(read(written(tmp_path))["train"]))
    assert np.array_equal(np.asarray(pictures.open(7)), pixels(7))


def test_an_archive_beside_the_folders_it_was_unpacked_to_is_no_shard(tmp_path):
    tree(tmp_path, {"train/a/1.png": 1, "val/a/2.png": 2})
    shard(tmp_path / "train.tar", [("train/a/1.png", encoded(1))])
    found = read(tmp_path)
    assert found.kind == "folder"
    assert found.passed_over == ((f"{tmp_path}/train.tar", "not an image"),)

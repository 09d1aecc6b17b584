"""Parquet tables with embedded images, and Parquet manifests."""

import io
import json
import multiprocessing
import pickle
import sys

import numpy as np
import pytest

from tests.data.making import encoded, pixels, tree
from vitrail.data.sources import load_dataset, parquet

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def described(names, column="label", nested=False):
    """Return the schema metadata of Hugging Face datasets."""
    kind = {"names": list(names), "_type": "ClassLabel"}
    feature = {"feature": kind, "_type": "List"} if nested else kind
    return {b"huggingface": json.dumps({"info": {"features": {column: feature, "image": {"_type": "Image"}}}}).encode()}


def shard(path, numbers, labels, kind=None, names=None, column="label", group=3, image=IMAGE, nested=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [encoded(number) for number in numbers]
    cells = [{"bytes": cell, "path": None} for cell in cells] if image is IMAGE else cells
    kind = kind or pa.int64()
    schema = pa.schema([("image", image), (column, kind)], metadata=described(names, column, nested) if names else None)
    table = pa.table({"image": pa.array(cells, image), column: pa.array(labels, kind)}, schema=schema)
    pq.write_table(table, path, row_group_size=group)


def published(root, image=IMAGE):
    shard(
        root / "data/train-00000-of-00002.parquet",
        range(5),
        [0, 1, 2, 0, 1],
        names=("zebra", "ant", "cat"),
        image=image,
    )
    shard(
        root / "data/train-00001-of-00002.parquet",
        range(5, 9),
        [2, 2, 1, 0],
        names=("zebra", "ant", "cat"),
        image=image,
    )
    shard(
        root / "data/validation-00000-of-00001.parquet",
        range(20, 23),
        [2, 1, 0],
        names=("zebra", "ant", "cat"),
        image=image,
    )
    return root


@pytest.mark.parametrize("image", [IMAGE, pa.binary(), pa.large_binary()])
def test_shards_are_read_with_class_names_in_order(tmp_path, image):
    dataset = load_dataset(published(tmp_path, image))
    assert (dataset.kind, set(dataset.splits)) == ("parquet", {"train", "validation"})
    train = dataset["train"]
    assert train.classes == ("zebra", "ant", "cat")
    assert train.targets.tolist() == [0, 1, 2, 0, 1, 2, 2, 1, 0]
    for index, number in enumerate(range(9)):
        assert np.array_equal(np.asarray(train.open(index)), pixels(number))
    assert train.name(6).endswith("train-00001-of-00002.parquet[1]")
    assert train.shards.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert np.array_equal(np.asarray(dataset["validation"].open(1)), pixels(21))


def test_a_file_and_a_pattern_are_read(tmp_path):
    published(tmp_path)
    assert len(load_dataset(tmp_path / "data/validation-00000-of-00001.parquet").splits["validation"]) == 3
    assert (
        len(load_dataset(f"{tmp_path}/data/train-0000{{0..1}}-of-00002.parquet", fractions=(1.0, 0.0, 0.0))["train"])
        == 9
    )


def test_labels_may_be_names_or_numbers(tmp_path):
    shard(tmp_path / "a/train.parquet", range(3), ["b", "a", "b"], kind=pa.string())
    shard(tmp_path / "b/train.parquet", range(3), [10, 9, 2])
    everything = (1.0, 0.0, 0.0)
    assert load_dataset(tmp_path / "a", fractions=everything)["train"].classes == ("a", "b")
    assert load_dataset(tmp_path / "b", fractions=everything)["train"].classes == ("2", "9", "10")


def test_list_labels_are_multi_label(tmp_path):
    names = ("x", "y", "z")
    shard(tmp_path / "train.parquet", range(3), [[0, 2], [], [1]], pa.list_(pa.int64()), names, "labels", nested=True)
    images = load_dataset(tmp_path, fractions=(1.0, 0.0, 0.0))["train"]
    assert images.classes == names
    assert images.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_rows_without_labels_are_dropped_with_a_note(tmp_path):
    published(tmp_path)
    shard(tmp_path / "data/test-00000-of-00001.parquet", range(30, 32), [-1, -1], names=("zebra", "ant", "cat"))
    dataset = load_dataset(tmp_path)
    assert "test" not in dataset.splits
    assert "2 rows without a label" in dataset.notes[0]
    assert [dataset["validation"].open(i).size for i in range(3)] == [(8, 6)] * 3


def test_tables_without_splits_are_split_by_content(tmp_path):
    shard(tmp_path / "part-0.parquet", range(30), [n % 2 for n in range(30)], group=7)
    dataset = load_dataset(tmp_path)
    assert len(dataset["train"]) + len(dataset["validation"]) == 30
    assert "split by content" in dataset.notes[0]


def test_labels_outside_the_class_names_raise(tmp_path):
    shard(tmp_path / "train.parquet", range(2), [0, 3], names=("a", "b"))
    with pytest.raises(ValueError, match="the label 3, but its schema names 2 classes"):
        load_dataset(tmp_path)


def test_shards_that_disagree_on_names_are_refused(tmp_path):
    shard(tmp_path / "train-0.parquet", range(2), [0, 1], names=("a", "b"))
    shard(tmp_path / "train-1.parquet", range(2), [0, 1], names=("b", "a"))
    with pytest.raises(ValueError, match="has other class names"):
        load_dataset(tmp_path)
    pq.write_table(pa.table({"caption": ["a cat"]}), tmp_path / "train-1.parquet")
    with pytest.raises(ValueError, match=r"no column of images \(.*\), got caption"):
        load_dataset(tmp_path)


def test_a_table_without_images_names_its_columns(tmp_path):
    pq.write_table(pa.table({"sepal": [1.0], "petal": [2.0]}), tmp_path / "t.parquet")
    with pytest.raises(
        ValueError, match="no column of images or videos, and none of path and label columns, got sepal, petal"
    ):
        load_dataset(tmp_path / "t.parquet")


def test_images_without_labels_are_refused(tmp_path):
    pq.write_table(pa.table({"image": [b"x"], "note": ["a cat"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no column of labels"):
        load_dataset(tmp_path / "t.parquet")


@pytest.mark.parametrize("damage", [lambda d: d[:-10], lambda d: b"", lambda d: b"hello world"])
def test_damaged_tables_are_refused_by_name(tmp_path, damage):
    published(tmp_path)
    file = tmp_path / "data/train-00001-of-00002.parquet"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"train-00001-of-00002\.parquet is not a valid Parquet file") as error:
        load_dataset(tmp_path)
    assert "\n" not in str(error.value)


def test_missing_or_damaged_images_are_named_when_opened(tmp_path):
    cells = pa.array([{"bytes": None, "path": "x.png"}, {"bytes": b"no image", "path": None}], IMAGE)
    pq.write_table(pa.table({"image": cells, "label": ["a", "b"]}), tmp_path / "train.parquet")
    images = load_dataset(tmp_path, fractions=(1.0, 0.0, 0.0))["train"]
    with pytest.raises(OSError, match=r"train\.parquet\[0\]: the row has no image"):
        images.open(0)
    with pytest.raises(OSError, match=r"train\.parquet\[1\]: not an image"):
        images.open(1)


def test_few_row_groups_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_KEPT_BYTES", 1)
    images = load_dataset(published(tmp_path))["train"]
    order = [8, 0, 5, 3, 8, 1]
    assert [images.open(i).getpixel((0, 0)) for i in order] == [tuple(pixels(i)[0, 0]) for i in order]
    assert len(images.store._kept) == 1


def _opened(store, item, answer):
    answer.put(np.asarray(store.open(item)).sum())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_open_their_own_files(tmp_path, method):
    store = load_dataset(published(tmp_path))["train"].store
    store.open(0)  # so that there is something of this process to leave behind
    context = multiprocessing.get_context(method)
    answer = context.Queue()
    worker = context.Process(target=_opened, args=(store, 7, answer))
    worker.start()
    assert answer.get(timeout=60) == pixels(7).sum()
    worker.join(60)
    assert worker.exitcode == 0


def test_a_store_is_pickled_without_its_cache(tmp_path):
    store = load_dataset(published(tmp_path))["train"].store
    store.open(0)
    assert len(pickle.dumps(store)) < 2000
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(store)).open(2)), pixels(2))


def test_a_parquet_manifest_lists_paths(tmp_path):
    tree(tmp_path, {"p/0.png": 0, "p/1.png": 1, "p/2.png": 2})
    rows = {
        "file_name": ["p/0.png", "p/1.png", "p/2.png"],
        "label": ["a", "b", "a"],
        "split": ["train", "train", "test"],
    }
    pq.write_table(pa.table(rows), tmp_path / "list.parquet")
    dataset = load_dataset(tmp_path / "list.parquet", fractions=(1.0, 0.0, 0.0))
    assert dataset.kind == "manifest"
    assert (len(dataset["train"]), len(dataset["test"])) == (2, 1)
    assert np.array_equal(np.asarray(dataset["test"].open(0)), pixels(2))


def test_a_parquet_manifest_with_lists_is_multi_label(tmp_path):
    pq.write_table(pa.table({"path": ["0.png", "1.png"], "labels": [["a", "b"], ["b"]]}), tmp_path / "list.parquet")
    assert load_dataset(tmp_path / "list.parquet", fractions=(1.0, 0.0, 0.0))["train"].targets.tolist() == [
        [1, 1],
        [0, 1],
    ]


def test_a_parquet_manifest_names_the_incomplete_row(tmp_path):
    pq.write_table(pa.table({"path": ["0.png", None], "label": ["a", "b"]}), tmp_path / "list.parquet")
    with pytest.raises(ValueError, match="row 2: no path"):
        load_dataset(tmp_path / "list.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    published(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install 'vitrail\[parquet\]'"):
        load_dataset(tmp_path)


def test_data_returns_the_stored_bytes(tmp_path):
    images = load_dataset(published(tmp_path))["train"]
    assert images.store.data(4) == encoded(4)
    assert io.BytesIO(images.store.data(4)).read(4) == b"\x89PNG"
    assert images.store.stamp(4) == images.store.stamp(0)

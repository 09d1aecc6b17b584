"""Parquet: pictures inside, and manifests."""

import io
import json
import multiprocessing
import pickle
import sys

import numpy as np
import pytest

from tests.data.making import encoded, pixels, tree
from vitrail.data.sources import parquet, read

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def described(names, column="label", nested=False):
    """What Hugging Face's library writes beside a schema."""
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
def test_published_shards_are_read_with_their_names_in_order(tmp_path, image):
    found = read(published(tmp_path, image))
    assert (found.kind, set(found.splits)) == ("parquet", {"train", "validation"})
    train = found["train"]
    assert train.classes == ("zebra", "ant", "cat")
    assert train.targets.tolist() == [0, 1, 2, 0, 1, 2, 2, 1, 0]
    for index, number in enumerate(range(9)):
        assert np.array_equal(np.asarray(train.open(index)), pixels(number))
    assert train.name(6).endswith("train-00001-of-00002.parquet[1]")
    assert train.shards.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert np.array_equal(np.asarray(found["validation"].open(1)), pixels(21))


def test_one_file_and_a_pattern_work_too(tmp_path):
    published(tmp_path)
    assert len(read(tmp_path / "data/validation-00000-of-00001.parquet").splits["validation"]) == 3
    assert len(read(f"{tmp_path}/data/train-0000{{0..1}}-of-00002.parquet", fractions=(1.0, 0.0, 0.0))["train"]) == 9


def test_names_of_classes_may_be_text_or_bare_numbers(tmp_path):
    shard(tmp_path / "a/train.parquet", range(3), ["b", "a", "b"], kind=pa.string())
    shard(tmp_path / "b/train.parquet", range(3), [10, 9, 2])
    everything = (1.0, 0.0, 0.0)
    assert read(tmp_path / "a", fractions=everything)["train"].classes == ("a", "b")
    assert read(tmp_path / "b", fractions=everything)["train"].classes == ("2", "9", "10")


def test_lists_are_several_labels(tmp_path):
    names = ("x", "y", "z")
    shard(tmp_path / "train.parquet", range(3), [[0, 2], [], [1]], pa.list_(pa.int64()), names, "labels", nested=True)
    pictures = read(tmp_path, fractions=(1.0, 0.0, 0.0))["train"]
    assert pictures.classes == names
    assert pictures.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_a_split_without_labels_is_not_used_and_that_is_told(tmp_path):
    published(tmp_path)
    shard(tmp_path / "data/test-00000-of-00001.parquet", range(30, 32), [-1, -1], names=("zebra", "ant", "cat"))
    found = read(tmp_path)
    assert "test" not in found.splits
    assert "2 rows without a label" in found.notes[0]
    assert [found["validation"].open(i).size for i in range(3)] == [(8, 6)] * 3


def test_unsplit_tables_are_divided_by_content(tmp_path):
    shard(tmp_path / "part-0.parquet", range(30), [n % 2 for n in range(30)], group=7)
    found = read(tmp_path)
    assert len(found["train"]) + len(found["validation"]) == 30
    assert "split by content" in found.notes[0]


def test_labels_beyond_the_names_are_refused(tmp_path):
    shard(tmp_path / "train.parquet", range(2), [0, 3], names=("a", "b"))
    with pytest.raises(ValueError, match="the label 3, and its schema names 2 classes"):
        read(tmp_path)


def test_shards_that_disagree_on_names_are_refused(tmp_path):
    shard(tmp_path / "train-0.parquet", range(2), [0, 1], names=("a", "b"))
    shard(tmp_path / "train-1.parquet", range(2), [0, 1], names=("b", "a"))
    with pytest.raises(ValueError, match="names its classes differently"):
        read(tmp_path)


def test_a_table_without_pictures_says_its_columns(tmp_path):
    pq.write_table(pa.table({"sepal": [1.0], "petal": [2.0]}), tmp_path / "t.parquet")
    with pytest.raises(
        ValueError, match="neither a column of pictures nor path and label: its columns are sepal, petal"
    ):
        read(tmp_path / "t.parquet")


def test_pictures_without_labels_are_refused(tmp_path):
    pq.write_table(pa.table({"image": [b"x"], "caption": ["a cat"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no column of labels"):
        read(tmp_path / "t.parquet")


@pytest.mark.parametrize("damage", [lambda d: d[:-10], lambda d: b"", lambda d: b"hello world"])
def test_damaged_tables_are_refused_by_name(tmp_path, damage):
    published(tmp_path)
    file = tmp_path / "data/train-00001-of-00002.parquet"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"train-00001-of-00002\.parquet is not a whole Parquet file") as error:
        read(tmp_path)
    assert "\n" not in str(error.value)


def test_a_row_without_a_picture_or_with_a_broken_one_is_named_when_opened(tmp_path):
    cells = pa.array([{"bytes": None, "path": "x.png"}, {"bytes": b"no picture", "path": None}], IMAGE)
    pq.write_table(pa.table({"image": cells, "label": ["a", "b"]}), tmp_path / "train.parquet")
    pictures = read(tmp_path, fractions=(1.0, 0.0, 0.0))["train"]
    with pytest.raises(OSError, match=r"train\.parquet\[0\]: the row holds no picture"):
        pictures.open(0)
    with pytest.raises(OSError, match=r"train\.parquet\[1\]: not an image"):
        pictures.open(1)


def test_few_row_groups_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "KEPT", 1)
    pictures = read(published(tmp_path))["train"]
    order = [8, 0, 5, 3, 8, 1]
    assert [pictures.open(i).getpixel((0, 0)) for i in order] == [tuple(pixels(i)[0, 0]) for i in order]
    assert len(pictures.store._kept) == 1


def _opened(store, item, answer):
    answer.put(np.asarray(store.open(item)).sum())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_open_rows_for_themselves(tmp_path, method):
    store = read(published(tmp_path))["train"].store
    store.open(0)  # so that there is something of this process to leave behind
    context = multiprocessing.get_context(method)
    answer = context.Queue()
    worker = context.Process(target=_opened, args=(store, 7, answer))
    worker.start()
    assert answer.get(timeout=60) == pixels(7).sum()
    worker.join(60)
    assert worker.exitcode == 0


def test_a_store_is_pickled_without_what_it_keeps(tmp_path):
    store = read(published(tmp_path))["train"].store
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
    found = read(tmp_path / "list.parquet", fractions=(1.0, 0.0, 0.0))
    assert found.kind == "manifest"
    assert (len(found["train"]), len(found["test"])) == (2, 1)
    assert np.array_equal(np.asarray(found["test"].open(0)), pixels(2))


def test_a_parquet_manifest_with_lists_has_several_labels(tmp_path):
    pq.write_table(pa.table({"path": ["0.png", "1.png"], "labels": [["a", "b"], ["b"]]}), tmp_path / "list.parquet")
    assert read(tmp_path / "list.parquet", fractions=(1.0, 0.0, 0.0))["train"].targets.tolist() == [[1, 1], [0, 1]]


def test_a_parquet_manifest_names_the_row_that_lacks_something(tmp_path):
    pq.write_table(pa.table({"path": ["0.png", None], "label": ["a", "b"]}), tmp_path / "list.parquet")
    with pytest.raises(ValueError, match="row 2: no path"):
        read(tmp_path / "list.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    published(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install 'vitrail\[parquet\]'"):
        read(tmp_path)


def test_bytes_are_those_that_were_stored(tmp_path):
    pictures = read(published(tmp_path))["train"]
    assert pictures.store.data(4) == encoded(4)
    assert io.BytesIO(pictures.store.data(4)).read(4) == b"\x89PNG"
    assert pictures.store.stamp(4) == pictures.store.stamp(0)

"""IDX, CIFAR and the built-in digits."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from vitrail.data.sources import load_dataset
from vitrail.data.sources.arrays import FASHION_MNIST_CLASSES

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 5, 4), dtype=np.uint8)


def labels(count: int, first: int = 0) -> np.ndarray:
    return (np.arange(count) % 3 + first).astype(np.uint8)


def mnist(root: Path, packed: bool = False, names: str = "{}-{}-idx{}-ubyte", first: int = 0) -> Path:
    root.mkdir(exist_ok=True)
    for split, count in (("train", 60), ("t10k", 9)):
        for what, array, dims in (("images", images(count, count), 3), ("labels", labels(count, first), 1)):
            name = names.format(split, what, dims) + (".gz" if packed else "")
            (root / name).write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return root


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("names", ["{}-{}-idx{}-ubyte", "{}-{}.idx{}-ubyte"])
def test_idx_files_are_read_plain_and_gzipped(tmp_path, packed, names):
    found = load_dataset(mnist(tmp_path / "m", packed, names))
    assert found.kind == "idx"
    assert len(found["train"]) + len(found["validation"]) == 60
    test = found["test"]
    assert test.classes == ("0", "1", "2")
    assert test.targets.tolist() == labels(9).tolist()
    assert np.array_equal(np.asarray(test.open(4)), images(9, 9)[4])
    assert (test.open(0).mode, test.open(0).size) == ("L", (4, 5))
    assert test.name(4).endswith("[4]")
    assert "t10k-images" in test.name(4)
    assert test.store.data(int(test.items[4])) == images(9, 9)[4].tobytes()


def test_labels_from_one_make_no_empty_class(tmp_path):
    found = load_dataset(mnist(tmp_path / "m", first=1))
    assert found["train"].classes == ("1", "2", "3")
    assert found["train"].count_classes().min() > 0


def test_emnist_is_transposed(tmp_path):
    found = load_dataset(mnist(tmp_path / "m", names="emnist-letters-{}-{}-idx{}-ubyte"))
    assert np.array_equal(np.asarray(found["test"].open(0)), images(9, 9)[0].T)
    assert "transposed" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train-images-idx3-ubyte", idx(images(60))[:-1], "should have 1,200 bytes of data, got 1,199"),
        ("train-images-idx3-ubyte", idx(images(60)) + b"x", "got more"),
        ("train-images-idx3-ubyte", b"\x89PNG" + b"x" * 99, "not an IDX file"),
        ("train-images-idx3-ubyte", b"", "not an IDX file"),
        ("train-images-idx3-ubyte", idx(images(60))[:9], "has an invalid header"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\xff" * 12, "invalid header"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\x03" + bytes(12), "not an IDX file"),
        ("train-labels-idx1-ubyte", idx(images(60)), "3 dimensions, expected 1"),
        ("train-labels-idx1-ubyte", idx(labels(59)), "60 images, but 59 labels"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((9, 7, 7), np.uint8)), "different image sizes"),
        ("train-images-idx3-ubyte", idx(np.zeros((60, 0, 4), np.uint8)), "has no images"),
    ],
)
def test_damaged_idx_files_are_refused_by_name(tmp_path, name, data, message):
    root = mnist(tmp_path / "m")
    (root / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        load_dataset(root)
    assert str(root) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-20], lambda d: b"nothing" + d, lambda d: d[:30] + b"\xff" * 30 + d[60:]]
)
def test_damaged_gzip_files_are_refused_by_name(tmp_path, damage):
    root = mnist(tmp_path / "m", packed=True)
    file = root / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        load_dataset(root)


def test_a_missing_idx_file_is_named(tmp_path):
    root = mnist(tmp_path / "m")
    (root / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="train-images-idx3-ubyte, but not its labels"):
        load_dataset(root)


def test_two_idx_datasets_in_one_folder_are_refused(tmp_path):
    mnist(tmp_path / "m")
    mnist(tmp_path / "m", names="emnist-{}-{}-idx{}-ubyte")
    with pytest.raises(ValueError, match="several IDX datasets"):
        load_dataset(tmp_path / "m")


def test_one_idx_file_alone_points_to_its_folder(tmp_path):
    with pytest.raises(ValueError, match="give their folder"):
        load_dataset(mnist(tmp_path / "m") / "train-images-idx3-ubyte")


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Fashion-MNIST is not installed: apt install dataset-fashion-mnist")
def test_fashion_mnist_is_recognised_by_its_labels():
    found = load_dataset(DEBIAN)
    assert found["test"].classes == FASHION_MNIST_CLASSES
    assert found["test"].count_classes().tolist() == [1000] * 10
    assert FASHION_MNIST_CLASSES[found["test"].targets[0]] == "Ankle boot"
    assert len(found["train"]) + len(found["validation"]) == 60_000


TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def records(count: int, seed: int, before: int, classes: int) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (count, before + 3072), dtype=np.uint8)
    values[:, before - 1] = np.arange(count) % classes
    return values.tobytes()


def cifar10() -> dict[str, bytes]:
    files = {f"data_batch_{n}.bin": records(20, n, 1, 10) for n in range(1, 6)}
    return files | {"test_batch.bin": records(10, 9, 1, 10), "batches.meta.txt": ("\n".join(TEN) + "\n\n").encode()}


def cifar100() -> dict[str, bytes]:
    names = "\n".join(f"class{n:02}" for n in range(100)).encode()
    return {"train.bin": records(400, 1, 2, 100), "test.bin": records(100, 2, 2, 100), "fine_label_names.txt": names}


def written(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(parents=True)
    for name, data in files.items():
        (root / name).write_bytes(data)
    return root


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("archive", [False, True])
def test_cifar_10_is_read_from_a_folder_and_from_the_archive(tmp_path, archive):
    where = packed(tmp_path / "c.tar.gz", cifar10()) if archive else written(tmp_path / "c", cifar10())
    found = load_dataset(where)
    assert (found.kind, found["train"].classes) == ("cifar", TEN)
    assert len(found["train"]) + len(found["validation"]) == 100
    record = np.frombuffer(cifar10()["test_batch.bin"], np.uint8).reshape(10, -1)[3]
    assert np.array_equal(np.asarray(found["test"].open(3)), record[1:].reshape(3, 32, 32).transpose(1, 2, 0))
    assert found["test"].targets.tolist() == list(range(10))
    assert found["test"].name(3).endswith("test_batch.bin[3]")


def test_cifar_100_has_the_fine_labels(tmp_path):
    found = load_dataset(written(tmp_path / "c", cifar100()))
    assert len(found["test"].classes) == 100
    assert found["test"].targets.tolist() == list(range(100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_batch_2.bin": records(20, 2, 1, 10)[:-1]}, r"data_batch_2\.bin has 61,459 bytes"),
        ({"data_batch_2.bin": b""}, r"data_batch_2\.bin has 0 bytes"),
        ({"test_batch.bin": records(20, 2, 1, 11)}, r"test_batch\.bin has the label 10"),
        ({"batches.meta.txt": b"one\ntwo\n"}, r"batches\.meta\.txt has 2 class names, expected 10"),
    ],
)
def test_damaged_cifar_files_are_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(written(tmp_path / "c", cifar10() | change))


def test_a_truncated_archive_is_refused_by_name(tmp_path):
    path = packed(tmp_path / "cifar-10-binary.tar.gz", cifar10())
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz is not a valid archive"):
        load_dataset(path)


def test_another_archive_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no binary files of CIFAR-10 or CIFAR-100"):
        load_dataset(packed(tmp_path / "other.tgz", {"a.bin": b"x"}))


def test_digits_equal_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn to compare with")
    theirs = sklearn.load_digits()
    found = load_dataset("digits")
    assert (found.kind, found["train"].classes) == ("digits", tuple("0123456789"))
    store = found["train"].store
    assert np.array_equal(np.round(store.pixels * 16.0 / 255), theirs.images)
    for images in found.splits.values():
        assert np.array_equal(images.targets, theirs.target[images.items])
    everything = np.concatenate([images.items for images in found.splits.values()])
    assert np.array_equal(np.sort(everything), np.arange(1797))


def test_digits_have_three_fixed_splits():
    assert {name: len(images) for name, images in load_dataset("digits").splits.items()} == {
        "train": 1293,
        "validation": 234,
        "test": 270,
    }


def test_multi_label_makes_one_hot_targets():
    images = load_dataset("digits", multi_label=True)["test"]
    assert images.is_multi_label
    assert np.array_equal(images.targets.argmax(1), load_dataset("digits")["test"].targets)
    assert set(images.targets.sum(1).tolist()) == {1}

"""Python objects as data: datasets of samples, lists, arrays, tables, Hugging Face datasets, dictionaries of splits."""

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

import vitrail
from tests.data.making import encoded, pixels, tree
from vitrail.data.audit import audit_dataset
from vitrail.data.dataset import Images
from vitrail.data.images import to_image
from vitrail.data.loader import Loader
from vitrail.data.sources import load_dataset
from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.pipeline import TrainPipeline

COUNT = 24
ARRAYS = np.stack([pixels(number) for number in range(COUNT)])  # [n, 6, 8, 3]
LABELS = np.arange(COUNT) % 3
NAMES = ["cat", "dog", "owl"]


class Zoo:
    """A dataset of one's own, as the protocol `Samples` describes it."""

    classes = tuple(NAMES)

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index in self.broken:
            raise OSError("the disk is gone")
        return Image.fromarray(ARRAYS[index]), int(LABELS[index])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(ARRAYS, LABELS, strict=True))


def content(images: Images) -> dict[str, list[bytes]]:
    """Return the pixels of a split's images by class, sorted."""
    found: dict[str, list[bytes]] = {name: [] for name in images.classes}
    for index in range(len(images)):
        found[images.classes[images.targets[index]]].append(np.asarray(images.open(index).convert("RGB")).tobytes())
    return {name: sorted(values) for name, values in found.items()}


def everything(data: Any, **options: Any) -> dict[str, list[bytes]]:
    """Return the images of all splits by class."""
    found: dict[str, list[bytes]] = {}
    for images in load_dataset(data, **options).splits.values():
        for name, values in content(images).items():
            found[name] = sorted(found.get(name, []) + values)
    return found


EXPECTED = {name: sorted(ARRAYS[k].tobytes() for k in range(COUNT) if NAMES[LABELS[k]] == name) for name in NAMES}
NUMBERED = {str(index): EXPECTED[name] for index, name in enumerate(NAMES)}


# --- kinds of objects ---


def list_kinds() -> dict[str, tuple[Any, dict[str, list[bytes]]]]:
    tensors = torch.from_numpy(ARRAYS).permute(0, 3, 1, 2)
    names = [NAMES[label] for label in LABELS]
    floats = tensors.float() / 255
    return {
        "samples": (Zoo(), EXPECTED),
        "subset": (Subset(Zoo(), list(range(COUNT))), EXPECTED),  # type: ignore[arg-type]
        "sum": (ConcatDataset([Subset(Zoo(), range(9)), Subset(Zoo(), range(9, COUNT))]), EXPECTED),  # type: ignore[arg-type]
        "tensors": (TensorDataset(tensors, torch.from_numpy(LABELS)), NUMBERED),
        "floats": (TensorDataset(floats, torch.from_numpy(LABELS)), NUMBERED),
        "arrays": ((ARRAYS, LABELS), NUMBERED),
        "named arrays": ((ARRAYS, np.array(names)), EXPECTED),
        "batches": ((tensors, torch.from_numpy(LABELS)), NUMBERED),
        "pairs of arrays": (list(zip(ARRAYS, names, strict=True)), EXPECTED),
        "pairs of images": ([(Image.fromarray(a), n) for a, n in zip(ARRAYS, names, strict=True)], EXPECTED),
        "pairs of bytes": ([(encoded(k), n) for k, n in enumerate(names)], EXPECTED),
        "dictionaries": ([{"image": a, "label": n} for a, n in zip(ARRAYS, names, strict=True)], EXPECTED),
        "two lists": (([*ARRAYS], names), EXPECTED),
    }


@pytest.mark.parametrize("kind", list_kinds())
def test_every_kind_has_the_same_images_and_labels(kind: str) -> None:
    data, expected = list_kinds()[kind]
    assert everything(data) == expected
    dataset = load_dataset(data)
    assert set(dataset.splits) == {"train", "validation"}  # by content
    assert dataset.source.startswith("python:")
    assert dataset.fingerprint is not None
    assert audit_dataset(dataset, workers=0).is_ok
    again = load_dataset(data)
    assert again.fingerprint == dataset.fingerprint
    assert [again["train"].items.tolist(), again["train"].targets.tolist()] == [
        dataset["train"].items.tolist(),
        dataset["train"].targets.tolist(),
    ]


def test_pairs_of_paths_are_files(tmp_path: Path) -> None:
    tree(tmp_path, {f"{number}.png": number for number in range(COUNT)} | {"bad.png": b"no image"})
    pairs: list[Any] = [(tmp_path / f"{k}.png", NAMES[LABELS[k]]) for k in range(COUNT)]
    assert everything(pairs) == EXPECTED
    dataset = load_dataset([*pairs, (str(tmp_path / "bad.png"), "cat"), (str(tmp_path / "gone.png"), "dog")])
    found = {
        Path(finding.path).name: finding.kind for finding in audit_dataset(dataset, workers=0, min_side=1).findings
    }
    assert found == {"bad.png": "not-an-image", "gone.png": "unreadable"}


def test_torchvision_folders_are_read_as_files(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets").ImageFolder
    tree(tmp_path, {f"{NAMES[LABELS[k]]}/{k}.png": k for k in range(COUNT)})
    whole = folder(str(tmp_path))
    dataset = load_dataset(whole)
    assert everything(whole) == EXPECTED
    assert dataset["train"].store.stamp(0) is not None
    part = load_dataset(Subset(whole, [0, 1, 8, 9, 16, 17]), fractions=(1.0, 0.0, 0.0))
    assert part["train"].class_counts == dict.fromkeys(NAMES, 2)
    turned = folder(str(tmp_path), transform=lambda image: image.transpose(Image.Transpose.ROTATE_90))
    assert load_dataset(turned)["train"].open(0).size == (6, 8)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_are_read_like_manifests(library: str, tmp_path: Path) -> None:
    frame = pytest.importorskip(library).DataFrame
    tree(tmp_path, {f"{number}.png": number for number in range(COUNT)})
    names = [NAMES[label] for label in LABELS]
    paths = [str(tmp_path / f"{number}.png") for number in range(COUNT)]
    assert everything(frame({"path": paths, "label": names})) == EXPECTED
    assert everything(frame({"image": [encoded(k) for k in range(COUNT)], "label": LABELS.tolist()})) == NUMBERED
    split = load_dataset(frame({"path": paths, "label": names, "split": ["train"] * 15 + ["val"] * 9}))
    assert {name: len(images) for name, images in split.splits.items()} == {"train": 15, "validation": 9}
    several = load_dataset(frame({"path": paths, "label": ["cat|dog", *names[1:]]}))
    assert several["train"].is_multi_label
    with pytest.raises(ValueError, match="the table has no column label or mask, got path"):
        load_dataset(frame({"path": paths}))
    with pytest.raises(ValueError, match=r"^row 2: unknown split 'x'"):
        load_dataset(frame({"path": paths, "label": names, "split": ["train", "val", "x"] * 8}))
    assert len(load_dataset(frame({"path": paths}), multi_label="unlabelled")["train"].classes) == 1


def test_frames_with_images_and_missing_labels() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    images = [Image.fromarray(array) for array in ARRAYS]
    assert everything(pandas.DataFrame({"image": images, "label": LABELS.tolist()})) == NUMBERED
    with pytest.raises(ValueError, match=r"^DataFrame\[1\] has no label"):
        load_dataset(pandas.DataFrame({"image": images[:3], "label": ["a", None, "b"]}))
    with pytest.raises(ValueError, match=r"give frame\.collect\(\)"):
        load_dataset(polars.DataFrame({"path": ["a.png"], "label": ["a"]}).lazy())


def hub_data(labels: list[Any] | None = None, names: list[str] = NAMES) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=names)})
    images = [{"bytes": encoded(number), "path": None} for number in range(COUNT)]
    return datasets.Dataset.from_dict({"img": images, "kind": labels or LABELS.tolist()}, features=features)


def test_hugging_face_datasets_are_read_by_their_features() -> None:
    datasets = pytest.importorskip("datasets")
    data = hub_data()
    assert everything(data) == EXPECTED
    assert everything(data.with_format("torch")) == EXPECTED
    both = datasets.DatasetDict({"train": data.select(range(15)), "test": data.select(range(15, 24)), "extra": data})
    found = load_dataset(both)
    assert sum(map(len, found.splits.values())) == COUNT
    assert "the split extra is not used" in found.notes
    assert found["test"].classes == tuple(NAMES)
    some = load_dataset(hub_data([-1, *LABELS.tolist()[1:]]))
    assert "1 rows without a label are not used" in some.notes
    with pytest.raises(ValueError, match="load it without streaming=True"):
        load_dataset(data.to_iterable_dataset())
    with pytest.raises(ValueError, match="no column of type Image, got x"):
        load_dataset(datasets.Dataset.from_dict({"x": [1]}))


def test_several_class_labels_per_row_are_multi_label() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "labels": [datasets.ClassLabel(names=NAMES)]})
    images = [{"bytes": encoded(number), "path": None} for number in range(COUNT)]
    labels = [[int(label), (int(label) + 1) % 3] for label in LABELS]
    train = load_dataset(datasets.Dataset.from_dict({"image": images, "labels": labels}, features=features))["train"]
    assert train.is_multi_label
    assert (train.targets.sum(1) == 2).all()


def test_hub_addresses_go_through_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load(name: str, config: str | None, revision: str | None) -> Any:
        asked.append((name, config, revision))
        if name == "owner/gone":
            raise FileNotFoundError("Dataset 'owner/gone' doesn't exist on the Hub\nor cannot be accessed")
        return datasets.DatasetDict({"train": hub_data()})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_dataset("hf://datasets/owner/zoo")
    assert (found.source, found.kind) == ("hf://datasets/owner/zoo", "hub")
    assert everything("hf://datasets/owner/zoo/plain@main") == EXPECTED
    assert asked == [("owner/zoo", None, None), ("owner/zoo", "plain", "main")]
    line = r"^hf://datasets/owner/gone cannot be read \(Dataset .* the Hub\): check the name and the network$"
    with pytest.raises(OSError, match=line):
        load_dataset("hf://datasets/owner/gone")
    with pytest.raises(ValueError, match="invalid dataset address 'hf://datasets/owner'"):
        load_dataset("hf://datasets/owner")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets: pip install 'vitrail\[datasets\]'"):
        load_dataset("hf://datasets/owner/zoo")


# --- splits ---


def test_a_dictionary_of_splits_takes_every_kind(tmp_path: Path) -> None:
    tree(tmp_path, {f"{NAMES[LABELS[k]]}/{k}.png": k for k in range(15, COUNT)})
    found = load_dataset({"train": Subset(Zoo(), range(15)), "val": tmp_path})  # type: ignore[arg-type]
    assert {name: len(images) for name, images in found.splits.items()} == {"train": 15, "validation": 9}
    assert found["train"].name(3) == "train[3]"
    assert found["validation"].classes == tuple(NAMES)
    tested = load_dataset({"test": (ARRAYS[:6], LABELS[:6]), "train": (ARRAYS[6:], LABELS[6:])})
    assert list(tested.splits) == ["train", "validation", "test"]
    assert len(tested["test"]) == 6


def test_leaks_between_splits_are_errors() -> None:
    audit = vitrail.check({"train": (ARRAYS, LABELS), "test": (ARRAYS[:3], LABELS[:3])}, workers=0)
    assert audit.counts["leak"] == 3
    assert not audit.is_ok
    assert "error: identical images in two splits: train[" in str(audit)


# --- labels ---


def test_multi_hot_vectors_names_and_indices() -> None:
    hot = np.array([[1, label % 2, 1] for label in LABELS])
    for labels in (hot, hot.astype(np.float32), torch.from_numpy(hot), hot.tolist()):
        train = load_dataset((ARRAYS, labels))["train"]
        assert train.is_multi_label
        assert train.classes == ("0", "1", "2")
        assert set(train.targets[:, 0]) == {1}
    named = load_dataset([(array, ["b", "a"] if k % 2 else ["a"]) for k, array in enumerate(ARRAYS)])["train"]
    assert named.classes == ("a", "b")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([(ARRAYS[0], 1.5)], r"list\[0\] has the label 1.5: give an index, a name, or a multi-hot vector"),
        (
            [(ARRAYS[0], [1, 0]), (ARRAYS[1], [1, 0, 1])],
            r"list\[1\] has the label \[1, 0, 1\]: give names, or 2 values",
        ),
        ([ARRAYS[0], ARRAYS[1]], r"list\[0\] has no label: give pairs of image and label, or use vitrail\.pretrain"),
        ((ARRAYS, LABELS[:5]), "got 24 images and 5 labels"),
        ([], "python:list has no images"),
        ({}, "the dictionary of splits is empty"),
        ({"train": (ARRAYS, LABELS), "more": []}, "unknown split 'more': name the splits train, validation and test"),
        (DataLoader(Zoo()), r"a DataLoader has an order and batches of its own: give its dataset, loader\.dataset"),  # type: ignore[arg-type]
        (Stream(), "Stream can be read only from its start: give a path"),
        ((image for image in ARRAYS), "generator can be read only from its start"),
        (3, "int is not a dataset: give a path"),
        ("python:list", "python:list is a Python object, not a file: give the object itself, in Python"),
        ([({"a": 1}, 0)], r"list\[0\] is of type dict: give a path, bytes, a PIL image"),
        ([(ARRAYS[0].astype(np.int64), 0)], "has the type int64: give uint8, or floating point from 0 to 1"),
        ([(ARRAYS[0] / 1.0, 0)], r"floating-point values from \d+ to \d+: give uint8, or 0 to 1 \(without Normalize\)"),
        ([(ARRAYS[0].transpose(2, 0, 1), 0)], r"shape \[3, 6, 8\]: .* give array\.transpose\(1, 2, 0\)"),
        ([(torch.from_numpy(ARRAYS[0]), 0)], r"shape \[6, 8, 3\]: a tensor is \[H, W\] or \[C, H, W\]"),
    ],
)
def test_bad_objects_are_refused_in_one_line(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 140


def test_labels_outside_the_named_classes_are_refused() -> None:
    class Other(Zoo):
        classes = ("cat", "dog")

    with pytest.raises(ValueError, match=r"Other\[2\] has the label 2, but the dataset names 2 classes"):
        load_dataset(Other())


# --- bad samples ---


def test_unreadable_samples_are_left_out_and_listed() -> None:
    dataset = load_dataset(Zoo(broken=(7,)))
    assert sum(map(len, dataset.splits.values())) == COUNT - 1
    audit = audit_dataset(dataset, workers=0, min_side=1)
    assert [(finding.kind, finding.path) for finding in audit.findings] == [("unreadable", "Zoo[7]")]
    assert "the disk is gone" in audit.findings[0].detail
    with pytest.raises(ValueError, match=r"none of the 24 samples can be read: Zoo\[0\]: unreadable: the disk is gone"):
        load_dataset(Zoo(broken=tuple(range(COUNT))))


def test_random_transforms_are_refused() -> None:
    class Noisy(Zoo):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            return np.random.randint(0, 255, (4, 4, 3), dtype=np.uint8), 0  # noqa: NPY002

    with pytest.raises(ValueError, match=r"Noisy\[0\] gives other pixels when it is read again: leave out random"):
        load_dataset(Noisy())


# --- loading ---


@pytest.mark.parametrize("kind", ["samples", "pairs of images", "arrays", "pairs of bytes"])
def test_batches_are_the_same_for_any_number_of_workers(kind: str) -> None:
    train = load_dataset(list_kinds()[kind][0])["train"]
    pipeline = TrainPipeline((Flip(),), (6, 8), 3)

    def read(workers: int, **options: Any) -> list[np.ndarray]:
        loader = Loader(train, None, pipeline, batch_size=4, workers=workers, epochs=1, **options)
        try:
            return [batch.pixels.numpy().copy() for batch in loader.iter_epoch(0)]
        finally:
            loader.close()

    alone = read(0)
    for other in (read(2), read(1, cache_bytes=0)):
        assert all(np.array_equal(a, b) for a, b in zip(alone, other, strict=True))


def test_a_store_is_picklable() -> None:
    images = load_dataset([(Image.fromarray(array), "a") for array in ARRAYS])["train"]
    images.open(0)  # creates the lock of this process
    copy: Images = pickle.loads(pickle.dumps(images))
    assert copy.open(3).tobytes() == images.open(3).tobytes()


# --- single images ---


def test_values_of_every_type_are_the_same_image(tmp_path: Path) -> None:
    array = ARRAYS[0]
    Image.fromarray(array).save(tmp_path / "x.png")
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    values: list[Any] = [str(tmp_path / "x.png"), tmp_path / "x.png", encoded(0), Image.fromarray(array), array, tensor]
    preprocessing = vitrail.Preprocessing(size=(4, 4), resize=(5, 5))
    expected = preprocessing(Image.fromarray(array))
    for value in (*values, tensor.float() / 255):
        assert torch.equal(preprocessing(value), expected)
    batch = preprocessing([*values])
    assert batch.shape == (len(values), 3, 4, 4)
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        preprocessing(tmp_path / "gone.jpg")
    with pytest.raises(ValueError, match="the image is of type int: give a path"):
        preprocessing(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F", "HSV"])
def test_images_of_every_mode_are_audited(mode: str) -> None:
    image = Image.fromarray(ARRAYS[0])
    converted = Image.fromarray(np.full((6, 8), 300, np.uint16)) if mode == "I;16" else image.convert(mode)
    data = [(converted, "a"), (image.rotate(90), "b"), (image.rotate(180), "a"), (image.rotate(270), "b")]
    audit = vitrail.check(data, near=None, workers=0)
    assert not audit.counts["unreadable"]


def test_16_bit_and_bool_arrays() -> None:
    assert to_image(np.full((2, 2), 65535, np.uint16), "x").mode == "I;16"
    assert np.asarray(to_image(np.eye(2, dtype=bool), "x")).tolist() == [[255, 0], [0, 255]]
    out = io.BytesIO()
    to_image(np.zeros((2, 2, 4), np.uint8), "x").save(out, "PNG")
    assert Image.open(out).mode == "RGBA"

"""Datasets in memory: the built-in digits, IDX files (MNIST and its family) and CIFAR's binary files."""

import gzip
import hashlib
import math
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.dataset import Dataset, Images
from vitrail.data.sources import splits as parts

DIGITS_FRACTIONS: parts.Fractions = (0.7, 0.15, 0.15)
DIGIT_SIDE, DIGITS_PER_ROW = 8, 40
IDX_NAME = re.compile(r"(?P<before>.*?)(?P<split>train|t10k|test)-(?P<what>images|labels)[-.]idx\d-ubyte(?P<gz>\.gz)?")
UNSIGNED_BYTE = 8  # IDX type code
MAX_IDX_BYTES = 2**34  # limit for the size in a file's header
FASHION_MNIST_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")
FASHION_MNIST_CLASSES += ("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
# SHA-256 of the labels without header, independent of the compression: train, test.
FASHION_MNIST_LABEL_HASHES = {
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
}
CIFAR_IMAGE_BYTES = 3 * 32 * 32


class PixelStore:
    """Base of stores of decoded pixels. `origins` has the first image of each file, and the file."""

    origins: tuple[tuple[int, str], ...]

    def image_pixels(self, item: int) -> np.ndarray:
        """Return the pixels of an image, uint8 [H, W] for grey or [H, W, 3]."""
        raise NotImplementedError

    def locate(self, item: int) -> tuple[str, int]:
        """Return the file of an image, and its row in it."""
        start, file = next((start, file) for start, file in reversed(self.origins) if start <= item)
        return file, item - start

    def name(self, item: int) -> str:
        file, row = self.locate(item)
        return f"{file}[{row}]"

    def open(self, item: int) -> Image.Image:
        return Image.fromarray(self.image_pixels(item))

    def data(self, item: int) -> bytes:
        return self.image_pixels(item).tobytes()

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None


@dataclass(frozen=True, eq=False)
class ArrayStore(PixelStore):
    """A store in memory: every image is a slice of one array."""

    pixels: np.ndarray  # uint8, [n, H, W] for grey or [n, H, W, 3]
    origins: tuple[tuple[int, str], ...]
    published: bool = True  # by others, who will not correct copies and contradictions

    @classmethod
    def from_files(cls, arrays: Sequence[tuple[str, np.ndarray]]) -> "ArrayStore":
        """Return the images of several files, one after another."""
        starts = np.cumsum([0, *(len(pixels) for _, pixels in arrays)]).tolist()
        pixels = np.ascontiguousarray(np.concatenate([pixels for _, pixels in arrays]))
        return cls(pixels, tuple((start, file) for start, (file, _) in zip(starts, arrays, strict=False)))

    def __len__(self) -> int:
        return len(self.pixels)

    def image_pixels(self, item: int) -> np.ndarray:
        return self.pixels[item]


def build_dataset(
    root: str,
    kind: str,
    store: ArrayStore,
    targets: dict[str, np.ndarray],
    classes: tuple[str, ...],
    notes: list[str],
    options: parts.ReadOptions,
) -> Dataset:
    """Build the dataset of a store that holds one split after another."""
    splits, start = {}, 0
    for split, values in targets.items():
        splits[split] = Images(store, np.arange(start, start + len(values)), values, classes, split)
        start += len(values)
    return parts.add_validation_split(Dataset(root, kind, splits, tuple(notes)), options, parts.HOLDOUT_FRACTIONS)


def read_digits(source: str, options: parts.ReadOptions) -> Dataset:
    """Read the built-in digits, split by content."""
    labels = (files("vitrail.data") / "digits.txt").read_text(encoding="ascii").split()
    targets = np.array([int(label) for label in "".join(labels)], dtype=np.int64)
    with (files("vitrail.data") / "digits.png").open("rb") as file, Image.open(file) as sheet:
        pixels = np.asarray(sheet)  # [45·8, 40·8]
    tiles = pixels.reshape(-1, DIGIT_SIDE, DIGITS_PER_ROW, DIGIT_SIDE).swapaxes(1, 2)
    tiles = tiles.reshape(-1, DIGIT_SIDE, DIGIT_SIDE)[: len(targets)]
    store = ArrayStore(np.ascontiguousarray(tiles), ((0, "digits"),))
    images = Images(store, np.arange(len(targets)), targets, tuple("0123456789"), "train")
    fractions = parts.check_fractions(options.fractions or DIGITS_FRACTIONS)
    splits = parts.split_by_content(images, fractions, options.progress)
    return Dataset(source, "digits", splits, (parts.describe_fractions(fractions),))


def find_idx_files(names: list[str]) -> dict[tuple[str, str], str]:
    """Return the files of one dataset by split and content; uncompressed files take precedence."""
    files: dict[tuple[str, str], str] = {}
    prefixes: dict[str, str] = {}
    for name in sorted(names):
        if match := IDX_NAME.fullmatch(name):
            split = "train" if match["split"] == "train" else "test"
            prefixes.setdefault(match["before"], name)
            files.setdefault((split, match["what"]), name)
    if len(prefixes) > 1:
        listed = " and ".join(prefixes.values())
        raise ValueError(f"several IDX datasets in one folder, {listed}: give each its own folder")
    return files


def read_idx(root: str, options: parts.ReadOptions) -> Dataset:
    """Read a folder of IDX files."""
    files = find_idx_files(os.listdir(root))
    paths = {key: os.path.join(root, name) for key, name in files.items()}
    present = [split for split in ("train", "test") if any(key[0] == split for key in paths)]
    pairs = [read_idx_pair(root, paths, split) for split in present]
    images, notes = [images for images, _ in pairs], []
    if len({array.shape[1:] for array in images}) > 1:
        raise ValueError(f"{root} has different image sizes for training and testing")
    if any(name.startswith("emnist-") for name in files.values()):
        images = [array.swapaxes(1, 2) for array in images]
        notes.append("EMNIST images are stored transposed and were transposed back")
    classes, targets = encode_idx_labels([labels for _, labels in pairs])
    store = ArrayStore.from_files([(paths[s, "images"], array) for s, array in zip(present, images, strict=True)])
    return build_dataset(root, "idx", store, dict(zip(present, targets, strict=True)), classes, notes, options)


def read_idx_pair(root: str, paths: dict[tuple[str, str], str], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of a split."""
    for has, lacks in (("images", "labels"), ("labels", "images")):
        if (split, lacks) not in paths:
            raise ValueError(f"{root} has {os.path.basename(paths[split, has])}, but not its {lacks}")
    images, labels = read_idx_array(paths[split, "images"], 3), read_idx_array(paths[split, "labels"], 1)
    if len(images) != len(labels):
        raise ValueError(f"{paths[split, 'images']} has {len(images):,} images, but {len(labels):,} labels")
    if not images.size:
        raise ValueError(f"{paths[split, 'images']} has no images")
    return images, labels


def encode_idx_labels(labels: list[np.ndarray]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Return the classes, and the labels as indices into them."""
    if any(hashlib.sha256(array.tobytes()).hexdigest() in FASHION_MNIST_LABEL_HASHES for array in labels):
        return FASHION_MNIST_CLASSES, [array.astype(np.int64) for array in labels]
    values = np.unique(np.concatenate(labels))
    return tuple(map(str, values.tolist())), [np.searchsorted(values, array) for array in labels]


def read_idx_array(path: str, dimensions: int) -> np.ndarray:
    """Read an IDX file as an array of the shape in its header."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != UNSIGNED_BYTE:
                raise ValueError(f"{path} is not an IDX file of bytes: got {head.hex(' ')}, expected 00 00 08")
            if head[3] != dimensions:
                raise ValueError(f"{path} has {head[3]} dimensions, expected {dimensions}")
            sizes = file.read(4 * dimensions)
            shape = tuple(np.frombuffer(sizes, ">u4").tolist()) if len(sizes) == 4 * dimensions else ()
            size = math.prod(shape)
            if not shape or size > MAX_IDX_BYTES:
                raise ValueError(f"{path} has an invalid header ({size:,} bytes of data): download it again")
            data = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}): download it again") from None
    if len(data) != size:
        more = "more" if len(data) > size else f"{len(data):,}"
        raise ValueError(f"{path} should have {size:,} bytes of data, got {more}: download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


@dataclass(frozen=True)
class CifarLayout:
    """The layout of CIFAR-10 or CIFAR-100."""

    train_pattern: re.Pattern[str]
    test_file: str
    names_file: str
    label_bytes: int  # before the pixels; the last byte is the label used
    n_classes: int


CIFAR10 = CifarLayout(re.compile(r"data_batch_\d+\.bin"), "test_batch.bin", "batches.meta.txt", 1, 10)
CIFAR100 = CifarLayout(re.compile(r"train\.bin"), "test.bin", "fine_label_names.txt", 2, 100)


def detect_cifar(names: Iterable[str]) -> CifarLayout | None:
    """Return the layout of these files, or None."""
    names = set(names)
    if any(CIFAR10.train_pattern.fullmatch(name) for name in names):
        return CIFAR10
    return CIFAR100 if {"train.bin", CIFAR100.names_file} <= names else None


def read_cifar(source: str, options: parts.ReadOptions) -> Dataset:
    """Read a folder, or a .tar.gz, of CIFAR's binary files."""
    if os.path.isdir(source):
        files = {name: os.path.join(source, name) for name in os.listdir(source)}
        return make_cifar(source, files, lambda name: Path(files[name]).read_bytes(), options)
    contents = read_archive(source)
    return make_cifar(source, {name: f"{source}:{name}" for name in contents}, contents.__getitem__, options)


def read_archive(archive: str) -> dict[str, bytes]:
    """Read the files of a published archive into memory, without unpacking it to disk."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                name = os.path.basename(member.name)
                if file and name.endswith((".bin", ".txt")) and member.size <= 2**28:
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} is not a valid archive ({error}): download it again") from None
    if not detect_cifar(contents):
        raise ValueError(f"{archive} has no binary files of CIFAR-10 or CIFAR-100")
    return contents


def make_cifar(source: str, files: dict[str, str], read: Callable[[str], bytes], options: parts.ReadOptions) -> Dataset:
    """Build the dataset of CIFAR files; `files` are their names in messages, `read` returns the bytes of one."""
    layout = detect_cifar(files)
    assert layout is not None
    if layout.names_file not in files:
        raise ValueError(f"{source} has no {layout.names_file}, the names of the classes")
    lines = read(layout.names_file).decode("utf-8", "replace").splitlines()
    classes = tuple(line.strip() for line in lines if line.strip())
    if len(classes) != layout.n_classes or len(set(classes)) != layout.n_classes:
        raise ValueError(f"{files[layout.names_file]} has {len(set(classes))} class names, expected {layout.n_classes}")
    test_files = [layout.test_file] if layout.test_file in files else []
    arrays, targets = [], {}
    for split, batches in (("train", sorted(filter(layout.train_pattern.fullmatch, files))), ("test", test_files)):
        parsed = [parse_cifar_batch(read(name), files[name], layout) for name in batches]
        arrays += [(files[name], pixels) for name, (_, pixels) in zip(batches, parsed, strict=True)]
        if parsed:
            targets[split] = np.concatenate([labels for labels, _ in parsed])
    return build_dataset(source, "cifar", ArrayStore.from_files(arrays), targets, classes, [], options)


def parse_cifar_batch(data: bytes, name: str, layout: CifarLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return labels [n] and images [n, 32, 32, 3]."""
    size = layout.label_bytes + CIFAR_IMAGE_BYTES
    if not data or len(data) % size:
        raise ValueError(f"{name} has {len(data):,} bytes, not a multiple of {size:,}: download it again")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    targets = records[:, layout.label_bytes - 1].astype(np.int64)
    if targets.max() >= layout.n_classes:
        raise ValueError(f"{name} has the label {targets.max()} of {layout.n_classes} classes: download it again")
    return targets, records[:, layout.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

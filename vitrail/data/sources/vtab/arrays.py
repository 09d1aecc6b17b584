"""VTAB's published files and records; datasets in arrays: SVHN (.mat), dSprites (.npz), smallNORB, PatchCamelyon (HDF5)."""

import gzip
import os
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.dataset import Store
from vitrail.data.sources.arrays import ArrayStore, PixelStore
from vitrail.data.sources.splits import Fractions

DSPRITES_FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
NORB_FILES = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training", "test": "smallnorb-5x01235x9x18x6x2x96x96-testing"}
NORB_DTYPES = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}  # smallNORB's codes for bytes and integers
CAMELYON_FILE = "camelyonpatch_level_2_split_{}_{}.h5"
CAMELYON_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
IMAGES_PER_CHUNK = 4096  # images packed at a time


class VtabRecords(NamedTuple):
    """Images of a store with their labels and splits; the splits are None if the publisher has none."""

    store: Store
    labels: Sequence[str]
    splits: Sequence[str | None]
    class_order: tuple[str, ...]
    fractions: Fractions | None = None  # VTAB's, where the publisher has no splits
    notes: tuple[str, ...] = ()


def find_published(folder: Path, name: str) -> Path | None:
    """Return the path of a published file or folder, compressed or not, or None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def require_published(folder: Path, name: str) -> Path:
    """Return the path of a published file or folder, or raise an error."""
    path = find_published(folder, name)
    if path is None:
        raise ValueError(f"{folder} has no {name}: add it as published, or use class folders")
    return path


def number_classes(classes: int) -> tuple[str, ...]:
    """Return the class names 0, 1, 2 …"""
    return tuple(map(str, range(classes)))


def read_svhn(folder: Path) -> VtabRecords:
    """Read train_32x32.mat and test_32x32.mat: X is [32, 32, 3, n], y is 10 for the digit 0."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    arrays, labels, splits = [], [], []
    for split in ("train", "test"):
        path = require_published(folder, f"{split}_32x32.mat")
        try:
            variables = loadmat(path, variable_names=("X", "y"))
            pixels, digits = variables["X"].transpose(3, 0, 1, 2), variables["y"].reshape(-1) % 10
        except (MatReadError, KeyError, ValueError, TypeError, NotImplementedError, struct.error) as error:
            raise ValueError(f"{path} is not an SVHN file ({error}): download it again") from None
        arrays.append((str(path), pixels))
        labels += [str(digit) for digit in digits]
        splits += [split] * len(digits)
    return VtabRecords(ArrayStore.from_files(arrays), labels, splits, number_classes(10))


@dataclass(frozen=True, eq=False)
class PackedBitStore(PixelStore):
    """A store of black-and-white images, one bit per pixel."""

    packed: np.ndarray  # [n, H·W/8]
    size: tuple[int, int]
    origins: tuple[tuple[int, str], ...]

    def __len__(self) -> int:
        return len(self.packed)

    def image_pixels(self, item: int) -> np.ndarray:
        height, width = self.size
        return np.unpackbits(self.packed[item])[: height * width].reshape(height, width) * np.uint8(255)

    def data(self, item: int) -> bytes:
        return self.packed[item].tobytes()


def read_dsprites(folder: Path, latent: int, values: int) -> VtabRecords:
    """Read the .npz: `imgs` is [n, 64, 64] of 0 and 1, `latents_classes` [n, 6]. VTAB makes 16 classes of a latent."""
    path = require_published(folder, DSPRITES_FILE)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            classes = arrays["latents_classes"][:, latent]
        store = pack_images(path)
    except (KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a dSprites file ({error}): download it again") from None
    if len(classes) != len(store):
        raise ValueError(f"{path} has {len(store):,} images, but {len(classes):,} labels: download it again")
    labels = [str(label) for label in (classes // (values / 16)).astype(int)]
    return VtabRecords(store, labels, [None] * len(labels), number_classes(16), (0.8, 0.1, 0.1))


def pack_images(path: Path) -> PackedBitStore:
    """Read `imgs` in chunks and pack it to bits: as bytes it would take 3 GB."""
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        (count, height, width), fortran, kind = read(file)
        if fortran or kind != np.uint8:
            raise ValueError(f"imgs has the type {kind}, expected uint8")
        chunks = []
        for start in range(0, count, IMAGES_PER_CHUNK):
            rows = min(IMAGES_PER_CHUNK, count - start)
            data = file.read(rows * height * width)
            chunks.append(np.packbits(np.frombuffer(data, np.uint8).reshape(rows, -1) > 0, axis=1))
    return PackedBitStore(np.concatenate(chunks), (height, width), ((0, str(path)),))


def read_smallnorb(folder: Path, column: int, step: int) -> VtabRecords:
    """Read the matrices: `dat` is [n, 2, 96, 96], `info` [n, 4] of instance, elevation, azimuth (by 2) and lighting.

    The first camera's image is used. As in VTAB, half of the test images are the validation split.
    """
    arrays, labels, splits = [], [], []
    for split, name in NORB_FILES.items():
        path = require_published(folder, f"{name}-dat.mat")
        pixels, info = read_norb_matrix(path), read_norb_matrix(require_published(folder, f"{name}-info.mat"))
        if pixels.ndim != 4 or info.ndim != 2 or len(pixels) != len(info):
            raise ValueError(f"{path} has the shape {pixels.shape} and its info {info.shape}: download them again")
        arrays.append((str(path), pixels[:, 0]))
        labels += [str(value // step) for value in info[:, column]]
        splits += ["train" if split == "train" else ("validation", "test")[i % 2] for i in range(len(info))]
    return VtabRecords(ArrayStore.from_files(arrays), labels, splits, number_classes(18 if step == 2 else 9))


def read_norb_matrix(path: Path) -> np.ndarray:
    """Read a smallNORB matrix: type code, number of dimensions, sizes (at least three), data."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        data = file.read()
    kind, dimensions = struct.unpack_from("<II", data) if len(data) >= 8 else (0, 0)
    start = 8 + 4 * max(3, dimensions)
    if kind not in NORB_DTYPES or not 1 <= dimensions <= 8 or len(data) < start:
        raise ValueError(f"{path} is not a smallNORB matrix: download it again")
    shape = struct.unpack_from(f"<{dimensions}I", data, 8)
    if len(data) - start != NORB_DTYPES[kind].itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{path} has {len(data):,} bytes, which is not a matrix of {shape}: download it again")
    return np.frombuffer(data, NORB_DTYPES[kind], offset=start).reshape(shape)


@dataclass(frozen=True, eq=False)
class Hdf5Store(PixelStore):
    """A store of rows in HDF5 files, read on demand."""

    origins: tuple[tuple[int, str], ...]
    count: int

    def __len__(self) -> int:
        return self.count

    def image_pixels(self, item: int) -> np.ndarray:
        file, row = self.locate(item)
        return np.asarray(open_hdf5(file, os.getpid())["x"][row])


@lru_cache(maxsize=16)
def open_hdf5(file: str, process: int) -> Any:
    """Return an open file, one per process: HDF5 handles do not survive a fork."""
    try:
        import h5py  # type: ignore[import-not-found]
    except ImportError:
        raise ValueError(f"reading {file} needs h5py: pip install h5py, or use class folders") from None
    return h5py.File(file, "r")


def read_camelyon(folder: Path) -> VtabRecords:
    """Read six HDF5 files: x is [n, 96, 96, 3]; y is [n, 1, 1, 1], 1 for tumour tissue in the centre."""
    labels, splits, files = [], [], []
    for split, part in CAMELYON_SPLITS.items():
        x, y = (require_published(folder, CAMELYON_FILE.format(part, which)) for which in "xy")
        for path in (x, y):
            if path.suffix == ".gz":
                raise ValueError(f"{path} is compressed: decompress it with gunzip {path.name}")
        targets = np.asarray(open_hdf5(str(y), os.getpid())["y"]).reshape(-1)
        if len(targets) != len(open_hdf5(str(x), os.getpid())["x"]):
            raise ValueError(f"{x} and {y.name} have different numbers of rows: download them again")
        files.append((len(labels), str(x)))
        labels += [("normal", "tumour")[int(target)] for target in targets]
        splits += [split] * len(targets)
    return VtabRecords(Hdf5Store(tuple(files), len(labels)), labels, splits, ("normal", "tumour"))

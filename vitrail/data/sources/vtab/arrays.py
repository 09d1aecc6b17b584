"""Pictures that are published as arrays: SVHN's .mat files, dSprites' .npz, smallNORB's matrices, PatchCamelyon's HDF5."""

import os
import struct
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.sources.pixels import Pixels
from vitrail.data.sources.vtab.found import Found, needed, numbered, opened

DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
NORB = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
KINDS = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}  # of smallNORB's matrices: bytes, and integers
CAMELYON = "camelyonpatch_level_2_split_{}_{}.h5"
PARTS = {"train": "train", "validation": "valid", "test": "test"}
AT_ONCE = 4096  # pictures that are packed in one go


def svhn(folder: Path) -> Found:
    """train_32x32.mat and test_32x32.mat: X is [32, 32, 3, n], y has 10 for the digit 0."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    images, labels, splits, origins = [], [], [], []
    for split in ("train", "test"):
        path = needed(folder, f"{split}_32x32.mat")
        try:
            held = loadmat(path, variable_names=("X", "y"))
            pixels, digits = held["X"].transpose(3, 0, 1, 2), held["y"].reshape(-1) % 10
        except (MatReadError, KeyError, ValueError, TypeError, NotImplementedError, struct.error) as error:
            raise ValueError(f"{path} is not SVHN's ({error}): get it again") from None
        origins.append((len(labels), str(path)))
        images.append(pixels)
        labels += [str(digit) for digit in digits]
        splits += [split] * len(digits)
    return Found(Pixels(np.ascontiguousarray(np.concatenate(images)), tuple(origins)), labels, splits, numbered(10))


@dataclass(frozen=True, eq=False)
class Bits:
    """A store of pictures in black and white, a bit for each pixel."""

    packed: np.ndarray  # [n, H·W/8]
    size: tuple[int, int]
    file: str

    def __len__(self) -> int:
        return len(self.packed)

    def name(self, item: int) -> str:
        return f"{self.file}[{item}]"

    def open(self, item: int) -> Image.Image:
        height, width = self.size
        pixels = np.unpackbits(self.packed[item])[: height * width].reshape(height, width)
        return Image.fromarray(pixels * np.uint8(255))

    def data(self, item: int) -> bytes:
        return self.packed[item].tobytes()

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None


def dsprites(folder: Path, latent: int, values: int) -> Found:
    """The .npz: `imgs` is [n, 64, 64] of 0 and 1, `latents_classes` [n, 6]. VTAB makes 16 classes of a latent's values."""
    path = needed(folder, DSPRITES)
    try:
        with np.load(path, allow_pickle=False) as held:
            classes = held["latents_classes"][:, latent]
        store = packed(path)
    except (KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not dSprites' ({error}): get it again") from None
    if len(classes) != len(store):
        raise ValueError(f"{path} has {len(store):,} pictures and {len(classes):,} labels: get it again")
    labels = [str(label) for label in (classes // (values / 16)).astype(int)]
    return Found(store, labels, [None] * len(labels), numbered(16), (0.8, 0.1, 0.1))


def packed(path: Path) -> Bits:
    """`imgs` as bits, read part by part: as bytes they would be three gigabytes."""
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        (count, height, width), fortran, kind = read(file)
        if fortran or kind != np.uint8:
            raise ValueError(f"imgs is of {kind}")
        made = []
        for start in range(0, count, AT_ONCE):
            some = min(AT_ONCE, count - start)
            data = file.read(some * height * width)
            made.append(np.packbits(np.frombuffer(data, np.uint8).reshape(some, -1) > 0, axis=1))
    return Bits(np.concatenate(made), (height, width), str(path))


def smallnorb(folder: Path, column: int, step: int) -> Found:
    """Its matrices: `dat` is [n, 2, 96, 96], `info` [n, 4] of instance, elevation, azimuth (by 2) and lighting.

    The picture of the first camera counts. As in VTAB half of the test pictures are there to validate on.
    """
    images, labels, splits, origins = [], [], [], []
    for split, name in NORB.items():
        path = needed(folder, f"{name}-dat.mat")
        pixels, info = matrix(path), matrix(needed(folder, f"{name}-info.mat"))
        if pixels.ndim != 4 or info.ndim != 2 or len(pixels) != len(info):
            raise ValueError(f"{path} has {pixels.shape} and its info {info.shape}: get them again")
        origins.append((len(labels), str(path)))
        images.append(pixels[:, 0])
        labels += [str(value // step) for value in info[:, column]]
        splits += ["train" if split == "train" else ("validation", "test")[place % 2] for place in range(len(info))]
    classes = 18 if step == 2 else 9
    return Found(Pixels(np.concatenate(images), tuple(origins)), labels, splits, numbered(classes))


def matrix(path: Path) -> np.ndarray:
    """A matrix in smallNORB's own form: a number that tells its kind, how many dimensions, at least three of them, and all."""
    with opened(path) as file:
        data = file.read()
    kind, dimensions = struct.unpack_from("<II", data) if len(data) >= 8 else (0, 0)
    start = 8 + 4 * max(3, dimensions)
    if kind not in KINDS or not 1 <= dimensions <= 8 or len(data) < start:
        raise ValueError(f"{path} is no matrix of smallNORB: get it again")
    shape = struct.unpack_from(f"<{dimensions}I", data, 8)
    if len(data) - start != KINDS[kind].itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{path} has {len(data):,} bytes, which is not a matrix of {shape}: get it again")
    return np.frombuffer(data, KINDS[kind], offset=start).reshape(shape)


@dataclass(frozen=True, eq=False)
class Rows:
    """A store of rows in HDF5 files, each read when it is asked for."""

    files: tuple[tuple[int, str], ...]  # where each begins
    count: int

    def __len__(self) -> int:
        return self.count

    def place(self, item: int) -> tuple[str, int]:
        """The file of a picture, and its row."""
        start, file = next((start, file) for start, file in reversed(self.files) if start <= item)
        return file, item - start

    def name(self, item: int) -> str:
        file, row = self.place(item)
        return f"{file}[{row}]"

    def pixels(self, item: int) -> np.ndarray:
        file, row = self.place(item)
        return np.asarray(hdf5(file, os.getpid())["x"][row])

    def open(self, item: int) -> Image.Image:
        return Image.fromarray(self.pixels(item))

    def data(self, item: int) -> bytes:
        return self.pixels(item).tobytes()

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None


@lru_cache(maxsize=16)
def hdf5(file: str, process: int) -> Any:
    """An open file, one for each process: a copy of another's does not read."""
    try:
        import h5py  # type: ignore[import-not-found]
    except ImportError:
        raise ValueError(
            f"{file} needs h5py to be read: pip install h5py, or put the pictures in a folder for each class"
        ) from None
    return h5py.File(file, "r")


def camelyon(folder: Path) -> Found:
    """Six HDF5 files: x is [n, 96, 96, 3], y [n, 1, 1, 1], 1 for a patch with tumour in its middle."""
    labels, splits, files = [], [], []
    for split, part in PARTS.items():
        x, y = (needed(folder, CAMELYON.format(part, which)) for which in "xy")
        for path in (x, y):
            if path.suffix == ".gz":
                raise ValueError(f"{path} is packed: unpack it first, gunzip {path.name}")
        targets = np.asarray(hdf5(str(y), os.getpid())["y"]).reshape(-1)
        if len(targets) != len(hdf5(str(x), os.getpid())["x"]):
            raise ValueError(f"{x} and {y.name} do not have as many rows: get them again")
        files.append((len(labels), str(x)))
        labels += [("normal", "tumour")[int(target)] for target in targets]
        splits += [split] * len(targets)
    return Found(Rows(tuple(files), len(labels)), labels, splits, ("normal", "tumour"))

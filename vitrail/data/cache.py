"""Files of model outputs: one fixed-size record per image, found by the image's key.

The file starts with a header of JSON that describes the records; records follow in the order of writing. It only grows:
a crash leaves whole records and at most one partial record, which the next writer truncates. The key of an image is a hash
of its path, size and modification time, or of its pixels if it has no file; the last record of a key counts.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.dataset import Images
from vitrail.data.video import first_frame
from vitrail.utils.files import lock_file

HEADER_BYTES = 1024
KEY_BYTES, CHECKSUM_BYTES = 16, 8  # bytes
RECORD_PREFIX = [("key", f"V{KEY_BYTES}"), ("seal", f"V{CHECKSUM_BYTES}")]  # first fields of every record
TRANSFORM_VALUES = 6  # elements of a 2 × 3 affine transform


def compute_image_key(images: Images, index: int) -> bytes:
    """Return the key of an image, 16 bytes."""
    store, item = images.store, int(images.items[index])
    stamp = store.stamp(item)
    if stamp is None:
        with store.open(item) as opened:  # equal bytes at another width are another image
            image = first_frame(opened)
            shape = f"{image.mode} {image.size}\0".encode()
        return hashlib.blake2b(shape + store.data(item), digest_size=KEY_BYTES).digest()
    named = f"{images.absolute_name(index)}\0{stamp[0]}\0{stamp[1]}"
    return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def encode_header(metadata: dict[str, Any]) -> bytes:
    """Return the header of a file with this metadata."""
    return json.dumps(metadata).encode().ljust(HEADER_BYTES - 1) + b"\n"


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Return the metadata of a file, or None if the file is missing or not a record file."""
    try:
        with path.open("rb") as file:
            metadata = json.loads(file.read(HEADER_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return metadata if isinstance(metadata, dict) else None


class RecordFile:
    """An append-only file of records. `dtype` starts with RECORD_PREFIX."""

    def __init__(self, path: Path, metadata: dict[str, Any], dtype: np.dtype) -> None:
        self.path, self.dtype, self.header = path, dtype, encode_header(metadata)

    def is_compatible(self) -> bool:
        """Return True if the file has the same metadata, or has no header yet."""
        if not self.path.is_file() or self.path.stat().st_size < HEADER_BYTES:
            return True
        with self.path.open("rb") as file:
            return file.read(HEADER_BYTES) == self.header

    def open_records(self) -> np.ndarray:
        """Return all records as a memory map."""
        n_bytes = self.path.stat().st_size if self.path.is_file() else 0
        count = max(0, n_bytes - HEADER_BYTES) // self.dtype.itemsize
        if not count:
            return np.zeros(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", HEADER_BYTES, (count,))

    def append(self, keys: Sequence[bytes], **fields: Any) -> None:
        """Append the records of more images."""
        records = np.zeros(len(keys), self.dtype)
        for row, key in enumerate(keys):
            records["key"][row] = np.void(key)
        for name, values in fields.items():
            records[name] = values
        for row, seal in enumerate(self.compute_checksums(records)):
            records["seal"][row] = np.void(seal)
        with open(self.path, "ab") as file, lock_file(file):
            there = file.seek(0, os.SEEK_END)
            if there < HEADER_BYTES:
                file.truncate(0)
                file.write(self.header)
            else:
                file.truncate(there - (there - HEADER_BYTES) % self.dtype.itemsize)
            file.write(records.tobytes())

    def compute_checksums(self, records: np.ndarray) -> list[bytes]:
        """Return a checksum of each record: of the header, the key and the fields."""
        header_hash, data = hashlib.blake2b(self.header, digest_size=CHECKSUM_BYTES), records.tobytes()
        checksums = []
        for start in range(0, len(data), self.dtype.itemsize):
            checksum = header_hash.copy()
            checksum.update(data[start : start + KEY_BYTES])
            checksum.update(data[start + KEY_BYTES + CHECKSUM_BYTES : start + self.dtype.itemsize])
            checksums.append(checksum.digest())
        return checksums

    def verify_records(self, records: np.ndarray) -> np.ndarray:
        """Return which records have a valid checksum, [n]."""
        pairs = zip(records["seal"].tolist(), self.compute_checksums(records), strict=True)
        return np.array([stored == computed for stored, computed in pairs], dtype=bool)


def find_rows(records: np.ndarray, keys: Sequence[bytes | None]) -> np.ndarray:
    """Return the row of each key among the records, [n]; -1 if there is none."""
    known = {key: row for row, key in enumerate(records["key"].tolist())}
    return np.array([known.get(key, -1) for key in keys], dtype=np.int64)


@dataclass(frozen=True)
class MapShape:
    """The shape of a score map: its grid, the number of classes kept per cell, and the number of classes."""

    grid: tuple[int, ...]
    top: int
    classes: int

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            raise ValueError(f"a score map needs at least 1×1 cells, got {self.grid[0]}×{self.grid[1]}")
        if not 1 <= self.top <= self.classes:
            raise ValueError(f"classes kept per cell must be 1 to {self.classes}, got {self.top}")

    @property
    def record_dtype(self) -> np.dtype:
        """Return the dtype of one image's record."""
        cells = (*self.grid, self.top)
        number = "<u2" if self.classes <= 2**16 else "<i4"
        return np.dtype([*RECORD_PREFIX, ("size", "<i4", 2), ("classes", number, cells), ("scores", "<f2", cells)])

    @property
    def n_columns(self) -> int:
        """Return the number of target columns of an image's transform and map."""
        return TRANSFORM_VALUES + 2 * self.grid[0] * self.grid[1] * self.top

    def split_columns(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [B, columns] into transforms [B, 2, 3], classes and scores [B, h, w, k]."""
        transforms = columns[:, :TRANSFORM_VALUES]
        maps = columns[:, TRANSFORM_VALUES:].unflatten(1, (2, *self.grid, self.top))
        return transforms.unflatten(1, (2, 3)), maps[:, 0].long(), maps[:, 1]


@dataclass(frozen=True)
class ScoreMaps:
    """The score maps of one split."""

    file: "ScoreMapFile"
    records: np.ndarray  # memory map of the file
    rows: np.ndarray  # [n]: record of each image

    @property
    def shape(self) -> MapShape:
        return self.file.shape

    def __len__(self) -> int:
        return len(self.rows)

    def image_sizes(self, indices: np.ndarray) -> np.ndarray:
        """Return the height and width of these images, [B, 2]."""
        return self.records["size"][self.rows[indices]]

    def target_columns(self, indices: np.ndarray, transforms: np.ndarray) -> Tensor:
        """Return the target columns after the label, float32 [B, columns]."""
        records = self.records[self.rows[indices]]
        if not self.file.verify_records(records).all():
            raise ValueError(f"{self.file.path} is damaged: delete it to compute the maps again")
        parts = (transforms, records["classes"], records["scores"])
        return torch.from_numpy(np.concatenate([p.reshape(len(indices), -1).astype(np.float32) for p in parts], 1))


class ScoreMapFile(RecordFile):
    """A file of the score maps of one teacher."""

    def __init__(self, path: Path, shape: MapShape) -> None:
        super().__init__(path, {"vitrail": "score maps", **asdict(shape)}, shape.record_dtype)
        self.shape = shape
        if not self.is_compatible():
            with path.open("rb") as file:
                header = describe_header(file.read(HEADER_BYTES))
            raise ValueError(f"{path} holds {header}, expected {describe_header(self.header)}: use another file")

    def find_missing(self, images: Images) -> np.ndarray:
        """Return the indices of images without a map, int64 [m]."""
        return np.flatnonzero(self.find_maps(images).rows < 0)

    def find_maps(self, images: Images) -> ScoreMaps:
        """Return the maps in the file; the row of an image without a map is -1."""
        records = self.open_records()
        keys = [compute_image_key(images, index) for index in range(len(images))]
        return ScoreMaps(self, records, find_rows(records, keys))

    def load_maps(self, images: Images) -> ScoreMaps:
        """Return the maps of these images, or raise an error if any is missing."""
        maps = self.find_maps(images)
        if len(missing := np.flatnonzero(maps.rows < 0)):
            count = f"{len(missing):,} images, first {images.name(int(missing[0]))}"
            raise OSError(f"{self.path} has no map of {count}: unreadable or changed since")
        return maps


def describe_header(header: bytes) -> str:
    """Return the map shape in a header, in words."""
    try:
        metadata = json.loads(header)
        (h, w), top, classes = metadata["grid"], metadata["top"], metadata["classes"]
    except (ValueError, KeyError, TypeError):
        return "data other than score maps"
    return f"maps of {h}×{w} cells with the top {top} of {classes} classes"

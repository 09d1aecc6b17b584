"""A teacher's score maps on disk: for every cell of every picture the likeliest classes, and how likely they are.

The file begins with a line of JSON that says what the maps are; then come records of one length, one for each picture, in the
order in which they were computed. It only ever grows: a kill leaves whole records and at most a part of one, which is cut off
by the next who writes. A picture is known by its path, size and time of change, or by its bytes where it has no file of its own.

h·w cells, k classes kept of each.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from vitrail.data.pictures import Pictures
from vitrail.data.preprocessing import Pair

HEADER = 1024  # bytes
KEY = 16  # bytes that a picture is known by
PLACE = 6  # numbers of a place


@dataclass(frozen=True)
class MapShape:
    """What a map looks like: its cells, how many classes are kept of each, and of how many there are."""

    grid: Pair
    top: int
    classes: int

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            raise ValueError(f"score maps of {self.grid[0]}×{self.grid[1]} cells: there is at least one")
        if not 1 <= self.top <= self.classes:
            raise ValueError(f"the best {self.top} of {self.classes} classes of each cell: keep 1 to {self.classes}")

    @property
    def record(self) -> np.dtype:
        """One picture on disk."""
        cells = (*self.grid, self.top)
        number = "<u2" if self.classes <= 2**16 else "<i4"
        return np.dtype([("key", f"V{KEY}"), ("size", "<i4", 2), ("classes", number, cells), ("scores", "<f2", cells)])

    @property
    def columns(self) -> int:
        """Numbers that a picture's place and map take in a row of targets."""
        return PLACE + 2 * self.grid[0] * self.grid[1] * self.top

    def apart(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Places [B, 2, 3], classes and scores [B, h, w, k] from [B, columns]."""
        place, rest = columns[:, :PLACE], columns[:, PLACE:].unflatten(1, (2, *self.grid, self.top))
        return place.unflatten(1, (2, 3)), rest[:, 0].long(), rest[:, 1]


@dataclass(frozen=True)
class Maps:
    """The maps of one split's pictures."""

    shape: MapShape
    records: np.ndarray  # of the file, not read before they are asked for
    rows: np.ndarray  # [n]: which record is a picture's

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Height and width of these pictures, [B, 2]."""
        return self.records["size"][self.rows[indices]]

    def columns(self, indices: np.ndarray, places: np.ndarray) -> Tensor:
        """What follows the label in the targets of these pictures, float32 [B, columns]."""
        found = self.records[self.rows[indices]]
        if found["classes"].max(initial=0) >= self.shape.classes or not np.isfinite(found["scores"]).all():
            where = getattr(self.records, "filename", "a file of score maps")
            raise ValueError(f"{where} is damaged: delete it, and the maps are computed again")
        parts = (places, found["classes"], found["scores"])
        return torch.from_numpy(np.concatenate([p.reshape(len(indices), -1).astype(np.float32) for p in parts], 1))


class MapFile:
    """A file of maps, of one teacher."""

    def __init__(self, path: Path, shape: MapShape) -> None:
        self.path, self.shape = path, shape
        about = json.dumps({"vitrail": "score maps", **asdict(shape)}).encode()
        self.header = about.ljust(HEADER - 1) + b"\n"
        if path.is_file() and path.stat().st_size >= HEADER:
            with path.open("rb") as file:
                found = file.read(HEADER)
            if found != self.header:
                raise ValueError(
                    f"{path} holds {described(found)}, and {described(self.header)} are wanted: give another file"
                )

    def records(self) -> np.ndarray:
        """All that is there."""
        bytes_there = self.path.stat().st_size if self.path.is_file() else 0
        count = max(0, bytes_there - HEADER) // self.shape.record.itemsize
        if not count:
            return np.zeros(0, self.shape.record)
        return np.memmap(self.path, self.shape.record, "r", HEADER, (count,))

    def lacking(self, pictures: Pictures) -> np.ndarray:
        """The pictures that have no map yet, int64 [m]."""
        return np.flatnonzero(self.found(pictures) < 0)

    def found(self, pictures: Pictures) -> np.ndarray:
        """Which record is each picture's, [n]; -1 where there is none."""
        known = {key.tobytes(): row for row, key in enumerate(self.records()["key"])}
        return np.array([known.get(key_of(pictures, index), -1) for index in range(len(pictures))], dtype=np.int64)

    def maps(self, pictures: Pictures) -> Maps:
        """The maps of these pictures, all of which must be there."""
        rows = self.found(pictures)
        if (rows < 0).any():
            first = int(np.flatnonzero(rows < 0)[0])
            raise OSError(
                f"{self.path} has no map of {int((rows < 0).sum()):,} pictures, {pictures.name(first)} first: "
                "could it not be read, or was it changed since?"
            )
        return Maps(self.shape, self.records(), rows)

    def add(self, keys: Sequence[bytes], sizes: Sequence[Pair], classes: np.ndarray, scores: np.ndarray) -> None:
        """Maps of more pictures, [B, h, w, k]."""
        records = np.zeros(len(keys), self.shape.record)
        for row, key in enumerate(keys):
            records["key"][row] = np.void(key)
        records["size"], records["classes"], records["scores"] = sizes, classes, scores
        with open(self.path, "ab") as file, alone_with(file):
            there = file.seek(0, os.SEEK_END)
            if there < HEADER:
                file.truncate(0)
                file.write(self.header)
            else:
                file.truncate(there - (there - HEADER) % self.shape.record.itemsize)
            file.write(records.tobytes())


@contextmanager
def alone_with(file: BinaryIO) -> Iterator[None]:
    """Others who write to the same file wait; the system lets go of it when the file is closed."""
    with suppress(ImportError):  # not on Windows
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    yield
    file.flush()


def described(header: bytes) -> str:
    """What a file says of its maps, in words."""
    try:
        about = json.loads(header)
        (h, w), top, classes = about["grid"], about["top"], about["classes"]
    except (ValueError, KeyError, TypeError):
        return "something else than score maps"
    return f"maps of {h}×{w} cells with the best {top} of {classes} classes"


def key_of(pictures: Pictures, index: int) -> bytes:
    """What a picture is known by, 16 bytes."""
    store, item = pictures.store, int(pictures.items[index])
    stamp = store.stamp(item)
    if stamp is None:
        return hashlib.blake2b(store.data(item), digest_size=KEY).digest()
    named = f"{pictures.whole_name(index)}\0{stamp[0]}\0{stamp[1]}"
    return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=KEY).digest()

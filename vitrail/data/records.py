"""What a model said of pictures, on disk: a record of one length for each of them, found again by what the picture is known by.

The file begins with a line of JSON that says what the records are; then they follow in the order in which they were made. It
only ever grows: a kill leaves whole records and at most a part of one, which is cut off by the next who writes. A picture is
known by its path, size and time of change, or by its pixels where it has no file of its own; the last record of a picture counts.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.data.pictures import Pictures

HEADER = 1024  # bytes
KEY, SEAL = 16, 8  # bytes that a picture is known by; of a record's checksum
LEAD = [("key", f"V{KEY}"), ("seal", f"V{SEAL}")]  # how every record begins


def key_of(pictures: Pictures, index: int) -> bytes:
    """What a picture is known by, 16 bytes."""
    store, item = pictures.store, int(pictures.items[index])
    stamp = store.stamp(item)
    if stamp is None:
        with store.open(item) as image:  # the same bytes are another picture at another width
            shape = f"{image.mode} {image.size}\0".encode()
        return hashlib.blake2b(shape + store.data(item), digest_size=KEY).digest()
    named = f"{pictures.whole_name(index)}\0{stamp[0]}\0{stamp[1]}"
    return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=KEY).digest()


def header_of(about: dict[str, Any]) -> bytes:
    """The first bytes of a file whose records are this."""
    return json.dumps(about).encode().ljust(HEADER - 1) + b"\n"


def about_of(path: Path) -> dict[str, Any] | None:
    """What a file says of its records; None where there is none, or it says nothing of the kind."""
    try:
        with path.open("rb") as file:
            about = json.loads(file.read(HEADER))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return about if isinstance(about, dict) else None


class RecordFile:
    """A file of records of one kind. `record` begins with LEAD."""

    def __init__(self, path: Path, about: dict[str, Any], record: np.dtype) -> None:
        self.path, self.record, self.header = path, record, header_of(about)

    def ours(self) -> bool:
        """Whether the file says that it holds such records, or is yet to be begun."""
        if not self.path.is_file() or self.path.stat().st_size < HEADER:
            return True
        with self.path.open("rb") as file:
            return file.read(HEADER) == self.header

    def records(self) -> np.ndarray:
        """All that is there, not read before it is asked for."""
        bytes_there = self.path.stat().st_size if self.path.is_file() else 0
        count = max(0, bytes_there - HEADER) // self.record.itemsize
        if not count:
            return np.zeros(0, self.record)
        return np.memmap(self.path, self.record, "r", HEADER, (count,))

    def add(self, keys: Sequence[bytes], **fields: Any) -> None:
        """Records of more pictures."""
        records = np.zeros(len(keys), self.record)
        for row, key in enumerate(keys):
            records["key"][row] = np.void(key)
        for name, values in fields.items():
            records[name] = values
        for row, seal in enumerate(self.seals(records)):
            records["seal"][row] = np.void(seal)
        with open(self.path, "ab") as file, alone_with(file):
            there = file.seek(0, os.SEEK_END)
            if there < HEADER:
                file.truncate(0)
                file.write(self.header)
            else:
                file.truncate(there - (there - HEADER) % self.record.itemsize)
            file.write(records.tobytes())

    def seals(self, records: np.ndarray) -> list[bytes]:
        """What each record is sealed with: a checksum of its key, of what it says, and of what the file is said to hold."""
        begun, whole = hashlib.blake2b(self.header, digest_size=SEAL), records.tobytes()
        found = []
        for start in range(0, len(whole), self.record.itemsize):
            each = begun.copy()
            each.update(whole[start : start + KEY] + whole[start + KEY + SEAL : start + self.record.itemsize])
            found.append(each.digest())
        return found

    def whole(self, records: np.ndarray) -> np.ndarray:
        """Which records are as they were written, [n]."""
        sealed = zip(records["seal"].tolist(), self.seals(records), strict=True)
        return np.array([found == right for found, right in sealed], dtype=bool)


def rows_of(records: np.ndarray, keys: Sequence[bytes | None]) -> np.ndarray:
    """Which of these records is each picture's, [n]; -1 where there is none. Another look at the file may find others."""
    known = {key: row for row, key in enumerate(records["key"].tolist())}
    return np.array([known.get(key, -1) for key in keys], dtype=np.int64)


@contextmanager
def alone_with(file: BinaryIO) -> Iterator[None]:
    """Others who write to the same file wait; the system lets go of it when the file is closed."""
    with suppress(ImportError, OSError):  # not on Windows, nor on every network's disks: there checksums have to do
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    yield
    file.flush()

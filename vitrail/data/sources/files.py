"""Store of image files: a million paths in a few arrays, without an object per file."""

import os
import stat
from array import array
from collections.abc import Iterable

import numpy as np
from PIL import Image

from vitrail.data.decode import open_image


class FileStore:
    """A store of files: names in one byte string, folders in a list."""

    def __init__(self, folders: list[str], folder_ids: np.ndarray, names: bytes, ends: np.ndarray) -> None:
        self.folders = folders  # each folder once, as the user would write it
        self.folder_ids = folder_ids  # [n] int32: folder of each file
        self.names = names  # all file names, concatenated
        self.ends = ends  # [n] int64: end of each name

    @classmethod
    def from_paths(cls, paths: Iterable[str]) -> "FileStore":
        """Return the store of these paths, in order."""
        folders: dict[str, int] = {}
        folder_ids, names, ends = array("i"), bytearray(), array("q")
        for path in paths:
            folder, name = os.path.split(path)
            folder_ids.append(folders.setdefault(folder, len(folders)))
            names += os.fsencode(name)
            ends.append(len(names))
        return cls(list(folders), np.array(folder_ids, dtype=np.int32), bytes(names), np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, item: int) -> str:
        """Return the path of an image."""
        start = int(self.ends[item - 1]) if item else 0
        return os.path.join(self.folders[self.folder_ids[item]], os.fsdecode(self.names[start : self.ends[item]]))

    def name(self, item: int) -> str:
        return printable_path(self.path(item))

    def open(self, item: int) -> Image.Image:
        return open_image(self.regular_path(item), self.name(item))

    def data(self, item: int) -> bytes:
        with open(self.regular_path(item), "rb") as file:
            return file.read()

    def regular_path(self, item: int) -> str:
        """Return the path of a regular file; opening a pipe would block."""
        path = self.path(item)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{self.name(item)}: not a file, but a pipe, socket or device")
        return path

    def stamp(self, item: int) -> tuple[int, int] | None:
        status = os.stat(self.path(item))
        return status.st_size, status.st_mtime_ns


class FileListing:
    """A growing list of files, converted to a store at the end."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.folder_ids: list[np.ndarray] = []
        self.names = bytearray()
        self.ends: list[np.ndarray] = []
        self.count = 0

    def add(self, folder: str, names: Iterable[str]) -> int:
        """Add the files of one folder, and return their number."""
        encoded = os.fsencode("\0".join(names)).split(b"\0")
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64) + len(self.names)
        self.names += b"".join(encoded)
        self.ends.append(ends)
        self.folder_ids.append(np.full(len(encoded), len(self.folders), dtype=np.int32))
        self.folders.append(folder)
        self.count += len(encoded)
        return len(encoded)

    def to_store(self) -> FileStore:
        empty = np.zeros(0, dtype=np.int64)
        return FileStore(
            self.folders,
            np.concatenate([empty.astype(np.int32), *self.folder_ids]),
            bytes(self.names),
            np.concatenate([empty, *self.ends]),
        )


def printable_path(path: str) -> str:
    """Return a path that can be printed and written to JSON, whatever bytes it contains."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")

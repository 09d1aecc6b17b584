"""Picture files: a million paths in a few arrays, without an object for each."""

import os
import stat
from array import array
from collections.abc import Iterable

import numpy as np
from PIL import Image

from vitrail.data.opening import opened


class Files:
    """A store of files: names in one run of bytes, folders in a list."""

    def __init__(self, folders: list[str], folder: np.ndarray, names: bytes, ends: np.ndarray) -> None:
        self.folders = folders  # each folder once, as the user would write it
        self.folder = folder  # [n] int32: the folder of each file
        self.names = names  # all file names, one after another
        self.ends = ends  # [n] int64: where each name ends

    @classmethod
    def of(cls, paths: Iterable[str]) -> "Files":
        """The store of these paths, in their order."""
        folders: dict[str, int] = {}
        folder, names, ends = array("i"), bytearray(), array("q")
        for path in paths:
            above, name = os.path.split(path)
            folder.append(folders.setdefault(above, len(folders)))
            names += os.fsencode(name)
            ends.append(len(names))
        return cls(list(folders), np.array(folder, dtype=np.int32), bytes(names), np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, item: int) -> str:
        """What the operating system opens."""
        start = int(self.ends[item - 1]) if item else 0
        return os.path.join(self.folders[self.folder[item]], os.fsdecode(self.names[start : self.ends[item]]))

    def name(self, item: int) -> str:
        return printable(self.path(item))

    def open(self, item: int) -> Image.Image:
        return opened(self.regular(item), self.name(item))

    def data(self, item: int) -> bytes:
        with open(self.regular(item), "rb") as file:
            return file.read()

    def regular(self, item: int) -> str:
        """The path, if a file is behind it: opening a pipe would wait for ever."""
        path = self.path(item)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{self.name(item)}: no file, but a pipe, a socket or a device")
        return path

    def stamp(self, item: int) -> tuple[int, int] | None:
        found = os.stat(self.path(item))
        return found.st_size, found.st_mtime_ns


class Listing:
    """Files as they are found, to become a store."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.folder: list[np.ndarray] = []
        self.names = bytearray()
        self.ends: list[np.ndarray] = []
        self.count = 0

    def add(self, folder: str, names: Iterable[str]) -> int:
        """The files of one folder; how many they are."""
        coded = os.fsencode("\0".join(names)).split(b"\0")
        ends = np.cumsum([len(name) for name in coded], dtype=np.int64) + len(self.names)
        self.names += b"".join(coded)
        self.ends.append(ends)
        self.folder.append(np.full(len(coded), len(self.folders), dtype=np.int32))
        self.folders.append(folder)
        self.count += len(coded)
        return len(coded)

    def store(self) -> Files:
        none = np.zeros(0, dtype=np.int64)
        return Files(
            self.folders,
            np.concatenate([none.astype(np.int32), *self.folder]),
            bytes(self.names),
            np.concatenate([none, *self.ends]),
        )


def printable(path: str) -> str:
    """A path that can be printed and written to JSON, whatever bytes are in it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")

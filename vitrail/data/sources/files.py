"""Store of image files: a million paths in a few arrays, without an object per file."""

import os
import stat
from array import array
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

import numpy as np
from PIL import Image

from vitrail.data.decode import open_image


class FileStore:
    """A growing store of files: names in one byte string, folders in a list."""

    def __init__(self) -> None:
        self.folders: list[str] = []  # each folder once, as the user would write it
        self.folder_ids = array("i")  # [n]: folder of each file
        self.names = bytearray()  # all file names, concatenated
        self.ends = array("q")  # [n]: end of each name
        self.folder_numbers: dict[str, int] = {}

    @classmethod
    def from_paths(cls, paths: Iterable[str]) -> "FileStore":
        """Return the store of these paths, in order."""
        store = cls()
        for folder, files in groupby(map(os.path.split, paths), key=itemgetter(0)):
            store.add(folder, [name for _, name in files])
        return store

    def add(self, folder: str, names: Iterable[str]) -> int:
        """Add files of one folder and return their number."""
        encoded = [os.fsencode(name) for name in names]
        self.ends.frombytes((np.cumsum([len(name) for name in encoded], dtype=np.int64) + len(self.names)).tobytes())
        self.names += b"".join(encoded)
        number = self.folder_numbers.setdefault(folder, len(self.folders))
        if number == len(self.folders):
            self.folders.append(folder)
        self.folder_ids.extend([number] * len(encoded))
        return len(encoded)

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, item: int) -> str:
        """Return the path of an image."""
        name = bytes(self.names[self.ends[item - 1] if item else 0 : self.ends[item]])
        return os.path.join(self.folders[self.folder_ids[item]], os.fsdecode(name))

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


def printable_path(path: str) -> str:
    """Return a path that can be printed and written to JSON, whatever bytes it contains."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")

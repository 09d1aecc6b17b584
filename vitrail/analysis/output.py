"""Output directory of an inspection: it must be new, empty, or written by an earlier inspection."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.utils.files import atomic_write, make_directories, remove_empty_directories

RECORD_FILE = "inspect.json"


class OutputFolder:
    """Directory with atomically written files and a record of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[str] = []
        self.previous_files = list_previous_files(path)
        self.had_record = (path / RECORD_FILE).is_file()  # of an earlier inspection
        self.created_directories = make_directories(path)

    def write_file(self, name: str, data: bytes) -> Path:
        """Write a file; its name may contain a folder."""
        return self._write(name, lambda file: file.write(data))

    def save_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> Path:
        """Write arrays by name as a compressed .npz file."""
        return self._write(name, lambda file: np.savez_compressed(file, **arrays))  # pyright: ignore[reportArgumentType]

    def _write(self, name: str, write: Callable[[Any], Any]) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            write(file)
        self.written.append(name)
        return path

    def write_record(self, metadata: dict[str, Any], finished: bool = False) -> None:
        """Write the record of the files so far, so that an interrupted inspection can be repeated in the same directory.

        If finished, files that only an earlier inspection wrote are deleted.
        """
        stale = set(self.previous_files) - set(self.written)
        kept = set(self.written) if finished else {*self.written, *stale}
        text = json.dumps({**metadata, "finished": finished, "files": sorted(kept)}, indent=2, ensure_ascii=False)
        with atomic_write(self.path / RECORD_FILE) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        for name in stale if finished else ():
            path = self.path / name
            if path.is_file() and path.resolve().is_relative_to(self.path.resolve()):
                path.unlink()
                if path.parent != self.path and not any(path.parent.iterdir()):
                    path.parent.rmdir()

    def discard_if_empty(self) -> None:
        """Delete the record and the created directories if nothing else was written."""
        if not self.written and not self.had_record:
            (self.path / RECORD_FILE).unlink(missing_ok=True)
            remove_empty_directories(self.created_directories)


def list_previous_files(path: Path) -> list[str]:
    """Return the files of an earlier inspection; raise FileExistsError if the directory has other content."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file: give a directory to write to")
    if not path.is_dir() or not any(path.iterdir()):
        return []
    try:
        record = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
        return [name for name in record["files"] if isinstance(name, str)]
    except (OSError, ValueError, KeyError, TypeError):
        reason = "exists, is not empty and was not written by an inspection"
        raise FileExistsError(f"{path} {reason}: give another name, or empty it") from None

"""The directory that an inspection is written to: only an empty one, or one that an inspection wrote before."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.checkpoints.files.atomic import atomic
from vitrail.checkpoints.files.directory import make, unmake

RECORD = "inspect.json"


class Folder:
    """Files written whole, one after the other, and a record of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[str] = []
        self.before = earlier(path)
        self.recorded = (path / RECORD).is_file()  # by an earlier inspection
        self.new = make(path)

    def write(self, name: str, data: bytes) -> Path:
        """A file of this name, which may begin with the name of a folder."""
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic(place) as file:
            file.write(data)
        self.written.append(name)
        return place

    def save(self, name: str, arrays: dict[str, np.ndarray]) -> Path:
        """Arrays by name, as NumPy reads them."""
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic(place) as file:
            np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
        self.written.append(name)
        return place

    def record(self, about: dict[str, Any], done: bool = False) -> None:
        """Says what was written so far, so that an inspection that is stopped can be done again in the same place.

        When it is done, what an earlier one wrote here and this one did not is taken away.
        """
        stale = set(self.before) - set(self.written)
        kept = set(self.written) if done else {*self.written, *stale}
        text = json.dumps({**about, "finished": done, "files": sorted(kept)}, indent=2, ensure_ascii=False)
        with atomic(self.path / RECORD) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        for name in stale if done else ():
            place = self.path / name
            if place.is_file() and place.resolve().is_relative_to(self.path.resolve()):
                place.unlink()
                if place.parent != self.path and not any(place.parent.iterdir()):
                    place.parent.rmdir()

    def leave(self) -> None:
        """Takes the record away, and the directories that were made for it, where nothing else was written."""
        if not self.written and not self.recorded:
            (self.path / RECORD).unlink(missing_ok=True)
            unmake(self.new)


def earlier(path: Path) -> list[str]:
    """What an earlier inspection wrote here; an error where something else is."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file: give a directory to write to")
    if not path.is_dir() or not any(path.iterdir()):
        return []
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        files = [name for name in record["files"] if isinstance(name, str)]
    except (OSError, ValueError, KeyError, TypeError):
        raise FileExistsError(
            f"{path} is there, not empty and not written by an inspection: give another name, or empty it first"
        ) from None
    return files

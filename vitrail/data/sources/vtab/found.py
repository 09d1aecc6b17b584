"""What a reader of published files finds, and how it finds the files."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vitrail.data.pictures import Store
from vitrail.data.sources.parts import Fractions


@dataclass(frozen=True)
class Found:
    """Pictures of a store, each with its label and its split: None of all, where the publisher does not divide them."""

    store: Store
    labels: Sequence[str]
    splits: Sequence[str | None]
    order: tuple[str, ...]  # of the classes
    fractions: Fractions | None = None  # as VTAB divides what the publisher does not
    notes: tuple[str, ...] = ()


def lies(folder: Path, name: str) -> Path | None:
    """A file or folder by the name that it is published by, packed or not."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def needed(folder: Path, name: str) -> Path:
    """The same, which must be there."""
    path = lies(folder, name)
    if path is None:
        raise ValueError(f"{folder} lacks {name}: put it there as it is published, or give a folder for each class")
    return path


def opened(path: Path) -> IO[bytes]:
    """A file, unpacked on the way."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def numbered(classes: int) -> tuple[str, ...]:
    """Names of classes that have none: 0, 1, 2 …"""
    return tuple(map(str, range(classes)))


def step(thresholds: Sequence[float], value: float) -> int:
    """The last threshold that a value exceeds."""
    return max(place for place, threshold in enumerate(thresholds) if threshold < value)


def lines(path: Path) -> list[str]:
    """A text file's lines that say something."""
    said = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in said if line.strip() and not line.startswith("#")]

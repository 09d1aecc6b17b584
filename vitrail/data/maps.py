"""A teacher's score maps on disk: for every cell of every picture the likeliest classes, and how likely they are.

h·w cells, k classes kept of each.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.data.pictures import Pictures
from vitrail.data.preprocessing import Pair
from vitrail.data.records import HEADER, LEAD, RecordFile, key_of, rows_of

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
        return np.dtype([*LEAD, ("size", "<i4", 2), ("classes", number, cells), ("scores", "<f2", cells)])

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

    file: "MapFile"
    records: np.ndarray  # of the file, not read before they are asked for
    rows: np.ndarray  # [n]: which record is a picture's

    @property
    def shape(self) -> MapShape:
        return self.file.shape

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Height and width of these pictures, [B, 2]."""
        return self.records["size"][self.rows[indices]]

    def columns(self, indices: np.ndarray, places: np.ndarray) -> Tensor:
        """What follows the label in the targets of these pictures, float32 [B, columns]."""
        found = self.records[self.rows[indices]]
        if not self.file.whole(found).all():
            raise ValueError(f"{self.file.path} is damaged: delete it, and the maps are computed again")
        parts = (places, found["classes"], found["scores"])
        return torch.from_numpy(np.concatenate([p.reshape(len(indices), -1).astype(np.float32) for p in parts], 1))


class MapFile(RecordFile):
    """A file of maps, of one teacher."""

    def __init__(self, path: Path, shape: MapShape) -> None:
        super().__init__(path, {"vitrail": "score maps", **asdict(shape)}, shape.record)
        self.shape = shape
        if not self.ours():
            with path.open("rb") as file:
                found = described(file.read(HEADER))
            raise ValueError(f"{path} holds {found}, and {described(self.header)} are wanted: give another file")

    def lacking(self, pictures: Pictures) -> np.ndarray:
        """The pictures that have no map yet, int64 [m]."""
        return np.flatnonzero(self.found(pictures).rows < 0)

    def found(self, pictures: Pictures) -> Maps:
        """The maps that are there; a picture's row is -1 where there is none."""
        records = self.records()
        return Maps(self, records, rows_of(records, [key_of(pictures, index) for index in range(len(pictures))]))

    def maps(self, pictures: Pictures) -> Maps:
        """The maps of these pictures, all of which must be there."""
        found = self.found(pictures)
        rows = found.rows
        if (rows < 0).any():
            first = int(np.flatnonzero(rows < 0)[0])
            raise OSError(
                f"{self.path} has no map of {int((rows < 0).sum()):,} pictures, {pictures.name(first)} first: "
                "could it not be read, or was it changed since?"
            )
        return found


def described(header: bytes) -> str:
    """What a file says of its maps, in words."""
    try:
        about = json.loads(header)
        (h, w), top, classes = about["grid"], about["top"], about["classes"]
    except (ValueError, KeyError, TypeError):
        return "something else than score maps"
    return f"maps of {h}×{w} cells with the best {top} of {classes} classes"

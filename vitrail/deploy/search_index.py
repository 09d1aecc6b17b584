"""A folder of pictures as a model sees it, kept in a directory: what was looked at, by what, and the vectors.

`index.json` says which files belong to it. Each carries a checksum, and they are named anew whenever they change; `index.json`
is replaced last and in one step, so a reader has the old index or the new one.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.checkpoints.files.atomic import atomic
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.nearest import Exact, Graph, Recall, read_graph
from vitrail.deploy.runtime import Contract
from vitrail.models.written import dataclass_from_json, to_json

HEAD, FORM, VERSION = "index.json", "vitrail search index", 1
OURS = re.compile(r"\.?(pictures|vectors|graph)-[0-9a-f]{12}\.")  # a dot before it: what a killed writer left
AGAIN = "index the folder anew with vitrail search index"


@dataclass(frozen=True)
class Model:
    """Which model made the vectors, and how it is opened again."""

    where: str  # as the user wrote it; a path is absolute
    name: str
    checksum: str  # of its weights
    merge: int = 0
    precision: str = "fp32"
    size: list[int] | None = None
    assume: dict[str, str] = field(default_factory=dict)
    take: str | None = None


@dataclass(frozen=True, slots=True)  # a million of them
class Picture:
    """A picture, and what to know it again by."""

    path: str  # from the folder on
    size: int  # bytes
    changed: int  # nanoseconds

    @property
    def stamp(self) -> tuple[int, int]:
        return self.size, self.changed


@dataclass(frozen=True)
class Part:
    """A file of the index."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Index:
    """An index as it lies on the disk, checked."""

    directory: Path
    folder: Path
    model: Model
    preprocessing: Preprocessing
    pictures: tuple[Picture, ...]
    vectors: np.ndarray  # float32 [n, D], mapped; rows of length 1
    unreadable: dict[str, str] = field(default_factory=dict)  # left out: path and reason
    parts: Mapping[str, Part] = field(default_factory=dict)
    recall: Recall | None = None  # of the graph, where there is one

    def path(self, place: int) -> Path:
        return self.folder / self.pictures[place].path

    def nearest(self, exact: bool = False) -> Exact | Graph:
        """What finds neighbours: the graph where there is one, unless it is to be exact."""
        if exact or self.recall is None:
            return Exact(self.vectors)
        count, width = self.vectors.shape
        return read_graph(self.directory / self.parts["graph"].name, count, width, self.recall.looked)

    def refuse_other(self, contract: Contract, where: str) -> None:
        """An error where another model is asked than made the vectors: they would mean something else."""
        mine = (self.model.checksum, self.model.merge, self.model.precision, self.preprocessing)
        theirs = (contract.checksum, contract.merge, contract.precision, contract.preprocessing)
        kinds = ("weights", "token merging", "precision", "preprocessing")
        differ = [kind for kind, a, b in zip(kinds, mine, theirs, strict=True) if a != b]
        if differ:
            raise ValueError(
                f"{self.directory} was made by {self.model.name}, and {where} has other {' and '.join(differ)}: "
                f"ask with {self.model.where}, or index the folder by this model"
            )


def is_index(directory: Path) -> bool:
    return (directory / HEAD).is_file()


def read_index(directory: Path) -> Index:
    """The index in a directory, every byte of it as it was written, or an error that says what is wrong."""
    if not is_index(directory):
        what = "is no index of pictures" if directory.is_dir() else "is not there"
        raise ValueError(f"{directory} {what}: make one with vitrail search index MODEL FOLDER --out {directory}")
    try:
        head = json.loads((directory / HEAD).read_text(encoding="utf-8"))
        if head.get("form") != FORM or head.get("version") != VERSION:
            raise ValueError(f"it is {head.get('form')!r}, version {head.get('version')!r}")
        model = Model(**head["model"])
        preprocessing = dataclass_from_json(head["preprocessing"], Preprocessing, "preprocessing")
        parts = {str(key): Part(**value) for key, value in head["files"].items()}
        recall = None if head["recall"] is None else Recall(**head["recall"])
        folder, unreadable = Path(head["folder"]), {str(k): str(v) for k, v in head["unreadable"].items()}
        needed = {"pictures", "vectors"} | ({"graph"} if recall else set())
        if set(parts) != needed:
            raise ValueError(f"it names the files {', '.join(sorted(parts))}")
        for part in parts.values():
            _check(directory, part)
        lines = (directory / parts["pictures"].name).read_text(encoding="ascii").splitlines()
        pictures = tuple(Picture(*json.loads(line)) for line in lines)
        vectors = np.load(directory / parts["vectors"].name, mmap_mode="r", allow_pickle=False)
        if vectors.dtype != np.float32 or vectors.ndim != 2 or len(vectors) != len(pictures) or not len(vectors):
            raise ValueError(f"{len(pictures):,} pictures and vectors {vectors.dtype} {list(vectors.shape)}")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = f"no {error} in it" if isinstance(error, KeyError) else error
        raise ValueError(f"{directory} is a damaged index ({reason}): {AGAIN}") from error
    return Index(directory, folder, model, preprocessing, pictures, vectors, unreadable, parts, recall)


def _check(directory: Path, part: Part) -> None:
    if Path(part.name).name != part.name:
        raise ValueError(f"{part.name!r} is no name of a file in it")
    with (directory / part.name).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
            raise ValueError(f"{part.name} is not what was written")


class Writer:
    """Vectors as they come, row by row, into a NumPy file whose length is known at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.count, self.width = file, 0, 0

    def add(self, vectors: np.ndarray) -> None:
        """More rows, [b, D]."""
        if not self.count:
            self.width = vectors.shape[1]
            self._head()
        self.file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
        self.count += len(vectors)

    def finish(self) -> None:
        """Says at the beginning how many there are: NumPy leaves room for that."""
        end = self.file.tell()
        self.file.seek(0)
        self._head()
        self.file.seek(end)

    def _head(self) -> None:
        told = {"descr": "<f4", "fortran_order": False, "shape": (self.count, self.width)}
        np.lib.format.write_array_header_1_0(self.file, told)


@contextmanager
def new_part(directory: Path, kind: str, suffix: str) -> Iterator[tuple[BinaryIO, list[Part]]]:
    """A file to write, under a new name that nobody reads yet, and a list that has the part when it is written."""
    path, made = directory / f"{kind}-{os.urandom(6).hex()}.{suffix}", []
    with atomic(path) as file:
        yield file, made
    made.append(sealed(path))


def sealed(path: Path) -> Part:
    """A file that was written, with its checksum."""
    with path.open("rb") as file:
        return Part(path.name, hashlib.file_digest(file, "sha256").hexdigest())


def write_pictures(directory: Path, pictures: tuple[Picture, ...]) -> Part:
    """One line for each picture, whatever bytes are in its name."""
    with new_part(directory, "pictures", "jsonl") as (file, made):
        for each in pictures:
            file.write((json.dumps([each.path, each.size, each.changed]) + "\n").encode("ascii"))
    return made[0]


def write_head(index: Index) -> None:
    """The index takes effect, and files of earlier ones go."""
    told: dict[str, Any] = {
        "form": FORM,
        "version": VERSION,
        "folder": str(index.folder),
        "model": asdict(index.model),
        "preprocessing": to_json(index.preprocessing),
        "pictures": len(index.pictures),
        "unreadable": index.unreadable,
        "recall": None if index.recall is None else asdict(index.recall),
        "files": {key: asdict(part) for key, part in index.parts.items()},
    }
    with atomic(index.directory / HEAD) as file:
        file.write(json.dumps(told, indent=2).encode("ascii"))
    named = {part.name for part in index.parts.values()}
    for path in index.directory.iterdir():
        if OURS.match(path.name) and path.name not in named:
            path.unlink()

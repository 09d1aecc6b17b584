"""Search index on disk: the images of a folder, the model and the feature vectors.

`index.json` lists the files of the index with their checksums. Changed files get new names, and `index.json` is replaced last
and atomically, so a reader sees the old index or the new one.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import numpy as np

from vitrail.data.dataset import Media
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.deploy.search.neighbours import ExactSearch, HNSWGraph, Recall, read_graph
from vitrail.utils.files import atomic_write
from vitrail.utils.json import (
    dataclass_from_json,
    parse_json,
    read_json_file,
    to_json,
    untyped_from_json,
    value_from_json,
)

HEADER_FILE, FORMAT_NAME, VERSION = "index.json", "vitrail search index", 1
INDEX_FILE_PATTERN = re.compile(r"\.?(pictures|vectors|graph)-[0-9a-f]{12}\.")  # a dot: left by a killed writer
REINDEX_HINT = "build it again with vitrail search index"


@dataclass(frozen=True)
class IndexedModel:
    """The model of the vectors, and the options to open it again."""

    where: str  # as given by the user; paths are absolute
    name: str
    checksum: str  # of its weights
    merge: int = 0
    precision: str = "fp32"
    size: list[int] | None = None
    assume: dict[str, str] = field(default_factory=dict)
    take: str | None = None


@dataclass(frozen=True, slots=True)  # a million of them
class IndexedImage:
    """An image file; size and time detect changes."""

    path: str  # relative to the folder
    size: int  # bytes
    changed: int  # nanoseconds

    @property
    def stamp(self) -> tuple[int, int]:
        return self.size, self.changed


@dataclass(frozen=True)
class IndexFile:
    """A file of the index with its checksum."""

    name: str
    sha256: str


class IndexHeader(TypedDict):
    """The content of index.json."""

    form: str
    version: int
    folder: str
    model: dict[str, Any]
    preprocessing: dict[str, Any]
    unreadable: dict[str, str]
    recall: dict[str, Any] | None
    files: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class SearchIndex:
    """A verified index on disk."""

    directory: Path
    folder: Path
    model: IndexedModel
    preprocessing: Preprocessing
    images: tuple[IndexedImage, ...]
    vectors: np.ndarray  # float32 [n, D], memory-mapped; rows of length 1
    unreadable: dict[str, str] = field(default_factory=dict)  # skipped: path and reason
    files: Mapping[str, IndexFile] = field(default_factory=dict)
    recall: Recall | None = None  # of the graph; None without one

    @property
    def media(self) -> Media:
        """Return what was indexed: images, videos or sounds."""
        return self.preprocessing.media

    def image_path(self, row: int) -> Path:
        return self.folder / self.images[row].path

    def searcher(self, exact: bool = False) -> ExactSearch | HNSWGraph:
        """Return the graph search if there is a graph and `exact` is False, else the exact search."""
        if exact or self.recall is None:
            return ExactSearch(self.vectors)
        count, width = self.vectors.shape
        return read_graph(self.directory / self.files["graph"].name, count, width, self.recall.looked)

    def check_same_model(self, contract: ModelContract, where: str) -> None:
        """Raise ValueError if a model differs from the model of the vectors."""
        own = (self.model.checksum, self.model.merge, self.model.precision, self.preprocessing)
        other = (contract.checksum, contract.merge, contract.precision, contract.preprocessing)
        kinds = ("weights", "token merging", "precision", "preprocessing")
        differ = [kind for kind, a, b in zip(kinds, own, other, strict=True) if a != b]
        if differ:
            raise ValueError(
                f"{where} differs from {self.model.name}, the model of {self.directory}, in {' and '.join(differ)}: "
                f"use {self.model.where}, or index the folder with this model"
            )


def is_index(directory: Path) -> bool:
    return (directory / HEADER_FILE).is_file()


def read_index(directory: Path) -> SearchIndex:
    """Read and verify the index in a directory; raise ValueError if it is missing or damaged."""
    if not is_index(directory):
        problem = "is not a search index" if directory.is_dir() else "does not exist"
        raise ValueError(f"{directory} {problem}: run vitrail search index MODEL FOLDER --out {directory}")
    try:
        header = read_json_file(directory / HEADER_FILE, IndexHeader)
        if header.get("form") != FORMAT_NAME or header.get("version") != VERSION:
            raise ValueError(f"its format is {header.get('form')!r}, version {header.get('version')!r}")
        model = untyped_from_json(header["model"], IndexedModel, "model")
        preprocessing = dataclass_from_json(header["preprocessing"], Preprocessing, "preprocessing")
        parts = {key: untyped_from_json(value, IndexFile, key) for key, value in header["files"].items()}
        recall = None if header["recall"] is None else untyped_from_json(header["recall"], Recall, "recall")
        folder, unreadable = Path(header["folder"]), header["unreadable"]
        needed = {"pictures", "vectors"} | ({"graph"} if recall else set())
        if set(parts) != needed:
            raise ValueError(f"it lists the files {', '.join(sorted(parts))}")
        for part in parts.values():
            _check_checksum(directory, part)
        lines = (directory / parts["pictures"].name).read_text(encoding="ascii").splitlines()
        images = tuple(
            IndexedImage(*value_from_json(parse_json(line), tuple[str, int, int], "image")) for line in lines
        )
        vectors = np.load(directory / parts["vectors"].name, mmap_mode="r", allow_pickle=False)
        if vectors.dtype != np.float32 or vectors.ndim != 2 or len(vectors) != len(images) or not len(vectors):
            raise ValueError(f"{len(images):,} images, but vectors {vectors.dtype} {list(vectors.shape)}")
    except (ValueError, OSError) as error:
        raise ValueError(f"{directory} is a damaged search index ({error}): {REINDEX_HINT}") from error
    return SearchIndex(directory, folder, model, preprocessing, images, vectors, unreadable, parts, recall)


def _check_checksum(directory: Path, part: IndexFile) -> None:
    if Path(part.name).name != part.name:
        raise ValueError(f"invalid file name {part.name!r}")
    if checksum_file(directory / part.name) != part:
        raise ValueError(f"the checksum of {part.name} does not match")


class VectorWriter:
    """Writer of a NumPy file whose number of rows is known only at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.count, self.width = file, 0, 0

    def add(self, vectors: np.ndarray) -> None:
        """Write rows, [b, D]."""
        if not self.count:
            self.width = vectors.shape[1]
            self._write_header()
        self.file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
        self.count += len(vectors)

    def finish(self) -> None:
        """Write the final number of rows into the header, which NumPy pads for this."""
        end = self.file.tell()
        self.file.seek(0)
        self._write_header()
        self.file.seek(end)

    def _write_header(self) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.count, self.width)}
        np.lib.format.write_array_header_1_0(self.file, header)


def new_path(directory: Path, kind: str, suffix: str) -> Path:
    """Return the path of a new file of the index."""
    return directory / f"{kind}-{os.urandom(6).hex()}.{suffix}"


def checksum_file(path: Path) -> IndexFile:
    """Return a file with its checksum."""
    with path.open("rb") as file:
        return IndexFile(path.name, hashlib.file_digest(file, "sha256").hexdigest())


def write_images(directory: Path, images: tuple[IndexedImage, ...]) -> IndexFile:
    """Write one line of ASCII JSON per image; names may hold any bytes."""
    path = new_path(directory, "pictures", "jsonl")
    with atomic_write(path) as file:
        for image in images:
            file.write((json.dumps([image.path, image.size, image.changed]) + "\n").encode("ascii"))
    return checksum_file(path)


def write_header(index: SearchIndex) -> None:
    """Write `index.json`, which activates the index, and delete files of earlier versions."""
    header = {
        "form": FORMAT_NAME,
        "version": VERSION,
        "folder": str(index.folder),
        "model": asdict(index.model),
        "preprocessing": to_json(index.preprocessing),
        "pictures": len(index.images),
        "unreadable": index.unreadable,
        "recall": None if index.recall is None else asdict(index.recall),
        "files": {key: asdict(part) for key, part in index.files.items()},
    }
    with atomic_write(index.directory / HEADER_FILE) as file:
        file.write(json.dumps(header, indent=2).encode("ascii"))
    current = {part.name for part in index.files.values()}
    for path in index.directory.iterdir():
        if INDEX_FILE_PATTERN.match(path.name) and path.name not in current:
            path.unlink()

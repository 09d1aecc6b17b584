"""What a user wants answers for: files, folders, patterns, lists, tar shards, tables; one long row of pictures, in order.

Labels that lie beside the pictures are not looked at, and splits neither: everything is taken as it comes.
"""

import glob
import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitrail.data.pictures import Store
from vitrail.data.sources import manifest, names, parquet, parts, patterns, read, tar
from vitrail.data.sources.files import Files, printable
from vitrail.data.sources.folders import Walk, is_picture

LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Inputs:
    """Pictures of one store after another, in the order in which they were named."""

    stores: tuple[Store, ...]
    starts: np.ndarray  # [s + 1] int64: where each store's pictures begin, and the end
    items: tuple[np.ndarray | None, ...]  # which of a store's pictures, where not all in their order
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def place(self, index: int) -> tuple[Store, int]:
        """The store of a picture, and its number there."""
        which = int(np.searchsorted(self.starts, index, side="right")) - 1
        inside, items = index - int(self.starts[which]), self.items[which]
        return self.stores[which], inside if items is None else int(items[inside])

    def name(self, index: int) -> str:
        store, item = self.place(index)
        return store.name(item)

    def open(self, index: int) -> Image.Image:
        store, item = self.place(index)
        return store.open(item)

    def fingerprint(self, count: int) -> str:
        """The names of the first so many in their order, in short."""
        found = hashlib.sha256(str(count).encode())
        for store, items, start in zip(self.stores, self.items, self.starts.tolist(), strict=False):
            if start >= count:
                break
            if isinstance(store, Files) and items is None:  # a million names, without an object for each
                for part in (store.names, store.ends.tobytes(), store.folder.tobytes(), "\0".join(store.folders)):
                    found.update(os.fsencode(part) if isinstance(part, str) else part)
                continue
            for item in range(len(store)) if items is None else items.tolist():
                found.update(store.name(item).encode("utf-8", "surrogatepass") + b"\0")
        return found.hexdigest()


def gathered(paths: Sequence[str | os.PathLike[str]], progress: parts.Progress | None = None) -> Inputs:
    """All pictures that these paths stand for; a path that stands for none is an error."""
    stores: list[tuple[Store, np.ndarray | None]] = []
    notes: list[str] = []
    loose: list[str] = []  # files that follow each other are one store
    said = [os.fspath(path) for path in paths]
    for path in said:
        for each in alike(path):
            if os.path.isfile(each) and kind(each) == "picture":
                loose.append(each)
                continue
            if loose:
                stores.append((Files.of(loose), None))
                loose = []
            stores += found(path, each, notes, progress)
    if loose:
        stores.append((Files.of(loose), None))
    counts = [len(store) if items is None else len(items) for store, items in stores]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if not int(starts[-1]):
        raise ValueError(f"{', '.join(said)}: no pictures there")
    return Inputs(tuple(store for store, _ in stores), starts, tuple(items for _, items in stores), tuple(notes))


def alike(path: str) -> list[str]:
    """The files and folders of a pattern; anything else is itself. What is there under its own name is no pattern."""
    path = os.path.expanduser(path)
    if os.path.exists(path) or not patterns.is_pattern(path):
        return [path]
    if "**" in path:
        if matched := sorted(glob.glob(path, recursive=True)):
            return [each for each in matched if os.path.isfile(each)]
        raise FileNotFoundError(f"no file matches {path}")
    return patterns.expanded(path)


def kind(path: str) -> str:
    """What a file is taken for, by its name: what is nothing else is a picture, and may turn out to be none."""
    name = os.path.basename(path).lower()
    suffix = os.path.splitext(name)[1]
    if suffix in TABLES:
        return "csv"
    if suffix in LINES:
        return "lines"
    return suffix.removeprefix(".") if suffix in (".parquet", ".tar") else "picture"


def found(
    said: str, path: str, notes: list[str], progress: parts.Progress | None
) -> list[tuple[Store, np.ndarray | None]]:
    """The pictures of one path that is no picture itself."""
    if os.path.isdir(path):
        return below(path, notes, progress)
    if not os.path.exists(path) and said in names.NAMES:
        return undivided(said, progress)
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no {printable(path)}: give files, folders, patterns or lists of pictures")
    if not os.path.isfile(path):
        raise ValueError(f"{printable(path)} is neither a file nor a folder")
    opened: dict[str, Callable[[], Store]] = {
        "csv": lambda: listed(path, column_of_csv(path)),
        "lines": lambda: listed(path, column_of_lines(path)),
        "parquet": lambda: table(path),
        "tar": lambda: members(path),
    }
    return [(opened[kind(path)](), None)]


def below(folder: str, notes: list[str], progress: parts.Progress | None) -> list[tuple[Store, np.ndarray | None]]:
    """All pictures below a folder; of one that holds none, what else data lies in: shards, tables, arrays."""
    walk = Walk(progress=progress)
    walk.below(folder, set())
    if not walk.listing.count:
        try:
            return undivided(folder, progress)
        except ValueError:
            raise ValueError(f"{printable(folder)} holds no pictures") from None
    if skipped := len(walk.passed_over):
        first, why = walk.passed_over[0]
        notes.append(f"{skipped:,} other files in {printable(folder)} are passed over, {first} first ({why})")
    return [(walk.listing.store(), None)]


def undivided(where: str, progress: parts.Progress | None) -> list[tuple[Store, np.ndarray | None]]:
    """A data set with all its splits, one after another."""
    dataset = read(where, fractions=parts.UNDIVIDED, several=parts.UNLABELLED, progress=progress)
    return [(pictures.store, pictures.items) for pictures in dataset.splits.values() if len(pictures)]


def listed(path: str, column: Iterable[str]) -> Files:
    """The files of a list, whose paths are relative to it."""
    folder = os.path.dirname(path)
    store = Files.of(os.path.join(folder, each.replace("\\", "/") if "/" not in each else each) for each in column)
    if not len(store):
        raise ValueError(f"{printable(path)} lists no pictures")
    first = [store.path(item) for item in range(min(100, len(store)))]
    if not any(is_picture(each) or os.path.isfile(each) for each in first):
        raise ValueError(f"{printable(path)} lists no paths of pictures: {printable(first[0])} is none")
    return store


def column_of_csv(path: str) -> Iterable[str]:
    """The paths of a CSV or TSV."""
    header, rows = manifest.table(path, labelled=False)
    at = manifest.column(header, manifest.PATHS)
    assert at is not None
    for line, row in rows:
        if len(row) <= at or not row[at].strip():
            raise ValueError(f"{printable(path)}, line {line}: no path")
        yield row[at].strip()


def column_of_lines(path: str) -> Iterable[str]:
    """The paths of JSON lines: objects with one of the names that a path's column may have."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                said = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{printable(path)}, line {number}: not JSON ({error})") from None
            values = {str(key).casefold(): value for key, value in said.items()} if isinstance(said, dict) else {}
            value = next((values[name] for name in manifest.PATHS if name in values), None)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(
                    f'{printable(path)}, line {number}: no path; a line is {{"path": "cat.jpg"}} for example'
                )
            yield value.strip()


def table(path: str) -> Store:
    """The pictures in a Parquet file, or those that it lists."""
    with parquet.opened_table(path) as opened:
        schema = opened.schema_arrow
        column = parquet.pictures_in(schema)
        if column is not None:
            counts = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
            firsts = np.cumsum([0, *counts], dtype=np.int64)
            groups = [(int(firsts[group]), 0, group) for group, count in enumerate(counts) if count]
            store = parquet.Rows([path], column, np.array(groups, dtype=np.int64).reshape(-1, 3))
            store.size = int(firsts[-1])
            return store
        at = manifest.column(schema.names, manifest.PATHS)
        if at is None:
            raise ValueError(
                f"{printable(path)} has neither a column of pictures nor one of paths: its columns are "
                f"{', '.join(schema.names)}"
            )
        values = opened.read(columns=[schema.names[at]]).column(0).to_pylist()
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{printable(path)}, row {row:,}: no path")
    return listed(path, values)


def members(shard: str) -> Store:
    """The pictures in a tar file, each by itself whatever else has its name."""
    index = tar.Index()
    with open(shard, "rb") as file:
        tar.compressed(file, shard)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    plain = member.isreg() and not member.issparse() and os.path.basename(member.name)[:1] != "."
                    if plain and is_picture(member.name):
                        index.add(0, (member.name, member.offset_data, member.size), tar.UNKNOWN)
                    archive.members = []  # pyright: ignore[reportAttributeAccessIssue] it would hold every header
                end = archive.offset
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"{printable(shard)} is not a whole tar file ({error}): get it again") from None
        file.seek(end)
        mark = file.read(512)
        if len(mark) < 512 or mark.strip(b"\0"):
            raise ValueError(f"{printable(shard)} was cut off or changed at byte {end:,}: get it again")
    if not index.ends:
        raise ValueError(f"{printable(shard)} holds no pictures")
    return index.store([shard])

"""Parquet: tables with the pictures inside, as Hugging Face publishes them, or manifests of paths."""

import io
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.opening import opened
from vitrail.data.pictures import Dataset
from vitrail.data.sources import manifest, parts
from vitrail.data.sources.files import printable
from vitrail.data.sources.gathered import Label, gathered, split_of

IMAGES = ("image", "img", "picture", "jpg", "png", "bytes")
LABELS = ("label", "labels", "fine_label", "class", "target", "category")
KEPT = 2**29  # bytes of row groups that a process keeps: the window that training mixes should fit


def library() -> Any:
    """pyarrow's reader, or an error that says how to get it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'vitrail[parquet]'") from None
    return pyarrow.parquet


class Rows:
    """A store of table rows. Row groups are read when one of their pictures is asked for, and the last few are kept."""

    def __init__(self, files: Sequence[str], column: str, groups: np.ndarray) -> None:
        self.files = list(files)
        self.column = column
        self.groups = groups  # [g, 3] int64: first item, file, number within the file
        self.size = 0
        self._process = -1

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")} | {"_process": -1}

    def __len__(self) -> int:
        return self.size

    def group(self, item: int) -> int:
        """The row group of a picture."""
        return int(np.searchsorted(self.groups[:, 0], item, side="right")) - 1

    def name(self, item: int) -> str:
        file = self.groups[self.group(item), 1]
        first = self.groups[np.searchsorted(self.groups[:, 1], file), 0]
        return f"{printable(self.files[file])}[{item - first}]"

    def data(self, item: int) -> bytes:
        if self._process != os.getpid():  # handles, locks and what is kept belong to one process
            self._lock = threading.Lock()
            self._kept: OrderedDict[int, Any] = OrderedDict()
            self._process = os.getpid()
        group = self.group(item)
        with self._lock:
            if group not in self._kept:
                self._kept[group] = self._read(group)
                while len(self._kept) > 1 and sum(column.nbytes for column in self._kept.values()) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(group)
            value = self._kept[group][item - int(self.groups[group, 0])].as_py()
        if isinstance(value, dict):
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise OSError(f"{self.name(item)}: the row holds no picture")
        return value

    def _read(self, group: int) -> Any:
        _, file, number = self.groups[group].tolist()
        path = self.files[file]
        try:
            with library().ParquetFile(path, memory_map=True) as table:
                return table.read_row_group(number, columns=[self.column], use_threads=False).column(self.column)
        except (ValueError, OSError) as error:
            raise OSError(f"{printable(path)}: row group {number} cannot be read ({first_line(error)})") from None

    def open(self, item: int) -> Image.Image:
        return opened(io.BytesIO(self.data(item)), self.name(item))

    def stamp(self, item: int) -> tuple[int, int] | None:
        found = os.stat(self.files[self.groups[self.group(item), 1]])
        return found.st_size, found.st_mtime_ns


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def read(
    where: str,
    files: Sequence[str],
    several: parts.Several,
    fractions: parts.Fractions | None,
    progress: parts.Progress | None,
) -> Dataset:
    """One table or the shards of one: by its columns a manifest, or pictures themselves."""
    schema = opened_table(files[0]).schema_arrow
    if column := pictures_in(schema):
        return embedded(where, files, column, several, fractions, progress)
    at, label = manifest.column(schema.names, manifest.PATHS), manifest.column(schema.names, manifest.LABELS)
    if at is None or (label is None and several != parts.UNLABELLED):
        raise ValueError(
            f"{files[0]} has neither a column of pictures nor path and label: its columns are {', '.join(schema.names)}"
        )
    if len(files) > 1:
        raise ValueError(f"{where} has several manifests, {files[0]} and {files[1]}: give one of them")
    return list_of_paths(files[0], schema, at, label, several, fractions, progress)


def opened_table(path: str) -> Any:
    """A Parquet file of which the end, where everything is said, has been read."""
    try:
        return library().ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise
    except (ValueError, OSError) as error:
        if "vitrail[parquet]" in str(error):
            raise
        raise ValueError(f"{path} is not a whole Parquet file ({first_line(error)}): get it again") from None


def pictures_in(schema: Any) -> str | None:
    """The column that holds pictures: of bytes, or of a structure with bytes."""
    from pyarrow import types

    def holds(kind: Any) -> bool:
        if types.is_struct(kind):
            place = kind.get_field_index("bytes")
            return place >= 0 and holds(kind.field(place).type)
        return types.is_binary(kind) or types.is_large_binary(kind)

    fit = [name for name in schema.names if holds(schema.field(name).type)]
    named = [name for wanted in IMAGES for name in fit if name.casefold() == wanted]
    return named[0] if named else fit[0] if len(fit) == 1 else None


def embedded(
    where: str,
    files: Sequence[str],
    column: str,
    several: parts.Several,
    fractions: parts.Fractions | None,
    progress: parts.Progress | None,
) -> Dataset:
    """Tables with the pictures inside. Labels are read now, pictures when they are asked for."""
    labels: list[Label | None] = []
    splits: list[str | None] = []
    groups: list[tuple[int, int, int]] = []
    order: tuple[str, ...] | None = None
    for number, path in enumerate(files):
        with opened_table(path) as table:
            schema = table.schema_arrow
            at = manifest.column(schema.names, LABELS)
            if (at is None and several != parts.UNLABELLED) or column not in schema.names:
                lacks = "labels (label, class or target)" if at is None else f"pictures ({column})"
                raise ValueError(f"{path} has no column of {lacks}: its columns are {', '.join(schema.names)}")
            names = class_names(schema, schema.names[at]) if at is not None else None
            if number and names != order:
                raise ValueError(f"{path} names its classes differently from {files[0]}: read them apart")
            order = names
            for group in range(table.num_row_groups):
                groups.append((len(labels), number, group))
                if at is None:
                    labels += [parts.PICTURE] * table.metadata.row_group(group).num_rows
                    continue
                values = table.read_row_group(group, columns=[schema.names[at]], use_threads=False).column(0)
                labels += [label_of(value, names, path) for value in values.to_pylist()]
            splits += [split_of(path)] * (len(labels) - len(splits))
    starts = np.array(groups, dtype=np.int64).reshape(-1, 3)
    starts = starts[np.diff(starts[:, 0], append=len(labels)) > 0]  # a row group may be empty
    store = Rows(files, column, starts)
    store.size = len(labels)
    shards = np.searchsorted(starts[:, 0], np.arange(len(labels)), side="right") - 1
    if several == parts.UNLABELLED and None in labels:
        labels, order = [parts.PICTURE] * len(labels), None
    kept = [row for row, label in enumerate(labels) if label is not None]
    notes = [f"{len(labels) - len(kept):,} rows without a label are not used"] if len(kept) < len(labels) else []
    said = [label for label in labels if label is not None]
    if several in (None, parts.UNLABELLED) and order and not any(isinstance(label, tuple) for label in said):
        several = False  # the schema names the classes, and a line in a name separates nothing
    return gathered(
        where,
        "parquet",
        store,
        manifest.separated(where, said, several),
        [splits[row] for row in kept],
        items=np.array(kept, dtype=np.int64),
        order=order,
        shards=shards[kept],
        fractions=fractions,
        progress=progress,
        notes=notes,
    )


def label_of(value: Any, names: Sequence[str] | None, path: str) -> Label | None:
    """A cell as a label: a number into the names, a name, or a list of either. Hugging Face writes -1 for none."""
    if isinstance(value, list):
        found = [label_of(each, names, path) for each in value]
        return tuple(each for each in found if isinstance(each, str))
    if value is None or value == "" or (isinstance(value, int) and value == -1):
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{path} has the label {value!r}: a label is a whole number, a name, or a list of them")
    if isinstance(value, int) and names:
        if not 0 <= value < len(names):
            raise ValueError(f"{path} has the label {value}, and its schema names {len(names)} classes")
        return names[value]
    return str(value)


def class_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """The names of a column's classes, from what Hugging Face's library writes into the schema."""
    written = (schema.metadata or {}).get(b"huggingface")
    try:
        said = json.loads(written)["info"]["features"][column] if written else None
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(said, list) and len(said) == 1:
        said = said[0]
    if isinstance(said, dict) and isinstance(said.get("feature"), dict):
        said = said["feature"]
    names = said.get("names") if isinstance(said, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        return None
    return tuple(names) or None


def list_of_paths(
    path: str,
    schema: Any,
    at: int,
    label: int | None,
    several: parts.Several,
    fractions: parts.Fractions | None,
    progress: parts.Progress | None,
) -> Dataset:
    """A Parquet manifest; its paths are relative to it."""
    split = manifest.column(schema.names, manifest.SPLIT)
    wanted = [schema.names[index] for index in (at, label, split) if index is not None]
    names = class_names(schema, schema.names[label]) if label is not None else None
    with opened_table(path) as table:
        columns = [column.to_pylist() for column in table.read(columns=wanted).select(wanted).columns]
    labels: list[Label | None] = [parts.PICTURE] * len(columns[0])
    if label is not None:
        labels = [label_of(value, names, path) for value in columns[1]]
    if several == parts.UNLABELLED and None in labels:
        labels = [parts.PICTURE] * len(labels)
    for row, value in enumerate(columns[0]):
        if not isinstance(value, str) or not value or labels[row] is None:
            raise ValueError(
                f"{path}, row {row + 1:,}: {'no label' if isinstance(value, str) and value else 'no path'}"
            )
    splits = (
        [manifest.part(str(said), f"{path}, row {row + 1:,}") for row, said in enumerate(columns[-1])]
        if split is not None
        else None
    )
    known = [each for each in labels if each is not None]
    return manifest.listed(
        path, columns[0], known, splits or [None] * len(labels), several, fractions, progress, wanted[0]
    )

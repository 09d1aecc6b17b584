"""CSV of labels: path, label, split and confidence, as `vitrail train` reads it; paths are relative to the file."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.labels import normalise_class_name
from vitrail.data.sources.manifest import (
    LABEL_COLUMNS,
    LABEL_SEPARATOR,
    PATH_COLUMNS,
    SPLIT_COLUMNS,
    find_column,
    parse_split,
    search_csv,
)
from vitrail.labelling.formats.table import LabelRow, LabelTable, build_table, relative_path, resolve_path
from vitrail.utils.files import atomic_write


def read_csv_rows(path: Path, columns: Sequence[Sequence[str]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line numbers and rows by column name in lower case; a row must name one of each group of columns."""

    def fits(header: Sequence[str]) -> bool:
        return all(find_column(header, names) is not None for names in columns)

    opened = search_csv(str(path), [fits])
    if opened is None:
        wanted = ",".join(names[0] for names in columns)
        raise ValueError(f"{path}: the first line must name the columns {wanted}; got {read_first_line(path)!r}")
    header, rows = opened
    names = [name.strip().casefold() for name in header]
    for line, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{path}, line {line}: {len(row)} cells, the header has {len(header)}")
        yield line, {name: cell.strip() for name, cell in zip(names, row, strict=True)}


def read_first_line(path: Path) -> str:
    """Return the beginning of a file, for a message."""
    with open(path, "rb") as file:
        return file.readline(200).decode("utf-8", "replace").strip()[:80]


def pick(row: dict[str, str], names: Iterable[str]) -> str:
    """Return the cell of the first of these columns that a row has."""
    return next((row[name] for name in names if name in row), "")


def parse_score(text: str, where: str) -> float | None:
    """Return a number from 0 to 1, or None for an empty cell."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"{where}: the confidence must be a number from 0 to 1, got {text[:24]!r}")
    return value


def read_csv_labels(path: Path) -> LabelTable:
    """Read a CSV with a column of paths and one of labels; several labels are joined by |."""
    rows = []
    for line, row in read_csv_rows(path, (PATH_COLUMNS, LABEL_COLUMNS)):
        where = f"{path}, line {line}"
        if not (name := pick(row, PATH_COLUMNS)):
            raise ValueError(f"{where}: no path")
        cells = (normalise_class_name(label) for label in pick(row, LABEL_COLUMNS).split(LABEL_SEPARATOR))
        split = pick(row, SPLIT_COLUMNS)
        rows.append(
            LabelRow(
                resolve_path(name, path.parent),
                tuple(label for label in cells if label),
                parse_split(split, where) if split else None,
                parse_score(row.get("confidence", ""), where),
            )
        )
    if not rows:
        raise ValueError(f"{path} lists no images")
    return build_table(rows)


def write_csv_labels(table: LabelTable, path: Path) -> list[Path]:
    """Write path and label, with split and confidence where a row has one."""
    has_split = any(row.split for row in table.rows)
    has_confidence = any(row.confidence is not None for row in table.rows)
    header = ["path", "label", *(["split"] if has_split else []), *(["confidence"] if has_confidence else [])]
    rows = []
    for row in table.rows:
        cells: list[Any] = [relative_path(row.path, path.parent), row.label]
        cells += [row.split or ""] if has_split else []
        cells += ["" if row.confidence is None else f"{row.confidence:.6f}"] if has_confidence else []
        rows.append(cells)
    write_csv(path, header, rows)
    return [path]


def check_replaceable(path: Path, header: Sequence[str]) -> None:
    """Raise ValueError if a table exists that has other columns, or labels that a person typed beside suggestions."""
    if path.is_dir():
        raise ValueError(f"out={str(path)!r} is a directory: give a file name")
    if not path.exists() or not path.stat().st_size:
        return
    opened = search_csv(str(path), [lambda names: tuple(names) == tuple(header)])
    if opened is None:
        raise ValueError(f"out={str(path)!r} exists and is another table: give another name")
    if {"label", "suggested_label"} <= set(header):
        typed = sum(bool(row[header.index("label")].strip()) for _, row in opened[1] if len(row) == len(header))
        if typed:
            raise ValueError(f"out={str(path)!r} has labels that you typed, {typed:,}: give another name")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV atomically; a name that is not UTF-8 cannot be written and is an error."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    try:
        data = text.getvalue().encode("utf-8")
    except UnicodeEncodeError as error:
        name = text.getvalue()[error.start - 20 : error.end].encode("utf-8", "backslashreplace").decode()
        raise ValueError(f"{os.path.basename(path)}: a file name is not UTF-8, {name!r}: rename it") from None
    with atomic_write(path) as file:
        file.write(data)

"""A list of pictures: CSV or Parquet with the columns path and label, and perhaps split."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from itertools import product

from vitrail.data.pictures import Dataset
from vitrail.data.sources import parts
from vitrail.data.sources.files import Files
from vitrail.data.sources.folders import is_picture
from vitrail.data.sources.gathered import Label, gathered

PATHS = ("path", "image", "file", "filename", "file_name", "filepath", "file_path", "image_path")
LABELS = ("label", "labels", "class", "classes", "class_name", "target", "targets", "category")
SPLIT = ("split", "subset", "set", "fold")
FOUND_BESIDE = ("metadata.csv", "labels.csv", "manifest.csv", "metadata.parquet", "labels.parquet", "manifest.parquet")
BETWEEN = "|"  # several labels


def column(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    """Which of the columns is one of these, whatever its case; the first of the wanted wins."""
    plain = [name.strip().casefold() for name in names]
    return next((plain.index(name) for name in wanted if name in plain), None)


def table(path: str, labelled: bool) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The header of a CSV and its rows with their line numbers; comma, semicolon or tab, whichever makes the columns."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start:,}): save it as CSV UTF-8"
        ) from None
    for delimiter, bare in [*product(",;\t", (False,)), *product("" if labelled else ",;\t", (True,))]:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        header = next(reader, []) if "\0" not in text else []
        if column(header, PATHS) is not None and (bare or column(header, LABELS) is not None):
            return header, ((reader.line_num, row) for row in reader if any(row))
    first = next(iter(text.splitlines()), "")
    raise ValueError(f"{path}: the first line must name the columns, path and label for example; it is {first[:80]!r}")


def read_csv(
    path: str, several: parts.Several, fractions: parts.Fractions | None, progress: parts.Progress | None
) -> Dataset:
    """A CSV manifest; its paths are relative to it."""
    header, rows = table(path, labelled=several != parts.UNLABELLED)
    at, label, split = (column(header, wanted) for wanted in (PATHS, LABELS, SPLIT))
    assert at is not None
    paths, labels, splits = [], [], []
    shared: dict[str, str] = {}  # a name that a million rows share is kept once
    try:
        for line, row in rows:
            if len(row) != len(header):
                raise ValueError(f"{path}, line {line}: {len(row)} cells, and the header names {len(header)}")
            if not row[at].strip():
                raise ValueError(f"{path}, line {line}: no path")
            paths.append(row[at].strip())
            said = row[label] if label is not None else ""
            labels.append(shared.setdefault(said, said))
            splits.append(part(row[split], f"{path}, line {line}") if split is not None else None)
    except csv.Error as error:
        raise ValueError(f"{path} is not readable as CSV: {error}") from None
    return listed(path, paths, labels, splits, several, fractions, progress, header[at])


def part(said: str, where: str) -> str:
    """The split that a row says it is of."""
    if found := parts.called(said):
        return found
    raise ValueError(f"{where}: the split {said!r} is none of train, validation and test")


def listed(
    manifest: str,
    paths: Sequence[str],
    labels: Sequence[Label],
    splits: Sequence[str | None],
    several: parts.Several,
    fractions: parts.Fractions | None,
    progress: parts.Progress | None,
    said: str,
) -> Dataset:
    """The dataset of some paths relative to a manifest, which is checked for being one of pictures."""
    folder = os.path.dirname(manifest)
    paths = [os.path.join(folder, path.replace("\\", "/") if "/" not in path else path) for path in paths]
    if not paths:
        raise ValueError(f"{manifest} lists no pictures")
    if not any(is_picture(path) or os.path.isfile(path) for path in paths[:100]):
        raise ValueError(f"{manifest}: the column {said} holds no paths of pictures; {paths[0]!r} is none")
    if "://" in paths[0]:
        raise ValueError(f"{manifest}: {paths[0]} is an address; only files on this machine are read")
    return gathered(
        manifest,
        "manifest",
        Files.of(paths),
        separated(manifest, labels, several),
        splits,
        fractions=fractions,
        progress=progress,
    )


def separated(manifest: str, labels: Sequence[Label], several: parts.Several) -> list[Label]:
    """Labels as they are, or taken apart at `|` where a picture may have several."""
    if several == parts.UNLABELLED:
        if not all(label if isinstance(label, tuple) else label.strip() for label in labels):
            return [parts.PICTURE] * len(labels)
        several = None
    if several is None:
        several = any(isinstance(label, tuple) or BETWEEN in label for label in labels)
    if several:
        known: dict[Label, tuple[str, ...]] = {}
        for label in labels:
            if label not in known:
                names = label.split(BETWEEN) if isinstance(label, str) else label
                known[label] = tuple(name.strip() for name in names if name.strip())
        return [known[label] for label in labels]
    for row, label in enumerate(labels):
        if isinstance(label, tuple) or not label.strip():
            what = "several labels" if isinstance(label, tuple) else "no label"
            raise ValueError(f"{manifest}: picture {row + 1:,} has {what}, and every picture needs exactly one")
    return list(labels)


def beside(folder: str, names: Sequence[str]) -> str | None:
    """The manifest of a folder that is nothing but a list and its pictures; None if there is none, or no such columns."""
    found = [name for name in names if name.casefold() in FOUND_BESIDE]
    if len(found) != 1:
        return None
    path = os.path.join(folder, found[0])
    if found[0].casefold().endswith(".csv"):
        try:
            table(path, labelled=True)
        except ValueError:  # a CSV of something else: then the folder is read for what else it may be
            return None
    return path

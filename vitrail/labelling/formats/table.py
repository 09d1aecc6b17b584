"""Labels of image files as rows, whatever file they come from."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.labels import normalise_class_name, sort_class_names


@dataclass(frozen=True)
class LabelRow:
    """An image file with its labels: none, one or several."""

    path: str  # absolute
    labels: tuple[str, ...] = ()
    split: str | None = None
    confidence: float | None = None  # of a predicted label; None: a person's

    @property
    def label(self) -> str:
        """Return the labels in one cell."""
        return "|".join(self.labels)


@dataclass(frozen=True)
class LabelTable:
    """Rows of labels with the names of all classes."""

    rows: tuple[LabelRow, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def build_table(
    rows: Iterable[LabelRow], classes: Iterable[str] | None = None, notes: Iterable[str] = ()
) -> LabelTable:
    """Return the table of these rows; without `classes`, those that occur, sorted."""
    rows = tuple(rows)
    found = {label for row in rows for label in row.labels}
    names = sort_class_names(found) if classes is None else tuple(classes)
    return LabelTable(rows, (*names, *sort_class_names(found - set(names))), tuple(notes))


def clean_label(value: object, where: str) -> str:
    """Return the name of a class; raise ValueError if it is no text, or empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: a label must be text, got {str(value)[:40]!r}")
    return normalise_class_name(value)


def resolve_path(name: str, folder: str | os.PathLike[str]) -> str:
    """Return the absolute path of a name that is relative to a folder."""
    return os.path.abspath(os.path.join(folder, name))


def relative_path(path: str, folder: str | os.PathLike[str]) -> str:
    """Return a path relative to a folder if the file is below it, with slashes, else the absolute path."""
    base = os.path.abspath(folder)
    if os.path.commonpath([base, path]) != base:
        return path
    return Path(os.path.relpath(path, base)).as_posix()

"""Files of labels of other projects, read and written: CSV, COCO, Label Studio, FiftyOne."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrail.data.sources import load_dataset
from vitrail.data.sources.splits import TRAIN_ONLY_FRACTIONS
from vitrail.labelling import FORMATS
from vitrail.labelling.formats import csv_table, fiftyone, label_studio
from vitrail.labelling.formats.coco import is_coco, read_coco_labels, write_coco_labels
from vitrail.labelling.formats.table import LabelRow, LabelTable, build_table
from vitrail.labelling.images import has_files

__all__ = ["FORMATS", "LabelRow", "LabelTable", "build_table", "read_labels", "write_labels"]

SAMPLES, LABELS = "samples.json", "labels.json"  # in the directories of FiftyOne


def read_labels(
    source: str | os.PathLike[str],
    form: str | None = None,
    *,
    root: Path | None = None,
    label_from: str | None = None,
) -> LabelTable:
    """Read a file or directory of labels, or any data source of image files; `form` is one of FORMATS [detected].

    `root` is Label Studio's document root.
    """
    path = Path(source).expanduser()
    if form is not None and form not in FORMATS:
        raise ValueError(f"unknown format {form!r}: use {', '.join(FORMATS)}")
    found = find_json(path, form)
    if found is not None:
        return read_json_labels(found, form, root)
    if path.is_file() and path.suffix.lower() in (".csv", ".tsv") and form in (None, "csv"):
        return csv_table.read_csv_labels(path)
    if form not in (None, "csv"):
        raise ValueError(f"{source} is no file of the format {form}: leave out the format to detect it")
    return read_dataset_labels(os.fspath(source), label_from)


def find_json(path: Path, form: str | None) -> Path | None:
    """Return the JSON file of a source; None if there is none."""
    if path.is_file():
        return path if path.suffix.lower() == ".json" else None
    names = {"fiftyone": (LABELS,), "fiftyone-dataset": (SAMPLES,), None: (SAMPLES, LABELS)}.get(form, ())
    return next((path / name for name in names if (path / name).is_file()), None)


def read_json_labels(path: Path, form: str | None, root: Path | None) -> LabelTable:
    """Read a JSON file in the format that its content has."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    readers: dict[str, tuple[Callable[[Any], bool], Callable[[], LabelTable]]] = {
        "coco": (is_coco, lambda: read_coco_labels(path)),
        "label-studio": (label_studio.is_label_studio, lambda: label_studio.read_label_studio(path, data, root)),
        "fiftyone": (fiftyone.is_fiftyone, lambda: fiftyone.read_fiftyone(path, data)),
        "fiftyone-dataset": (fiftyone.is_fiftyone_dataset, lambda: fiftyone.read_fiftyone_dataset(path, data)),
    }
    for name, (fits, read) in readers.items():
        if form in (None, name) and fits(data):
            return read()
    if form is not None:
        raise ValueError(f"{path} is no file of the format {form}: leave out the format to detect it")
    raise ValueError(f"{path} is neither COCO nor a file of Label Studio or FiftyOne: see vitrail label convert --help")


def read_dataset_labels(source: str, label_from: str | None = None) -> LabelTable:
    """Return the labels of a data source of image files, with one class per image or several."""
    dataset = load_dataset(source, label_from=label_from, fractions=TRAIN_ONLY_FRACTIONS)
    rows: list[LabelRow] = []
    for split, images in dataset.splits.items():
        if images.target_kind not in ("single", "multi"):
            raise ValueError(f"{source} has {images.target_kind}, not classes of images: they cannot be converted")
        if not has_files(images):
            raise ValueError(f"{source} has images inside other files: give a folder or a CSV of image files")
        for index in range(len(images)):
            target = images.targets[index]
            numbers = target.nonzero()[0] if images.is_multi_label else [target]
            labels = tuple(images.classes[int(number)] for number in numbers)
            only = len(dataset.splits) == 1 and split == "train"  # no splits of its own
            rows.append(LabelRow(os.path.abspath(images.name(index)), labels, None if only else split))
    return build_table(rows)


def write_labels(table: LabelTable, out: Path, form: str, *, root: Path | None = None) -> list[Path]:
    """Write a table in one of FORMATS; return the files or the directory."""
    if not table.rows:
        raise ValueError(f"{out} would be empty: there are no labels to write")
    if form == "csv":
        if out.suffix.lower() != ".csv":
            raise ValueError(f"{out}: the name of a table must end in .csv; for other files give form=")
        return csv_table.write_csv_labels(table, out)
    if form == "coco":
        return write_coco_labels(table, out)
    if form == "label-studio":
        return label_studio.write_label_studio(table, out, root)
    if form in ("fiftyone", "fiftyone-dataset"):
        if out.suffix:
            raise ValueError(f"{out}: the format {form} is a directory, give a name without a suffix")
        return (fiftyone.write_fiftyone if form == "fiftyone" else fiftyone.write_fiftyone_dataset)(table, out)
    raise ValueError(f"unknown format {form!r}: use {', '.join(FORMATS)}")

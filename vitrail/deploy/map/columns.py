"""Columns that colour a map: classes and splits of the data, predictions of the model, and those of a table."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np

from vitrail.data.dataset import SPLITS, Dataset, Images
from vitrail.data.sources import load_dataset
from vitrail.data.sources.files import file_media, printable_path
from vitrail.data.sources.manifest import PATH_COLUMNS, find_column, open_csv
from vitrail.data.sources.splits import TRAIN_ONLY_FRACTIONS
from vitrail.utils.progress import ProgressCallback

if TYPE_CHECKING:
    from vitrail.models.base import Model

CLASS, PREDICTION, CORRECTNESS, SPLIT, FOLDER = "class", "prediction", "correctness", "split", "folder"
CONFIDENCE, MARGIN = "confidence", "margin"
CORRECTNESS_VALUES = ("correct", "wrong")
MAX_VALUES = 20_000  # different texts of a column
MISSING = 65_535  # code of a point without a value
CLASSIFY_ROWS = 4096  # vectors classified at once


@dataclass(frozen=True)
class Column:
    """A value of every point: a text of a few, or a number."""

    name: str
    labels: tuple[str, ...] = ()  # of texts
    codes: np.ndarray | None = None  # uint16 [n]: indices into the labels, or MISSING
    numbers: np.ndarray | None = None  # float32 [n], NaN for a missing one

    def texts(self) -> list[str | None]:
        """Return the text of every point."""
        assert self.codes is not None
        return [None if code == MISSING else self.labels[code] for code in self.codes.tolist()]


def text_column(name: str, values: Sequence[str | None], order: Sequence[str] | None = None) -> Column:
    """Return a column of texts, in the given order of values or sorted; raise ValueError if too many differ."""
    found = Counter(value for value in values if value is not None)
    labels = [label for label in order if label in found] if order is not None else sorted(found)
    if len(labels) > MAX_VALUES:
        raise ValueError(f"column {name!r} has {len(labels):,} different texts, more than {MAX_VALUES:,}: give another")
    codes = {label: code for code, label in enumerate(labels)}
    return Column(
        name,
        tuple(labels),
        np.array([MISSING if value is None else codes[value] for value in values], dtype=np.uint16),
    )


def number_column(name: str, values: np.ndarray) -> Column:
    """Return a column of numbers; infinite ones count as missing."""
    numbers = np.asarray(values, dtype=np.float32)
    return Column(name, numbers=np.where(np.isfinite(numbers), numbers, np.float32("nan")))


# --- the data ---


def read_data_columns(
    paths: Sequence[str], names: Sequence[str], progress: ProgressCallback | None = None
) -> tuple[list[Column], list[str]]:
    """Return the classes and splits that datasets at these paths state for the named images, and notes; maybe none."""
    rows, notes, columns = {name: row for row, name in enumerate(names)}, [], []
    classes: list[str | None] = [None] * len(names)
    splits: list[str | None] = [None] * len(names)
    numbers: dict[str, np.ndarray] = {}
    order: dict[str, None] = {}
    for path in paths:
        if file_media(path) is not None and os.path.isfile(path):
            continue  # an image, not a dataset
        try:
            dataset = load_dataset(path, fractions=TRAIN_ONLY_FRACTIONS, progress=progress)
        except (ValueError, OSError) as error:
            notes.append(f"no classes in {path}: {str(error).splitlines()[0]}")
            continue
        for split, images in dataset.splits.items():
            found = [(index, rows[name]) for index in range(len(images)) if (name := images.name(index)) in rows]
            for index, row in found:
                splits[row] = split
                classes[row] = describe_target(images, index)
            order |= dict.fromkeys(images.classes if images.target_kind == "single" else ())
            if images.target_kind == "numbers":
                for number, target in enumerate(images.classes):
                    values = numbers.setdefault(target, np.full(len(names), np.nan, np.float32))
                    values[[row for _, row in found]] = images.targets[[index for index, _ in found], number]
        if len(dataset.splits) == 1 and not is_stated_split(dataset):
            splits = [None] * len(names)
    if any(value is not None for value in classes):
        columns.append(text_column(CLASS, classes, tuple(order) if set(filter(None, classes)) <= set(order) else None))
    columns += [number_column(name, values) for name, values in numbers.items()]
    if len(set(filter(None, splits))) > 1:
        columns.append(text_column(SPLIT, splits, SPLITS))
    return columns, notes


def is_stated_split(dataset: Dataset) -> bool:
    """Return True if a single split is the data's own, such as a folder named test."""
    return next(iter(dataset.splits)) != "train"


def describe_target(images: Images, index: int) -> str | None:
    """Return the class of an image, or its classes; None for masks, numbers and captions."""
    if images.target_kind == "single":
        return images.classes[int(images.targets[index])]
    if images.target_kind == "multi":
        return " + ".join(images.classes[k] for k in np.flatnonzero(images.targets[index])) or "none"
    return None


def folder_column(names: Sequence[str]) -> Column | None:
    """Return the folders of the images, by name; None if there is only one."""
    folders = [PurePath(name).parent.as_posix() for name in names]
    if len(set(folders)) < 2 or len(set(folders)) > MAX_VALUES:
        return None
    common = (
        os.path.commonpath(folders)
        if all(f.startswith("/") for f in folders) or not any(f.startswith("/") for f in folders)
        else ""
    )
    return text_column(FOLDER, [os.path.relpath(folder, common or ".") for folder in folders])


# --- the model ---


def read_model_columns(
    where: str,
    vectors: np.ndarray,  # [n, D], as the model computed them
    classes: Column | None = None,
    assume: Mapping[str, str] | None = None,
    take: str | None = None,
) -> tuple[list[Column], list[str]]:
    """Return the predictions that a checkpoint's classifier makes of these features; of other models none, and the reason."""
    from vitrail.deploy.runtimes.exported import is_exported
    from vitrail.deploy.runtimes.open import open_checkpoint

    if is_exported(where):
        return [], ["no predictions, because the model is an exported file: join those of vitrail predict with --table"]
    deployed = open_checkpoint(where, assume=assume, take=take)
    model, contract = deployed.model, deployed.contract
    if (
        model is None
        or contract.labels is None
        or contract.activation != "softmax"
        or not contract.task.has_image_classes
    ):
        return [], []
    return predict_columns(model, contract.labels, vectors, classes), []


def predict_columns(
    model: "Model", labels: Sequence[str], vectors: np.ndarray, classes: Column | None = None
) -> list[Column]:
    """Return prediction, confidence, margin and correctness of features [n, D], from the model's classifier.

    The margin is the probability of the image's class minus the largest of another class: negative for an image that the model
    puts into another class, the suspicion of a wrong label. Without known classes it is that of the two most probable classes.
    """
    import torch

    codes, is_known = match_classes(labels, classes, len(vectors))
    predicted = np.empty(len(vectors), np.int64)
    confidence, margin = np.empty(len(vectors), np.float32), np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), CLASSIFY_ROWS):
        part = slice(start, start + CLASSIFY_ROWS)
        with torch.inference_mode():
            features = torch.from_numpy(np.ascontiguousarray(vectors[part], dtype=np.float32))
            probabilities = model.classify_embedded(features).softmax(-1).numpy()
        predicted[part], confidence[part] = probabilities.argmax(1), probabilities.max(1)
        own = codes[part] if is_known else predicted[part]
        rows = np.arange(len(own))
        at_own = probabilities[rows, own].copy()
        probabilities[rows, own] = -1
        margin[part] = at_own - probabilities.max(1) if len(labels) > 1 else at_own
    texts = [labels[k] for k in predicted.tolist()]
    columns = [text_column(PREDICTION, texts, labels)]
    if is_known and classes is not None:
        columns.append(correctness_column(classes, columns[0]))
        margin = np.where(codes >= 0, margin, np.float32("nan"))
    return [*columns, number_column(MARGIN, margin), number_column(CONFIDENCE, confidence)]


def match_classes(labels: Sequence[str], classes: Column | None, count: int) -> tuple[np.ndarray, bool]:
    """Return the model's class of each point, and True if the model knows all classes of the data."""
    known = {label: code for code, label in enumerate(labels)}
    if classes is None or not classes.labels or not all(label in known for label in classes.labels):
        return np.full(count, -1), False
    return np.array([-1 if text is None else known[text] for text in classes.texts()], dtype=np.int64), True


def correctness_column(classes: Column, predictions: Column) -> Column:
    """Return whether the prediction of each point is its class."""
    pairs = zip(classes.texts(), predictions.texts(), strict=True)
    values = [
        None if truth is None or predicted is None else CORRECTNESS_VALUES[truth != predicted]
        for truth, predicted in pairs
    ]
    return text_column(CORRECTNESS, values, CORRECTNESS_VALUES)


# --- a table ---


def read_table_columns(
    table: Path, names: Sequence[str], folders: Iterable[str] = (), needed: str | None = None
) -> tuple[list[Column], int]:
    """Return the columns of a CSV, joined to the images by path, and how many images it has; raise ValueError if none.

    Paths are relative to the current folder, to the table, or to one of `folders`. A table of `vitrail predict` has predictions.
    Columns of too many different texts are left out, unless `needed` names one.
    """
    header, lines = open_csv(str(table), labelled=False)
    column = find_column(header, PATH_COLUMNS)
    assert column is not None
    rows = [(line, cells) for line, cells in lines if len(cells) > column and cells[column].strip()]
    found = match_paths([cells[column].strip() for _, cells in rows], names, [str(table.parent), *folders])
    if not found:
        first = rows[0][1][column] if rows else "no rows"
        raise ValueError(f"{table} has none of the images: it has {first}, the map {names[0]}")
    is_predictions = {"label", "score", "error"} <= set(header)
    columns = []
    for number, title in enumerate(header):
        if number == column or not title.strip() or (is_predictions and title == "error"):
            continue
        values: list[str | None] = [None] * len(names)
        for row, point in found.items():
            cells = rows[row][1]
            values[point] = (cells[number].strip() or None) if len(cells) > number else None
        name = PREDICTION if is_predictions and title == "label" else title.strip()
        if (made := column_of_cells(name, values, needed)) is not None:
            columns.append(made)
    return columns, len(set(found.values()))


def column_of_cells(name: str, values: Sequence[str | None], needed: str | None = None) -> Column | None:
    """Return cells as numbers if all are some, else as texts; None if they are empty, or too many texts."""
    given = [value for value in values if value is not None]
    if not given:
        return None
    try:
        numbers = np.array([np.nan if value is None else float(value) for value in values], dtype=np.float32)
    except ValueError:
        if len(set(given)) > min(MAX_VALUES, max(2, len(given) // 2)) and name != needed:
            return None  # a text for each image, such as a comment
        return text_column(name, values)
    if name in (CLASS, PREDICTION):  # classes that are named by numbers
        return text_column(name, values, sorted(set(given), key=float))
    return number_column(name, numbers)


def match_paths(paths: Sequence[str], names: Sequence[str], folders: Sequence[str]) -> dict[int, int]:
    """Return the point of each row of a table: by the same name, the same file, or a path below one of the folders."""
    exact = {name: point for point, name in enumerate(names)}
    absolute = {os.path.abspath(name): point for point, name in enumerate(names)}
    found = {}
    for row, path in enumerate(paths):
        places = (os.path.abspath(os.path.join(folder, path)) for folder in ("", *folders))
        point = exact.get(printable_path(path))
        if point is None:
            point = next((absolute[place] for place in places if place in absolute), None)
        if point is not None:
            found[row] = point
    return found


def merge_columns(*groups: Iterable[Column]) -> list[Column]:
    """Return all columns; of those with one name the last. Correctness follows from classes and predictions."""
    columns = {column.name: column for group in groups for column in group}
    classes, predictions = columns.get(CLASS), columns.get(PREDICTION)
    if CORRECTNESS not in columns and classes is not None and predictions is not None:
        has_texts = classes.codes is not None and predictions.codes is not None
        if has_texts and set(classes.labels) & set(predictions.labels):  # other names would all be wrong
            columns[CORRECTNESS] = correctness_column(classes, predictions)
    order = (CLASS, PREDICTION, CORRECTNESS, SPLIT, MARGIN, CONFIDENCE)
    first = {name: columns[name] for name in order if name in columns}
    return list((first | columns).values())

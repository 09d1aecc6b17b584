"""Manifests: CSV or Parquet lists of images with the columns path, label and optionally split."""

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from itertools import product, takewhile

import numpy as np

from vitrail.data.dataset import SPLITS, Dataset, Images, Store
from vitrail.data.labels import normalise_class_name, sort_class_names
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FileStore, is_image_name

Label = str | tuple[str, ...]
PATH_COLUMNS = ("path", "image", "file", "filename", "file_name", "filepath", "file_path", "image_path")
LABEL_COLUMNS = ("label", "labels", "class", "classes", "class_name", "target", "targets", "category")
SPLIT_COLUMNS = ("split", "subset", "set", "fold")
MANIFEST_NAME = re.compile(r"(metadata|labels|manifest)\.(csv|parquet)")
LABEL_SEPARATOR = "|"  # between the labels of an image


def build_dataset(
    source: str,
    kind: str,
    store: Store,
    labels: Sequence[Label],
    splits: Sequence[str | None],
    options: parts.ReadOptions,
    *,
    items: np.ndarray | None = None,
    class_order: Sequence[str] | None = None,
    shards: np.ndarray | None = None,
    notes: Sequence[str] = (),
    skipped: Sequence[tuple[str, str]] = (),
) -> Dataset:
    """Build a dataset from labels and splits. Without a class order, every split has the classes that occur in it.

    `items` are the indices into the store, if not all images are used.
    """
    if not len(labels):
        raise ValueError(f"{source} has no images")
    side = np.array([-1 if split is None else SPLITS.index(split) for split in splits], dtype=np.int8)
    if (side < 0).any() and (side >= 0).any():
        raise ValueError(f"{source} states the split of some images, but not of all")
    side = np.maximum(side, 0)  # without splits, all images are in train
    built = {}
    for number, split in enumerate(SPLITS):
        chosen = np.flatnonzero(side == number)
        if len(chosen):
            classes, targets = encode_labels([labels[index] for index in chosen.tolist()], class_order)
            chosen_items = chosen if items is None else items[chosen]
            chosen_shards = None if shards is None else shards[chosen]
            built[split] = Images(store, chosen_items, targets, classes, split, chosen_shards)
    return parts.add_validation_split(Dataset(source, kind, built, tuple(notes), tuple(skipped)), options)


def encode_labels(labels: Sequence[Label], class_order: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the classes, and the targets: [n] indices, or [n, K] of 0 and 1 for multi-label data."""
    names_of = [(label,) if isinstance(label, str) else label for label in labels]
    normalised = {name: normalise_class_name(name) for names in names_of for name in names}
    classes = tuple(map(normalise_class_name, class_order)) if class_order else sort_class_names(normalised.values())
    positions = {name: i for i, name in enumerate(classes)}
    index = {name: positions[normalised_name] for name, normalised_name in normalised.items()}
    if all(isinstance(label, str) for label in labels):
        return classes, np.array([index[name] for (name,) in names_of], dtype=np.int64)
    targets = np.zeros((len(labels), len(classes)), dtype=np.uint8)
    for row, names in enumerate(names_of):
        targets[row, [index[name] for name in names]] = 1
    return classes, targets


def split_from_path(path: str) -> str | None:
    """Return the split in a file name's first word or its folder: `train-00000-of-00002`, `val/0.tar`."""
    folder, _, name = path.replace("\\", "/").rpartition("/")
    word = "".join(takewhile(str.isalpha, name))
    return parts.parse_split_name(word) or parts.parse_split_name(folder.rpartition("/")[2])


def find_column(names: Sequence[str], candidates: Sequence[str]) -> int | None:
    """Return the index of the first candidate among the column names, ignoring case."""
    plain = [name.strip().casefold() for name in names]
    return next((plain.index(name) for name in candidates if name in plain), None)


def open_csv(path: str, labelled: bool) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the header of a CSV and its rows with line numbers; the delimiter may be comma, semicolon or tab."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start:,}"
        raise ValueError(f"{path} is not UTF-8 ({problem}): save it as CSV UTF-8") from None
    for bare, delimiter in product((False,) if labelled else (False, True), ",;\t"):
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        header = next(reader, []) if "\0" not in text else []
        if find_column(header, PATH_COLUMNS) is not None and (bare or find_column(header, LABEL_COLUMNS) is not None):
            return header, ((reader.line_num, row) for row in reader if any(row))
    first = next(iter(text.splitlines()), "")[:80]
    raise ValueError(f"{path}: the first line must name the columns, such as path,label; got {first!r}")


def read_csv(path: str, options: parts.ReadOptions) -> Dataset:
    """Read a CSV manifest; its paths are relative to it."""
    header, rows = open_csv(path, labelled=options.needs_labels)
    columns = (find_column(header, names) for names in (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS))
    path_column, label_column, split_column = columns
    assert path_column is not None
    paths, labels, splits = [], [], []
    shared: dict[str, str] = {}  # equal labels share one string
    try:
        for line, row in rows:
            if len(row) != len(header):
                raise ValueError(f"{path}, line {line}: {len(row)} cells, the header has {len(header)}")
            if not row[path_column].strip():
                raise ValueError(f"{path}, line {line}: no path")
            paths.append(row[path_column].strip())
            label = row[label_column] if label_column is not None else ""
            labels.append(shared.setdefault(label, label))
            splits.append(parse_split(row[split_column], f"{path}, line {line}") if split_column is not None else None)
    except csv.Error as error:
        raise ValueError(f"{path} is not readable as CSV: {error}") from None
    return read_listed_paths(path, paths, labels, splits, header[path_column], options)


def parse_split(value: str, location: str) -> str:
    """Return the split named in a cell."""
    if split := parts.parse_split_name(value):
        return split
    raise ValueError(f"{location}: unknown split {value!r}: use train, validation or test")


def read_listed_paths(
    manifest: str,
    paths: Sequence[str],
    labels: Sequence[Label],
    splits: Sequence[str | None],
    path_column: str,
    options: parts.ReadOptions,
) -> Dataset:
    """Build the dataset of paths relative to a manifest."""
    folder = os.path.dirname(manifest)
    paths = [os.path.join(folder, path.replace("\\", "/") if "/" not in path else path) for path in paths]
    if not paths:
        raise ValueError(f"{manifest} lists no images")
    if not any(is_image_name(path) or os.path.isfile(path) for path in paths[:100]):
        raise ValueError(f"{manifest}: column {path_column} has no image paths, got {paths[0]!r}")
    if "://" in paths[0]:
        raise ValueError(f"{manifest}: {paths[0]} is a URL; only local files are supported")
    labels = split_labels(manifest, labels, options.multi_label)
    return build_dataset(manifest, "manifest", FileStore.from_paths(paths), labels, splits, options)


def split_labels(manifest: str, labels: Sequence[Label], multi_label: parts.LabelMode) -> list[Label]:
    """Return the labels, split at `|` for multi-label data."""
    if multi_label == parts.UNLABELLED:
        if not all(label if isinstance(label, tuple) else label.strip() for label in labels):
            return [parts.UNLABELLED_CLASS] * len(labels)
        multi_label = None
    if multi_label is None:
        multi_label = any(isinstance(label, tuple) or LABEL_SEPARATOR in label for label in labels)
    if multi_label:
        names_of: dict[Label, Label] = {}  # equal labels share one tuple
        for label in dict.fromkeys(labels):
            names = label.split(LABEL_SEPARATOR) if isinstance(label, str) else label
            names_of[label] = tuple(name.strip() for name in names if name.strip())
        return [names_of[label] for label in labels]
    for row, label in enumerate(labels):
        if isinstance(label, tuple) or not label.strip():
            problem = "several labels" if isinstance(label, tuple) else "no label"
            raise ValueError(f"{manifest}: image {row + 1:,} has {problem}: every image needs exactly one")
    return list(labels)


def find_manifest(folder: str, names: Sequence[str]) -> str | None:
    """Return the manifest of a folder, or None if there is none with the expected columns."""
    candidates = [name for name in names if MANIFEST_NAME.fullmatch(name.casefold())]
    if len(candidates) != 1:
        return None
    path = os.path.join(folder, candidates[0])
    if candidates[0].casefold().endswith(".csv"):
        try:
            open_csv(path, labelled=True)
        except ValueError:  # another kind of CSV: the folder is read as something else
            return None
    return path

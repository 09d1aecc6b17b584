"""Manifests: CSV or Parquet lists of images with the columns path, label, mask, caption or numbers, and optionally split."""

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from vitrail.data.dataset import Dataset, Images, Store
from vitrail.data.labels import normalise_class_name, sort_class_names
from vitrail.data.sources import splits as parts
from vitrail.data.sources.captions import CAPTION_COLUMNS, CaptionRows, build_caption_dataset
from vitrail.data.sources.files import FileStore, find_media, is_media_name, printable_path
from vitrail.data.sources.mask_classes import find_class_file
from vitrail.data.sources.masks import SKIP_NO_MASK, EncodedMasks, build_mask_dataset, describe_skipped, find_classes
from vitrail.data.sources.numbers import NumberRows, build_number_dataset, find_target_columns, looks_numeric

Label = str | tuple[str, ...]
PATH_COLUMNS = (
    "path",
    "image",
    "file",
    "filename",
    "file_name",
    "filepath",
    "file_path",
    "image_path",
    "video",
    "video_path",
    "audio",
    "audio_path",
    "sound",
    "sound_path",
    "recording",
)
LABEL_COLUMNS = ("label", "labels", "class", "classes", "class_name", "target", "targets", "category")
MASK_COLUMNS = ("mask", "masks", "mask_path", "mask_file", "label_path", "segmentation", "segmentation_path")
SPLIT_COLUMNS = ("split", "subset", "set", "fold")
MANIFEST_NAME = re.compile(r"(metadata|labels|manifest)\.(csv|tsv|jsonl|parquet)")
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
    built = {}
    for split, chosen in parts.group_by_split(source, splits).items():
        mine = [labels[int(index)] for index in chosen]
        classes, targets = encode_labels(mine, class_order)
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
    """Return the header of a CSV with the columns of a manifest, and its rows with line numbers."""

    def has_paths(header: Sequence[str]) -> bool:
        return find_column(header, PATH_COLUMNS) is not None

    def has_labels(header: Sequence[str]) -> bool:
        return has_paths(header) and find_column(header, (*LABEL_COLUMNS, *MASK_COLUMNS, *CAPTION_COLUMNS)) is not None

    if opened := search_csv(path, [has_labels] if labelled else [has_labels, has_paths]):
        return opened
    first = next(iter(read_csv_text(path).splitlines()), "")[:80]
    numbers = "; columns of numbers need targets=" if search_csv(path, [has_paths]) else ""
    raise ValueError(f"{path}: the first line must name the columns, such as path,label; got {first!r}{numbers}")


def read_csv_text(path: str) -> str:
    """Return the text of a CSV."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start:,}"
        raise ValueError(f"{path} is not UTF-8 ({problem}): save it as CSV UTF-8") from None


def search_csv(
    path: str, conditions: Sequence[Callable[[Sequence[str]], bool]]
) -> tuple[list[str], Iterator[tuple[int, list[str]]]] | None:
    """Return the header that fulfils the first possible condition, and the rows with line numbers; None if there is none.

    The delimiter may be comma, semicolon or tab.
    """
    text = read_csv_text(path)
    for condition in conditions if "\0" not in text else ():
        for delimiter in ",;\t":
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
            if condition(header := next(reader, [])):
                return header, ((reader.line_num, row) for row in reader if any(row))
    return None


def read_csv(path: str, options: parts.ReadOptions) -> Dataset:
    """Read a CSV manifest; its paths are relative to it."""
    header, rows = open_csv(path, labelled=options.needs_labels and not options.targets)
    columns = (find_column(header, names) for names in (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS))
    path_column, label_column, split_column = columns
    needs_masks = label_column is None and options.needs_labels and not options.targets
    mask_column = find_column(header, MASK_COLUMNS) if needs_masks else None
    if options.takes_captions(label_column is not None or mask_column is not None):
        caption_column = find_column(header, CAPTION_COLUMNS)
        if caption_column is None and options.wants_captions:
            raise refuse_captions(path, header)
    else:
        caption_column = None
    target_columns = find_target_columns(header, options.targets, path) if options.targets else []
    label_column = label_column if mask_column is None else mask_column
    label_column = label_column if caption_column is None else caption_column
    assert path_column is not None
    paths, labels, splits, numbers, lines = [], [], [], [], []
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
            numbers.append([row[column] for column in target_columns])
            lines.append(line)
            splits.append(parse_split(row[split_column], f"{path}, line {line}") if split_column is not None else None)
    except csv.Error as error:
        raise ValueError(f"{path} is not readable as CSV: {error}") from None
    if options.targets:
        locations = [f"{path}, line {line}" for line in lines]
        return read_listed_numbers(path, paths, numbers, locations, splits, header[path_column], options)
    if caption_column is not None:
        locations = [f"{path}, line {line}" for line in lines]
        return read_listed_captions(path, paths, labels, locations, splits, header[path_column], options)
    if mask_column is not None:
        return read_listed_masks(path, paths, labels, splits, header[path_column], options)
    if label_column is not None and options.multi_label is None:
        check_classes(path, header[label_column], labels)
    return read_listed_paths(path, paths, labels, splits, header[path_column], options)


def check_classes(manifest: str, column: str, labels: Sequence[str]) -> None:
    """Raise ValueError if the labels look like measured numbers: as classes, nearly every image would have its own."""
    if (label := looks_numeric(labels)) is not None:
        remedy = f"use targets={column.strip()!r} to learn numbers, or task='single' for classes"
        raise ValueError(f"{manifest}: the labels are numbers such as {label.strip()[:24]}: {remedy}")


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
    paths = resolve_paths(manifest, paths, path_column)
    labels = split_labels(manifest, labels, options.multi_label)
    store = FileStore.from_paths(paths, find_media(manifest, paths))
    return build_dataset(manifest, "manifest", store, labels, splits, options)


def resolve_paths(manifest: str, paths: Sequence[str], column: str) -> list[str]:
    """Return paths relative to a manifest as paths of files; raise if they do not look like images."""
    folder = os.path.dirname(manifest)
    paths = [os.path.join(folder, path.replace("\\", "/") if "/" not in path else path) for path in paths]
    if not paths:
        raise ValueError(f"{manifest} lists no images")
    if not any(is_media_name(path) or os.path.exists(path) for path in paths[:100]):
        raise ValueError(f"{manifest}: column {column} has no image paths, got {paths[0]!r}")
    if "://" in paths[0]:
        raise ValueError(f"{manifest}: {paths[0]} is a URL; only local files are supported")
    return paths


def read_listed_masks(
    manifest: str,
    paths: Sequence[str],
    mask_paths: Sequence[str],
    splits: Sequence[str | None],
    path_column: str,
    options: parts.ReadOptions,
) -> Dataset:
    """Build the dataset of pairs of images and masks; a class file is looked for beside the manifest."""
    images = resolve_paths(manifest, paths, path_column)
    kept = [row for row, mask in enumerate(mask_paths) if mask.strip()]
    skipped = [(printable_path(images[row]), SKIP_NO_MASK) for row in range(len(images)) if not mask_paths[row].strip()]
    if not kept:
        raise ValueError(f"{manifest} has no image with a mask")
    masks = FileStore.from_paths(resolve_paths(manifest, [mask_paths[row].strip() for row in kept], "mask"))
    store, items = FileStore.from_paths(images[row] for row in kept), np.arange(len(kept))
    classes = find_classes(find_class_file([os.path.dirname(manifest)]), masks, items, manifest, options)
    pairs = EncodedMasks(masks, items, store, items, classes)
    notes = describe_skipped(skipped)
    sides = [splits[row] for row in kept]
    return build_mask_dataset(
        manifest, "manifest", store, items, sides, pairs, classes, options, notes=notes, skipped=skipped
    )


def read_listed_numbers(
    manifest: str,
    paths: Sequence[str],
    numbers: Sequence[Sequence[Any]],
    locations: Sequence[str],
    splits: Sequence[str | None],
    path_column: str,
    options: parts.ReadOptions,
) -> Dataset:
    """Build the dataset of paths relative to a manifest, with numbers; rows without a usable one are skipped."""
    paths = resolve_paths(manifest, paths, path_column)
    rows = NumberRows(options.targets or ())
    for row, (path, cells, location) in enumerate(zip(paths, numbers, locations, strict=True)):
        rows.add(row, cells, printable_path(path), location)
    store = FileStore.from_paths(paths, find_media(manifest, paths))
    return build_number_dataset(manifest, "manifest", store, rows, splits, options)


def read_number_rows(
    manifest: str, rows: Sequence[Mapping[str, Any]], path: str, split: str | None, options: parts.ReadOptions
) -> Dataset:
    """Build the dataset of the rows of a table, with the names of its columns of paths and splits."""
    locations = [f"{manifest}, row {number:,}" for number in range(1, len(rows) + 1)]
    paths, splits = read_paths_and_splits(rows, locations, path, split)
    cells = [[row.get(name) for name in options.targets or ()] for row in rows]
    return read_listed_numbers(manifest, paths, cells, locations, splits, path, options)


def refuse_captions(source: str, columns: Sequence[str]) -> ValueError:
    """Return the error for data whose captions are wanted and that has none."""
    found = ", ".join(str(column).strip() for column in columns) or "none"
    return ValueError(f"{source} has no column of captions, got {found}: name one caption")


def read_listed_captions(
    manifest: str,
    paths: Sequence[str],
    captions: Sequence[Any],
    locations: Sequence[str],
    splits: Sequence[str | None],
    path_column: str,
    options: parts.ReadOptions,
) -> Dataset:
    """Build the dataset of paths relative to a manifest, with captions; an image that is listed again has several."""
    paths = resolve_paths(manifest, paths, path_column)
    files = {path: item for item, path in enumerate(dict.fromkeys(paths))}
    rows = CaptionRows()
    for row, (path, caption, location) in enumerate(zip(paths, captions, locations, strict=True)):
        rows.add(row, caption, printable_path(path), files[path], location)
    store = FileStore.from_paths(files, find_media(manifest, paths))
    items = np.array([files[path] for path in paths])
    return build_caption_dataset(manifest, "manifest", store, rows, splits, options, items=items)


def read_caption_rows(
    manifest: str,
    rows: Sequence[Mapping[str, Any]],
    path: str,
    caption: str,
    split: str | None,
    options: parts.ReadOptions,
) -> Dataset:
    """Build the dataset of the rows of a table, with the names of its columns of paths, captions and splits."""
    locations = [f"{manifest}, row {number:,}" for number in range(1, len(rows) + 1)]
    paths, splits = read_paths_and_splits(rows, locations, path, split)
    return read_listed_captions(manifest, paths, [row.get(caption) for row in rows], locations, splits, path, options)


def read_paths_and_splits(
    rows: Sequence[Mapping[str, Any]], locations: Sequence[str], path: str, split: str | None
) -> tuple[list[str], list[str | None]]:
    """Return the paths and the splits of the rows of a table."""
    for row, location in zip(rows, locations, strict=True):
        if not isinstance(row.get(path), str) or not row[path].strip():
            raise ValueError(f"{location}: no path")
    named = zip(rows, locations, strict=True)
    splits = [None if split is None else parse_split(str(row.get(split)), location) for row, location in named]
    return [row[path].strip() for row in rows], splits


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


def find_manifest(folder: str, names: Sequence[str], options: parts.ReadOptions) -> str | None:
    """Return the manifest of a folder, or None if there is none with the expected columns."""
    suffixes = (".csv", ".parquet", *((".tsv", ".jsonl") if options.targets or options.wants_captions else ()))
    found = [name for name in names if MANIFEST_NAME.fullmatch(name.casefold())]
    candidates = [name for name in found if name.casefold().endswith(suffixes)]
    if len(candidates) != 1:
        return None
    path = os.path.join(folder, candidates[0])
    if candidates[0].casefold().endswith((".csv", ".tsv")):
        try:
            open_csv(path, labelled=not options.targets)
        except ValueError:  # another kind of CSV: the folder is read as something else
            return None
    return path

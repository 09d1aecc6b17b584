"""JSON lines: a list of images, one object per line, with the columns of a manifest."""

import json
from typing import Any

from vitrail.data.dataset import Dataset
from vitrail.data.sources import manifest, parquet
from vitrail.data.sources import splits as parts
from vitrail.data.sources.captions import CAPTION_COLUMNS
from vitrail.data.sources.numbers import find_target_columns


def read_json_lines(path: str, options: parts.ReadOptions) -> Dataset:
    """Read a list of images with labels or numbers; its paths are relative to it. The first object names the columns."""
    rows = parse_lines(path)
    names = list(rows[0])
    columns = (manifest.find_column(names, known) for known in (manifest.PATH_COLUMNS, manifest.LABEL_COLUMNS))
    path_column, label_column = (None if column is None else names[column] for column in columns)
    found = manifest.find_column(names, manifest.SPLIT_COLUMNS)
    split = None if found is None else names[found]
    needs_labels = options.needs_labels and not options.targets
    if path_column is not None and options.takes_captions(label_column is not None):
        caption = manifest.find_column(names, CAPTION_COLUMNS)
        if caption is not None:
            return manifest.read_caption_rows(path, rows, path_column, names[caption], split, options)
        if options.wants_captions:
            raise manifest.refuse_captions(path, names)
    if path_column is None or (label_column is None and needs_labels):
        wanted = "path and label" if needs_labels else "path"
        raise ValueError(f"{path}: line 1 must have the keys {wanted}, got {', '.join(names) or 'none'}")
    if options.targets:
        find_target_columns(names, options.targets, path)
        return manifest.read_number_rows(path, rows, path_column, split, options)
    labels: list[manifest.Label] = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get(path_column), str) or not row[path_column].strip():
            raise ValueError(f"{path}, row {number:,}: no path")
        value = None if label_column is None else row.get(label_column)
        if isinstance(value, float) and options.multi_label is None:
            remedy = f"use targets={label_column!r} to learn numbers, or write classes as text"
            raise ValueError(f"{path}, row {number:,}: the label is the number {value}: {remedy}")
        label = parquet.parse_label(value, None, path)
        if label is None and needs_labels:
            raise ValueError(f"{path}, row {number:,}: no label")
        labels.append("" if label is None else label)
    located = enumerate(rows, start=1)
    splits = [
        None if split is None else manifest.parse_split(str(row.get(split)), f"{path}, row {n:,}") for n, row in located
    ]
    return manifest.read_listed_paths(path, [row[path_column] for row in rows], labels, splits, path_column, options)


def parse_lines(path: str) -> list[dict[str, Any]]:
    """Return the objects of a file, one per line; empty lines are skipped."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(manifest.read_csv_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}): write one object per line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object: write one per line")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} lists no images")
    return rows

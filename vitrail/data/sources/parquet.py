"""Parquet tables: embedded images, videos or sounds with labels, masks, captions or numbers, or manifests of paths."""

import io
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.dataset import Dataset, Media
from vitrail.data.decode import open_image
from vitrail.data.remote.file import RemoteFile, find_beside, read_stamp
from vitrail.data.sound import SoundFile
from vitrail.data.sources import manifest
from vitrail.data.sources import splits as parts
from vitrail.data.sources.captions import CAPTION_COLUMNS, CaptionRows, build_caption_dataset
from vitrail.data.sources.files import import_decoder, printable_path
from vitrail.data.sources.manifest import Label, build_dataset, split_from_path
from vitrail.data.sources.mask_classes import CLASS_FILES, find_class_file
from vitrail.data.sources.masks import EncodedMasks, build_mask_dataset, find_classes
from vitrail.data.sources.numbers import NumberRows, build_number_dataset, find_target_columns
from vitrail.data.video import is_video_data

IMAGE_COLUMNS = ("image", "img", "picture", "jpg", "png", "bytes")
VIDEO_COLUMNS = ("video", "videos", "clip", "mp4", "webm", "avi", "mkv", "mov")
SOUND_COLUMNS = ("audio", "sound", "recording", "wav", "flac", "mp3")
MEDIA_COLUMNS: dict[Media, tuple[str, ...]] = {"image": IMAGE_COLUMNS, "video": VIDEO_COLUMNS, "sound": SOUND_COLUMNS}
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "category")
MASK_COLUMNS = (*manifest.MASK_COLUMNS, "annotation", "label", "labels", "semantic_mask", "segmentation_mask")
MAX_KEPT_BYTES = 2**29  # row groups kept per process; the shuffle window should fit


def import_parquet() -> Any:
    """Return pyarrow's Parquet module, or raise an error that tells how to install it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'vitrail[parquet]'") from None
    return pyarrow.parquet


class ParquetStore:
    """A store of table rows. Row groups are read on demand, and the last few are kept."""

    def __init__(
        self, files: Sequence[str], column: str, groups: np.ndarray, size: int, media: Media = "image"
    ) -> None:
        self.files, self.column, self.size, self.media = list(files), column, size, media
        self.groups = groups  # [g, 3] int64: first item, file, row group in the file
        self._process = -1

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")} | {"_process": -1}

    def __len__(self) -> int:
        return self.size

    def find_group(self, item: int) -> int:
        """Return the row group of an image."""
        return int(np.searchsorted(self.groups[:, 0], item, side="right")) - 1

    def name(self, item: int) -> str:
        file = self.groups[self.find_group(item), 1]
        first = self.groups[np.searchsorted(self.groups[:, 1], file), 0]
        return f"{printable_path(self.files[file])}[{item - first}]"

    def data(self, item: int) -> bytes:
        if self._process != os.getpid():  # handles, locks and row groups belong to one process
            self._lock = threading.Lock()
            self._kept: OrderedDict[int, Any] = OrderedDict()
            self._process = os.getpid()
        group = self.find_group(item)
        with self._lock:
            if group not in self._kept:
                self._kept[group] = self._read_group(group)
                while len(self._kept) > 1 and sum(column.nbytes for column in self._kept.values()) > MAX_KEPT_BYTES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(group)
            value = self._kept[group][item - int(self.groups[group, 0])].as_py()
        if isinstance(value, dict):
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise OSError(f"{self.name(item)}: the row has no {self.media}")
        return value

    def _read_group(self, group: int) -> Any:
        _, file, number = self.groups[group].tolist()
        path = self.files[file]
        try:
            with open_source(path) as table:
                return table.read_row_group(number, columns=[self.column], use_threads=False).column(self.column)
        except (ValueError, OSError) as error:
            reason = format_first_line(error)
            raise OSError(f"{printable_path(path)}: cannot read row group {number} ({reason})") from None

    def open(self, item: int) -> Any:
        if self.media == "sound":
            return SoundFile(io.BytesIO(self.data(item)), self.name(item))
        if self.media == "video":
            from vitrail.data.video_file import VideoFile

            return VideoFile(lambda: io.BytesIO(self.data(item)), self.name(item), self.stamp(item))
        return open_image(io.BytesIO(self.data(item)), self.name(item))

    def stamp(self, item: int) -> tuple[int, int] | None:
        return read_stamp(self.files[self.groups[self.find_group(item), 1]])


def format_first_line(error: Exception) -> str:
    """Return the first line of an error, at most 200 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def read_parquet(source: str, files: Sequence[str], options: parts.ReadOptions) -> Dataset:
    """Read the shards of a table: embedded images or videos, or a manifest, depending on the columns."""
    schema = open_table(files[0]).schema_arrow
    caption = find_caption_column(files[0], schema, options)
    if column := find_media_column(schema):
        media = detect_media(files, column)
        import_decoder(media)  # raises if it is missing
        if options.targets:
            return read_embedded_numbers(source, files, column, media, options)
        if media == "image" and caption is not None:
            return read_embedded_captions(source, files, column, caption, options)
        if media == "image" and options.needs_labels and (mask_column := find_mask_column(schema, column)):
            return read_embedded_masks(source, files, column, mask_column, options)
        return read_embedded(source, files, column, media, options)
    path_column = manifest.find_column(schema.names, manifest.PATH_COLUMNS)
    label_column = manifest.find_column(schema.names, manifest.LABEL_COLUMNS)
    lacks_labels = label_column is None and caption is None and options.needs_labels and not options.targets
    if path_column is None or lacks_labels:
        columns = ", ".join(schema.names)
        raise ValueError(
            f"{files[0]} has no column of images or videos, and none of path and label columns, got {columns}"
        )
    if isinstance(files[0], RemoteFile):
        raise ValueError(f"{files[0]} lists paths: over the network, tables must have the images in them")
    if len(files) > 1:
        raise ValueError(f"{source} has several manifests, {files[0]} and {files[1]}: give one of them")
    if caption is not None:
        return read_captions(files[0], schema, path_column, caption, options)
    return read_path_manifest(files[0], schema, path_column, label_column, options)


def find_caption_column(path: str, schema: Any, options: parts.ReadOptions) -> str | None:
    """Return the column of captions, if they are read; raise ValueError if they are wanted and there are none."""
    labelled = manifest.find_column(schema.names, (*LABEL_COLUMNS, *MASK_COLUMNS, *manifest.LABEL_COLUMNS)) is not None
    if not options.takes_captions(labelled):
        return None
    found = manifest.find_column(schema.names, CAPTION_COLUMNS)
    if found is None and options.wants_captions:
        raise manifest.refuse_captions(path, schema.names)
    return None if found is None else schema.names[found]


def open_source(path: str) -> Any:
    """Open a local or a remote Parquet file."""
    remote = isinstance(path, RemoteFile)
    return import_parquet().ParquetFile(path.open() if remote else path, memory_map=not remote)


def count_groups(table: Any, options: parts.ReadOptions) -> int:
    """Return the number of row groups to read: all, or of a sample those with the first rows."""
    groups, rows = table.num_row_groups, 0
    for group in range(groups):
        if options.sampled_rows is not None and rows >= options.sampled_rows:
            return group
        rows += table.metadata.row_group(group).num_rows
    return groups


def open_table(path: str) -> Any:
    """Open a Parquet file and read its footer."""
    try:
        return open_source(path)
    except (ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError) or "vitrail[parquet]" in str(error):
            raise
        reason = format_first_line(error)
        raise ValueError(f"{path} is not a valid Parquet file ({reason}): download it again") from None


def find_media_column(schema: Any) -> str | None:
    """Return the column of images, videos or sounds: bytes, or a struct with bytes."""
    candidates = list_byte_columns(schema)
    known = {
        media: [name for wanted in columns for name in candidates if name.casefold() == wanted]
        for media, columns in MEDIA_COLUMNS.items()
    }
    found = [(media, names[0]) for media, names in known.items() if names]
    if len(found) > 1:
        (one, first), (other, second) = found[:2]
        raise ValueError(f"the table has {one}s ({first}) and {other}s ({second}): leave out one of the columns")
    others = [name for name in candidates if name.casefold() not in MASK_COLUMNS]
    single = candidates if len(candidates) == 1 else others if len(others) == 1 else [None]
    return found[0][1] if found else single[0]


def detect_media(files: Sequence[str], column: str) -> Media:
    """Return what a column holds, by its name or else by the first bytes of its first value."""
    name = column.casefold()
    if name != "bytes":
        for media, columns in MEDIA_COLUMNS.items():
            if name in columns:
                return media
    for path in files:
        with open_table(path) as table:
            for batch in table.iter_batches(batch_size=1, columns=[column], use_threads=False):
                value = batch.column(0)[0].as_py()
                value = value.get("bytes") if isinstance(value, dict) else value
                if value:
                    return "video" if is_video_data(value[:256]) else "image"
    return "image"


def find_mask_column(schema: Any, image_column: str) -> str | None:
    """Return the column of masks: bytes, or a struct with bytes, with a usual name; none if there are labels too."""
    candidates = [name for name in list_byte_columns(schema) if name != image_column]
    labels = [name for name in schema.names if name.casefold() in LABEL_COLUMNS and name not in candidates]
    known = [name for wanted in MASK_COLUMNS for name in candidates if name.casefold() == wanted]
    return known[0] if known and not labels else None


def list_byte_columns(schema: Any) -> list[str]:
    """Return the columns of bytes, or of structs with bytes."""
    from pyarrow import types

    def has_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            index = kind.get_field_index("bytes")
            return index >= 0 and has_bytes(kind.field(index).type)
        return types.is_binary(kind) or types.is_large_binary(kind)

    return [name for name in schema.names if has_bytes(schema.field(name).type)]


def read_embedded_masks(
    source: str, files: Sequence[str], column: str, mask_column: str, options: parts.ReadOptions
) -> Dataset:
    """Read tables with embedded images and masks; a class file is looked for beside the first table, or the folder `data`."""
    starts, splits, _ = read_groups(files, (column, mask_column), (), options)
    images, masks = (ParquetStore(files, name, starts, len(splits)) for name in (column, mask_column))
    items = np.arange(len(splits))
    first = os.path.dirname(files[0])
    class_file = find_class_file([first, *([os.path.dirname(first)] if os.path.basename(first) == "data" else [])])
    class_file = class_file or find_beside(files[:1], CLASS_FILES)
    classes = find_classes(class_file, masks, items, source, options)
    pairs = EncodedMasks(masks, items, images, items, classes)
    shards = np.searchsorted(starts[:, 0], items, side="right") - 1
    return build_mask_dataset(source, "parquet", images, items, splits, pairs, classes, options, shards=shards)


def read_groups(
    files: Sequence[str], required: Sequence[str], read: Sequence[str], options: parts.ReadOptions
) -> tuple[np.ndarray, list[str | None], list[dict[str, Any]]]:
    """Return the row groups of tables [g, 3], the split of every row, and the cells of the columns in `read` of every row."""
    groups: list[tuple[int, int, int]] = []
    splits: list[str | None] = []
    cells: list[dict[str, Any]] = []
    for number, path in enumerate(files):
        with open_table(path) as table:
            names = table.schema_arrow.names
            if missing := [name for name in required if name not in names]:
                raise ValueError(f"{path} has no column {missing[0]}, unlike {files[0]}: got {', '.join(names)}")
            split_column = manifest.find_column(names, manifest.SPLIT_COLUMNS)
            for group in range(count_groups(table, options)):
                groups.append((len(splits), number, group))
                if split_column is None:
                    splits += [split_from_path(path)] * table.metadata.row_group(group).num_rows
                else:
                    named = table.read_row_group(group, columns=[names[split_column]], use_threads=False).column(0)
                    splits += [manifest.parse_split(str(cell), path) for cell in named.to_pylist()]
                if read:
                    cells += table.read_row_group(group, columns=list(read), use_threads=False).to_pylist()
        if options.progress:
            options.progress("reading tables", number + 1, len(files))
    starts = np.array(groups, dtype=np.int64).reshape(-1, 3)
    return starts[np.diff(starts[:, 0], append=len(splits)) > 0], splits, cells  # row groups may be empty


def read_embedded_numbers(
    source: str, files: Sequence[str], column: str, media: Media, options: parts.ReadOptions
) -> Dataset:
    """Read tables with embedded images or videos and columns of numbers."""
    targets = options.targets or ()
    find_target_columns(open_table(files[0]).schema_arrow.names, targets, source)
    starts, splits, cells = read_groups(files, (column, *targets), targets, options)
    store, rows = ParquetStore(files, column, starts, len(splits), media), NumberRows(targets)
    for row, values in enumerate(cells):
        rows.add(row, [values[name] for name in targets], store.name(row))
    shards = np.searchsorted(starts[:, 0], np.arange(len(splits)), side="right") - 1
    return build_number_dataset(source, "parquet", store, rows, splits, options, shards=shards)


def read_embedded_captions(
    source: str, files: Sequence[str], column: str, caption: str, options: parts.ReadOptions
) -> Dataset:
    """Read tables with embedded images and a column of captions, or of lists of captions of the same image."""
    starts, splits, cells = read_groups(files, (column, caption), (caption,), options)
    store, rows, items = ParquetStore(files, column, starts, len(splits)), CaptionRows(), []
    for item, values in enumerate(cells):
        texts = values[caption]
        for text in texts if isinstance(texts, list) and texts else [texts or None]:
            rows.add(len(items), text, store.name(item), item)
            items.append(item)
    listed = np.array(items, dtype=np.int64)
    shards = np.searchsorted(starts[:, 0], listed, side="right") - 1
    sides = [splits[item] for item in items]
    return build_caption_dataset(source, "parquet", store, rows, sides, options, items=listed, shards=shards)


def read_embedded(source: str, files: Sequence[str], column: str, media: Media, options: parts.ReadOptions) -> Dataset:
    """Read tables with embedded images, videos or sounds: the labels now, the samples on demand."""
    labels: list[Label | None] = []
    splits: list[str | None] = []
    groups, order = [], None
    for number, path in enumerate(files):
        with open_table(path) as table:
            schema = table.schema_arrow
            label_column = manifest.find_column(schema.names, LABEL_COLUMNS)
            if (label_column is None and options.needs_labels) or column not in schema.names:
                missing = "labels (label, class or target)" if column in schema.names else f"{media}s ({column})"
                raise ValueError(f"{path} has no column of {missing}, got {', '.join(schema.names)}")
            label_name = None if label_column is None else schema.names[label_column]
            names = read_class_names(schema, label_name) if label_name else None
            if number and names != order:
                raise ValueError(f"{path} has other class names than {files[0]}: read them separately")
            order = names
            for group in range(count_groups(table, options)):
                groups.append((len(labels), number, group))
                if label_name:
                    values = table.read_row_group(group, columns=[label_name], use_threads=False).column(0)
                    labels += [parse_label(value, names, path) for value in values.to_pylist()]
                else:
                    labels += [parts.UNLABELLED_CLASS] * table.metadata.row_group(group).num_rows
            splits += [split_from_path(path)] * (len(labels) - len(splits))
        if options.progress:
            options.progress("reading tables", number + 1, len(files))
    starts = np.array(groups, dtype=np.int64).reshape(-1, 3)
    starts = starts[np.diff(starts[:, 0], append=len(labels)) > 0]  # row groups may be empty
    store = ParquetStore(files, column, starts, len(labels), media)
    if not options.needs_labels and None in labels:
        labels[:], order = [parts.UNLABELLED_CLASS] * len(labels), None
    kept = np.array([row for row, label in enumerate(labels) if label is not None], dtype=np.int64)
    notes = [f"{len(labels) - len(kept):,} rows without a label are not used"] if len(kept) < len(labels) else []
    known = [label for label in labels if label is not None]
    multi_label = options.multi_label
    if multi_label in (None, parts.UNLABELLED) and order and not any(isinstance(label, tuple) for label in known):
        multi_label = False  # with class names in the schema, | in a name is not a separator
    names, splits = manifest.split_labels(source, known, multi_label), [splits[row] for row in kept]
    shards = np.searchsorted(starts[:, 0], kept, side="right") - 1
    return build_dataset(
        source, "parquet", store, names, splits, options, items=kept, class_order=order, shards=shards, notes=notes
    )


def parse_label(value: Any, names: Sequence[str] | None, path: str) -> Label | None:
    """Convert a cell to a label: an index into the names, a name, or a list of either. Hugging Face uses -1 for none."""
    if isinstance(value, list):
        labels = [parse_label(cell, names, path) for cell in value]
        return tuple(label for label in labels if isinstance(label, str))
    if value is None or value == "" or (isinstance(value, int) and value == -1):
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        remedy = "; targets= learns numbers" if isinstance(value, float) else ""
        raise ValueError(
            f"{path} has the label {value!r}: a label must be an integer, a name, or a list of them{remedy}"
        )
    if isinstance(value, int) and names:
        if not 0 <= value < len(names):
            raise ValueError(f"{path} has the label {value}, but its schema names {len(names)} classes")
        return names[value]
    return str(value)


def read_class_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """Return the class names of a column from the schema metadata of Hugging Face datasets."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    try:
        feature = json.loads(metadata)["info"]["features"][column] if metadata else None
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(feature, list) and len(feature) == 1:
        feature = feature[0]
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    names: Any = feature.get("names") if isinstance(feature, dict) else None
    valid = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return tuple(names) or None if valid else None


def read_path_manifest(
    path: str, schema: Any, path_column: int, label_column: int | None, options: parts.ReadOptions
) -> Dataset:
    """Read a Parquet manifest; its paths are relative to it."""
    split = manifest.find_column(schema.names, manifest.SPLIT_COLUMNS)
    if options.targets:
        return read_numbers(path, schema, path_column, split, options)
    used = [schema.names[index] for index in (path_column, label_column, split) if index is not None]
    names = read_class_names(schema, schema.names[label_column]) if label_column is not None else None
    with open_table(path) as table:
        columns = [column.to_pylist() for column in table.read(columns=used).select(used).columns]
    labels = [parse_label(value, names, path) for value in columns[1]] if label_column is not None else [None]
    if not options.needs_labels and None in labels:
        labels = [parts.UNLABELLED_CLASS] * len(columns[0])
    for row, value in enumerate(columns[0]):
        if not isinstance(value, str) or not value or labels[row] is None:
            problem = "no label" if isinstance(value, str) and value else "no path"
            raise ValueError(f"{path}, row {row + 1:,}: {problem}")
    splits: list[str | None] = [None] * len(labels)
    if split is not None:
        splits = [manifest.parse_split(str(cell), f"{path}, row {row + 1:,}") for row, cell in enumerate(columns[-1])]
    known = [label for label in labels if label is not None]
    return manifest.read_listed_paths(path, columns[0], known, splits, used[0], options)


def read_captions(path: str, schema: Any, path_column: int, caption: str, options: parts.ReadOptions) -> Dataset:
    """Read the paths and captions of a Parquet manifest; a cell may be a list of captions of the same image."""
    names = schema.names
    found = manifest.find_column(names, manifest.SPLIT_COLUMNS)
    split = None if found is None else names[found]
    with open_table(path) as table:
        used = dict.fromkeys([names[path_column], caption, *([] if split is None else [split])])
        cells = table.read(columns=list(used)).to_pylist()
    rows = []
    for row in cells:
        texts = row[caption]
        rows += [{**row, caption: text} for text in (texts if isinstance(texts, list) and texts else [texts or None])]
    return manifest.read_caption_rows(path, rows, names[path_column], caption, split, options)


def read_numbers(path: str, schema: Any, path_column: int, split: int | None, options: parts.ReadOptions) -> Dataset:
    """Read the paths and numbers of a Parquet manifest."""
    names, targets = schema.names, options.targets or ()
    find_target_columns(names, targets, path)
    with open_table(path) as table:
        used = dict.fromkeys([names[path_column], *targets, *([] if split is None else [names[split]])])
        rows = table.read(columns=list(used)).to_pylist()
    return manifest.read_number_rows(path, rows, names[path_column], None if split is None else names[split], options)

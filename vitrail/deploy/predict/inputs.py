"""Collect images from files, folders, patterns, lists, tar shards and tables into one sequence.

Labels and splits are ignored.
"""

import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import Images, Store
from vitrail.data.images import CHANNELS, KINDS, is_image
from vitrail.data.sources import detect, downloads, load_dataset, manifest, objects, parquet, tar
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FileStore, FolderWalker, is_image_name, printable_path
from vitrail.utils.progress import ProgressCallback

INPUT_KINDS = {".csv": "csv", ".tsv": "csv", ".jsonl": "lines", ".ndjson": "lines"}  # other files are images
INPUT_KINDS |= {".parquet": "parquet", ".tar": "tar"}
OpenedInput = tuple[Store, np.ndarray | None]  # a store, and the indices of its images; None for all


@dataclass(frozen=True)
class ImageInputs:
    """Images of several stores, in the order of the given paths; itself a `Store`."""

    stores: tuple[Store, ...]
    starts: np.ndarray  # int64 [s + 1]: the first index of each store, and the total
    items: tuple[np.ndarray | None, ...]  # indices in each store; None for all
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, index: int) -> tuple[Store, int]:
        """Return the store of an image and its index there."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        offset, items = index - int(self.starts[number]), self.items[number]
        return self.stores[number], offset if items is None else int(items[offset])

    def name(self, item: int) -> str:
        store, item = self.locate(item)
        return store.name(item)

    def open(self, item: int) -> Image.Image:
        store, item = self.locate(item)
        return store.open(item)

    def data(self, item: int) -> bytes:
        store, item = self.locate(item)
        return store.data(item)

    def stamp(self, item: int) -> tuple[int, int] | None:
        store, item = self.locate(item)
        return store.stamp(item)

    def select(self, indices: Sequence[int]) -> Images:
        """Return the images at these indices as a dataset without labels."""
        return Images(self, np.asarray(indices, np.int64), np.zeros(len(indices), np.int64), ("",))

    def fingerprint(self, count: int) -> str:
        """Return a hash of the names of the first `count` images."""
        digest = hashlib.sha256(str(count).encode())
        for store, items, start in zip(self.stores, self.items, self.starts.tolist(), strict=False):
            if start >= count:
                break
            if isinstance(store, FileStore) and items is None:  # without creating an object per name
                for part in (store.names, store.ends.tobytes(), store.folder_ids.tobytes(), "\0".join(store.folders)):
                    digest.update(os.fsencode(part) if isinstance(part, str) else part)
                continue
            for item in range(len(store)) if items is None else items.tolist():
                digest.update(store.name(item).encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()


def collect_images(images: Any, progress: ProgressCallback | None = None) -> ImageInputs:
    """Return the images of a path, an image in memory, a list of either, or any Python object that is data."""
    if isinstance(images, np.ndarray | Tensor):
        channels = -1 if isinstance(images, np.ndarray) else 0
        if images.ndim == 4 or (images.ndim == 3 and images.shape[channels] not in CHANNELS):  # a batch, of grey images
            images = list(images)
    if is_image(images):
        images = [images]
    if not isinstance(images, Sequence):
        return join_stores(open_dataset(images, progress), (), objects.describe_object(images))
    if images and all(isinstance(image, str | os.PathLike) for image in images):
        return collect_inputs(images, progress)
    if wrong := [(item, image) for item, image in enumerate(images) if not is_image(image)]:
        raise ValueError(f"image[{wrong[0][0]}] is of type {type(wrong[0][1]).__name__}: give {KINDS}")
    store = objects.ObjectStore(images, "image", np.zeros(len(images), np.uint64))
    return join_stores([(store, None)], (), "the list")


def collect_inputs(paths: Sequence[str | os.PathLike[str]], progress: ProgressCallback | None = None) -> ImageInputs:
    """Return all images of these paths; raise ValueError if there are none."""
    stores: list[OpenedInput] = []
    notes: list[str] = []
    names = [os.fspath(path) for path in paths]
    expanded = [(given, path) for given in names for path in expand_path(given)]
    for is_file, group in itertools.groupby(expanded, lambda pair: is_image_file(pair[1])):
        if is_file:  # consecutive files form one store
            stores.append((FileStore.from_paths(path for _, path in group), None))
        else:
            stores += [opened for given, path in group for opened in open_input(given, path, notes, progress)]
    return join_stores(stores, notes, ", ".join(names))


def join_stores(stores: Sequence[OpenedInput], notes: Sequence[str], given: str) -> ImageInputs:
    """Return the images of several stores; raise ValueError if there are none."""
    counts = [len(store) if items is None else len(items) for store, items in stores]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if not int(starts[-1]):
        raise ValueError(f"no images in {given}")
    return ImageInputs(tuple(store for store, _ in stores), starts, tuple(items for _, items in stores), tuple(notes))


def expand_path(path: str) -> list[str]:
    """Return the matches of a pattern; an existing path or one without wildcards is returned as it is."""
    path = os.path.expanduser(path)
    if os.path.exists(path) or not detect.is_pattern(path):
        return [path]
    if "**" in path:
        if matched := sorted(glob.glob(path, recursive=True)):
            return [match for match in matched if os.path.isfile(match)]
        raise FileNotFoundError(f"no file matches {path}")
    return detect.expand_pattern(path)


def file_suffix(path: str) -> str:
    return os.path.splitext(os.path.basename(path).lower())[1]


def is_image_file(path: str) -> bool:
    """Return True for a file that is no list, table or archive of images."""
    return os.path.isfile(path) and file_suffix(path) not in INPUT_KINDS


def open_input(given: str, path: str, notes: list[str], progress: ProgressCallback | None) -> list[OpenedInput]:
    """Return the images of a path that is not an image file."""
    if os.path.isdir(path):
        return open_folder(path, notes, progress)
    if not os.path.exists(path) and given in downloads.DATASET_NAMES:
        return open_dataset(given, progress)
    if not os.path.exists(path):
        remedy = "give files, folders, patterns or lists of images"
        raise FileNotFoundError(f"no such file or folder: {printable_path(path)}; {remedy}")
    if not os.path.isfile(path):
        raise ValueError(f"{printable_path(path)} is neither a file nor a folder")
    match INPUT_KINDS[file_suffix(path)]:
        case "parquet":
            return [(open_parquet(path), None)]
        case "tar":
            return [(open_tar(path), None)]
        case kind:
            return [(open_path_list(path, (read_csv_paths if kind == "csv" else read_jsonl_paths)(path)), None)]


def open_folder(folder: str, notes: list[str], progress: ProgressCallback | None) -> list[OpenedInput]:
    """Return all images below a folder; without image files, those of its shards, tables or arrays."""
    walk = FolderWalker(progress=progress)
    walk.add_tree(folder, set())
    if not len(walk.files):
        try:
            return open_dataset(folder, progress)
        except ValueError:
            raise ValueError(f"no images in {printable_path(folder)}") from None
    if skipped := walk.skipped:
        first, why = skipped[0]
        notes.append(f"skipped {len(skipped):,} other files in {printable_path(folder)}, {first} first ({why})")
    return [(walk.files, None)]


def open_dataset(where: Any, progress: ProgressCallback | None) -> list[OpenedInput]:
    """Return the images of all splits of a dataset."""
    dataset = load_dataset(where, fractions=parts.TRAIN_ONLY_FRACTIONS, multi_label=parts.UNLABELLED, progress=progress)
    return [(images.store, images.items) for images in dataset.splits.values() if len(images)]


def open_path_list(path: str, column: Iterable[str]) -> FileStore:
    """Return the files of a list; their paths are relative to it."""
    folder = os.path.dirname(path)
    names = (name if "/" in name else name.replace("\\", "/") for name in column)
    store = FileStore.from_paths(os.path.join(folder, name) for name in names)
    if not len(store):
        raise ValueError(f"{printable_path(path)} lists no images")
    first = [store.path(item) for item in range(min(100, len(store)))]
    if not any(is_image_name(name) or os.path.isfile(name) for name in first):
        raise ValueError(f"{printable_path(path)} must list image paths, got {printable_path(first[0])}")
    return store


def read_csv_paths(path: str) -> Iterable[str]:
    """Yield the paths of a CSV or TSV."""
    header, rows = manifest.open_csv(path, labelled=False)
    column = manifest.find_column(header, manifest.PATH_COLUMNS)
    assert column is not None
    for line, row in rows:
        if len(row) <= column or not row[column].strip():
            raise ValueError(f"{printable_path(path)}, line {line}: no path")
        yield row[column].strip()


def read_jsonl_paths(path: str) -> Iterable[str]:
    """Yield the paths of JSON lines, each an object with a key of a path column."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{printable_path(path)}, line {number}: not JSON ({error})") from None
            values = {str(key).casefold(): value for key, value in entry.items()} if isinstance(entry, dict) else {}
            value = next((values[name] for name in manifest.PATH_COLUMNS if name in values), None)
            if not isinstance(value, str) or not value.strip():
                example = '{"path": "cat.jpg"}'
                raise ValueError(f"{printable_path(path)}, line {number}: no path; expected a line like {example}")
            yield value.strip()


def open_parquet(path: str) -> Store:
    """Return the images embedded in a Parquet file, or the files it lists."""
    with parquet.open_table(path) as opened:
        schema = opened.schema_arrow
        column = parquet.find_image_column(schema)
        if column is not None:
            counts = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
            firsts = np.cumsum([0, *counts], dtype=np.int64)
            groups = [(int(firsts[group]), 0, group) for group, count in enumerate(counts) if count]
            starts = np.array(groups, dtype=np.int64).reshape(-1, 3)
            return parquet.ParquetStore([path], column, starts, int(firsts[-1]))
        path_column = manifest.find_column(schema.names, manifest.PATH_COLUMNS)
        if path_column is None:
            raise ValueError(f"{printable_path(path)} has no column of images or paths, only {', '.join(schema.names)}")
        values = opened.read(columns=[schema.names[path_column]]).column(0).to_pylist()
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{printable_path(path)}, row {row:,}: no path")
    return open_path_list(path, values)


def open_tar(shard: str) -> Store:
    """Return the images in a tar file, each as a separate sample."""
    store = tar.TarStore([shard])
    for member, _ in tar.iter_members(shard):
        if os.path.basename(member.name)[:1] != "." and is_image_name(member.name):
            store.add(0, member.name, member.offset_data, member.size)
    if not len(store):
        raise ValueError(f"no images in {printable_path(shard)}")
    return store


def sample_evenly(inputs: ImageInputs, count: int, exclude: Set[str] = frozenset()) -> list[int]:
    """Return `count` evenly spaced indices, without the images named in `exclude` if enough others are left."""
    others = [index for index in range(len(inputs)) if inputs.name(index) not in exclude] if exclude else []
    pool = others if len(others) >= count else range(len(inputs))
    positions = np.linspace(0, len(pool) - 1, min(count, len(pool))).round().astype(np.int64)
    return [pool[position] for position in positions.tolist()]

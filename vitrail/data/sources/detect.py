"""Detection of the kind of a data source: a name, a folder, a file, or a pattern of files."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitrail.data.class_names import rename_classes
from vitrail.data.dataset import Dataset, Images
from vitrail.data.remote import shards
from vitrail.data.remote.file import RemoteFile
from vitrail.data.remote.urls import is_remote, parse_split_sources, redact
from vitrail.data.sources import (
    coco,
    downloads,
    json_lines,
    layouts,
    manifest,
    mask_folders,
    moving_digits,
    objects,
    parquet,
    tables,
    tar,
    vtab,
)
from vitrail.data.sources import splits as parts
from vitrail.data.sources.arrays import IDX_NAME, detect_cifar, read_cifar, read_digits, read_idx
from vitrail.data.sources.file_names import read_file_names
from vitrail.data.sources.files import is_ignored_name, read_class_folders
from vitrail.data.sources.numbers import parse_targets

BRACE_PATTERN = re.compile(r"\{([^{}]*)\}")
RANGE_PATTERN = re.compile(r"(\d+)\.\.(\d+)")
MAX_EXPANSION = 1_000_000


def is_pattern(source: str) -> bool:
    """Return True if the path is a pattern."""
    return any(letter in source for letter in "*?[{")


def expand_pattern(pattern: str) -> list[str]:
    """Return the files that match a pattern. Files named by braces must exist."""
    paths: list[str] = []
    for path in expand_braces(pattern):
        matches = sorted(glob.glob(path)) if is_pattern(path) else [path]
        if not matches:
            raise FileNotFoundError(f"no file matches {path}")
        if not is_pattern(path) and not os.path.isfile(path):
            raise FileNotFoundError(f"missing file {path} of {pattern}")
        paths += matches
    return list(dict.fromkeys(paths))


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern: number ranges, with leading zeros, and comma-separated lists."""
    match = BRACE_PATTERN.search(pattern)
    if not match:
        return [pattern]
    inside = match[1]
    if numbers := RANGE_PATTERN.fullmatch(inside):
        first, last = int(numbers[1]), int(numbers[2])
        if last < first:
            raise ValueError(f"{pattern}: the range {{{inside}}} is empty: write {{{numbers[2]}..{numbers[1]}}}")
        if last - first >= MAX_EXPANSION:
            raise ValueError(f"{pattern}: the range {{{inside}}} must have at most {MAX_EXPANSION:,} numbers")
        choices = [f"{number:0{len(numbers[1])}d}" for number in range(first, last + 1)]
    elif "," in inside:
        choices = inside.split(",")
    else:
        raise ValueError(f"{pattern}: {{{inside}}} is neither a range, {{000..009}}, nor a list, {{train,val}}")
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [word for choice in choices for word in expand_braces(before + choice + after)]


def load_dataset(
    source: Any,
    *,
    fractions: parts.Fractions | None = None,
    multi_label: parts.LabelMode = None,
    progress: parts.ProgressCallback | None = None,
    label_from: str | None = None,
    names: str | None = None,
    ignore: int | Sequence[int] | None = None,
    default_ignore: Sequence[int] = (),
    targets: str | Sequence[str] | None = None,
    sample: bool = False,
) -> Dataset:
    """Load images with labels, masks or numbers: a name, a folder, a file, a pattern, an address, a Python object.

    Addresses are hf://datasets/owner/name, and those of tar shards and Parquet files, http(s):// and s3://. Of these, `sample`
    reads a part only: the first samples of a few shards.

    Objects are datasets of samples (`vitrail.data.dataset.Samples`, PyTorch's for example), lists of (image, label), a tuple
    (images, labels) of arrays, frames of pandas or Polars, Hugging Face datasets, and dictionaries of splits.

    `fractions` (train, validation, test) split data without splits (default 80, 20, 0 %; a training set that comes with a
    test set: 90, 10 %). `multi_label` states whether images have several labels (default: detected); "unlabelled" accepts data
    without labels, such as flat folders; "captions" reads a column of texts, also where there are labels. `progress` is called
    with the activity, the count done and the total (0: unknown).
    `label_from` is a regular expression that finds the class in a file name, or in the path if it contains a slash; the
    source is then a folder or a pattern of image files. `names` is a file with readable names of the classes, or "imagenet".
    `ignore` are stored values of masks that neither train nor count, besides 255 and those that the data states;
    `default_ignore`, those of a model for example, are used if `ignore` is None and the data has masks.
    `targets` are columns of numbers to learn, in place of labels: of a table, or keys of samples that are dictionaries; values of
    other samples are named by them.
    """
    values = parse_ignored_values(ignore)
    numbers = parse_targets(targets, {"task": multi_label, "label_from": label_from, "names": names, "ignore": ignore})
    options = parts.ReadOptions(
        fractions,
        multi_label,
        progress,
        label_from,
        ignore=values,
        default_ignore=tuple(default_ignore),
        targets=numbers,
        sample=sample,
    )
    dataset = read_source(source, options)
    if numbers and any(images.target_kind != "numbers" for images in dataset.splits.values()):
        raise refuse_targets(dataset.source)
    if options.wants_captions and any(images.target_kind != "captions" for images in dataset.splits.values()):
        raise refuse_caption_source(dataset.source)
    if (
        values
        and all(images.target_kind != "masks" for images in dataset.splits.values())
        and multi_label != "unlabelled"
    ):
        raise ValueError(f"ignore= is for masks: {dataset.source} has none")
    if multi_label is True and not all(images.is_multi_label for images in dataset.splits.values()):
        dataset = replace(dataset, splits={name: to_one_hot(images) for name, images in dataset.splits.items()})
    dataset = replace(dataset, source=redact(os.fspath(source))) if isinstance(source, str | os.PathLike) else dataset
    return dataset if names is None else rename_classes(dataset, names)


def refuse_targets(source: str) -> ValueError:
    """Return the error for targets of data that has no columns of numbers."""
    return ValueError(f"{source} is no table with columns of numbers: give a CSV, TSV, JSONL or Parquet file")


def refuse_caption_source(source: str) -> ValueError:
    """Return the error for captions of data that has none."""
    return ValueError(f"{source} has no captions: give a table with the columns image and caption, such as a CSV")


def parse_ignored_values(ignore: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the stored values to ignore."""
    if ignore is None:
        return None
    values = (ignore,) if isinstance(ignore, int) else tuple(ignore)
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"ignore must be whole numbers >= 0, got {ignore}")
    return values


def read_source(source: Any, options: parts.ReadOptions) -> Dataset:
    """Load a path, a name or a Python object."""
    if isinstance(source, list | tuple) and source and all(map(is_remote, source)):
        source = ",".join(source)
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        return detect_dataset(path, options) if options.label_from is None else read_named_files(path, options)
    if options.label_from is not None:
        raise ValueError(f"label_from= is for files: {objects.describe_object(source)} has labels of its own")
    if tables.is_frame(source):
        return tables.read_frame(source, options)
    if tables.is_hub_data(source):
        return tables.read_hub_data(source, options, read_source)
    return objects.read_object(source, options, read_source)


def resolve_source(source: str) -> str | None:
    """Return a source with an absolute path; an address without its credentials; None for a name or a missing file."""
    path = os.path.expanduser(source)
    if is_remote(source):
        return redact(source)
    if os.path.exists(path):
        return os.path.realpath(path)
    if splits := parse_split_sources(source):
        resolved = [(name, resolve_source(part)) for name, part in splits.items()]
        return (
            None if any(path is None for _, path in resolved) else ",".join(f"{name}={path}" for name, path in resolved)
        )
    prefix, colon, folder = source.partition(":")
    prefixes = (layouts.CLASSES_PREFIX, layouts.FRAMES_PREFIX, mask_folders.MASKS_PREFIX)
    if colon and (vtab.parse_source(source) or source.startswith(prefixes)):
        resolved = resolve_source(folder)
        return resolved and prefix + colon + resolved
    return os.path.abspath(path) if is_pattern(path) else None


def read_named_files(source: str, options: parts.ReadOptions) -> Dataset:
    """Read the images of a folder or of a pattern, with labels in their names."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        if options.needs_labels:
            layouts.check_names_layout(path)
        return read_file_names(source, path, None, options)
    if is_remote(source) or parse_split_sources(source):
        raise ValueError(f"label_from= is for files: {redact(source)} has labels of its own")
    if not is_pattern(path):
        raise ValueError(f"label_from= needs a folder of images, or a pattern such as 'photos/*.jpg', got {source}")
    fixed = path[: next(i for i, letter in enumerate(path) if letter in "*?[{")]
    return read_file_names(source, os.path.dirname(fixed) or ".", expand_pattern(path), options)


def detect_dataset(source: str, options: parts.ReadOptions) -> Dataset:
    """Load a dataset by its kind. An existing path takes precedence over a name."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        dataset = read_directory(path, options)
        note = f"{source} is the local folder, not the published dataset of this name"
        return replace(dataset, notes=(*dataset.notes, note)) if source in downloads.DATASET_NAMES else dataset
    if os.path.isfile(path):
        return read_files(source, [path], options)
    if is_remote(source):
        return read_shards(redact(source), shards.find_shards(source, expand_braces, options.progress), options)
    if splits := parse_split_sources(source):
        return read_split_sources(redact(source), splits, options)
    if source.startswith(tables.HUB_PREFIX):
        return tables.read_hub(source, options, read_source)
    if source.startswith(objects.PREFIX):
        raise objects.refuse_name(source)
    prefixes = (layouts.CLASSES_PREFIX, layouts.FRAMES_PREFIX, mask_folders.MASKS_PREFIX)
    known = source in downloads.DATASET_NAMES or moving_digits.parse_count(source)
    named = known or path.startswith(prefixes) or vtab.parse_source(path)
    if options.targets and named:
        raise refuse_targets(source)
    for prefix in (layouts.CLASSES_PREFIX, layouts.FRAMES_PREFIX):
        if path.startswith(prefix):
            folder = os.path.expanduser(path.removeprefix(prefix))
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"{source}: no such folder")
            return read_class_folders(folder, options, frames=prefix == layouts.FRAMES_PREFIX)
    if path.startswith(mask_folders.MASKS_PREFIX):
        return read_pairs(source, os.path.expanduser(path.removeprefix(mask_folders.MASKS_PREFIX)), options)
    if vtab_source := vtab.parse_source(path):
        return vtab.read_vtab(vtab_source[0], os.path.expanduser(vtab_source[1]), options)
    if source == downloads.BUILTIN:
        return read_digits(source, options)
    if count := moving_digits.parse_count(source):
        return moving_digits.read_moving_digits(source, count, options)
    if source in downloads.PUBLISHED_DATASETS:
        return detect_dataset(downloads.ensure_downloaded(source, options.progress), options)
    if is_pattern(path):
        return read_files(source, expand_pattern(path), options)
    raise FileNotFoundError(downloads.format_unknown_source(source))


def read_shards(source: str, files: Sequence[str], options: parts.ReadOptions) -> Dataset:
    """Read shards of which some may be remote; of remote ones, a sample if that is asked for."""
    sample = shards.sample_shards(files, [manifest.split_from_path(file) for file in files]) if options.sample else None
    if sample is None:
        dataset = read_files(source, files, options)
    else:
        dataset = read_files(source, sample.shards, replace(options, sampled_rows=shards.SAMPLES_PER_SHARD))
        store = next(iter(dataset.splits.values())).store
        if len(sample.shards) < sample.of or not is_whole(store):
            note = sample.describe(sum(map(len, dataset.splits.values())))
            dataset = replace(dataset, sampled=(len(sample.shards), sample.of), notes=(note, *dataset.notes))
    if any(isinstance(file, RemoteFile) and not file.version.ranges for file in files):
        note = "the server sends whole files only (no Range): every shard is downloaded before it is read"
        dataset = replace(dataset, notes=(*dataset.notes, note))
    return dataset


def is_whole(store: Any) -> bool:
    """Return True if a sample has all samples of its shards."""
    if isinstance(store, tar.TarStore):
        return not len(store) or int(np.bincount(store.shard).max()) < shards.SAMPLES_PER_SHARD
    return len(store) == sum(parquet.open_table(file).metadata.num_rows for file in store.files)


def read_split_sources(source: str, sources: dict[str, str], options: parts.ReadOptions) -> Dataset:
    """Read the splits of train=DATA,validation=DATA."""
    found: list[Dataset] = []

    def read(part: Any, part_options: parts.ReadOptions) -> Dataset:
        found.append(read_source(part, part_options))
        return found[-1]

    dataset = objects.read_splits(source, sources, options, read)
    sampled = [part.sampled for part in found if part.sampled is not None]
    counts = (sum(read for read, _ in sampled), sum(of for _, of in sampled)) if sampled else None
    return replace(dataset, kind=found[0].kind, fingerprint=None, sampled=counts)


def read_directory(folder: str, options: parts.ReadOptions) -> Dataset:
    """Load a folder by its contents."""
    names = sorted(os.listdir(folder))
    if any(map(IDX_NAME.fullmatch, names)):
        return read_idx(folder, options)
    if detect_cifar(names):
        return read_cifar(folder, options)
    if path := manifest.find_manifest(folder, names, options):
        return read_files(folder, [path], options)
    if tables := find_shards(folder, names, ".parquet"):
        return read_files(folder, tables, options)
    if options.targets:
        raise refuse_targets(folder)
    # A tar file beside folders is usually the archive they were unpacked from; shards have no class folders beside them.
    archives = find_shards(folder, names, ".tar")
    if archives and not has_class_folders(folder, names, archives):
        return read_files(folder, archives, options)
    if not layouts.find_published(folder):
        root, pairs = mask_folders.find_mask_folders(folder)
        if pairs:
            return mask_folders.read_mask_folders(folder, root, pairs, options)
        if options.needs_labels and (files := coco.find_coco_files(folder)):
            return coco.read_coco(folder, files, options)
    notes = layouts.check_layout(folder) if options.needs_labels else ()
    dataset = read_class_folders(folder, options)
    return replace(dataset, notes=(*dataset.notes, *notes))


def read_pairs(source: str, folder: str, options: parts.ReadOptions) -> Dataset:
    """Load a folder of images and masks, also one that would be read as something else."""
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{source}: no such folder")
    root, pairs = mask_folders.find_mask_folders(folder, trusted=True)
    if not pairs:
        raise layouts.LayoutError(
            f"{folder} has no folder of images beside one of masks: use images/ and masks/, or a.jpg with a_mask.png"
        )
    return mask_folders.read_mask_folders(folder, root, pairs, options)


def find_shards(folder: str, names: Sequence[str], suffix: str) -> list[str]:
    """Return the shards in a folder, in its folder `data`, and in split folders in either."""
    paths: list[str] = []
    for name in names:
        path = os.path.join(folder, name)
        if name.lower().endswith(suffix) and not is_ignored_name(name):
            paths.append(path)
        elif (name == "data" or parts.parse_split_name(name)) and os.path.isdir(path):
            below = sorted(os.listdir(path))
            if name != "data":
                below = [child for child in below if child.lower().endswith(suffix)]
            paths += find_shards(path, below, suffix)
    return paths


def has_class_folders(folder: str, names: Sequence[str], shards: Sequence[str]) -> bool:
    """Return True if there are folders without shards."""
    below = [os.path.join(folder, name) for name in names if not is_ignored_name(name)]
    return any(os.path.isdir(path) and not any(shard.startswith(path + os.sep) for shard in shards) for path in below)


def read_files(source: str, files: Sequence[str], options: parts.ReadOptions) -> Dataset:
    """Load files of one kind, by their suffix."""
    kinds = {detect_file_kind(file) for file in files}
    if len(kinds) > 1:
        raise ValueError(f"{source} has files of different kinds ({', '.join(sorted(kinds))}): give one kind")
    if options.targets and not kinds <= {"csv", "parquet", "jsonl"}:
        raise refuse_targets(source)
    match kinds.pop():
        case "parquet":
            return parquet.read_parquet(source, files, options)
        case "tar":
            return tar.read_tar(source, files, options)
        case "csv" if len(files) == 1:
            return manifest.read_csv(files[0], options)
        case "jsonl" if len(files) == 1:
            return json_lines.read_json_lines(files[0], options)
        case "json":
            return coco.read_coco(source, coco.open_coco_files(files), options)
        case "archive" if len(files) == 1:
            return read_cifar(files[0], options)
        case "idx":
            raise ValueError(f"{files[0]} is one of four IDX files: give their folder")
        case "txt":
            listed = [
                shard
                for file in files
                for shard in shards.read_local_list(file, expand_pattern, expand_braces, options.progress)
            ]
            return read_shards(source, listed, options)
        case "csv" | "jsonl" | "archive":
            raise ValueError(f"{source} matches {len(files)} files: give one of them")
    if command := layouts.unpack_command(files[0]):
        raise ValueError(f"{files[0]} is an archive: unpack it first: {command}")
    known = f"a folder, a CSV, JSONL or Parquet file, tar shards, or a name ({', '.join(downloads.DATASET_NAMES)})"
    raise ValueError(f"{files[0]} is not a supported data file: give {known}")


def detect_file_kind(file: str) -> str:
    """Return the kind of a file by its name."""
    name = os.path.basename(file).lower()
    if name.endswith((".tar.gz", ".tgz")):
        return "archive"
    if name.endswith((".csv", ".tsv")):
        return "csv"
    if IDX_NAME.fullmatch(name):
        return "idx"
    return os.path.splitext(name)[1].removeprefix(".") or "without a suffix"


def to_one_hot(images: Images) -> Images:
    """Convert single labels to multi-label targets."""
    targets = np.zeros((len(images), len(images.classes)), dtype=np.uint8)
    targets[np.arange(len(images)), images.targets] = 1
    return replace(images, targets=targets)

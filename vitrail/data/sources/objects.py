"""Python objects as data: datasets of samples, lists, arrays, and dictionaries of splits; with labels or masks."""

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.utils.data as torch_data
from PIL import Image
from torch import Tensor

from vitrail.data.class_names import HINTS
from vitrail.data.dataset import SPLITS, Dataset, Images
from vitrail.data.decode import DECODER_ERRORS, IMAGE_ERRORS, name_image_errors
from vitrail.data.images import CHANNELS, NotAnImageError, encode_image, is_image, to_image
from vitrail.data.sources import splits as parts
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.sources.files import SKIP_UNREADABLE, FileStore, find_media
from vitrail.data.sources.manifest import LABEL_COLUMNS, MASK_COLUMNS, PATH_COLUMNS, Label, build_dataset
from vitrail.data.sources.mask_classes import MaskClasses, build_classes, classes_from_values, make_entry
from vitrail.data.sources.masks import (
    EncodedMasks,
    MaskError,
    build_mask_dataset,
    count_pixels,
    decode_stored_mask,
    is_grey,
)
from vitrail.data.sources.numbers import NumberRows, build_number_dataset, list_cells

PREFIX = "python:"  # of the name of an object in place of a path, "python:list"
READ_ERRORS = (*IMAGE_ERRORS, *DECODER_ERRORS)
CHECKED_TWICE = 3  # first images, whose pixels must not change between two reads
DATA_KINDS = "a path, a dataset, a list of (image, label) or (image, mask), a table, or a dict of splits"
ReadSource = Callable[[Any, parts.ReadOptions], Dataset]


def describe_object(data: object) -> str:
    """Return the name that stands for an object where data has a path or a name: python:list."""
    if isinstance(data, tuple):
        return f"{PREFIX}{'arrays' if any(isinstance(part, np.ndarray | Tensor) for part in data) else 'tuple'}"
    return PREFIX + type(data).__name__


def name_object(source: str, options: parts.ReadOptions) -> str:
    """Return the name of an object in messages: that of its split in a dictionary, or of its type."""
    return options.name or source.removeprefix(PREFIX)


def refuse_name(source: str) -> ValueError:
    """Return the error for the name of an object where the object itself is needed."""
    return ValueError(f"{source} is a Python object, not a file: give the object itself, in Python")


class ObjectStore:
    """Images held by a sequence of values that `to_image` takes, with a hash of each."""

    def __init__(self, images: Any, label: str, hashes: np.ndarray) -> None:
        self.images, self.label = images, label
        self.hashes = hashes  # [n] uint64: of the content, or of the name if it is unreadable
        self._process, self._lock = -1, None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": -1, "_lock": None}

    def __len__(self) -> int:
        return len(self.hashes)

    def name(self, item: int) -> str:
        return f"{self.label}[{item}]"

    def value(self, item: int) -> Any:
        """Return the value of an image; one thread at a time, since a dataset may not be thread-safe."""
        if self._process != os.getpid():  # a lock that another thread holds during a fork would stay locked
            self._process, self._lock = os.getpid(), threading.Lock()
        assert self._lock is not None
        with self._lock, name_image_errors(self.name(item)):
            return self.images[item]

    def open(self, item: int) -> Image.Image:
        return to_image(self.value(item), self.name(item))

    def data(self, item: int) -> bytes:
        return encode_image(self.value(item), self.name(item))

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None


@dataclass(frozen=True)
class MaskCell:
    """A mask by the name of its column, whatever its type: a path may be one."""

    value: Any


def is_mask(target: object) -> bool:
    """Return True for the target of an image that is a mask: an image, or an array of two or more dimensions."""
    has_pixels = isinstance(target, np.ndarray | Tensor) and target.ndim >= 2
    return has_pixels or isinstance(target, MaskCell | Image.Image)


class MaskValues(ObjectStore):
    """Masks held by a sequence of values: images, or arrays and tensors of whole numbers, [H, W]."""

    def name(self, item: int) -> str:
        return f"{self.label}[{item}].mask"

    def open(self, item: int) -> Image.Image:
        return to_mask_image(self.value(item), self.name(item))


def to_mask_image(value: Any, name: str) -> Image.Image:
    """Return a mask as an image of its values; raise ValueError for a value that stands for no mask."""
    if isinstance(value, MaskCell):
        value = value.value
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
        value = value.transpose(1, 2, 0) if value.ndim == 3 and value.shape[0] in CHANNELS else value
    if not isinstance(value, np.ndarray):
        return to_image(value, name)
    if not (np.issubdtype(value.dtype, np.integer) or value.dtype == np.bool_):
        raise NotAnImageError(f"{name} has the type {value.dtype}: a mask has whole numbers from 0 to 255")
    if value.ndim == 3 and 1 in (value.shape[0], value.shape[2]):
        value = value[0] if value.shape[0] == 1 else value[..., 0]
    if not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in CHANNELS)) or not value.size:
        raise NotAnImageError(f"{name} has the shape {list(value.shape)}: a mask is [H, W]")
    if value.min() < 0 or value.max() > 255:
        limits = f"values from {int(value.min()):,} to {int(value.max()):,}"
        raise MaskError("mask-depth", f"{name}: {limits} do not fit 8 bits: use 0 to 255")
    return Image.fromarray(np.ascontiguousarray(value.astype(np.uint8)))


@dataclass
class MaskSummary:
    """Masks of an object that were read once: a hash of each, and the number of pixels of each value."""

    store: MaskValues | FileStore
    hashes: np.ndarray  # [n] uint64
    counts: np.ndarray = field(default_factory=lambda: np.zeros(256, dtype=np.int64))
    error: Exception | None = None  # the first; the audit lists all

    def add(self, item: int, value: Any = None) -> None:
        """Read a mask, or take its value if that was read already; a value that stands for no mask is an error."""
        name = self.store.name(item)
        try:
            with self.store.open(item) if value is None else to_mask_image(value, name) as image:
                stored = decode_stored_mask(image, name).values
            self.hashes[item] = parts.hash_bytes(f"{stored.shape}\0".encode() + stored.tobytes())
            if stored.ndim == 3 and not is_grey(stored):
                raise NotAnImageError(f"{name} has colours: give values from 0 to 255, [H, W]")
            self.counts += count_pixels(stored, name)
        except NotAnImageError:
            raise
        except READ_ERRORS as error:
            self.error = self.error or error
            self.hashes[item] = self.hashes[item] or parts.hash_bytes(name.encode())

    def find_classes(self, names: Sequence[str] | None, source: str, options: parts.ReadOptions) -> MaskClasses:
        """Return the classes with these names, in order of their values from 0; without names, the values that occur."""
        if names is not None:
            entries = [make_entry(value, name) for value, name in enumerate(names)]
            return build_classes(entries, options.ignored_pixels, "classes")
        if not self.counts.any() and self.error is not None:
            raise ValueError(f"no mask can be used, of {len(self.hashes):,}; first {self.error}")
        classes = classes_from_values(self.counts, options.ignored_pixels, source)
        return replace(classes, note=name_with_option(classes.note))


def name_with_option(note: str) -> str:
    """Return the note about classes that are values, for data without a folder of its own."""
    return note.replace(*HINTS)


def read_masks(values: Sequence[Any], label: str, options: parts.ReadOptions) -> MaskSummary:
    """Read a sequence of masks; if it is a list of paths, the store is one of files."""
    cells = [value.value for value in values if isinstance(value, MaskCell)] if isinstance(values, list) else []
    hashes = np.zeros(len(values), dtype=np.uint64)
    if len(cells) == len(values) and all(isinstance(cell, str | os.PathLike) for cell in cells):
        masks = MaskSummary(FileStore.from_paths(os.path.expanduser(os.fspath(cell)) for cell in cells), hashes)
    else:
        masks = MaskSummary(MaskValues(values, label, hashes), hashes)
    for item in iterate(len(values), options) if options.needs_labels else ():
        masks.add(item)
    return masks


def hash_value(value: Any, name: str) -> int:
    """Return 64 bits of a hash of an image: of its encoded bytes, or of its size, mode and pixels."""
    if isinstance(value, Image.Image | np.ndarray | Tensor):
        with to_image(value, name) as image:
            return parts.hash_bytes(f"{image.mode} {image.size}\0".encode() + image.tobytes())
    if not is_image(value) and not isinstance(value, Mapping):
        to_image(value, name)  # raises
    return parts.hash_bytes(encode_image(value, name))


def store_values(images: Sequence[Any], label: str, options: parts.ReadOptions) -> ObjectStore:
    """Return a store of values; raise NotAnImageError for one that stands for no image."""
    hashes = np.zeros(len(images), dtype=np.uint64)
    store = ObjectStore(images, label, hashes)
    for item in iterate(len(images), options):
        try:
            hashes[item] = hash_value(store.value(item), store.name(item))
        except NotAnImageError:
            raise
        except READ_ERRORS:  # the audit reports it
            hashes[item] = parts.hash_bytes(store.name(item).encode())
    return store


def iterate(count: int, options: parts.ReadOptions) -> Iterator[int]:
    """Yield the numbers below `count`, with progress."""
    for item in range(count):
        yield item
        if options.progress and (item % 64 == 63 or item + 1 == count):
            options.progress("reading", item + 1, count)


class LabelReader:
    """Conversion of the labels of Python objects to class names."""

    def __init__(self, classes: Sequence[str] | None = None) -> None:
        self.classes = None if classes is None else tuple(map(str, classes))
        self.width = 0  # of multi-hot vectors

    @property
    def order(self) -> tuple[str, ...] | None:
        """Return the class names in their order, or None if they follow from the labels."""
        return self.classes or (tuple(map(str, range(self.width))) if self.width else None)

    def read(self, value: Any, name: str) -> Label | None:
        """Return the label of a value: an index, a name, several names, or a multi-hot vector; None if there is none."""
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray | np.generic):
            value = value.item() if value.ndim == 0 else value.tolist()
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            return None
        if isinstance(value, list | tuple | set | frozenset):
            return self.read_several(list(value), name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str):
            if self.classes is not None and value not in self.classes:
                raise ValueError(f"{name} has the label {value!r}, which is not one of the dataset's classes")
            return value
        if not isinstance(value, int):
            remedy = ", or targets='NAME' for numbers" if isinstance(value, float) else ""
            raise ValueError(f"{name} has the label {value!r}: give an index, a name, or a multi-hot vector{remedy}")
        if self.classes is None:
            return str(value)
        if not 0 <= value < len(self.classes):
            raise ValueError(f"{name} has the label {value}, but the dataset names {len(self.classes)} classes")
        return self.classes[value]

    def read_several(self, values: list[Any], name: str) -> tuple[str, ...]:
        """Return the names in a list of names, or of the ones in a multi-hot vector."""
        if all(isinstance(value, str) for value in values):
            return tuple(str(self.read(value, name)) for value in values)
        width = len(self.classes) if self.classes is not None else self.width or len(values)
        if len(values) != width or any(value not in (0, 1) for value in values):
            shown = f"{str(values)[:40]}{'…' * (len(str(values)) > 40)}"
            raise ValueError(f"{name} has the label {shown}: give names, or {width} values of 0 and 1")
        self.width = width
        return tuple(self.order[k] for k, value in enumerate(values) if value)  # type: ignore[index]


class NumberReader(LabelReader):
    """Conversion of the values of Python objects to lists of numbers, which are checked later."""

    def read(self, value: Any, name: str) -> Any:
        return list_cells(value)


def make_reader(options: parts.ReadOptions, classes: Sequence[str] | None = None) -> LabelReader:
    """Return the reader of labels, or of numbers."""
    return NumberReader() if options.targets else LabelReader(classes)


@dataclass
class SampleList:
    """Images and labels read from an object, before they are split."""

    source: str
    images: Any  # a sequence of values, or a store
    labels: list[Any]  # of classes, or cells of numbers; None without
    order: Sequence[str] | None = None  # of the classes
    splits: Sequence[str | None] | None = None
    items: np.ndarray | None = None  # indices of the readable images
    skipped: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    masks: MaskSummary | None = None  # in place of labels

    def build(self, options: parts.ReadOptions) -> Dataset:
        """Return the dataset, split by content if it has no splits."""
        kind, label = self.source.removeprefix(PREFIX), name_object(self.source, options)
        labels, order = self.labels, self.order
        if self.masks is not None and options.needs_labels:
            return self.build_masks(self.masks, kind, label, options)
        if not options.targets and None in labels:
            if options.needs_labels:
                item = labels.index(None) if self.items is None else int(self.items[labels.index(None)])
                raise ValueError(
                    f"{label}[{item}] has no label: give pairs of image and label, or use vitrail.pretrain"
                )
            labels, order = [parts.UNLABELLED_CLASS] * len(labels), None
        store = self.open_store(label, options)
        splits, about = self.splits or [None] * len(labels), {"notes": self.notes, "skipped": self.skipped}
        if options.targets:
            rows = NumberRows(options.targets)
            for row, cells in enumerate(labels):
                rows.add(row, cells, store.name(row if self.items is None else int(self.items[row])))
            dataset = build_number_dataset(self.source, kind, store, rows, splits, options, items=self.items, **about)
        else:
            known = [label for label in labels if label is not None]
            dataset = build_dataset(
                self.source, kind, store, known, splits, options, items=self.items, class_order=order, **about
            )
        hashes = None if isinstance(store, FileStore) else parts.hash_images(store, np.arange(len(store)))
        return replace(dataset, fingerprint=None if hashes is None else hashlib.sha256(hashes.tobytes()).hexdigest())

    def open_store(self, label: str, options: parts.ReadOptions) -> Any:
        """Return the store of the images: of files, if all of them are paths."""
        store = self.images
        if isinstance(store, ObjectStore | ArrayStore | FileStore):
            return store
        is_files = len(store) > 0 and all(isinstance(value, str | os.PathLike) for value in store)
        paths = [os.path.expanduser(os.fspath(value)) for value in store] if is_files else []
        return (
            FileStore.from_paths(paths, find_media(label, paths)) if is_files else store_values(store, label, options)
        )

    def build_masks(self, masks: MaskSummary, kind: str, label: str, options: parts.ReadOptions) -> Dataset:
        """Return the dataset of images with masks."""
        store = self.open_store(label, options)
        items = np.arange(len(masks.hashes)) if self.items is None else self.items
        classes = masks.find_classes(self.order, label, options)
        pairs = EncodedMasks(masks.store, items, store, items, classes)
        dataset = build_mask_dataset(
            self.source,
            kind,
            store,
            items,
            self.splits or [None] * len(items),
            pairs,
            classes,
            options,
            notes=self.notes,
            skipped=self.skipped,
        )
        if isinstance(store, FileStore) and isinstance(masks.store, FileStore):
            return dataset
        content = parts.hash_images(store, np.arange(len(store))).tobytes() + masks.hashes.tobytes()
        return replace(dataset, fingerprint=hashlib.sha256(content).hexdigest())


def read_object(data: Any, options: parts.ReadOptions, read: ReadSource) -> Dataset:
    """Read a Python object as a dataset; `read` reads the splits of a dictionary, which may be paths."""
    source = describe_object(data)
    if isinstance(data, Images | Dataset) and options.ignore:
        raise ValueError("ignore= is for masks that are not read yet: give it to load_dataset")
    if isinstance(data, Images):
        data = Dataset(source, "images", {data.split: data})
    if isinstance(data, Dataset):
        return parts.add_validation_split(data, options)
    if isinstance(data, Mapping):
        return read_splits(source, data, options, read)
    if isinstance(data, torch_data.DataLoader):
        raise ValueError("a DataLoader has an order and batches of its own: give its dataset, loader.dataset")
    if isinstance(data, torch_data.IterableDataset) or not (isinstance(data, Sized) and hasattr(data, "__getitem__")):
        what = "can be read only from its start" if hasattr(data, "__iter__") else "is not a dataset"
        raise ValueError(f"{type(data).__name__} {what}: give {DATA_KINDS}")
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], str | os.PathLike | bytes | Image.Image):
        return read_arrays(source, data[0], data[1], options)
    if isinstance(data, np.ndarray | Tensor) or (isinstance(data, list | tuple) and data and is_image(data[0])):
        return read_arrays(source, data, [None] * len(data), options)
    if isinstance(data, list | tuple):
        name = name_object(source, options)
        pairs = [split_sample(sample, f"{name}[{item}]", options) for item, sample in enumerate(data)]
        return read_arrays(source, [image for image, _ in pairs], [label for _, label in pairs], options)
    return read_samples(source, data, options)


def read_splits(source: str, data: Mapping[str, Any], options: parts.ReadOptions, read: ReadSource) -> Dataset:
    """Read a dictionary of splits; each may be anything that is data without splits of its own."""
    if unknown := [name for name in data if parts.parse_split_name(str(name)) is None]:
        raise ValueError(f"unknown split {unknown[0]!r}: name the splits train, validation and test")
    read_parts: dict[str, Dataset] = {}
    for name, value in data.items():
        split = str(parts.parse_split_name(str(name)))
        part = read(value, replace(options, fractions=parts.TRAIN_ONLY_FRACTIONS, name=str(name)))
        images = next(iter(part.splits.values())) if len(part.splits) == 1 else part.splits.get(split)
        if images is None:
            raise ValueError(f"{name!r} has splits of its own, {', '.join(part.splits)}: give one of them")
        if split in read_parts:
            raise ValueError(f"{name!r} is a second {split} split: give each split once")
        read_parts[split] = replace(part, splits={split: replace(images, split=split)})
    if not read_parts:
        raise ValueError('the dictionary of splits is empty: give {"train": …, "validation": …}')
    splits = {name: read_parts[name][name] for name in SPLITS if name in read_parts}
    kinds = {images.target_kind for images in splits.values()}
    if len(kinds) > 1 and kinds & {"masks", "numbers"}:
        raise ValueError("some splits have masks and some have labels: give one kind of data")
    if len(kinds) > 1:
        raise ValueError("some splits have one label per image and some have several: give task='multi'")
    notes = dict.fromkeys(note for part in read_parts.values() for note in part.notes)
    if joined := join_values(splits, source, options):
        splits, own, note = joined
        notes = [*(note for note in notes if note not in own), note]
    prints = [f"{split}\0{read_parts[split].fingerprint}" for split in splits]
    dataset = Dataset(
        source,
        source.removeprefix(PREFIX),
        splits,
        tuple(notes),
        tuple(entry for part in read_parts.values() for entry in part.skipped),
        hashlib.sha256("\0".join(prints).encode()).hexdigest(),
    )
    return parts.add_validation_split(dataset, options)


def join_values(
    splits: Mapping[str, Images], source: str, options: parts.ReadOptions
) -> tuple[dict[str, Images], list[str], str] | None:
    """Return the splits with one set of classes, where these are the values of masks; then the former notes and the new one.

    Each split alone has the values that occur in it. Return None for other data.
    """
    stores = [images.masks for images in splits.values() if isinstance(images.masks, EncodedMasks)]
    counts = [store.classes.counts for store in stores if store.classes.counts is not None]
    if not counts or len(counts) < len(splits):
        return None
    classes = classes_from_values(np.sum(counts, axis=0), options.ignored_pixels, name_object(source, options))
    joined = {
        split: replace(images, masks=store.with_classes(classes), classes=classes.names, ignored=classes.ignored)
        for (split, images), store in zip(splits.items(), stores, strict=True)
    }
    own = [store.classes.note for store in stores]
    return joined, own, classes.note if any(HINTS[0] in note for note in own) else name_with_option(classes.note)


def read_arrays(source: str, images: Any, labels: Any, options: parts.ReadOptions) -> Dataset:
    """Read images and their labels, two sequences of the same length."""
    if not all(isinstance(part, Sized) and isinstance(part, Iterable) for part in (images, labels)):
        raise ValueError("a tuple of two must be (images, labels), two sequences of the same length")
    if len(images) != len(labels):
        raise ValueError(f"got {len(images):,} images and {len(labels):,} labels: give one label for each image")
    reader, name = make_reader(options), name_object(source, options)
    if not options.targets and len(labels) and is_mask(labels[0]):
        targets = list(labels)
        if other := [item for item, target in enumerate(targets) if not is_mask(target)]:
            raise ValueError(f"{name}[0] has a mask and {name}[{other[0]}] has none: give one kind of target")
        masks = read_masks(targets, name, options)
        return SampleList(source, stack_images(images, name), [None] * len(targets), masks=masks).build(options)
    read_labels = [reader.read(label, f"{name}[{item}]") for item, label in enumerate(labels)]
    return SampleList(source, stack_images(images, name), read_labels, reader.order).build(options)


def stack_images(images: Any, name: str) -> Any:
    """Return images of one array as a store of it, if it is uint8 and grey or RGB; other images as they are."""
    if isinstance(images, Tensor):
        images = images.detach().cpu()
        channels_first = images.ndim == 4 and images.shape[1] in CHANNELS
        images = images.permute(0, 2, 3, 1).numpy() if channels_first else images
    if isinstance(images, np.ndarray) and images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    is_plain = isinstance(images, np.ndarray) and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3))
    if is_plain and images.dtype == np.uint8 and images.size:
        return ArrayStore(np.ascontiguousarray(images), ((0, name),), published=False)
    return images


def split_sample(sample: Any, name: str, options: parts.ReadOptions | None = None) -> tuple[Any, Any]:
    """Return the image and the label, or the numbers, of a sample; the label is None for an image alone."""
    if isinstance(sample, Mapping):
        columns = {str(key).casefold(): key for key in sample}
        image = next((columns[name] for name in (*PATH_COLUMNS, "img", "bytes") if name in columns), None)
        label = next((columns[name] for name in LABEL_COLUMNS if name in columns), None)
        mask = next((columns[name] for name in MASK_COLUMNS if name in columns), None)
        if image is None:
            raise NotAnImageError(f"{name} has no image: name it image and label, got {', '.join(map(str, sample))}")
        if options is not None and options.targets and set(options.targets) <= set(sample):
            return sample[image], [sample[target] for target in options.targets]
        if label is None and mask is not None and sample[mask] is not None:
            return sample[image], MaskCell(sample[mask])
        return sample[image], None if label is None else sample[label]
    if isinstance(sample, tuple | list) and len(sample) >= 2:
        return sample[0], sample[1]
    if isinstance(sample, tuple | list) and len(sample) == 1:
        return sample[0], None
    return sample, None


@dataclass(frozen=True)
class SampleImages:
    """The images of a dataset of samples, or with `part` 1 their masks."""

    dataset: Any
    part: int = 0

    def __getitem__(self, item: int) -> Any:
        return split_sample(self.dataset[item], "the sample")[self.part]


def read_samples(source: str, dataset: Any, options: parts.ReadOptions) -> Dataset:
    """Read a dataset whose items are samples (image, label) or (image, mask): every item once, and some again."""
    name, reader = name_object(source, options), make_reader(options, find_class_names(dataset))
    if (files := list_files(dataset)) is not None:
        labels = [reader.read(label, path) for path, label in files]
        return SampleList(source, [path for path, _ in files], labels, reader.order).build(options)
    count = len(dataset)
    store = ObjectStore(SampleImages(dataset), name, np.zeros(count, dtype=np.uint64))
    hashes = np.zeros(count, dtype=np.uint64)
    masks = MaskSummary(MaskValues(SampleImages(dataset, 1), name, hashes), hashes)
    labels, items, skipped, has_masks = [], [], [], None
    for item in iterate(count, options):
        try:
            with name_image_errors(store.name(item)):
                image, label = split_sample(dataset[item], store.name(item), options)
                store.hashes[item] = hash_value(image, store.name(item))
        except NotAnImageError:
            raise
        except READ_ERRORS as error:
            skipped.append((store.name(item), f"{SKIP_UNREADABLE}: {str(error).removeprefix(store.name(item) + ': ')}"))
            continue
        has_masks = is_mask(label) if has_masks is None else has_masks
        if has_masks != is_mask(label):
            first, other = ("a mask", "none") if has_masks else ("no mask", "one")
            raise ValueError(f"{name}[{items[0]}] has {first} and {name}[{item}] has {other}: give one kind of target")
        if has_masks:
            masks.add(item, label)
        labels.append(None if has_masks else reader.read(label, store.name(item)))
        items.append(item)
        if len(items) <= CHECKED_TWICE:
            check_same_pixels(store, masks if has_masks else None, item)
    if count and not items:
        raise ValueError(f"none of the {count:,} samples can be read: {skipped[0][0]}: {skipped[0][1]}")
    kept = np.array(items, dtype=np.int64)
    order = find_value_names(dataset) if has_masks else reader.order
    found = masks if has_masks else None
    return SampleList(source, store, labels, order, items=kept, skipped=skipped, masks=found).build(options)


def check_same_pixels(store: ObjectStore, masks: MaskSummary | None, item: int) -> None:
    """Raise ValueError if an image or its mask has other pixels when it is read again."""
    same = hash_value(store.value(item), store.name(item)) == store.hashes[item]
    if masks is not None:
        before = int(masks.hashes[item])
        again = replace(masks, hashes=np.zeros_like(masks.hashes), counts=np.zeros_like(masks.counts))
        again.add(item)
        same = same and int(again.hashes[item]) == before
    if not same:
        changed = f"{store.name(item)} gives other pixels when it is read again"
        raise ValueError(f"{changed}: leave out random transforms, the recipe augments the images")


def find_class_names(dataset: Any) -> Sequence[str] | None:
    """Return the class names that a dataset states, also those of the datasets that it is a part or a sum of."""
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str):
        return classes
    if hasattr(dataset, "dataset"):  # torch's Subset
        return find_class_names(dataset.dataset)
    of_parts = [find_class_names(part) for part in getattr(dataset, "datasets", ())]  # torch's ConcatDataset
    return of_parts[0] if of_parts and all(names == of_parts[0] for names in of_parts) else None


def find_value_names(dataset: Any) -> Sequence[str] | None:
    """Return the class names of a dataset's masks. Those of torchvision's datasets are names of images, such as breeds."""
    while isinstance(dataset, torch_data.Subset):
        dataset = dataset.dataset
    names = None if type(dataset).__module__.startswith("torchvision.") else find_class_names(dataset)
    return names if names and all(isinstance(name, str) for name in names) else None


def list_files(dataset: Any) -> list[tuple[str, int]] | None:
    """Return the files and labels of torchvision's folders without transforms, and of parts of them; None for others."""
    if type(dataset) is torch_data.Subset:
        files = list_files(dataset.dataset)
        return None if files is None else [files[int(index)] for index in dataset.indices]
    if type(dataset).__module__ != "torchvision.datasets.folder" or dataset.loader.__name__ != "default_loader":
        return None
    return list(dataset.samples) if dataset.transform is None and dataset.target_transform is None else None

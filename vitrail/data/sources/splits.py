"""Split names, and a stable split by image content for data without splits.

The split of an image depends only on a hash of its bytes. Adding or renaming images moves no other image, and copies of
an image are always in the same split.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from vitrail.data.dataset import SPLITS, Dataset, Images, Store
from vitrail.utils.progress import ProgressCallback

Fractions = tuple[float, float, float]  # train, validation, test
# True or False: images have several labels or one. None: detected. "unlabelled": data without labels gets one class.
LabelMode = bool | Literal["unlabelled", "captions"] | None  # "captions": texts, also where the data has labels
UNLABELLED = "unlabelled"
CAPTIONS = "captions"
UNLABELLED_CLASS = "picture"  # class name of unlabelled images (kept: it is stored in files)

ALIASES = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "testing": "test"}
DEFAULT_FRACTIONS: Fractions = (0.8, 0.2, 0.0)  # data without splits
TRAIN_ONLY_FRACTIONS: Fractions = (1.0, 0.0, 0.0)  # nothing is held out
HOLDOUT_FRACTIONS: Fractions = (0.9, 0.1, 0.0)  # a training set that comes with a test set
HASH_RANGE = float(2**64)


@dataclass(frozen=True)
class ReadOptions:
    """Options of every reader: fractions of data without splits, label mode, progress, labels in names."""

    fractions: Fractions | None = None
    multi_label: LabelMode = None
    progress: ProgressCallback | None = None
    label_from: str | None = None  # pattern that finds the class in a file name
    name: str = ""  # of a Python object in messages, if not that of its type
    ignore: tuple[int, ...] | None = None  # stored values of masks that neither train nor count
    default_ignore: tuple[int, ...] = ()  # in place of `ignore`, if that is None and the data has masks
    targets: tuple[str, ...] | None = None  # columns of numbers to learn, in place of labels
    sample: bool = False  # read a part of remote shards only
    sampled_rows: int | None = None  # of each shard, where a part is read

    @property
    def ignored(self) -> tuple[int, ...]:
        """Return the stored values of masks to ignore: those given, or the default ones."""
        return self.default_ignore if self.ignore is None else self.ignore

    @property
    def ignored_pixels(self) -> tuple[int, ...]:
        """Return these values for masks of pixels; default ones may be ids of COCO, which can be larger."""
        return self.ignored if self.ignore is not None else tuple(value for value in self.ignored if value <= 255)

    @property
    def wants_captions(self) -> bool:
        """Return True if captions are read, also where the data has labels."""
        return self.multi_label == CAPTIONS

    def takes_captions(self, has_labels: bool) -> bool:
        """Return True if captions are read from data that has them, and labels or masks too with `has_labels`."""
        return not self.targets and (self.wants_captions or (self.needs_labels and not has_labels))

    @property
    def needs_labels(self) -> bool:
        return self.multi_label != UNLABELLED


def parse_split_name(name: str) -> str | None:
    """Return train, validation or test for any of their spellings, otherwise None."""
    word = name.strip().casefold()
    return word if word in SPLITS else ALIASES.get(word)


def group_by_split(source: str, splits: Sequence[str | None]) -> dict[str, np.ndarray]:
    """Return the indices of the images of each split, in the usual order of splits; without splits, all are in train."""
    side = np.array([-1 if split is None else SPLITS.index(split) for split in splits], dtype=np.int8)
    if (side < 0).any() and (side >= 0).any():
        raise ValueError(f"{source} states the split of some images, but not of all")
    side = np.maximum(side, 0)
    found = {split: np.flatnonzero(side == number) for number, split in enumerate(SPLITS)}
    return {split: chosen for split, chosen in found.items() if len(chosen)}


def check_fractions(fractions: Fractions) -> Fractions:
    """Return the fractions if they are valid."""
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6 or not fractions[0]:
        raise ValueError(f"fractions must be 3 numbers >= 0 that add to 1, with train > 0, got {fractions}")
    return fractions


def add_validation_split(dataset: Dataset, options: ReadOptions, default: Fractions = DEFAULT_FRACTIONS) -> Dataset:
    """Return the dataset with a validation split; if there is none, it is taken from the training split by content."""
    splits = dataset.splits
    if "train" not in splits or "validation" in splits:
        note = "the data has its own splits: the fractions are ignored"
        ignored = options.fractions and options.fractions != TRAIN_ONLY_FRACTIONS
        return replace(dataset, notes=(*dataset.notes, note)) if ignored else dataset
    fractions = options.fractions or (default if len(splits) == 1 else HOLDOUT_FRACTIONS)
    train, validation, test = check_fractions(fractions)
    if "test" in splits:
        train, validation, test = train / (train + validation), validation / (train + validation), 0.0
    if not validation + test:
        return dataset
    fractions = (train, validation, test)
    note = describe_fractions(fractions, "split" if len(splits) == 1 else "training split divided")
    held_out = {split: images for split, images in splits.items() if split != "train"}
    splits = split_by_content(splits["train"], fractions, options.progress) | held_out
    return replace(dataset, splits=splits, notes=(*dataset.notes, note))


def split_by_content(images: Images, fractions: Fractions, progress: ProgressCallback | None) -> dict[str, Images]:
    """Split images by content. Every split has all the classes."""
    hashes = hash_images(images.store, images.items, progress)
    if images.target_kind in ("masks", "numbers", "captions"):  # the classes of a mask are known only after reading it
        sides = assign_splits(hashes, np.zeros(len(images), dtype=np.int64), 1, fractions)
    else:
        sides = assign_splits(hashes, images.targets, len(images.classes), fractions)
    used = [(side, split) for side, split in enumerate(SPLITS) if fractions[side] or (sides == side).any()]
    return {split: images.select(sides == side, split) for side, split in used}


def assign_splits(hashes: np.ndarray, targets: np.ndarray, n_classes: int, fractions: Fractions) -> np.ndarray:
    """Return the split of each image (0 train, 1 validation, 2 test): small hashes to validation, large ones to train.

    A class with two different images or more gets at least one in train and validation: the largest or smallest hash is
    moved. With three it gets one in test, if there is a test split.
    """
    _, validation, test = check_fractions(fractions)
    position = hashes / HASH_RANGE
    sides = np.where(position < validation, 1, np.where(position < validation + test, 2, 0)).astype(np.int8)
    for members in iter_classes(hashes, targets, n_classes):
        if not len(members) or hashes[members[0]] == hashes[members[-1]]:
            continue
        if not (sides[members] == 0).any():
            sides[hashes == hashes[members[-1]]] = 0
        if validation and not (sides[members] == 1).any():
            sides[hashes == hashes[members[0]]] = 1
        if test and not (sides[members] == 2).any():
            training = members[sides[members] == 0]
            if len(training) and hashes[training[0]] != hashes[training[-1]]:
                sides[hashes == hashes[training[0]]] = 2
    return sides


def iter_classes(hashes: np.ndarray, targets: np.ndarray, n_classes: int) -> Iterator[np.ndarray]:
    """Yield the images of each class, in order of their hashes."""
    if targets.ndim == 1:
        order = np.lexsort((hashes, targets))
        yield from np.split(order, np.searchsorted(targets[order], np.arange(1, n_classes)))
    else:
        order = np.argsort(hashes, kind="stable")
        yield from (order[targets[order, label] > 0] for label in range(n_classes))


def hash_bytes(data: bytes) -> int:
    """Return 64 bits of a hash of these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def read_blocks(store: Store, item: int) -> Iterable[bytes]:
    """Return the encoded bytes of an image, or those of a video in parts: it may be larger than the memory."""
    blocks = getattr(store, "blocks", None)
    return (store.data(item),) if blocks is None else blocks(item)


def hash_images(store: Store, items: np.ndarray, progress: ProgressCallback | None = None) -> np.ndarray:
    """Return 64 bits of a hash of each image's bytes, or of its name if it is unreadable, [n] uint64, using all cores."""
    if (known := getattr(store, "hashes", None)) is not None:  # of a Python object, computed when it was read
        return known[items]

    def hash_content(item: int) -> int:
        try:
            digest = hashlib.blake2b(digest_size=8)
            for block in read_blocks(store, item):
                digest.update(block)
            return int.from_bytes(digest.digest(), "big")
        except (OSError, ValueError):  # the audit reports unreadable images
            return hash_bytes(store.name(item).encode())

    def hash_chunk(chunk: np.ndarray) -> list[int]:
        return [hash_content(int(item)) for item in chunk]

    size = max(1, min(256, len(items) // (4 * (os.cpu_count() or 1)) + 1))
    hashes: list[int] = []
    pool = ThreadPoolExecutor(os.cpu_count())  # reading and hashing release the GIL
    try:
        for values in pool.map(hash_chunk, (items[start : start + size] for start in range(0, len(items), size))):
            hashes += values
            if progress:
                progress("splitting by content", len(hashes), len(items))
    finally:
        pool.shutdown(cancel_futures=True)  # do not wait for the rest when interrupted
    return np.array(hashes, dtype=np.uint64)


def describe_fractions(fractions: Fractions, what: str = "split") -> str:
    """Return the note about a split by content."""
    shares = zip(SPLITS, fractions, strict=True)
    return f"{what} by content: " + ", ".join(f"{100 * share:g} % {name}" for name, share in shares if share)

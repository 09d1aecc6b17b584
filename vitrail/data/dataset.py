"""Labelled images: the interface that every data source implements."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from PIL import Image

SPLITS = ("train", "validation", "test")

resolve_folder = lru_cache(maxsize=4096)(os.path.realpath)  # there are far fewer folders than images


class Samples(Protocol):
    """The protocol of a data source of one's own: `len(samples)`, and `samples[index]`, an image and its label.

    PyTorch's map-style datasets follow it, and nothing has to be imported or derived. The image is anything that
    `vitrail.data.images.to_image` takes: a PIL image, an array [H, W, C], a tensor [C, H, W], a path, bytes. The label is an
    index, a name, several names, or a multi-hot vector. An attribute `classes` names the classes in the order of their indices.
    Every read of an index must give the same pixels. Worker processes get a copy of the object, by fork on Linux and by
    pickle elsewhere; within a process, one thread at a time reads it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Store(Protocol):
    """Random access to images: files of a folder, members of tar shards, table rows, or an array of pixels."""

    def __len__(self) -> int: ...

    def name(self, item: int) -> str:
        """Return the image's name for messages: its path, or the file and the position in it."""
        ...

    def open(self, item: int) -> Image.Image:
        """Open the image and decode only its header, so that a JPEG can still be decoded at a reduced scale."""
        ...

    def data(self, item: int) -> bytes:
        """Return the encoded bytes of the image."""
        ...

    def stamp(self, item: int) -> tuple[int, int] | None:
        """Return the size in bytes and the modification time in nanoseconds, or None if there is no file."""
        ...


@dataclass(frozen=True)
class Images:
    """One split: images of a store in a fixed order, each with one label or several."""

    store: Store
    items: np.ndarray  # [n] int64: indices into the store
    targets: np.ndarray  # [n] int64 indices into `classes`; multi-label: [n, K] uint8 of 0 and 1
    classes: tuple[str, ...]  # sorted, numbers by value; in the publisher's order if the data states one
    split: str = "train"
    shards: np.ndarray | None = None  # [n] int64: shard of each image, if reading by shard is faster

    def __len__(self) -> int:
        return len(self.items)

    @property
    def is_multi_label(self) -> bool:
        """Return True if an image may have several labels."""
        return self.targets.ndim == 2

    def name(self, index: int) -> str:
        return self.store.name(int(self.items[index]))

    def absolute_name(self, index: int) -> str:
        """Return the name as an absolute path with symbolic links to folders resolved."""
        folder, name = os.path.split(self.name(index))
        return os.path.join(resolve_folder(os.path.join(os.getcwd(), folder)), name)

    def real_name(self, index: int) -> str:
        """Return the absolute path of the file, also if it is a symbolic link to another."""
        name = self.absolute_name(index)
        return os.path.realpath(name) if os.path.islink(name) else name

    def open(self, index: int) -> Image.Image:
        return self.store.open(int(self.items[index]))

    def count_classes(self) -> np.ndarray:
        """Return the number of images of each class, [K]."""
        if self.is_multi_label:
            return self.targets.sum(0, dtype=np.int64)
        return np.bincount(self.targets, minlength=len(self.classes))

    @property
    def class_counts(self) -> dict[str, int]:
        """Return the number of images of each class by name."""
        return dict(zip(self.classes, self.count_classes().tolist(), strict=True))

    def select(self, selection: np.ndarray | Sequence[int], split: str | None = None) -> "Images":
        """Return the images at these indices, or under this mask."""
        selection = np.asarray(selection, dtype=None if len(selection) else np.int64)
        items, targets = self.items[selection], self.targets[selection]
        shards = None if self.shards is None else self.shards[selection]
        return replace(self, items=items, targets=targets, split=split or self.split, shards=shards)


@dataclass(frozen=True)
class Dataset:
    """The splits of a data source by name. Each split lists the classes found in that split."""

    source: str  # as the user wrote it
    kind: str  # of a Python object the name of its type; "folder", "manifest", "parquet", "tar", "idx", "cifar", "digits", "vtab"
    splits: dict[str, Images]
    notes: tuple[str, ...] = ()  # how the data was read, for the user: "split by content: 80 % train …"
    skipped: tuple[tuple[str, str], ...] = ()  # (path, reason) of everything ignored
    fingerprint: str | None = None  # hash of the content of a Python object, by which it is recognised

    def __getitem__(self, split: str) -> Images:
        return self.splits[split]

"""Pictures with their labels: what every source of data looks like to the rest of the house."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from PIL import Image

SPLITS = ("train", "validation", "test")

true_folder = lru_cache(maxsize=4096)(os.path.realpath)  # pictures are many, and their folders few


class Store(Protocol):
    """Where pictures lie: files in a folder, members of tar shards, rows of a table, an array of pixels."""

    def __len__(self) -> int: ...

    def name(self, item: int) -> str:
        """What to call a picture in a message: its path, or the file and the place in it."""
        ...

    def open(self, item: int) -> Image.Image:
        """The picture, decoded no further than its format demands: a JPEG can still be asked for a smaller scale."""
        ...

    def data(self, item: int) -> bytes:
        """The picture's bytes as they are stored."""
        ...

    def stamp(self, item: int) -> tuple[int, int] | None:
        """Size in bytes and time of change in nanoseconds, to know it again by; None where there is no such thing."""
        ...


@dataclass(frozen=True)
class Pictures:
    """One split: pictures of a store in a fixed order, each with its label, or its labels."""

    store: Store
    items: np.ndarray  # [n] int64: which pictures of the store
    targets: np.ndarray  # [n] int64 into `classes`; or, where a picture has several labels, [n, K] uint8 of 0 and 1
    classes: tuple[str, ...]  # sorted, numbers by value; in the publisher's order where the data states one
    split: str = "train"
    shards: np.ndarray | None = None  # [n] int64: where reading shard by shard is quicker, the shard of each picture

    def __len__(self) -> int:
        return len(self.items)

    @property
    def several(self) -> bool:
        """Whether a picture may have several labels."""
        return self.targets.ndim == 2

    def name(self, index: int) -> str:
        return self.store.name(int(self.items[index]))

    def whole_name(self, index: int) -> str:
        """The name from the root of the disk: what is typed may be a folder here and another one elsewhere."""
        folder, name = os.path.split(self.name(index))
        return os.path.join(true_folder(os.path.join(os.getcwd(), folder)), name)

    def open(self, index: int) -> Image.Image:
        return self.store.open(int(self.items[index]))

    def counts(self) -> np.ndarray:
        """Pictures of each class, [K]."""
        if self.several:
            return self.targets.sum(0, dtype=np.int64)
        return np.bincount(self.targets, minlength=len(self.classes))

    def only(self, chosen: np.ndarray | Sequence[int], split: str | None = None) -> "Pictures":
        """Some of the pictures: indices, or a mask."""
        chosen = np.asarray(chosen, dtype=None if len(chosen) else np.int64)
        return replace(
            self,
            items=self.items[chosen],
            targets=self.targets[chosen],
            split=split or self.split,
            shards=None if self.shards is None else self.shards[chosen],
        )


@dataclass(frozen=True)
class Dataset:
    """What a name, a folder or a file stands for: its splits, by name. Every split has the classes that *it* names."""

    where: str  # as the user wrote it
    kind: str  # "folder", "manifest", "parquet", "tar", "idx", "cifar", "digits", "vtab"
    splits: dict[str, Pictures]
    notes: tuple[str, ...] = ()  # what a user should know of how it was read: "split by content: 80 % train …"
    passed_over: tuple[tuple[str, str], ...] = ()  # what lies there and was not taken: path and reason

    def __getitem__(self, split: str) -> Pictures:
        return self.splits[split]

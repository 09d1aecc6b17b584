"""Labelled images: the interface that every data source implements."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from vitrail.data.remote.urls import is_remote

if TYPE_CHECKING:
    from vitrail.data.sound import Sound
    from vitrail.data.video import Video

SPLITS = ("train", "validation", "test")
# One class per image, several, one per pixel, numbers, or a text.
TargetKind = Literal["single", "multi", "masks", "numbers", "captions"]
Media = Literal["image", "video", "sound"]  # what the items of a store are
IGNORED = 255  # the value of mask pixels that neither train nor count
MAX_MASK_CLASSES = 255  # masks are uint8, and one value is IGNORED

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
    """Random access to images: files of a folder, members of tar shards, table rows, or an array of pixels.

    A store of videos has an attribute `media` with the value "video", and `open` returns a `vitrail.data.video.Video`; of
    sounds it is "sound", and `open` returns a `vitrail.data.sound.Sound`.
    """

    def __len__(self) -> int: ...

    def name(self, item: int) -> str:
        """Return the image's name for messages: its path, or the file and the position in it."""
        ...

    def open(self, item: int) -> Any:
        """Open the image and decode only its header, so that a JPEG can still be decoded at a reduced scale."""
        ...

    def data(self, item: int) -> bytes:
        """Return the encoded bytes of the image."""
        ...

    def stamp(self, item: int) -> tuple[int, int] | None:
        """Return the size in bytes and the modification time in nanoseconds, or None if there is no file."""
        ...


class MaskStore(Protocol):
    """Random access to masks: files of a folder, polygons of a COCO file, or columns of a table."""

    def __len__(self) -> int: ...

    def name(self, item: int) -> str:
        """Return the mask's name for messages: its path, or the file and the position in it."""
        ...

    def read(self, item: int) -> np.ndarray:
        """Return the classes of the pixels, uint8 [H, W]: indices into the classes of the data, or IGNORED.

        Rows and columns are those of the upright image. Raise OSError or ValueError, with the mask's name, if it is unusable.
        """
        ...

    def stamp(self, item: int) -> tuple[int, int] | None:
        """Return the size in bytes and the modification time in nanoseconds, or None if there is no file."""
        ...


@dataclass(frozen=True)
class Images:
    """One split: images of a store in a fixed order, each with one label, several, a mask, numbers, or a caption."""

    store: Store
    items: np.ndarray  # [n] int64: indices into the store
    # Indices into `classes`, int64 [n]; multi-label: 0 and 1, uint8 [n, K]; masks: items of `masks`; numbers: float64 [n, M];
    # captions: indices into `captions`.
    targets: np.ndarray
    # Sorted, numbers by value; in the publisher's order if the data states one. Of numbers and captions, the names of columns.
    classes: tuple[str, ...]
    split: str = "train"
    shards: np.ndarray | None = None  # [n] int64: shard of each image, if reading by shard is faster
    masks: MaskStore | None = None  # for one class per pixel
    mask_classes: np.ndarray | None = (
        None  # [256] uint8: value of a stored mask -> index into `classes`; None: the same
    )
    captions: tuple[str, ...] | None = (
        None  # different ones, of all splits; an image with several is several items here
    )
    colours: tuple[tuple[int, int, int], ...] | None = None  # of the classes, RGB, if the data states them
    things: tuple[bool, ...] | None = None  # whether the classes have objects, if the data states it
    ignored: tuple[
        tuple[int, str], ...
    ] = ()  # values of masks that neither train nor count, and their names in the data

    def __len__(self) -> int:
        return len(self.items)

    @property
    def target_kind(self) -> TargetKind:
        """Return what a target is: one class of the image, several, one for each pixel, numbers, or a caption."""
        if self.masks is not None:
            return "masks"
        if self.captions is not None:
            return "captions"
        if self.targets.dtype.kind == "f":
            return "numbers"
        return "multi" if self.targets.ndim == 2 else "single"

    @property
    def media(self) -> Media:
        """Return what the items are: images, videos or sounds."""
        return getattr(self.store, "media", "image")

    def read_mask(self, index: int) -> np.ndarray:
        """Return the classes of an image's pixels, uint8 [H, W]: indices into `classes`, or IGNORED."""
        assert self.masks is not None, "these images have no masks"
        mask = self.masks.read(int(self.targets[index]))
        return mask if self.mask_classes is None else self.mask_classes[mask]

    def mask_name(self, index: int) -> str:
        """Return the name of an image's mask for messages."""
        assert self.masks is not None, "these images have no masks"
        return self.masks.name(int(self.targets[index]))

    def caption(self, index: int) -> str:
        """Return the caption of an image."""
        assert self.captions is not None, "these images have no captions"
        return self.captions[int(self.targets[index])]

    @property
    def is_multi_label(self) -> bool:
        """Return True if an image may have several labels."""
        return self.target_kind == "multi"

    def name(self, index: int) -> str:
        return self.store.name(int(self.items[index]))

    def absolute_name(self, index: int) -> str:
        """Return the name as an absolute path with symbolic links to folders resolved; an address as it is."""
        if is_remote(self.name(index)):
            return self.name(index)
        folder, name = os.path.split(self.name(index))
        return os.path.join(resolve_folder(os.path.join(os.getcwd(), folder)), name)

    def real_name(self, index: int) -> str:
        """Return the absolute path of the file, also if it is a symbolic link to another."""
        name = self.absolute_name(index)
        return os.path.realpath(name) if os.path.islink(name) else name

    def open(self, index: int) -> Any:
        """Open an image, a video or a sound."""
        return self.store.open(int(self.items[index]))

    def open_video(self, index: int) -> "Video":
        """Open a video; raise ValueError if the items are images."""
        if self.media != "video":
            raise ValueError(f"{self.name(index)}: the {self.split} split has images, not videos")
        return self.open(index)

    def open_sound(self, index: int) -> "Sound":
        """Open a sound; raise ValueError if the items are images or videos."""
        if self.media != "sound":
            raise ValueError(f"{self.name(index)}: the {self.split} split has {self.media}s, not sounds")
        return self.open(index)

    def count_classes(self) -> np.ndarray:
        """Return the number of images of each class, [K]. Masks have to be read for this: the audit counts them."""
        if self.target_kind in ("numbers", "captions"):
            raise ValueError(f"the {self.split} split has {self.target_kind}, not classes")
        if self.masks is not None:
            raise ValueError(f"the {self.split} split has masks: their classes are counted by vitrail.check")
        if self.is_multi_label:
            return self.targets.sum(0, dtype=np.int64)
        return np.bincount(self.targets, minlength=len(self.classes))

    @property
    def class_counts(self) -> dict[str, int]:
        """Return the number of images of each class by name; none of masks, which would have to be read, and without classes."""
        if self.target_kind in ("masks", "numbers", "captions"):
            return {}
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
    sampled: tuple[int, int] | None = None  # shards that were read, and all; None if all were

    def __getitem__(self, split: str) -> Images:
        return self.splits[split]

"""Tar shards as WebDataset writes them: members that share a key are a sample, `0001.jpg` and `0001.cls`.

One pass over the headers makes an index of places. Pictures are then read where they lie, in any order and by any process;
nothing is unpacked.
"""

import io
import json
import os
import tarfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vitrail.data.labels import normal
from vitrail.data.opening import SUFFIXES, opened
from vitrail.data.pictures import Dataset
from vitrail.data.sources import parts
from vitrail.data.sources.files import printable
from vitrail.data.sources.gathered import Label, gathered, split_of

UNKNOWN = ""  # a label that is not there
NAMES = ("classes.txt", "labels.txt", "classnames.txt")
KEYS = ("label", "labels", "class", "cls", "target", "category", "class_name")
COMPRESSED = {b"\x1f\x8b": "gzip -d", b"BZ": "bzip2 -d", b"\xfd7": "xz -d", b"(\xb5": "zstd -d"}
MOST = 2**20  # bytes of a label


class Members:
    """A store of members of tar files: places and sizes in arrays, names in one run of bytes."""

    def __init__(
        self, shards: list[str], shard: np.ndarray, offset: np.ndarray, size: np.ndarray, names: bytes, ends: np.ndarray
    ) -> None:
        self.shards = shards
        self.shard, self.offset, self.size = shard, offset, size  # [n] each
        self.names, self.ends = names, ends

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, item: int) -> str:
        start = int(self.ends[item - 1]) if item else 0
        member = self.names[start : self.ends[item]].decode("utf-8", "backslashreplace")
        return f"{printable(self.shards[self.shard[item]])}:{member}"

    def data(self, item: int) -> bytes:
        # A shard is opened for each picture: that takes microseconds, and no handle is shared by threads or processes.
        with open(self.shards[self.shard[item]], "rb", buffering=0) as file:
            data = os.pread(file.fileno(), int(self.size[item]), int(self.offset[item]))
        if len(data) != self.size[item]:
            raise OSError(f"{self.name(item)}: the shard has become shorter since it was listed")
        return data

    def open(self, item: int) -> Image.Image:
        return opened(io.BytesIO(self.data(item)), self.name(item))

    def stamp(self, item: int) -> tuple[int, int] | None:
        return int(self.size[item]), os.stat(self.shards[self.shard[item]]).st_mtime_ns


@dataclass
class Sample:
    """The members of one key: the picture's name, place and size, and what says its label."""

    picture: tuple[str, int, int] | None = None
    label: Label | None = None
    caption: bool = False


@dataclass
class Index:
    """The samples of all shards, as they are found."""

    shard: array = field(default_factory=lambda: array("i"))
    offset: array = field(default_factory=lambda: array("q"))
    size: array = field(default_factory=lambda: array("q"))
    names: bytearray = field(default_factory=bytearray)
    ends: array = field(default_factory=lambda: array("q"))
    labels: list[Label] = field(default_factory=list)

    def add(self, shard: int, picture: tuple[str, int, int], label: Label) -> None:
        name, offset, size = picture
        self.shard.append(shard)
        self.offset.append(offset)
        self.size.append(size)
        self.names += name.encode("utf-8", "surrogateescape")
        self.ends.append(len(self.names))
        self.labels.append(label)

    def store(self, shards: list[str]) -> Members:
        shard, ends = np.array(self.shard, dtype=np.int32), np.array(self.ends, dtype=np.int64)
        offset, size = np.array(self.offset, dtype=np.int64), np.array(self.size, dtype=np.int64)
        return Members(shards, shard, offset, size, bytes(self.names), ends)


def read(
    where: str,
    shards: Sequence[str],
    several: parts.Several,
    fractions: parts.Fractions | None,
    progress: parts.Progress | None,
) -> Dataset:
    """The samples of some shards."""
    index, passed_over = Index(), []
    shared: dict[Label, Label] = {}  # a name that a million samples share is kept once
    for number, shard in enumerate(shards):
        for key, sample in samples(shard).items():
            if sample.picture is None:
                passed_over.append((f"{printable(shard)}:{key}", "a sample without a picture"))
            elif sample.label is None and several != parts.UNLABELLED:
                what = "a caption (.txt) and no label" if sample.caption else "no label"
                raise ValueError(
                    f"{printable(shard)}: the sample {key} has {what}: add {key}.cls, or {key}.json with a label"
                )
            else:
                label = UNKNOWN if sample.label is None else sample.label
                index.add(number, sample.picture, shared.setdefault(label, label))
        if progress:
            progress("listing shards", number + 1, len(shards))
    if UNKNOWN in shared:
        index.labels[:] = [parts.PICTURE] * len(index.labels)
    labels, order = named(index.labels, shards)
    if several is False and any(isinstance(label, tuple) for label in labels):
        raise ValueError(f"{where} has samples with several labels, and one for each was asked for")
    return gathered(
        where,
        "tar",
        index.store(list(shards)),
        labels,
        [
            split
            for split, count in zip(map(split_of, shards), _counts(index, shards), strict=True)
            for _ in range(count)
        ],
        order=order,
        shards=np.array(index.shard, dtype=np.int64),
        fractions=fractions,
        progress=progress,
        passed_over=passed_over,
    )


def _counts(index: Index, shards: Sequence[str]) -> list[int]:
    return np.bincount(np.array(index.shard, dtype=np.int64), minlength=len(shards)).tolist()


def samples(shard: str) -> dict[str, Sample]:
    """The samples of one shard by their keys: of its pictures the headers are read, of its labels all."""
    found: dict[str, Sample] = {}
    with open(shard, "rb") as file:
        compressed(file, shard)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    if member.isreg() and not member.issparse():
                        take(found, member, file, shard)
                    tar.members = []  # pyright: ignore[reportAttributeAccessIssue] it would hold every header of the shard
                end = tar.offset
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"{printable(shard)} is not a whole tar file ({error}): get it again") from None
        file.seek(end)
        mark = file.read(512)
        if len(mark) < 512 or mark.strip(b"\0"):
            what = "ends without the end mark" if len(mark) < 512 else "is damaged"
            raise ValueError(f"{printable(shard)} {what} at byte {end:,}: it was cut off or changed, get it again")
    return found


def compressed(file: BinaryIO, shard: str) -> None:
    """Refuses what cannot be read at any place in it."""
    begin = file.read(2)
    if begin in COMPRESSED:
        raise ValueError(
            f"{printable(shard)} is compressed, and pictures in it cannot be found without unpacking all before them: "
            f"unpack it once ({COMPRESSED[begin]})"
        )
    file.seek(0)


def take(found: dict[str, Sample], member: tarfile.TarInfo, file: BinaryIO, shard: str) -> None:
    """One member as a part of its sample: the key ends at the first dot of its file's name."""
    folder, _, name = member.name.rpartition("/")
    stem, _, kind = name.partition(".")
    if not stem or not kind:  # hidden, or without a suffix
        return
    kind = kind.lower()
    sample = found.setdefault(f"{folder}/{stem}" if folder else stem, Sample())
    if f".{kind.rpartition('.')[2]}" in SUFFIXES:
        if sample.picture is None or "." not in kind:
            sample.picture = (member.name, member.offset_data, member.size)
    elif kind in ("cls", "json"):
        at = file.tell()
        file.seek(member.offset_data)
        data = file.read(min(member.size, MOST))
        file.seek(at)
        said = label_in(data, kind, f"{printable(shard)}:{printable(member.name)}")
        if said is not None and (sample.label is None or kind == "cls"):
            sample.label = said
    elif kind == "txt":
        sample.caption = True


def label_in(data: bytes, kind: str, name: str) -> Label | None:
    """What a `.cls` or a `.json` says; None for a `.json` that speaks of something else."""
    try:
        text = data.decode("utf-8-sig").strip()
        said = json.loads(text) if kind == "json" else text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not readable ({error})") from None
    if kind == "json":
        said = next((said[key] for key in KEYS if key in said), None) if isinstance(said, dict) else said
    if isinstance(said, list):
        return tuple(_plain(each, name) for each in said)
    return None if said is None else _plain(said, name)


def _plain(said: Any, name: str) -> str:
    if isinstance(said, bool) or not isinstance(said, int | str) or not str(said).strip():
        raise ValueError(f"{name} has the label {said!r}: a label is a whole number or a name")
    return str(said).strip()


def named(labels: list[Label], shards: Sequence[str]) -> tuple[list[Label], tuple[str, ...] | None]:
    """Numbers by their names, where a list of classes lies beside the shards; and its order."""
    folders = dict.fromkeys(os.path.dirname(shard) for shard in shards)
    lists = [
        os.path.join(folder, name) for folder in folders for name in NAMES if os.path.isfile(os.path.join(folder, name))
    ]
    single = {name for label in set(labels) for name in ((label,) if isinstance(label, str) else label)}
    if not lists or not all(name.isascii() and name.isdecimal() for name in single):
        return labels, None
    with open(lists[0], encoding="utf-8-sig") as file:
        names = tuple(normal(line) for line in file if line.strip())
    if len(set(names)) < len(names):
        raise ValueError(f"{lists[0]} names a class twice")
    if beyond := [name for name in single if int(name) >= len(names)]:
        raise ValueError(f"{lists[0]} names {len(names)} classes, and there is the label {max(map(int, beyond))}")
    table = {name: names[int(name)] for name in single}
    return [table[each] if isinstance(each, str) else tuple(table[n] for n in each) for each in labels], names

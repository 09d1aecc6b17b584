"""Tar shards in WebDataset's layout: members that share a key are a sample, such as `0001.jpg` and `0001.cls`.

Samples without labels may have masks: `0001.mask.png`, `0001.seg.png`, or `0001.png` beside `0001.jpg`.

One pass over the headers makes an index. Images are then read from their offsets, in any order and by any process, without
unpacking.
"""

import io
import json
import os
import tarfile
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from vitrail.data.dataset import Dataset, Media
from vitrail.data.decode import IMAGE_SUFFIXES, open_image
from vitrail.data.labels import normalise_class_name
from vitrail.data.remote.file import RemoteFile, find_beside, open_binary, read_range, read_stamp
from vitrail.data.remote.index import HeaderReader, TarMember, list_members
from vitrail.data.sound import SOUND_SUFFIXES, SoundFile
from vitrail.data.sources import splits
from vitrail.data.sources.files import BLOCK_BYTES, import_decoder, printable_path, refuse_mixed
from vitrail.data.sources.manifest import Label, build_dataset, split_from_path
from vitrail.data.sources.mask_classes import CLASS_FILES, find_class_file
from vitrail.data.sources.masks import (
    SKIP_NO_MASK,
    EncodedMasks,
    build_mask_dataset,
    build_unlabelled_dataset,
    describe_skipped,
    find_classes,
)
from vitrail.data.video import VIDEO_SUFFIXES

NO_LABEL = ""
CLASS_FILE_NAMES = ("classes.txt", "labels.txt", "classnames.txt")
LABEL_KINDS = ("cls", "json")  # suffixes after the key
LABEL_KEYS = ("label", "labels", "class", "cls", "target", "category", "class_name")
UNPACK_COMMANDS = {b"\x1f\x8b": "gzip -d", b"BZ": "bzip2 -d", b"\xfd7": "xz -d", b"(\xb5": "zstd -d"}
MAX_LABEL_BYTES = 2**20
SHARDS_AT_A_TIME = 4  # remote ones, whose headers are read
REPORTED_BYTES = 4 * 10**6  # between calls of a progress callback
MASK_KINDS = ("mask", "seg", "segmentation", "label", "labels", "gt", "annotation")  # before the suffix of a mask


class TarStore:
    """A growing store of members of tar files: offsets and sizes in arrays, names in one byte string."""

    def __init__(self, shards: Sequence[str]) -> None:
        self.shards = shards
        self.media: Media = "image"
        self.shard, self.offset, self.size = array("i"), array("q"), array("q")  # [n] each
        self.names, self.ends = bytearray(), array("q")

    def add(self, shard: int, name: str, offset: int, size: int) -> None:
        """Add a member of a shard."""
        self.names += name.encode("utf-8", "surrogateescape")
        for column, value in ((self.shard, shard), (self.offset, offset), (self.size, size)):
            column.append(value)
        self.ends.append(len(self.names))

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, item: int) -> str:
        start = self.ends[item - 1] if item else 0
        member = self.names[start : self.ends[item]].decode("utf-8", "backslashreplace")
        return f"{printable_path(self.shards[self.shard[item]])}:{member}"

    def data(self, item: int) -> bytes:
        data = read_range(self.shards[self.shard[item]], self.offset[item], self.size[item])
        if len(data) != self.size[item]:
            raise OSError(f"{self.name(item)}: the shard is shorter than when it was listed")
        return data

    def open(self, item: int) -> Any:
        if self.media == "video":
            from vitrail.data.video_file import VideoFile

            return VideoFile(lambda: self.open_member(item), self.name(item), self.stamp(item))
        if self.media == "sound":
            remote = isinstance(
                self.shards[self.shard[item]], RemoteFile
            )  # its errors would not pass through the C library
            return SoundFile(io.BytesIO(self.data(item)) if remote else self.open_member(item), self.name(item))
        return open_image(io.BytesIO(self.data(item)), self.name(item))

    def open_member(self, item: int) -> BinaryIO:
        """Open a member as a file, which is read in parts."""
        return open_window(self.shards[self.shard[item]], self.offset[item], self.size[item])

    def blocks(self, item: int) -> Iterator[bytes]:
        """Yield the bytes of a member in parts."""
        with self.open_member(item) as file:
            count = 0
            while block := file.read(BLOCK_BYTES):
                count += len(block)
                yield block
        if count != self.size[item]:
            raise OSError(f"{self.name(item)}: the shard is shorter than when it was listed")

    def stamp(self, item: int) -> tuple[int, int] | None:
        return self.size[item], read_stamp(self.shards[self.shard[item]])[1]


class FileWindow(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, path: str, offset: int, size: int) -> None:
        super().__init__()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._offset, self._size, self._position = offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        wanted = min(len(buffer), max(0, self._size - self._position))
        data = os.pread(self._file.fileno(), wanted, self._offset + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence])
        return self._position

    def close(self) -> None:
        self._file.close()
        super().close()


def open_window(path: str, offset: int, size: int) -> BinaryIO:
    """Open a part of a local or a remote file."""
    if isinstance(path, RemoteFile):
        return path.open(offset, size)
    return io.BufferedReader(FileWindow(path, offset, size))


Member = tuple[str, int, int]  # name, offset and size


@dataclass
class TarSample:
    """The members of one key."""

    images: dict[str, Member] = field(default_factory=dict)  # by the lower-case suffix after the key
    recording: tuple[Media, Member] | None = None  # a video or a sound
    label: Label | None = None
    has_caption: bool = False

    @property
    def image(self) -> Member | None:
        """Return the video, the sound, or the image: the last with a single suffix, else the first; not a mask beside it."""
        if self.recording is not None:
            return self.recording[1]
        mask = None if self.label is not None else self.mask_kind
        kinds = [kind for kind in self.images if kind != mask]
        plain = [kind for kind in kinds if "." not in kind]
        return self.images[plain[-1] if plain else kinds[0]] if kinds else None

    @property
    def mask_kind(self) -> str | None:
        """Return the suffix of the mask: mask.png, seg.png …, or png beside jpg."""
        named = [kind for kind in self.images if kind.partition(".")[0] in MASK_KINDS and "." in kind]
        if named or "png" not in self.images:
            return named[0] if named and len(named) < len(self.images) else None
        return "png" if {"jpg", "jpeg"} & set(self.images) else None

    @property
    def mask(self) -> Member | None:
        kind = self.mask_kind
        return None if kind is None else self.images[kind]


def read_tar(source: str, shards: Sequence[str], options: splits.ReadOptions) -> Dataset:
    """Read the samples of tar shards: with labels, or, if no sample has one, with masks."""
    images, masks = TarStore(shards), TarStore(shards)
    labels: list[Label] = []
    mask_items: list[int] = []  # -1 for an image without a mask
    skipped, unlabelled = [], ""  # the reason why the first sample without a label has none
    shared: dict[Label, Label] = {}  # equal labels share one object
    names: dict[Media, str] = {}  # the first image, the first video and the first sound
    for number, (shard, samples) in enumerate(zip(shards, iter_samples(shards, options), strict=True)):
        for key, sample in samples.items():
            if sample.image is None:
                skipped.append((f"{printable_path(shard)}:{key}", "a sample without an image"))
                continue
            if sample.label is None and not unlabelled:
                problem = "a caption (.txt) and no label" if sample.has_caption else "no label"
                hint = f"add {key}.cls, {key}.json with a label, or {key}.mask.png"
                unlabelled = f"{printable_path(shard)}: sample {key} has {problem}: {hint}"
            label = NO_LABEL if sample.label is None else sample.label
            names.setdefault("image" if sample.recording is None else sample.recording[0], sample.image[0])
            if len(names) > 1:
                raise refuse_mixed(source, names)
            images.add(number, *sample.image)
            labels.append(shared.setdefault(label, label))
            mask_items.append(-1 if sample.mask is None else len(masks))
            if sample.mask is not None:
                masks.add(number, *sample.mask)
    for media in names:
        import_decoder(media)
        images.media = media
    shard_splits = [split_from_path(shard) for shard in shards]
    parts = [shard_splits[number] for number in images.shard]
    if set(shared) == {NO_LABEL} and len(masks):
        return read_mask_shards(source, images, masks, np.array(mask_items), parts, options, skipped)
    if unlabelled and options.needs_labels:
        raise ValueError(unlabelled)
    if NO_LABEL in shared:
        labels = [splits.UNLABELLED_CLASS] * len(labels)
    named, order = name_labels(labels, shards)
    if options.multi_label is False and any(isinstance(label, tuple) for label in named):
        raise ValueError(f"{source} has samples with several labels, but one label per image is expected")
    shard = np.array(images.shard, dtype=np.int64)
    return build_dataset(source, "tar", images, named, parts, options, class_order=order, shards=shard, skipped=skipped)


def read_mask_shards(
    source: str,
    images: TarStore,
    masks: TarStore,
    mask_items: np.ndarray,
    parts: Sequence[str | None],
    options: splits.ReadOptions,
    skipped: list[tuple[str, str]],
) -> Dataset:
    """Return the dataset of shards with masks; a class file is looked for beside the shards."""
    if not options.needs_labels:
        return build_unlabelled_dataset(source, "tar", images, np.arange(len(images)), parts, options)
    without = [(images.name(item), SKIP_NO_MASK) for item in np.flatnonzero(mask_items < 0).tolist()]
    kept = np.flatnonzero(mask_items >= 0)
    folders = list(dict.fromkeys(os.path.dirname(shard) for shard in images.shards))
    class_file = find_class_file(folders) or find_beside(images.shards, CLASS_FILES)
    classes = find_classes(class_file, masks, mask_items[kept], source, options)
    return build_mask_dataset(
        source,
        "tar",
        images,
        kept,
        [parts[item] for item in kept.tolist()],
        EncodedMasks(masks, mask_items[kept], images, kept, classes),
        classes,
        options,
        shards=np.array(images.shard, dtype=np.int64)[kept],
        notes=describe_skipped(without),
        skipped=[*skipped, *without],
    )


def iter_samples(shards: Sequence[str], options: splits.ReadOptions) -> Iterator[dict[str, TarSample]]:
    """Yield the samples of each shard by key; of remote shards, several are read at a time."""
    remote = [shard for shard in shards if isinstance(shard, RemoteFile)]
    if len(remote) < len(shards) or len(shards) < 2 or options.sampled_rows is not None:
        for number, shard in enumerate(shards):
            yield read_samples(shard, options.sampled_rows)
            if options.progress:
                options.progress("listing shards", number + 1, len(shards))
        return
    total, done = sum(shard.size for shard in remote), [0] * len(remote)
    lock, stopped = threading.Lock(), threading.Event()

    def read(number: int) -> dict[str, TarSample]:
        def report(position: int) -> None:
            if stopped.is_set():  # by Ctrl-C, or an error of another shard
                raise InterruptedError(f"{remote[number]} was not read to its end")
            with lock:
                done[number] = position
                if options.progress:
                    options.progress("reading shards, MB", sum(done) // 10**6, total // 10**6)

        samples = read_samples(remote[number], report=report)
        report(remote[number].size)
        return samples

    pool = ThreadPoolExecutor(SHARDS_AT_A_TIME)
    try:
        yield from pool.map(read, range(len(remote)))
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def read_samples(
    shard: str, limit: int | None = None, report: Callable[[int], None] | None = None
) -> dict[str, TarSample]:
    """Return the samples of one shard by key, or the first of them: headers of the images, contents of the labels.

    `report` is called with the position in the shard, after every few megabytes.
    """
    samples: dict[str, TarSample] = {}
    reported = 0
    for member in iter_members(shard):
        add_member(samples, member, shard)
        if report is not None and member.offset - reported > REPORTED_BYTES:
            reported = member.offset
            report(reported)
        if limit is not None and len(samples) > limit:
            samples.popitem()  # more members of it may follow
            break
    return samples


def iter_members(shard: str) -> Iterator[TarMember]:
    """Yield every regular file of a shard, with the contents of labels; raise an error if the shard is not complete."""
    if isinstance(shard, RemoteFile):
        return list_members(shard, lambda: scan_members(shard, HeaderReader(shard)))
    return scan_local(shard)


def scan_local(shard: str) -> Iterator[TarMember]:
    """Yield the members of a local shard."""
    with open(shard, "rb") as file:
        yield from scan_members(shard, file)


def scan_members(shard: str, file: Any) -> Iterator[TarMember]:
    """Yield the members of an open shard from its headers."""
    begin = file.read(2)
    if begin in UNPACK_COMMANDS:
        hint = f"decompress it ({UNPACK_COMMANDS[begin]})"
        raise ValueError(f"{printable_path(shard)} is compressed, which prevents random access: {hint}")
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isreg() and not member.issparse():
                    yield TarMember(member.name, member.offset_data, member.size, read_label(member, file))
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue] drops headers that tarfile would keep
            end = tar.offset
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{printable_path(shard)} is not a valid tar file ({error}): download it again") from None
    file.seek(end)
    mark = file.read(512)
    if len(mark) < 512 or mark.strip(b"\0"):
        problem = "has no end marker" if len(mark) < 512 else "is damaged"
        raise ValueError(f"{printable_path(shard)} {problem} at byte {end:,}: download it again")


def read_label(member: tarfile.TarInfo, file: Any) -> bytes | None:
    """Return the content of a label; None for another member."""
    if member.name.rpartition("/")[2].partition(".")[2].lower() not in LABEL_KINDS:
        return None
    position = file.tell()
    file.seek(member.offset_data)
    data = file.read(min(member.size, MAX_LABEL_BYTES))
    file.seek(position)
    return data


def add_member(samples: dict[str, TarSample], member: TarMember, shard: str) -> None:
    """Add a member to its sample; the key ends at the first dot of the file name."""
    folder, _, name = member.name.rpartition("/")
    stem, _, kind = name.partition(".")
    if not stem or not kind:  # hidden, or no suffix
        return
    kind = kind.lower()
    sample = samples.setdefault(f"{folder}/{stem}" if folder else stem, TarSample())
    if f".{kind.rpartition('.')[2]}" in IMAGE_SUFFIXES:
        sample.images.pop(kind, None)  # of two members with one name the last counts
        sample.images[kind] = (member.name, member.offset, member.size)
    elif f".{kind.rpartition('.')[2]}" in VIDEO_SUFFIXES:
        sample.recording = ("video", (member.name, member.offset, member.size))
    elif f".{kind.rpartition('.')[2]}" in SOUND_SUFFIXES:
        sample.recording = ("sound", (member.name, member.offset, member.size))
    elif kind in LABEL_KINDS:
        label = parse_label(member.data or b"", kind, f"{printable_path(shard)}:{printable_path(member.name)}")
        if label is not None and (sample.label is None or kind == "cls"):
            sample.label = label
    elif kind == "txt":
        sample.has_caption = True


def parse_label(data: bytes, kind: str, name: str) -> Label | None:
    """Parse a `.cls` or `.json` label; return None for a `.json` without a label."""
    try:
        text = data.decode("utf-8-sig").strip()
        value = json.loads(text) if kind == "json" else text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not a valid label file ({error})") from None
    if kind == "json":
        value = next((value[key] for key in LABEL_KEYS if key in value), None) if isinstance(value, dict) else value
    if isinstance(value, list):
        return tuple(_format_label(item, name) for item in value)
    return None if value is None else _format_label(value, name)


def _format_label(value: Any, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).strip():
        raise ValueError(f"{name} has the label {value!r}: a label must be an integer or a name")
    return str(value).strip()


def name_labels(labels: Sequence[Label], shards: Sequence[str]) -> tuple[Sequence[Label], tuple[str, ...] | None]:
    """Replace numbers by the names in a class list beside the shards; return the labels and the order of the classes."""
    folders = dict.fromkeys(os.path.dirname(shard) for shard in shards)
    paths = (os.path.join(folder, name) for folder in folders for name in CLASS_FILE_NAMES)
    lists = [path for path in paths if os.path.isfile(path)]
    single = {name for label in set(labels) for name in ((label,) if isinstance(label, str) else label)}
    if not all(name.isascii() and name.isdecimal() for name in single):
        return labels, None
    if not lists and (remote := find_beside(shards, CLASS_FILE_NAMES)) is not None:
        lists = [remote]
    if not lists:
        return labels, None
    with io.TextIOWrapper(open_binary(lists[0]), encoding="utf-8-sig") as file:
        names = tuple(normalise_class_name(line) for line in file if line.strip())
    if len(set(names)) < len(names):
        raise ValueError(f"{lists[0]} has duplicate class names")
    if beyond := [name for name in single if int(name) >= len(names)]:
        raise ValueError(f"{lists[0]} has {len(names)} classes, but there is the label {max(map(int, beyond))}")
    table = {name: names[int(name)] for name in single}
    return [table[label] if isinstance(label, str) else tuple(table[n] for n in label) for label in labels], names

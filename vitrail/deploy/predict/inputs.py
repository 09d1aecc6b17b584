"""Collect images, videos or sounds from files, folders, patterns, lists, tar shards and tables into one sequence.

Labels and splits are ignored. A folder of images is many images for a model of images, and a video, whose frames they are, for
a model of clips: what the model takes is asked for where it decides.
"""

import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import Images, Media, Store
from vitrail.data.decode import name_image_errors
from vitrail.data.images import CHANNELS, KINDS, is_image
from vitrail.data.remote import shards
from vitrail.data.remote.file import RemoteFile
from vitrail.data.remote.urls import is_remote, redact
from vitrail.data.sound import SOUND_SUFFIXES, Sound, is_sound_name, to_sound
from vitrail.data.sources import detect, downloads, files, load_dataset, manifest, objects, parquet, tar
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import (
    MEDIA_SUFFIXES,
    FileStore,
    FolderWalker,
    find_media,
    import_decoder,
    is_image_name,
    is_media_name,
    printable_path,
)
from vitrail.data.sources.layouts import FRAMES_PREFIX
from vitrail.data.video import VIDEO_SUFFIXES, Video, is_video_name, to_video
from vitrail.utils.progress import ProgressCallback

INPUT_KINDS = {".csv": "csv", ".tsv": "csv", ".jsonl": "lines", ".ndjson": "lines"}  # other files are images
INPUT_KINDS |= {".parquet": "parquet", ".tar": "tar"}
OpenedInput = tuple[Store, np.ndarray | None]  # a store, and the indices of its images; None for all
AskMedia = Callable[[], Media]  # what the model takes


NOUNS: dict[Media, str] = {"image": "an image", "video": "a video", "sound": "a sound"}  # in messages


def take_images() -> Media:
    """Return what a model of images takes."""
    return "image"


@dataclass(frozen=True)
class ImageInputs:
    """Images of several stores, in the order of the given paths; itself a `Store`."""

    stores: tuple[Store, ...]
    starts: np.ndarray  # int64 [s + 1]: the first index of each store, and the total
    items: tuple[np.ndarray | None, ...]  # indices in each store; None for all
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def media(self) -> Media:
        """Return what all stores have: images, videos or sounds."""
        return media_of(self.stores[0])

    def locate(self, index: int) -> tuple[Store, int]:
        """Return the store of an image and its index there."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        offset, items = index - int(self.starts[number]), self.items[number]
        return self.stores[number], offset if items is None else int(items[offset])

    def name(self, item: int) -> str:
        store, item = self.locate(item)
        return store.name(item)

    def open(self, item: int) -> Image.Image | Video | Sound:
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


def media_of(store: Store) -> Media:
    """Return what the items of a store are."""
    return getattr(store, "media", "image")


def collect_images(
    images: Any, progress: ProgressCallback | None = None, ask_media: AskMedia = take_images
) -> ImageInputs:
    """Return the images, videos or sounds of a path, one in memory, a list of them, or any Python object that is data."""
    if isinstance(images, np.ndarray | Tensor) and is_batch(images, ask_media):
        images = list(images)
    if is_image(images) or isinstance(images, Video | Sound):
        images = [images]
    if not isinstance(images, Sequence):
        return join_stores(open_dataset(images, progress), (), objects.describe_object(images))
    if images and all(isinstance(image, str | os.PathLike) for image in images):
        return collect_inputs(images, progress, ask_media)
    if images and all(is_sound(image, ask_media) for image in images):
        return join_stores([(SoundStore(images, "sound", np.zeros(len(images), np.uint64)), None)], (), "the list")
    if wrong := [(item, image) for item, image in enumerate(images) if not is_image(image) and not is_video(image)]:
        raise ValueError(f"image[{wrong[0][0]}] is of type {type(wrong[0][1]).__name__}: give {KINDS}")
    videos = [is_video(image, ask_media) for image in images]
    if any(videos) and not all(videos):
        first = f"item {videos.index(True)} is a video, item {videos.index(False)} an image"
        raise ValueError(f"the list has images and videos ({first}): give one kind")
    kind, label = (VideoStore, "video") if any(videos) else (objects.ObjectStore, "image")
    return join_stores([(kind(images, label, np.zeros(len(images), np.uint64)), None)], (), "the list")


def is_batch(pixels: np.ndarray | Tensor, ask_media: AskMedia) -> bool:
    """Return True for an array of several images or videos: the same axes are frames for a model of clips."""
    channels = pixels.shape[-1 if isinstance(pixels, np.ndarray) else 0]
    could_be_video = pixels.ndim == 4 or (pixels.ndim == 3 and channels not in CHANNELS)
    return pixels.ndim == 5 or (could_be_video and ask_media() == "image")


def is_video(value: object, ask_media: AskMedia = take_images) -> bool:
    """Return True for a video: opened, the path of one, or frames [T, H, W, C]; grey ones and bytes may be images too."""
    if isinstance(value, np.ndarray | Tensor):
        channels = value.shape[-1 if isinstance(value, np.ndarray) else 0] if value.ndim else 0
        return value.ndim == 4 or (value.ndim == 3 and channels not in CHANNELS and ask_media() == "video")
    if isinstance(value, str | os.PathLike):
        path = os.path.expanduser(os.fspath(value))
        known = is_media_name(path) and not os.path.isdir(path)
        return is_video_name(path) or os.path.isdir(path) or (not known and ask_media() == "video")
    return isinstance(value, Video) or (isinstance(value, bytes) and ask_media() == "video")


def is_sound(value: object, ask_media: AskMedia = take_images) -> bool:
    """Return True for a sound: opened, the path of one, or a waveform [n]; bytes may be an image or a video too."""
    if isinstance(value, str | os.PathLike):
        return is_sound_name(os.fspath(value))
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 1 or (value.ndim == 2 and ask_media() == "sound")
    return isinstance(value, Sound) or (isinstance(value, bytes) and ask_media() == "sound")


class SoundStore(objects.ObjectStore):
    """Sounds held by a sequence of opened sounds, paths, bytes and waveforms."""

    media: Media = "sound"

    def name(self, item: int) -> str:
        value = self.images[item]
        return printable_path(os.fspath(value)) if isinstance(value, str | os.PathLike) else super().name(item)

    def open(self, item: int) -> Any:
        with name_image_errors(self.name(item)):
            return to_sound(self.value(item))


class VideoStore(objects.ObjectStore):
    """Videos held by a sequence of values that `to_video` takes."""

    media: Media = "video"

    def name(self, item: int) -> str:
        value = self.images[item]
        return printable_path(os.fspath(value)) if isinstance(value, str | os.PathLike) else super().name(item)

    def open(self, item: int) -> Any:
        with name_image_errors(self.name(item)):
            return to_video(self.value(item))


def input_media(pair: tuple[str, str]) -> Media | None:
    """Return what a path, given and expanded, is by its name; None for folders and other files."""
    return file_media(pair[1])


def collect_inputs(
    paths: Sequence[str | os.PathLike[str]],
    progress: ProgressCallback | None = None,
    ask_media: AskMedia = take_images,
) -> ImageInputs:
    """Return all images, videos or sounds of these paths; raise ValueError if there are none, or two kinds."""
    stores: list[OpenedInput] = []
    notes: list[str] = []
    names = [os.fspath(path) for path in paths]
    expanded = [(given, path) for given in names for path in expand_path(given)]
    for media, group in itertools.groupby(expanded, key=input_media):
        if media is not None:  # consecutive files form one store
            store = FileStore.from_paths((path for _, path in group), media)
            stores.append((store, None))
            continue
        for given, path in group:
            stores += open_input(given, path, notes, progress, ask_media)
    return join_stores(stores, notes, ", ".join(map(redact, names)))


def join_stores(stores: Sequence[OpenedInput], notes: Sequence[str], given: str) -> ImageInputs:
    """Return the images of several stores; raise ValueError if there are none."""
    counts = [len(store) if items is None else len(items) for store, items in stores]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if not int(starts[-1]):
        raise ValueError(f"no images in {given}")
    firsts: dict[Media, str] = {}
    for store, items in stores:
        firsts.setdefault(media_of(store), store.name(0 if items is None else int(items[0])))
    if len(firsts) > 1:
        (one, first), (other, second) = sorted(firsts.items())[:2]
        raise ValueError(f"{first} is {NOUNS[one]} and {second} {NOUNS[other]}: give one kind")
    for media, name in firsts.items():
        if media == "sound" or is_video_name(name):
            import_decoder(media)
    return ImageInputs(tuple(store for store, _ in stores), starts, tuple(items for _, items in stores), tuple(notes))


def expand_path(path: str) -> list[str]:
    """Return the matches of a pattern, the shards at an address or in a list; another path is returned as it is."""
    if is_remote(path):
        return list(shards.find_shards(path, detect.expand_braces))
    path = os.path.expanduser(path)
    if file_suffix(path) == shards.LIST_SUFFIX and os.path.isfile(path):
        return shards.read_local_list(path, detect.expand_pattern, detect.expand_braces)
    if os.path.exists(path) or not detect.is_pattern(path):
        return [path]
    if "**" in path:
        if matched := sorted(glob.glob(path, recursive=True)):
            return [match for match in matched if os.path.isfile(match)]
        raise FileNotFoundError(f"no file matches {path}")
    return detect.expand_pattern(path)


def file_suffix(path: str) -> str:
    return os.path.splitext(os.path.basename(path).lower())[1]


def file_media(path: str) -> Media | None:
    """Return what a file is, an image, a video or a sound; None for a list, table or archive, and for what is no file."""
    if not os.path.isfile(path) or file_suffix(path) in INPUT_KINDS:
        return None
    return files.file_media(path) or "image"


def open_input(
    given: str, path: str, notes: list[str], progress: ProgressCallback | None, ask_media: AskMedia
) -> list[OpenedInput]:
    """Return the images or videos of a path that is neither the file of an image nor of a video."""
    if isinstance(path, RemoteFile):
        return [(open_parquet(path) if path.lower().endswith(".parquet") else open_tar(path, ask_media), None)]
    if os.path.isdir(path):
        return open_folder(path, notes, progress, ask_media)
    if not os.path.exists(path) and is_dataset_name(given):
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
            return [(open_tar(path, ask_media), None)]
        case kind:
            return [(open_path_list(path, (read_csv_paths if kind == "csv" else read_jsonl_paths)(path)), None)]


def is_dataset_name(name: str) -> bool:
    """Return True for the name of a dataset: digits, moving-digits:20000, frames:FOLDER."""
    return name in downloads.DATASET_NAMES or name.startswith((FRAMES_PREFIX, f"{downloads.GENERATED}:"))


def open_folder(
    folder: str, notes: list[str], progress: ProgressCallback | None, ask_media: AskMedia
) -> list[OpenedInput]:
    """Return all images below a folder, or all videos; without files of them, those of its shards, tables or arrays."""
    walk = FolderWalker(progress=progress, accepted=MEDIA_SUFFIXES)
    walk.add_tree(folder, set())
    if not len(walk.files):
        try:
            return open_dataset(folder, progress)
        except ValueError:
            raise ValueError(f"no images in {printable_path(folder)}") from None
    store = select_media(walk, ask_media)
    if skipped := walk.skipped:
        first, why = skipped[0]
        notes.append(f"skipped {len(skipped):,} other files in {printable_path(folder)}, {first} first ({why})")
    return [(store, None)]


def select_media(walk: FolderWalker, ask_media: AskMedia) -> FileStore:
    """Return what a model takes of the files of a folder: images, videos or sounds; the others are recorded as skipped.

    A folder of images without videos is a video itself, its images are the frames.
    """
    if walk.found & SOUND_SUFFIXES:
        others = bool(walk.found - SOUND_SUFFIXES)
        if not others or ask_media() == "sound":
            sounds = keep_files(walk, is_sound_name, "not a sound: the model takes sounds") if others else walk.files
            sounds.media = "sound"
            return sounds
        walk.files = keep_files(walk, lambda name: not is_sound_name(name), f"a sound: the model takes {ask_media()}s")
        walk.found -= SOUND_SUFFIXES
    store, has_images = walk.files, bool(walk.found - VIDEO_SUFFIXES)
    if has_images and ask_media() != "video":
        if not walk.found & VIDEO_SUFFIXES:
            return store
        return keep_files(walk, is_image_name, "a video: the model takes images")
    if not has_images:
        store.media = "video"
        return store
    videos = FileStore("video")
    for folder, group in itertools.groupby(range(len(store)), key=lambda item: store.folders[store.folder_ids[item]]):
        names = [os.path.basename(store.path(item)) for item in group]
        if found := [name for name in names if is_video_name(name)]:
            videos.add(folder, found)
            walk.skip(folder, (name for name in names if not is_video_name(name)), "an image beside videos")
        else:
            parent, name = os.path.split(os.path.normpath(folder))
            videos.add(parent, [name])
    return videos


def keep_files(walk: FolderWalker, is_kept: Callable[[str], bool], why: str) -> FileStore:
    """Return the files whose names are kept; the others are recorded as skipped."""
    paths = [walk.files.path(item) for item in range(len(walk.files))]
    walk.skipped += [(printable_path(path), why) for path in paths if not is_kept(path)]
    return FileStore.from_paths(filter(is_kept, paths))


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
    if not any(is_media_name(name) or os.path.exists(name) for name in first):
        raise ValueError(f"{printable_path(path)} must list image paths, got {printable_path(first[0])}")
    names = bytes(store.names).lower()
    if os.path.isdir(first[0]) or any(suffix.encode() in names for suffix in VIDEO_SUFFIXES | SOUND_SUFFIXES):
        store.media = find_media(path, [store.path(item) for item in range(len(store))])
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
    """Return the images or videos embedded in a Parquet file, or the files it lists."""
    with parquet.open_table(path) as opened:
        schema = opened.schema_arrow
        column = parquet.find_media_column(schema)
        if column is not None:
            counts = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
            firsts = np.cumsum([0, *counts], dtype=np.int64)
            groups = [(int(firsts[group]), 0, group) for group, count in enumerate(counts) if count]
            starts = np.array(groups, dtype=np.int64).reshape(-1, 3)
            return parquet.ParquetStore([path], column, starts, int(firsts[-1]), parquet.detect_media([path], column))
        if isinstance(path, RemoteFile):
            raise ValueError(f"{path} lists paths: over the network, tables must have the images in them")
        path_column = manifest.find_column(schema.names, manifest.PATH_COLUMNS)
        if path_column is None:
            raise ValueError(
                f"{printable_path(path)} has no column of images, videos or paths, only {', '.join(schema.names)}"
            )
        values = opened.read(columns=[schema.names[path_column]]).column(0).to_pylist()
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{printable_path(path)}, row {row:,}: no path")
    return open_path_list(path, values)


def open_tar(shard: str, ask_media: AskMedia = take_images) -> Store:
    """Return the images, the videos or the sounds in a tar file, each as a separate sample."""
    stores: dict[Media, tar.TarStore] = {}
    for member in tar.iter_members(shard):
        media = None if os.path.basename(member.name)[:1] == "." else files.file_media(member.name)
        if media is not None:
            store = stores.setdefault(media, tar.TarStore([shard]))
            store.media = media
            store.add(0, member.name, member.offset, member.size)
    if not stores:
        raise ValueError(f"no images in {printable_path(shard)}")
    taken = ask_media() if len(stores) > 1 else next(iter(stores))
    return stores.get(taken) or next(iter(stores.values()))


def sample_evenly(inputs: ImageInputs, count: int, exclude: Set[str] = frozenset()) -> list[int]:
    """Return `count` evenly spaced indices, without the images named in `exclude` if enough others are left."""
    others = [index for index in range(len(inputs)) if inputs.name(index) not in exclude] if exclude else []
    pool = others if len(others) >= count else range(len(inputs))
    positions = np.linspace(0, len(pool) - 1, min(count, len(pool))).round().astype(np.int64)
    return [pool[position] for position in positions.tolist()]

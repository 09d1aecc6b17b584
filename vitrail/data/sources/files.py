"""Image files: a store of a million paths, and class folders, ROOT/<split>/<class>/… or ROOT/<class>/… split by content."""

import os
import re
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.dataset import SPLITS, Dataset, Images, Media
from vitrail.data.decode import IMAGE_SUFFIXES, open_image
from vitrail.data.labels import normalise_class_name, sort_class_names
from vitrail.data.sound import SOUND_SUFFIXES, import_soundfile, is_sound_name, open_sound
from vitrail.data.sources import splits as parts
from vitrail.data.video import VIDEO_SUFFIXES, has_suffix, import_av, is_video_name, list_frames, open_video
from vitrail.utils.text import format_image_count

# Folders and files created by tools and systems. Names that start with a dot are ignored too.
TOOL_NAMES = {"__macosx", "@eadir", "__pycache__", "node_modules", "$recycle.bin", "system volume information"}
TOOL_NAMES |= {"lost+found", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
SKIP_HIDDEN, SKIP_NOT_AN_IMAGE = "hidden or a tool's", "not an image"
SKIP_UNREADABLE = "unreadable"
SKIP_LOOP, SKIP_OUTSIDE = "link to a folder that is already read", "outside the class folders"
FRAME_NAME = re.compile(r"(?i)frame[ _.-]?\d+\.\w+")  # of the images in a folder that is a video
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES | SOUND_SUFFIXES
BLOCK_BYTES = 2**20  # of a file that is read in parts
LAYOUT_HELP = "use FOLDER/<class>/…, FOLDER/train/<class>/… and FOLDER/validation/<class>/…, or a CSV of path,label"


class FileStore:
    """A growing store of files without an object for each: names in one byte string, folders in a list.

    A store of videos has files of video and folders of frames.
    """

    def __init__(self, media: Media = "image") -> None:
        self.media: Media = media
        self.folders: list[str] = []  # each folder once, as the user would write it
        self.folder_ids = array("i")  # [n]: folder of each file
        self.names = bytearray()  # all file names, concatenated
        self.ends = array("q")  # [n]: end of each name
        self.folder_numbers: dict[str, int] = {}

    @classmethod
    def from_paths(cls, paths: Iterable[str], media: Media = "image") -> "FileStore":
        """Return the store of these paths, in order."""
        store = cls(media)
        for folder, files in groupby(map(os.path.split, paths), key=itemgetter(0)):
            store.add(folder, [name for _, name in files])
        return store

    def add(self, folder: str, names: Iterable[str]) -> int:
        """Add files of one folder and return their number."""
        encoded = [os.fsencode(name) for name in names]
        self.ends.frombytes((np.cumsum([len(name) for name in encoded], dtype=np.int64) + len(self.names)).tobytes())
        self.names += b"".join(encoded)
        number = self.folder_numbers.setdefault(folder, len(self.folders))
        if number == len(self.folders):
            self.folders.append(folder)
        self.folder_ids.extend([number] * len(encoded))
        return len(encoded)

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, item: int) -> str:
        """Return the path of an image."""
        name = bytes(self.names[self.ends[item - 1] if item else 0 : self.ends[item]])
        return os.path.join(self.folders[self.folder_ids[item]], os.fsdecode(name))

    def name(self, item: int) -> str:
        return printable_path(self.path(item))

    def open(self, item: int) -> Any:
        path = self.regular_path(item)
        return {"image": open_image, "video": open_video, "sound": open_sound}[self.media](path, self.name(item))

    def data(self, item: int) -> bytes:
        return b"".join(self.blocks(item))

    def blocks(self, item: int) -> Iterator[bytes]:
        """Yield the bytes of a file, or of the frames of a video, in parts."""
        for path in self._list_files(self.regular_path(item)):
            with open(path, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block

    def regular_path(self, item: int) -> str:
        """Return the path of a regular file, or of a folder of frames; opening a pipe would block."""
        path = self.path(item)
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not (self.media == "video" and stat.S_ISDIR(mode)):
            raise OSError(f"{self.name(item)}: not a file, but a pipe, socket, device or folder")
        return path

    def stamp(self, item: int) -> tuple[int, int] | None:
        status = [os.stat(path) for path in self._list_files(self.path(item))]
        return sum(each.st_size for each in status), max((each.st_mtime_ns for each in status), default=0)

    def _list_files(self, path: str) -> list[str]:
        """Return the files of an item: itself, or its frames."""
        if self.media == "video" and os.path.isdir(path):
            return [os.path.join(path, name) for name in list_frames(path)]
        return [path]


def printable_path(path: str) -> str:
    """Return a path that can be printed and written to JSON, whatever bytes it contains."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_ignored_name(name: str) -> bool:
    """Return True if the name is hidden or created by tools and systems."""
    return name.startswith(".") or name.casefold() in TOOL_NAMES


def is_image_name(name: str) -> bool:
    """Return True if the file name has an image suffix."""
    return has_suffix(name, IMAGE_SUFFIXES)


def is_media_name(name: str) -> bool:
    """Return True if the file name has the suffix of an image, a video or a sound."""
    return has_suffix(name, MEDIA_SUFFIXES)


def file_media(name: str) -> Media | None:
    """Return what a file is, by its suffix; None if it is none of them."""
    kinds: dict[Media, Callable[[str], bool]] = {"image": is_image_name, "video": is_video_name, "sound": is_sound_name}
    return next((media for media, fits in kinds.items() if fits(name)), None)


def find_media(source: str, paths: Sequence[str]) -> Media:
    """Return what these paths are: images, sounds, or videos as files or folders of frames; raise ValueError for two kinds."""
    firsts: dict[Media, str] = {}
    for path in paths:
        if (media := file_media(path)) is not None:
            firsts.setdefault(media, path)
    if len(firsts) > 1:
        raise refuse_mixed(source, firsts)
    for media in firsts:
        import_decoder(media)
        return media
    return "video" if os.path.isdir(next(iter(paths), "")) else "image"


def import_decoder(media: Media) -> None:
    """Import the library that decodes this kind of files; raise an error that tells how to install it."""
    if media == "video":
        import_av()
    if media == "sound":
        import_soundfile()


def refuse_mixed(source: str, firsts: Mapping[Media, str]) -> ValueError:
    """Return the error for several kinds in one dataset, from the first path of each."""
    kinds: tuple[Media, ...] = ("image", "video", "sound")
    names = [f"{media}s ({os.path.basename(firsts[media])})" for media in kinds if media in firsts]
    found = " and ".join(names[:2])
    return ValueError(f"{printable_path(source)} has {printable_path(found)}: keep one kind, or list one kind in a CSV")


def explain_skip(name: str) -> str:
    """Return the reason why a file is skipped."""
    if is_ignored_name(name):
        return SKIP_HIDDEN
    if name.lower().endswith((".heic", ".heif")):
        return f"{SKIP_NOT_AN_IMAGE} that Pillow opens: convert HEIC to JPEG"
    return SKIP_NOT_AN_IMAGE


class FolderContents(NamedTuple):
    """The sorted contents of one folder."""

    folders: list[str]
    images: list[str]  # or videos, or sounds
    others: list[str]

    def count_samples(self) -> str:
        """Return the number of images or videos in words."""
        return format_image_count(
            len(self.images), "video" if self.images and is_video_name(self.images[0]) else "image"
        )


@dataclass
class FolderWalker:
    """A walker that collects image files and skipped entries."""

    files: FileStore = field(default_factory=FileStore)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    progress: parts.ProgressCallback | None = None
    accepted: frozenset[str] = IMAGE_SUFFIXES  # of the files to collect; MEDIA_SUFFIXES: of videos and sounds too
    found: set[str] = field(default_factory=set)  # suffixes of the accepted files in all folders that were listed

    def skip(self, folder: str, names: Iterable[str], reason: str | None = None) -> None:
        """Record skipped files or folders with the reason."""
        self.skipped += [(printable_path(os.path.join(folder, name)), reason or explain_skip(name)) for name in names]

    def list_folder(self, folder: str) -> FolderContents:
        """List one folder by directory entry types, without opening or stat-ing any file."""
        folders, images, others = [], [], []
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if entry.is_dir():
                    (others if is_ignored_name(name) else folders).append(name)
                else:
                    suffix = name[name.rfind(".") :].lower()
                    if name[0] != "." and suffix in self.accepted:
                        images.append(name)
                        self.found.add(suffix)
                    else:
                        others.append(name)
        return FolderContents(sorted(folders), sorted(images), sorted(others))

    def add_tree(self, folder: str, visited: set[tuple[int, int]]) -> int:
        """Add all images below a folder; links are followed, but no folder is read twice."""
        identity = folder_identity(folder)
        if identity in visited:
            self.skipped.append((printable_path(folder), SKIP_LOOP))
            return 0
        visited.add(identity)
        contents = self.list_folder(folder)
        self.skip(folder, contents.others)
        count = self.files.add(folder, contents.images) if contents.images else 0
        if self.progress:
            self.progress("listing", len(self.files), 0)
        return count + sum(self.add_tree(os.path.join(folder, name), visited) for name in contents.folders)

    def find_media(self, source: str) -> Media:
        """Return what the files are, images, videos or sounds; raise ValueError for two kinds."""
        if self.found <= IMAGE_SUFFIXES:
            return "image"
        return find_media(source, [self.files.path(item) for item in range(len(self.files))])


@dataclass
class SplitListing:
    """The class folders of one split: the index of its first image in the listing, and the count of each class."""

    start: int
    counts: dict[str, int]

    def to_images(self, store: FileStore, split: str) -> Images:
        classes = sort_class_names(self.counts)
        index = {name: i for i, name in enumerate(classes)}
        targets = np.repeat([index[name] for name in self.counts], list(self.counts.values())).astype(np.int64)
        return Images(store, np.arange(self.start, self.start + len(targets)), targets, classes, split)


def read_class_folders(root: str, options: parts.ReadOptions, frames: bool | None = None) -> Dataset:
    """Read class folders of images, videos or sounds, or a folder of them if labels are not needed.

    With `frames`, the folders that have images are videos, and the images their frames; None: if all are named frame_0001.jpg.
    """
    walker, labelled = FolderWalker(progress=options.progress, accepted=MEDIA_SUFFIXES), options.needs_labels
    top = walker.list_folder(root)
    splits = find_split_folders(walker, root, top)
    if splits:
        walker.skip(root, (name for name in top.folders if name not in splits.values()), "outside the split folders")
        paths = {split: os.path.join(root, folder) for split, folder in splits.items()}
        listings = {split: list_split(walker, path, root, labelled) for split, path in paths.items()}
        walker.skip(root, top.images, SKIP_OUTSIDE)
        walker.skip(root, top.others)
    else:
        listings = {"train": list_split(walker, root, root, labelled)}
    if not len(walker.files):
        raise ValueError(f"{root} has class folders without images: {LAYOUT_HELP}")
    store, notes = walker.files, ()
    store.media = walker.find_media(root)
    if frames if frames is not None else has_frame_folders(store, root, bool(splits)):
        store, listings = group_frames(store, listings)
        notes = (f"{len(store):,} folders of frames are read as videos; classes:{root} reads the frames as images",)
    images = {split: listing.to_images(store, split) for split, listing in listings.items()}
    return parts.add_validation_split(Dataset(root, "folder", images, notes, skipped=tuple(walker.skipped)), options)


def has_frame_folders(store: FileStore, root: str, has_splits: bool) -> bool:
    """Return True if all images are named like frame_0001.jpg, in folders inside of the class folders."""
    if store.media != "image" or not FRAME_NAME.fullmatch(os.path.basename(store.path(0))):
        return False
    depths = [len(os.path.relpath(folder, root).split(os.sep)) for folder in store.folders]
    names = (os.path.basename(store.path(item)) for item in range(len(store)))
    return min(depths) >= 2 + has_splits and all(map(FRAME_NAME.fullmatch, names))


def group_frames(store: FileStore, listings: dict[str, SplitListing]) -> tuple[FileStore, dict[str, SplitListing]]:
    """Return the folders of a store as videos, and the class folders of each split with the videos in them."""
    if store.media != "image":
        raise ValueError(f"{store.name(0)} is a {store.media}: folders of frames have images only")
    folders, videos, grouped = np.array(store.folder_ids), FileStore("video"), {}
    for split, listing in listings.items():
        grouped[split] = SplitListing(len(videos), {})
        start = listing.start
        for name, count in listing.counts.items():
            for number in dict.fromkeys(folders[start : start + count].tolist()):
                parent, folder = os.path.split(store.folders[number])
                videos.add(parent, [folder])
            start += count
            total = sum(grouped[split].counts.values())
            grouped[split].counts[name] = len(videos) - grouped[split].start - total
    return videos, grouped


def find_split_folders(walker: FolderWalker, root: str, contents: FolderContents) -> dict[str, str]:
    """Return the folder of each split. A folder `train` that contains images, beside others, is a class."""
    split_folders: dict[str, str] = {}
    for name in contents.folders:
        split = parts.parse_split_name(name)
        if split and split in split_folders:
            raise ValueError(f"{root} has {split_folders[split]} and {name}, both the {split} split: merge them")
        if split:
            split_folders[split] = name
    has_classes = any(walker.list_folder(os.path.join(root, name)).folders for name in split_folders.values())
    if has_classes or len(split_folders) == len(contents.folders):
        return {split: split_folders[split] for split in SPLITS if split in split_folders}
    return {}


class NoClassFoldersError(ValueError):
    """Raised for a folder without class folders."""


def list_split(walker: FolderWalker, folder: str, root: str, labelled: bool) -> SplitListing:
    """List one split: every folder in it is a class, even an empty one."""
    contents = walker.list_folder(folder)
    if not labelled and contents.images:  # folders beside images are not classes
        return SplitListing(len(walker.files), {parts.UNLABELLED_CLASS: walker.add_tree(folder, set())})
    if not contents.folders and not labelled:
        raise ValueError(f"{folder} has no images: give a folder with {', '.join(sorted(IMAGE_SUFFIXES))}")
    if not contents.folders:
        what = f"{contents.count_samples()} and no class folders" if contents.images else "no class folders"
        raise NoClassFoldersError(f"{folder} has {what}: {LAYOUT_HELP}")
    walker.skip(folder, contents.images, SKIP_OUTSIDE)
    walker.skip(folder, contents.others)
    parents = {folder_identity(folder), folder_identity(root)}
    listing = SplitListing(len(walker.files), {})
    classes: dict[str, list[str]] = {}
    for name in contents.folders:
        path = os.path.join(folder, name)
        if folder_identity(path) in parents:  # a link to the data itself is no class
            walker.skipped.append((printable_path(path), SKIP_LOOP))
        else:
            classes.setdefault(parse_class_name(folder, name), []).append(name)
    for label, names in classes.items():
        visited = set(parents)
        listing.counts[label] = sum(walker.add_tree(os.path.join(folder, name), visited) for name in names)
    return listing


def parse_class_name(folder: str, name: str) -> str:
    """Return the class name of a folder."""
    if printable_path(name) != name:
        raise ValueError(f"{printable_path(os.path.join(folder, name))} is not a UTF-8 name: rename the class folder")
    return normalise_class_name(name)


def folder_identity(folder: str) -> tuple[int, int]:
    """Return the device and inode of a folder."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino

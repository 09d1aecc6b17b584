"""Image files: a store of a million paths, and class folders, ROOT/<split>/<class>/… or ROOT/<class>/… split by content."""

import os
import stat
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.dataset import SPLITS, Dataset, Images
from vitrail.data.decode import IMAGE_SUFFIXES, open_image
from vitrail.data.labels import normalise_class_name, sort_class_names
from vitrail.data.sources import splits as parts

# Folders and files created by tools and systems. Names that start with a dot are ignored too.
TOOL_NAMES = {"__macosx", "@eadir", "__pycache__", "node_modules", "$recycle.bin", "system volume information"}
TOOL_NAMES |= {"lost+found", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
SKIP_HIDDEN, SKIP_NOT_AN_IMAGE = "hidden or a tool's", "not an image"
SKIP_UNREADABLE = "unreadable"
SKIP_LOOP, SKIP_OUTSIDE = "link to a folder that is already read", "outside the class folders"
LAYOUT_HELP = "use FOLDER/<class>/…, FOLDER/train/<class>/… and FOLDER/validation/<class>/…, or a CSV of path,label"


class FileStore:
    """A growing store of files without an object for each: names in one byte string, folders in a list."""

    def __init__(self) -> None:
        self.folders: list[str] = []  # each folder once, as the user would write it
        self.folder_ids = array("i")  # [n]: folder of each file
        self.names = bytearray()  # all file names, concatenated
        self.ends = array("q")  # [n]: end of each name
        self.folder_numbers: dict[str, int] = {}

    @classmethod
    def from_paths(cls, paths: Iterable[str]) -> "FileStore":
        """Return the store of these paths, in order."""
        store = cls()
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

    def open(self, item: int) -> Image.Image:
        return open_image(self.regular_path(item), self.name(item))

    def data(self, item: int) -> bytes:
        with open(self.regular_path(item), "rb") as file:
            return file.read()

    def regular_path(self, item: int) -> str:
        """Return the path of a regular file; opening a pipe would block."""
        path = self.path(item)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{self.name(item)}: not a file, but a pipe, socket or device")
        return path

    def stamp(self, item: int) -> tuple[int, int] | None:
        status = os.stat(self.path(item))
        return status.st_size, status.st_mtime_ns


def printable_path(path: str) -> str:
    """Return a path that can be printed and written to JSON, whatever bytes it contains."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_ignored_name(name: str) -> bool:
    """Return True if the name is hidden or created by tools and systems."""
    return name.startswith(".") or name.casefold() in TOOL_NAMES


def is_image_name(name: str) -> bool:
    """Return True if the file name has an image suffix."""
    return name[name.rfind(".") :].lower() in IMAGE_SUFFIXES


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
    images: list[str]
    others: list[str]


@dataclass
class FolderWalker:
    """A walker that collects image files and skipped entries."""

    files: FileStore = field(default_factory=FileStore)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    progress: parts.ProgressCallback | None = None

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
                else:  # is_image_name, inlined for speed
                    is_image = name[0] != "." and name[name.rfind(".") :].lower() in IMAGE_SUFFIXES
                    (images if is_image else others).append(name)
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


def read_class_folders(root: str, options: parts.ReadOptions) -> Dataset:
    """Read class folders, or a folder of images if labels are not needed."""
    walker, labelled = FolderWalker(progress=options.progress), options.needs_labels
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
    images = {split: listing.to_images(walker.files, split) for split, listing in listings.items()}
    return parts.add_validation_split(Dataset(root, "folder", images, skipped=tuple(walker.skipped)), options)


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
        what = f"{len(contents.images):,} images and no class folders" if contents.images else "no class folders"
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

"""Class folders: ROOT/<split>/<class>/…, or ROOT/<class>/… split by content."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vitrail.data.dataset import SPLITS, Dataset, Images
from vitrail.data.decode import IMAGE_SUFFIXES
from vitrail.data.labels import normalise_class_name, sort_class_names
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FileStore, printable_path

# Folders and files created by tools and systems. Names that start with a dot are ignored too.
TOOL_NAMES = frozenset(
    {"__macosx", "@eadir", "__pycache__", "node_modules", "$recycle.bin", "system volume information", "lost+found"}
    | {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
)
SKIP_HIDDEN, SKIP_NOT_AN_IMAGE = "hidden or a tool's", "not an image"
SKIP_LOOP, SKIP_OUTSIDE = "link to a folder that is already read", "outside the class folders"
LAYOUT_HELP = "use FOLDER/<class>/…, FOLDER/train/<class>/… and FOLDER/validation/<class>/…, or a CSV of path,label"


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
    notes: list[str] = []
    images = {split: listing.to_images(walker.files, split) for split, listing in listings.items()}
    images = parts.add_validation_split(images, options, parts.DEFAULT_FRACTIONS, notes)
    return Dataset(root, "folder", images, tuple(notes), tuple(walker.skipped))


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
        raise ValueError(f"{folder} has no images")
    if not contents.folders:
        what = f"{len(contents.images):,} images and no class folders" if contents.images else "no class folders"
        raise NoClassFoldersError(f"{folder} has {what}: {LAYOUT_HELP}")
    walker.skip(folder, contents.images, SKIP_OUTSIDE)
    walker.skip(folder, contents.others)
    parents = {folder_identity(folder), folder_identity(root)}
    listing = SplitListing(len(walker.files), {})
    classes: dict[str, list[str]] = {}
    for name in contents.folders:
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

"""Class folders: `ROOT/<split>/<class>/…`, or `ROOT/<class>/…` divided by content."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from vitrail.data.labels import normal, ordered
from vitrail.data.opening import SUFFIXES
from vitrail.data.pictures import SPLITS, Dataset, Pictures
from vitrail.data.sources import parts
from vitrail.data.sources.files import Files, Listing, printable

# Left behind by tools and systems; nobody's class. Whatever begins with a dot is passed over as well.
TOOLS = frozenset(
    {"__macosx", "@eadir", "__pycache__", "node_modules", "$recycle.bin", "system volume information", "lost+found"}
    | {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
)
HIDDEN, NOT_AN_IMAGE, LOOP = "hidden or a tool's", "not an image", "links to a folder that is read already"
OUTSIDE = "beside the class folders"
LAYOUTS = "use FOLDER/<class>/pictures, FOLDER/train/<class>/pictures with FOLDER/validation beside it, or a CSV of path,label"


def is_tools(name: str) -> bool:
    """Whether a name is hidden, or one that tools and systems leave behind."""
    return name.startswith(".") or name.casefold() in TOOLS


def is_picture(name: str) -> bool:
    """Whether a file's name ends like a picture's."""
    return name[name.rfind(".") :].lower() in SUFFIXES


def reason(name: str) -> str:
    """Why a file was not taken."""
    if is_tools(name):
        return HIDDEN
    if name.lower().endswith((".heic", ".heif")):
        return f"{NOT_AN_IMAGE} that Pillow opens: convert HEIC to JPEG"
    return NOT_AN_IMAGE


@dataclass
class Level:
    """What one folder holds, sorted."""

    folders: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass
class Walk:
    """Files as they are found, and what is passed over."""

    listing: Listing = field(default_factory=Listing)
    passed_over: list[tuple[str, str]] = field(default_factory=list)
    progress: parts.Progress | None = None

    def pass_over(self, folder: str, names: Iterable[str], why: str | None = None) -> None:
        """Files or folders that are not taken, each with the reason."""
        self.passed_over += [(printable(os.path.join(folder, name)), why or reason(name)) for name in names]

    def level(self, folder: str) -> Level:
        """One folder, by the types that the directory itself tells: no file is looked at."""
        found = Level()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if entry.is_dir():
                    (found.others if is_tools(name) else found.folders).append(name)
                elif name[0] != "." and name[name.rfind(".") :].lower() in SUFFIXES:  # is_picture, a million times
                    found.pictures.append(name)
                else:
                    found.others.append(name)
        for names in (found.folders, found.pictures, found.others):
            names.sort()
        return found

    def below(self, folder: str, seen: set[tuple[int, int]]) -> int:
        """All pictures below a folder; links are followed, but to no folder twice."""
        if identity(folder) in seen:
            self.passed_over.append((printable(folder), LOOP))
            return 0
        seen.add(identity(folder))
        here = self.level(folder)
        self.pass_over(folder, here.others)
        count = self.listing.add(folder, here.pictures) if here.pictures else 0
        if self.progress:
            self.progress("listing", self.listing.count, 0)
        return count + sum(self.below(os.path.join(folder, name), seen) for name in here.folders)


@dataclass
class Part:
    """The class folders of one split: where its pictures begin in the listing, and how many each class has."""

    start: int
    counts: dict[str, int]

    def pictures(self, store: Files, split: str) -> Pictures:
        classes = ordered(self.counts)
        place = {name: index for index, name in enumerate(classes)}
        targets = np.repeat([place[name] for name in self.counts], list(self.counts.values())).astype(np.int64)
        return Pictures(store, np.arange(self.start, self.start + len(targets)), targets, classes, split)


def read(
    root: str, fractions: parts.Fractions | None, progress: parts.Progress | None, labelled: bool = True
) -> Dataset:
    """A folder of class folders; one of pictures alone, where no labels are needed."""
    walk = Walk(progress=progress)
    top = walk.level(root)
    splits = split_folders(walk, root, top)
    if splits:
        walk.pass_over(root, (name for name in top.folders if name not in splits.values()), "beside the split folders")
        found = {split: part(walk, os.path.join(root, folder), root, labelled) for split, folder in splits.items()}
        walk.pass_over(root, top.pictures, OUTSIDE)
        walk.pass_over(root, top.others)
    else:
        found = {"train": part(walk, root, root, labelled)}
    if not walk.listing.count:
        raise ValueError(f"{root} has class folders and no picture in any of them: {LAYOUTS}")
    store, notes = walk.listing.store(), []
    pictures = {split: each.pictures(store, split) for split, each in found.items()}
    pictures = parts.completed(pictures, fractions, parts.WHOLE, notes, progress)
    return Dataset(root, "folder", pictures, tuple(notes), tuple(walk.passed_over))


def split_folders(walk: Walk, root: str, top: Level) -> dict[str, str]:
    """Which folder is which split. A folder `train` that holds pictures itself, beside others, is a class of trains."""
    named: dict[str, str] = {}
    for name in top.folders:
        split = parts.called(name)
        if split and split in named:
            raise ValueError(f"{root} holds both {named[split]} and {name}: merge them, both are the {split} split")
        if split:
            named[split] = name
    divided = any(walk.level(os.path.join(root, name)).folders for name in named.values())
    return (
        {split: named[split] for split in SPLITS if split in named} if divided or len(named) == len(top.folders) else {}
    )


class NoClassFoldersError(ValueError):
    """Pictures lie there, or nothing does, where folders of classes are meant."""


def part(walk: Walk, folder: str, root: str, labelled: bool) -> Part:
    """One split: every folder in it is a class, also an empty one."""
    here = walk.level(folder)
    if not labelled and here.pictures:  # beside them, folders are no classes
        return Part(walk.listing.count, {parts.PICTURE: walk.below(folder, set())})
    if not here.folders and not labelled:
        raise ValueError(f"{folder} holds no pictures")
    if not here.folders:
        held = f"{len(here.pictures):,} pictures and no class folders" if here.pictures else "no class folders"
        raise NoClassFoldersError(f"{folder} holds {held}: {LAYOUTS}")
    walk.pass_over(folder, here.pictures, OUTSIDE)
    walk.pass_over(folder, here.others)
    above = {identity(folder), identity(root)}
    found = Part(walk.listing.count, {})
    classes: dict[str, list[str]] = {}
    for name in here.folders:
        classes.setdefault(class_name(folder, name), []).append(name)
    for label, names in classes.items():
        seen = set(above)
        found.counts[label] = sum(walk.below(os.path.join(folder, name), seen) for name in names)
    return found


def class_name(folder: str, name: str) -> str:
    """The class that a folder's name says."""
    if printable(name) != name:
        raise ValueError(
            f"{printable(os.path.join(folder, name))} is not named in UTF-8: rename it, it is to be a class"
        )
    return normal(name)


def identity(folder: str) -> tuple[int, int]:
    """What makes two paths the same folder."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino

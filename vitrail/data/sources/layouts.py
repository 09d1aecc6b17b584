"""Layouts that are not class folders, although every folder in them could be read as a class.

`check_layout` recognises a dataset one level below, images beside annotations or masks, masks among images, published files,
and labels in file names. It raises an error of one line with the command that reads the data. `classes:FOLDER` skips it.
"""

import os
import re
import shlex
from collections import deque
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import NoReturn

from vitrail.data.decode import IMAGE_ERRORS, name_image_errors, open_image
from vitrail.data.sources import splits as parts
from vitrail.data.sources import vtab
from vitrail.data.sources.file_names import suggest_pattern
from vitrail.data.sources.files import (
    LAYOUT_HELP,
    MEDIA_SUFFIXES,
    FolderContents,
    FolderWalker,
    NoClassFoldersError,
    find_split_folders,
    is_ignored_name,
    is_media_name,
)
from vitrail.data.sources.manifest import PATH_COLUMNS, find_column, open_csv

CLASSES_PREFIX = "classes:"  # classes:FOLDER reads every folder as a class
FRAMES_PREFIX = "frames:"  # frames:FOLDER reads every folder of images as a video
MAX_FOLDERS = 12  # more folders than this are classes
MAX_ENTRIES = 5000  # read of a folder that is only looked at
MAX_VISITED = 200  # folders that are looked at in a search for images
MASK_SAMPLES = 4
MAX_MASK_COLOURS = 32
IMAGE_WORDS = {"image", "images", "img", "imgs", "jpg", "jpgs", "jpeg", "png", "pngs", "jpegimages", "photo", "photos"}
IMAGE_WORDS |= {"picture", "pictures", "rgb", "train2014", "train2017", "val2014", "val2017", "test2014", "test2015"}
IMAGE_WORDS |= {"test2017", "unlabeled2017", "leftimg8bit"}
ANNOTATION_WORDS = {
    "annotation",
    "annotations",
    "annots",
    "anns",
    "label",
    "labels",
    "mask",
    "masks",
    "trimap",
    "trimaps",
}
ANNOTATION_WORDS |= {
    "segmentation",
    "segmentations",
    "segmentationclass",
    "segmentationobject",
    "groundtruth",
    "gt",
    "truth",
}
ANNOTATION_WORDS |= {"gtfine", "gtcoarse", "xml", "xmls", "json", "imagesets", "bbox", "bboxes", "matte", "mattes"}
SIDE_WORDS = {
    "assets",
    "figures",
    "static",
    "notebooks",
    "scripts",
    "src",
    "code",
    "logs",
    "runs",
    "checkpoints",
    "weights",
}
MASK_NAME = re.compile(r"(?i)[ _.-](mask|masks|seg|segmentation|gt|label|labels|trimap|matte|annotation)(_?\d+)?$")
ARCHIVES = {".zip": "unzip", ".tar": "tar xf", ".tgz": "tar xf", ".gz": "tar xf", ".rar": "unrar x", ".7z": "7z x"}


class LayoutError(ValueError):
    """Raised for a folder whose folders are probably not classes."""


def check_layout(root: str) -> tuple[str, ...]:
    """Raise a LayoutError if the folders in `root` are probably not classes, or a NoClassFoldersError if there are none.

    Return notes about class folders that are read.
    """
    if name := find_published(root):
        masks = f", for masks masks:{root}" if has_images(os.path.join(root, "annotations", "trimaps")) else ""
        refuse(root, f"holds the files of {name}{masks}", f"{name}:{root}")
    walker = FolderWalker(accepted=MEDIA_SUFFIXES)
    top = walker.list_folder(root)
    if len(top.folders) > MAX_FOLDERS:
        check_masks(root, top, root)
        return ()
    splits = find_split_folders(walker, root, top)
    if splits:
        folder = os.path.join(root, next(iter(splits.values())))
        contents = walker.list_folder(folder)
        if not contents.folders:
            refuse_flat(root, folder, contents)
        check_annotations(folder, contents, root)
        check_masks(folder, contents, root)
        check_held_out(root, folder, [os.path.join(root, name) for name in splits.values()])
        return ()
    if not top.folders:
        refuse_flat(root, root, top)
    check_nested_datasets(root, top)
    check_annotations(root, top, root)
    check_level(root, top)
    check_masks(root, top, root)
    first = list_entries(os.path.join(root, top.folders[0])).folders
    names = [name for name in first if parts.parse_split_name(name)]
    if len(names) < 2:
        return ()
    inside = f"{top.folders[0]} has folders {' and '.join(names)}, which are not used as splits"
    return (f"{inside}: --label-from '^([^/]+)/' uses them",)


def check_names_layout(root: str) -> None:
    """Raise a LayoutError if `root`, whose labels are in the file names, has masks beside or among its images."""
    splits = [os.path.join(root, name) for name in list_entries(root).folders if parts.parse_split_name(name)]
    for folder in (root, *splits):
        contents = list_entries(folder)
        check_annotations(folder, contents, root)
        if masks := find_masks(folder, contents.images):
            images = [name for name in contents.images if name not in masks]
            shown = shlex.quote(os.path.join(folder, find_glob(images, masks) or "*.jpg"))
            raise LayoutError(f"{folder} has masks among the images, such as {masks[0]}: give the images as {shown}")


def refuse(folder: str, finding: str, source: str, options: str = "", root: str | None = None) -> NoReturn:
    """Raise a LayoutError with the command that reads the data; `root` is the folder that was given, if it is another."""
    command = f"vitrail check {shlex.quote(source)}{options}"
    insist = shlex.quote(CLASSES_PREFIX + (root or folder))
    raise LayoutError(f"{folder} {finding}: use {command} (or {insist} if every folder is a class)")


def list_entries(folder: str) -> FolderContents:
    """List the first entries of a folder; an unreadable folder is empty."""
    folders, images, others = [], [], []
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, MAX_ENTRIES):
                is_folder = entry.is_dir() and not is_ignored_name(entry.name)
                is_image = not is_folder and is_media_name(entry.name) and not is_ignored_name(entry.name)
                (folders if is_folder else images if is_image else others).append(entry.name)
    except OSError:
        pass  # read_class_folders reports it
    return FolderContents(sorted(folders), sorted(images), sorted(others))


def iter_images(folder: str) -> Iterator[str]:
    """Yield images below a folder, the nearest first; at the end an empty name if there are too many folders to look at."""
    waiting = deque([folder])
    for _ in range(MAX_VISITED):
        if not waiting:
            return
        path = waiting.popleft()
        contents = list_entries(path)
        yield from (os.path.join(path, name) for name in contents.images)
        waiting.extend(os.path.join(path, name) for name in contents.folders)
    yield ""


def has_images(folder: str) -> bool:
    """Return True if there are images below a folder, or too many folders to look at."""
    return next(iter_images(folder), None) is not None


def has_only_folders(folder: str) -> bool:
    """Return True if a folder has no images itself, but two or more folders with images."""
    contents = list_entries(folder)
    found = (name for name in contents.folders if has_images(os.path.join(folder, name)))
    return not contents.images and len(list(islice(found, 2))) == 2


def list_split_classes(folder: str) -> list[set[str]]:
    """Return the class folders of each split folder in a folder."""
    names = [name for name in list_entries(folder).folders if parts.parse_split_name(name)]
    return [set(list_entries(os.path.join(folder, name)).folders) for name in names]


def find_published(root: str) -> str | None:
    """Return the name of the published dataset whose files are all in a folder."""
    for name, layout in vtab.VTAB_LAYOUTS.items():
        if layout.reader is not None and all(os.path.exists(os.path.join(root, file)) for file in layout.files):
            return name
    return None


def check_held_out(root: str, first: str, folders: Sequence[str]) -> None:
    """Refuse a split without class folders beside one that has them, such as a test set without labels."""
    for folder in folders:
        contents = list_entries(folder)
        if contents.images and not contents.folders:
            problem = f"{folder} has {contents.count_samples()} and no class folders, unlike {first}"
            raise NoClassFoldersError(f"{problem}: use vitrail check {shlex.quote(first)}, or sort them into classes")


def check_nested_datasets(root: str, top: FolderContents) -> None:
    """Refuse a folder in which a folder has split folders with classes in them."""
    classes = {name: list_split_classes(os.path.join(root, name)) for name in top.folders}
    datasets = [name for name, found in classes.items() if any(found)]
    if not datasets:
        return
    first = os.path.join(root, datasets[0])
    if len(datasets) == len(top.folders) > 1:  # perhaps <class>/<split>/<any folder>: the splits have classes in common
        found = classes[datasets[0]]
        if len(found) < 2 or len(set.intersection(*found)) < 2:
            return
    check_layout(first)  # it may not be class folders either
    if len(datasets) > 1:
        refuse(root, f"holds {len(datasets)} datasets with splits, {datasets[0]} first", first)
    names = [name for name in list_entries(first).folders if parts.parse_split_name(name)]
    refuse(root, f"is one level too high, {datasets[0]} has the splits {' and '.join(names)}", first)


def check_level(root: str, top: FolderContents) -> None:
    """Refuse a folder whose images are all in one folder, with folders in it, or beside folders such as assets."""
    used = [name for name in top.folders if has_images(os.path.join(root, name))]
    main = [name for name in used if name.casefold() not in SIDE_WORDS]
    if len(main) != 1:
        return
    folder = os.path.join(root, main[0])
    if has_only_folders(folder):
        check_layout(folder)  # it may not be class folders either
        others = (
            f", beside {', '.join(name for name in top.folders if name != main[0])}" if len(top.folders) > 1 else ""
        )
        refuse(root, f"is one level too high, the class folders seem to be in {main[0]}{others}", folder)
    contents = list_entries(folder)
    if len(used) == 1 and not contents.folders:
        if suggestion := suggest_source(folder, contents):
            refuse(root, f"has one folder of images, {main[0]}, with labels {suggestion[2]}", *suggestion[:2])
    elif len(used) == 1 and len(contents.folders) == 1 and not contents.images:
        check_layout(folder)


def check_annotations(folder: str, contents: FolderContents, root: str) -> None:
    """Refuse folders of images beside annotations or masks."""
    if len(contents.folders) > MAX_FOLDERS:
        return
    words = {name: {*re.split(r"[\s_.-]+", name.casefold()), name.casefold()} for name in contents.folders}
    annotations = [name for name in contents.folders if words[name] & ANNOTATION_WORDS]
    images = [name for name in contents.folders if words[name] & IMAGE_WORDS and name not in annotations]
    if not images or not annotations or set(contents.folders) - {*images, *annotations} - SIDE_WORDS:
        return
    if not all(is_annotation(os.path.join(folder, name)) for name in annotations):
        return
    empty = [
        name for name in annotations if words[name] & {"mask", "masks"} and not has_images(os.path.join(folder, name))
    ]
    if root == folder and empty == annotations:
        masks, insist = os.path.join(folder, empty[0]), shlex.quote(CLASSES_PREFIX + root)
        raise LayoutError(f"{masks} has no images: save masks as PNG, or use {insist} for classes")
    finding = f"has {' and '.join(images[:2])} beside {' and '.join(annotations[:2])}, which are not classes"
    image_folder = os.path.join(folder, images[0])
    below = list_entries(image_folder)
    if has_only_folders(image_folder):
        refuse(folder, finding, image_folder, root=root)
    if folder != root:
        if suggestion := suggest_pattern([*glob_images(root, images[0])]):
            source = os.path.join(root, "*", images[0], "*")
            refuse(folder, finding, source, f" --label-from {shlex.quote(suggestion[0])}", root)
    elif suggestion := suggest_source(image_folder, below):
        refuse(folder, finding, *suggestion[:2], root)
    insist = shlex.quote(CLASSES_PREFIX + root)
    raise LayoutError(f"{folder} {finding}: list the images in a CSV of path,label (or {insist} if they are classes)")


def glob_images(root: str, name: str = "") -> Iterator[str]:
    """Yield the names of the images in the folders ROOT/*/NAME."""
    for folder in list_entries(root).folders:
        yield from list_entries(os.path.join(root, folder, name)).images


def is_annotation(folder: str) -> bool:
    """Return True if a folder has no images, or only masks among the first ones."""
    return all(map(is_mask, islice(iter_images(folder), MASK_SAMPLES)))


def is_mask(path: str) -> bool:
    """Return True if an image has few colours and is not a JPEG, as segmentation masks."""
    if path.lower().endswith((".jpg", ".jpeg")) or not os.path.isfile(path):  # opening a pipe would block
        return False
    try:
        with open_image(path, path) as image, name_image_errors(path):
            small = image.convert("RGB").resize((min(image.width, 256), min(image.height, 256)), 0)  # nearest
            return small.getcolors(MAX_MASK_COLOURS) is not None
    except IMAGE_ERRORS:  # the audit reports it
        return False


def find_masks(folder: str, images: Sequence[str]) -> list[str]:
    """Return the masks in a list of images: few colours, beside an image of the same name that has many."""
    stems = {}
    for name in images:
        stems.setdefault(os.path.splitext(name)[0], []).append(name)
    pairs: dict[str, str] = {}  # mask and its image
    for name in images:
        stem = os.path.splitext(name)[0]
        partners = stems.get(MASK_NAME.sub("", stem), []) if MASK_NAME.search(stem) else stems[stem]
        if partner := next((other for other in partners if other != name), None):
            pairs[name] = partner
    pairs = {mask: image for mask, image in pairs.items() if pairs.get(image) != mask or is_jpeg(image) > is_jpeg(mask)}
    if 3 * len(pairs) < len(images) or not pairs:
        return []
    for mask, image in islice(pairs.items(), MASK_SAMPLES):
        if not is_mask(os.path.join(folder, mask)) or is_mask(os.path.join(folder, image)):
            return []
    return list(pairs)


def is_jpeg(name: str) -> bool:
    return name.lower().endswith((".jpg", ".jpeg"))


def check_masks(folder: str, contents: FolderContents, root: str) -> None:
    """Refuse class folders of `root`, or of a split in it, with masks among the images; the first folders are looked at."""
    for name in contents.folders[:3]:
        path = os.path.join(folder, name)
        listed = list_entries(path).images
        if masks := find_masks(path, listed):
            finding = f"has masks among the images of {name}, such as {masks[0]} (to segment, use masks:{root})"
            if pattern := find_glob([image for image in listed if image not in masks], masks):
                source = os.path.join(root, *(["*", "*"] if root != folder else ["*"]), pattern)
                refuse(folder, finding, source, " --label-from '([^/]+)/[^/]+$'", root)
            insist = shlex.quote(CLASSES_PREFIX + root)
            raise LayoutError(f"{folder} {finding}: move the masks to another folder (or use {insist})")


def find_glob(images: Sequence[str], masks: Sequence[str]) -> str | None:
    """Return a pattern of file names that matches the images and none of the masks."""
    suffixes = {os.path.splitext(name)[1] for name in images}
    ends = {os.path.splitext(name)[0][-1:] for name in masks}
    for suffix in suffixes:
        for pattern in (f"*{suffix}", *(f"*[!{end}]{suffix}" for end in ends)):
            matches = [fnmatchcase(name, pattern) for name in (*images, *masks)]
            if all(matches[: len(images)]) and not any(matches[len(images) :]):
                return pattern
    return None


def suggest_source(folder: str, contents: FolderContents) -> tuple[str, str, str] | None:
    """Return the source, the options of `vitrail check` and the place of the labels of a folder of images."""
    masks = find_masks(folder, contents.images)
    images = [name for name in contents.images if name not in masks]
    if suggestion := suggest_pattern(images):
        pattern, labels = suggestion
        source = os.path.join(folder, find_glob(images, masks) or "*") if masks else folder
        return source, f" --label-from {shlex.quote(pattern)}", f"in the names ({', '.join(labels[:2])} …)"
    return None


def find_list(folder: str, contents: FolderContents) -> str | None:
    """Return a CSV in a folder that lists images with labels, if its first image exists."""
    for name in (name for name in contents.others if name.lower().endswith((".csv", ".tsv"))):
        path = os.path.join(folder, name)
        try:
            header, rows = open_csv(path, labelled=True)
        except (OSError, ValueError):  # another kind of table
            continue
        column, (_, first) = find_column(header, PATH_COLUMNS), next(rows, (0, []))
        if column is not None and len(first) == len(header) and os.path.isfile(os.path.join(folder, first[column])):
            return path
    return None


def unpack_command(path: str) -> str | None:
    """Return the command that unpacks an archive in its folder, or None for another file."""
    program = ARCHIVES.get(os.path.splitext(path)[1].lower())
    folder, name = os.path.split(path)
    return program and f"cd {shlex.quote(folder or '.')} && {program} {shlex.quote(name)}"


def refuse_flat(root: str, folder: str, contents: FolderContents) -> NoReturn:
    """Raise a NoClassFoldersError for a folder without class folders, with the command that reads it if there is one."""
    images = f"{contents.count_samples()} and " if contents.images else ""
    problem = f"{folder} has {images}no class folders"
    if path := find_list(root, list_entries(root)):
        raise NoClassFoldersError(f"{problem}, but a list: use vitrail check {shlex.quote(path)}")
    suggestion = suggest_source(folder, contents)
    everywhere = suggest_pattern([*glob_images(root)]) if suggestion and root != folder else None
    if suggestion and everywhere and suggestion[1].endswith(shlex.quote(everywhere[0])):  # it fits all splits
        suggestion = (root, *suggestion[1:])
    if suggestion:
        source, options, where = suggestion
        raise NoClassFoldersError(f"{problem}, but labels {where}: use vitrail check {shlex.quote(source)}{options}")
    if not contents.images:
        for name in contents.others:
            if command := unpack_command(os.path.join(folder, name)):
                raise NoClassFoldersError(f"{problem}, but the archive {name}: unpack it first: {command}")
    has_words = sum("_" in name for name in contents.images) > len(contents.images) / 2
    hint = "; or label_from='^(.+)_' to read the class from file names" if has_words else ""
    raise NoClassFoldersError(f"{problem}: {LAYOUT_HELP}{hint}")

"""Labels in file names or paths: `--label-from REGEX`, its preview, and the pattern that fits a list of names."""

import os
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vitrail.data.dataset import Dataset
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import (
    MEDIA_SUFFIXES,
    FileStore,
    FolderWalker,
    find_media,
    is_media_name,
    printable_path,
)
from vitrail.data.sources.manifest import build_dataset

PREVIEW_SIZE = 10
# Simple patterns first: the first one that fits all names is suggested.
NAME_PATTERNS = (r"^(.+)_\d+\.", r"^(.+)-\d+\.", r"^(.+) \(\d+\)\.", r"^(.+)\.\d+\.", r"^(\D+)\d+\.")
NAME_PATTERNS += (r"^(.+?)[ _.-]*\(?\d+\)?\.", r"^\d+_(.+)\.", r"^\d+-(.+)\.", r"^\d+[ _.-]*(.+)\.")
NAME_PATTERNS += (r"^([^_.]+)_", r"^([^-.]+)-", r"_([^_.]+)\.\w+$", r"-([^-.]+)\.\w+$")
# Names that cameras, phones and programs give to all images.
CAMERA_WORDS = {
    "img",
    "image",
    "images",
    "dsc",
    "dscn",
    "dscf",
    "dcim",
    "photo",
    "pic",
    "picture",
    "scan",
    "frame",
    "file",
}
CAMERA_WORDS |= {"screenshot", "untitled", "imag", "pxl", "mvimg", "gopr", "whatsapp image", "sample", "im", "p", "i"}


def read_file_names(source: str, root: str, files: Sequence[str] | None, options: parts.ReadOptions) -> Dataset:
    """Read all images below a folder, or the given files; the class is found by `options.label_from`.

    The pattern is searched in the file name, or in the path below `root` if it contains a slash. The class is the group
    `label`, else the first group, else the whole match. Folders train, validation and test in the paths are splits if every
    image is in one of them.
    """
    pattern = options.label_from
    assert pattern is not None
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"label_from='{pattern}' is not a regular expression: {error}") from None
    walk = FolderWalker(progress=options.progress, accepted=MEDIA_SUFFIXES)
    if files is None:
        walk.add_tree(root, set())
        walk.files.media = walk.find_media(source)
    else:
        paths = [path for path in files if is_media_name(path)]
        walk.files = FileStore.from_paths(paths, find_media(source, paths))
    store, labels, splits = walk.files, [], []
    unmatched: list[int] = []
    for item in range(len(store)):
        path = os.path.relpath(store.path(item), root).replace(os.sep, "/")
        folder, _, name = path.rpartition("/")
        label = find_label(regex, path if "/" in pattern else name)
        if label is None:
            unmatched.append(item)
        labels.append(label or "")
        splits.append(next(filter(None, map(parts.parse_split_name, folder.split("/"))), None))
    if unmatched:
        count = f"{len(unmatched):,} of {len(store):,} files, first {store.name(unmatched[0])}"
        raise ValueError(f"label_from='{pattern}' matches no class in {count}: change the pattern, or move the files")
    if None in splits:
        splits = [None] * len(labels)
    where = "paths" if "/" in pattern else "file names"
    notes = (f"classes are matches of '{pattern}' in {where}",)
    return build_dataset(source, "file names", store, labels, splits, options, notes=notes, skipped=walk.skipped)


def find_label(regex: re.Pattern[str], text: str) -> str | None:
    """Return the class in a name: the group `label`, else the first group, else the whole match; None if it is empty."""
    match = regex.search(text)
    if match is None:
        return None
    label = match["label"] if "label" in regex.groupindex else match[1] if regex.groups else match[0]
    return label if label and label.strip() and printable_path(label) == label else None


def preview_labels(dataset: Dataset, count: int = PREVIEW_SIZE) -> list[str]:
    """Return lines with images and their labels, evenly spaced over all splits: cat_001.jpg → cat."""
    root = dataset.source.rstrip("/") + "/"
    ends = np.cumsum([len(images) for images in dataset.splits.values()])
    names, labels = [], []
    for position in np.linspace(0, ends[-1] - 1, min(count, int(ends[-1]))).round().astype(int).tolist():
        split = int(np.searchsorted(ends, position, side="right"))
        images, index = list(dataset.splits.values())[split], position - int(ends[split - 1] if split else 0)
        found = np.flatnonzero(images.targets[index]) if images.is_multi_label else [images.targets[index]]
        names.append(images.name(index).removeprefix(root))
        labels.append(", ".join(images.classes[int(label)] for label in found))
    width = max(map(len, names), default=0)
    return [f"{name.ljust(width)}  → {label}" for name, label in zip(names, labels, strict=True)]


def suggest_pattern(names: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the simplest pattern that finds a class in every name, and the classes; None if there is none.

    There must be two classes or more, with two images each on average, and each is a word, but none like IMG or DSC.
    """
    for pattern in NAME_PATTERNS:
        regex = re.compile(pattern)
        labels = [find_label(regex, name) for name in names]
        counts = Counter(label for label in labels if label)
        if None in labels or not 2 <= len(counts) <= len(names) / 2:
            continue
        if all(label.casefold() not in CAMERA_WORDS and re.search(r"[^\W\d_]", label) for label in counts):
            return pattern, sorted(counts)
    return None

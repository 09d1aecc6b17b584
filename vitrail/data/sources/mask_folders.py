"""Folders of images beside folders of masks, paired by name.

`images/` and `masks/` (or names with the words of layouts.py) stand in the folder, in split folders (`train/images`), or have
split folders (`images/train`, `train_images`). Or masks lie among their images, `a.jpg` with `a_mask.png`, in one folder or in
split folders. Without split folders, lists such as `ImageSets/Segmentation/train.txt` or a CSV with a split column state the
splits, else the content does.
"""

import csv
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vitrail.data.dataset import SPLITS, Dataset
from vitrail.data.decode import IMAGE_ERRORS, name_image_errors, open_image
from vitrail.data.labels import format_names
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FileStore, FolderWalker, is_image_name, printable_path
from vitrail.data.sources.layouts import (
    ANNOTATION_WORDS,
    IMAGE_WORDS,
    MASK_NAME,
    MAX_ENTRIES,
    MAX_FOLDERS,
    MAX_MASK_COLOURS,
    SIDE_WORDS,
    LayoutError,
    find_published,
    has_images,
    is_mask,
    iter_images,
    list_entries,
)
from vitrail.data.sources.manifest import PATH_COLUMNS, SPLIT_COLUMNS, find_column, parse_split, search_csv
from vitrail.data.sources.mask_classes import find_class_file
from vitrail.data.sources.masks import (
    SKIP_AMBIGUOUS,
    SKIP_NO_IMAGE,
    SKIP_NO_MASK,
    EncodedMasks,
    build_mask_dataset,
    build_unlabelled_dataset,
    describe_skipped,
    find_classes,
)

MASKS_PREFIX = "masks:"  # masks:FOLDER reads images and masks, whatever the folder looks like
MASK_WORDS = ANNOTATION_WORDS - {"xml", "xmls", "json", "imagesets", "bbox", "bboxes", "segmentationobject"}
SECOND_CHOICES = {"gtcoarse", "matte", "mattes", "label", "labels", "annotation", "annotations"}
MAX_DEPTH = 3  # single folders inside each other
SAMPLES = 8  # masks that are looked at
DOMINANT_COLOURS, DOMINANT_SHARE, MIN_SAMPLE_PIXELS = 8, 0.75, 256  # of a mask that was smoothed or stored as JPEG
MASK_ENDING = re.compile(
    r"(?i)([ _.-](mask|masks|seg|segmentation|gt|gtfine|gtcoarse|label|labels|labelids|labeltrainids|trimap|matte|"
    r"annotation|l|p))+$"
)
IMAGE_ENDING = re.compile(r"(?i)[ _.-](image|img|rgb|sat|photo|leftimg8bit)$")
PHOTO_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".avif")
LIST_FOLDERS = ("", "ImageSets/Segmentation", "ImageSets", "splits", "lists", "annotations")
STEM_COLUMNS = (*PATH_COLUMNS, "name", "stem", "id", "image_id")


@dataclass(frozen=True)
class FolderPair:
    """A folder of images and the folder of their masks, which may be the same."""

    images: str
    masks: str
    split: str | None = None


def find_mask_folders(root: str, trusted: bool = False) -> tuple[str, list[FolderPair]]:
    """Return the folder that has images beside masks, `root` or a single folder in it, and its pairs, or none.

    The files of a published dataset are none, because they have labels too, nor are folders whose images do not look like
    masks, unless the names are `trusted`.
    """
    folder = root
    for _ in range(MAX_DEPTH):
        contents = list_entries(folder)
        if not trusted and find_published(folder):
            break
        if pairs := [*find_split_pairs(folder, trusted), *expand_splits(pair_folders(folder, trusted))]:
            return folder, pairs
        if pairs := find_mixed_folders(folder, trusted):
            return folder, pairs
        if len(contents.folders) != 1 or contents.images or parts.parse_split_name(contents.folders[0]):
            break
        folder = os.path.join(folder, contents.folders[0])
    return root, []


def find_split_pairs(root: str, trusted: bool) -> Iterator[FolderPair]:
    """Yield the pairs in the split folders of `root`."""
    for name in list_entries(root).folders:
        if split := parse_split_folder(name):
            pairs = pair_folders(os.path.join(root, name), trusted)
            yield from (FolderPair(pair.images, pair.masks, split) for pair in pairs)


def find_mixed_folders(root: str, trusted: bool) -> list[FolderPair]:
    """Return the folders with masks among their images: `root`, or its split folders. If trusted, also at any depth below."""

    def has_masks(folder: str) -> bool:
        if not trusted:
            return has_mixed_pairs(folder, list_entries(folder).images)
        paths = [os.path.relpath(path, root) for path in islice(iter_images(folder), MAX_ENTRIES) if path]
        return bool(find_mask_names(paths))

    contents = list_entries(root)
    splits = [(name, split) for name in contents.folders if (split := parse_split_folder(name))]
    if contents.images or (trusted and not splits):
        alone = trusted or not any(has_images(os.path.join(root, name)) for name in contents.folders)
        return [FolderPair(root, root)] if alone and has_masks(root) else []
    folders = [(os.path.join(root, name), split) for name, split in splits]
    return [FolderPair(folder, folder, split) for folder, split in folders if has_masks(folder)]


def has_mixed_pairs(folder: str, names: Sequence[str]) -> bool:
    """Return True if two thirds of a folder's images or more are pairs of an image and a mask, by name and by content."""
    masked = find_mask_names(names)
    images = {index: name for index, name in enumerate(names) if name not in masked}
    found, _ = match_names(images, {index: masked[name] for index, name in enumerate(names) if name in masked})
    if not found or 3 * len(found) < len(names):
        return False
    return all(
        looks_like_mask(os.path.join(folder, names[mask])) and not is_mask(os.path.join(folder, names[image]))
        for image, mask in islice(found.items(), SAMPLES)
    )


def parse_split_folder(name: str) -> str | None:
    """Return the split of a folder name, also with a year: train2017."""
    return parts.parse_split_name(re.sub(r"(?<=[a-z])_?\d{4}$", "", name.strip().casefold()))


def pair_folders(folder: str, trusted: bool) -> list[FolderPair]:
    """Return the folders of images and masks in a folder, paired by their other words: train_images and train_masks."""
    names = list_entries(folder).folders
    if len(names) > MAX_FOLDERS:
        return []
    images: dict[frozenset[str], list[str]] = {}
    masks: dict[frozenset[str], list[str]] = {}
    plain: dict[frozenset[str], list[str]] = {}
    for name in names:
        words = {word for word in re.split(r"[\s_.-]+", name.casefold()) if word}
        kind = masks if words & MASK_WORDS else images if words & IMAGE_WORDS else plain
        if kind is not plain or not words & SIDE_WORDS:
            kind.setdefault(frozenset(words - MASK_WORDS - IMAGE_WORDS), []).append(name)
    pairs = []
    for rest, found in masks.items():
        split = parse_split_folder(" ".join(rest))
        partners = images.get(rest) or (plain.get(rest, []) if split else [])
        located = [path for name in found if (path := locate_masks(os.path.join(folder, name), trusted))]
        if not partners or not located:
            continue
        chosen = choose_masks(folder, located)
        if len(partners) == 1:
            pairs.append(FolderPair(os.path.join(folder, partners[0]), chosen, split))
        elif below := pair_splits(folder, partners, chosen):
            pairs += below
        else:
            raise LayoutError(
                f"{folder} has {partners[0]} and {partners[1]}: leave one folder of images beside the masks"
            )
    return pairs


def pair_splits(folder: str, images: Sequence[str], masks: str) -> list[FolderPair]:
    """Return the pairs of folders of images that are splits, train2017 and val2017, with the split folders of the masks."""
    below = {split: name for name in list_entries(masks).folders if (split := parse_split_folder(name))}
    named = {split: name for name in images if (split := parse_split_folder(name)) in below}
    if len(named) != len(images):
        return []
    return [
        FolderPair(os.path.join(folder, name), os.path.join(masks, below[split]), split)
        for split, name in named.items()
        if split is not None
    ]


def locate_masks(folder: str, trusted: bool, depth: int = 0) -> str | None:
    """Return the folder, or one in it that is named like masks, whose images look like masks or are trusted to be some."""
    inner = [name for name in list_entries(folder).folders if name.casefold() in MASK_WORDS]
    if inner and depth < MAX_DEPTH and not list_entries(folder).images:
        found = [path for name in inner if (path := locate_masks(os.path.join(folder, name), trusted, depth + 1))]
        return choose_masks(folder, found) if found else None
    looks = [trusted or looks_like_mask(path) for path in islice(iter_images(folder), SAMPLES) if path]
    return folder if looks and 2 * sum(looks) >= len(looks) else None


def choose_masks(folder: str, found: Sequence[str]) -> str:
    """Return the only folder of masks, or the only one that is named as such."""
    first = [path for path in found if os.path.basename(path).casefold() not in SECOND_CHOICES] or list(found)
    if len(first) > 1:
        names = [os.path.relpath(path, folder) for path in first]
        raise LayoutError(f"{folder} has the masks {names[0]} and {names[1]}: leave one, or use a CSV of image,mask")
    return first[0]


def looks_like_mask(path: str) -> bool:
    """Return True if an image has few colours, or a few that cover most of it, as a smoothed mask or one stored as JPEG."""
    if not os.path.isfile(path):  # opening a pipe would block
        return False
    try:
        with open_image(path, path) as image, name_image_errors(path):
            if image.mode.startswith("I"):
                return True
            small = image.convert("RGB").resize((min(image.width, 256), min(image.height, 256)), 0)  # nearest
    except IMAGE_ERRORS:  # the audit reports it
        return False
    counts = sorted((count for count, _ in small.getcolors(small.width * small.height) or []), reverse=True)
    if len(counts) <= MAX_MASK_COLOURS:
        return True
    pixels = small.width * small.height
    return pixels >= MIN_SAMPLE_PIXELS and sum(counts[:DOMINANT_COLOURS]) >= DOMINANT_SHARE * pixels


def expand_splits(pairs: Iterable[FolderPair]) -> Iterator[FolderPair]:
    """Yield the pairs; where both folders have split folders, one pair for each split."""
    for pair in pairs:
        images, masks = (
            {split: name for name in list_entries(folder).folders if (split := parse_split_folder(name))}
            for folder in (pair.images, pair.masks)
        )
        common = [split for split in SPLITS if split in images and split in masks]
        if pair.split is not None or not common or list_entries(pair.images).images:
            yield pair
        else:
            for split in common:
                yield FolderPair(
                    os.path.join(pair.images, images[split]), os.path.join(pair.masks, masks[split]), split
                )


def read_mask_folders(source: str, root: str, pairs: Sequence[FolderPair], options: parts.ReadOptions) -> Dataset:
    """Read the images and masks of pairs of folders."""
    images, masks = FolderWalker(progress=options.progress), FolderWalker(progress=options.progress)
    if len({pair.split is None for pair in pairs}) > 1:
        raise LayoutError(f"{root} has images with and without splits: {pairs[0].images} and {pairs[-1].images}")
    if not options.needs_labels:
        found = [(item, pair.split) for pair in pairs for item in list_images(pair, images)]
        items = np.array([item for item, _ in found], dtype=np.int64)
        return build_unlabelled_dataset(source, "masks", images.files, items, [split for _, split in found], options)
    image_items, mask_items, splits, keys = [], [], [], []
    skipped: list[tuple[str, str]] = []
    for pair in pairs:
        matched = match_folders(pair, images, masks)
        image_items += matched.images
        mask_items += matched.masks
        keys += matched.keys
        splits += [pair.split] * len(matched.images)
        skipped += matched.skipped
    if not image_items:
        first = images.files.name(0) if len(images.files) else f"{pairs[0].images} (empty)"
        raise LayoutError(f"no mask in {pairs[0].masks} has the name of an image: {first} has none")
    notes = describe_skipped(skipped)
    if splits[0] is None and (listed := find_split_lists(root)):
        splits, kept, note = apply_split_lists(listed, keys, root)
        image_items, mask_items = ([found[i] for i in kept] for found in (image_items, mask_items))
        notes.append(note)
    items, chosen = np.array(image_items, dtype=np.int64), np.array(mask_items, dtype=np.int64)
    skipped += dict.fromkeys((*images.skipped, *masks.skipped, *list_unused_folders(root, pairs)))
    folders = [root, *(path for pair in pairs for path in (pair.masks, os.path.dirname(pair.masks)))]
    class_file = find_class_file(list(dict.fromkeys(folders)))
    classes = find_classes(class_file, masks.files, chosen, source, options)
    store = EncodedMasks(masks.files, chosen, images.files, items, classes)
    return build_mask_dataset(
        source, "masks", images.files, items, splits, store, classes, options, notes=notes, skipped=skipped
    )


def list_unused_folders(root: str, pairs: Sequence[FolderPair]) -> Iterator[tuple[str, str]]:
    """Yield the folders of `root` that are read neither for images nor for masks, with the reason."""
    used = [os.path.join(path, "") for pair in pairs for path in (pair.images, pair.masks)]
    for name in list_entries(root).folders if os.path.join(root, "") not in used else ():
        path = os.path.join(root, name, "")
        if not any(each.startswith(path) for each in used):
            yield printable_path(os.path.join(root, name)), "neither images nor masks of a pair"


@dataclass(frozen=True)
class MatchedFiles:
    """The pairs of two folders: items of both stores, and names of the images without suffix."""

    images: list[int]
    masks: list[int]
    keys: list[str]
    skipped: list[tuple[str, str]]


def match_folders(pair: FolderPair, images: FolderWalker, masks: FolderWalker) -> MatchedFiles:
    """Add the files of two folders to the walkers and match them by name, also in folders below."""
    firsts = len(images.files), len(masks.files)
    images.add_tree(pair.images, set())
    masks.add_tree(pair.masks, set())
    image_names, mask_names = (
        {item: relative_name(walker.files.path(item), folder) for item in range(first, len(walker.files))}
        for walker, folder, first in zip((images, masks), (pair.images, pair.masks), firsts, strict=True)
    )
    if pair.images == pair.masks:
        masked = find_mask_names(image_names.values())
        image_names = {item: name for item, name in image_names.items() if name not in masked}
        mask_names = {item: masked[name] for item, name in mask_names.items() if name in masked}
    mask_names = drop_other_masks(mask_names)
    found, unclear = match_names(image_names, mask_names)
    used, unclear_masks = set(found.values()), {mask for group in unclear.values() for mask in group}
    skipped = [
        (images.files.name(item), f"{SKIP_NO_MASK} in {printable_path(pair.masks)}")
        for item in image_names
        if item not in found and item not in unclear
    ]
    skipped += [(images.files.name(item), describe_unclear(group, masks.files)) for item, group in unclear.items()]
    skipped += [
        (masks.files.name(item), SKIP_NO_IMAGE) for item in mask_names if item not in used and item not in unclear_masks
    ]
    keys = [os.path.splitext(image_names[item])[0] for item in found]
    return MatchedFiles(list(found), list(found.values()), keys, skipped)


def list_images(pair: FolderPair, walker: FolderWalker) -> list[int]:
    """Add the files of a folder of images to the walker; return their items, without masks that lie among them."""
    first = len(walker.files)
    walker.add_tree(pair.images, set())
    names = {item: relative_name(walker.files.path(item), pair.images) for item in range(first, len(walker.files))}
    masked = find_mask_names(names.values()) if pair.images == pair.masks else {}
    return [item for item, name in names.items() if name not in masked]


def find_mask_names(names: Iterable[str]) -> dict[str, str]:
    """Return the masks among the names of a folder's images, each with the name by which it is matched.

    Masks have a mask's ending (a_mask.png), or the name of a photograph with another suffix (a.png beside a.jpg). Numbers after
    an ending are left out: a_mask_1.png is a second mask of a.jpg, which makes the pair unclear.
    """
    stems: dict[str, list[str]] = {}
    for name in names:
        stems.setdefault(os.path.splitext(name)[0], []).append(name)
    bare = {IMAGE_ENDING.sub("", stem) for stem in stems}
    found: dict[str, str] = {}
    for stem, group in stems.items():
        numbered = MASK_NAME.search(stem)
        ending = re.sub(r"_?\d+$", "", stem) if numbered else stem
        short = MASK_ENDING.sub("", ending)
        if short != ending:
            is_paired = short in stems or short in bare
            found |= {
                name: ending + os.path.splitext(name)[1] for name in group if is_paired or not is_photograph(name)
            }
        elif len(group) > 1:
            found |= {name: name for name in group if not is_photograph(name) and any(map(is_photograph, group))}
    return found


def is_photograph(name: str) -> bool:
    """Return True for a suffix of formats that photographs have and masks do not."""
    return name.lower().endswith(PHOTO_SUFFIXES)


def describe_unclear(masks: Sequence[int], files: FileStore) -> str:
    """Return the reason why an image is skipped."""
    if len(masks) > 1:
        return f"{SKIP_AMBIGUOUS}: its masks are {files.name(masks[0])} and {files.name(masks[1])}"
    return f"{SKIP_AMBIGUOUS}: another image has the mask {files.name(masks[0])} too"


def relative_name(path: str, folder: str) -> str:
    """Return the path inside a folder in Unicode NFC, so that accents are written the same way on every system."""
    return unicodedata.normalize("NFC", os.path.relpath(path, folder))


def drop_other_masks(names: dict[int, str]) -> dict[int, str]:
    """Return the masks of classes, if a folder has those of instances and colours too, as Cityscapes."""
    stems = {item: os.path.splitext(name)[0] for item, name in names.items()}
    if not any(stem.casefold().endswith("labelids") for stem in stems.values()):
        return names
    has_train_ids = any(stem.casefold().endswith("labeltrainids") for stem in stems.values())
    wanted = "labeltrainids" if has_train_ids else "labelids"
    return {item: names[item] for item, stem in stems.items() if stem.casefold().endswith(wanted)}


def match_names(images: dict[int, str], masks: dict[int, str]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Return the mask of each image, and the masks of each image whose pair is unclear.

    The first rule that gives a mask counts: the whole file name (a.jpg, a.jpg.png), the stem (a.jpg, a.png), a mask's ending
    (a.jpg, a_mask.png), both endings (a_image.jpg, a_mask.png).
    """
    stems: dict[str, list[int]] = {}
    bare: dict[str, list[int]] = {}
    for item, name in masks.items():
        stem = os.path.splitext(name)[0]
        stems.setdefault(stem, []).append(item)
        if (short := MASK_ENDING.sub("", stem)) != stem:
            bare.setdefault(short, []).append(item)
    found: dict[int, list[int]] = {}
    exact: set[int] = set()  # masks that name the whole file of their image
    for item, name in images.items():
        stem = os.path.splitext(name)[0]
        if whole := stems.get(name):
            exact.update(whole)
        short = IMAGE_ENDING.sub("", stem)
        if candidates := whole or stems.get(stem) or bare.get(stem) or bare.get(short) or stems.get(short):
            found[item] = candidates
    claims = Counter(group[0] for group in found.values())
    clear = {item: group[0] for item, group in found.items() if len(group) == 1 and claims[group[0]] == 1}
    return clear, {item: group for item, group in found.items() if item not in clear}


def find_split_lists(root: str) -> dict[str, str]:
    """Return the split of each name in lists of names, train.txt and val.txt, or in a CSV with a split column."""
    for folder in (os.path.join(root, name) if name else root for name in LIST_FOLDERS):
        names = list_entries(folder).others
        lists = {os.path.splitext(name)[0].casefold(): name for name in names if name.lower().endswith(".txt")}
        by_split = {split: name for stem, name in lists.items() if (split := parts.parse_split_name(stem))}
        if by_split and "train" not in by_split and "trainval" in lists:
            by_split["train"] = lists["trainval"]
        if "train" in by_split:
            return read_name_lists({split: os.path.join(folder, name) for split, name in by_split.items()})
        for name in names:
            if name.lower().endswith(".csv") and (found := read_split_table(os.path.join(folder, name))):
                return found
    return {}


def read_name_lists(files: dict[str, str]) -> dict[str, str]:
    """Return the split of each name in these lists; a name in two lists is an error."""
    found: dict[str, str] = {}
    for split, path in files.items():
        try:
            with open(path, encoding="utf-8-sig") as file:
                lines = [line.strip() for line in file if line.strip()]
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text: expected one image name per line") from None
        for line in lines:
            if found.setdefault(line, split) != split:
                raise ValueError(f"{path} lists {line!r}, which is in {files[found[line]]} too: remove one")
    return found


def read_split_table(path: str) -> dict[str, str]:
    """Return the split of each image of a CSV with the columns of a name and of a split; nothing for another table."""

    def find_columns(header: Sequence[str]) -> tuple[int | None, int | None]:
        return find_column(header, STEM_COLUMNS), find_column(header, SPLIT_COLUMNS)

    opened = search_csv(path, [lambda header: None not in find_columns(header)])
    if opened is None:
        return {}
    header, rows = opened
    name, split = find_columns(header)
    assert name is not None
    assert split is not None
    found: dict[str, str] = {}
    try:
        for line, row in rows:
            if len(row) != len(header):
                raise ValueError(f"{path}, line {line}: {len(row)} cells, the header has {len(header)}")
            value = parse_split(row[split], f"{path}, line {line}")
            if found.setdefault(row[name].strip(), value) != value:
                raise ValueError(f"{path}, line {line}: {row[name]!r} is in two splits: remove one")
    except csv.Error as error:
        raise ValueError(f"{path} is not readable as CSV: {error}") from None
    return found


def apply_split_lists(listed: dict[str, str], keys: Sequence[str], root: str) -> tuple[list[str], list[int], str]:
    """Return the splits of the listed pairs, their indices and a note; a listed name without a pair is an error."""
    known = {key: index for index, key in enumerate(keys)}
    by_stem = {os.path.basename(key): index for key, index in known.items()}
    splits: dict[int, str] = {}
    missing = []
    for line, split in listed.items():
        index = next((known[key] for key in list_keys(line) if key in known), None)
        if index is None:
            index = next((by_stem[key] for key in map(os.path.basename, list_keys(line)) if key in by_stem), None)
        if index is None:
            missing.append(line)
        elif splits.setdefault(index, split) != split:
            raise ValueError(f"{root}: the lists name {keys[index]} in {splits[index]} and in {split}: remove one")
    if not splits:
        raise ValueError(f"{root}: the lists of splits name no image with a mask, first {missing[0]!r}")
    note = f"splits from lists: {len(splits):,} of {len(keys):,} images with masks are listed"
    if missing:
        note += f"; not found: {format_names(missing, limit=2)}"
    kept = sorted(splits)
    return [splits[index] for index in kept], kept, note


def list_keys(line: str) -> Iterator[str]:
    """Yield the names that a line of a list may mean: the whole line, then its first word, both without a suffix."""
    for name in dict.fromkeys((line, line.split()[0])):
        name = unicodedata.normalize("NFC", name).lstrip("./")
        yield os.path.splitext(name)[0] if is_image_name(name) else name

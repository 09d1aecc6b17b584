"""COCO JSON: polygons and run lengths of objects, drawn as masks of one class per pixel.

Annotations are drawn in their order, later ones over earlier ones, on class 0, "background". Crowds (`iscrowd`) are drawn
first, as ignored pixels: an object in a crowd keeps its class.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.class_names import find_duplicates
from vitrail.data.dataset import IGNORED, MAX_MASK_CLASSES, Dataset, Store
from vitrail.data.labels import normalise_class_name
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FileStore
from vitrail.data.sources.layouts import list_entries
from vitrail.data.sources.mask_classes import MaskClasses
from vitrail.data.sources.masks import (
    DecodedMask,
    MaskError,
    build_mask_dataset,
    build_unlabelled_dataset,
    fit_mask,
)
from vitrail.utils.colours import Colour
from vitrail.utils.rle import decode_counts, fill_runs

BACKGROUND = "background"
FOLDERS = ("", "annotations")
MAX_OUTSIDE = 1.0  # pixels by which a polygon may leave the image
MAX_PIXELS = 2**28  # of a mask, against sizes that are invented
SPLIT_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class CocoFile:
    """A parsed file with the split that its name or folder states."""

    path: str
    split: str | None
    data: dict[str, Any]


class Region(NamedTuple):
    """The pixels of one object: polygons, or run lengths in column order with the size that they state."""

    label: int  # class index or IGNORED
    polygons: tuple[np.ndarray, ...] = ()  # [n, 2] float64: x, y
    counts: np.ndarray | None = None
    size: tuple[int, int] | None = None  # height, width


@dataclass
class CocoImage:
    """An image of a file with its objects."""

    path: str
    size: tuple[int, int]  # height, width
    source: str  # file and image, for messages
    regions: list[Region] = field(default_factory=list)


def find_coco_files(root: str) -> list[CocoFile]:
    """Return the COCO files with segmentations of a folder: in it, in `annotations`, or in its split folders."""
    contents = list_entries(root)
    splits = [name for name in contents.folders if parts.parse_split_name(name)]
    paths = []
    for folder in (*FOLDERS, *splits):
        names = list_entries(os.path.join(root, folder)).others
        paths += [os.path.join(root, folder, name) for name in names if name.lower().endswith(".json")]
    instances = [path for path in paths if os.path.basename(path).startswith("instances")]
    opened = (open_coco(path) for path in instances or paths)
    return [file for file in opened if file is not None and has_segmentations(file.data)]


def open_coco_files(paths: Sequence[str]) -> list[CocoFile]:
    """Open the given files, which must be COCO files with segmentations."""
    files = []
    for path in paths:
        file = open_coco(path, required=True)
        if file is None or not has_segmentations(file.data):
            raise ValueError(f"{path} is not a COCO file with segmentations: it needs images, annotations, categories")
        files.append(file)
    return files


def open_coco(path: str, required: bool = False) -> CocoFile | None:
    """Parse a file; return None for another JSON, and unless it is `required` for what cannot be read as JSON."""
    try:
        with open(path, "rb") as file:
            text = file.read()
        if not required and b'"segmentation"' not in text:  # cheaper than parsing a large file of another kind
            return None
        data = json.loads(text.decode("utf-8-sig"))
    except OSError:
        if required:
            raise
        return None
    except (ValueError, RecursionError) as error:
        if required:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        return None
    keys = ("images", "annotations", "categories")
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in keys):
        return None
    return CocoFile(path, find_split(path), data)


def has_segmentations(data: Mapping[str, Any]) -> bool:
    """Return True if objects have shapes and not only boxes."""
    return any(isinstance(item, dict) and item.get("segmentation") for item in data["annotations"])


def find_split(path: str) -> str | None:
    """Return the split in a word of the file's name, such as instances_val2017.json, or in its folder."""
    folder, name = os.path.split(path)
    words = SPLIT_WORD.findall(os.path.splitext(name)[0].casefold())
    found = (parts.parse_split_name(word) for word in (*words, os.path.basename(folder)))
    return next((split for split in found if split), None)


def read_coco(source: str, files: Sequence[CocoFile], options: parts.ReadOptions) -> Dataset:
    """Read COCO files: one for each split, or one without a split."""
    splits = [file.split for file in files]
    if repeated := find_duplicates(splits):
        pair = [file.path for file in files if file.split == repeated[0]]
        raise ValueError(f"{source} has {pair[0]} and {pair[1]} for one split: give one of them")
    categories = read_categories(files[0])
    kept, empty = number_classes(files[0].path, categories, options.ignored)
    names = tuple(kept)
    index = {number: kept.get(name, IGNORED) for number, name in categories.items()}
    images: list[CocoImage] = []
    sides: list[str | None] = []
    for file in files:
        if read_categories(file) != categories:
            raise ValueError(f"{file.path} has other categories than {files[0].path}: use the same in every split")
        read = read_images(file, index)
        images += read
        sides += [file.split] * len(read)
    store, items = FileStore.from_paths(image.path for image in images), np.arange(len(images))
    if not options.needs_labels:
        return build_unlabelled_dataset(source, "coco", store, items, sides, options)
    colours = read_colours(files[0], names)
    ignored = tuple((number, categories.get(number, "")) for number in options.ignored)
    classes = MaskClasses(names, np.full(256, -1, dtype=np.int16), colours, ignored=ignored)
    masks = CocoMasks(images, store, empty, repr((sorted(index.items()), empty)))
    return build_mask_dataset(source, "coco", store, items, sides, masks, classes, options)


def number_classes(path: str, categories: Mapping[int, str], ignore: Sequence[int]) -> tuple[dict[str, int], int]:
    """Return the indices of the classes by name without ignored ids, and the index of the background, or IGNORED.

    The background is the category of this name, else a class before all others, whose id is 0 if no category has it.
    """
    if repeated := find_duplicates(categories.values()):
        raise ValueError(f"{path} has two categories named {repeated[0]!r}: rename one")
    names = [name for number, name in categories.items() if number not in ignore]
    if BACKGROUND not in categories.values() and (0 in categories or 0 not in ignore):
        names.insert(0, BACKGROUND)
    if not 0 < len(names) <= MAX_MASK_CLASSES:
        raise ValueError(f"{path} has {len(names)} categories that are not ignored: use 1 to {MAX_MASK_CLASSES}")
    return {name: i for i, name in enumerate(names)}, names.index(BACKGROUND) if BACKGROUND in names else IGNORED


def read_categories(file: CocoFile) -> dict[int, str]:
    """Return the names of the categories by id, in the order of the ids."""
    found: dict[int, str] = {}
    for entry in file.data["categories"]:
        number = entry.get("id") if isinstance(entry, dict) else None
        if type(number) is not int or not isinstance(entry.get("name"), str) or not entry["name"].strip():
            raise ValueError(f"{file.path}: a category needs an id and a name, got {str(entry)[:60]}")
        if number in found:
            raise ValueError(f"{file.path} has the category id {number} twice")
        found[number] = normalise_class_name(entry["name"])
    return dict(sorted(found.items()))


def read_colours(file: CocoFile, names: Sequence[str]) -> tuple[Colour, ...] | None:
    """Return the colours of the classes if every category has one; the background is black."""
    found: dict[str, Colour] = {BACKGROUND: (0, 0, 0)}
    for entry in file.data["categories"]:
        colour = entry.get("color")
        if isinstance(colour, list) and len(colour) == 3 and all(type(c) is int and 0 <= c <= 255 for c in colour):
            found[normalise_class_name(entry["name"])] = (colour[0], colour[1], colour[2])
    return tuple(found[name] for name in names) if set(names) <= set(found) else None


def read_images(file: CocoFile, index: Mapping[int, int]) -> list[CocoImage]:
    """Return the images of a file with their objects; whatever contradicts itself is an error that names it."""
    found: dict[Any, CocoImage] = {}
    folder: str | None = None
    for entry in file.data["images"]:
        if not isinstance(entry, dict):
            raise ValueError(f"{file.path}: an image needs an id and a file_name, got {str(entry)[:60]}")
        key, name, height, width = (entry.get(each) for each in ("id", "file_name", "height", "width"))
        if type(key) not in (int, str) or not isinstance(name, str) or not name.strip() or "\0" in name:
            raise ValueError(f"{file.path}: an image needs an id and a file_name, got {str(entry)[:60]}")
        if not isinstance(height, int) or not isinstance(width, int) or not 0 < height * width <= MAX_PIXELS:
            raise ValueError(f"{file.path}: image {key} needs a height and width in pixels, got {height}, {width}")
        if key in found:
            raise ValueError(f"{file.path} has the image id {key} twice")
        folder = find_image_folder(file, name) if folder is None else folder
        found[key] = CocoImage(os.path.join(folder, name), (height, width), f"{file.path}, image {key}")
    if not found:
        raise ValueError(f"{file.path} lists no images")
    ids: set[Any] = set()
    for entry in file.data["annotations"]:
        key = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or type(key) not in (int, str, type(None)):
            raise ValueError(f"{file.path}: an annotation must be an object with an id, got {str(entry)[:60]}")
        if key in ids:
            raise ValueError(f"{file.path} has the annotation id {key} twice")
        ids |= {key} if key is not None else set()
        where = f"{file.path}, annotation {key}"
        image_id, category = entry.get("image_id"), entry.get("category_id")
        if type(image_id) not in (int, str) or image_id not in found:
            raise ValueError(f"{where}: no image has the id {image_id!r}")
        if type(category) is not int or category not in index:
            raise ValueError(f"{where}: no category has the id {category!r}")
        found[image_id].regions.append(read_region(entry, index[category], where))
    return list(found.values())


def find_image_folder(file: CocoFile, name: str) -> str:
    """Return the folder that holds an image of the file, of those that datasets use."""
    folder, file_name = os.path.split(file.path)
    parent = os.path.dirname(folder) if os.path.basename(folder) == "annotations" else folder
    word = os.path.splitext(file_name)[0].rpartition("_")[2]  # train2017 of instances_train2017
    below = [word, *([file.split] if file.split else []), "images", "data", "JPEGImages", ""]
    candidates = [folder, *(os.path.join(parent, *path) for path in [("images", word), *((each,) for each in below)])]
    candidates += [
        os.path.join(parent, "images", each) for each in list_entries(os.path.join(parent, "images")).folders
    ]
    for candidate in candidates:
        if os.path.isfile(os.path.join(candidate, name)):
            return candidate
    raise FileNotFoundError(
        f"{file.path}: the image {name} is not beside the file, nor in {parent}/images or {parent}/{word}"
    )


def read_region(entry: Mapping[str, Any], label: int, where: str) -> Region:
    """Return the shape of an annotation. A crowd is ignored."""
    shape = entry.get("segmentation")
    label = IGNORED if entry.get("iscrowd") == 1 else label
    if isinstance(shape, list):
        return Region(label, tuple(parse_polygon(points, where) for points in shape))
    if not isinstance(shape, dict):
        raise ValueError(f"{where}: segmentation must be polygons or run lengths, got {str(shape)[:40]}")
    size, counts = shape.get("size"), shape.get("counts")
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise ValueError(f"{where}: run lengths need a size [height, width], got {size}")
    if isinstance(counts, str):
        try:
            runs = decode_counts(counts)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    elif isinstance(counts, list) and all(type(count) is int for count in counts):
        if any(abs(count) > MAX_PIXELS for count in counts):
            raise ValueError(f"{where}: a run length is larger than any mask")
        runs = np.array(counts, dtype=np.int64)
    else:
        raise ValueError(f"{where}: counts must be a text or whole numbers, got {str(counts)[:40]}")
    return Region(label, counts=runs, size=(size[0], size[1]))


def parse_polygon(points: Any, where: str) -> np.ndarray:
    """Return a polygon [x0, y0, x1, y1, …] as points, [n, 2]."""
    numbers = isinstance(points, list) and all(type(value) in (int, float) for value in points)
    if not numbers or len(points) < 6 or len(points) % 2:
        raise ValueError(f"{where}: a polygon needs x, y of three points or more, got {str(points)[:40]}")
    polygon = np.array(points, dtype=np.float64).reshape(-1, 2)
    if not np.isfinite(polygon).all():
        raise ValueError(f"{where}: a polygon has a coordinate that is not finite")
    return polygon


def fill_polygon(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the pixels whose centres lie inside a polygon by the even-odd rule, bool [H, W]."""
    height, width = size
    x, y = points.T
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    first, last = max(0, int(np.floor(y.min()))), min(height, int(np.ceil(y.max())) + 1)
    filled = np.zeros(size, dtype=bool)
    if first >= last:
        return filled
    centres = np.arange(first, last) + 0.5
    crossed = (y <= centres[:, None]) != (next_y <= centres[:, None])  # [rows, n]
    row, edge = np.nonzero(crossed)
    crossing = x[edge] + (centres[row] - y[edge]) / (next_y[edge] - y[edge]) * (next_x[edge] - x[edge])
    column = np.clip(np.ceil(crossing - 0.5), 0, width).astype(np.int64)
    rows = last - first
    toggles = np.bincount(row * (width + 1) + column, minlength=rows * (width + 1)).reshape(rows, width + 1)
    filled[first:last] = np.cumsum(toggles[:, :width], axis=1) % 2 == 1
    return filled


class CocoMasks:
    """Masks drawn from the objects of COCO files; mask i belongs to image i of the store."""

    def __init__(self, drawn: Sequence[CocoImage], images: Store, background: int, fingerprint: str) -> None:
        self.drawn, self.images, self.background = list(drawn), images, background
        self.fingerprint = fingerprint  # of the classes, for the cache of the audit

    def __len__(self) -> int:
        return len(self.drawn)

    def name(self, item: int) -> str:
        return self.drawn[item].source

    def stamp(self, item: int) -> tuple[int, int] | None:
        path = self.drawn[item].source.rpartition(", image ")[0]
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns

    def read(self, item: int) -> np.ndarray:
        return self.decode(item).pixels

    def decode(self, item: int) -> DecodedMask:
        """Draw the objects of an image; raise MaskError if one does not fit it."""
        image, name = self.drawn[item], self.name(item)
        mask = np.full(image.size, self.background, dtype=np.uint8)
        crowds = [region for region in image.regions if region.label == IGNORED]
        for region in (*crowds, *(region for region in image.regions if region.label != IGNORED)):
            for pixels in iter_pixels(region, image.size, name):
                mask[pixels] = region.label
        pixels, turned = fit_mask(mask, self.images, item, name)
        return DecodedMask(pixels, ("turned",) if turned else ())


def iter_pixels(region: Region, size: tuple[int, int], name: str) -> Iterator[np.ndarray]:
    """Yield the pixels of an object, bool [H, W]; those of several polygons one after the other."""
    if region.counts is not None and region.size is not None:
        if region.size != size:
            stated = f"{region.size[1]}×{region.size[0]}"
            raise MaskError("mask-shape", f"{name}: run lengths of {stated}, the image has {size[1]}×{size[0]}")
        try:
            yield fill_runs(region.counts, *size)
        except ValueError as error:
            raise MaskError("mask-shape", f"{name}: {error}") from None
    for polygon in region.polygons:
        low, high = polygon.min(0), polygon.max(0)
        if low.min() < -MAX_OUTSIDE or (high > np.array([size[1], size[0]]) + MAX_OUTSIDE).any():
            corner = high if low.min() >= -MAX_OUTSIDE else low
            point = f"({corner[0]:g}, {corner[1]:g})"
            raise MaskError("mask-shape", f"{name}: a polygon reaches {point}, outside {size[1]}×{size[0]} pixels")
        yield fill_polygon(polygon, size)

"""Masks: one class per pixel, decoded from images and fitted to the upright photograph.

A mask is an index image (grey, palette, 16 bits if the values fit) or an image of colours that a class file names.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail.data.dataset import SPLITS, Dataset, Images, MaskStore, Store
from vitrail.data.decode import IMAGE_ERRORS, name_image_errors, orient_pixels, orient_size, read_orientation
from vitrail.data.sources import splits as parts
from vitrail.data.sources.mask_classes import (
    NO_CLASS,
    MaskClasses,
    classes_from_values,
    pack_colours,
    read_class_file,
)
from vitrail.utils.colours import format_colour

LOSSY_FORMATS = ("JPEG", "MPO", "AVIF", "JPEG2000")
MIN_BLURRED_VALUES = 8  # values without a class in one mask, from which on it looks smoothed
SKIP_NO_MASK, SKIP_NO_IMAGE = "no mask", "no image for this mask"  # first words of reasons; the audit names the kinds
SKIP_AMBIGUOUS = "unclear pair"
SKIPPED_WORDS = {SKIP_NO_MASK: ("image", "without a mask"), SKIP_NO_IMAGE: ("mask", "without an image")}
SKIPPED_WORDS |= {SKIP_AMBIGUOUS: ("image", "with an unclear mask")}


class MaskError(ValueError):
    """Raised for a mask that cannot be used; `kind` is that of the audit's finding."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class DecodedMask(NamedTuple):
    """The classes of a mask's pixels, uint8 [H, W], and what is unusual about it: "alpha", "depth", "turned"."""

    pixels: np.ndarray
    traits: tuple[str, ...] = ()


class StoredMask(NamedTuple):
    """A mask as it is stored: values uint8 [H, W], or colours uint8 [H, W, 3]."""

    values: np.ndarray
    traits: tuple[str, ...] = ()


class EncodedMasks:
    """Masks that are encoded images, in files or table cells; mask i belongs to image `image_items[i]`."""

    def __init__(self, files: Store, items: np.ndarray, images: Store, image_items: np.ndarray, classes: MaskClasses):
        self.files, self.items = files, items
        self.images, self.image_items = images, image_items
        self.classes = classes
        self.fingerprint = repr((classes.table.tolist(), classes.by_colour, classes.colours_only))

    def with_classes(self, classes: MaskClasses) -> "EncodedMasks":
        """Return the masks with other classes."""
        return EncodedMasks(self.files, self.items, self.images, self.image_items, classes)

    def __len__(self) -> int:
        return len(self.items)

    def name(self, item: int) -> str:
        return self.files.name(int(self.items[item]))

    def stamp(self, item: int) -> tuple[int, int] | None:
        return self.files.stamp(int(self.items[item]))

    def read(self, item: int) -> np.ndarray:
        return self.decode(item).pixels

    def decode(self, item: int) -> DecodedMask:
        """Return the mask with its traits; raise MaskError or OSError if it is unusable."""
        name = self.name(item)
        stored = read_stored_mask(self.files, int(self.items[item]), self.classes.colours_only)
        found = classify_pixels(stored.values, self.classes, name)
        pixels, turned = fit_mask(found, self.images, int(self.image_items[item]), name)
        return DecodedMask(pixels, (*stored.traits, "turned") if turned else stored.traits)


def read_stored_mask(files: Store, item: int, by_palette: bool = False) -> StoredMask:
    """Decode the stored values or colours of a mask; `by_palette` replaces indices of a palette by its colours."""
    with files.open(item) as image:
        return decode_stored_mask(image, files.name(item), by_palette)


def decode_stored_mask(image: Image.Image, name: str, by_palette: bool = False) -> StoredMask:
    """Decode the stored values or colours of an open image, whose name is for messages."""
    try:
        with name_image_errors(name):
            image.load()
            if image.format not in LOSSY_FORMATS and not (image.mode == "P" and by_palette):
                pixels = np.asarray(image)
            else:
                pixels = np.asarray(image.convert("RGB"))
    except Image.DecompressionBombError as error:
        raise MaskError("mask-unreadable", str(error)) from None
    if image.format in LOSSY_FORMATS:
        raise MaskError("mask-lossy", f"{name}: {image.format} changes values: save masks as PNG")
    return interpret_pixels(pixels, image.mode, name)


def interpret_pixels(pixels: np.ndarray, mode: str, name: str) -> StoredMask:
    """Return the pixels of a Pillow mode as values or colours; colours with three equal channels are values."""
    traits: tuple[str, ...] = ()
    if mode in ("RGBA", "LA", "PA"):
        pixels, traits = pixels[..., :-1], ("alpha",)
    if mode.startswith("I"):
        if pixels.size and (pixels.min() < 0 or pixels.max() > 255):
            top = f"values from {int(pixels.min()):,} to {int(pixels.max()):,}"
            raise MaskError("mask-depth", f"{name}: {top} do not fit 8 bits: use 0 to 255")
        traits = (*traits, "depth")
    elif mode not in ("1", "L", "P", "LA", "PA", "RGB", "RGBA"):
        raise MaskError("mask-unreadable", f"{name}: masks are grey, palette or RGB images, got mode {mode}")
    pixels = pixels.astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    return StoredMask(pixels, traits)


def classify_pixels(stored: np.ndarray, classes: MaskClasses, name: str) -> np.ndarray:
    """Return the classes of stored values [H, W] or colours [H, W, 3], uint8 [H, W]; raise if one has no class."""
    grey = stored.ndim == 2 or is_grey(stored)
    if stored.ndim == 3 and classes.by_colour:
        found = classes.map_colours(stored)
        if NO_CLASS in found and grey and not classes.colours_only:  # values, stored in three channels
            values = classes.map_values(stored[..., 0])
            found = found if NO_CLASS in values else values
    elif not grey:
        raise MaskError("mask-value", f"{name}: colours without a class: list them in classes.txt as `0 sky #87ceeb`")
    else:
        found = classes.map_values(stored if stored.ndim == 2 else stored[..., 0])
    if found.size and found.min() == NO_CLASS:
        raise describe_unknown(stored, found == NO_CLASS, name)
    return found.astype(np.uint8)


def is_grey(pixels: np.ndarray) -> bool:
    """Return True if the three channels are equal."""
    return bool((pixels == pixels[..., :1]).all())


def describe_unknown(stored: np.ndarray, unknown: np.ndarray, name: str) -> MaskError:
    """Return the error about values or colours without a class."""
    if stored.ndim == 3:
        packed = np.unique(pack_colours(stored[unknown]))
        shown = [format_colour((int(c) >> 16, int(c) >> 8 & 255, int(c) & 255)) for c in packed[:3]]
    else:
        packed = np.unique(stored[unknown])
        shown = [str(value) for value in packed[:3]]
    count, kind = len(packed), "colour" if stored.ndim == 3 else "value"
    if count >= MIN_BLURRED_VALUES:
        return MaskError("mask-blurred", f"{name}: {count} {kind}s without a class, as smoothing or JPEG makes")
    more = f" and {count - 3} more" if count > 3 else ""
    pixels = f"{int(unknown.sum()):,} pixel{'s' * (int(unknown.sum()) != 1)}"
    kinds = kind + "s" * (count > 1)
    return MaskError("mask-value", f"{name}: {kinds} {', '.join(shown)}{more} without a class ({pixels})")


def fit_mask(pixels: np.ndarray, images: Store, item: int, name: str) -> tuple[np.ndarray, bool]:
    """Return the mask in the coordinates of the upright image, and True if it was rotated.

    A mask with the size of the stored image is rotated with it. Where both sizes are equal, the mask is taken as upright.
    """
    with images.open(item) as image:
        stored, orientation = (image.height, image.width), read_orientation(image)
    upright = orient_size(stored, orientation)
    if pixels.shape == upright:
        return pixels, False
    if pixels.shape == stored:
        turned = orient_pixels(torch.from_numpy(np.ascontiguousarray(pixels))[None], orientation)[0]
        return np.ascontiguousarray(turned.numpy()), True
    sizes = [f"{width}×{height}" for height, width in (pixels.shape, upright)]
    raise MaskError("mask-size", f"{name}: {sizes[0]} pixels, the image has {sizes[1]}")


def find_classes(
    class_file: str | None, files: Store, items: np.ndarray, source: str, options: parts.ReadOptions
) -> MaskClasses:
    """Return the classes of a class file, or the values of the masks, all of which are then read."""
    if class_file:
        return read_class_file(class_file, options.ignored_pixels)
    return classes_from_values(count_values(files, items, options), options.ignored_pixels, source)


def count_values(files: Store, items: np.ndarray, options: parts.ReadOptions) -> np.ndarray:
    """Return the number of pixels of each stored value, [256] int64, using all cores. The audit reports unusable masks."""
    errors: list[Exception] = []

    def count(item: int) -> np.ndarray | None:
        try:
            return count_pixels(read_stored_mask(files, item).values, files.name(item))
        except IMAGE_ERRORS as error:
            errors.append(error)
            return None

    totals, used = np.zeros(256, dtype=np.int64), 0
    pool = ThreadPoolExecutor(os.cpu_count())  # decoding releases the GIL
    try:
        for done, counts in enumerate(pool.map(count, items.tolist()), start=1):
            if counts is not None:
                totals, used = totals + counts, used + 1
            if options.progress:
                options.progress("reading masks", done, len(items))
    finally:
        pool.shutdown(cancel_futures=True)  # do not wait for the rest when interrupted
    if not used and errors:
        raise ValueError(f"no mask can be used, of {len(items):,}; first {errors[0]}")
    return totals


def count_pixels(values: np.ndarray, name: str) -> np.ndarray:
    """Return the number of pixels of each value of a mask as it is stored, [256] int64; raise MaskError for colours."""
    if values.ndim == 3 and not is_grey(values):
        raise MaskError("mask-value", f"{name} has colours: list them in classes.txt as `0 sky #87ceeb`")
    return np.bincount((values if values.ndim == 2 else values[..., 0]).ravel(), minlength=256)


def describe_skipped(skipped: Sequence[tuple[str, str]]) -> list[str]:
    """Return a note for each reason why images or masks are not used."""
    counts = Counter(next(key for key in SKIPPED_WORDS if reason.startswith(key)) for _, reason in skipped)
    return [
        f"{count:,} {noun}{'s' * (count > 1)} {rest} {'are' if count > 1 else 'is'} not used"
        for (noun, rest), count in ((SKIPPED_WORDS[key], count) for key, count in counts.items())
    ]


def build_mask_dataset(
    source: str,
    kind: str,
    store: Store,
    items: np.ndarray,
    splits: Sequence[str | None],
    masks: MaskStore,
    classes: MaskClasses,
    options: parts.ReadOptions,
    *,
    shards: np.ndarray | None = None,
    notes: Sequence[str] = (),
    skipped: Sequence[tuple[str, str]] = (),
) -> Dataset:
    """Build a dataset of images and masks: image `items[i]` of the store has mask i and the split `splits[i]`."""
    if not len(items):
        raise ValueError(f"{source} has no image with a mask")
    if isinstance(options.multi_label, bool):
        raise ValueError(f"{source} has masks: leave out task=, or read labels with label_from= or classes:{source}")
    built = {}
    facts = {"colours": classes.colours, "things": classes.things, "ignored": classes.ignored}
    for split, chosen in parts.group_by_split(source, splits).items():
        mine = None if shards is None else shards[chosen]
        built[split] = Images(store, items[chosen], chosen, classes.names, split, mine, masks=masks, **facts)
    notes = [*notes, *([classes.note] if classes.note else [])]
    return parts.add_validation_split(Dataset(source, kind, built, tuple(notes), tuple(skipped)), options)


def build_unlabelled_dataset(
    source: str, kind: str, store: Store, items: np.ndarray, splits: Sequence[str | None], options: parts.ReadOptions
) -> Dataset:
    """Build a dataset of the images without their masks."""
    if not len(items):
        raise ValueError(f"{source} has no images")
    names = sorted({split or "train" for split in splits}, key=SPLITS.index)
    side = np.array([split or "train" for split in splits])
    built = {}
    for split in names:
        chosen = items[side == split]
        built[split] = Images(store, chosen, np.zeros(len(chosen), np.int64), (parts.UNLABELLED_CLASS,), split)
    note = "the masks beside the images are not used"
    return parts.add_validation_split(Dataset(source, kind, built, (note,)), options)

"""Inspection of masks: every one is decoded once, by all cores, and counted by class."""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vitrail.data.audit.findings import Finding
from vitrail.data.audit.image import format_error
from vitrail.data.audit.scan import FileScan, FileStamp, InspectionCache, Scans, read_stamp, scan_files
from vitrail.data.dataset import IGNORED, Images
from vitrail.data.decode import DECODER_ERRORS, IMAGE_ERRORS, format_image_error
from vitrail.data.labels import format_names
from vitrail.data.sources.masks import DecodedMask, MaskError
from vitrail.utils.progress import ProgressCallback

TRAIT_FINDINGS = {
    "alpha": ("mask-alpha", "transparency is ignored"),
    "depth": ("mask-16-bit", "more than 8 bits per value"),
    "turned": ("mask-turned", "has the size of the stored image"),
}


@dataclass(frozen=True)
class MaskInspection:
    """The result of inspecting one mask."""

    UNREADABLE: ClassVar[str] = "mask-unreadable"

    problem: str = ""  # a kind of finding that makes it unusable, or ""
    detail: str = ""
    digest: bytes = b""  # of the decoded pixels, 16 bytes
    counts: bytes = b""  # pixels of the classes that occur, int64 [k, 2]: class, pixels
    traits: str = ""  # separated by spaces
    passing: bool = False  # transient: permissions, disk or memory errors

    def is_valid(self) -> bool:
        """Return True if a cached result has sizes and classes that fit."""
        if len(self.digest) not in (0, 16) or len(self.counts) % 16:
            return False
        classes, pixels = self.list_counts().T
        return bool(((classes >= 0) & (classes < 256) & (pixels > 0)).all())

    def list_counts(self) -> np.ndarray:
        """Return the classes that occur and their pixels, int64 [k, 2]."""
        return np.frombuffer(self.counts, dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class MaskCounts:
    """Pixels of each class of a split, and images in which it occurs."""

    classes: tuple[str, ...]
    pixels: np.ndarray  # [K] int64
    images: np.ndarray  # [K] int64
    ignored: int  # pixels

    @property
    def shares(self) -> np.ndarray:
        """Return the share of each class in the pixels that are not ignored, [K]."""
        return self.pixels / max(1, int(self.pixels.sum()))

    def share(self, name: str) -> float:
        """Return the share of a class in the pixels that are not ignored; 0 if the split does not have it."""
        return float(self.shares[self.classes.index(name)]) if name in self.classes else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the counts by class as JSON values."""
        return {
            "classes": dict(zip(self.classes, self.images.tolist(), strict=True)),
            "pixels": dict(zip(self.classes, self.pixels.tolist(), strict=True)),
            "ignored_pixels": self.ignored,
        }


def inspect_mask(images: Images, index: int) -> MaskInspection:
    """Inspect the mask of one image. Problems are returned, not raised."""
    assert images.masks is not None
    item, name = int(images.targets[index]), images.mask_name(index)
    try:
        decode = getattr(images.masks, "decode", None)
        mask = decode(item) if decode is not None else DecodedMask(images.masks.read(item))
    except MaskError as error:
        return MaskInspection(error.kind, format_image_error(error, name))
    except (*IMAGE_ERRORS, *DECODER_ERRORS) as error:
        detail = format_error(error).removeprefix(f"{name}: ")
        return MaskInspection(MaskInspection.UNREADABLE, detail, passing=isinstance(error, OSError | MemoryError))
    counts = np.bincount(mask.pixels.ravel(), minlength=256)
    present = np.flatnonzero(counts)
    pairs = np.stack([present, counts[present]], axis=1).astype(np.int64)
    digest = hashlib.blake2b(repr(mask.pixels.shape).encode() + mask.pixels.tobytes(), digest_size=16).digest()
    return MaskInspection("", "", digest, pairs.tobytes(), " ".join(mask.traits))


class MaskScan(FileScan):
    """The inspection results of the masks of one split."""

    def __init__(self, images: Images, positions: np.ndarray) -> None:
        super().__init__(images)
        self.positions = positions  # [n] of the images in their split
        self.pixels, self.present = np.zeros(256, dtype=np.int64), np.zeros(256, dtype=np.int64)
        self.digests = np.zeros((len(images), 2), dtype=np.uint64)
        self.notable: dict[int, MaskInspection] = {}  # masks that may give a finding

    def cache_key(self, index: int) -> tuple[str, FileStamp | None]:
        """Return the mask's path with the classes and the image, on which the result depends too."""
        images = self.images
        assert images.masks is not None
        path = os.path.realpath(images.mask_name(index))
        classes = hashlib.blake2b(getattr(images.masks, "fingerprint", "").encode(), digest_size=8).hexdigest()
        image = read_stamp(images.store, int(images.items[index]))
        return f"{path}|{classes}|{image}", read_stamp(images.masks, int(images.targets[index]))

    def add(self, index: int, inspection: MaskInspection) -> None:
        if inspection.digest:
            self.digests[index] = np.frombuffer(inspection.digest, dtype=np.uint64)
        counts = self.map_counts(inspection)
        np.add.at(self.pixels, counts[:, 0], counts[:, 1])
        self.present[np.unique(counts[:, 0])] += 1
        if inspection.problem or inspection.traits or len(counts) < 2 or (counts[:, 1] == 1).any():
            self.notable[index] = inspection

    def map_counts(self, inspection: MaskInspection) -> np.ndarray:
        """Return the classes that occur in a mask, as indices of the split, and their pixels, int64 [k, 2]."""
        counts, table = inspection.list_counts(), self.images.mask_classes
        return counts if table is None else np.stack([table[counts[:, 0]].astype(np.int64), counts[:, 1]], axis=1)

    @property
    def has_usable_masks(self) -> bool:
        """Return False if all masks are bad; a split without images has none that is."""
        bad = sum(bool(inspection.problem) for inspection in self.notable.values())
        return not bad or bad < len(self.images)

    def count(self) -> MaskCounts:
        """Return the counts of the classes."""
        size = len(self.images.classes)
        return MaskCounts(self.images.classes, self.pixels[:size], self.present[:size], int(self.pixels[IGNORED]))


def scan_masks(
    scans: Scans, cache: bool, workers: int | None, progress: ProgressCallback | None
) -> dict[str, MaskScan]:
    """Inspect the mask of every usable image, or take its result from the cache; tell `scans` which are unusable."""
    found: dict[str, MaskScan] = {}
    usable: dict[str, np.ndarray] = {}
    for split, scan in scans.items():
        if scan.images.target_kind == "masks":
            usable[split] = np.flatnonzero(scan.find_usable())
            found[split] = MaskScan(scan.images.select(usable[split]), usable[split])
    total, done = sum(len(scan.images) for scan in found.values()), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress("checking masks", done, total)

    if chosen := [scan for scan in found.values() if len(scan.images)]:
        with closing(InspectionCache(cache, MaskInspection, "masks_1_")) as inspections:
            scan_files(chosen, inspections, workers, report, inspect_mask)
    for split, scan in found.items():
        bad = [index for index, inspection in scan.notable.items() if inspection.problem]
        scans[split].bad_masks = frozenset(usable[split][bad].tolist())
        digests = np.zeros((len(scans[split].images), 2), dtype=np.uint64)
        digests[usable[split]] = scan.digests
        scans[split].mask_digests = digests
    return found


def join_digests(scans: Collection[MaskScan]) -> dict[int, np.ndarray]:
    """Return the digests of the decoded masks by the id of their store, uint64 [items, 2], zeros for items without one.

    Splits of a folder share a store; those of a dictionary of splits have one each.
    """
    found: dict[int, np.ndarray] = {}
    for scan in scans:
        assert scan.images.masks is not None
        store = scan.images.masks
        digests = found.setdefault(id(store), np.zeros((len(store), 2), dtype=np.uint64))
        digests[scan.images.targets] = scan.digests
    return found


def find_mask_problems(split: str, scan: MaskScan) -> Iterator[Finding]:
    """Yield the findings about single masks of a split."""
    for index, inspection in sorted(scan.notable.items()):
        name, location = scan.images.name(index), (split, int(scan.positions[index]))
        for kind, detail in _iter_problems(inspection, scan):
            yield Finding(kind, name, f"{detail} (mask {scan.images.mask_name(index)})", location)


def _iter_problems(inspection: MaskInspection, scan: MaskScan) -> Iterator[tuple[str, str]]:
    """Yield the kind and detail of each finding about a mask."""
    if inspection.problem:
        yield inspection.problem, inspection.detail
        return
    yield from (TRAIT_FINDINGS[trait] for trait in inspection.traits.split())
    counts, classes = scan.map_counts(inspection), scan.images.classes
    if set(counts[:, 0].tolist()) <= {IGNORED}:
        yield "mask-ignored", "all pixels are ignored"
    elif len(counts) == 1:
        yield "mask-uniform", f"all pixels are {classes[counts[0, 0]]!r}"
    single = counts[(counts[:, 1] == 1) & (counts[:, 0] != IGNORED), 0]
    if len(single):
        yield "mask-speck", f"one pixel of {format_names(classes[k] for k in single)}"


def find_absent_classes(scans: dict[str, MaskScan]) -> Iterator[Finding]:
    """Yield findings about classes that occur in no mask of a split, unless no mask of the split can be used."""
    counts = {split: scan.count() for split, scan in scans.items() if scan.has_usable_masks}
    images = {split: dict(zip(found.classes, found.images.tolist(), strict=True)) for split, found in counts.items()}
    for name in dict.fromkeys(name for found in images.values() for name in found):
        present = [split for split, found in images.items() if found.get(name)]
        count = images[present[0]][name] if present else 0
        have = "1 image of {} has it" if count == 1 else f"{count:,} images of {{}} have it"
        where = have.format(present[0]) if present else "in no split"
        for split in images:
            if split not in present:
                yield Finding("absent-class", f"{split}/{name}", f"in no mask of {split}; {where}")

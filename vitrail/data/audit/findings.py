"""Kinds of dataset problems with severity, title and remedy, and the checks of images and classes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.audit.image import ImageInspection
from vitrail.data.audit.scan import Scans, SplitScan, is_in_memory
from vitrail.data.dataset import Dataset, Media
from vitrail.data.sources.captions import SKIP_NO_CAPTION, SKIP_SAME_PAIR
from vitrail.data.sources.files import SKIP_HIDDEN, SKIP_NOT_AN_IMAGE, SKIP_OUTSIDE, SKIP_UNREADABLE, is_ignored_name
from vitrail.data.sources.masks import SKIP_AMBIGUOUS, SKIP_NO_IMAGE, SKIP_NO_MASK
from vitrail.data.sources.numbers import SKIP_NO_NUMBER

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # most severe first
MIN_SIDE = 8  # pixels
MODE_NAMES = {"RGB": "colour", "L": "grey", "1": "black and white, 1 bit", "P": "a palette", "LAB": "CIELAB"}
MODE_NAMES |= {"RGBA": "with transparency", "LA": "grey with transparency", "CMYK": "CMYK, made for printing"}
MODE_NAMES |= {"I;16": "16 bits of grey", "I;16B": "16 bits of grey", "I": "32 bits of grey", "F": "floating point"}
MAX_IMBALANCE = 10.0  # ratio of the largest to the smallest class


class Kind(NamedTuple):
    """A kind of finding."""

    severity: Severity
    title: str
    remedy: str


REFETCH = "download again or delete; training skips them"
FINDING_KINDS = {
    "zero-byte": Kind("error", "empty files", REFETCH),
    "truncated": Kind("error", "image data ends too early", REFETCH),
    "unreadable": Kind("error", "unreadable images", REFETCH),
    "not-an-image": Kind("error", "files that are not images", "check the download; training skips them"),
    "bomb": Kind("error", "images too large to decode safely", "make them smaller; training skips them"),
    "mask-unreadable": Kind("error", "unreadable masks", REFETCH),
    "mask-size": Kind("error", "masks of another size than their image", "make them at its size; training skips them"),
    "mask-value": Kind(
        "error", "mask values without a class", "name them in classes.txt, or ignore them; training skips them"
    ),
    "mask-blurred": Kind("error", "smoothed masks", "resize masks with nearest neighbour; training skips them"),
    "mask-lossy": Kind("error", "masks in a lossy format", "make them again as PNG; training skips them"),
    "mask-depth": Kind("error", "masks with values above 255", "number the classes from 0; training skips them"),
    "mask-shape": Kind("error", "shapes that do not fit their image", "correct them; training skips these images"),
    "mask-unclear": Kind("error", "images whose mask is unclear", "rename them: one mask for each image"),
    "target-value": Kind("error", "images without a number to learn", "write finite numbers; training skips them"),
    "short-sound": Kind("error", "sounds shorter than 25 ms", "delete them; training skips them"),
    "caption-value": Kind("error", "images without a caption", "write captions; training skips them"),
    "constant-target": Kind("error", "targets that do not vary", "leave them out of the targets, or add images"),
    "empty-class": Kind("error", "classes without images", "add images, or remove the folder"),
    "classes-differ": Kind("error", "classes that differ between splits", "give every split the same classes"),
    "tool-folder": Kind("error", "tool folders used as classes", "move them out of the data"),
    "contradiction": Kind("error", "identical images with different labels", "keep one copy with one label"),
    "leak": Kind("error", "identical images in two splits", "delete the training copy, or put it in quarantine"),
    "near-leak": Kind("warning", "similar images in two splits", "compare them: results may be too optimistic"),
    "near-contradiction": Kind(
        "warning", "similar images with different labels", "compare them: one label may be wrong"
    ),
    "duplicate": Kind("warning", "identical images in one split", "keep one: copies count twice"),
    "caption-copy": Kind("warning", "pairs that are listed twice", "delete the copies; they are used once"),
    "caption-long": Kind("warning", "long captions", "shorten them: the end is cut off at the context of the model"),
    "video-cut": Kind("warning", "videos that end too early", "download again; clips are taken before the end"),
    "short-video": Kind("warning", "videos shorter than a clip", "the last frame is repeated; or use a shorter clip"),
    "sound-cut": Kind("warning", "sounds that end too early", "download again; the samples that are there are used"),
    "silent": Kind("warning", "silent sounds", "delete them: nothing can be learnt from them"),
    "clipped": Kind("warning", "clipped sounds", "record them again with less gain, if others are not clipped"),
    "large": Kind("warning", "very large images", "make them smaller: decoding takes hundreds of megabytes"),
    "tiny": Kind("warning", "very small images", "delete thumbnails and tracking pixels"),
    "class-case": Kind("warning", "classes whose names differ in case only", "merge them, or rename one"),
    "thin-class": Kind("warning", "classes too small to be split", "add images"),
    "missing-mask": Kind("warning", "images without a mask", "add their masks; training skips them"),
    "orphan-mask": Kind("warning", "masks without an image", "add their images, or delete them"),
    "absent-class": Kind("warning", "classes in no mask of a split", "add images, or remove the class"),
    "mask-ignored": Kind("warning", "masks with ignored pixels only", "delete them: they train nothing"),
    "outside": Kind("warning", "images that are not used", "move them into a class folder, or convert them"),
    "imbalance": Kind("warning", "imbalanced classes", "balance the sampling or weight the classes"),
    "outlier": Kind("note", "numbers far from all others", "check their units and decimal points"),
    "caption-shared": Kind(
        "note", "captions of many images", "harmless as class names; a batch takes them for different"
    ),
    "near-duplicate": Kind("note", "similar images in one split", "keep one if both are the same photograph"),
    "wrong-suffix": Kind("note", "suffix of another format", "harmless: the content is used; rename to be clean"),
    "mask-uniform": Kind("note", "masks of one class", "harmless, if they are complete"),
    "mask-speck": Kind("note", "classes of a single pixel in a mask", "check them: strays of the annotation tool"),
    "mask-alpha": Kind("note", "masks with transparency", "harmless: only the colours are used"),
    "mask-16-bit": Kind("note", "masks of 16 bits", "harmless: the values fit"),
    "mask-turned": Kind("note", "masks rotated with their image", "harmless: rotated by the image's EXIF orientation"),
    "mode": Kind("note", "unusual pixel formats", "harmless: converted when read"),
    "turned": Kind("note", "images with an EXIF orientation", "harmless: rotated when read"),
    "variable-rate": Kind("note", "videos with a variable frame rate", "harmless: frames are chosen by their times"),
    "video-turned": Kind("note", "videos that are stored turned", "harmless: rotated when read"),
    "sample-rate": Kind("note", "sounds of another sample rate", "harmless: resampled when read"),
    "animated": Kind("note", "animated or multi-page images", "harmless: the first frame is used"),
    "hidden": Kind("note", "hidden files and tool files", "harmless: ignored"),
    "other-file": Kind("note", "other files", "harmless: ignored"),
    "passed-over": Kind("note", "ignored entries", "harmless, if none of them is training data"),
}
UNUSABLE_KINDS = ("zero-byte", "truncated", "unreadable", "not-an-image", "bomb", "short-sound")
UNUSABLE_KINDS += (
    "mask-unreadable",
    "mask-size",
    "mask-value",
    "mask-blurred",
    "mask-lossy",
    "mask-depth",
    "mask-shape",
    "target-value",
    "caption-value",
)
SKIPPED_PAIRS = {SKIP_NO_MASK: "missing-mask", SKIP_NO_IMAGE: "orphan-mask", SKIP_AMBIGUOUS: "mask-unclear"}
SKIPPED_PAIRS |= {SKIP_NO_NUMBER: "target-value", SKIP_NO_CAPTION: "caption-value", SKIP_SAME_PAIR: "caption-copy"}


@dataclass(frozen=True)
class Finding:
    """A problem of an image, a class or a split."""

    kind: str
    path: str  # of the image, or split/class
    detail: str
    location: tuple[str, int] | None = None  # split and index of the image
    own_severity: Severity | None = None  # instead of that of its kind

    @property
    def severity(self) -> Severity:
        return self.own_severity or FINDING_KINDS[self.kind].severity

    def to_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "path": self.path, "detail": self.detail, "severity": self.severity}


def describe_kind(kind: str, media: Media = "image") -> Kind:
    """Return a kind of finding in the words of images, videos or sounds."""
    if media == "image":
        return FINDING_KINDS[kind]
    severity, title, remedy = FINDING_KINDS[kind]
    return Kind(severity, title.replace("image", media), remedy.replace("image", media))


def find_image_problems(split: str, scan: SplitScan, min_side: int) -> Iterator[Finding]:
    """Yield the findings about single images of a split."""
    images = scan.images
    if is_in_memory(images.store) or images.media != "image":
        return
    for index, inspection in sorted(scan.notable.items()):
        for kind, detail in _iter_problems(inspection):
            yield Finding(kind, images.name(index), detail, (split, index))
    for index, name in sorted(scan.wrong_suffix.items()):
        yield Finding("wrong-suffix", images.name(index), f"is {name}", (split, index))
    yield from find_size_problems(split, scan, min_side)


def find_size_problems(split: str, scan: SplitScan, min_side: int) -> Iterator[Finding]:
    """Yield the findings about images or frames that are very small or very large."""
    images = scan.images
    pixels, limit = scan.sizes.astype(np.int64).prod(1), Image.MAX_IMAGE_PIXELS or np.inf
    for kind, found in {"tiny": scan.sizes.min(1) < min_side, "large": pixels > limit}.items():
        for index in np.flatnonzero(scan.has_thumb & found).tolist():
            width, height = scan.sizes[index].tolist()
            unit = " pixels" if kind == "tiny" else f", {width * height / 1e6:,.0f} megapixels"
            yield Finding(kind, images.name(index), f"{width}×{height}{unit}", (split, index))


def classify_skipped(reason: str) -> str:
    """Return the kind of finding for a skipped file, from the reason."""
    if reason == SKIP_HIDDEN:
        return "hidden"
    if kind := next((kind for words, kind in SKIPPED_PAIRS.items() if reason.startswith(words)), None):
        return kind
    if reason.startswith(SKIP_UNREADABLE):  # a sample of a Python object
        return "unreadable"
    if reason == SKIP_OUTSIDE or "HEIC" in reason:
        return "outside"
    return "other-file" if reason.startswith(SKIP_NOT_AN_IMAGE) else "passed-over"


def _iter_problems(inspection: ImageInspection) -> Iterator[tuple[str, str]]:
    """Yield the kind and detail of each finding about an image."""
    if inspection.problem:
        yield inspection.problem, inspection.detail
        return
    base, alpha, _ = inspection.mode.partition("+")
    if inspection.mode not in ("RGB", "L"):
        yield "mode", MODE_NAMES.get(base, base) + (" with transparency" if alpha else "")
    if inspection.turned:
        yield "turned", f"{inspection.width}×{inspection.height} as stored"
    if inspection.animated:
        yield "animated", inspection.format


def find_class_problems(dataset: Dataset, scans: Scans, max_imbalance: float) -> Iterator[Finding]:
    """Yield the findings about classes of images, counting usable images only."""
    scans = {split: scan for split, scan in scans.items() if scan.images.target_kind in ("single", "multi")}
    counts = {split: scan.images.select(scan.find_usable()).class_counts for split, scan in scans.items()}
    split_by_content = any("by content" in note for note in dataset.notes)
    for name in sorted({name for split_counts in counts.values() for name in split_counts}):
        if dataset.kind == "folder" and is_ignored_name(name):
            yield Finding("tool-folder", name, "a folder created by a tool is used as a class")
        yield from _check_presence(name, counts, split_by_content)
    yield from _check_case(counts)
    if "train" in counts:
        yield from _check_balance(counts["train"], max_imbalance)


def _check_presence(name: str, counts: dict[str, dict[str, int]], split_by_content: bool) -> Iterator[Finding]:
    """Yield findings about splits in which a class is missing."""
    present = [split for split, split_counts in counts.items() if split_counts.get(name)]
    if not present:
        split = next(split for split, split_counts in counts.items() if name in split_counts)
        yield Finding("empty-class", f"{split}/{name}", "no usable image in any split")
        return
    for split, split_counts in counts.items():
        if split_counts.get(name):
            continue
        count = counts[present[0]][name]
        location, found = f"{present[0]}/{name}", f"{count:,} image{'s' if count > 1 else ''} in {present[0]}"
        if split_by_content:
            yield Finding("thin-class", location, f"{found}, none left for {split}")
        elif name in split_counts:
            yield Finding("empty-class", f"{split}/{name}", f"{found}, no usable image in {split}")
        else:
            yield Finding("classes-differ", location, f"{found}, no such class in {split}")


def _check_case(counts: dict[str, dict[str, int]]) -> Iterator[Finding]:
    """Yield a finding for names of classes that some file systems, and most readers, take for one: Hat and hat."""
    spellings: dict[str, list[str]] = {}
    for name in sorted({name for split_counts in counts.values() for name in split_counts}):
        spellings.setdefault(name.casefold(), []).append(name)
    for names in spellings.values():
        for other in names[1:]:
            yield Finding("class-case", other, f"{names[0]} is another class")


def _check_balance(counts: dict[str, int], max_imbalance: float) -> Iterator[Finding]:
    """Yield a finding if the largest class has too many times the images of the smallest."""
    counts = {name: count for name, count in counts.items() if count}
    if len(counts) < 2:
        return
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[most] >= max_imbalance * counts[least]:
        ratio = counts[most] / counts[least]
        detail = f"{counts[least]:,} images; {most} has {counts[most]:,}, {ratio:.0f} times as many"
        yield Finding("imbalance", f"train/{least}", detail)

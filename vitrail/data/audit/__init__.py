"""Audit of a dataset: corrupt images, copies, leaks and label problems, found before training.

audit = vitrail.check("photos")  # a path, a name, or a Python object
audit.is_ok                      # no errors
audit.findings                   # most severe first
dataset = audit.clean_dataset()  # without unusable images
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.audit import findings as checks
from vitrail.data.audit.captions import CaptionSummary, find_caption_problems, summarise_captions
from vitrail.data.audit.duplicates import MAX_HASH_DISTANCE, find_repeats
from vitrail.data.audit.findings import FINDING_KINDS, UNUSABLE_KINDS, Finding, describe_kind
from vitrail.data.audit.masks import MaskCounts, find_absent_classes, find_mask_problems, join_digests, scan_masks
from vitrail.data.audit.numbers import NumberSummary, find_number_problems, summarise_numbers
from vitrail.data.audit.scan import scan_dataset
from vitrail.data.audit.sound import SoundSummary, find_sound_problems, summarise_sounds
from vitrail.data.audit.video import VideoSummary, find_video_problems, summarise_videos
from vitrail.data.clip import Clip
from vitrail.data.dataset import Dataset, Media
from vitrail.data.sources import load_dataset
from vitrail.utils.progress import ProgressCallback

__all__ = ["FINDING_KINDS", "MAX_HASH_DISTANCE", "UNUSABLE_KINDS", "Audit", "Finding", "audit_dataset"]
__all__ += ["CaptionSummary", "MaskCounts", "SoundSummary", "VideoSummary", "check", "describe_kind"]
__all__ += ["NumberSummary", "exclude_images", "format_quarantine", "read_quarantine", "summarise_numbers"]


@dataclass(frozen=True)
class Audit:
    """A dataset and its findings."""

    dataset: Dataset
    findings: tuple[Finding, ...]  # most severe first, grouped by kind
    mask_counts: Mapping[str, MaskCounts] = field(
        default_factory=dict
    )  # pixels of the classes of each split with masks
    numbers: Mapping[str, Mapping[str, NumberSummary]] = field(default_factory=dict)  # by split and target
    captions: Mapping[str, CaptionSummary] = field(default_factory=dict)  # by split
    videos: Mapping[str, VideoSummary] = field(default_factory=dict)  # lengths, rates and sizes, by split
    sounds: Mapping[str, SoundSummary] = field(default_factory=dict)  # lengths and rates, by split
    mask_digests: Mapping[int, np.ndarray] = field(
        default_factory=dict, compare=False
    )  # by the id of a mask store: uint64 [items, 2]

    @property
    def media(self) -> Media:
        """Return what the items of the dataset are: images, videos or sounds."""
        images = next(iter(self.dataset.splits.values()), None)
        return "image" if images is None else images.media

    @property
    def is_ok(self) -> bool:
        """Return True if there are no errors."""
        return not any(finding.severity == "error" for finding in self.findings)

    @cached_property
    def counts(self) -> Counter[str]:
        """Return the number of findings of each kind."""
        return Counter(finding.kind for finding in self.findings)

    def select_findings(self, kinds: Collection[str]) -> list[Finding]:
        """Return the findings of these kinds."""
        return [finding for finding in self.findings if finding.kind in kinds]

    def clean_dataset(self, kinds: Collection[str] = UNUSABLE_KINDS) -> Dataset:
        """Return the dataset without the images that have findings of these kinds."""
        splits = dict(self.dataset.splits)
        locations = [finding.location for finding in self.select_findings(kinds) if finding.location]
        for split in {split for split, _ in locations}:
            bad = [index for located_split, index in locations if located_split == split]
            splits[split] = splits[split].select(np.delete(np.arange(len(splits[split])), bad))
        return replace(self.dataset, splits=splits)

    def list_quarantine(self) -> dict[str, str]:
        """Return the paths of images to leave out, so that no errors remain, with the reasons."""
        errors = [f for f in reversed(self.findings) if f.location and f.severity == "error"]
        return {finding.path: f"{finding.kind}: {finding.detail}" for finding in errors}

    def format_summary(self) -> list[str]:
        """Return one line for each kind of finding, most severe first."""
        lines = []
        for kind in FINDING_KINDS:
            if findings := self.select_findings([kind]):
                first = findings[0]
                more = f" and {len(findings) - 1:,} more" if len(findings) > 1 else ""
                lines.append(
                    f"{first.severity}: {describe_kind(kind, self.media).title}: {first.path} ({first.detail}){more}"
                )
        return lines

    def __str__(self) -> str:
        parts = ", ".join(f"{len(images):,} {split}" for split, images in self.dataset.splits.items())
        lines = [f"{self.dataset.source}: {parts}", *self.dataset.notes, *self.format_summary()]
        verdict = "ready to train" if self.dataset.sampled is None else "no errors in the sample"
        return "\n".join([*lines, verdict if self.is_ok else "fix the errors before training"])

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        splits = self.dataset.splits
        names = dict.fromkeys(name for images in splits.values() for name in images.classes)
        counts = {
            name: {"images": len(images), "classes": images.class_counts}
            | (self.mask_counts[name].to_dict() if name in self.mask_counts else {})
            | ({"videos": self.videos[name].to_dict()} if name in self.videos else {})
            | ({"sounds": self.sounds[name].to_dict()} if name in self.sounds else {})
            | ({"captions": self.captions[name].to_dict()} if name in self.captions else {})
            | ({"targets": {key: value.to_dict() for key, value in self.numbers[name].items()}} if self.numbers else {})
            for name, images in splits.items()
        }
        return {
            "data": self.dataset.source,
            "kind": self.dataset.kind,
            "ok": self.is_ok,
            "images": sum(map(len, splits.values())),
            **(
                {"sampled": dict(zip(("shards", "of"), self.dataset.sampled, strict=True))}
                if self.dataset.sampled
                else {}
            ),
            **({} if self.captions else {"targets": list(names)} if self.numbers else {"classes": list(names)}),
            "splits": counts,
            "notes": list(self.dataset.notes),
            "problems": [finding.to_dict() for finding in self.findings],
        }


def audit_dataset(
    dataset: Dataset,
    *,
    cache: bool = True,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
    max_hash_distance: int | None = MAX_HASH_DISTANCE,
    min_side: int = checks.MIN_SIDE,
    max_imbalance: float = checks.MAX_IMBALANCE,
    clip: Clip | None = None,
) -> Audit:
    """Read every image completely and compare all images with each other.

    `workers` is the number of processes (default: all cores; 0: this process only). `max_hash_distance` is the number of
    bits of 128 that may differ between near duplicates; None compares bytes only. Arrays in memory are checked for labels and
    copies only. Of a video, all bytes are read and the beginning, the middle and the end are decoded; those with fewer frames
    than `clip` spans (default: 16 frames, every 4th) are reported. Of a sound, all samples are decoded, and compared.
    """
    scans = scan_dataset(dataset, cache, workers, progress)
    mask_scans = scan_masks(scans, cache, workers, progress)
    mask_counts = {split: scan.count() for split, scan in mask_scans.items()}
    findings = [Finding(checks.classify_skipped(reason), path, reason) for path, reason in dataset.skipped]
    for split, scan in scans.items():
        findings += checks.find_image_problems(split, scan, min_side)
        findings += find_video_problems(split, scan, min_side, clip or Clip())
    findings += find_sound_problems(scans)
    for split, scan in mask_scans.items():
        findings += find_mask_problems(split, scan)
    findings += [*find_number_problems(dataset, scans), *find_caption_problems(scans)]
    if dataset.sampled is None:  # in a sample, classes may be absent by chance
        findings += [*find_absent_classes(mask_scans), *checks.find_class_problems(dataset, scans, max_imbalance)]
    numbers = {split: summarise_numbers(images) for split, images in dataset.splits.items()}
    findings += find_repeats(scans, max_hash_distance)
    order = {kind: rank for rank, kind in enumerate(FINDING_KINDS)}
    findings.sort(key=lambda finding: (checks.SEVERITIES.index(finding.severity), order[finding.kind]))
    numbers = numbers if any(numbers.values()) else {}
    summaries = {split: summarise_videos(scan) for split, scan in scans.items()}
    videos = {split: summary for split, summary in summaries.items() if summary}
    sound_summaries = {split: summarise_sounds(scan) for split, scan in scans.items()}
    sounds = {split: summary for split, summary in sound_summaries.items() if summary}
    texts = {split: found for split, images in dataset.splits.items() if (found := summarise_captions(images))}
    digests = join_digests(mask_scans.values())
    return Audit(dataset, tuple(findings), mask_counts, numbers, texts, videos, sounds, digests)


def check(
    data: Any,
    *,
    fractions: tuple[float, float, float] | None = None,
    label_from: str | None = None,
    names: str | None = None,
    ignore: int | Sequence[int] | None = None,
    targets: str | Sequence[str] | None = None,
    near: int | None = MAX_HASH_DISTANCE,
    tiny: int = checks.MIN_SIDE,
    imbalance: float = checks.MAX_IMBALANCE,
    clip: Clip | None = None,
    whole: bool = False,
    cache: bool = True,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Audit:
    """Find defects in data before training; `print` the result, or read its `is_ok`, `counts` and `findings`.

    `data` is anything that `vitrail.train` takes. `fractions` split data without splits; `label_from`, `names`, `ignore` and
    `targets` are those of `load_dataset`. `near` is the number of bits of 128 that may differ between similar images (None:
    identical bytes only), `tiny` the smallest side in pixels, `imbalance` the ratio of class sizes, above which they are
    reported. `clip` is the clip of the model that videos are for. Of remote shards a sample is checked: the first samples of a
    few; with `whole`, everything is read. `workers` is the number of processes (default: all cores).
    """
    labels = {"label_from": label_from, "names": names, "ignore": ignore, "targets": targets}
    dataset = load_dataset(data, fractions=fractions, progress=progress, sample=not whole, **labels)
    return audit_dataset(
        dataset,
        cache=cache,
        workers=workers,
        progress=progress,
        max_hash_distance=near,
        min_side=tiny,
        max_imbalance=imbalance,
        clip=clip,
    )


# A quarantine list has one image to exclude from training per line: path, tab, reason. Lines that start with # are comments.
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}  # characters that a path may contain
UNESCAPES = {escape: character for character, escape in ESCAPES.items()} | {"\\#": "#"}


def format_quarantine(images: Mapping[str, str]) -> str:
    """Return the lines of a quarantine list."""
    return "".join(f"{_escape(path)}\t{' '.join(reason.split())}\n" for path, reason in sorted(images.items()))


def read_quarantine(file: Path) -> dict[str, str]:
    """Read the paths and reasons of a quarantine list; reasons are optional."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: expected one path per line") from None
    pairs = (line.rstrip("\r").partition("\t") for line in lines if line.strip() and line[0] != "#")
    return {re.sub(r"\\.", lambda m: UNESCAPES.get(m[0], m[0]), path): reason for path, _, reason in pairs}


def exclude_images(dataset: Dataset, names: Collection[str]) -> tuple[Dataset, list[str]]:
    """Return the dataset without these images, and the names of the excluded images.

    Deleted files are ignored. A list of existing files of which none belongs to the dataset is an error.
    """
    listed = {os.path.abspath(name) for name in names}
    excluded: list[str] = []
    splits = {}
    for split, images in dataset.splits.items():
        image_names = [images.name(index) for index in range(len(images))]
        keep = np.array([os.path.abspath(name) not in listed for name in image_names], dtype=bool)
        excluded += [image_names[index] for index in np.flatnonzero(~keep).tolist()]
        splits[split] = images if keep.all() else images.select(keep)
    if names and not excluded and all(map(os.path.exists, listed)):
        source, first = dataset.source, min(names)
        raise ValueError(f"none of the {len(names):,} listed paths is an image of {source}; the first is {first}")
    return replace(dataset, splits=splits), excluded


def _escape(path: str) -> str:
    escaped = "".join(ESCAPES.get(character, character) for character in path)
    return "\\" + escaped if escaped.startswith("#") else escaped

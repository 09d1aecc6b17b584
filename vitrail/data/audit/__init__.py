"""Audit of a dataset: corrupt images, copies, leaks and label problems, found before training.

audit = audit_dataset(load_dataset("photos"))
audit.is_ok                      # no errors
audit.findings                   # most severe first
dataset = audit.clean_dataset()  # without unusable images
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vitrail.data.audit import findings as checks
from vitrail.data.audit.duplicates import MAX_HASH_DISTANCE, find_repeats
from vitrail.data.audit.findings import FINDING_KINDS, UNUSABLE_KINDS, Finding
from vitrail.data.audit.scan import scan_dataset
from vitrail.data.dataset import Dataset
from vitrail.utils.progress import ProgressCallback

__all__ = ["FINDING_KINDS", "MAX_HASH_DISTANCE", "UNUSABLE_KINDS", "Audit", "Finding", "audit_dataset"]


@dataclass(frozen=True)
class Audit:
    """A dataset and its findings."""

    dataset: Dataset
    findings: tuple[Finding, ...]  # most severe first, grouped by kind

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
                lines.append(f"{first.severity}: {FINDING_KINDS[kind].title}: {first.path} ({first.detail}){more}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        splits = self.dataset.splits
        names = dict.fromkeys(name for images in splits.values() for name in images.classes)
        return {
            "data": self.dataset.source,
            "kind": self.dataset.kind,
            "ok": self.is_ok,
            "images": sum(map(len, splits.values())),
            "classes": list(names),
            "splits": {
                split: {"images": len(images), "classes": images.class_counts} for split, images in splits.items()
            },
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
) -> Audit:
    """Read every image completely and compare all images with each other.

    `workers` is the number of processes (default: all cores; 0: this process only). `max_hash_distance` is the number of
    bits of 128 that may differ between near duplicates; None compares bytes only. Arrays in memory are checked for labels and
    copies only.
    """
    scans = scan_dataset(dataset, cache, workers, progress)
    findings = [Finding(checks.classify_skipped(reason), path, reason) for path, reason in dataset.skipped]
    for split, scan in scans.items():
        findings += checks.find_image_problems(split, scan, min_side)
    findings += [*checks.find_class_problems(dataset, scans, max_imbalance), *find_repeats(scans, max_hash_distance)]
    order = {kind: rank for rank, kind in enumerate(FINDING_KINDS)}
    findings.sort(key=lambda finding: (checks.SEVERITIES.index(finding.severity), order[finding.kind]))
    return Audit(dataset, tuple(findings))

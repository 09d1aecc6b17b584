"""What is wrong with a dataset, found before it is trained on.

found = audit(read("photos"))
found.ok                      # nothing would hurt
found.findings                # what there is, the gravest first
dataset = found.clean()       # without the pictures that cannot be used
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vitrail.data.audit.classes import FAR, classes
from vitrail.data.audit.duplicates import NEAR
from vitrail.data.audit.findings import KINDS, SEVERITIES, UNUSABLE, Finding, finding
from vitrail.data.audit.remarks import TINY, passed_over, remarks
from vitrail.data.audit.repeats import repeats
from vitrail.data.audit.seen import Progress, see
from vitrail.data.pictures import Dataset

__all__ = ["KINDS", "NEAR", "UNUSABLE", "Audit", "Finding", "audit"]


@dataclass(frozen=True)
class Audit:
    """A dataset, and what was found."""

    dataset: Dataset
    findings: tuple[Finding, ...]  # the gravest first, those of a kind together

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would hurt."""
        return not any(each.severity == "error" for each in self.findings)

    @cached_property
    def counts(self) -> Counter[str]:
        """How many findings of each kind."""
        return Counter(each.kind for each in self.findings)

    def of(self, kinds: Collection[str]) -> list[Finding]:
        """The findings of some kinds."""
        return [each for each in self.findings if each.kind in kinds]

    def clean(self, kinds: Collection[str] = UNUSABLE) -> Dataset:
        """The dataset without the pictures that were found to be of these kinds."""
        splits = {}
        for split, pictures in self.dataset.splits.items():
            bad = [each.place[1] for each in self.of(kinds) if each.place and each.place[0] == split]
            keep = np.ones(len(pictures), dtype=bool)
            keep[bad] = False
            splits[split] = pictures.only(keep) if bad else pictures
        return replace(self.dataset, splits=splits)

    def quarantine(self) -> dict[str, str]:
        """Pictures without which nothing would hurt, each with the reason."""
        return {
            each.path: f"{each.kind}: {each.detail}"
            for each in reversed(self.findings)
            if each.place and each.severity == "error"
        }

    def summary(self) -> list[str]:
        """A line for every kind that was found, the gravest first."""
        lines = []
        for kind in KINDS:
            if found := self.of([kind]):
                first = found[0]
                more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
                lines.append(f"{first.severity}: {KINDS[kind].title}: {first.path} ({first.detail}){more}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Everything, in JSON's own kinds of value."""
        splits = self.dataset.splits
        names = dict.fromkeys(name for pictures in splits.values() for name in pictures.classes)
        return {
            "data": self.dataset.where,
            "kind": self.dataset.kind,
            "ok": self.ok,
            "images": sum(map(len, splits.values())),
            "classes": list(names),
            "splits": {
                split: {
                    "images": len(pictures),
                    "classes": dict(zip(pictures.classes, pictures.counts().tolist(), strict=True)),
                }
                for split, pictures in splits.items()
            },
            "notes": list(self.dataset.notes),
            "problems": [each.as_dict() for each in self.findings],
        }


def audit(
    dataset: Dataset,
    *,
    cache: bool = True,
    workers: int | None = None,
    progress: Progress | None = None,
    near: int | None = NEAR,
    tiny: int = TINY,
    imbalance: float = FAR,
) -> Audit:
    """Reads every picture to its end and compares all with all.

    `workers` are processes, by default as many as there are cores; with 0, everything happens in this one. `near` is how many of
    128 bits may differ between pictures that look the same; None compares bytes alone. Pictures in memory are never
    broken: only their labels and copies are looked at.
    """
    seen = see(dataset, cache, workers, progress)
    found = [finding(passed_over(why), path, why) for path, why in dataset.passed_over]
    for split, each in seen.items():
        found += remarks(split, each, tiny)
    found += [*classes(dataset, seen, imbalance), *repeats(seen, near)]
    order = {kind: place for place, kind in enumerate(KINDS)}
    found.sort(key=lambda each: (SEVERITIES.index(each.severity), order[each.kind]))
    return Audit(dataset, tuple(found))

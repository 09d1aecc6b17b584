"""What the labels tell by themselves: classes that are empty, that differ between splits, that outweigh others."""

from collections.abc import Iterator

import numpy as np

from vitrail.data.audit.findings import UNUSABLE, Finding, finding
from vitrail.data.audit.seen import Seen
from vitrail.data.pictures import Dataset
from vitrail.data.sources.folders import is_tools

FAR = 10.0  # times as many pictures in the largest class as in the smallest


def classes(dataset: Dataset, seen: dict[str, Seen], imbalance: float = FAR) -> Iterator[Finding]:
    """What is wrong with the classes, counting what can be used."""
    counts = {
        split: dict(zip(each.pictures.classes, usable(each).tolist(), strict=True)) for split, each in seen.items()
    }
    every = sorted({name for each in counts.values() for name in each})
    divided = any("by content" in note for note in dataset.notes)
    for name in every:
        if dataset.kind == "folder" and is_tools(name):
            yield finding("tool-folder", name, "a folder that a tool left behind counts as a class")
        yield from _presence(name, counts, divided)
    if "train" in counts:
        yield from _weights(counts["train"], imbalance)


def usable(each: Seen) -> np.ndarray:
    """Pictures of each class that can be read, [K]."""
    bad = [index for index, one in each.remarkable.items() if one.problem in UNUSABLE]
    keep = np.ones(len(each.pictures), dtype=bool)
    keep[bad] = False
    return each.pictures.only(keep).counts() if len(keep) else each.pictures.counts()


def _presence(name: str, counts: dict[str, dict[str, int]], divided: bool) -> Iterator[Finding]:
    """Where a class is, and where it should be as well."""
    inside = [split for split, each in counts.items() if each.get(name)]
    if not inside:
        split = next(split for split, each in counts.items() if name in each)
        yield finding("empty-class", f"{split}/{name}", "no picture that can be used, in any split")
        return
    for split, each in counts.items():
        if each.get(name):
            continue
        count = counts[inside[0]][name]
        held = f"{count:,} picture{'s' if count > 1 else ''} in {inside[0]}"
        if divided:
            yield finding("thin-class", f"{inside[0]}/{name}", f"{held}, none left for {split}")
        elif name in each:
            yield finding("empty-class", f"{split}/{name}", f"{held}, none that can be used in {split}")
        else:
            yield finding("classes-differ", f"{inside[0]}/{name}", f"{held}, no such class in {split}")


def _weights(counts: dict[str, int], imbalance: float) -> Iterator[Finding]:
    held = {name: count for name, count in counts.items() if count}
    if len(held) < 2:
        return
    most, least = max(held, key=lambda name: held[name]), min(held, key=lambda name: held[name])
    if held[most] >= imbalance * held[least]:
        detail = f"{held[least]:,} pictures; {most} has {held[most]:,}, {held[most] / held[least]:.0f} times as many"
        yield finding("imbalance", f"train/{least}", detail)

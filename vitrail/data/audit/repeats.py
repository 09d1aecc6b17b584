"""From pictures that are the same, or look it, to findings: copies, leaks, contradictions."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vitrail.data.audit.duplicates import alike, same
from vitrail.data.audit.findings import UNUSABLE, Finding, finding
from vitrail.data.audit.look import SIDE
from vitrail.data.audit.seen import Seen, in_memory
from vitrail.data.pictures import Pictures


@dataclass(frozen=True)
class All:
    """All usable pictures of all splits, one after another."""

    splits: list[str]
    pictures: list[Pictures]
    split: np.ndarray  # [n] which split
    index: np.ndarray  # [n] which picture of it
    label: np.ndarray  # [n] the same number for the same class, or the same set of classes
    digests: np.ndarray
    thumbs: np.ndarray

    def name(self, place: int) -> str:
        return self.pictures[self.split[place]].name(int(self.index[place]))

    def place(self, place: int) -> tuple[str, int]:
        return self.splits[self.split[place]], int(self.index[place])

    def labels(self, place: int) -> str:
        """The class, or the classes, in words."""
        pictures, index = self.pictures[self.split[place]], self.index[place]
        target = pictures.targets[index]
        if not pictures.several:
            return pictures.classes[target]
        return "|".join(pictures.classes[k] for k in np.flatnonzero(target)) or "nothing"


def gathered(seen: dict[str, Seen]) -> All:
    """The splits put together, without what cannot be used."""
    keep = []
    for each in seen.values():
        good = each.known.copy()
        good[[index for index, one in each.remarkable.items() if one.problem in UNUSABLE]] = False
        keep.append(np.flatnonzero(good))
    every = list(zip(seen.values(), keep, strict=True))
    split = np.repeat(np.arange(len(keep)), [len(indices) for indices in keep])
    nothing = np.zeros(0, dtype=np.int64)
    return All(
        list(seen),
        [each.pictures for each in seen.values()],
        split,
        np.concatenate([nothing, *keep]),
        _labels([each.pictures.only(indices) for each, indices in every]),
        np.concatenate([np.zeros((0, 2), dtype=np.uint64), *(each.digests[indices] for each, indices in every)]),
        np.concatenate(
            [np.zeros((0, SIDE * SIDE), dtype=np.uint8), *(each.thumbs[indices] for each, indices in every)]
        ),
    )


def _labels(parts: list[Pictures]) -> np.ndarray:
    """Targets of all splits as numbers that mean the same in each."""
    names = sorted({name for part in parts for name in part.classes})
    places = {name: place for place, name in enumerate(names)}
    tables = [np.array([places[name] for name in part.classes], dtype=np.int64) for part in parts]
    if not any(part.several for part in parts):
        return np.concatenate(
            [np.zeros(0, dtype=np.int64), *(t[p.targets] for t, p in zip(tables, parts, strict=True))]
        )
    sets: dict[bytes, int] = {}
    found: list[int] = []
    for table, part in zip(tables, parts, strict=True):
        rows = np.zeros((len(part), len(names)), dtype=bool)
        if part.several:
            rows[:, table] = part.targets > 0
        else:
            rows[np.arange(len(part)), table[part.targets]] = True
        found += [sets.setdefault(row.tobytes(), len(sets)) for row in np.packbits(rows, axis=1)]
    return np.array(found, dtype=np.int64)


def repeats(seen: dict[str, Seen], near: int | None) -> Iterator[Finding]:
    """Copies first, then what merely looks the same."""
    everything = gathered(seen)
    group = same(everything.digests)
    yield from _copies(everything, group)
    arrays = any(in_memory(each.pictures.store) for each in seen.values())
    if near is not None and not arrays:
        yield from _near(everything, np.flatnonzero(group == np.arange(len(group))), near)


def _copies(everything: All, group: np.ndarray) -> Iterator[Finding]:
    """Pictures with the same bytes. In each group, the copy that stays is of the last split: what is held out is kept."""
    order = np.argsort(group, kind="stable")
    firsts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.diff(firsts, append=len(order))
    for start, size in zip(firsts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        members = order[start : start + size].tolist()
        published = any(in_memory(everything.pictures[everything.split[m]].store) for m in members)
        grave = "warning" if published else None
        if len({int(everything.label[m]) for m in members}) > 1:
            for member in members:
                other = next(m for m in members if everything.label[m] != everything.label[member])
                detail = f"labelled {everything.labels(member)}; {everything.name(other)}, labelled {everything.labels(other)}"
                yield finding("contradiction", everything.name(member), detail, everything.place(member), grave)
            continue
        kept = max(members, key=lambda m: (everything.split[m], -m))
        for member in members:
            if member == kept:
                continue
            kind = "duplicate" if everything.split[member] == everything.split[kept] else "leak"
            yield finding(
                kind,
                everything.name(member),
                f"the same as {everything.name(kept)}",
                everything.place(member),
                grave if kind == "leak" else None,
            )


def _near(everything: All, unique: np.ndarray, near: int) -> Iterator[Finding]:
    """Pictures that look the same: each is told once, with the one that it is nearest to."""
    pairs = alike(everything.thumbs[unique], near)
    pairs[:, :2] = unique[pairs[:, :2]]
    told: set[tuple[int, str]] = set()
    for a, b, distance in pairs[np.argsort(pairs[:, 2], kind="stable")].tolist():
        differ = everything.label[a] != everything.label[b]
        across = everything.split[a] != everything.split[b]
        kind = "near-contradiction" if differ else "near-leak" if across else "near-duplicate"
        first, second = (b, a) if kind == "near-duplicate" else (a, b)  # as with copies, what is held out is kept
        if (first, kind) in told or (kind == "near-contradiction" and (second, kind) in told):
            continue
        told |= {(first, kind), (second, kind)} if kind == "near-contradiction" else {(first, kind)}
        how = f"{distance} of 128 bits differ"
        if differ:
            how = f"labelled {everything.labels(first)}; {everything.name(second)}, labelled {everything.labels(second)} ({how})"
        else:
            how = f"looks like {everything.name(second)} ({how})"
        yield finding(kind, everything.name(first), how, everything.place(first))

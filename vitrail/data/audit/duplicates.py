"""Findings about repeated images: exact copies, near duplicates, leaks between splits, contradicting labels."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vitrail.data.audit.findings import Finding
from vitrail.data.audit.image import THUMB_SIDE
from vitrail.data.audit.scan import Scans, is_in_memory
from vitrail.data.dataset import Images

N_BANDS, BAND_BITS = 6, 21  # bits per band: a million images rarely share a band by chance
MAX_HASH_DISTANCE = 12  # bits of 128 that may differ
MIN_CORRELATION = 0.99  # minimum correlation of the grey values
MIN_CONTRAST = 8  # minimum range of grey values: flat images are not compared
MAX_NEIGHBOURS = 64  # comparisons per image in a band that very many images share
PAIRS_PER_CHUNK = 1 << 18
POPCOUNTS = np.array([value.bit_count() for value in range(2**16)], dtype=np.uint8)


def group_identical(digests: np.ndarray) -> np.ndarray:
    """Return the first index at which each digest ([n, 2] uint64) occurs."""
    if not len(digests):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: first occurrence first
    ranked = digests[order]
    new = np.concatenate([[True], (ranked[1:] != ranked[:-1]).any(1)])
    group = np.empty(len(digests), dtype=np.int64)
    group[order] = order[new][np.cumsum(new) - 1]
    return group


def find_near_pairs(thumbs: np.ndarray, max_distance: int = MAX_HASH_DISTANCE) -> np.ndarray:
    """Return pairs of similar images, [m, 3] int64: two indices, the smaller first, and the Hamming distance."""
    values = thumbs.reshape(-1, THUMB_SIDE, THUMB_SIDE)
    used = np.flatnonzero(np.ptp(thumbs, axis=1) >= MIN_CONTRAST) if len(thumbs) else np.zeros(0, dtype=np.int64)
    bits = _compute_hash_bits(values[used])  # [n, 128]
    words = np.packbits(bits, axis=1).view(np.uint64)  # [n, 2]
    pairs = np.zeros(0, dtype=np.int64)  # index pairs as single numbers, for fast sorting
    for key in _iter_band_keys(bits):
        order = np.lexsort((words[:, 1], words[:, 0], key))
        pairs = np.sort(np.concatenate([pairs, *_find_neighbours(key[order], words[order], order, max_distance)]))
        pairs = pairs[np.diff(pairs, prepend=-1) != 0]
    first, second = np.divmod(pairs, max(1, len(used)))
    candidates = np.stack([used[first], used[second], _hamming_distance(words, first, second)], axis=1)
    return candidates[_find_correlated(thumbs, candidates)]


def _hamming_distance(words: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the number of different bits of each pair."""
    return POPCOUNTS[(words[a] ^ words[b]).view(np.uint16)].sum(1, dtype=np.int64)


def _compute_hash_bits(values: np.ndarray) -> np.ndarray:
    """Return whether each value exceeds its right neighbour, and its lower neighbour, [n, 128]."""
    corner = values[:, :-1, :-1]
    right, below = corner > values[:, :-1, 1:], corner > values[:, 1:, :-1]
    return np.concatenate([right.reshape(len(values), 64), below.reshape(len(values), 64)], axis=1)


def _iter_band_keys(bits: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the bits of each band as a number, [n]. Bands sample the whole image, so that no band is one flat corner."""
    for seed in range(2):
        permutation = np.random.default_rng(seed).permutation(128)
        for band in range(N_BANDS):
            key = np.zeros(len(bits), dtype=np.uint32)
            for bit in permutation[band * BAND_BITS : (band + 1) * BAND_BITS]:
                key = (key << np.uint32(1)) | bits[:, bit]
            yield key


def _find_neighbours(key: np.ndarray, words: np.ndarray, order: np.ndarray, max_distance: int) -> Iterator[np.ndarray]:
    """Yield pairs with equal (sorted) keys and few different bits, each with its next neighbours."""
    candidates = np.arange(len(key))
    for step in range(1, MAX_NEIGHBOURS + 1):
        candidates = candidates[candidates + step < len(key)]
        candidates = candidates[key[candidates] == key[candidates + step]]
        if not len(candidates):
            return
        for start in range(0, len(candidates), PAIRS_PER_CHUNK):
            chunk = candidates[start : start + PAIRS_PER_CHUNK]
            first_word = POPCOUNTS[(words[chunk, 0] ^ words[chunk + step, 0]).view(np.uint16)].reshape(-1, 4).sum(1)
            chunk = chunk[first_word <= max_distance]
            chunk = chunk[_hamming_distance(words, chunk, chunk + step) <= max_distance]
            a, b = order[chunk], order[chunk + step]
            yield np.minimum(a, b) * len(key) + np.maximum(a, b)


def _find_correlated(thumbs: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return a mask of the pairs with correlated grey values."""
    keep = np.zeros(len(pairs), dtype=bool)
    for start in range(0, len(pairs), PAIRS_PER_CHUNK):
        a, b = (thumbs[pairs[start : start + PAIRS_PER_CHUNK, side]].astype(np.float32) for side in (0, 1))
        a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
        scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
        keep[start : start + PAIRS_PER_CHUNK] = (a * b).sum(1) >= MIN_CORRELATION * scale
    return keep


@dataclass(frozen=True)
class UsableImages:
    """The usable images of all splits, concatenated."""

    splits: list[str]
    images: list[Images]
    split: np.ndarray  # [n] index of the split
    index: np.ndarray  # [n] index of the image within the split
    label_ids: np.ndarray  # [n] equal for equal classes or sets of classes
    digests: np.ndarray
    thumbs: np.ndarray

    @property
    def has_numbers(self) -> bool:
        return any(images.target_kind == "numbers" for images in self.images)

    @property
    def has_graded_targets(self) -> bool:
        """Return True for masks and numbers, of which similar images have similar, not equal ones."""
        return any(images.target_kind in ("masks", "numbers") for images in self.images)

    def name(self, position: int) -> str:
        return self.images[self.split[position]].name(int(self.index[position]))

    def locate(self, position: int) -> tuple[str, int]:
        return self.splits[self.split[position]], int(self.index[position])

    def format_labels(self, position: int) -> str:
        """Return the class names, joined by |, the name of the mask, or the numbers."""
        images = self.images[self.split[position]]
        if images.target_kind == "masks":
            return images.mask_name(int(self.index[position]))
        target = images.targets[self.index[position]]
        if self.has_numbers:
            return ", ".join(f"{name} {value:.6g}" for name, value in zip(images.classes, target, strict=True))
        if not images.is_multi_label:
            return images.classes[target]
        return "|".join(images.classes[k] for k in np.flatnonzero(target)) or "nothing"

    def describe_contradiction(self, first: int, second: int) -> str:
        labels = self.format_labels(first), self.format_labels(second)
        if self.has_numbers:
            return f"{labels[0]}; {self.name(second)} has {labels[1]}"
        return f"labelled {labels[0]}; {self.name(second)} is labelled {labels[1]}"


def gather_usable(scans: Scans) -> UsableImages:
    """Concatenate the splits without unusable images."""
    keep = [
        np.flatnonzero(scan.has_digest & scan.find_usable() & find_first_pairs(scan.images)) for scan in scans.values()
    ]
    selected = list(zip(scans.values(), keep, strict=True))
    return UsableImages(
        list(scans),
        [scan.images for scan in scans.values()],
        np.repeat(np.arange(len(keep)), [len(indices) for indices in keep]),
        np.concatenate([np.zeros(0, dtype=np.int64), *keep]),
        _encode_masks(scans, keep)
        if any(scan.mask_digests is not None for scan in scans.values())
        else _encode_label_ids([scan.images.select(indices) for scan, indices in selected]),
        np.concatenate([np.zeros((0, 2), np.uint64), *(scan.digests[indices] for scan, indices in selected)]),
        np.concatenate([np.zeros((0, THUMB_SIDE**2), np.uint8), *(scan.thumbs[indices] for scan, indices in selected)]),
    )


def find_first_pairs(images: Images) -> np.ndarray:
    """Return a mask of the images without those that are listed again, with another caption, [n]."""
    first = np.ones(len(images), dtype=bool)
    if images.target_kind == "captions":
        first[:] = False
        first[np.unique(images.items, return_index=True)[1]] = True
    return first


def _encode_masks(scans: Scans, keep: list[np.ndarray]) -> np.ndarray:
    """Return numbers that are equal for equal masks."""
    digests = [scan.mask_digests[indices] for scan, indices in zip(scans.values(), keep, strict=True)]  # type: ignore[index]
    return group_identical(np.concatenate(digests))


def _encode_label_ids(parts: list[Images]) -> np.ndarray:
    """Return the targets of all splits as numbers that are equal for equal labels; captions never contradict each other."""
    if any(part.target_kind == "captions" for part in parts):
        return np.zeros(sum(map(len, parts)), dtype=np.int64)
    if any(part.target_kind == "numbers" for part in parts):
        rows = np.concatenate([part.targets for part in parts])
        return np.unique(rows, axis=0, return_inverse=True)[1].ravel()
    names = sorted({name for part in parts for name in part.classes})
    index = {name: i for i, name in enumerate(names)}
    tables = [np.array([index[name] for name in part.classes], dtype=np.int64) for part in parts]
    if not any(part.is_multi_label for part in parts):
        ids = (table[part.targets] for table, part in zip(tables, parts, strict=True))
        return np.concatenate([np.zeros(0, dtype=np.int64), *ids])
    sets: dict[bytes, int] = {}
    set_ids: list[int] = []
    for table, part in zip(tables, parts, strict=True):
        rows = np.zeros((len(part), len(names)), dtype=bool)
        if part.is_multi_label:
            rows[:, table] = part.targets > 0
        else:
            rows[np.arange(len(part)), table[part.targets]] = True
        set_ids += [sets.setdefault(row.tobytes(), len(sets)) for row in np.packbits(rows, axis=1)]
    return np.array(set_ids, dtype=np.int64)


def find_repeats(scans: Scans, max_distance: int | None) -> Iterator[Finding]:
    """Yield findings about exact copies, then about near duplicates."""
    usable = gather_usable(scans)
    group = group_identical(usable.digests)
    yield from _find_copies(usable, group)
    arrays = any(is_in_memory(scan.images.store) for scan in scans.values())
    if max_distance is not None and not arrays:
        yield from _find_near_copies(usable, np.flatnonzero(group == np.arange(len(group))), max_distance)


def _find_copies(usable: UsableImages, group: np.ndarray) -> Iterator[Finding]:
    """Yield findings about images with the same bytes. Of each group, the copy in the last split is kept: held-out data stays."""
    order = np.argsort(group, kind="stable")
    firsts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.diff(firsts, append=len(order))
    for start, size in zip(firsts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        members = order[start : start + size].tolist()
        stores = [usable.images[usable.split[m]].store for m in members]
        published = any(is_in_memory(store) and getattr(store, "published", True) for store in stores)
        severity = "warning" if published or usable.has_numbers else None
        if len({int(usable.label_ids[m]) for m in members}) > 1:
            for member in members:
                other = next(m for m in members if usable.label_ids[m] != usable.label_ids[member])
                detail = usable.describe_contradiction(member, other)
                yield Finding("contradiction", usable.name(member), detail, usable.locate(member), severity)
            if not usable.has_numbers:  # measured twice with different results: a leak all the same
                continue
        kept = max(members, key=lambda m: (usable.split[m], -m))
        for member in (m for m in members if m != kept):
            kind = "duplicate" if usable.split[member] == usable.split[kept] else "leak"
            override = "warning" if published and kind == "leak" else None
            detail = f"identical to {usable.name(kept)}"
            yield Finding(kind, usable.name(member), detail, usable.locate(member), override)


def _find_near_copies(usable: UsableImages, unique: np.ndarray, max_distance: int) -> Iterator[Finding]:
    """Yield findings about similar images: each is reported once, with its nearest neighbour."""
    pairs = find_near_pairs(usable.thumbs[unique], max_distance)
    pairs[:, :2] = unique[pairs[:, :2]]
    reported: set[tuple[int, str]] = set()
    for a, b, distance in pairs[np.argsort(pairs[:, 2], kind="stable")].tolist():
        differ = usable.label_ids[a] != usable.label_ids[b] and not usable.has_graded_targets
        across = usable.split[a] != usable.split[b]
        kind = "near-contradiction" if differ else "near-leak" if across else "near-duplicate"
        first, second = (b, a) if kind == "near-duplicate" else (a, b)  # as with copies, held-out data is kept
        if (first, kind) in reported or (kind == "near-contradiction" and (second, kind) in reported):
            continue
        reported |= {(first, kind), (second, kind)} if kind == "near-contradiction" else {(first, kind)}
        bits = f"{distance} of 128 bits differ"
        detail = usable.describe_contradiction(first, second) if differ else f"similar to {usable.name(second)}"
        yield Finding(kind, usable.name(first), f"{detail} ({bits})", usable.locate(first))

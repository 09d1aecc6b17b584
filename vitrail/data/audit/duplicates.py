"""Which pictures are the same, and which look it: groups by digest, and pairs by a hash of the looks.

A picture's looks are its SIDE × SIDE grey values. Whether each is brighter than its neighbour to the right, and than the one
below, are 128 bits that another size, format or quality hardly changes. Dealt out to six
bands, twice in different orders, they make twelve keys; pairs that share one are compared. Up to five bits of difference no
pair is missed, and few are up to twelve. Plain backgrounds agree in many bits by chance, so the grey values have the last
word: they must rise and fall together.
"""

from collections.abc import Iterator

import numpy as np

from vitrail.data.audit.look import SIDE

BANDS, WIDTH = 6, 21  # bits of a band: enough that a million pictures rarely share one by chance
NEAR = 12  # bits of 128 that may differ
ALIKE = 0.99  # correlation of the grey values, at least
FLAT = 8  # difference of the lightest and the darkest value: below, there is nothing to compare
HEAP = 64  # in a band that very many share, each is compared with so many neighbours
CHUNK = 1 << 18  # pairs at a time
ONES = np.array([value.bit_count() for value in range(2**16)], dtype=np.uint8)


def same(digests: np.ndarray) -> np.ndarray:
    """A number for each digest ([n, 2] uint64), the same for the same: the first place where it occurs."""
    if not len(digests):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: the first comes first
    ranked = digests[order]
    new = np.concatenate([[True], (ranked[1:] != ranked[:-1]).any(1)])
    group = np.empty(len(digests), dtype=np.int64)
    group[order] = order[new][np.cumsum(new) - 1]
    return group


def alike(thumbs: np.ndarray, near: int = NEAR) -> np.ndarray:
    """Pairs that look the same, [m, 3] int64: two places, the smaller first, and in how many bits they differ."""
    values = thumbs.reshape(-1, SIDE, SIDE)
    used = np.flatnonzero(np.ptp(thumbs, axis=1) >= FLAT) if len(thumbs) else np.zeros(0, dtype=np.int64)
    bits = _bits(values[used])  # [n, 128]
    words = np.packbits(bits, axis=1).view(np.uint64)  # [n, 2]
    pairs = np.zeros(0, dtype=np.int64)  # two places as one number: quick to sort
    for key in _keys(bits):
        order = np.lexsort((words[:, 1], words[:, 0], key))
        pairs = np.sort(np.concatenate([pairs, *_neighbours(key[order], words[order], order, near)]))
        pairs = pairs[np.diff(pairs, prepend=-1) != 0]
    first, second = np.divmod(pairs, max(1, len(used)))
    found = np.stack([used[first], used[second], _distance(words, first, second)], axis=1)
    return found[_together(thumbs, found)]


def _distance(words: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """In how many bits each pair differs."""
    return ONES[(words[a] ^ words[b]).view(np.uint16)].sum(1, dtype=np.int64)


def _bits(values: np.ndarray) -> np.ndarray:
    """Whether each value is above the one to its right, and above the one below, [n, 128]."""
    corner = values[:, :-1, :-1]
    right, below = corner > values[:, :-1, 1:], corner > values[:, 1:, :-1]
    return np.concatenate([right.reshape(len(values), 64), below.reshape(len(values), 64)], axis=1)


def _keys(bits: np.ndarray) -> Iterator[np.ndarray]:
    """Each band's bits as a number, [n]. They are from all over the picture, so that no band is one plain corner."""
    for turn in range(2):
        dealt = np.random.default_rng(turn).permutation(128)
        for band in range(BANDS):
            key = np.zeros(len(bits), dtype=np.uint32)
            for bit in dealt[band * WIDTH : (band + 1) * WIDTH]:
                key = (key << np.uint32(1)) | bits[:, bit]
            yield key


def _neighbours(key: np.ndarray, words: np.ndarray, order: np.ndarray, near: int) -> Iterator[np.ndarray]:
    """Pairs with equal keys, sorted, that differ in few bits: each with the next, then with the one after it, and so on."""
    alive = np.arange(len(key))
    for step in range(1, HEAP + 1):
        alive = alive[alive + step < len(key)]
        alive = alive[key[alive] == key[alive + step]]
        if not len(alive):
            return
        for start in range(0, len(alive), CHUNK):
            here = alive[start : start + CHUNK]
            here = here[ONES[(words[here, 0] ^ words[here + step, 0]).view(np.uint16)].reshape(-1, 4).sum(1) <= near]
            here = here[_distance(words, here, here + step) <= near]
            a, b = order[here], order[here + step]
            yield np.minimum(a, b) * len(key) + np.maximum(a, b)


def _together(thumbs: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Whether the grey values of each pair rise and fall together: a mask."""
    keep = np.zeros(len(pairs), dtype=bool)
    for start in range(0, len(pairs), CHUNK):
        a, b = (thumbs[pairs[start : start + CHUNK, side]].astype(np.float32) for side in (0, 1))
        a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
        scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
        keep[start : start + CHUNK] = (a * b).sum(1) >= ALIKE * scale
    return keep

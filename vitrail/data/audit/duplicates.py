"""Which pictures are the same, and which look it: groups by digest, and pairs by a hash of the looks.

A picture's looks are its SIDE × SIDE grey values. Whether each is brighter than its neighbour to the right, and than the one
below, are 128 bits that another size, format or quality hardly changes. Pairs that share one of eight bands of these bits
are compared: up to seven bits of difference none is missed, and few beyond. Plain backgrounds agree in many bits by chance,
so the grey values have the last word: they must rise and fall together.
"""

import numpy as np

from vitrail.data.audit.look import SIDE

BANDS, BITS = 8, 16
NEAR = 12  # bits of 128 that may differ
ALIKE = 0.99  # correlation of the grey values, at least
FLAT = 8  # difference of the lightest and the darkest value: below, there is nothing to compare
HEAP = 200  # in a band that very many share, each is compared with so many neighbours
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
    bits = _bits(values[used])
    words = bits.view(np.uint64)  # [n, 2]
    found: list[np.ndarray] = []
    for band in range(BANDS):
        key = bits.view(np.uint16)[:, band]
        order = np.lexsort((words[:, 1], words[:, 0], key))
        found += list(_neighbours(key[order], order, words, near))
    pairs = np.concatenate([np.zeros((0, 3), dtype=np.int64), *found])
    pairs = np.unique(pairs, axis=0)
    pairs[:, :2] = used[pairs[:, :2]]
    return pairs[_together(thumbs, pairs)]


def _bits(values: np.ndarray) -> np.ndarray:
    """[n, 16] uint8. A band takes its bits from all over the picture, so that no band is one plain corner."""
    corner = values[:, :-1, :-1]
    right, below = corner > values[:, :-1, 1:], corner > values[:, 1:, :-1]
    flat = np.concatenate([right.reshape(len(values), 64), below.reshape(len(values), 64)], axis=1)
    return np.packbits(flat.reshape(len(values), BITS, BANDS).transpose(0, 2, 1).reshape(len(values), 128), axis=1)


def _neighbours(key: np.ndarray, order: np.ndarray, words: np.ndarray, near: int):
    """Pairs with equal keys that differ in few bits: each with the next, those left with the one after it, and so on."""
    alive = np.arange(len(key))
    for step in range(1, HEAP + 1):
        alive = alive[alive + step < len(key)]
        alive = alive[key[alive] == key[alive + step]]
        if not len(alive):
            return
        for start in range(0, len(alive), CHUNK):
            part = alive[start : start + CHUNK]
            a, b = order[part], order[part + step]
            distance = ONES[(words[a] ^ words[b]).view(np.uint16)].sum(1, dtype=np.int64)
            close = distance <= near
            a, b = a[close], b[close]
            yield np.stack([np.minimum(a, b), np.maximum(a, b), distance[close]], axis=1)


def _together(thumbs: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Whether the grey values of each pair rise and fall together: a mask."""
    keep = np.zeros(len(pairs), dtype=bool)
    for start in range(0, len(pairs), CHUNK):
        a, b = (thumbs[pairs[start : start + CHUNK, side]].astype(np.float32) for side in (0, 1))
        a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
        scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
        keep[start : start + CHUNK] = (a * b).sum(1) >= ALIKE * scale
    return keep

"""Run-length encoding of masks, as COCO files have it.

A mask is read column by column, and its runs are counted, first of pixels outside, then inside, and so on: `[[0, 1], [0, 1]]` is
2, 2. A file has these counts as a list, or compressed as a string: from the fourth on, each is the difference to the count two
before it, in groups of 5 bits, lowest first, 6th bit set if more follow, the sign in the last group, and 48 added to each.
"""

from collections.abc import Sequence

import numpy as np

MAX_GROUPS = 8  # of a count: 40 bits


def count_runs(mask: np.ndarray) -> np.ndarray:
    """Return the lengths of the runs of a bool mask [H, W], int64; the first counts pixels outside and may be 0."""
    pixels = np.asarray(mask, bool).ravel(order="F")
    changes = np.flatnonzero(pixels[1:] != pixels[:-1]) + 1
    start = [0, 0] if pixels.size and pixels[0] else [0]
    return np.diff(np.concatenate([start, changes, [pixels.size]]))


def fill_runs(counts: Sequence[int] | np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the bool mask [H, W] of these runs; raise ValueError if they do not fill it exactly."""
    counts = np.asarray(counts)
    if counts.ndim != 1 or not (counts.size == 0 or np.issubdtype(counts.dtype, np.integer)):
        raise ValueError(f"the counts of a run-length encoding must be a list of integers, got {counts.dtype}")
    if counts.size and (counts.min() < 0 or counts.max() > height * width):
        raise ValueError(f"runs must be 0 to {height * width} pixels long, got {counts.min()} to {counts.max()}")
    if (total := int(counts.sum())) != height * width:
        raise ValueError(f"the runs have {total} pixels, but the mask has {width}×{height} = {height * width}")
    inside = np.arange(counts.size) % 2 == 1
    return np.repeat(inside, counts).reshape(width, height).T


def encode_rle(mask: np.ndarray) -> str:
    """Return a bool mask [H, W] as a compressed string, the `counts` of a COCO annotation."""
    values = count_runs(mask)
    values[3:] -= values[1:-2].copy()
    bits, groups = 5 * np.arange(MAX_GROUPS), np.ones(values.size, np.int64)
    for length in bits[1:]:
        groups += (values >= 1 << (length - 1)) | (values < -1 << (length - 1))
    codes = values[:, None] >> bits & 31  # [runs, MAX_GROUPS]
    group_index = np.arange(MAX_GROUPS)
    codes |= np.where(group_index < groups[:, None] - 1, 32, 0)
    return (codes[group_index < groups[:, None]] + 48).astype(np.uint8).tobytes().decode("ascii")


def decode_rle(counts: str | bytes, height: int, width: int) -> np.ndarray:
    """Return the bool mask [H, W] of a compressed string; raise ValueError if it is damaged or of another size."""
    return fill_runs(decode_counts(counts), height, width)


def decode_counts(counts: str | bytes) -> np.ndarray:
    """Return the lengths of the runs of a compressed string, int64."""
    # What is not ASCII becomes "&#…;", whose characters are refused below.
    data = counts.encode("ascii", "xmlcharrefreplace") if isinstance(counts, str) else counts
    codes = np.frombuffer(data, np.uint8).astype(np.int64) - 48
    if codes.size and (codes.min() < 0 or codes.max() > 63):
        raise ValueError("a compressed run-length encoding has characters from '0' to 'o' only")
    last = codes & 32 == 0
    ends = np.flatnonzero(last)
    if codes.size and not last[-1]:
        raise ValueError("a compressed run-length encoding ends in the middle of a count: it is truncated")
    starts = np.concatenate([[0], ends[:-1] + 1]) if ends.size else ends
    groups = ends - starts + 1
    if groups.max(initial=0) > MAX_GROUPS:
        raise ValueError(f"a count of a run-length encoding has {groups.max()} groups of 5 bits: at most {MAX_GROUPS}")
    group_index = np.arange(codes.size) - np.repeat(starts, groups)
    values = np.add.reduceat((codes & 31) << 5 * group_index, starts) if starts.size else codes
    values -= np.where(codes[ends] & 16, 1 << 5 * groups, 0)
    for first in (1, 2):  # differences to the count two before
        values[first::2] = np.cumsum(values[first::2])
    return values

"""Chance without memory: every random number of a sample is a function of (seed, epoch, index), and of its place in line.

A counter is mixed into 64 bits that look random (splitmix64, Steele et al. 2014), so nothing has to be drawn in order: one
number at a time in Python, or a table of them in NumPy, they are the same numbers. A stream keeps apart what must not depend
on each other: the order of an epoch, and every step of a pipeline.
"""

from dataclasses import dataclass

import numpy as np

ORDER = 2**32  # the stream of an epoch's order; the steps of a pipeline have the streams 0, 1, 2, …

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _mix_all(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def _base(seed: int, epoch: int, stream: int) -> int:
    key = _mix((seed + _STEP) & _MASK)
    key = _mix((key + (stream + 1) * _STEP) & _MASK)
    return _mix((key + (epoch + 1) * _STEP) & _MASK)


def bits(seed: int, epoch: int, indices: np.ndarray, count: int, stream: int = 0) -> np.ndarray:
    """64 random bits for each index and each of `count` places in line, uint64 [n, count]."""
    with np.errstate(over="ignore"):
        index = np.asarray(indices).astype(np.uint64) + np.uint64(1)
        keys = _mix_all(np.uint64(_base(seed, epoch, stream)) + index * np.uint64(_STEP))
        places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
        return _mix_all(keys[:, None] + places)


def uniforms(seed: int, epoch: int, indices: np.ndarray, count: int, stream: int = 0) -> np.ndarray:
    """Numbers in [0, 1) for each index, float64 [n, count]: the same however the indices are batched."""
    return (bits(seed, epoch, indices, count, stream) >> np.uint64(11)).astype(np.float64) * _UNIT


class Chance:
    """The same numbers for one index, one at a time."""

    __slots__ = ("_key", "epoch", "index", "seed", "stream")

    def __init__(self, seed: int, epoch: int, index: int, stream: int = 0) -> None:
        self.seed, self.epoch, self.index, self.stream = seed, epoch, index, stream
        self._key = _mix((_base(seed, epoch, stream) + (index + 1) * _STEP) & _MASK)

    def of(self, stream: int) -> "Chance":
        """The same sample's numbers in another stream, from the first."""
        return Chance(self.seed, self.epoch, self.index, stream)

    def at(self, place: int) -> float:
        """The number at a place in line, in [0, 1)."""
        return (_mix((self._key + (place + 1) * _STEP) & _MASK) >> 11) * _UNIT


@dataclass(frozen=True)
class Chances:
    """The numbers of a whole batch: those that `Chance` gives for each of its indices."""

    seed: int
    epoch: int
    indices: np.ndarray  # [n]
    stream: int = 0

    def of(self, stream: int) -> "Chances":
        return Chances(self.seed, self.epoch, self.indices, stream)

    def uniforms(self, count: int) -> np.ndarray:
        """The first `count` numbers of each sample, float64 [n, count]."""
        return uniforms(self.seed, self.epoch, self.indices, count, self.stream)

    @classmethod
    def single(cls, chance: Chance) -> "Chances":
        """A batch of one."""
        return cls(chance.seed, chance.epoch, np.array([chance.index]), chance.stream)

"""Counter-based random numbers, a pure function of (seed, epoch, index, position), and the order of samples they give.

The counter is mixed by splitmix64 (Steele et al. 2014). Numbers need not be drawn in order, and the scalar version in
Python and the vectorised one in NumPy give the same values. Streams are independent: the order of an epoch and every
step of a pipeline have their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.utils.devices import send_to_device

ORDER_STREAM = 2**32  # stream of an epoch's order; pipeline steps have the streams 0, 1, 2, …

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 2.0**-53
SHARD_WINDOW = 8  # shards whose images are mixed with each other


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _mix_array(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def _stream_key(seed: int, epoch: int, stream: int) -> int:
    key = _mix_int((seed + _GAMMA) & _MASK)
    key = _mix_int((key + (stream + 1) * _GAMMA) & _MASK)
    return _mix_int((key + (epoch + 1) * _GAMMA) & _MASK)


def random_bits(seed: int, epoch: int, indices: np.ndarray, count: int, stream: int = 0) -> np.ndarray:
    """Return 64 random bits for each index and each of `count` positions, uint64 [n, count]."""
    with np.errstate(over="ignore"):
        index = np.asarray(indices).astype(np.uint64) + np.uint64(1)
        keys = _mix_array(np.uint64(_stream_key(seed, epoch, stream)) + index * np.uint64(_GAMMA))
        positions = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        return _mix_array(keys[:, None] + positions)


def random_uniform(seed: int, epoch: int, indices: np.ndarray, count: int, stream: int = 0) -> np.ndarray:
    """Return numbers in [0, 1) for each index, float64 [n, count], independent of how indices are batched."""
    return (random_bits(seed, epoch, indices, count, stream) >> np.uint64(11)).astype(np.float64) * _UNIT


class SampleRandom:
    """Random numbers of one sample, one at a time."""

    __slots__ = ("_key", "epoch", "index", "seed", "stream")

    def __init__(self, seed: int, epoch: int, index: int, stream: int = 0) -> None:
        self.seed, self.epoch, self.index, self.stream = seed, epoch, index, stream
        self._key = _mix_int((_stream_key(seed, epoch, stream) + (index + 1) * _GAMMA) & _MASK)

    def with_stream(self, stream: int) -> "SampleRandom":
        """Return the same sample's numbers in another stream."""
        return SampleRandom(self.seed, self.epoch, self.index, stream)

    def uniform_at(self, position: int) -> float:
        """Return the number at a position, in [0, 1)."""
        return (_mix_int((self._key + (position + 1) * _GAMMA) & _MASK) >> 11) * _UNIT


@dataclass(frozen=True)
class BatchRandom:
    """Random numbers of a batch, equal to those of `SampleRandom` for each index."""

    seed: int
    epoch: int
    indices: np.ndarray  # [n]
    stream: int = 0

    def with_stream(self, stream: int) -> "BatchRandom":
        return BatchRandom(self.seed, self.epoch, self.indices, stream)

    def uniform(self, count: int) -> np.ndarray:
        """Return the first `count` numbers of each sample, float64 [n, count]."""
        return random_uniform(self.seed, self.epoch, self.indices, count, self.stream)

    def samples(self) -> Iterator[SampleRandom]:
        """Yield the random numbers of each sample."""
        return (SampleRandom(self.seed, self.epoch, index, self.stream) for index in self.indices.tolist())

    @classmethod
    def from_sample(cls, rng: SampleRandom) -> "BatchRandom":
        """Return a batch of one sample."""
        return cls(rng.seed, rng.epoch, np.array([rng.index]), rng.stream)


@dataclass(frozen=True)
class StepRandom:
    """Rows `first` to `first + count` of the random numbers of a training step's batch of `total` images.

    Every process draws for the whole batch and takes its own rows, so results do not depend on the number of processes
    or of gradient accumulation steps.
    """

    seed: int
    step: int
    first: int
    count: int
    total: int
    device: torch.device

    def uniform(self, columns: int, stream: int) -> Tensor:
        """Return [count, columns] in [0, 1). Different streams of a step are independent."""
        return self._take_rows(self._generator(stream).random((self.total, columns), dtype=np.float32))

    def beta(self, alpha: float, stream: int) -> Tensor:
        """Return [count] values of Beta(alpha, alpha), the mixing proportions of mixup."""
        return self._take_rows(self._generator(stream).beta(alpha, alpha, self.total).astype(np.float32))

    def choose(self, count: int, stream: int) -> int:
        """Return a number from 0 to `count` - 1, the same for all images and processes of the step."""
        return int(self._generator(stream).integers(count))

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, self.step * 64 + stream]))

    def _take_rows(self, rows: np.ndarray) -> Tensor:
        return send_to_device(torch.from_numpy(rows[self.first : self.first + self.count]), self.device)


def shuffle_indices(count: int, seed: int, epoch: int, shards: np.ndarray | None = None) -> np.ndarray:
    """Return a permutation of the images, int64 [n]. With shards: shuffle the shards, then images within a window."""
    draws = random_uniform(seed, epoch, np.arange(count), 1, ORDER_STREAM)[:, 0]
    if shards is None:
        return draws.argsort(kind="stable")
    known, shard = np.unique(shards, return_inverse=True)
    shard_rank = random_uniform(seed, epoch, np.arange(len(known)), 1, ORDER_STREAM + 1)[:, 0].argsort(kind="stable")
    return np.lexsort((draws, shard_rank.argsort()[shard] // SHARD_WINDOW))


def sample_with_replacement(weights: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Draw as many images as there are, with replacement, in proportion to their weights.

    The k-th repetition of an image is index + k * n, so that every repetition is augmented differently.
    """
    count = len(weights)
    ends = np.cumsum(weights, dtype=np.float64)
    draws = random_uniform(seed, epoch, np.arange(count), 1, ORDER_STREAM)[:, 0] * ends[-1]
    chosen = np.searchsorted(ends, draws, side="right").clip(0, count - 1)
    by_image = chosen.argsort(kind="stable")
    ordered = chosen[by_image]
    first = np.searchsorted(ordered, ordered)
    times = np.empty(count, dtype=np.int64)
    times[by_image] = np.arange(count) - first
    return chosen + count * times


def compute_balanced_weights(targets: np.ndarray) -> np.ndarray:
    """Return image weights under which every class is drawn equally often.

    With several labels the rarest counts; an image without labels gets the weight of the most frequent class.
    """
    if targets.ndim == 1:
        return 1.0 / np.bincount(targets)[targets]
    rare = 1.0 / np.maximum(1, targets.sum(0, dtype=np.int64))
    weights = (targets * rare).max(1)
    return np.where(weights > 0, weights, rare.min())


def resolve_weights(weights: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return weights per image from weights per image or per class."""
    weights = np.asarray(weights, dtype=np.float64)
    count, classes = len(targets), targets.shape[1] if targets.ndim == 2 else int(targets.max(initial=-1)) + 1
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("sampling weights must be a list of finite numbers >= 0, not all 0")
    if len(weights) == count:
        return weights
    if len(weights) < classes or (len(weights) > classes and targets.ndim == 2):
        raise ValueError(f"{len(weights)} sampling weights for {count} images of {classes} classes: give one each")
    return weights[targets] if targets.ndim == 1 else (targets * weights).max(1)

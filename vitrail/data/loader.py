"""Batches of images in an order that does not depend on the number of workers or processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.data.cache import ScoreMaps
from vitrail.data.dataset import Images
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import compute_balanced_weights, resolve_weights
from vitrail.data.transforms.pipeline import Pipeline, TrainPipeline, compute_crop_transforms
from vitrail.data.worker_pool import WorkerPool, log
from vitrail.data.workers import MAX_UNREADABLE, BatchPreparer, BatchRequest, ImageCache, PreparedBatch


@dataclass(frozen=True)
class Batch:
    """Images and targets, ready for a model."""

    # uint8 [B, C, H, W]; with several crops per image: rows of bytes [B, n]; sounds: float32 [B, 1, mel, frames]
    pixels: Tensor
    # int64 [B]; multi-label: float32 [B, K]; masks: uint8 [B, H, W]; tokens of captions: int32 [B, T]; with `maps`:
    # [B, 1 + n_columns]
    targets: Tensor
    indices: Tensor  # int64 [B]: indices into the Images


def split_share(images: int, parts: int) -> list[int]:
    """Return the bounds of the micro-batches of a process's share of a batch, from 0 to its size.

    They are even: mixing pairs images 2i and 2i + 1, and a pair must not be split.
    """
    parts = min(parts, images)
    return sorted({0, images, *(2 * round(images * part / parts / 2) for part in range(1, parts))})


class Loader:
    """Loader of one split: `iter_epoch` for training, `iter_once` for evaluation.

    `batch_size` is the global batch size; each of `world_size` processes gets its share of every batch. `weights` per
    image or per class, or "balanced", sample with replacement. `cache_bytes` limits the memory for decoded images (default:
    2 GiB or a quarter of the free memory, over all processes); it never changes a batch. `unreadable` maps the names of
    unreadable images to the reason; in an epoch they are replaced by others. More than `max_unreadable` in one batch, and
    more than half of it, is an error. With score `maps` of a teacher, the target columns are the label, the transform of
    the sample within its image, and the map of the image. Of images with masks, the targets are the masks, moved as the
    images; `unreadable` then names masks too. Token ids of captions are `targets` of int32, [n, T]. A killed
    worker process is replaced, once, and `report` gets a line; after a second death batches are prepared in this process, or
    without `fallback` WorkersLost is raised.
    A process trains on its share in `accumulate` micro-batches: they are so divided that the processes together compute the
    micro-batches that one process would.
    """

    def __init__(
        self,
        images: Images,
        targets: np.ndarray | Tensor | None,
        pipeline: Pipeline,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        workers: int = 0,
        weights: np.ndarray | Literal["balanced"] | None = None,
        cache_bytes: int | None = None,
        epochs: int | None = None,
        start_method: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        maps: ScoreMaps | None = None,
        max_unreadable: int = MAX_UNREADABLE,
        fallback: bool = True,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        targets_array = np.asarray(images.targets if targets is None else targets)
        if len(targets_array) != len(images):
            raise ValueError(f"got {len(targets_array)} targets for {len(images)} images")
        if batch_size < 1:
            raise ValueError(f"batch size must be >= 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")
        if batch_size % world_size:
            raise ValueError(f"batch size must be a multiple of the {world_size} processes, got {batch_size}")
        if workers < 0:
            raise ValueError(f"workers must be >= 0, got {workers}")
        if images.masks is not None:
            if weights is not None and (isinstance(weights, str) or len(weights) != len(images)):
                got = repr(weights) if isinstance(weights, str) else f"{len(weights)} per class"
                raise ValueError(f"sampling weights {got} do not apply to masks: give one for each of the images")
            if maps is not None:
                raise ValueError("score maps require one label per image: the targets are masks")
        if isinstance(weights, str):
            if weights != "balanced":
                raise ValueError(f"unknown sampling weights {weights!r}: use 'balanced' or a list of numbers")
            weights = compute_balanced_weights(targets_array)
        elif weights is not None:
            weights = resolve_weights(weights, targets_array)
        if maps is not None and len(maps) != len(images):
            raise ValueError(f"got {len(maps)} score maps for {len(images)} images")
        if maps is not None and targets_array.ndim != 1:
            raise ValueError("score maps require one label per image: the targets are multi-label")
        self.images, self.batch_size, self.accumulate, self.maps = images, batch_size, accumulate, maps
        integer = np.int64 if targets_array.ndim == 1 else np.int32 if targets_array.dtype == np.int32 else None
        self.targets = torch.from_numpy(targets_array.astype(integer or np.float32))
        self.unreadable: dict[str, str] = {}
        if cache_bytes is None:
            cache_bytes = ImageCache.default_limit() // world_size
        self._preparer = BatchPreparer(images, pipeline, seed, weights, cache_bytes, max_unreadable)
        self._requests = _RankRequests(self._preparer, batch_size, rank, world_size, accumulate, epochs)
        self.workers, self._progress = workers, progress
        self._cursor: _EpochCursor | None = None
        self._pool = WorkerPool(self._preparer, workers, start_method, fallback, report) if workers else None
        self._cached: list[PreparedBatch] | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of full batches in an epoch; the remainder is dropped."""
        return len(self.images) // self.batch_size

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the images of an epoch in order, int64 [n]."""
        return self._preparer.epoch_order(epoch) % max(1, len(self))

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this process's share of every training batch, from step `start` on; skipped steps are not read."""
        if not self.steps_per_epoch:
            raise ValueError(f"batch size {self.batch_size} exceeds the {len(self)} images: use a smaller batch size")
        if self._cursor is None or (self._cursor.epoch, self._cursor.step) != (epoch, start):
            self._cursor = _EpochCursor(self._prepare(self._requests.iter_training(epoch, start)), epoch, start)
        cursor = self._cursor
        for _ in range(start, self.steps_per_epoch):
            if cursor is not self._cursor:
                raise RuntimeError("another epoch was started while this one was being read")
            prepared = next(cursor.batches)
            cursor.step += 1
            if cursor.step == self.steps_per_epoch:
                cursor.epoch, cursor.step = cursor.epoch + 1, 0
            yield self._make_batch(prepared)

    def iter_once(self) -> Iterator[Batch]:
        """Yield every image once, in order, this process's share of every batch; the last batch may be smaller.

        All processes get the same number of batches, so the last one may be empty: pixels of [0, C, H, W]. Unreadable
        images are left out and listed in `unreadable`.
        """
        if self._cached is None:
            batches: list[PreparedBatch] | None = []
            n_bytes = 0
            for prepared in self._prepare(self._requests.iter_once()):
                yield self._make_batch(prepared)
                n_bytes += prepared.pixels.nbytes
                if n_bytes > self._preparer.max_bytes:
                    batches = None
                elif batches is not None:
                    batches.append(prepared)
            if batches is not None and isinstance(self._preparer.pipeline, Preprocessing):
                self._cached = batches  # evaluation is deterministic: reuse the batches
                self.close()
        else:
            yield from map(self._make_batch, self._cached)

    def close(self) -> None:
        """Stop the worker processes; reading again starts new ones."""
        self._cursor = None
        if self._pool is not None:
            self._pool.close()

    def _make_batch(self, prepared: PreparedBatch) -> Batch:
        self.unreadable.update(prepared.unreadable)
        if prepared.failure is not None:
            raise OSError(prepared.failure)
        indices = torch.from_numpy(prepared.indices)
        if self._preparer.has_masks:
            return Batch(prepared.pixels[:, :-1].contiguous(), prepared.pixels[:, -1].contiguous(), indices)
        targets, pipeline, rng = self.targets[indices], self._preparer.pipeline, prepared.rng
        if self.maps is not None and rng is not None and isinstance(pipeline, TrainPipeline):
            transforms = compute_crop_transforms(pipeline, self.maps.image_sizes(prepared.indices), rng)
            targets = torch.cat((targets[:, None].float(), self.maps.target_columns(prepared.indices, transforms)), 1)
        return Batch(prepared.pixels, targets, indices)

    def _prepare(self, requests: Iterator[BatchRequest]) -> Iterator[PreparedBatch]:
        self._cursor = None  # ends any iteration in progress
        self._preparer.fill_cache(self._progress)
        if self._pool is None:
            return map(self._preparer.make_batch_single_threaded, requests)
        return self._pool.run(requests)


@dataclass(frozen=True)
class _RankRequests:
    """The requests for this process's share of every batch."""

    preparer: BatchPreparer
    batch_size: int
    rank: int
    world_size: int
    accumulate: int
    epochs: int | None

    def iter_training(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        """Yield requests from this step on, over all epochs, so that workers prefetch across epoch boundaries."""
        share, first = self.find_share(), epoch
        while epoch == first or self.epochs is None or epoch < self.epochs:
            order = self.preparer.epoch_order(epoch)
            for step in range(start, self.preparer.count // self.batch_size):
                positions = step * self.batch_size + share
                yield BatchRequest(order[positions], epoch, positions)
            epoch, start = epoch + 1, 0

    def find_share(self) -> np.ndarray:
        """Return the positions of this process's images in a training batch: its part of each micro-batch, in order."""
        world, rank = self.world_size, self.rank
        bounds = pairwise(split_share(self.batch_size // world, self.accumulate))
        return np.concatenate([np.arange(a, b) + a * (world - 1) + rank * (b - a) for a, b in bounds])

    def iter_once(self) -> Iterator[BatchRequest]:
        """Yield requests for all images in order."""
        for start in range(0, self.preparer.count, self.batch_size):
            batch = np.arange(start, min(start + self.batch_size, self.preparer.count))
            yield BatchRequest(np.array_split(batch, self.world_size)[self.rank])


@dataclass
class _EpochCursor:
    """An iterator over batches, and the epoch and step of the next one."""

    batches: Iterator[PreparedBatch]
    epoch: int
    step: int

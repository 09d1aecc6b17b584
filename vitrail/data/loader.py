"""Batches of pictures: the same ones in the same order, whatever the number of workers and processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.data.maps import Maps
from vitrail.data.memory import Progress, budget
from vitrail.data.order import balanced, checked
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation, Prepare, Training
from vitrail.data.places import places
from vitrail.data.work import FEW, Prepared, Request, Work
from vitrail.data.workers import Crew


@dataclass(frozen=True)
class Batch:
    """Some pictures, ready for a model."""

    pixels: Tensor  # uint8 [B, C, H, W]; or rows of bytes [B, n], where a picture gives several crops
    targets: Tensor  # int64 [B]; or float32 [B, K], where a picture has several labels; [B, 1 + …] with `maps`
    indices: Tensor  # int64 [B]: places in the Pictures


class Loader:
    """Pictures of one split in batches, for training epoch by epoch or once for evaluation.

    `batch_size` counts the pictures of all processes together; each gets its part of every batch. `weights` for each
    picture or each class, or "balanced", draw with replacement. `memory` is how many bytes of decoded pictures may be kept;
    None for two gigabytes, or a quarter of what is free, over all processes. Only `weights` change what a batch holds.
    `unreadable` has the names of pictures that could not be read, with the reason: in an epoch another takes their place.
    More than `few` of one batch, and more than half of it, are an error: the data has gone away.
    With a teacher's `maps`, targets are the label, the place of the sample in its picture, and the picture's map, in columns.
    """

    def __init__(
        self,
        pictures: Pictures,
        targets: np.ndarray | Tensor | None,
        prepare: Prepare,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        weights: np.ndarray | Literal["balanced"] | None = None,
        memory: int | None = None,
        epochs: int | None = None,
        start_method: str | None = None,
        progress: Progress | None = None,
        maps: Maps | None = None,
        few: int = FEW,
    ) -> None:
        found = np.asarray(pictures.targets if targets is None else targets)
        if len(found) != len(pictures):
            raise ValueError(f"{len(found)} targets for {len(pictures)} pictures: give one for each")
        if batch_size < 1:
            raise ValueError(f"batch size {batch_size}: use 1 or more")
        if not 0 <= rank < world:
            raise ValueError(f"process {rank} of {world}: the first is 0")
        if batch_size % world:
            raise ValueError(f"batch size {batch_size} over {world} processes: use a multiple of {world}")
        if workers < 0:
            raise ValueError(f"{workers} workers: use 0 or more")
        if isinstance(weights, str):
            if weights != "balanced":
                raise ValueError(f"sampling weights {weights!r}: use 'balanced', or numbers")
            weights = balanced(found)
        elif weights is not None:
            weights = checked(weights, found)
        if maps is not None and len(maps) != len(pictures):
            raise ValueError(f"{len(maps)} score maps for {len(pictures)} pictures: give one for each")
        if maps is not None and found.ndim != 1:
            raise ValueError("pictures with several labels: score maps go with one label for each")
        self.maps = maps
        self.pictures, self.batch_size, self.rank, self.world = pictures, batch_size, rank, world
        self.targets = torch.from_numpy(found.astype(np.int64 if found.ndim == 1 else np.float32))
        self.unreadable: dict[str, str] = {}
        most = budget() // world if memory is None else memory  # the processes of a machine each keep their own
        self._work = Work(pictures, prepare, seed, weights, most, few)
        self._shares = _Shares(self._work, batch_size, rank, world, epochs)
        self._workers, self._method, self._progress = workers, start_method, progress
        self._running: _Running | None = None
        self._crew: Crew | None = None
        self._evaluated: list[Prepared] | None = None

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def steps(self) -> int:
        """Whole batches in an epoch; what is left over waits for another epoch's order."""
        return len(self.pictures) // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's pictures in order, int64 [n]."""
        return self._work.order(epoch) % max(1, len(self))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's part of every batch of a training epoch, from step `start` on; skipped steps are not read."""
        if not self.steps:
            raise ValueError(f"a batch of {self.batch_size} of {len(self)} pictures: use a smaller batch size")
        if self._running is None or (self._running.epoch, self._running.step) != (epoch, start):
            self._running = _Running(self._made(self._shares.training(epoch, start)), epoch, start)
        running = self._running
        for _ in range(start, self.steps):
            if running is not self._running:
                raise RuntimeError("another epoch was begun while this one was being read")
            prepared = next(running.made)
            running.step += 1
            if running.step == self.steps:
                running.epoch, running.step = running.epoch + 1, 0
            yield self._batch(prepared)

    def once(self) -> Iterator[Batch]:
        """Every picture once, in order, this process's part of every batch; the last batch is smaller.

        All processes get as many batches, so in the last one a process may get none: pixels of [0, C, H, W]. What cannot
        be read is left out, and named.
        """
        if self._evaluated is None:
            kept: list[Prepared] | None = []
            taken = 0
            for prepared in self._made(self._shares.once()):
                yield self._batch(prepared)
                taken += prepared.pixels.numel()
                if taken > self._work.most:
                    kept = None
                elif kept is not None:
                    kept.append(prepared)
            if kept is not None and isinstance(self._work.prepare, Evaluation):
                self._evaluated = kept  # nothing is left to chance, so the next time is the same
                self.close()
        else:
            yield from map(self._batch, self._evaluated)

    def close(self) -> None:
        """Ends the worker processes; asking for more starts others."""
        self._running = None
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def _batch(self, prepared: Prepared) -> Batch:
        self.unreadable.update(prepared.unreadable)
        if prepared.failure is not None:
            raise OSError(prepared.failure)
        indices = torch.from_numpy(prepared.indices)
        targets, prepare, chances = self.targets[indices], self._work.prepare, prepared.chances
        if self.maps is not None and chances is not None and isinstance(prepare, Training):
            where = places(prepare, self.maps.sizes(prepared.indices), chances)
            targets = torch.cat((targets[:, None].float(), self.maps.columns(prepared.indices, where)), 1)
        return Batch(prepared.pixels, targets, indices)

    def _made(self, requests: Iterator[Request]) -> Iterator[Prepared]:
        self._running = None  # what else was under way loses its workers
        self._work.ready(self._progress)
        if not self._workers:
            return map(self._work.alone, requests)
        if self._crew is None:
            self._crew = Crew(self._work, self._workers, self._method)
        return self._crew.run(requests)


@dataclass(frozen=True)
class _Shares:
    """Which pictures make up this process's part of every batch."""

    work: Work
    batch_size: int
    rank: int
    world: int
    epochs: int | None

    def training(self, epoch: int, start: int) -> Iterator[Request]:
        """From this step on over all epochs, so that workers need not wait for a new one to begin."""
        part, first = self.batch_size // self.world, epoch
        while epoch == first or self.epochs is None or epoch < self.epochs:
            order = self.work.order(epoch)
            for step in range(start, self.work.count // self.batch_size):
                place = step * self.batch_size + self.rank * part
                yield Request(order[place : place + part], epoch, place)
            epoch, start = epoch + 1, 0

    def once(self) -> Iterator[Request]:
        """All pictures in order."""
        for start in range(0, self.work.count, self.batch_size):
            batch = np.arange(start, min(start + self.batch_size, self.work.count))
            yield Request(np.array_split(batch, self.world)[self.rank])


@dataclass
class _Running:
    """Batches that are being made, and which comes next."""

    made: Iterator[Prepared]
    epoch: int
    step: int

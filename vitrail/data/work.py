"""What a worker does: from a request, a few numbers, to the pixels of a batch. It runs in this process or in another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data import memory
from vitrail.data.chance import Chance, Chances
from vitrail.data.decode import UNREADABLE, Decoded, opened
from vitrail.data.opening import named, reason
from vitrail.data.order import drawn, shuffled
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation, Prepare, with_channels
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.pixels import Pixels

TRIES = 50  # pictures in a row that cannot be read, until the data counts as gone
FEW = 4  # so many in one batch may happen; more than that, and more than half of it, may not


@dataclass(frozen=True)
class Request:
    """Which pictures, by their draws: index + n times how often the picture came before in this epoch."""

    draws: np.ndarray  # [B]
    epoch: int | None = None  # None for every picture once: then nothing takes the place of what cannot be read
    place: int = 0  # of the first in the epoch's order


@dataclass(frozen=True)
class Prepared:
    """A batch without its targets, and what went wrong with it."""

    pixels: Tensor  # uint8 [B, C, H, W]; or rows of bytes [B, n], where a picture gives several crops
    indices: np.ndarray  # [B]
    unreadable: tuple[tuple[str, str], ...] = ()
    failure: str | None = None
    chances: Chances | None = None  # what training samples were drawn with


class Work:
    """Everything that is needed to make a batch, small enough to be sent to a worker: large memory is shared."""

    def __init__(
        self, pictures: Pictures, prepare: Prepare, seed: int, weights: np.ndarray | None, most: int, few: int = FEW
    ) -> None:
        self.prepare, self.seed, self.weights, self.few = prepare, seed, weights, few
        self.count, self.shards = len(pictures), pictures.shards
        self.array: Tensor | None = None  # [N, H, W, c], pictures that are pixels from the start
        self.items: np.ndarray | None = None
        self.pictures: Pictures | None = pictures
        self.held: memory.Held | None = None
        self.most = most
        self._order: tuple[int, np.ndarray] | None = None
        self._ready = False
        if isinstance(pictures.store, Pixels):
            pixels = pictures.store.pixels
            pixels = pixels if pixels.flags.writeable and pixels.flags.c_contiguous else pixels.copy()
            array = torch.from_numpy(pixels)
            self.array, self.items, self.pictures = array if array.ndim == 4 else array[..., None], pictures.items, None

    def ready(self, progress: memory.Progress | None = None) -> None:
        """Takes small sets of pictures into memory, once and before there are workers, so that these share it."""
        if self._ready:
            return
        self._ready = True
        if self.pictures is not None and not isinstance(self.prepare, Evaluation):
            prepare = self.prepare
            if self.most > 0:
                self.held = memory.hold(
                    self.pictures, prepare.channels, prepare.size, prepare.turn, self.most, progress
                )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}

    def order(self, epoch: int) -> np.ndarray:
        """The draws of an epoch, [n]."""
        if self._order is None or self._order[0] != epoch:
            if self.weights is None:
                order = shuffled(self.count, self.seed, epoch, self.shards)
            else:
                order = drawn(self.weights, self.seed, epoch)
            self._order = (epoch, order)
        return self._order[1]

    def __getitem__(self, request: Request) -> Prepared:
        return self.made(request)

    def alone(self, request: Request) -> Prepared:
        """The same in the main process, where PyTorch would set all its threads on every little picture."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.made(request)
        finally:
            torch.set_num_threads(threads)

    def made(self, request: Request) -> Prepared:
        """The batch that was asked for."""
        prepare, indices = self.prepare, request.draws % self.count
        epoch = request.epoch or 0
        chances = Chances(self.seed, epoch, request.draws)
        by_batch = not isinstance(prepare, Evaluation) and prepare.in_batches
        if isinstance(prepare, Evaluation):
            if self._fits(prepare.preprocessing):
                return Prepared(self._gathered(indices).permute(0, 3, 1, 2).contiguous(), indices)
        elif by_batch and self.array is not None and prepare.cuts_batches:
            pixels = prepare.batch(prepare.cut(self._gathered(indices), chances), chances)
            return Prepared(pixels, indices, chances=chances)
        pixels = torch.empty((len(indices), *prepare.shape), dtype=torch.uint8)
        kept: list[int] = []
        unreadable: dict[str, str] = {}
        for row, draw in enumerate(request.draws.tolist()):
            found = self._one(int(indices[row]), Chance(self.seed, epoch, draw))
            if isinstance(found, tuple):
                unreadable |= (found,)
                if request.epoch is None:
                    continue
                for further in range(1, min(TRIES, self.count)):
                    order = self.order(request.epoch)
                    indices[row] = order[(request.place + row + further) % self.count] % self.count
                    found = self._one(int(indices[row]), Chance(self.seed, epoch, draw))
                    if isinstance(found, Tensor):
                        break
                    unreadable |= (found,)
            if isinstance(found, Tensor):
                pixels[row] = found
                kept.append(row)
        lost = len(unreadable)
        nothing = bool(lost) and not kept and request.epoch is not None  # of a training batch
        failure = gone(unreadable) if nothing or lost > max(self.few, len(indices) // 2) else None
        if len(kept) < len(indices):
            pixels, indices = pixels[kept], indices[kept]
        chances = Chances(self.seed, epoch, request.draws[kept])
        if by_batch and not failure:
            assert not isinstance(prepare, Evaluation)
            pixels = prepare.batch(pixels, chances)
        return Prepared(pixels, indices, tuple(unreadable.items()), failure, chances)

    def _fits(self, preprocessing: Preprocessing) -> bool:
        """Whether there is nothing to resize or to cut."""
        if self.array is None:
            return False
        size = (self.array.shape[1], self.array.shape[2])
        return preprocessing.resized(*size) == size == tuple(preprocessing.size)

    def _gathered(self, indices: np.ndarray) -> Tensor:
        """Whole pictures of the array, [B, H, W, C]."""
        assert self.array is not None
        assert self.items is not None
        pixels = self.array[torch.from_numpy(self.items[indices])]
        if pixels.shape[-1] == self.prepare.channels:
            return pixels
        return with_channels(pixels.movedim(-1, -3), self.prepare.channels).movedim(-3, -1)

    def _one(self, index: int, chance: Chance) -> Tensor | tuple[str, str]:
        """One picture, or its name and the reason why there is none. What batches are changed by is left to them."""
        prepare = self.prepare
        if isinstance(prepare, Evaluation):
            if self.array is not None and self.items is not None:
                return prepare(Image.fromarray(self.array[int(self.items[index])].squeeze(-1).numpy()))
            return self._read(index, prepare)
        held = self._in_memory(index, prepare.channels)
        if held is not None:
            cropped = prepare.cropped(held, chance)
        else:
            cropped = self._read(
                index, lambda image: prepare.cropped(opened(image, prepare.channels, prepare.turn), chance)
            )
        return cropped if isinstance(cropped, tuple) or prepare.in_batches else prepare.changed(cropped, chance)

    def _read(self, index: int, make: Callable[[Image.Image], Tensor]) -> Tensor | tuple[str, str]:
        assert self.pictures is not None
        name = self.pictures.name(index)
        try:
            with named(name), self.pictures.open(index) as image:
                return make(image)
        except UNREADABLE as error:
            return name, reason(error, name)

    def _in_memory(self, index: int, channels: int) -> Decoded | None:
        if self.array is not None and self.items is not None:
            pixels = self.array[int(self.items[index])]
            if pixels.shape[-1] != channels:
                pixels = with_channels(pixels.permute(2, 0, 1), channels).permute(1, 2, 0)
            return Decoded(pixels)
        return self.held.get(index) if self.held is not None else None


def gone(unreadable: dict[str, str]) -> str:
    """What to say when so much cannot be read that something must have happened."""
    name, why = next(iter(unreadable.items()))
    return f"{len(unreadable)} pictures of one batch cannot be read, {name} first ({why}): has the data gone away?"

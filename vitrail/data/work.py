"""What a worker does: from a request, a few numbers, to the pixels of a batch. It runs in this process or in another."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data import memory
from vitrail.data.chance import Chance, Chances
from vitrail.data.crops import Fit
from vitrail.data.decode import UNREADABLE, Decoded, opened
from vitrail.data.opening import named
from vitrail.data.order import drawn, shuffled
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation, Prepare, Training, with_channels
from vitrail.data.sources.pixels import Pixels

TRIES = 50  # pictures in a row that cannot be read, until the data counts as gone
FEW = 4  # so many in one batch may happen; more than that, and more than half of it, may not


@dataclass(frozen=True)
class Request:
    """Which pictures, by their draws: index + n times how often the picture came before in this epoch."""

    draws: np.ndarray  # [B]
    epoch: int = 0
    place: int = 0  # of the first in the epoch's order


@dataclass(frozen=True)
class Prepared:
    """A batch without its targets, and what went wrong with it."""

    pixels: Tensor  # uint8 [B, C, H, W]
    indices: np.ndarray  # [B]
    unreadable: tuple[tuple[str, str], ...] = ()
    failure: str | None = None


class Work:
    """Everything that is needed to make a batch, small enough to be sent to a worker: large memory is shared."""

    def __init__(
        self, pictures: Pictures, prepare: Prepare, seed: int, weights: np.ndarray | None, most: int | None
    ) -> None:
        self.prepare, self.seed, self.weights = prepare, seed, weights
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
        if self.pictures is not None and isinstance(self.prepare, Training):
            most = memory.budget() if self.most is None else self.most
            if most > 0:
                prepare = self.prepare
                self.held = memory.hold(self.pictures, prepare.channels, prepare.size, prepare.turn, most, progress)

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
        if isinstance(self.prepare, Evaluation):
            return self._evaluated(self.prepare, request)
        return self._trained(self.prepare, request)

    def _trained(self, prepare: Training, request: Request) -> Prepared:
        indices = request.draws % self.count
        chances = Chances(self.seed, request.epoch, request.draws)
        if self.array is not None and self.items is not None and prepare.in_batches and self._fits(prepare):
            pixels = self.array[torch.from_numpy(self.items[indices])].permute(0, 3, 1, 2).contiguous()
            return Prepared(prepare.batch(with_channels(pixels, prepare.channels), chances), indices)
        pixels = torch.empty((len(indices), prepare.channels, *prepare.size), dtype=torch.uint8)
        whole = not prepare.in_batches
        unreadable: dict[str, str] = {}
        failed = 0
        for row, draw in enumerate(request.draws.tolist()):
            chance = Chance(self.seed, request.epoch, draw)
            for attempt in range(TRIES):
                if attempt:
                    order = self.order(request.epoch)
                    indices[row] = order[(request.place + row + attempt) % self.count] % self.count
                found = self._one(prepare, int(indices[row]), chance, whole)
                if isinstance(found, Tensor):
                    pixels[row] = found
                    break
                unreadable |= (found,)
                failed += attempt == 0
            else:
                return Prepared(pixels[:0], indices[:0], tuple(unreadable.items()), gone(unreadable, TRIES))
        if failed > max(FEW, len(indices) // 2):
            return Prepared(pixels[:0], indices[:0], tuple(unreadable.items()), gone(unreadable, len(indices)))
        if not whole:
            pixels = prepare.batch(pixels, chances)
        return Prepared(pixels, indices, tuple(unreadable.items()))

    def _fits(self, prepare: Training) -> bool:
        """Whether there is nothing to cut: pictures are of the size wanted, and all of each is."""
        assert self.array is not None
        return isinstance(prepare.crop, Fit) and tuple(self.array.shape[1:3]) == tuple(prepare.size)

    def _one(self, prepare: Training, index: int, chance: Chance, whole: bool) -> Tensor | tuple[str, str]:
        """One picture, or its name and the reason why there is none."""
        make = prepare.picture if whole else prepare.cropped
        held = self._in_memory(index, prepare.channels)
        if held is not None:
            return make(held, chance)
        assert self.pictures is not None
        name = self.pictures.name(index)
        try:
            with named(name), self.pictures.open(index) as image:
                cropped = prepare.cropped(opened(image, prepare.channels, prepare.turn), chance)
        except UNREADABLE as error:
            return name, reason(error, name)
        return prepare.changed(cropped, chance) if whole else cropped

    def _in_memory(self, index: int, channels: int) -> Decoded | None:
        if self.array is not None and self.items is not None:
            pixels = self.array[int(self.items[index])]
            if pixels.shape[-1] != channels:
                pixels = with_channels(pixels.permute(2, 0, 1), channels).permute(1, 2, 0)
            return Decoded(pixels)
        return self.held.get(index) if self.held is not None else None

    def _evaluated(self, prepare: Evaluation, request: Request) -> Prepared:
        preprocessing = prepare.preprocessing
        if self.array is not None and self.items is not None:
            items = self.items[request.draws]
            size = (self.array.shape[1], self.array.shape[2])
            if preprocessing.resized(*size) == size == tuple(preprocessing.size):
                pixels = self.array[torch.from_numpy(items)].permute(0, 3, 1, 2).contiguous()
                return Prepared(with_channels(pixels, prepare.channels), request.draws)
            images = (self.array[int(i)].squeeze(-1).numpy() for i in items)
            rows = [prepare(Image.fromarray(image)) for image in images]
            return Prepared(stacked(rows, prepare), request.draws)
        assert self.pictures is not None
        rows, kept, unreadable = [], [], []
        for index in request.draws.tolist():
            name = self.pictures.name(index)
            try:
                with named(name), self.pictures.open(index) as image:
                    rows.append(prepare(image))
                kept.append(index)
            except UNREADABLE as error:
                unreadable.append((name, reason(error, name)))
        failure = None
        if len(unreadable) > max(FEW, len(request.draws) // 2):
            failure = gone(dict(unreadable), len(request.draws))
        return Prepared(stacked(rows, prepare), np.array(kept, dtype=np.int64), tuple(unreadable), failure)


def stacked(rows: list[Tensor], prepare: Prepare) -> Tensor:
    return torch.stack(rows) if rows else torch.empty((0, prepare.channels, *prepare.size), dtype=torch.uint8)


def reason(error: BaseException, name: str) -> str:
    """Why, in one line without the name."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix(f"{name}: ")


def gone(unreadable: dict[str, str], count: int) -> str:
    """What to say when so much cannot be read that something must have happened."""
    name, why = next(iter(unreadable.items()))
    return (
        f"{len(unreadable)} of {count} pictures in a row could not be read, {name} among them ({why}): "
        "has the data gone away?"
    )

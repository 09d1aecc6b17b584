"""From a picture to the bytes of a model's input: with chance for training, without for everything else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.augment import AugmentSlot, ChangeSlot
from vitrail.data.chance import Chance, Chances
from vitrail.data.crops import CropSlot, Fit, RandomResizedCrop, SimpleCrop
from vitrail.data.decode import Box, Decoded, Opened, opened
from vitrail.data.preprocessing import MODES, Pair, Preprocessing

CROPS = (RandomResizedCrop, SimpleCrop, Fit)
SMALL = 3 * 64 * 64  # bytes of a picture
VIEW = 2**40  # above every draw: what a view's chances are apart from the next one's


@dataclass(frozen=True)
class Training:
    """The steps of an augmentation. Those that say which part of the picture is taken come first; without one, all of it
    is fitted to the size."""

    steps: tuple[AugmentSlot, ...]
    size: Pair = (224, 224)
    channels: int = 3
    turn: bool = True

    def __post_init__(self) -> None:
        if self.channels not in MODES:
            raise ValueError(f"augmentation of {self.channels} channels: pictures have 1, 3 or 4")
        for place, step in enumerate(self.steps):
            if isinstance(step, CROPS) and place:
                raise ValueError(f"{type(step).__name__} is step {place + 1} of the augmentation: it must be the first")
            if isinstance(step, CROPS) and tuple(step.size) != tuple(self.size):
                raise ValueError(
                    f"{type(step).__name__} gives {step.size[0]}×{step.size[1]} pixels and the model takes "
                    f"{self.size[0]}×{self.size[1]}: use one size"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row of a batch."""
        return self.channels, *self.size

    @property
    def crop(self) -> CropSlot:
        """The step that cuts the picture out."""
        first = self.steps[0] if self.steps else None
        return first if isinstance(first, CROPS) else Fit(self.size)

    @property
    def changes(self) -> list[tuple[int, ChangeSlot]]:
        """What follows, each with its stream of chance."""
        return [(place + 1, step) for place, step in enumerate(self.steps) if not isinstance(step, CROPS)]

    def __call__(self, image: Image.Image, chance: Chance) -> Tensor:
        """A picture from its file: uint8 [C, H, W]."""
        return self.picture(opened(image, self.channels, self.turn), chance)

    def picture(self, source: Opened | Decoded, chance: Chance) -> Tensor:
        """The same from what is opened or in memory already."""
        return self.changed(self.cropped(source, chance), chance)

    def cropped(self, source: Opened | Decoded, chance: Chance) -> Tensor:
        """The first step alone."""
        return self.crop.picture(source, chance.of(0))

    def changed(self, pixels: Tensor, chance: Chance) -> Tensor:
        """The steps that follow it."""
        for stream, step in self.changes:
            pixels = step.picture(pixels, chance.of(stream))
        return pixels

    @property
    def in_batches(self) -> bool:
        """Whether what follows the crop is done to whole batches.

        The numbers are the same; small pictures gain by it, and large ones lose, since a batch of them leaves the caches.
        """
        small = self.channels * self.size[0] * self.size[1] <= SMALL
        return small and all(hasattr(step, "batch") for _, step in self.changes)

    @property
    def cuts_batches(self) -> bool:
        """Whether also the crop is made from whole batches, of pictures that have one size."""
        return hasattr(self.crop, "batch")

    def box(self, size: Pair, chance: Chance) -> Box:
        """The part that is cut from a picture of this size."""
        assert not isinstance(self.crop, SimpleCrop)
        return self.crop.box(*size, chance.of(0))

    def cut(self, pixels: Tensor, chances: Chances) -> Tensor:
        """The first step alone, from uint8 [B, H, W, C]."""
        assert not isinstance(self.crop, SimpleCrop)
        return self.crop.batch(pixels, chances.of(0))

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        """What follows the crop, on uint8 [B, C, H, W]."""
        for stream, step in self.changes:
            pixels = step.batch(pixels, chances.of(stream))  # pyright: ignore[reportAttributeAccessIssue]
        return pixels


@dataclass(frozen=True)
class MultiCrop:
    """Several crops of one picture: two large ones, each with its augmentation, and small ones that share a third.

    A row of a batch holds the bytes of all crops one after another, so that it is sliced and moved as any other; `apart`
    undoes that. Every crop has its own chance, by (seed, epoch, index, view).
    """

    first: Training
    second: Training
    local: Training
    count: int

    def __post_init__(self) -> None:
        if self.first.size != self.second.size:
            raise ValueError(f"large crops of {self.first.size} and {self.second.size}: use one size")
        for each in (self.first, self.second, self.local):
            if isinstance(each.crop, SimpleCrop):
                raise ValueError(
                    "SimpleCrop shows nearly all of a picture each time: views begin with RandomResizedCrop"
                )

    @property
    def views(self) -> tuple[Training, ...]:
        return self.first, self.second, *(self.local,) * self.count

    @property
    def size(self) -> Pair:
        return self.first.size

    @property
    def channels(self) -> int:
        return self.first.channels

    @property
    def turn(self) -> bool:
        return self.first.turn

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row of a batch: how many bytes the crops of a picture have together."""
        return (sum(each.channels * each.size[0] * each.size[1] for each in self.views),)

    def cropped(self, source: Opened | Decoded, chance: Chance) -> Tensor:
        """The first step of every crop, from a picture that is decoded once."""
        chances = [Chance(chance.seed, chance.epoch, chance.index + view * VIEW) for view in range(2 + self.count)]
        views = list(zip(self.views, chances, strict=True))
        if isinstance(source, Opened):
            source = source.reduced_for([(each.box(source.size, seen), each.size) for each, seen in views])
        return torch.cat([each.cropped(source, seen).flatten() for each, seen in views])

    def changed(self, row: Tensor, chance: Chance) -> Tensor:
        """The steps that follow."""
        large, small = self.apart(row[None])
        changed = [
            each.changed(crop, Chance(chance.seed, chance.epoch, chance.index + view * VIEW)).flatten()
            for view, (each, crop) in enumerate(zip(self.views, (*large[0], *small[0]), strict=True))
        ]
        return torch.cat(changed)

    @property
    def in_batches(self) -> bool:
        return all(each.in_batches for each in self.views)

    @property
    def cuts_batches(self) -> bool:
        return True

    def cut(self, pixels: Tensor, chances: Chances) -> Tensor:
        """The first step of every crop, from uint8 [B, H, W, C]."""
        small = self.local.cut(pixels.repeat_interleave(self.count, 0), seen(chances, range(2, 2 + self.count)))
        if self.first.crop == self.second.crop:  # more boxes of one size come together
            return self._joined(
                (self.first.cut(pixels.repeat_interleave(2, 0), seen(chances, (0, 1))), small), len(pixels)
            )
        large = self.first.cut(pixels, seen(chances, (0,))), self.second.cut(pixels, seen(chances, (1,)))
        return self._joined((*large, small), len(pixels))

    def batch(self, rows: Tensor, chances: Chances) -> Tensor:
        """What follows the crops, on rows: the small ones of all pictures at once."""
        large, small = self.apart(rows)
        changed = (
            self.first.batch(large[:, 0], seen(chances, (0,))),
            self.second.batch(large[:, 1], seen(chances, (1,))),
            self.local.batch(small.flatten(0, 1), seen(chances, range(2, 2 + self.count))),
        )
        return self._joined(changed, len(rows))

    def apart(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Large [B, 2, C, H, W] and small [B, n, C, h, w] crops of the pictures."""
        return apart(rows, self.channels, self.size, self.local.size)

    def _joined(self, crops: tuple[Tensor, ...], count: int) -> Tensor:
        """One row of bytes for each of so many pictures."""
        return torch.cat([each.reshape(count, math.prod(each.shape) // max(1, count)) for each in crops], 1)


def seen(chances: Chances, views: Sequence[int]) -> Chances:
    """The chances of these views of each picture, one after another."""
    return replace(chances, indices=(chances.indices[:, None] + np.array(views, dtype=np.int64) * VIEW).reshape(-1))


def apart(rows: Tensor, channels: int, large: Pair, small: Pair) -> tuple[Tensor, Tensor]:
    """What lies in rows of bytes: two large crops [B, 2, C, H, W], and as many small ones as there are, [B, n, C, h, w]."""
    border = 2 * channels * large[0] * large[1]
    return (
        rows[:, :border].unflatten(1, (2, channels, *large)),
        rows[:, border:].unflatten(1, (-1, channels, *small)),
    )


@dataclass(frozen=True)
class Evaluation:
    """What the model sees of a picture when nothing is left to chance: the preprocessing that is stored with it."""

    preprocessing: Preprocessing

    @property
    def size(self) -> Pair:
        return self.preprocessing.size

    @property
    def channels(self) -> int:
        return self.preprocessing.channels

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row of a batch."""
        return self.channels, *self.size

    def __call__(self, image: Image.Image, chance: Chance | None = None) -> Tensor:
        return self.preprocessing.pixels(image)


Prepare = Training | MultiCrop | Evaluation


def with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Grey, RGB or RGBA pixels [..., c, H, W] with as many channels as wanted, as `preprocessing.plain` makes them."""
    from vitrail.data.operations import luma

    have = pixels.shape[-3]
    if have == channels:
        return pixels
    rgb = pixels[..., :3, :, :] if have >= 3 else pixels.expand(*pixels.shape[:-3], 3, *pixels.shape[-2:])
    if channels == 1:
        return luma(rgb)
    if channels == 4:
        return torch.cat((rgb, torch.full_like(rgb[..., :1, :, :], 255)), dim=-3)
    return rgb

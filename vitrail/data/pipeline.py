"""From a picture to the bytes of a model's input: with chance for training, without for everything else."""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.augment import AugmentSlot, ChangeSlot
from vitrail.data.chance import Chance, Chances
from vitrail.data.crops import CropSlot, Fit, RandomResizedCrop, SimpleCrop
from vitrail.data.decode import Decoded, Opened, opened
from vitrail.data.preprocessing import MODES, Pair, Preprocessing

CROPS = (RandomResizedCrop, SimpleCrop, Fit)
SMALL = 3 * 64 * 64  # bytes of a picture


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

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        """What follows the crop, on uint8 [B, C, H, W]."""
        for stream, step in self.changes:
            pixels = step.batch(pixels, chances.of(stream))  # pyright: ignore[reportAttributeAccessIssue]
        return pixels


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

    def __call__(self, image: Image.Image, chance: Chance | None = None) -> Tensor:
        return self.preprocessing.pixels(image)


Prepare = Training | Evaluation


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

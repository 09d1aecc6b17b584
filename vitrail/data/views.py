"""DINO's views of a picture: two large crops, and small ones that show a part of it (multi-crop, Caron et al. 2020)."""

from dataclasses import dataclass

from torch import Tensor

from vitrail.data.augment import AugmentSlot, ColourJitter, Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.data.photometric import Blur, Grey, Solarise
from vitrail.data.pipeline import CROPS, MultiCrop, Training, apart
from vitrail.data.preprocessing import Pair

MOST = 64  # small crops of a picture


@dataclass(frozen=True)
class Views:
    """What is cut from a picture besides the first large crop, whose augmentation is the recipe's.

    The defaults are the published ones, for large crops of 224 pixels.
    """

    second: tuple[AugmentSlot, ...] = (
        RandomResizedCrop((224, 224), (0.4, 1.0)),
        Flip(),
        ColourJitter(0.4, 0.4, 0.2, 0.1, rate=0.8),
        Grey(0.2),
        Blur(0.1, (0.1, 2.0)),
        Solarise(0.2, 128),
    )
    local: tuple[AugmentSlot, ...] = (
        RandomResizedCrop((96, 96), (0.05, 0.4)),
        Flip(),
        ColourJitter(0.4, 0.4, 0.2, 0.1, rate=0.8),
        Grey(0.2),
        Blur(0.5, (0.1, 2.0)),
    )
    count: int = 8  # small crops
    size: tuple[int, int] = (96, 96)  # of a small crop

    def __post_init__(self) -> None:
        if not 0 <= self.count <= MOST:
            raise ValueError(f"{self.count} small crops of a picture: use 0 to {MOST}")

    def check(self, large: Pair, stride: int) -> None:
        """Refuses small crops that a model with patches of `stride` pixels cannot take, or that are no smaller than the large.

        Not when a value is made: `size` and the crop's own size are set one after the other.
        """
        h, w = self.size
        if min(h, w) < stride:
            raise ValueError(f"small crops of {h}×{w} pixels hold no patch of {stride}×{stride}: use {stride} or more")
        cut = self.local[0] if self.local else None
        if isinstance(cut, CROPS) and tuple(cut.size) != (h, w):
            raise ValueError(
                f"small crops are cut at {cut.size[0]}×{cut.size[1]} pixels and views.size is {h}×{w}: "
                f"set views.local.0.size=[{h},{w}] too"
            )
        if not self.count:
            return
        if h % stride or w % stride:
            near = tuple(max(stride, round(side / stride) * stride) for side in self.size)
            raise ValueError(
                f"small crops of {h}×{w} pixels hold no whole number of patches of {stride}×{stride}: "
                f"use {near[0]}×{near[1]}"
            )
        if h > large[0] or w > large[1]:
            raise ValueError(f"small crops of {h}×{w} are larger than the large ones of {large[0]}×{large[1]}")

    def prepare(self, first: tuple[AugmentSlot, ...], size: Pair, channels: int = 3, turn: bool = True) -> MultiCrop:
        """How a picture becomes a row of bytes, for a loader. `first` and `size` are of the large crops."""
        return MultiCrop(
            Training(first, size, channels, turn),
            Training(self.second, size, channels, turn),
            Training(self.local, self.size, channels, turn),
            self.count,
        )

    def apart(self, rows: Tensor, size: Pair, channels: int = 3) -> tuple[Tensor, Tensor]:
        """What a loader's rows hold: large crops uint8 [B, 2, C, H, W] and small ones [B, n, C, h, w]."""
        return apart(rows, channels, size, self.size)

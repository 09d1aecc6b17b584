"""Multi-crop of DINO: two large crops of an image and several small ones (Caron et al. 2020)."""

from dataclasses import dataclass

from torch import Tensor

from vitrail.data.preprocessing import ImageSize
from vitrail.data.transforms.augment import AugmentSlot, Blur, ColourJitter, Flip, Grey, Solarise
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.data.transforms.pipeline import CROP_TYPES, MultiCropPipeline, TrainPipeline, split_crops

MAX_LOCAL_CROPS = 64  # per image


@dataclass(frozen=True)
class Views:
    """Crops of an image in addition to the first large one, which uses the recipe's augmentation.

    The defaults are the published ones for large crops of 224 pixels.
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
        if not 0 <= self.count <= MAX_LOCAL_CROPS:
            raise ValueError(f"views.count must be 0 to {MAX_LOCAL_CROPS}, got {self.count}")

    def check_sizes(self, large: ImageSize, stride: int) -> None:
        """Raise an error if the small crops do not divide into patches of `stride` pixels or exceed the large crops.

        This is not checked at construction: `size` and the crop's own size are set one after the other.
        """
        h, w = self.size
        if min(h, w) < stride:
            raise ValueError(f"small crops of {h}×{w} pixels are smaller than a {stride}×{stride} patch")
        crop = self.local[0] if self.local else None
        if isinstance(crop, CROP_TYPES) and tuple(crop.size) != (h, w):
            got = f"{crop.size[0]}×{crop.size[1]}"
            raise ValueError(f"views.local crops {got} pixels, views.size is {h}×{w}: set views.local.0.size=[{h},{w}]")
        if not self.count:
            return
        if h % stride or w % stride:
            nearest = tuple(max(stride, round(side / stride) * stride) for side in self.size)
            hint = f"use {nearest[0]}×{nearest[1]}"
            raise ValueError(f"small crops of {h}×{w} pixels do not divide into {stride}×{stride} patches: {hint}")
        if h > large[0] or w > large[1]:
            raise ValueError(f"small crops of {h}×{w} pixels exceed the large crops of {large[0]}×{large[1]}")

    def build_pipeline(
        self, first: tuple[AugmentSlot, ...], size: ImageSize, channels: int = 3, turn: bool = True
    ) -> MultiCropPipeline:
        """Return the pipeline for a loader. `first` and `size` belong to the large crops."""
        return MultiCropPipeline(
            TrainPipeline(first, size, channels, turn),
            TrainPipeline(self.second, size, channels, turn),
            TrainPipeline(self.local, self.size, channels, turn),
            self.count,
        )

    def split_crops(self, rows: Tensor, size: ImageSize, channels: int = 3) -> tuple[Tensor, Tensor]:
        """Split a loader's rows into large crops uint8 [B, 2, C, H, W] and small ones [B, n, C, h, w]."""
        return split_crops(rows, channels, size, self.size)

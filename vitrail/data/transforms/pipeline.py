"""Pipelines from an image to uint8 model inputs for training, with one crop or, as in DINO, several (Caron et al. 2020)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.clip import Clip, describe_samples
from vitrail.data.dataset import Images, Media
from vitrail.data.decode import Box, DecodedImage, LazyImage, start_decoding
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import PIL_MODES, ImageSize, Preprocessing
from vitrail.data.rng import BatchRandom, SampleRandom
from vitrail.data.sound import Sound
from vitrail.data.transforms.augment import AugmentSlot, Blur, ChangeSlot, ColourJitter, Flip, Grey, Solarise
from vitrail.data.transforms.crops import CropSlot, Fit, PaddedCrop, RandomResizedCrop, ScaleJitter, SimpleCrop
from vitrail.data.transforms.operations import luma
from vitrail.data.transforms.spectrogram import SpectrogramSlot
from vitrail.data.transforms.user import BoundTransform, UserTransform, describe_missing, shorten
from vitrail.data.video import Video, read_clip

Slots = tuple[AugmentSlot, ...]  # as a recipe stores them
Steps = tuple[AugmentSlot | BoundTransform, ...]
CROP_TYPES = (RandomResizedCrop, SimpleCrop, ScaleJitter, Fit)
MAX_BATCHED_BYTES = 3 * 64 * 64  # per image; larger images are augmented one by one
VIEW_STRIDE = 2**40  # offset between the sample indices of two views, above every draw
MAX_LOCAL_CROPS = 64  # per image
SHARED_STEPS = (Flip(), ColourJitter(0.4, 0.4, 0.2, 0.1, rate=0.8), Grey(0.2))  # of all crops
IDENTITY_TRANSFORM = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))  # transform of a sample that shows the whole image


@dataclass(frozen=True)
class TrainPipeline:
    """Training pipeline: an optional crop first, then augmentations. Without a crop, `Fit` is used.

    With `masks`, rows have the mask of the image as last channel, moved with the image. Steps without `move_mask` are refused.
    With a `clip`, samples are clips of videos at a random start, [C, T, H, W]. All frames of a clip get the same random numbers,
    so that the crop stands still, and a step does to every frame what it does to a single image.

    With a `sound`, samples are log-mel spectrograms of sounds, float32 [1, mel bins, frames]: a random part of a longer sound, a
    shorter one at a random place. Only steps for spectrograms apply.
    """

    steps: Steps
    size: ImageSize = (224, 224)
    channels: int = 3
    turn: bool = True
    masks: bool = False
    clip: Clip | None = None
    sound: LogMel | None = None

    def __post_init__(self) -> None:
        if self.channels not in PIL_MODES:
            raise ValueError(f"augmentation supports 1, 3 or 4 channels, got {self.channels}")
        for step in self.steps:
            if not isinstance(step, BoundTransform) and isinstance(step, SpectrogramSlot) != (self.sound is not None):
                kind = "images" if self.sound is None else "sounds"
                raise ValueError(f"{type(step).__name__} does not apply to {kind}: remove it from the augmentation")
        for position, step in enumerate(self.steps):
            if self.masks and not isinstance(step, CROP_TYPES) and not hasattr(step, "move_mask"):
                slot = step.slot if isinstance(step, BoundTransform) else step
                user = isinstance(slot, UserTransform)
                name = f"the function {shorten(slot.description, 40)}" if user else type(slot).__name__
                raise ValueError(f"{name} cannot augment images with masks: remove it from the augmentation")
            if isinstance(step, UserTransform):
                raise ValueError(describe_missing(step, ()))
            if isinstance(step, CROP_TYPES) and position:
                raise ValueError(f"{type(step).__name__} must be the first step of the augmentation")
            if isinstance(step, CROP_TYPES) and tuple(step.size) != tuple(self.size):
                got, want = (f"{size[0]}×{size[1]}" for size in (step.size, self.size))
                raise ValueError(f"{type(step).__name__} size {got} differs from the model's {want}: use one size")

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of an output row: float32 for sounds, uint8 for all others."""
        return torch.uint8 if self.sound is None else torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an output row."""
        return self.channels + self.masks, *(() if self.clip is None else (self.clip.frames,)), *self.size

    @cached_property
    def crop(self) -> CropSlot:
        """Return the crop."""
        first = self.steps[0] if self.steps else None
        return first if isinstance(first, CROP_TYPES) else Fit(self.size)

    @cached_property
    def augmentations(self) -> list[tuple[int, ChangeSlot | SpectrogramSlot | BoundTransform]]:
        """Return the steps after the crop, each with its random stream."""
        return [(i + 1, s) for i, s in enumerate(self.steps) if not isinstance(s, (*CROP_TYPES, UserTransform))]

    def __call__(self, image: Image.Image | Video | Sound, rng: SampleRandom, mask: np.ndarray | None = None) -> Tensor:
        """Convert an image to uint8 [C, H, W], or with the mask of the upright image [C + 1, H, W]; a video to [C, T, H, W].

        Of a sound return the spectrogram, float32 [1, mel bins, frames].
        """
        return self.augment_image(self.crop_opened(image, mask, rng), rng)

    def crop_opened(self, image: Image.Image | Video | Sound, mask: np.ndarray | None, rng: SampleRandom) -> Tensor:
        """Apply the crop to an opened image, with the mask of the upright image, or to the frames of a random clip of a video.

        Of a sound return a random part of its spectrogram.
        """
        if self.sound is not None:
            if not isinstance(image, Sound):
                raise ValueError("the model takes sounds, got an image or a video: give sounds")
            room = image.count_frames(self.sound) - self.size[1]
            start = min(0, room) + int(rng.with_stream(0).uniform_at(0) * (abs(room) + 1))
            return image.spectrogram(self.sound, start, self.size[1])[None]
        if isinstance(image, Sound):
            raise ValueError("the model takes images, got a sound: give images, or a model that takes sounds")
        if self.clip is None:
            if isinstance(image, Video):
                raise ValueError("the model takes images, got a video: give images, or a model that takes clips")
            return self.crop_image(start_decoding(image, self.channels, self.turn, mask), rng)
        clip = self.clip
        if not isinstance(image, Video):
            raise ValueError(f"the model takes {describe_samples(clip.frames)}, got an image: give videos")

        def crop(frame: Image.Image) -> Tensor:
            return self.crop_image(start_decoding(frame, self.channels, self.turn), rng)

        return read_clip(image, clip.span, lambda count: clip.sample(count, rng), crop)

    def apply(self, source: LazyImage | DecodedImage, rng: SampleRandom) -> Tensor:
        """Convert an opened or decoded image to uint8 [C, H, W], with masks [C + 1, H, W]."""
        return self.augment_image(self.crop_image(source, rng), rng)

    def crop_image(self, source: LazyImage | DecodedImage, rng: SampleRandom) -> Tensor:
        """Apply the crop."""
        if self.masks != (source.mask is not None):
            raise ValueError(f"the pipeline is built with masks={self.masks}: give {'a' if self.masks else 'no'} mask")
        return self.crop.apply(source, rng.with_stream(0))

    def augment_image(self, row: Tensor, rng: SampleRandom) -> Tensor:
        """Apply the steps after the crop to uint8 [C, H, W], with masks [C + 1, H, W], or to all frames of [C, T, H, W]."""
        if row.ndim == 4:
            return torch.stack([self.augment_image(frame, rng) for frame in row.unbind(1)], 1)
        pixels = row[: self.channels]
        for stream, step in self.augmentations:
            pixels = step.apply(pixels, rng.with_stream(stream))
        if not self.masks:
            return pixels
        return torch.cat((pixels, self.move_mask(row[-1], rng)[None]))

    def move_mask(self, mask: Tensor, rng: SampleRandom) -> Tensor:
        """Move a mask, uint8 [H, W], as the steps after the crop move its image."""
        for stream, step in self.augmentations:
            mask = step.move_mask(mask, rng.with_stream(stream))  # pyright: ignore[reportAttributeAccessIssue]
        return mask

    @property
    def augments_batches(self) -> bool:
        """Return True if the steps after the crop run on whole batches.

        The results are the same. Small images are faster in batches; large ones are slower, since they exceed the CPU caches.
        """
        small = self.channels * self.size[0] * self.size[1] <= MAX_BATCHED_BYTES
        return small and all(hasattr(step, "apply_batch") for _, step in self.augmentations)

    @property
    def crops_batches(self) -> bool:
        """Return True if the crop supports batches of images of one size."""
        return hasattr(self.crop, "apply_batch")

    def sample_box(self, size: ImageSize, rng: SampleRandom) -> Box:
        """Sample the crop's box for an image of this size."""
        assert not isinstance(self.crop, PaddedCrop)
        return self.crop.sample_box(*size, rng.with_stream(0))

    def crop_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        """Apply the crop to uint8 [B, H, W, C]."""
        assert not isinstance(self.crop, PaddedCrop)
        return self.crop.apply_batch(pixels, rng.with_stream(0))

    def augment_batch(self, rows: Tensor, rng: BatchRandom) -> Tensor:
        """Apply the steps after the crop to uint8 [B, C, H, W], with masks [B, C + 1, H, W], or to clips [B, C, T, H, W]."""
        if rows.ndim == 5:
            frames = rows.transpose(1, 2).flatten(0, 1)
            repeated = replace(rng, indices=np.repeat(rng.indices, rows.shape[2]))
            return self.augment_batch(frames, repeated).unflatten(0, (len(rows), -1)).transpose(1, 2).contiguous()
        pixels = rows[:, : self.channels].contiguous()
        for stream, step in self.augmentations:
            pixels = step.apply_batch(pixels, rng.with_stream(stream))  # pyright: ignore[reportAttributeAccessIssue]
        if not self.masks:
            return pixels
        masks = [self.move_mask(mask, each) for mask, each in zip(rows[:, -1], rng.samples(), strict=True)]
        return torch.cat((pixels, torch.stack(masks)[:, None] if masks else rows[:, -1:]), 1)


@dataclass(frozen=True)
class MultiCropPipeline:
    """Several crops of one image: two large ones, each with its own steps, and small ones that share theirs.

    A row holds the bytes of all crops, so that batches are sliced and moved as usual; `split_crops` separates them. Every
    crop has its own random numbers, by (seed, epoch, index, view).
    """

    first: TrainPipeline
    second: TrainPipeline
    local: TrainPipeline
    n_local: int

    def __post_init__(self) -> None:
        if self.first.size != self.second.size:
            raise ValueError(f"large crops must have one size, got {self.first.size} and {self.second.size}")
        for pipeline in (self.first, self.second, self.local):
            if isinstance(pipeline.crop, PaddedCrop):
                name = type(pipeline.crop).__name__
                raise ValueError(f"{name} is no crop of a random part: use RandomResizedCrop as the crop of views")

    @property
    def views(self) -> tuple[TrainPipeline, ...]:
        return self.first, self.second, *(self.local,) * self.n_local

    @property
    def size(self) -> ImageSize:
        return self.first.size

    @property
    def channels(self) -> int:
        return self.first.channels

    @property
    def turn(self) -> bool:
        return self.first.turn

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an output row: the bytes of all crops."""
        return (sum(math.prod(pipeline.shape) for pipeline in self.views),)

    def crop_opened(self, image: Image.Image, mask: np.ndarray | None, rng: SampleRandom) -> Tensor:
        """Apply every crop to an opened image."""
        return self.crop_image(start_decoding(image, self.channels, self.turn, mask), rng)

    def crop_image(self, source: LazyImage | DecodedImage, rng: SampleRandom) -> Tensor:
        """Apply every crop to an image that is decoded once."""
        views = [(pipeline, rng_for_view(rng, view)) for view, pipeline in enumerate(self.views)]
        if isinstance(source, LazyImage):
            boxes = [(pipeline.sample_box(source.size, view_rng), pipeline.size) for pipeline, view_rng in views]
            source = source.decode_for_crops(boxes)
        return torch.cat([pipeline.crop_image(source, view_rng).flatten() for pipeline, view_rng in views])

    def augment_image(self, row: Tensor, rng: SampleRandom) -> Tensor:
        """Apply the steps after the crops to a row."""
        large, small = split_crops(row[None], self.channels, self.size, self.local.size)
        crops = zip(self.views, (*large[0], *small[0]), strict=True)
        augmented = [p.augment_image(crop, rng_for_view(rng, view)).flatten() for view, (p, crop) in enumerate(crops)]
        return torch.cat(augmented)

    @property
    def augments_batches(self) -> bool:
        return all(pipeline.augments_batches for pipeline in self.views)

    @property
    def crops_batches(self) -> bool:
        return True

    def crop_batch(self, pixels: Tensor, rng: BatchRandom) -> Tensor:
        """Apply every crop to uint8 [B, H, W, C]."""
        groups = [(self.first, (0,)), (self.second, (1,)), (self.local, range(2, 2 + self.n_local))]
        if self.first.crop == self.second.crop:  # one call resizes more boxes of equal size together
            groups[:2] = [(self.first, (0, 1))]
        repeated = [(p, pixels.repeat_interleave(len(views), 0), rng_for_views(rng, views)) for p, views in groups]
        return join_crops((p.crop_batch(images, view_rng) for p, images, view_rng in repeated), len(pixels))

    def augment_batch(self, rows: Tensor, rng: BatchRandom) -> Tensor:
        """Apply the steps after the crops to rows: the small crops of all images together."""
        large, small = split_crops(rows, self.channels, self.size, self.local.size)
        augmented = (
            self.first.augment_batch(large[:, 0], rng_for_views(rng, (0,))),
            self.second.augment_batch(large[:, 1], rng_for_views(rng, (1,))),
            self.local.augment_batch(small.flatten(0, 1), rng_for_views(rng, range(2, 2 + self.n_local))),
        )
        return join_crops(augmented, len(rows))


def rng_for_view(rng: SampleRandom, view: int) -> SampleRandom:
    """Return the random numbers of one view of a sample."""
    return SampleRandom(rng.seed, rng.epoch, rng.index + view * VIEW_STRIDE)


def rng_for_views(rng: BatchRandom, views: Sequence[int]) -> BatchRandom:
    """Return the random numbers of these views of each image, image by image."""
    return replace(rng, indices=(rng.indices[:, None] + np.array(views, dtype=np.int64) * VIEW_STRIDE).reshape(-1))


def join_crops(crops: Iterable[Tensor], count: int) -> Tensor:
    """Concatenate the crops of each image to one row of bytes."""
    return torch.cat([crop.reshape(count, math.prod(crop.shape) // max(1, count)) for crop in crops], 1)


def split_crops(rows: Tensor, channels: int, large: ImageSize, small: ImageSize) -> tuple[Tensor, Tensor]:
    """Split rows of bytes into two large crops [B, 2, C, H, W] and the small ones [B, n, C, h, w]."""
    n_large = 2 * channels * large[0] * large[1]
    large_crops = rows[:, :n_large].unflatten(1, (2, channels, *large))
    return large_crops, rows[:, n_large:].unflatten(1, (-1, channels, *small))


@dataclass(frozen=True)
class Views:
    """Crops of an image in addition to the first large one, which uses the recipe's augmentation.

    The defaults are the published ones for large crops of 224 pixels.
    """

    second: Slots = (RandomResizedCrop((224, 224), (0.4, 1.0)), *SHARED_STEPS, Blur(0.1, (0.1, 2.0)), Solarise(0.2))
    local: Slots = (RandomResizedCrop((96, 96), (0.05, 0.4)), *SHARED_STEPS, Blur(0.5, (0.1, 2.0)))
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
            hint = "use {}×{}".format(*(max(stride, round(side / stride) * stride) for side in self.size))
            raise ValueError(f"small crops of {h}×{w} pixels do not divide into {stride}×{stride} patches: {hint}")
        if h > large[0] or w > large[1]:
            raise ValueError(f"small crops of {h}×{w} pixels exceed the large crops of {large[0]}×{large[1]}")

    def build_pipeline(self, first: Steps, size: ImageSize, channels: int = 3, turn: bool = True) -> MultiCropPipeline:
        """Return the pipeline for a loader. `first` and `size` belong to the large crops."""
        large, second = (TrainPipeline(steps, size, channels, turn) for steps in (first, self.second))
        return MultiCropPipeline(large, second, TrainPipeline(self.local, self.size, channels, turn), self.count)

    def split_crops(self, rows: Tensor, size: ImageSize, channels: int = 3) -> tuple[Tensor, Tensor]:
        """Split a loader's rows into large crops uint8 [B, 2, C, H, W] and small ones [B, n, C, h, w]."""
        return split_crops(rows, channels, size, self.size)


Pipeline = TrainPipeline | MultiCropPipeline | Preprocessing  # the last for evaluation


def match_masks(pipeline: Pipeline, masks: bool) -> Pipeline:
    """Return the pipeline for images with masks or without; raise ValueError if it does not support masks."""
    if isinstance(pipeline, TrainPipeline):
        return replace(pipeline, masks=masks)
    if masks and isinstance(pipeline, MultiCropPipeline):
        raise ValueError("several crops of each image (views) are not supported for images with masks")
    return pipeline


def check_pipeline_media(pipeline: Pipeline, media: Media) -> None:
    """Raise ValueError if the pipeline makes clips and the data has images, or the other way round; likewise of sounds."""
    sound = None if isinstance(pipeline, MultiCropPipeline) else pipeline.sound
    if media == "sound" and isinstance(pipeline, MultiCropPipeline):
        raise ValueError("several crops of each image (views) are not supported for sounds")
    if (media == "sound") != (sound is not None):
        takes = "sounds" if sound is not None else "images or videos"
        raise ValueError(f"the data has {media}s, but the model takes {takes}: use a model that takes {media}s")
    clip = None if isinstance(pipeline, MultiCropPipeline) else pipeline.clip
    if media == "video" and isinstance(pipeline, MultiCropPipeline):
        raise ValueError("several crops of each image (views) are not supported for videos")
    if media == "video" and clip is None:
        raise ValueError("the data has videos, but the model takes images: use a model that takes clips")
    if media != "video" and clip is not None:
        raise ValueError(f"the data has images, but the model takes {describe_samples(clip.frames)}: give videos")


def convert_channels(
    pixels: Tensor, channels: int, to_grey: Callable[[Tensor], Tensor] = luma, opaque: int = 255
) -> Tensor:
    """Convert grey, RGB or RGBA pixels [..., c, H, W] to another number of channels, as `convert_image` does."""
    have = pixels.shape[-3]
    if have == channels:
        return pixels
    rgb = pixels[..., :3, :, :] if have >= 3 else pixels.expand(*pixels.shape[:-3], 3, *pixels.shape[-2:])
    if channels == 1:
        return to_grey(rgb)
    return rgb if channels == 3 else torch.cat((rgb, torch.full_like(rgb[..., :1, :, :], opaque)), dim=-3)


def compute_crop_transforms(pipeline: TrainPipeline, sizes: np.ndarray, rng: BatchRandom) -> np.ndarray:
    """Return the transforms from sample to image coordinates, float64 [B, 2, 3], for image sizes [B, 2]."""
    transforms = np.zeros((len(sizes), 3, 3))
    for row, (index, (height, width)) in enumerate(zip(rng.indices.tolist(), sizes.tolist(), strict=True)):
        sample_rng = SampleRandom(rng.seed, rng.epoch, index, 0)
        top, left, tall, wide = pipeline.crop.sample_relative_box(height, width, sample_rng)
        transforms[row] = ((wide, 0, left), (0, tall, top), (0, 0, 1))
    for stream, step in pipeline.augmentations:  # the inverse applies the last step first
        if hasattr(step, "affine_matrices"):
            matrices = step.affine_matrices(pipeline.size, rng.with_stream(stream))  # pyright: ignore[reportAttributeAccessIssue]
            transforms = transforms @ matrices
    return transforms[:, :2]


def read_image_size(images: Images, index: int, turn: bool) -> ImageSize:
    """Return the upright height and width of an image, from its header."""
    with images.open(index) as image:
        return start_decoding(image, 3, turn).size

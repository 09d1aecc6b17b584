"""Preprocessing of images for a model: resize, crop, normalise. Stored with the model and used everywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from vitrail.data.clip import Clip, describe_samples
from vitrail.data.dataset import IGNORED, Media
from vitrail.data.log_mel import LogMel
from vitrail.utils.devices import constant_tensor

if TYPE_CHECKING:
    from vitrail.data.images import ImageLike
    from vitrail.data.sound import Sound
    from vitrail.data.video import Video

ImageSize = tuple[int, int]  # height, width

FILTER_NAMES = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
FILTERS = {name: Image.Resampling[name.upper()] for name in FILTER_NAMES}
FITS, ENGINES, CENTRES = ("cover", "squash"), ("pillow", "torch"), ("even", "down")
MAX_PIXELS = 2**26  # of the resized image before cropping
MAX_CROP_PIXELS = 2**24  # of the model's input: 4096×4096
PIL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # image mode by number of channels


class NormalisationStats(TypedDict):
    """Mean and standard deviation of each channel, for values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET_STATS: NormalisationStats = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
INCEPTION_STATS: NormalisationStats = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP_STATS: NormalisationStats = {"mean": CLIP_MEAN, "std": CLIP_STD}


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of an image for a model. Calling it with an image returns the tensor [C, H, W].

    `fit` "cover" resizes the image to cover `resize`, keeping its aspect ratio (for a square: the shorter side gets that
    length, and the longer one is rounded down); "squash" resizes to exactly `resize`. Then `size` is cropped from the centre.
    `centre` rounds half of an odd margin: "even" as torchvision and timm do, "down" as transformers does. Values are scaled
    to [0, 1], minus `mean`, divided by `std`.

    `engine` resizes with Pillow, as timm does, or with torch, as transformers does. They differ mostly by 1 of 255, by up to
    10 for bicubic at sharp edges. Without `antialias`, torch interpolates the nearest pixels only, as TensorFlow does.

    `turn` applies the EXIF orientation. timm and transformers do not, so it is off for their checkpoints.

    With a `clip`, the model takes videos: every frame of a clip is prepared as an image, and tensors are [C, T, H, W].

    With a `sound`, the model takes sounds: an image is a log-mel spectrogram, float32 [1, mel bins, frames], of `size`. It is
    not scaled: values are minus `mean`, divided by `std`, which is twice the standard deviation for AST.
    """

    size: ImageSize = (224, 224)
    resize: ImageSize = (224, 224)
    fit: Literal["cover", "squash"] = "cover"
    interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bicubic"
    antialias: bool = True
    engine: Literal["pillow", "torch"] = "pillow"
    centre: Literal["even", "down"] = "even"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    turn: bool = False
    clip: Clip | None = field(default=None, metadata={"omit_default": True})
    sound: LogMel | None = field(default=None, metadata={"omit_default": True})

    def __post_init__(self) -> None:
        for name, limit in {"size": MAX_CROP_PIXELS, "resize": MAX_PIXELS}.items():
            size = getattr(self, name)
            if min(size) < 1 or max(size) > 65_536:
                raise ValueError(f"preprocessing {name}: each side must be 1 to 65,536 pixels, got {size}")
            if size[0] * size[1] > limit:
                raise ValueError(f"preprocessing {name}: must have at most {limit:,} pixels, got {size[0]}×{size[1]}")
        for name, known in {"interpolation": FILTERS, "fit": FITS, "engine": ENGINES, "centre": CENTRES}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: use {', '.join(known)}")
        if self.engine == "torch" and self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise ValueError(f"engine 'torch' has no {self.interpolation} interpolation: use engine 'pillow'")
        if self.engine == "pillow" and not self.antialias:
            raise ValueError("engine 'pillow' always antialiases: use engine 'torch' for antialias=False")
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"mean and std need one value per channel, got {len(self.mean)} and {len(self.std)}")
        if not all(math.isfinite(m) for m in self.mean):
            raise ValueError(f"mean must be finite, got {self.mean}")
        if not all(0 < s < math.inf for s in self.std):
            raise ValueError(f"std must be finite and > 0, got {self.std}")
        if self.sound is not None:
            self._check_sound(self.sound)

    def _check_sound(self, sound: LogMel) -> None:
        if self.clip is not None:
            raise ValueError("preprocessing has a clip and a sound: a model takes videos or sounds")
        if self.channels != 1:
            raise ValueError(f"preprocessing of sounds has one channel, got {self.channels}")
        if self.size[0] != sound.mel_bins:
            raise ValueError(f"preprocessing has {self.size[0]} rows, but its features have {sound.mel_bins} mel bins")

    @property
    def media(self) -> Media:
        """Return what the model takes: images, videos or sounds."""
        return "sound" if self.sound is not None else "image" if self.clip is None else "video"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of a row, before it is normalised: float32 for sounds, uint8 for all others."""
        return torch.uint8 if self.sound is None else torch.float32

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an image's pixels, (C, H, W), or of a clip's, (C, T, H, W)."""
        return self.channels, *(() if self.clip is None else (self.clip.frames,)), *self.size

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of a sample at evaluation: of its pixels, or of those of several views, (V, C, T, H, W)."""
        return self.shape if self.clip is None or self.clip.views == 1 else (self.clip.views, *self.shape)

    def __call__(self, image: "ImageLike | Video | Sound | Sequence[ImageLike | Video | Sound]") -> Tensor:
        """Convert an image to the normalised float32 tensor [C, H, W], or a list of images to a batch [B, C, H, W].

        An image is a path, bytes, a PIL image, or the pixels of one: an array [H, W, C] or a tensor [C, H, W]. With a clip, a
        video is a path, the bytes of a file, an array [T, H, W, C] or an opened video; the tensor is [C, T, H, W]. With a
        sound, it is a path, the bytes of a file, a waveform [n] or [n, channels] at the model's rate, or an opened sound; the
        tensor is [1, mel bins, frames].
        """
        from vitrail.data.decode import name_image_errors
        from vitrail.data.images import name_image, to_image
        from vitrail.data.sound import to_sound
        from vitrail.data.video import to_video

        if isinstance(image, list | tuple):
            return torch.stack([self(each) for each in image])
        if self.sound is not None:
            with to_sound(image, self.sound.sample_rate) as sound:
                return self.normalise(self.to_pixels(sound))
        if self.clip is not None:
            with to_video(image) as video:
                return self.normalise(self.to_pixels(video))
        if isinstance(image, Image.Image):
            return self.normalise(self.to_pixels(image))
        with name_image_errors(name_image(image)), to_image(image, name_image(image)) as opened:
            return self.normalise(self.to_pixels(opened))

    def to_pixels(self, image: "Image.Image | Video | Sound") -> Tensor:
        """Resize and crop the image, uint8 [C, H, W], or the frames of the central clip of a video, [C, T, H, W].

        Of a sound return the spectrogram, float32 [1, mel bins, frames].
        """
        self.check_item(image)
        if self.sound is not None:
            sound: Any = image
            sound.rate = sound.rate or self.sound.sample_rate
            start = self.sound.find_start(sound.count_frames(self.sound), self.size[1])
            return sound.spectrogram(self.sound, start, self.size[1])[None]
        if self.clip is not None:
            return replace(self, clip=replace(self.clip, clips=1, crops=1)).to_views(image)[0]
        assert isinstance(image, Image.Image)
        return self._crop_view(self._resize_image(image), 0, 1)

    @property
    def frames(self) -> int | None:
        """Return the frames of a clip; None for images."""
        return None if self.clip is None else self.clip.frames

    def check_frames(self, frames: int | None, remedy: str) -> None:
        """Raise ValueError unless the samples are the clips of so many frames, or the images (None), that a model takes."""
        if self.frames != frames:
            gives, takes = describe_samples(self.frames), describe_samples(frames)
            raise ValueError(f"the model takes {takes} and the preprocessing gives {gives}: {remedy}")

    def check_item(self, item: object) -> None:
        """Raise ValueError unless the item is what the model takes: an image, an opened video or an opened sound."""
        from vitrail.data.sound import Sound
        from vitrail.data.video import Video

        got = "a video" if isinstance(item, Video) else "a sound" if isinstance(item, Sound) else "an image"
        if (self.sound is not None) != (got == "a sound") or (self.clip is not None) != (got == "a video"):
            takes = "sounds" if self.sound is not None else describe_samples(self.frames)
            raise ValueError(f"the model takes {takes}, got {got}")

    def to_views(self, video: "Image.Image | Video | Sound") -> Tensor:
        """Resize and crop the frames of all views of a video, uint8 [V, C, T, H, W]: the clips, each with its crops."""
        from vitrail.data.video import Video, read_clip

        self.check_item(video)
        clip = self.clip
        if clip is None or not isinstance(video, Video):
            raise ValueError("only models that take clips have several views of a video")

        def make_crops(frame: Image.Image) -> Tensor:  # [crops, C, H, W]
            resized = self._resize_image(frame)
            return torch.stack([self._crop_view(resized, index, clip.crops) for index in range(clip.crops)])

        return torch.cat([read_clip(video, clip.span, partial(clip.spread, k), make_crops) for k in range(clip.clips)])

    def _resize_image(self, image: Image.Image) -> np.ndarray:
        """Convert and resize the image, uint8 [C, h, w]."""
        image = convert_image(ImageOps.exif_transpose(image) if self.turn else image, self.channels)
        if not image.height or not image.width:
            raise ValueError(f"empty image: {image.width}×{image.height} pixels")
        height, width = self.resized_size(image.height, image.width)
        if height * width > MAX_PIXELS:
            old = f"{image.width}×{image.height}"
            raise ValueError(f"image of {old} pixels is too elongated: resized, it would have {width}×{height} pixels")
        if (image.height, image.width) == (height, width):
            pixels = np.asarray(image)
        elif self.engine == "pillow":
            pixels = np.asarray(image.resize((width, height), FILTERS[self.interpolation]))
        else:
            pixels = interpolate(np.asarray(image), (height, width), self.interpolation, self.antialias)
        return to_channels_first(pixels)

    def _crop_view(self, pixels: np.ndarray, index: int, count: int) -> Tensor:
        """Crop [C, h, w] at one of `count` places along the side with the larger margin; of one place, the centre."""
        margins = [pixels.shape[axis] - length for axis, length in zip((1, 2), self.size, strict=True)]
        if count > 1 and max(margins) > 0:
            axis = int(np.argmax(margins))
            start = round(index * margins[axis] / (count - 1))
            pixels = pixels[(slice(None),) * (1 + axis) + (slice(start, start + self.size[axis]),)]
        return torch.from_numpy(np.array(self.crop_centre(pixels), order="C"))

    def to_row(self, image: "Image.Image | Video | Sound", mask: np.ndarray | None) -> Tensor:
        """Return the pixels of an image, uint8 [C, H, W], or with the mask of the upright image [C + 1, H, W].

        Of a video, the row is its clip, [C, T, H, W], or its views, [V, C, T, H, W]; of a sound, its spectrogram.
        """
        from vitrail.data.decode import read_orientation, to_stored_mask

        if mask is None or not isinstance(image, Image.Image):
            return self.to_pixels(image) if self.clip is None or self.clip.views == 1 else self.to_views(image)
        orientation = read_orientation(image)
        stored = to_stored_mask(mask, (image.height, image.width), orientation)
        return torch.cat((self.to_pixels(image), self.to_mask(mask if self.turn else stored)[None]))

    def to_mask(self, mask: np.ndarray) -> Tensor:
        """Resize and crop the mask of an image, uint8 [H, W], as `to_pixels` does the image; padding is IGNORED."""
        resized = resize_mask(mask, self.resized_size(*mask.shape))
        return torch.from_numpy(np.array(self.crop_centre(resized[None], IGNORED)[0], order="C"))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise rows [..., C, H, W], or of clips [..., C, T, H, W], to float32, on the tensor's device."""
        shape = (-1, 1, 1) if self.clip is None else (-1, 1, 1, 1)
        mean, std = (constant_tensor(tuple(v), pixels.device).view(shape) for v in (self.mean, self.std))
        values = pixels.float() / 255 if self.sound is None else pixels
        return (values - mean) / std

    def resized_size(self, height: int, width: int) -> ImageSize:
        """Return the size that an image of this size is resized to, before the crop."""
        h, w = self.resize
        if self.fit == "squash":
            return h, w
        if h == w:
            shorter, longer = min(height, width), max(height, width)
            longer = int(h * longer / shorter)
            return (h, longer) if height <= width else (longer, h)
        scale = max(h / height, w / width)
        return max(h, round(height * scale)), max(w, round(width * scale))

    def crop_centre(self, pixels: np.ndarray, fill: int = 0) -> np.ndarray:
        """Crop the centre of [C, h, w]; pad with the fill value where the image is smaller."""
        for axis, length in zip((1, 2), self.size, strict=True):
            margin = pixels.shape[axis] - length
            if margin < 0:
                padding = [(0, 0)] * 3
                padding[axis] = (-margin // 2, (1 - margin) // 2)
                pixels = np.pad(pixels, padding, constant_values=fill)
            elif margin:
                start = round(margin / 2) if self.centre == "even" else margin // 2
                pixels = pixels[(slice(None),) * axis + (slice(start, start + length),)]
        return pixels

    def describe(self) -> str:
        """Return the pipeline in one line."""
        (h, w), (rh, rw) = self.size, self.resize
        resize = f"resize to {rh}×{rw}" if self.fit == "squash" else f"resize to cover {rh}×{rw}"
        resize = f"resize shorter side to {rh}" if self.fit == "cover" and rh == rw else resize
        crop = "" if self.fit == "squash" and (h, w) == (rh, rw) else f", centre crop {h}×{w}"
        filter = self.interpolation + ("" if self.antialias else " without antialias")
        mean, std = (", ".join(f"{v:g}" for v in values) for values in (self.mean, self.std))
        if self.sound is not None:
            part = f"{w} frames ({self.sound.seconds(w):g} s) from the {self.sound.align}"
            return f"{self.sound.describe()}; {part}; mean {mean}; std {std}"
        clip = "" if self.clip is None else f"{self.clip.describe()}; "
        return f"{clip}{resize}, {filter} ({self.engine}){crop}; mean {mean}; std {std}"

    def with_size(self, size: ImageSize) -> "Preprocessing":
        """Return the preprocessing for another image size, with the same share of the image cropped."""
        if self.sound is not None:
            return replace(self, size=size, resize=size, sound=replace(self.sound, mel_bins=size[0]))
        resize = (round(self.resize[0] * size[0] / self.size[0]), round(self.resize[1] * size[1] / self.size[1]))
        return replace(self, size=size, resize=(max(size[0], resize[0]), max(size[1], resize[1])))

    def with_frames(self, frames: int) -> "Preprocessing":
        """Return the preprocessing for clips of another number of frames; that of images is unchanged."""
        return self if self.clip is None else replace(self, clip=replace(self.clip, frames=frames))

    def with_resize_factor(self, factor: float) -> "Preprocessing":
        """Return the preprocessing with the same size cropped from an image resized to `factor` times it."""
        return replace(self, resize=(round(self.size[0] * factor), round(self.size[1] * factor)))

    def with_channels(self, channels: int) -> "Preprocessing":
        """Return the preprocessing for another number of channels: one takes the mean, more repeat from the first."""
        if channels == self.channels:
            return self
        if channels == 1:
            return replace(self, mean=(sum(self.mean) / self.channels,), std=(sum(self.std) / self.channels,))
        mean, std = ((v * channels)[:channels] for v in (self.mean, self.std))
        return replace(self, mean=mean, std=std)


def sound_preprocessing(sound: LogMel, frames: int, mean: float, std: float) -> Preprocessing:
    """Return the preprocessing of sounds for a model of `frames` frames: the features minus `mean`, divided by `std`."""
    size = (sound.mel_bins, frames)
    return Preprocessing(size, size, "squash", mean=(mean,), std=(std,), sound=sound)


def convert_image(image: Image.Image, channels: int) -> Image.Image:
    """Convert any image to 8-bit grey, RGB or RGBA; 16-bit values are scaled, not clipped."""
    if channels not in PIL_MODES:
        raise ValueError(f"images have 1, 3 or 4 channels, the model takes {channels}: pass tensors instead")
    mode = PIL_MODES[channels]
    if image.mode == mode:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.float64)
        peak = 65_535 if image.mode != "F" else max(1.0, float(values.max(initial=0.0)))
        if image.mode == "I" and values.max(initial=0.0) <= 255:
            peak = 255
        image = Image.fromarray((values.clip(0, peak) * (255 / peak)).round().astype(np.uint8))
    elif "transparency" in image.info and image.mode in ("P", "L", "RGB"):
        image = image.convert("RGBA")
    return image.convert(mode)


def to_channels_first(pixels: np.ndarray) -> np.ndarray:
    """Convert [H, W] or [H, W, C] to [C, H, W]."""
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def resize_mask(mask: np.ndarray, size: ImageSize, box: tuple[int, int, int, int] | None = None) -> np.ndarray:
    """Return a mask [H, W], or the box (top, left, height, width) of it, at another size.

    An output pixel is the mask's pixel at its centre. Where the box exceeds the mask, the edge is repeated.
    """
    top, left, height, width = box or (0, 0, *mask.shape)
    if mask.shape == tuple(size) == (height, width):
        return mask
    rows, columns = (
        np.arange(length, 2 * count * length, 2 * length) // (2 * count) + start  # whole numbers: no rounding
        for start, length, count in zip((top, left), (height, width), size, strict=True)
    )
    if top < 0 or left < 0 or top + height > mask.shape[0] or left + width > mask.shape[1]:
        rows, columns = rows.clip(0, mask.shape[0] - 1), columns.clip(0, mask.shape[1] - 1)
    return mask[rows].take(columns, axis=1)  # several times faster than indexing both at once


def interpolate(pixels: np.ndarray, size: ImageSize, mode: str, antialias: bool) -> np.ndarray:
    """Resize with torch: in uint8 arithmetic with antialiasing, in floating point without."""
    image = torch.from_numpy(np.array(to_channels_first(pixels))).unsqueeze(0)
    if mode == "nearest":
        out = F.interpolate(image, size=size, mode="nearest")
    elif antialias:
        out = F.interpolate(image, size=size, mode=mode, antialias=True, align_corners=False)
    else:
        out = F.interpolate(image.float(), size=size, mode=mode, align_corners=False).round().clamp(0, 255)
    out = out.to(torch.uint8)[0].numpy()
    return out[0] if pixels.ndim == 2 else out.transpose(1, 2, 0)

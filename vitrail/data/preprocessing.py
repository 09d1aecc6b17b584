"""Resize, crop, normalise: the one definition, stored with the model and used wherever an image meets it."""

import math
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

Pair = tuple[int, int]  # height, width

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
FITS, ENGINES, CENTRES = ("cover", "squash"), ("pillow", "torch"), ("even", "down")
MOST_PIXELS = 2**26  # of an image before it is cropped
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of the image, by channels


class Colours(TypedDict):
    """What a value between 0 and 1 is normalised with, a number for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET: Colours = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF: Colours = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP: Colours = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before the model sees it. Called with a PIL image, it gives the tensor [C, H, W].

    The image is resized to `resize`, either so that it covers it with its proportions kept (for a square: the smaller side
    gets that length, and the longer one is rounded down), or squashed to exactly that. `size` is then cut from the middle;
    where an odd number of pixels is left over, `centre` says how half of it is rounded: to the nearest even number, as
    torchvision and timm do, or down, as transformers does. Values go to 0…1, minus `mean`, divided by `std`.

    `engine` is whose arithmetic resizes: Pillow's, which timm uses, or torch's, which transformers uses. They differ by 1 of
    255 mostly, and bicubic at sharp edges by ten. Without `antialias`, torch looks at the nearest pixels alone, however much
    it shrinks, as TensorFlow does.

    `turn` honours the EXIF orientation that cameras write. timm's and transformers' pipelines do not, so what comes from
    their checkpoints has it off.
    """

    size: Pair = (224, 224)
    resize: Pair = (224, 224)
    fit: Literal["cover", "squash"] = "cover"
    interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bicubic"
    antialias: bool = True
    engine: Literal["pillow", "torch"] = "pillow"
    centre: Literal["even", "down"] = "even"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    turn: bool = False

    def __post_init__(self) -> None:
        for name in ("size", "resize"):
            if min(getattr(self, name)) < 1 or max(getattr(self, name)) > 65_536:
                raise ValueError(f"preprocessing {name} {getattr(self, name)}: each side is 1 to 65,536 pixels")
        for name, known in {"interpolation": FILTERS, "fit": FITS, "engine": ENGINES, "centre": CENTRES}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: use {', '.join(known)}")
        if self.engine == "torch" and self.interpolation not in ("nearest", "bilinear", "bicubic"):
            raise ValueError(f"torch cannot resize by {self.interpolation}: use the engine 'pillow'")
        if self.engine == "pillow" and not self.antialias:
            raise ValueError("Pillow always averages what it shrinks: without antialias, use the engine 'torch'")
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"{len(self.mean)} means and {len(self.std)} deviations: give one of each for a channel")
        if not all(math.isfinite(m) for m in self.mean):
            raise ValueError(f"mean {self.mean}: every mean must be a number")
        if not all(0 < s < math.inf for s in self.std):
            raise ValueError(f"std {self.std}: every deviation must be above 0")

    @property
    def channels(self) -> int:
        return len(self.mean)

    def __call__(self, image: Image.Image) -> Tensor:
        """A PIL image to the normalised float32 tensor [C, H, W]."""
        return self.normalise(self.pixels(image))

    def pixels(self, image: Image.Image) -> Tensor:
        """The image resized and cropped, as bytes: uint8, [C, H, W]."""
        image = plain(ImageOps.exif_transpose(image) if self.turn else image, self.channels)
        if not image.height or not image.width:
            raise ValueError(f"a picture of {image.width}×{image.height} pixels")
        height, width = self.resized(image.height, image.width)
        if height * width > MOST_PIXELS:
            raise ValueError(
                f"a picture of {image.width}×{image.height} pixels is too thin: with its proportions kept, it would be "
                f"resized to {width}×{height}"
            )
        if (image.height, image.width) == (height, width):
            pixels = np.asarray(image)
        elif self.engine == "pillow":
            pixels = np.asarray(image.resize((width, height), FILTERS[self.interpolation]))
        else:
            pixels = interpolate(np.asarray(image), (height, width), self.interpolation, self.antialias)
        return torch.from_numpy(np.array(self.cropped(channels_first(pixels)), order="C"))

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [..., C, H, W] to what the model takes, on the tensor's own device."""
        mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std

    def resized(self, height: int, width: int) -> Pair:
        """The size that an image of this size is resized to, before the crop."""
        h, w = self.resize
        if self.fit == "squash":
            return h, w
        if h == w:
            short, long = min(height, width), max(height, width)
            longer = int(h * long / short)
            return (h, longer) if height <= width else (longer, h)
        scale = max(h / height, w / width)
        return max(h, round(height * scale)), max(w, round(width * scale))

    def cropped(self, pixels: np.ndarray) -> np.ndarray:
        """The middle of [C, h, w]; black around it where the image is smaller."""
        for axis, want in zip((1, 2), self.size, strict=True):
            spare = pixels.shape[axis] - want
            if spare < 0:
                around = [(0, 0)] * 3
                around[axis] = (-spare // 2, (1 - spare) // 2)
                pixels = np.pad(pixels, around)
            elif spare:
                start = round(spare / 2) if self.centre == "even" else spare // 2
                pixels = pixels[(slice(None),) * axis + (slice(start, start + want),)]  # a view, until all is cut
        return pixels

    def in_words(self) -> str:
        """The pipeline in a line."""
        (h, w), (rh, rw) = self.size, self.resize
        how = f"squashed to {rh}×{rw}" if self.fit == "squash" else f"over {rh}×{rw}"
        how = f"smaller side to {rh}" if self.fit == "cover" and rh == rw else how
        crop = "" if self.fit == "squash" and (h, w) == (rh, rw) else f", middle {h}×{w}"
        filter = self.interpolation + ("" if self.antialias else " without antialias")
        mean, std = (", ".join(f"{v:g}" for v in values) for values in (self.mean, self.std))
        return f"{how} {filter} ({self.engine}){crop}; mean {mean}; std {std}"

    def at(self, size: Pair) -> "Preprocessing":
        """The same for a model of another image size: as much of the image is seen."""
        resize = (round(self.resize[0] * size[0] / self.size[0]), round(self.resize[1] * size[1] / self.size[1]))
        return replace(self, size=size, resize=(max(size[0], resize[0]), max(size[1], resize[1])))

    def larger(self, factor: float) -> "Preprocessing":
        """The same size cut from an image resized to so much more."""
        return replace(self, resize=(round(self.size[0] * factor), round(self.size[1] * factor)))

    def with_channels(self, channels: int) -> "Preprocessing":
        """The same for another number of channels: one takes the mean of all, more begin again from the first."""
        if channels == self.channels:
            return self
        if channels == 1:
            return replace(self, mean=(sum(self.mean) / self.channels,), std=(sum(self.std) / self.channels,))
        mean, std = ((v * channels)[:channels] for v in (self.mean, self.std))
        return replace(self, mean=mean, std=std)


def plain(image: Image.Image, channels: int) -> Image.Image:
    """Any kind of picture as 8-bit grey, RGB or RGBA: 16-bit values are scaled, not cut off."""
    if channels not in MODES:
        raise ValueError(f"a picture has 1, 3 or 4 channels and the model takes {channels}: give it tensors instead")
    mode = MODES[channels]
    if image.mode == mode:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image, dtype=np.float64)
        top = 65_535 if image.mode != "F" else max(1.0, float(values.max(initial=0.0)))
        if image.mode == "I" and values.max(initial=0.0) <= 255:
            top = 255
        image = Image.fromarray((values.clip(0, top) * (255 / top)).round().astype(np.uint8))
    elif "transparency" in image.info and image.mode in ("P", "L", "RGB"):
        image = image.convert("RGBA")
    return image.convert(mode)


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def interpolate(pixels: np.ndarray, size: Pair, mode: str, antialias: bool) -> np.ndarray:
    """Resizing by torch: its arithmetic for bytes with antialiasing, in floating point without."""
    image = torch.from_numpy(np.array(channels_first(pixels))).unsqueeze(0)
    if mode == "nearest":
        out = F.interpolate(image, size=size, mode="nearest")
    elif antialias:
        out = F.interpolate(image, size=size, mode=mode, antialias=True, align_corners=False)
    else:
        out = F.interpolate(image.float(), size=size, mode=mode, align_corners=False).round().clamp(0, 255)
    out = out.to(torch.uint8)[0].numpy()
    return out[0] if pixels.ndim == 2 else out.transpose(1, 2, 0)

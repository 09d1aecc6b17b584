"""Masks of images of any size, by a runtime of a segmentation model: from the whole image, or from overlapping windows.

K classes, C channels, images of H×W pixels, models of h×w.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from vitrail.data.preprocessing import Preprocessing, convert_image
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.reports.masks import OPACITY, Colour, choose_colours, overlay_mask, parse_colour
from vitrail.tasks.base import encode_jpeg
from vitrail.tasks.masks import predict_mask

MaskMode = Literal["whole", "sliding"]
MODES: tuple[str, ...] = get_args(MaskMode)
OVERLAP = 1 / 3  # of the side of a window, at least
WINDOWS, WINDOW_BYTES = 4, 2**27  # computed at once, and the logits of them, at most
MAX_MAP_BYTES = 2**31  # of the probabilities of an image, for sliding windows
Run = Callable[[np.ndarray], np.ndarray]  # of uint8 pixels [B, C, h, w] to logits [B, K, h, w]


@dataclass(frozen=True)
class MaskOptions:
    """Options of the inference of masks.

    "whole" resizes the image to the model's size, and the logits to the image's. "sliding" resizes the image so that it covers
    the model's size, keeping its aspect ratio, and averages the probabilities of windows of the model's size. `flip` averages
    the probabilities of the image and of its mirror image, `scales` those of the resized image at these multiples of its size.
    """

    inference: str = "whole"
    flip: bool = False
    scales: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.inference not in MODES:
            raise ValueError(f"unknown inference={self.inference!r}: use {' or '.join(MODES)}")
        if not self.scales or not all(1 <= scale < math.inf for scale in self.scales):
            raise ValueError(f"scales= must be one or more numbers >= 1, got {self.scales}")
        if self.inference == "whole" and tuple(self.scales) != (1.0,):
            raise ValueError("scales= needs inference='sliding': the model sees a whole image at its own size")


@dataclass(frozen=True)
class MaskInput:
    """An image, read and resized."""

    size: tuple[int, int]  # height and width of the image, and so of its mask
    pixels: tuple[np.ndarray, ...]  # uint8 [C, …] at every scale
    image: np.ndarray | None = None  # uint8 [H, W, 3], for an overlay

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pixels, of the image and of the mask that it will get."""
        image = 0 if self.image is None else self.image.nbytes
        return sum(pixels.nbytes for pixels in self.pixels) + image + self.size[0] * self.size[1]


@dataclass(frozen=True)
class MaskOutput:
    """A predicted mask, and a JPEG of it over its image if that was asked for."""

    mask: np.ndarray  # uint8 [H, W]
    overlay: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes + len(self.overlay or b"")


@dataclass(frozen=True)
class MaskInference:
    """The way from images to masks. Images are upright: their EXIF orientation is applied."""

    preprocessing: Preprocessing
    options: MaskOptions
    classes: int  # of the model
    overlay_colours: tuple[Colour, ...] | None = None  # None: no overlays

    def prepare(self, image: Image.Image) -> MaskInput:
        """Return the pixels of an image at the sizes that the model sees."""
        if self.options.inference == "whole":
            return prepare_whole(image, self.preprocessing, self.overlay_colours is not None)
        upright = ImageOps.exif_transpose(image)
        size = upright.height, upright.width
        colour = np.array(convert_image(upright, 3)) if self.overlay_colours else None
        steps = [self.fit_size(size, scale) for scale in sorted(self.options.scales)]
        resized = (replace(self.preprocessing, size=step, resize=step, fit="squash") for step in steps)
        return MaskInput(size, tuple(step.to_pixels(upright).numpy() for step in resized), colour)

    def count_bytes(self, item: MaskInput | MaskOutput) -> int:
        """Return the bytes of an image, or of its mask."""
        return item.nbytes

    def fit_size(self, size: tuple[int, int], scale: float) -> tuple[int, int]:
        """Return the size at which an image just covers the model's size, times a scale."""
        (height, width), (h, w) = size, self.preprocessing.size
        factor = scale * max(h / max(1, height), w / max(1, width))
        fitted = max(h, round(height * factor)), max(w, round(width * factor))
        if 4 * self.classes * fitted[0] * fitted[1] > MAX_MAP_BYTES:
            need = f"{width}×{height} pixels × {self.classes} classes need more than {MAX_MAP_BYTES / 2**30:g} GB"
            raise ValueError(f"{need} in sliding windows: use inference='whole' or smaller scales")
        return fitted

    def run(self, run: Run, inputs: Sequence[MaskInput]) -> Iterator[MaskOutput | None]:
        """Yield the mask of each image; None if the model's outputs are not finite."""
        for item, scores in zip(inputs, self.compute_scores(run, inputs), strict=True):
            if not np.isfinite(scores).all():
                yield None
                continue
            mask, overlay = predict_mask(torch.from_numpy(scores), item.size), None
            if item.image is not None and self.overlay_colours is not None:
                drawn = overlay_mask(item.image, mask, self.overlay_colours, OPACITY)
                overlay = encode_jpeg(Image.fromarray(drawn))
            yield MaskOutput(mask, overlay)

    def compute_scores(self, run: Run, inputs: Sequence[MaskInput]) -> Iterator[np.ndarray]:
        """Yield the logits or mean probabilities of each image, float32 [K, …]; their size is not that of the image."""
        if self.options.inference == "sliding":
            for item in inputs:
                yield self.average_scales(run, item)
        else:
            pixels = np.stack([item.pixels[0] for item in inputs])
            yield from self.average_flips(run, pixels) if self.options.flip else run(pixels)

    def average_flips(self, run: Run, pixels: np.ndarray) -> np.ndarray:
        """Return the probabilities of images [B, C, h, w], averaged with those of their mirror images if asked for."""
        mean = softmax(run(pixels))
        if self.options.flip:
            mean += softmax(run(np.ascontiguousarray(pixels[..., ::-1])))[..., ::-1]
            mean /= 2
        return mean

    def average_scales(self, run: Run, item: MaskInput) -> np.ndarray:
        """Return the probabilities of an image, averaged over its scales at the size of the smallest."""
        mean = self.slide(run, item.pixels[0])
        for pixels in item.pixels[1:]:
            larger = torch.from_numpy(self.slide(run, pixels))
            for total, values in zip(mean, larger, strict=True):  # a class at a time
                total += F.interpolate(values[None, None], mean.shape[1:], mode="bilinear", antialias=True)[
                    0, 0
                ].numpy()
        mean /= len(item.pixels)
        return mean

    def slide(self, run: Run, pixels: np.ndarray) -> np.ndarray:
        """Return the probabilities of resized pixels [C, H, W], averaged over windows of the model's size."""
        (h, w), (height, width) = self.preprocessing.size, pixels.shape[1:]
        corners = [(top, left) for top in place_windows(height, h) for left in place_windows(width, w)]
        total, counts = np.zeros((self.classes, height, width), np.float32), np.zeros((height, width), np.float32)
        step = max(1, min(WINDOWS, WINDOW_BYTES // (4 * self.classes * h * w)))
        for start in range(0, len(corners), step):
            part = corners[start : start + step]
            windows = np.stack([pixels[:, top : top + h, left : left + w] for top, left in part])
            for (top, left), values in zip(part, self.average_flips(run, windows), strict=True):
                total[:, top : top + h, left : left + w] += values
                counts[top : top + h, left : left + w] += 1
        total /= counts
        return total


def prepare_whole(image: Image.Image, preprocessing: Preprocessing, keep: bool) -> MaskInput:
    """Return an upright image at the model's size; `keep` keeps it at its own size too, for an overlay."""
    upright = ImageOps.exif_transpose(image)
    pixels = preprocessing.to_pixels(upright).numpy()
    colour = np.array(convert_image(upright, 3)) if keep else None
    return MaskInput((upright.height, upright.width), (pixels,), colour)


def class_colours(contract: ModelContract) -> tuple[Colour, ...]:
    """Return the colour of each class of a segmentation model: its own, or that of the default palette."""
    if contract.colours is not None:
        return tuple(map(parse_colour, contract.colours))
    return choose_colours(contract.labels or ())


def place_windows(length: int, side: int) -> list[int]:
    """Return the first pixels of windows that cover a length evenly and overlap by at least a third."""
    step = max(1, math.floor(side * (1 - OVERLAP)))
    count = math.ceil((length - side) / step) + 1
    return np.linspace(0, length - side, count).round().astype(int).tolist()


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits [B, K, h, w]."""
    return torch.from_numpy(logits).softmax(1).numpy()

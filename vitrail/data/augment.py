"""What happens to a picture once its part is cut out: slots that choose by chance and leave the doing to `operations`.

Every slot takes one picture or a whole batch, with the same numbers for both. 3-Augment, made for photographs, takes pictures
one by one.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data import operations
from vitrail.data.affine import unmoved
from vitrail.data.chance import Chance, Chances, bits
from vitrail.data.crops import ATTEMPTS, Fit, RandomResizedCrop, SimpleCrop, check_range, check_rate, reflected
from vitrail.data.photometric import Blur, Grey, Solarise
from vitrail.data.preprocessing import Pair
from vitrail.data.randaugment import RandAugment

WITHIN = 2**16  # streams of a slot's own parts


@dataclass(frozen=True)
class Flip:
    """Left and right change places."""

    rate: float = 0.5

    def __post_init__(self) -> None:
        check_rate("flip", self.rate)

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return pixels.flip(-1) if chance.at(0) < self.rate else pixels

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        chosen = torch.from_numpy(chances.uniforms(1)[:, 0] < self.rate)
        return torch.where(chosen[:, None, None, None], pixels.flip(-1), pixels)

    def moves(self, size: Pair, chances: Chances) -> np.ndarray:
        """Where each point comes from, [B, 3, 3]: see `places`."""
        found = unmoved(len(chances.indices))
        found[chances.uniforms(1)[:, 0] < self.rate, 0] = (-1, 0, 1)
        return found


@dataclass(frozen=True)
class PadCrop:
    """A shift by up to `padding` pixels, for small pictures: what comes in from outside is black, or mirrored."""

    padding: int = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __post_init__(self) -> None:
        if not 0 <= self.padding <= 1024:
            raise ValueError(f"padding {self.padding}: use 0 to 1,024 pixels")
        if self.mode not in ("zero", "reflect"):
            raise ValueError(f"unknown padding {self.mode!r}: use zero or reflect")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return self.batch(pixels[None], Chances.single(chance))[0]

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        pad, (height, width) = self.padding, pixels.shape[-2:]
        around = (pad, pad, pad, pad)
        padded = F.pad(pixels, around) if self.mode == "zero" else reflected(pixels, around)
        out = torch.empty_like(pixels)
        for place, (top, left) in enumerate(self._corners(chances).tolist()):
            out[place] = padded[place, :, top : top + height, left : left + width]
        return out

    def moves(self, size: Pair, chances: Chances) -> np.ndarray:
        """Where each point comes from, [B, 3, 3]: see `places`."""
        found = unmoved(len(chances.indices))
        found[:, 1::-1, 2] = (self._corners(chances) - self.padding) / size
        return found

    def _corners(self, chances: Chances) -> np.ndarray:
        """Top and left in the padded picture, int64 [B, 2]."""
        return (chances.uniforms(2) * (2 * self.padding + 1)).astype(np.int64)


@dataclass(frozen=True)
class Warp:
    """A small turn, zoom, shear and shift at once, for small pictures of things that have no left and right, like digits.

    Each is drawn evenly between its amount and the opposite. What comes in from outside is black.
    """

    turn: float = 12.0  # degrees
    zoom: float = 0.12
    shear: float = 0.1
    shift: float = 0.06  # of the side

    def __post_init__(self) -> None:
        for name, most in (("turn", 180.0), ("zoom", 0.9), ("shear", 1.0), ("shift", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"a warp's {name} of {getattr(self, name)}: use 0 to {most:g}")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return self.batch(pixels[None], Chances.single(chance))[0]

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        height, width = pixels.shape[-2:]
        drawn = torch.from_numpy(self._drawn(chances)).float()
        turn, zoom, shear, across, down = drawn[:, :, None, None].unbind(1)  # [B, 1, 1] each
        y = ((torch.arange(height) + 0.5) * 2 / height - 1)[None, :, None]
        x = ((torch.arange(width) + 0.5) * 2 / width - 1)[None, None]
        cos, sin = turn.cos() * (1 + zoom), turn.sin() * (1 + zoom)
        places = torch.stack((cos * x + (shear - sin) * y + across, sin * x + cos * y + down), -1)  # [B, H, W, 2]
        moved = F.grid_sample(pixels.float(), places, mode="bilinear", padding_mode="zeros", align_corners=False)
        return moved.round_().clamp_(0, 255).to(torch.uint8)

    def moves(self, size: Pair, chances: Chances) -> np.ndarray:
        """Where each point comes from, [B, 3, 3]: see `places`."""
        turn, zoom, shear, across, down = self._drawn(chances).T
        cos, sin = np.cos(turn) * (1 + zoom), np.sin(turn) * (1 + zoom)
        found = unmoved(len(chances.indices))
        for row, (along_x, along_y, shift) in enumerate(((cos, shear - sin, across), (sin, cos, down))):
            # Drawn for the middle as 0 and the edges as ±1; here they are 0 and 1.
            found[:, row] = np.stack((along_x, along_y, (shift + 1 - along_x - along_y) / 2), 1)
        return found

    def _drawn(self, chances: Chances) -> np.ndarray:
        """Turn, zoom, shear and the shifts across and down, [B, 5]."""
        amounts = np.array([math.radians(self.turn), self.zoom, self.shear, 2 * self.shift, 2 * self.shift])
        return (2 * chances.uniforms(5) - 1) * amounts


@dataclass(frozen=True)
class ColourJitter:
    """Brightness, contrast, saturation and hue, each by a random factor, in random order, for a part of the pictures.

    A factor is between 1 - amount and 1 + amount; the hue turns by up to its amount of a full turn, at most a half.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate("colour jitter", self.rate)
        for name in ("brightness", "contrast", "saturation", "hue"):
            most = 0.5 if name == "hue" else 10.0
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"colour jitter {name} {getattr(self, name)}: use a number from 0 to {most:g}")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        if chance.at(8) >= self.rate:
            return pixels
        order, factors = self._choices(Chances.single(chance))
        for kind in order[0].tolist():
            if self.amounts[kind]:
                pixels = JITTERS[kind](pixels, float(factors[0, kind]))
        return pixels

    @property
    def amounts(self) -> tuple[float, ...]:
        return self.brightness, self.contrast, self.saturation, self.hue

    def _choices(self, chances: Chances) -> tuple[np.ndarray, np.ndarray]:
        """Which change comes when, and how much of it: both [B, 4]."""
        draws = chances.uniforms(8)
        amounts = np.array(self.amounts[:3])
        low, high = np.maximum(0, 1 - amounts), 1 + amounts
        factors = np.concatenate((low + (high - low) * draws[:, 4:7], self.hue * (2 * draws[:, 7:] - 1)), axis=1)
        return draws[:, :4].argsort(1, kind="stable"), factors.astype(np.float32)

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        order, factors = self._choices(chances)
        happens = chances.uniforms(9)[:, 8] < self.rate
        out = pixels.clone()
        for turn in range(4):
            for kind, change in enumerate(JITTERS):
                chosen = np.flatnonzero((order[:, turn] == kind) & happens)
                if self.amounts[kind] and len(chosen):
                    factor = torch.from_numpy(factors[chosen, kind])[:, None, None, None]
                    place = torch.from_numpy(chosen)
                    out[place] = change(out[place], factor)
        return out


JITTERS = (operations.brightness, operations.contrast, operations.saturation, operations.hue)


@dataclass(frozen=True)
class RandomErasing:
    """A rectangle of random area and proportions is replaced by noise or by zeros (Zhong et al. 2017).

    The noise is near to normal, with the mean and the deviation that photographs have, so that it is about standard
    normal after normalisation, as timm's "pixel".
    """

    rate: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    mode: Literal["noise", "zeros"] = "noise"

    def __post_init__(self) -> None:
        check_rate("erasing", self.rate)
        check_range("erasing area", self.area, 0, 1)
        check_range("erasing ratio", self.ratio, 0, 1000)
        if self.mode not in ("noise", "zeros"):
            raise ValueError(f"unknown erasing {self.mode!r}: use noise or zeros")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        return self.batch(pixels[None], Chances.single(chance))[0]

    def batch(self, pixels: Tensor, chances: Chances) -> Tensor:
        draws = chances.uniforms(3 + 2 * ATTEMPTS)
        chosen = np.flatnonzero(draws[:, 0] < self.rate)
        out = pixels.clone() if len(chosen) else pixels
        for place in chosen:
            box = self._box(pixels.shape[-2], pixels.shape[-1], draws[place, 1:])
            if box is not None:
                top, left, h, w = box
                shape = (pixels.shape[1], h, w)
                out[place, :, top : top + h, left : left + w] = (
                    self._noise(shape, chances, int(chances.indices[place])) if self.mode == "noise" else 0
                )
        return out

    def _box(self, height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int] | None:
        low, high = (math.log(r) for r in self.ratio)
        for attempt in range(ATTEMPTS):
            area = height * width * (self.area[0] + (self.area[1] - self.area[0]) * draws[2 + 2 * attempt])
            ratio = math.exp(low + (high - low) * draws[3 + 2 * attempt])
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < h < height and 0 < w < width:
                return int(draws[0] * (height - h + 1)), int(draws[1] * (width - w + 1)), h, w
        return None

    def _noise(self, shape: tuple[int, int, int], chances: Chances, index: int) -> Tensor:
        """Sums of four random bytes, scaled: a bell to the eye, for a quarter of the price."""
        count = math.prod(shape)
        found = bits(chances.seed, chances.epoch, np.array([index]), (count + 1) // 2, chances.stream + WITHIN)
        sums = found.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.int32)[:count]
        spread = 0.225 * 255 / math.sqrt(4 * (256**2 - 1) / 12)
        values = 0.45 * 255 + (sums - 510) * spread
        return torch.from_numpy(values.round().clip(0, 255).astype(np.uint8).reshape(shape))


@dataclass(frozen=True)
class ThreeAugment:
    """Grey, solarised or blurred, one of the three; then colour jitter (Touvron et al. 2022, DeiT III)."""

    jitter: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 10:
            raise ValueError(f"3-Augment with jitter {self.jitter}: use a number from 0 to 10")

    def picture(self, pixels: Tensor, chance: Chance) -> Tensor:
        choice = int(3 * chance.at(0))
        if choice == 0:
            pixels = operations.grey(pixels)
        elif choice == 1:
            pixels = operations.solarise(pixels, 128)
        else:
            pixels = operations.blur(pixels, 0.1 + 1.9 * chance.at(1))
        jitter = ColourJitter(self.jitter, self.jitter, self.jitter)
        return jitter.picture(pixels, chance.of(chance.stream + WITHIN))


ChangeSlot = Flip | PadCrop | Warp | ColourJitter | RandomErasing | RandAugment | ThreeAugment | Blur | Grey | Solarise
AugmentSlot = RandomResizedCrop | SimpleCrop | Fit | ChangeSlot

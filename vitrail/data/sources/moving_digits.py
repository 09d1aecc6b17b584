"""Moving digits: small videos whose class is a motion that no single frame shows.

A handwritten digit drifts, turns, or changes its size. Four coordinates state where it is: two positions, an angle and the
logarithm of the size, each on a circle, like the angle. A digit that leaves on the right comes back on the left, and one that
has grown to the full size starts again small. All four are uniform at the first frame, and a class adds a multiple of the time
to one of them. A uniform number on a circle stays uniform if any number is added. So the distribution of a frame, at every
time, is the same for all classes, and a model that sees one frame, or all frames in an unknown order, has to guess. Without
circles this is impossible: what only grows has another mean at the end than what only shrinks.

Videos are functions of (split, index), made when they are read.
"""

from dataclasses import dataclass, field

import numpy as np

from vitrail.data.dataset import SPLITS, Dataset, Images, Media
from vitrail.data.rng import random_uniform
from vitrail.data.sources import splits as parts
from vitrail.data.sources.arrays import read_digits
from vitrail.data.sources.downloads import GENERATED as NAME
from vitrail.data.video import ArrayVideo

SIDE, FRAMES, RATE = 32, 16, 8.0
SMALLEST, LARGEST = 9.0, 22.0  # sides of a digit in pixels; the diagonal of the largest fits on the circle
DEFAULT_COUNT, HELD_OUT, MAX_COUNT = 4000, 10, 10_000_000  # training videos; one in ten for validation and for test
SPEEDS = (0.3, 0.6)  # turns of the circle in a video
X, Y, ANGLE, SIZE = range(4)
# The coordinate and the direction of each class; the opposite motion is the video played backwards.
MOTIONS = {"left": (X, -1), "right": (X, 1), "up": (Y, -1), "down": (Y, 1), "clockwise": (ANGLE, 1)}
MOTIONS |= {"anticlockwise": (ANGLE, -1), "grow": (SIZE, 1), "shrink": (SIZE, -1)}
CLASSES = tuple(sorted(MOTIONS))


def parse_count(source: str) -> int | None:
    """Return the number of training videos of moving-digits or moving-digits:20000; None for another name."""
    name, colon, count = source.partition(":")
    if name != NAME:
        return None
    if not colon:
        return DEFAULT_COUNT
    if not (count.isascii() and count.isdecimal() and len(CLASSES) <= int(count) <= MAX_COUNT):
        raise ValueError(f"{source}: give a number of videos from {len(CLASSES)} to {MAX_COUNT:,}, as in {NAME}:20000")
    return int(count)


@dataclass(frozen=True, eq=False)
class MovingDigits:
    """A store of moving digits, of one split."""

    split: int  # its number, so that splits have different random numbers
    count: int
    digits: np.ndarray = field(repr=False)  # uint8 [n, 8, 8], other ones in each split
    media: Media = "video"
    is_generated: bool = True

    def __len__(self) -> int:
        return self.count

    def name(self, item: int) -> str:
        return f"{NAME}/{SPLITS[self.split]}[{item}]"

    def label(self, item: int) -> int:
        """Return the class of a video: the classes take turns."""
        return item % len(CLASSES)

    def states(self, item: int) -> np.ndarray:
        """Return x, y, angle and size of the digit in every frame, each in [0, 1), float64 [T, 4]."""
        draws = self._draw(item)
        axis, direction = MOTIONS[CLASSES[self.label(item)]]
        speed = SPEEDS[0] + (SPEEDS[1] - SPEEDS[0]) * draws[4]
        states = np.tile(draws[:4], (FRAMES, 1))
        states[:, axis] += direction * speed * np.arange(FRAMES) / (FRAMES - 1)
        return states % 1.0

    def open(self, item: int) -> ArrayVideo:
        digit = self.digits[int(self._draw(item)[5] * len(self.digits))]
        video = ArrayVideo(render_digit(digit, self.states(item)), self.name(item))
        video.rate = RATE
        return video

    def data(self, item: int) -> bytes:
        return self.open(item).pixels.tobytes()

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None

    def _draw(self, item: int) -> np.ndarray:
        return random_uniform(0, self.split, np.array([item]), 6)[0]


def render_digit(digit: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Return the frames of a digit, uint8 [h, w], in these states [T, 4], as uint8 [T, SIDE, SIDE]: bilinear, on black."""
    x, y, angle, size = states.T[:, :, None, None].astype(np.float32)
    pixels = np.arange(SIDE, dtype=np.float32) + 0.5
    across = (pixels - SIDE * x + SIDE / 2) % SIDE - SIDE / 2  # [T, 1, SIDE], from the digit's centre
    down = (pixels[:, None] - SIDE * y + SIDE / 2) % SIDE - SIDE / 2
    cos, sin = np.cos(2 * np.pi * angle), np.sin(2 * np.pi * angle)
    scale = len(digit) / (SMALLEST * (LARGEST / SMALLEST) ** size)  # of pixels to those of the digit
    padded = np.pad(digit.astype(np.float32), 1)
    u = ((cos * across + sin * down) * scale + digit.shape[1] / 2 + 0.5).clip(0, digit.shape[1] + 0.999)
    v = ((cos * down - sin * across) * scale + digit.shape[0] / 2 + 0.5).clip(0, digit.shape[0] + 0.999)
    left, top = u.astype(np.int32), v.astype(np.int32)
    du, dv = u - left, v - top
    above = padded[top, left] * (1 - du) + padded[top, left + 1] * du
    below = padded[top + 1, left] * (1 - du) + padded[top + 1, left + 1] * du
    return np.rint(above * (1 - dv) + below * dv).astype(np.uint8)


def read_moving_digits(source: str, count: int, options: parts.ReadOptions) -> Dataset:
    """Return the dataset with this number of training videos; the digits of each split are those of the dataset `digits`."""
    known = read_digits("digits", parts.ReadOptions())
    splits = {}
    for number, split in enumerate(SPLITS):
        size = count if split == "train" else max(len(CLASSES), count // HELD_OUT)
        digits = np.stack([np.asarray(known[split].open(index)) for index in range(len(known[split]))])
        store = MovingDigits(number, size, digits)
        items = np.arange(size)
        splits[split] = Images(store, items, items % len(CLASSES), CLASSES, split)
    note = f"{FRAMES} frames of {SIDE}×{SIDE} pixels, made when they are read"
    return parts.add_validation_split(Dataset(source, NAME, splits, (note,)), options)

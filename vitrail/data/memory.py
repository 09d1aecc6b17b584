"""Small sets of pictures, decoded once and kept: in one piece of memory that all worker processes share."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.data.decode import UNREADABLE, Decoded, Opened, opened, orientation, reducible
from vitrail.data.opening import named
from vitrail.data.pictures import Pictures
from vitrail.data.preprocessing import Pair

CONTAINER = Path("/sys/fs/cgroup")
MOST = 2 * 2**30  # bytes, unless told otherwise
ELSEWHERE = -1  # begins nowhere: is read from its store every time

Progress = Callable[[int, int], None]  # pictures so far, and of how many


@dataclass(frozen=True)
class Held:
    """Pictures in memory, one after another."""

    pixels: Tensor  # uint8, flat
    starts: np.ndarray  # [n] int64; ELSEWHERE for what is not here
    sizes: np.ndarray  # [n, 2] int64: stored height and width
    orientations: np.ndarray  # [n] uint8
    channels: int

    def get(self, index: int) -> Decoded | None:
        start = int(self.starts[index])
        if start == ELSEWHERE:
            return None
        height, width = self.sizes[index].tolist()
        pixels = self.pixels[start : start + height * width * self.channels]
        return Decoded(pixels.view(height, width, self.channels), int(self.orientations[index]))


def budget() -> int:
    """What may be kept without being asked: two gigabytes, or a quarter of what is free."""
    return min(MOST, available() // 4)


def available() -> int:
    """Bytes of memory that this process could still take, as far as the system says; a container's limit counts."""
    free = MOST
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):  # not Linux
        with suppress(AttributeError, ValueError, OSError):
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        most, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, most - used))
    return free


def hold(
    pictures: Pictures, channels: int, size: Pair, turn: bool, most: int, progress: Progress | None = None
) -> Held | None:
    """All pictures that would never be decoded at a smaller scale, if they fit in so many bytes; else none.

    What could be is read from its file every time: its pixels depend on the crop. So do those that cannot be read now,
    to be met, and named, when their turn comes.
    """
    count = len(pictures)
    sizes, orientations = np.zeros((count, 2), dtype=np.int64), np.ones(count, dtype=np.uint8)
    starts = np.full(count, ELSEWHERE, dtype=np.int64)

    def look(index: int) -> tuple[int, int, int] | None:
        try:
            with named(pictures.name(index)), pictures.open(index) as image:
                source = Opened(image, channels, orientation(image) if turn else 1)
                height, width = source.size
                if reducible(image) and height // 2 >= size[0] and width // 2 >= size[1]:
                    return None
                return *source.stored, source.orientation
        except UNREADABLE:
            return None  # met again when its turn comes, and named then

    total = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        indices = iter(range(count))
        while chunk := list(islice(indices, 512)):
            for index, found in zip(chunk, threads.map(look, chunk), strict=True):
                if found is not None:
                    sizes[index], orientations[index], starts[index] = found[:2], found[2], total
                    total += found[0] * found[1] * channels
            if total > most:
                return None
        if not total:
            return None
        pixels = torch.empty(total, dtype=torch.uint8)
        held = Held(pixels, starts, sizes, orientations, channels)

        def fill(index: int) -> bool:
            place = held.get(index)
            if place is None:
                return True
            try:
                with named(pictures.name(index)), pictures.open(index) as image:
                    place.pixels.copy_(opened(image, channels, turn).decoded().pixels)
            except (*UNREADABLE, RuntimeError):
                return False
            return True

        inside = np.flatnonzero(starts != ELSEWHERE).tolist()
        for done, (index, good) in enumerate(zip(inside, threads.map(fill, inside), strict=True), 1):
            if not good:
                starts[index] = ELSEWHERE
            if progress is not None:
                progress(done, len(inside))
    return held

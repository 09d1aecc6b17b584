"""Cache of decoded images in one block of memory that all worker processes share."""

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

from vitrail.data import decode
from vitrail.data.dataset import Images
from vitrail.data.decode import IMAGE_ERRORS, DecodedImage
from vitrail.data.preprocessing import ImageSize

CGROUP_ROOT = Path("/sys/fs/cgroup")
DEFAULT_MAX_BYTES = 2 * 2**30  # bytes
NOT_CACHED = -1  # start offset of images that are read from the store every time

CacheProgress = Callable[[int, int], None]  # images done, total


@dataclass(frozen=True)
class ImageCache:
    """Decoded images, one after another in one tensor."""

    pixels: Tensor  # uint8, flat
    starts: np.ndarray  # [n] int64; NOT_CACHED for images outside the cache
    sizes: np.ndarray  # [n, 2] int64: stored height and width
    orientations: np.ndarray  # [n] uint8
    channels: int

    def get(self, index: int) -> DecodedImage | None:
        start = int(self.starts[index])
        if start == NOT_CACHED:
            return None
        height, width = self.sizes[index].tolist()
        pixels = self.pixels[start : start + height * width * self.channels]
        return DecodedImage(pixels.view(height, width, self.channels), int(self.orientations[index]))


def default_cache_bytes() -> int:
    """Return the default cache limit: 2 GiB, or a quarter of the free memory."""
    return min(DEFAULT_MAX_BYTES, available_memory() // 4)


def available_memory() -> int:
    """Return the bytes of memory available to this process, including the limit of its container."""
    free = DEFAULT_MAX_BYTES
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):  # not Linux
        with suppress(AttributeError, ValueError, OSError):
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or no limit
        limit, used = (int((CGROUP_ROOT / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return free


def cache_images(
    images: Images, channels: int, size: ImageSize, turn: bool, max_bytes: int, progress: CacheProgress | None = None
) -> ImageCache | None:
    """Decode all images that are never read at a reduced scale, if they fit in `max_bytes`; otherwise return None.

    Other images are read from their files every time, since their pixels depend on the crop. So are unreadable images:
    they are reported when they are used.
    """
    count = len(images)
    sizes, orientations = np.zeros((count, 2), dtype=np.int64), np.ones(count, dtype=np.uint8)
    starts = np.full(count, NOT_CACHED, dtype=np.int64)

    def read_header(index: int) -> tuple[int, int, int] | None:
        try:
            with decode.name_image_errors(images.name(index)), images.open(index) as image:
                source = decode.LazyImage(image, channels, decode.read_orientation(image) if turn else 1)
                height, width = source.size
                if decode.is_reducible(image) and height // 2 >= size[0] and width // 2 >= size[1]:
                    return None
                return *source.stored_size, source.orientation
        except IMAGE_ERRORS:
            return None  # reported when the image is used

    total = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        indices = iter(range(count))
        while chunk := list(islice(indices, 512)):
            for index, header in zip(chunk, threads.map(read_header, chunk), strict=True):
                if header is not None:
                    sizes[index], orientations[index], starts[index] = header[:2], header[2], total
                    total += header[0] * header[1] * channels
            if total > max_bytes:
                return None
        if not total:
            return None
        cache = ImageCache(torch.empty(total, dtype=torch.uint8), starts, sizes, orientations, channels)

        def fill(index: int) -> bool:
            cached = cache.get(index)
            assert cached is not None
            try:
                with decode.name_image_errors(images.name(index)), images.open(index) as image:
                    cached.pixels.copy_(decode.start_decoding(image, channels, turn).decode().pixels)
            except (*IMAGE_ERRORS, RuntimeError):
                return False
            return True

        cached_indices = np.flatnonzero(starts != NOT_CACHED).tolist()
        for done, (index, ok) in enumerate(zip(cached_indices, threads.map(fill, cached_indices), strict=True), 1):
            if not ok:
                starts[index] = NOT_CACHED
            if progress is not None:
                progress(done, len(cached_indices))
    return cache

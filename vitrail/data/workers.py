"""Preparation of batches, with a cache of decoded images and masks that worker processes share."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data import decode
from vitrail.data.dataset import Images
from vitrail.data.decode import IMAGE_ERRORS, DecodedImage, name_image_errors, start_decoding
from vitrail.data.preprocessing import ImageSize, Preprocessing
from vitrail.data.remote.urls import RemoteError
from vitrail.data.rng import BatchRandom, SampleRandom, sample_with_replacement, shuffle_indices
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.transforms.pipeline import Pipeline, check_pipeline_media, convert_channels, match_masks

Weights = np.ndarray | None  # of the images, [n]
MAX_TRIES = 50  # consecutive unreadable images after which the data is considered lost
MAX_UNREADABLE = 4  # per batch; an error is raised above this and above half of the batch
CGROUP_ROOT = Path("/sys/fs/cgroup")
DEFAULT_MAX_BYTES = 2 * 2**30  # bytes
NOT_CACHED = -1  # start offset of images that are read from the store every time

CacheProgress = Callable[[int, int], None]  # images done, total
MakeRow = Callable[[Any, np.ndarray | None], Tensor]  # from an opened image and its mask, or from a video or a sound


@dataclass(frozen=True)
class BatchRequest:
    """The images of a batch as draws: index + n * (number of earlier draws of that image in this epoch)."""

    draws: np.ndarray  # [B]
    epoch: int | None = None  # None for evaluation, where unreadable images are not replaced
    positions: np.ndarray | None = None  # [B], of the draws in the epoch's order


@dataclass(frozen=True)
class PreparedBatch:
    """A batch without targets, with its errors."""

    # uint8 [B, C, H, W], with masks [B, C + 1, H, W]; of videos [B, C, T, H, W]; several crops per image: bytes [B, n]
    # float32 [B, 1, mel bins, frames] of sounds
    pixels: Tensor
    indices: np.ndarray  # [B]
    unreadable: tuple[tuple[str, str], ...] = ()
    failure: str | None = None
    rng: BatchRandom | None = None  # random numbers of the training samples


@dataclass(frozen=True)
class ImageCache:
    """Decoded images, each followed by its mask, in one tensor that all worker processes share."""

    pixels: Tensor  # uint8, flat
    starts: np.ndarray  # [n] int64; NOT_CACHED for images outside the cache
    sizes: np.ndarray  # [n, 2] int64: stored height and width
    orientations: np.ndarray  # [n] uint8
    channels: int
    masks: bool = False

    @staticmethod
    def default_limit() -> int:
        """Return the default limit in bytes: 2 GiB, or a quarter of the free memory."""
        return min(DEFAULT_MAX_BYTES, available_memory() // 4)

    def get(self, index: int) -> DecodedImage | None:
        start = int(self.starts[index])
        if start == NOT_CACHED:
            return None
        height, width = self.sizes[index].tolist()
        area, orientation = height * width, int(self.orientations[index])
        image = self.pixels[start : start + area * (self.channels + self.masks)]
        mask = image[area * self.channels :].view(height, width).numpy() if self.masks else None
        return DecodedImage(image[: area * self.channels].view(height, width, self.channels), orientation, mask=mask)


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
    they are reported when they are used. The mask of an image is cached with it.
    """
    count = len(images)
    sizes, orientations = np.zeros((count, 2), dtype=np.int64), np.ones(count, dtype=np.uint8)
    starts, masks = np.full(count, NOT_CACHED, dtype=np.int64), images.masks is not None

    def read_header(index: int) -> tuple[int, int, int] | None:
        try:
            with name_image_errors(images.name(index)), images.open(index) as image:
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
                    total += header[0] * header[1] * (channels + masks)
            if total > max_bytes:
                return None
        if not total:
            return None
        cache = ImageCache(torch.empty(total, dtype=torch.uint8), starts, sizes, orientations, channels, masks)

        def fill(index: int) -> bool:
            cached = cache.get(index)
            assert cached is not None
            try:
                mask = read_mask(images, index)
                with name_image_errors(images.name(index)), images.open(index) as image:
                    decoded = start_decoding(image, channels, turn, mask).decode()
                    cached.pixels.copy_(decoded.pixels)
                    if cached.mask is not None and decoded.mask is not None:
                        cached.mask[:] = decoded.mask
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


def read_mask(images: Images, index: int) -> np.ndarray | None:
    """Return the mask of the upright image, uint8 [H, W], or None if there are no masks."""
    if images.masks is None:
        return None
    with name_image_errors(images.mask_name(index)):
        return images.read_mask(index)


class BatchPreparer:
    """Builder of batches, small enough to be sent to a worker; large arrays are in shared memory."""

    def __init__(
        self, images: Images, pipeline: Pipeline, seed: int, weights: Weights, max_bytes: int, max_unreadable: int
    ) -> None:
        self.has_masks = images.masks is not None
        check_pipeline_media(pipeline, images.media)
        self.pipeline, self.seed, self.weights = match_masks(pipeline, self.has_masks), seed, weights
        self.max_bytes, self.max_unreadable = max_bytes, max_unreadable
        self.count, self.shards, self.items = len(images), images.shards, images.items
        self.images: Images | None = images  # None if `array` holds them
        self.array: Tensor | None = None  # [N, H, W, c], if the store is an array and there are no masks
        self.cache: ImageCache | None = None
        self._order: tuple[int, np.ndarray] | None = None
        self._cache_filled = False
        if isinstance(images.store, ArrayStore) and not self.has_masks:
            pixels = images.store.pixels
            array = torch.from_numpy(pixels if pixels.flags.writeable and pixels.flags.c_contiguous else pixels.copy())
            self.array, self.images = array if array.ndim == 4 else array[..., None], None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a row: of an image, and of its mask as last channel."""
        if isinstance(self.pipeline, Preprocessing):
            return (self.pipeline.channels + 1, *self.pipeline.size) if self.has_masks else self.pipeline.row_shape
        return self.pipeline.shape

    def fill_cache(self, progress: CacheProgress | None = None) -> None:
        """Decode a small set of images into memory once, before the workers start, so that they share it."""
        images, pipeline, limit = self.images, self.pipeline, self.max_bytes
        if self._cache_filled or images is None or images.media != "image":  # a clip is not the whole video
            return
        if not isinstance(pipeline, Preprocessing) and limit > 0:
            channels, size, turn = pipeline.channels, pipeline.size, pipeline.turn
            self.cache = cache_images(images, channels, size, turn, limit, progress)
        self._cache_filled = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the draws of an epoch, [n]."""
        if self._order is None or self._order[0] != epoch:
            if self.weights is None:
                order = shuffle_indices(self.count, self.seed, epoch, self.shards)
            else:
                order = sample_with_replacement(self.weights, self.seed, epoch)
            self._order = (epoch, order)
        return self._order[1]

    def make_batch_single_threaded(self, request: BatchRequest) -> PreparedBatch:
        """Prepare a batch in the main process with one thread: PyTorch's threads slow down small operations."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.make_batch(request)
        finally:
            torch.set_num_threads(threads)

    def make_batch(self, request: BatchRequest) -> PreparedBatch:
        """Prepare the batch of a request. A network that fails is no unreadable image, which another one replaces."""
        try:
            return self._make_batch(request)
        except RemoteError as error:
            empty = torch.empty((0, *self.shape), dtype=self.pipeline.dtype)
            return PreparedBatch(empty, request.draws[:0], failure=str(error))

    def _make_batch(self, request: BatchRequest) -> PreparedBatch:
        pipeline, indices = self.pipeline, request.draws % self.count
        epoch = request.epoch or 0
        rng = BatchRandom(self.seed, epoch, request.draws)
        if self.array is not None:
            if isinstance(pipeline, Preprocessing):
                size = (self.array.shape[1], self.array.shape[2])
                if pipeline.resized_size(*size) == size == tuple(pipeline.size):
                    return PreparedBatch(self._gather(indices).permute(0, 3, 1, 2).contiguous(), indices)
            elif pipeline.augments_batches and pipeline.crops_batches:
                pixels = pipeline.augment_batch(pipeline.crop_batch(self._gather(indices), rng), rng)
                return PreparedBatch(pixels, indices, rng=rng)
        pixels = torch.empty((len(indices), *self.shape), dtype=pipeline.dtype)
        kept: list[int] = []
        unreadable: dict[str, str] = {}
        tries = 1 if request.epoch is None else max(1, min(MAX_TRIES, self.count))
        for row, draw in enumerate(request.draws.tolist()):
            for attempt in range(tries):
                if attempt and request.positions is not None:  # replace an unreadable image by the next of the epoch
                    order = self.epoch_order(epoch)
                    indices[row] = order[(request.positions[row] + attempt) % self.count] % self.count
                image = self._prepare_image(int(indices[row]), SampleRandom(self.seed, epoch, draw))
                if isinstance(image, Tensor):
                    pixels[row] = image
                    kept.append(row)
                    break
                unreadable |= (image,)
        lost, failure = len(unreadable), None
        all_lost = bool(lost) and not kept and request.epoch is not None  # of a training batch
        if all_lost or lost > max(self.max_unreadable, len(indices) // 2):
            first = "{} ({})".format(*next(iter(unreadable.items())))
            failure = f"{lost} images of one batch are unreadable, first {first}: check that the data is still there"
        if len(kept) < len(indices):
            pixels, indices = pixels[kept], indices[kept]
        rng = BatchRandom(self.seed, epoch, request.draws[kept])
        if not isinstance(pipeline, Preprocessing) and pipeline.augments_batches and not failure:
            pixels = pipeline.augment_batch(pixels, rng)
        return PreparedBatch(pixels, indices, tuple(unreadable.items()), failure, rng)

    __getitem__ = make_batch  # the DataLoader of the workers calls it

    def _gather(self, indices: np.ndarray) -> Tensor:
        """Return whole images of the array, [B, H, W, C]."""
        assert self.array is not None
        pixels = self.array[torch.from_numpy(self.items[indices])]
        if pixels.shape[-1] == self.pipeline.channels:
            return pixels
        return convert_channels(pixels.movedim(-1, -3), self.pipeline.channels).movedim(-3, -1)

    def _prepare_image(self, index: int, rng: SampleRandom) -> Tensor | tuple[str, str]:
        """Return one image, or its name and the error. Batch-wise augmentations are applied later."""
        pipeline = self.pipeline
        if isinstance(pipeline, Preprocessing):
            if self.array is not None:
                return pipeline.to_pixels(Image.fromarray(self.array[int(self.items[index])].squeeze(-1).numpy()))
            return self._read_image(index, pipeline.to_row)
        decoded = self._get_cached(index)
        if decoded is not None:
            cropped = pipeline.crop_image(decoded, rng)
        else:
            cropped = self._read_image(index, lambda image, mask: pipeline.crop_opened(image, mask, rng))
        if isinstance(cropped, tuple) or pipeline.augments_batches:
            return cropped
        return pipeline.augment_image(cropped, rng)

    def _read_image(self, index: int, make: MakeRow) -> Tensor | tuple[str, str]:
        """Return the row made from an image and its mask, or the name of the unreadable one and the error."""
        assert self.images is not None
        name = self.images.mask_name(index) if self.has_masks else ""
        try:
            mask = read_mask(self.images, index)
            name = self.images.name(index)
            with name_image_errors(name), self.images.open(index) as image:
                return make(image, mask)
        except IMAGE_ERRORS as error:
            return name, decode.format_image_error(error, name)

    def _get_cached(self, index: int) -> DecodedImage | None:
        if self.array is not None:
            return DecodedImage(self._gather(np.array([index]))[0])
        return self.cache.get(index) if self.cache is not None else None

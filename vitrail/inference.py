"""Run a model over images: preprocessing, batches, device, outputs on the CPU. Also the conversion of logits to probabilities.

B images, C channels of H×W pixels, K classes, F features, Q queries of N values.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from vitrail.data.dataset import Images
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.workers import MAX_UNREADABLE
from vitrail.metrics.calibration import probabilities, rank_classes, top_classes
from vitrail.metrics.views import average_views
from vitrail.nn.packing import can_pack, pack_module
from vitrail.utils.devices import default_workers
from vitrail.utils.precision import FLOAT_PRECISIONS, autocast, check_precision, torch_dtype
from vitrail.utils.progress import ProgressCallback

__all__ = ["OutputBatch", "TorchRuntime", "load_pixels", "run_batches", "run_pixels"]
__all__ += ["probabilities", "rank_classes", "top_classes"]

BATCH_SIZE = 64
OutputKind = Literal["logits", "features", "queries"]  # queries: of EoMT, packed
T = TypeVar("T")


class TorchRuntime:
    """A PyTorch model that takes uint8 pixels. It keeps no state between calls, so several threads may call it at once."""

    name = "torch"

    def __init__(
        self,
        model: Callable[[torch.Tensor], torch.Tensor] | nn.Module,
        preprocessing: Preprocessing,
        output_kind: OutputKind = "logits",
        device: torch.device = torch.device("cpu"),  # noqa: B008
        precision: str = "fp32",
        packed: bool | None = None,  # None: where a lower precision can be packed
    ) -> None:
        """Run `model` as it is, or a packed copy: for features a model without a classifier, for queries `PackedQueries`."""
        check_precision(precision, FLOAT_PRECISIONS)
        self.model, self.preprocessing = model, preprocessing
        self.output_kind: OutputKind = output_kind
        self.device, self.precision = device, precision
        self.dtype, self.packed = torch_dtype(precision), None
        packs = precision != "fp32" if packed is None else packed
        if packs and isinstance(model, nn.Module) and device.type == "cpu" and can_pack(self.dtype):
            self.packed = pack_module(model, self.dtype)

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, K] or [B, K, H, W], features [B, F] or queries [B, Q, N] of uint8 pixels [B, C, H, W]."""
        images = self.preprocessing.normalise(torch.from_numpy(pixels).to(self.device, non_blocking=True))
        if self.packed is not None:
            outputs = self.packed(images.to(self.dtype))
        else:
            with autocast(self.device.type, self.precision):
                outputs = self.model(images)
        if self.output_kind == "features":
            outputs = outputs.flatten(1)  # of a distilled model they are [B, 2, D]
        return outputs.float().cpu().numpy()


@dataclass(frozen=True)
class OutputBatch(Generic[T]):
    """The outputs for one batch of images."""

    indices: np.ndarray  # int64 [B], in the dataset
    outputs: T
    seconds: float  # taken by the forward pass


def run_batches(
    forward: Callable[
        [np.ndarray], T
    ],  # takes uint8 pixels [B, C, H, W], of clips [B, C, T, H, W]; a Runtime, for example
    images: Images,
    preprocessing: Preprocessing,
    unreadable: dict[str, str],  # receives the name and the error of each image that cannot be read
    *,
    batch_size: int = BATCH_SIZE,
    workers: int | None = None,  # None: chosen from the cores, the device and the number of images
    device: torch.device = torch.device("cpu"),  # noqa: B008
    progress: ProgressCallback | None = None,
    stage: str = "",
    max_unreadable: int = MAX_UNREADABLE,  # images of one batch; more end the run
    activation: str | None = None,
) -> Iterator[OutputBatch[T]]:
    """Yield the outputs of `forward` for every readable image of a dataset, in order, batch by batch.

    If the preprocessing takes several views of a video, the outputs for them are averaged; with an `activation`, "softmax" or
    "sigmoid", they are logits, and probabilities are averaged.
    """
    if batch_size < 1:
        raise ValueError(f"the batch size must be >= 1, got {batch_size}")
    if workers is None:
        in_process = isinstance(images.store, ArrayStore) or len(images) <= batch_size
        workers = 0 if in_process else default_workers(device.type)
    loader = Loader(
        images,
        None,
        preprocessing,
        batch_size=batch_size,
        workers=workers,
        cache_bytes=0,  # images are read once
        max_unreadable=max_unreadable,
    )
    done, views = 0, 1 if preprocessing.clip is None else preprocessing.clip.views
    try:
        for batch in loader.iter_once():
            if len(batch.indices):
                start = time.perf_counter()
                pixels = batch.pixels.numpy()
                outputs = forward(pixels) if views == 1 else compute_views(forward, pixels, activation)
                seconds = time.perf_counter() - start
                done += len(batch.indices)
                yield OutputBatch(batch.indices.numpy().copy(), outputs, seconds)
            if progress:
                progress(stage, done + len(loader.unreadable), len(images))
    finally:
        unreadable.update(loader.unreadable)
        loader.close()


def compute_views(forward: Callable[[np.ndarray], Any], pixels: np.ndarray, activation: str | None) -> Any:
    """Return the mean outputs [B, K] of `forward` over the views of videos, uint8 [B, V, C, T, H, W], one view at a time."""
    outputs = [forward(np.ascontiguousarray(pixels[:, view])) for view in range(pixels.shape[1])]
    return average_views(np.stack(outputs, 1), activation)


def load_pixels(
    images: Images, preprocessing: Preprocessing, progress: ProgressCallback | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of the readable images, uint8 [n, C, H, W], and their indices in the dataset, int64 [n].

    Of a video they are those of its central clip, [C, T, H, W].
    """
    if preprocessing.clip is not None:
        preprocessing = replace(preprocessing, clip=replace(preprocessing.clip, clips=1, crops=1))
    n, stage = len(images), "preparing"  # the pixels themselves are the outputs
    run = run_batches(np.copy, images, preprocessing, {}, workers=0, progress=progress, stage=stage, max_unreadable=n)
    if not (batches := list(run)):
        raise ValueError(f"none of the {n:,} images can be read")
    return np.concatenate([batch.outputs for batch in batches]), np.concatenate([batch.indices for batch in batches])


def run_pixels(
    forward: Callable[[np.ndarray], np.ndarray],
    pixels: np.ndarray,  # uint8 [n, C, H, W], preprocessed
    batch_size: int = 16,
    progress: ProgressCallback | None = None,
    stage: str = "",
) -> np.ndarray:
    """Return the outputs of `forward` for images in memory, batch by batch."""
    parts = []
    for start in range(0, len(pixels), batch_size):
        parts.append(forward(pixels[start : start + batch_size]))
        if progress:
            progress(stage, min(len(pixels), start + batch_size), len(pixels))
    return np.concatenate(parts)

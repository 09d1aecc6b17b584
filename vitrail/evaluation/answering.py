"""What a model says of every picture, and how long it takes."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from vitrail.data.loader import Loader
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation
from vitrail.data.sources.pixels import Pixels
from vitrail.evaluation.opening import Opened

Progress = Callable[[str, int, int], None]
BATCH = 64
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Computing:
    """How it is computed."""

    device: torch.device = torch.device("cpu")
    batch_size: int = BATCH
    workers: int | None = None  # None for as many as suit
    precision: str = "fp32"

    def half(self) -> AbstractContextManager[object]:
        """Matrix products in half precision, where that is asked for."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, HALVES[self.precision])


@dataclass(frozen=True)
class Answers:
    """Logits in the order of the pictures."""

    logits: np.ndarray  # float32 [n, K]; zeros where a picture could not be read
    read: np.ndarray  # [n] bool
    unreadable: dict[str, str]  # name and reason
    seconds: float  # from the first picture to the last
    computing: float  # of them, in the model


@torch.inference_mode()
def answer(opened: Opened, pictures: Pictures, how: Computing, progress: Progress | None = None) -> Answers:
    """Sends every picture through the model."""
    model, pipeline = opened.model, opened.preprocessing
    if how.batch_size < 1:
        raise ValueError(f"--batch-size {how.batch_size}: at least 1")
    workers = how.workers if how.workers is not None else suited(pictures, how)
    # Nothing is kept in memory for a second time: there is none.
    loader = Loader(pictures, None, Evaluation(pipeline), batch_size=how.batch_size, workers=workers, memory=0)
    logits, read = np.zeros((0, 0), np.float32), np.zeros(len(pictures), dtype=bool)
    computing, begin = 0.0, time.perf_counter()
    try:
        for batch in loader.once():
            if len(batch.indices):
                start, places = time.perf_counter(), batch.indices.numpy()
                if opened.runtime is not None:
                    part = opened.runtime(batch.pixels.numpy())
                else:
                    with how.half():
                        found = model(pipeline.normalise(batch.pixels.to(how.device, non_blocking=True)))
                    part = found.float().cpu().numpy()
                computing += time.perf_counter() - start
                check_finite(part, pictures, places, opened, how)
                if not logits.size:
                    logits = np.zeros((len(pictures), part.shape[1]), np.float32)
                logits[places], read[places] = part, True
            if progress:
                progress("judging", int(read.sum()) + len(loader.unreadable), len(pictures))
    finally:
        loader.close()
    if not read.any():
        name, why = next(iter(loader.unreadable.items()))
        raise ValueError(f"none of the {len(pictures):,} pictures can be read: {name}: {why}")
    return Answers(logits, read, dict(loader.unreadable), time.perf_counter() - begin, computing)


def suited(pictures: Pictures, how: Computing) -> int:
    """Processes that prepare pictures: none for pixels that lie in memory or for a few, few beside a model on the same cores."""
    if isinstance(pictures.store, Pixels) or len(pictures) <= how.batch_size:
        return 0
    cores = os.cpu_count() or 1
    return max(1, min(8, cores if how.device.type == "cuda" else cores // 2))


def check_finite(part: np.ndarray, pictures: Pictures, places: np.ndarray, opened: Opened, how: Computing) -> None:
    """Refuses answers that are no numbers."""
    bad = ~np.isfinite(part).all(1)
    if bad.any():
        first = pictures.name(int(places[int(bad.argmax())]))
        wider = "" if how.precision == "fp32" else f"; {how.precision} may be too narrow for it, use --precision fp32"
        raise ValueError(f"{opened.name} gives logits that are not finite, for {first} first{wider}")

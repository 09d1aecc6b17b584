"""What a frozen model makes of pictures, one vector for each: computed once, and kept in the user's cache directory by picture.

Features are what comes to the head: the vector of equation 4 (after the tanh layer where the model has pre-logits; after the
projection for CLIP). A distilled model's two tokens stand side by side, [2 D], because its own answer is read from both.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.artifact import digest
from vitrail.data.audit.cache import directory
from vitrail.data.loader import Loader
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.records import LEAD, RecordFile, about_of, key_of, rows_of
from vitrail.data.sources.pixels import Pixels
from vitrail.data.work import FEW
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.models.written import to_json

Progress = Callable[[str, int, int], None]
VERSION = 5  # another way to compute them is another number: old files are not misread
BATCH = 64
AT_ONCE = 4096  # vectors that are read from the disk and held against their checksums
WIDEST = 10_000_000  # numbers of a vector that a file is believed to hold


@dataclass(frozen=True)
class Features:
    """A split as a frozen model sees it."""

    values: np.ndarray  # float32 [n, D]: of the pictures that could be read
    targets: np.ndarray  # [n], or [n, K]
    seconds: float  # to compute them, or to find them again
    cached: bool
    unreadable: dict[str, str] = field(default_factory=dict)  # left out: name and reason
    notes: tuple[str, ...] = ()


def content_of_model(model: ViT | BiT, pipeline: Preprocessing) -> str:
    """The content of a model: every weight, the configuration and the preprocessing."""
    found = hashlib.sha256(json.dumps([to_json(model.config), to_json(pipeline)], sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} {digest(tensor.cpu())}\n".encode())
    return found.hexdigest()


def place_of(key: str) -> Path:
    """Where the values of this key are kept."""
    return directory() / "features" / f"{key}.float32"


def features(
    model: ViT | BiT,
    pipeline: Preprocessing,
    pictures: Pictures,
    *,
    identity: str | None = None,
    device: torch.device | None = None,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> Features:
    """The features of a split, from the cache where they are. `model` ends in features; `identity` is its content if known."""
    device = device or torch.device("cpu")
    identity = identity or (content_of_model(model, pipeline) if cache else "")
    began = time.monotonic()
    seen = once(model.to(device).eval(), pipeline, pictures, identity, "features", device, workers, cache, progress)
    return Features(
        seen.values[seen.read],
        pictures.targets[seen.read],
        time.monotonic() - began,
        seen.cached,
        seen.unreadable,
        seen.notes,
    )


@dataclass(frozen=True)
class Seen:
    """What a function made of every picture of a split."""

    values: np.ndarray  # float32 [n, D], in the order of the split; zeros for a picture that could not be read
    read: np.ndarray  # [n] whether it could
    asked: int  # pictures whose values were not in the cache
    unreadable: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def cached(self) -> bool:
        """Whether all of it was there."""
        return not self.asked


def once(
    model: Callable[[Tensor], Tensor],
    pipeline: Preprocessing,
    pictures: Pictures,
    identity: str,  # the content of the model
    what: str,  # of its outputs, in a word
    device: torch.device,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> Seen:
    """What a model gives for each picture of a split: from the cache what is there, and the rest computed and kept."""
    if not len(pictures):
        raise ValueError(f"the {pictures.split} split holds no pictures")
    kept, keys, notes = None, [], []
    values, read = np.zeros((len(pictures), 0), dtype=np.float32), np.zeros(len(pictures), dtype=bool)
    if cache:
        key = hashlib.sha256("\n".join([str(VERSION), what, identity, device.type]).encode()).hexdigest()[:40]
        keys, kept = keys_of(pictures), Kept(place_of(key))
        values, read, complaint = kept.read(keys)
        notes += [f"{complaint}: the {what} of the {pictures.split} split are computed again"] if complaint else []
    lacking = np.flatnonzero(~read)
    unreadable: dict[str, str] = {}
    if len(lacking):
        told = f"{what} of the {pictures.split} split"
        for indices, part in computed(
            model, pipeline, pictures.only(lacking), told, device, workers, progress, unreadable, int(read.sum())
        ):
            if not values.shape[1]:
                values = np.zeros((len(pictures), part.shape[1]), dtype=np.float32)
            values[lacking[indices]], read[lacking[indices]] = part, True
            if kept is not None and (complaint := kept.add([keys[index] for index in lacking[indices]], part)):
                notes.append(f"the {what} are not kept for another time: {complaint}")
                kept = None  # the disk is full, or not ours: it is said once
    if not read.any():
        reason = next(iter(unreadable.values()), "")
        raise ValueError(f"no picture of the {pictures.split} split could be read: {reason}")
    return Seen(values, read, len(lacking), unreadable, tuple(notes))


def computed(
    model: Callable[[Tensor], Tensor],
    pipeline: Preprocessing,
    pictures: Pictures,
    told: str,  # what is computed, for progress and errors
    device: torch.device,
    workers: int | None,
    progress: Progress | None,
    unreadable: dict[str, str],  # gets those that cannot be read, and why
    others: int,  # of the split, that were read before
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batch after batch, which pictures [B] and what the model gives for them [B, D]."""
    if workers is None:
        quick = isinstance(pictures.store, Pixels) or len(pictures) < BATCH
        workers = 0 if quick else max(1, min(8, (os.cpu_count() or 1) // (1 if device.type == "cuda" else 2)))
    # Nothing is kept in memory for a second time: there is none. What could not be read the last time comes in one batch now,
    # and the data has not gone away if the others could.
    few, seen = max(FEW, others), Evaluation(pipeline)
    loader = Loader(pictures, None, seen, batch_size=BATCH, workers=workers, memory=0, few=few)
    done = 0
    try:
        for batch in loader.once():
            if len(batch.indices):
                with torch.inference_mode():
                    y: Tensor = model(pipeline.normalise(batch.pixels.to(device, non_blocking=True)))
                part = y.flatten(1).float().cpu().numpy()  # a distilled model's [B, 2, D] to [B, 2 D]
                if not np.isfinite(part).all():
                    raise ValueError(f"the model gives {told} that are not finite")
                done += len(batch.indices)
                yield batch.indices.numpy(), part
            if progress:
                progress(told, done + len(loader.unreadable), len(pictures))
    finally:
        unreadable.update(loader.unreadable)
        loader.close()


def keys_of(pictures: Pictures) -> list[bytes | None]:
    """What every picture is known by; None where its file is gone, which computing says."""

    def key(index: int) -> bytes | None:
        try:
            return key_of(pictures, index)
        except OSError:
            return None

    return [key(index) for index in range(len(pictures))]


class Kept:
    """Vectors in the user's cache directory, one for each picture that was seen."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def file(self, width: int) -> RecordFile:
        record = np.dtype([*LEAD, ("values", "<f4", width)])
        # The width is there twice, so that a file in which it has changed is known to be damaged.
        about = {"vitrail": "vectors", "of": self.place.stem, "width": width, "bytes": record.itemsize}
        return RecordFile(self.place, about, record)

    def read(self, keys: list[bytes | None]) -> tuple[np.ndarray, np.ndarray, str]:
        """What is there of these pictures [n, D], of which it is [n], and what was wrong with the file."""
        nothing = np.zeros((len(keys), 0), dtype=np.float32), np.zeros(len(keys), dtype=bool)
        try:
            if not self.place.exists() or not self.place.stat().st_size:  # another process may be about to begin it
                return *nothing, ""
            width = (about_of(self.place) or {}).get("width")
            if not isinstance(width, int) or not 0 < width <= WIDEST or not (file := self.file(width)).ours():
                self.place.unlink()
                return *nothing, f"{self.place} is damaged (it is not what was written there)"
            records = file.records()
        except OSError as error:
            return *nothing, f"{self.place} cannot be read ({error.strerror or error})"
        rows = rows_of(records, keys)
        found = np.flatnonzero(rows >= 0)
        values, read = np.zeros((len(keys), width), dtype=np.float32), np.zeros(len(keys), dtype=bool)
        for start in range(0, len(found), AT_ONCE):
            some = found[start : start + AT_ONCE]
            part = records[rows[some]]
            whole = file.whole(part)  # nothing is made of bytes before they are known to be those that were written
            values[some[whole]], read[some[whole]] = part["values"][whole], True
        broken = len(found) - int(read.sum())
        return values, read, f"{self.place} is damaged ({broken:,} of {len(found):,} vectors)" if broken else ""

    def add(self, keys: list[bytes | None], values: np.ndarray) -> str:
        """Keeps vectors [B, D]; gives a complaint where that is not possible, which is no reason to stop."""
        named = [row for row, key in enumerate(keys) if key is not None]
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            self.file(values.shape[1]).add([key for key in keys if key is not None], values=values[named])
        except OSError as error:
            return str(error)
        return ""

"""What a frozen model makes of a split, one vector for each picture: computed once, and kept in the user's cache directory.

Features are what comes to the head: the vector of equation 4 (after the tanh layer where the model has pre-logits; after the
projection for CLIP). A distilled model's two tokens stand side by side, [2 D], because its own answer is read from both.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.artifact import digest
from vitrail.checkpoints.files.atomic import atomic
from vitrail.data.audit.cache import directory
from vitrail.data.loader import Loader
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.pixels import Pixels
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.models.written import to_json

Progress = Callable[[str, int, int], None]
VERSION = 3  # another way to compute them is another number: old files are not misread
BATCH = 64
SEAL = hashlib.sha256().digest_size  # bytes before the values


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


def content_of_pictures(pictures: Pictures) -> str:
    """Which pictures a split holds, in order: paths with size and time of change, or the bytes where these are not known."""
    found = hashlib.sha256()
    for index, item in enumerate(pictures.items):
        try:
            stamp = pictures.store.stamp(int(item))
        except OSError:  # it is gone: computing the features says so
            stamp = None
        known = repr(stamp).encode() if stamp is not None else _bytes(pictures, int(item))
        name = pictures.name(index) if stamp is None else pictures.whole_name(index)
        found.update(name.encode("utf-8", "surrogatepass") + b"\0" + known + b"\0")
    return found.hexdigest()


def _bytes(pictures: Pictures, item: int) -> bytes:
    try:
        return hashlib.sha256(pictures.store.data(item)).digest()
    except OSError:
        return b"unreadable"


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
    cached: bool
    unreadable: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
    """What a model gives for each picture of a split, from the cache where it is."""
    place, notes = None, []
    if cache:
        parts = [str(VERSION), what, identity, content_of_pictures(pictures), device.type]
        place = place_of(hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40])
        found, complaint = remembered(place, len(pictures))
        if found is not None:
            return Seen(found, np.ones(len(pictures), dtype=bool), True)
        if complaint:
            notes.append(f"{complaint}: the {what} of the {pictures.split} split are computed again")
    values, read, unreadable = computed(model, pipeline, pictures, device, workers, progress, what)
    if place is not None and not unreadable:  # what could not be read may be readable another time
        complaint = kept(place, values, what)
        notes += [complaint] if complaint else []
    return Seen(values, read, False, dict(unreadable), tuple(notes))


@torch.inference_mode()
def computed(
    model: Callable[[Tensor], Tensor],
    pipeline: Preprocessing,
    pictures: Pictures,
    device: torch.device,
    workers: int | None = None,
    progress: Progress | None = None,
    what: str = "features",
) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """Features [n, D] in the order of the split, which pictures could be read [n], and why the others could not."""
    if not len(pictures):
        raise ValueError(f"the {pictures.split} split holds no pictures")
    if workers is None:
        few = isinstance(pictures.store, Pixels) or len(pictures) < BATCH
        workers = 0 if few else max(1, min(8, (os.cpu_count() or 1) // (1 if device.type == "cuda" else 2)))
    # Nothing is kept in memory for a second time: there is none.
    loader = Loader(pictures, None, Evaluation(pipeline), batch_size=BATCH, workers=workers, memory=0)
    values, done = np.zeros((0, 0), dtype=np.float32), 0
    read = np.zeros(len(pictures), dtype=bool)
    try:
        for batch in loader.once():
            if len(batch.indices):
                y: Tensor = model(pipeline.normalise(batch.pixels.to(device, non_blocking=True)))
                part = y.flatten(1).float().cpu().numpy()  # a distilled model's [B, 2, D] to [B, 2 D]
                if not values.size:
                    values = np.zeros((len(pictures), part.shape[1]), dtype=np.float32)
                values[batch.indices.numpy()], read[batch.indices.numpy()] = part, True
                done += len(batch.indices)
            if progress:
                progress(f"{what} of the {pictures.split} split", done + len(loader.unreadable), len(pictures))
    finally:
        loader.close()
    if not read.any():
        reason = next(iter(loader.unreadable.values()), "")
        raise ValueError(f"no picture of the {pictures.split} split could be read: {reason}")
    if not np.isfinite(values).all():
        raise ValueError(f"the model gives {what} that are not finite for the {pictures.split} split")
    return values, read, loader.unreadable


def remembered(place: Path, count: int) -> tuple[np.ndarray | None, str]:
    """Values from the cache, or none and what was wrong with the file."""
    try:
        content = np.fromfile(place, dtype=np.uint8)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"{place} cannot be read ({error.strerror or error})"
    body = content[SEAL:]
    # Nothing is made of the bytes before all of them are known to be those that were written, under this name.
    if content[:SEAL].tobytes() != seal(place, body) or not len(body) or len(body) % (4 * count):
        return None, f"{place} is damaged (it does not hold the {count:,} vectors that were written)"
    return body.view("<f4").reshape(count, -1), ""


def seal(place: Path, body: np.ndarray) -> bytes:
    """What stands before the values: a checksum of them and of the name they are kept by."""
    found = hashlib.sha256(place.name.encode())
    found.update(body.data)
    return found.digest()


def kept(place: Path, values: np.ndarray, what: str = "features") -> str:
    """Writes values to the cache, whole; gives a complaint where that is not possible, which is no reason to stop."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic(place) as file:
            body = np.ascontiguousarray(values, dtype="<f4")
            file.write(seal(place, body))
            file.write(body.data)
    except OSError as error:
        return f"the {what} are not kept for another time: {error}"
    return ""

"""Features of a frozen model, one vector per image, cached in the user's cache directory.

Features are the input of the head: the vector of equation 4 (after the tanh layer where the model has pre-logits; after the
projection for CLIP). Those of a distilled model are its two tokens concatenated, [2 D].
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.artifact import hash_tensor
from vitrail.data.cache import RECORD_PREFIX, RecordFile, compute_image_key, find_rows, read_metadata
from vitrail.data.dataset import Images
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.workers import MAX_UNREADABLE
from vitrail.inference import TorchRuntime, run_batches
from vitrail.models.base import Model
from vitrail.utils.files import cache_directory
from vitrail.utils.json import to_json
from vitrail.utils.progress import ProgressCallback

VERSION = 5  # increased when the computation changes
BATCH_SIZE = 64
READ_CHUNK = 4096  # vectors read and verified at once
MAX_WIDTH = 10_000_000  # of a vector; a larger width in a file means that it is damaged


@dataclass(frozen=True)
class Features:
    """Features, or other outputs of a model, and targets of a split."""

    values: np.ndarray  # float32 [n, D], of readable images in the order of the split
    targets: np.ndarray  # [n], or [n, K]
    seconds: float  # to compute them or to read the cache
    n_computed: int  # images that were not in the cache
    unreadable: dict[str, str] = field(default_factory=dict)  # name and reason
    notes: tuple[str, ...] = ()

    @property
    def cached(self) -> bool:
        """Return True if all came from the cache."""
        return not self.n_computed


def hash_model(model: Model, pipeline: Preprocessing) -> str:
    """Return a hash of the weights, the configuration and the preprocessing."""
    digest = hashlib.sha256(json.dumps([to_json(model.config), to_json(pipeline)], sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {hash_tensor(tensor.cpu())}\n".encode())
    return digest.hexdigest()


def extract_features(
    model: Callable[[Tensor], Tensor],
    pipeline: Preprocessing,
    images: Images,
    *,
    identity: str | None = None,
    kind: str = "features",
    device: torch.device | None = None,
    workers: int | None = None,
    cache: bool = True,
    progress: ProgressCallback | None = None,
) -> Features:
    """Return the outputs of a model for a split: from the cache, the missing ones computed and cached.

    `model` ends in features, or is a function with other outputs of this `kind`; `identity` is the hash of the model.
    """
    if not len(images):
        raise ValueError(f"the {images.split} split has no {images.media}s")
    device = device or torch.device("cpu")
    if isinstance(model, Model):
        identity = identity or (hash_model(model, pipeline) if cache else "")
        model.to(device).eval()
    assert identity is not None, "a function has no hash: give the identity of its model"
    start, store, keys, notes = time.monotonic(), None, [], []
    values, read = np.zeros((len(images), 0), dtype=np.float32), np.zeros(len(images), dtype=bool)
    if cache:
        key = hashlib.sha256("\n".join([str(VERSION), kind, identity, device.type]).encode()).hexdigest()[:40]
        keys, store = image_keys(images), VectorCache(cache_directory() / "features" / f"{key}.float32")
        values, read, problem = store.read(keys)
        notes += [f"{problem}: the {kind} of the {images.split} split are computed again"] if problem else []
    missing, unreadable, label = np.flatnonzero(~read), dict[str, str](), f"{kind} of the {images.split} split"
    if len(missing):
        batches = run_batches(
            TorchRuntime(model, pipeline, "features", device),
            images.select(missing),
            pipeline,
            unreadable,
            batch_size=BATCH_SIZE,
            workers=workers,
            device=device,
            progress=progress,
            stage=label,
            # Images that were unreadable before come in one batch, so their allowed number grows with the readable images.
            max_unreadable=max(MAX_UNREADABLE, int(read.sum())),
        )
        for batch in batches:
            if not np.isfinite(batch.outputs).all():
                raise ValueError(f"{label}: the model's outputs are not finite")
            if not values.shape[1]:
                values = np.zeros((len(images), batch.outputs.shape[1]), dtype=np.float32)
            indices = missing[batch.indices]
            values[indices], read[indices] = batch.outputs, True
            if store is not None and (problem := store.add([keys[index] for index in indices], batch.outputs)):
                notes.append(f"the {kind} are not cached: {problem}")
                store = None  # the disk is full or read-only: one note is enough
    if not read.any():
        reason = next(iter(unreadable.values()), "")
        raise ValueError(f"no {images.media} of the {images.split} split is readable: {reason}")
    seconds = time.monotonic() - start
    return Features(values[read], images.targets[read], seconds, len(missing), unreadable, tuple(notes))


def image_keys(images: Images) -> list[bytes | None]:
    """Return the cache key of every image; None where its file is missing, which is reported when it is read."""
    keys: list[bytes | None] = []
    for index in range(len(images)):
        try:
            keys.append(compute_image_key(images, index))
        except OSError:
            keys.append(None)
    return keys


class VectorCache:
    """A file of vectors in the user's cache directory, one per image."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open_file(self, width: int) -> RecordFile:
        record = np.dtype([*RECORD_PREFIX, ("values", "<f4", width)])
        # `bytes` repeats the width, so that a changed width is detected as damage.
        metadata = {"vitrail": "vectors", "of": self.path.stem, "width": width, "bytes": record.itemsize}
        return RecordFile(self.path, metadata, record)

    def read(self, keys: list[bytes | None]) -> tuple[np.ndarray, np.ndarray, str]:
        """Return the vectors of these images [n, D], which are present [n], and a message about a damaged file."""
        nothing = np.zeros((len(keys), 0), dtype=np.float32), np.zeros(len(keys), dtype=bool)
        try:
            if not self.path.exists() or not self.path.stat().st_size:  # another process may be about to write it
                return *nothing, ""
            width = (read_metadata(self.path) or {}).get("width")
            width = width if isinstance(width, int) and 0 < width <= MAX_WIDTH else 0
            if not width or not (file := self.open_file(width)).is_compatible():
                self.path.unlink()
                return *nothing, f"{self.path} is damaged (unexpected content)"
            records = file.open_records()
        except OSError as error:
            return *nothing, f"{self.path} cannot be read ({error.strerror or error})"
        rows = find_rows(records, keys)
        present = np.flatnonzero(rows >= 0)
        values, read = np.zeros((len(keys), width), dtype=np.float32), np.zeros(len(keys), dtype=bool)
        for start in range(0, len(present), READ_CHUNK):
            chunk = present[start : start + READ_CHUNK]
            part = records[rows[chunk]]
            intact = file.verify_records(part)  # bytes are used only after their checksum is verified
            values[chunk[intact]], read[chunk[intact]] = part["values"][intact], True
        broken = len(present) - int(read.sum())
        return values, read, f"{self.path} is damaged ({broken:,} of {len(present):,} vectors)" if broken else ""

    def add(self, keys: list[bytes | None], values: np.ndarray) -> str:
        """Append vectors [B, D]; return a message where the file cannot be written."""
        named = [row for row, key in enumerate(keys) if key is not None]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.open_file(values.shape[1]).append([key for key in keys if key is not None], values=values[named])
        except OSError as error:
            return str(error)
        return ""

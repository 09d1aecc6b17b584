"""Load models for evaluation, and compute the logits of a dataset."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints.io.source import read_json
from vitrail.checkpoints.load import (
    KEEP,
    build_meta_model,
    compute_checksum,
    derive_model_name,
    find_weights,
    load,
    require_preprocessing,
)
from vitrail.data.dataset import Images
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import Runtime
from vitrail.deploy.runtimes.exported import is_exported
from vitrail.deploy.runtimes.open import open_deployed_model
from vitrail.inference import BATCH_SIZE, TorchRuntime, run_batches
from vitrail.models.base import Model
from vitrail.models.registry import config_from_json
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its preprocessing and origin."""

    where: str  # as given by the user
    name: str  # for display
    model: Model
    preprocessing: Preprocessing
    checksum: str  # SHA-256 of the weights
    training_data: dict[str, Any] | None = None  # from its recipe and its run
    runtime: Runtime | None = None  # used instead of the model; for an exported file the model has no weights
    notes: tuple[str, ...] = ()  # choice of the runtime, number of merged tokens


def load_model(
    where: str | Path,
    *,
    device: str | torch.device = "cpu",
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    classes: int | None = KEEP,
) -> LoadedModel:
    """Load a file, a directory, a run or `hf://owner/name`, resized if `size` is given; without a head if `classes` is None."""
    path = find_weights(where)
    # Not memory-mapped: the alignment of file pages differs, and sums could differ in the last bit.
    model = load(path, image_size=size, assume=assume, take=take, classes=classes, mmap=False).to(device)
    pipeline = require_preprocessing(where, model)
    if size is not None and pipeline.size != size:
        pipeline = pipeline.with_size(size)
    trained = read_training_data(model.card.get("recipe"), path)
    return LoadedModel(
        str(where), derive_model_name(str(where), path), model, pipeline, compute_checksum(path), trained
    )


def load_for_evaluation(
    where: str | Path,
    *,
    device: torch.device,
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    runtime: str = "torch",
    merge: int = 0,
    precision: str = "fp32",
    report: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model for evaluation, with merged tokens or another runtime if requested."""
    exported = is_exported(where)
    if not exported and runtime == "torch" and not merge:
        return load_model(where, device=device, size=size, assume=assume, take=take)
    deployed = open_deployed_model(
        where,
        runtime="auto" if exported and runtime == "torch" else runtime,
        device="auto" if exported else str(device),
        merge=merge,
        size=size,
        assume=assume,
        take=take,
        precision=precision,
        report=report,
    )
    contract, model = deployed.contract, deployed.model
    if model is None:
        model = build_meta_model(config_from_json(contract.config))
        indices = tuple(map(str, range(model.config.classes or 0)))
        model.labels = None if contract.labels == indices else contract.labels
    trained = None if exported else read_training_data(model.card.get("recipe"), find_weights(where))
    name = f"{deployed.name}, merge {contract.merge}" if contract.merge else deployed.name
    return LoadedModel(
        str(where), name, model, contract.preprocessing, contract.checksum, trained, deployed.runtime, deployed.notes
    )


def read_training_data(recipe: Any, path: Path) -> dict[str, Any] | None:
    """Return the data of a model's recipe, with its `path` if the run directory around the model records it."""
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if not isinstance(data, dict):
        return None
    run_json = (path if path.is_dir() else path.parent) / "run.json"
    run = read_json(run_json).get("data") if run_json.is_file() else None
    data_path = run.get("path") if isinstance(run, dict) and run.get("where") == data.get("where") else None
    return data | ({"path": data_path} if isinstance(data_path, str) else {})


@dataclass(frozen=True)
class ComputeOptions:
    """Device, batch size and precision of an evaluation."""

    device: torch.device = torch.device("cpu")
    batch_size: int = BATCH_SIZE
    workers: int | None = None  # None: chosen automatically
    precision: str = "fp32"


@dataclass(frozen=True)
class ModelOutputs:
    """Logits in the order of the images."""

    logits: np.ndarray  # float32 [n, K]; zeros where an image could not be read
    is_read: np.ndarray  # [n] bool
    unreadable: dict[str, str]  # name and reason
    seconds: float  # from the first image to the last
    model_seconds: float  # of the forward passes


def compute_logits(
    opened: LoadedModel, images: Images, compute: ComputeOptions, progress: ProgressCallback | None = None
) -> ModelOutputs:
    """Return the logits of every image; raise ValueError if none can be read or if logits are not finite."""
    if compute.batch_size < 1:
        raise ValueError(f"--batch-size must be >= 1, got {compute.batch_size}")
    runtime = opened.runtime or TorchRuntime(
        opened.model, opened.preprocessing, device=compute.device, precision=compute.precision
    )
    logits, is_read = np.zeros((0, 0), np.float32), np.zeros(len(images), dtype=bool)
    unreadable: dict[str, str] = {}
    model_seconds, start = 0.0, time.perf_counter()
    for batch in run_batches(
        runtime,
        images,
        opened.preprocessing,
        unreadable,
        batch_size=compute.batch_size,
        workers=compute.workers,
        device=compute.device,
        progress=progress,
        stage="evaluating",
    ):
        model_seconds += batch.seconds
        check_finite(batch.outputs, images, batch.indices, opened, compute)
        if not logits.size:
            logits = np.zeros((len(images), batch.outputs.shape[1]), np.float32)
        logits[batch.indices], is_read[batch.indices] = batch.outputs, True
    if not is_read.any():
        name, reason = next(iter(unreadable.items()))
        raise ValueError(f"none of the {len(images):,} images can be read: {name}: {reason}")
    return ModelOutputs(logits, is_read, unreadable, time.perf_counter() - start, model_seconds)


def check_finite(
    logits: np.ndarray, images: Images, indices: np.ndarray, opened: LoadedModel, compute: ComputeOptions
) -> None:
    """Raise ValueError if a logit is not finite."""
    is_bad = ~np.isfinite(logits).all(1)
    if is_bad.any():
        first = images.name(int(indices[int(is_bad.argmax())]))
        hint = "" if compute.precision == "fp32" else f"; {compute.precision} may overflow, use --precision fp32"
        raise ValueError(f"{opened.name} gives logits that are not finite, for {first} first{hint}")

"""Open models for evaluation, and compute the logits of a dataset."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints.io.source import read_json
from vitrail.checkpoints.load import find_weights, inspect_checkpoint
from vitrail.data.dataset import Images
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.exported import is_exported
from vitrail.deploy.runtimes.open import LOADED_MODEL, open_checkpoint, open_deployed_model
from vitrail.deploy.runtimes.precision import CheckedRuntime, current_precision
from vitrail.evaluation.selection import parse_own_data
from vitrail.inference import BATCH_SIZE, run_batches
from vitrail.models.base import Model
from vitrail.tasks import task_of
from vitrail.tasks.base import Sums, add_sums, reduce_batch
from vitrail.training.recipe import Data
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class ComputeOptions:
    """Device, batch size and precision of an evaluation."""

    device: torch.device = torch.device("cpu")
    batch_size: int = BATCH_SIZE
    workers: int | None = None  # None: chosen automatically
    precision: str = "fp32"


def open_for_evaluation(
    where: str | os.PathLike[str] | Model,
    compute: ComputeOptions,
    *,
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    runtime: str = "torch",
    merge: int = 0,
) -> DeployedModel:
    """Open a checkpoint, a run, `hf://owner/name`, a loaded model or an exported file, with merged
    tokens or another runtime if requested."""
    precision = "fp32" if compute.precision == "auto" else compute.precision  # chosen when the images are known
    options: dict[str, Any] = {"size": size, "assume": assume, "take": take, "precision": precision}
    where = where if isinstance(where, Model) else os.fspath(where)
    if not isinstance(where, Model) and is_exported(where):
        deployed = open_deployed_model(where, runtime="auto" if runtime == "torch" else runtime, merge=merge, **options)
    elif runtime == "torch" and not merge:
        deployed = open_checkpoint(where, compute.device, **options)
    else:
        deployed = open_deployed_model(where, runtime=runtime, device=str(compute.device), merge=merge, **options)
    merged = deployed.contract.merge
    return replace(deployed, name=f"{deployed.name}, merge {merged}") if merged else deployed


def with_views(deployed: DeployedModel, clips: int | None = None, crops: int | None = None) -> DeployedModel:
    """Return a model of clips that sees so many clips of a video, and crops of each; None leaves the number as it is."""
    contract = deployed.contract
    clip = contract.preprocessing.clip
    if clip is None:
        option = "clips=" if clips is not None else "crops="
        raise ValueError(f"{option} is for models of clips, and {deployed.name} takes images: leave it out")
    asked = {"clips": clips, "crops": crops}
    clip = replace(clip, **{name: number for name, number in asked.items() if number is not None})
    return replace(deployed, contract=replace(contract, preprocessing=replace(contract.preprocessing, clip=clip)))


def read_training_data(deployed: DeployedModel) -> dict[str, Any] | None:
    """Return the data of a model's recipe, with the `path` or `fingerprint` that the run directory around it records."""
    return None if deployed.model is None else read_card_data(deployed.model.card, deployed.where)


def read_card_data(card: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the data of the recipe in a card, with the `path` or `fingerprint` that the run directory around it records."""
    recipe = card.get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if not isinstance(data, dict):
        return None
    if where == LOADED_MODEL:
        return data
    path = find_weights(where)
    run_json = (path if path.is_dir() else path.parent) / "run.json"
    run = read_json(run_json).get("data") if run_json.is_file() else None
    recorded = run if isinstance(run, dict) and run.get("where") == data.get("where") else {}
    return data | {name: recorded[name] for name in ("path", "fingerprint") if isinstance(recorded.get(name), str)}


def find_own_data(where: str) -> Data:
    """Return the data that a model was trained on; its weights are not read."""
    if is_exported(where):
        return parse_own_data(where, None)
    with inspect_checkpoint(find_weights(where)) as checkpoint:
        return parse_own_data(where, read_card_data(checkpoint.contract.card, where))


@dataclass(frozen=True)
class ModelOutputs:
    """Logits in the order of the images."""

    logits: np.ndarray  # rows of the task, [n, R]: logits of classes; zeros where an image could not be read
    is_read: np.ndarray  # [n] bool
    unreadable: dict[str, str]  # name and reason
    seconds: float  # from the first image to the last
    model_seconds: float  # of the forward passes
    sums: Sums = field(default_factory=dict)  # of the task, over the images that were read


def compute_rows(
    deployed: DeployedModel, images: Images, compute: ComputeOptions, progress: ProgressCallback | None = None
) -> ModelOutputs:
    """Return the row of every image that its task computes metrics from: its logits, or counts of pixels.

    Raise ValueError if no image can be read or if logits are not finite.
    """
    task, targets = task_of(images), images
    images = replace(images, masks=None)  # masks are read at their own size, not prepared like images
    if compute.batch_size < 1:
        raise ValueError(f"batch_size= must be >= 1, got {compute.batch_size}")
    logits, is_read = np.zeros((0, 0), np.float32), np.zeros(len(images), dtype=bool)
    unreadable: dict[str, str] = {}
    order: list[np.ndarray] = []
    sums: Sums = {}
    model_seconds, start = 0.0, time.perf_counter()
    for batch in run_batches(
        deployed.runtime,
        images,
        deployed.contract.preprocessing,
        unreadable,
        batch_size=compute.batch_size,
        workers=compute.workers,
        device=compute.device,
        progress=progress,
        stage="evaluating",
        activation=deployed.contract.activation,
    ):
        model_seconds += batch.seconds
        is_finite = np.isfinite(batch.outputs).all(tuple(range(1, batch.outputs.ndim)))
        if not is_finite.all():
            first = images.name(int(batch.indices[int(is_finite.argmin())]))
            precision = current_precision(deployed)
            hint = "" if precision == "fp32" else f"; {precision} may overflow, use precision='fp32'"
            raise ValueError(f"{deployed.name} gives logits that are not finite, for {first} first{hint}")
        outputs = torch.from_numpy(batch.outputs)
        indices, rows, more = reduce_batch(task, outputs, targets, batch.indices, unreadable)
        if not logits.size:
            logits = np.zeros((len(images), rows.shape[1]), rows.dtype)
        logits[indices], is_read[indices], sums = rows, True, add_sums(sums, more)
        order.append(batch.indices)
    if not is_read.any():
        name, reason = next(iter(unreadable.items()))
        raise ValueError(f"none of the {len(images):,} {images.media}s can be read: {name}: {reason}")
    clip = deployed.contract.preprocessing.clip
    has_one_view = clip is None or clip.views == 1  # the check keeps outputs of views, not of images
    if (
        has_one_view
        and isinstance(deployed.runtime, CheckedRuntime)
        and (lower := deployed.runtime.check.lower_outputs()) is not None
    ):
        logits[np.concatenate(order)[: len(lower)]] = lower  # all images in one precision
    return ModelOutputs(logits, is_read, unreadable, time.perf_counter() - start, model_seconds, sums)

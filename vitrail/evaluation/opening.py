"""A model that is to be judged: any checkpoint that can be loaded, or the run that made it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.files.source import read_json
from vitrail.checkpoints.loading import KEEP, blank, load
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.exported_files import is_exported
from vitrail.deploy.opening import opened
from vitrail.deploy.runtime import Runtime
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.models.written import from_json
from vitrail.run.opening import checksum, name_of, pipeline_of, weights_of


@dataclass(frozen=True)
class Opened:
    """A model ready to answer, and what is to be known of it."""

    where: str  # as the user wrote it
    name: str  # what to call it
    model: ViT | BiT
    preprocessing: Preprocessing
    checksum: str  # SHA-256 of the weights' file
    trained: dict[str, Any] | None = None  # the data it was trained on, as its recipe and its run tell
    runtime: Runtime | None = None  # what answers in the model's place; of an exported file, the model has no weights
    notes: tuple[str, ...] = ()  # how that was chosen, and how many tokens are left where they are merged


def open_model(
    where: str | Path,
    *,
    device: str | torch.device = "cpu",
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    classes: int | None = KEEP,
) -> Opened:
    """The model of a file, a directory, a run or `hf://owner/name`, at its own size or another; None classes: no head."""
    path = weights_of(where)
    # Not mapped: pages of a file are aligned otherwise than memory, and sums could differ in their last bit.
    model = load(path, image_size=size, assume=assume, take=take, classes=classes, mapped=False).to(device)
    pipeline = pipeline_of(where, model)
    if size is not None and pipeline.size != size:
        pipeline = pipeline.at(size)
    trained = trained_on(model.card.get("recipe"), path)
    return Opened(str(where), name_of(str(where), path), model, pipeline, checksum(path), trained)


def open_judged(
    where: str | Path,
    *,
    device: torch.device,
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    runtime: str = "torch",
    merge: int = 0,
    precision: str = "fp32",
    tell: Callable[[str], None] | None = None,
) -> Opened:
    """A model that is judged by its answers: as `open_model` gives it, or with its tokens merged, or run by something else."""
    exported = is_exported(where)
    if not exported and runtime == "torch" and not merge:
        return open_model(where, device=device, size=size, assume=assume, take=take)
    found = opened(
        where,
        runtime="auto" if exported and runtime == "torch" else runtime,
        device="auto" if exported else str(device),
        merge=merge,
        size=size,
        assume=assume,
        take=take,
        precision=precision,
        tell=tell,
    )
    contract, model = found.contract, found.model
    if model is None:
        model = blank(from_json(contract.config))
        numbers = tuple(map(str, range(model.config.classes or 0)))
        model.labels = None if contract.labels == numbers else contract.labels
    trained = None if exported else trained_on(model.card.get("recipe"), weights_of(where))
    name = f"{found.name}, merge {contract.merge}" if contract.merge else found.name
    return Opened(
        str(where), name, model, contract.preprocessing, contract.checksum, trained, found.runtime, found.notes
    )


def trained_on(recipe: Any, path: Path) -> dict[str, Any] | None:
    """The data of a model's recipe; with its `path`, where the run that made the model lies around it and wrote that down."""
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if not isinstance(data, dict):
        return None
    about = (path if path.is_dir() else path.parent) / "run.json"
    run = read_json(about).get("data") if about.is_file() else None
    told = run.get("path") if isinstance(run, dict) and run.get("where") == data.get("where") else None
    return data | ({"path": told} if isinstance(told, str) else {})

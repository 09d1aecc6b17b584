"""A model that is to be judged: any checkpoint that can be loaded, or the run that made it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.files.source import read_json
from vitrail.checkpoints.loading import KEEP, load
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
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


def trained_on(recipe: Any, path: Path) -> dict[str, Any] | None:
    """The data of a model's recipe; with its `path`, where the run that made the model lies around it and wrote that down."""
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if not isinstance(data, dict):
        return None
    about = (path if path.is_dir() else path.parent) / "run.json"
    run = read_json(about).get("data") if about.is_file() else None
    told = run.get("path") if isinstance(run, dict) and run.get("where") == data.get("where") else None
    return data | ({"path": told} if isinstance(told, str) else {})

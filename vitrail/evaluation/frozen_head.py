"""A new head for a frozen model, trained on cached features: the linear probe as a model.

With a frozen body and images that are not augmented, training the head is logistic regression on the features. That is a convex
problem, which L-BFGS solves in seconds, so the head is the classifier of the linear probe, written into the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.checkpoints.load import load, require_preprocessing, save
from vitrail.data.dataset import Images
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.probes import score_logits
from vitrail.metrics.linear import LinearProbe, fit_linear_probe
from vitrail.metrics.temperature import TemperatureFit, choose_temperature
from vitrail.models.base import Model, remove_calibration
from vitrail.training.features import Features
from vitrail.training.recipe import Data
from vitrail.training.runs.prepare import Prepared
from vitrail.utils.json import to_json

Extract = Callable[[Model, Preprocessing, Images], Features]
MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class HeadResult:
    """The evaluated head of a frozen model."""

    score: float  # top-1; mAP for multi-label data
    interval: tuple[float, float]
    parameters: int
    c: float
    converged: bool
    temperature: TemperatureFit
    seconds: float  # of the features
    unreadable: dict[str, str]


def train_head(
    source: str,
    data: Data,
    prepared: Prepared,
    extract: Extract,
    directory: Path,
    *,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    fitted: LinearProbe | None = None,
) -> HeadResult:
    """Fit a head on the training split, scale its logits on validation, evaluate it, and write the model.

    `fitted` is a classifier of the same features, if it is already there. A test split is only evaluated.
    """
    labels = prepared.labels.names
    model = load(source, classes=len(labels), image_size=size, mmap=False)
    pipeline, body = require_preprocessing(source, model), model.replace_head(None)
    splits = ("validation", "test") if "test" in prepared.splits else ("validation",)
    features = {split: extract(body, pipeline, prepared.splits[split]) for split in ("train", *splits)}
    train, held_out = features["train"], features["validation"]
    if fitted is None:
        fitted = fit_linear_probe(train.values, train.targets, held_out.values, len(labels), seed=seed)

    def predict(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float64) @ fitted.weight.T + fitted.bias

    fit = choose_temperature(predict(held_out.values), held_out.targets)
    weight, bias = (torch.from_numpy(values / fit.temperature) for values in (fitted.weight, fitted.bias))
    model.set_classifier(weight, bias)
    model.labels, model.card = labels, remove_calibration(model.card)
    directory.mkdir(parents=True, exist_ok=True)
    if fit.is_scaled:
        model.card = {**model.card, "calibration": fit.as_dict()}
    save(model, directory / MODEL_FILE, recipe=describe_training(data, prepared, fitted.c))
    last = features[splits[-1]]
    score, interval, _ = score_logits(predict(last.values), last.targets)
    unreadable = {name: reason for part in features.values() for name, reason in part.unreadable.items()}
    seconds = sum(part.seconds for part in features.values())
    return HeadResult(
        score, interval, weight.numel() + bias.numel(), fitted.c, fitted.converged, fit, seconds, unreadable
    )


def describe_training(data: Data, prepared: Prepared, c: float) -> dict[str, Any]:
    """Return the entry of the card that other commands read: the data, the task and the method."""
    multilabel = prepared.train.is_multi_label
    described = to_json(data) | {"task": "multi" if multilabel else "single"}
    objective = {"type": "Classification", "loss": "sigmoid" if multilabel else "softmax"}
    method = f"logistic regression on the features of the frozen model, C {c:g}"
    return {"name": "linear head", "data": described, "objective": objective, "tune": "head", "method": method}

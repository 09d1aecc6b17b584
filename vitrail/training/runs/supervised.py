"""Evaluation of runs that learn labels: logits of held-out images, their metrics, and the files in `evaluation`."""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor

from vitrail.data.dataset import Images
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import convert_image
from vitrail.metrics import compute_metrics, find_confident_mistakes, score_name
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.temperature import TemperatureFit, choose_temperature
from vitrail.models.base import Model
from vitrail.training.distributed import Team
from vitrail.training.runs.models import MODEL, Evaluator, TrainedModel
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.trainer import Metrics, Trainer

MAX_MISTAKES, THUMBNAIL_SIDE = 24, 192  # thumbnails of a split, and their longer side in pixels


class LabelEvaluator(Evaluator):
    """Validates and finishes a run that learns labels."""

    def __init__(self, setup: RunSetup, loaders: RunLoaders) -> None:
        super().__init__(setup, loaders)
        self.score = score_name(setup.prepared.train.is_multi_label)
        self.validated: tuple[int, np.ndarray, np.ndarray] | None = None  # step, logits and readable images

    def validate(self, trainer: Trainer) -> Metrics:
        """Return the metrics of the validation split."""
        task, loader = trainer.task, self.loaders.split("validation")
        normalise = self.setup.recipe.preprocessing.normalise
        with trainer.autocast():
            logits, readable = predict_split(lambda x: task(x)["logits"], loader, normalise, self.setup.team)
        self.validated = trainer.progress.step, logits, readable
        metrics = summarise_metrics(logits[readable], loader.images.targets[readable], intervals=False)
        return {name: float(metrics[name]) for name in ("loss", "top1", "top5", "map") if metrics.get(name) is not None}

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Write the model, calibrate and evaluate the written file, and write the predictions and the summary."""
        setup, trained = self.setup, TrainedModel(self.setup, trainer)
        best, adapter = trained.uses_best(), None
        if not best:
            with trainer.evaluation_weights():
                trained.save(MODEL)
        model = trained.load_written(best)
        fit: TemperatureFit | None = None
        results: dict[str, dict[str, Any]] = {}
        for split in ("validation", "test"):
            if split in setup.prepared.splits:
                loader = self.loaders.split(split)
                step = trainer.progress.best_step if best else trainer.progress.step
                with trainer.autocast():
                    logits, readable = self.evaluate(model, loader, step if split == "validation" else -1)
                if split == "validation" and setup.recipe.calibrate == "temperature":
                    fit = self.calibrate(logits[readable], loader.images.targets[readable])
                    if fit.is_scaled:
                        model, logits = trained.scale_written(fit), logits / np.float32(fit.temperature)
                results[split] = summarise_metrics(logits[readable], loader.images.targets[readable])
                for unreadable in setup.team.gather_objects(loader.unreadable):
                    trainer.progress.unreadable |= unreadable
                if setup.team.is_main:
                    images = loader.images.select(readable)
                    write_predictions(setup.directory, split, logits[readable], images, setup.note)
        if not best:
            with trainer.evaluation_weights():
                adapter = trained.save_adapter(fit.temperature if fit else 1.0)
        split = "test" if "test" in results else "validation"
        summary = {**results[split], "split": split, **trained.describe_progress(best)}
        summary |= {"adapter": adapter} if adapter is not None else {}
        summary |= {"calibration": fit.as_dict()} if fit is not None else {}
        return setup.write_summary(summary | results)

    def calibrate(self, logits: np.ndarray, targets: np.ndarray) -> TemperatureFit:
        """Return the temperature of the model, from its logits of the validation split."""
        team = self.setup.team
        return team.broadcast_object(choose_temperature(logits, targets) if team.is_main else None)

    def evaluate(self, model: Model, loader: Loader, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of the written model, and which images were readable.

        Those of the validation at `step` are returned if the model computes the same for the first batch, bit for bit.
        """
        normalise, team = self.setup.recipe.preprocessing.normalise, self.setup.team
        if self.validated is not None and self.validated[0] == step:
            _, logits, readable = self.validated
            batch = next(iter(loader.iter_once()))
            with torch.no_grad():
                values = model(normalise(batch.pixels.to(team.device))).float().cpu().numpy()
            same = np.array_equal(values, logits[batch.indices.numpy()])
            if not any(team.any_process(not same)):
                return logits, readable
        return predict_split(model, loader, normalise, team)


def summarise_metrics(logits: np.ndarray, targets: np.ndarray, intervals: bool = True) -> dict[str, Any]:
    """Return all metrics. For multi-label images `top1` is how often the class with the highest logit is one of the labels."""
    metrics = compute_metrics(logits, targets, intervals=intervals)
    if targets.ndim == 2:
        correct = np.take_along_axis(targets, logits.argmax(1)[:, None], 1)
        metrics["top1"] = float(correct.mean())
        if intervals:
            metrics["top1_interval"] = list(wilson_interval(int(correct.sum()), len(correct)))
    return metrics


@torch.no_grad()
def predict_split(
    model: Callable[[Tensor], Tensor], loader: Loader, normalise: Callable[[Tensor], Tensor], team: Team
) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs [n, K] for all images of a loader, on every process, and which images were readable, [n]."""
    outputs: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in loader.iter_once():
        # A sharded model computes on all processes or on none: a process without images left computes on a blank one.
        pixels = batch.pixels if len(batch.pixels) else torch.zeros((1, *batch.pixels.shape[1:]), dtype=torch.uint8)
        values = model(normalise(pixels.to(team.device, non_blocking=True))).float().cpu().numpy()
        outputs.append((batch.indices.numpy(), values[: len(batch.indices)]))
    parts = [part for process in team.gather_objects(outputs) for part in process]
    logits = np.zeros((len(loader.images), parts[0][1].shape[1]), dtype=np.float32)
    readable = np.zeros(len(loader.images), dtype=bool)
    for indices, values in parts:
        logits[indices], readable[indices] = values, True
    return logits, readable


def write_predictions(
    directory: Path, split: str, logits: np.ndarray, images: Images, note: Callable[[str], None]
) -> None:
    """Write logits, targets and names of a split, and thumbnails of the most confident errors."""
    folder = directory / "evaluation"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{split}.npz", logits=logits, targets=images.targets)
    names = [images.name(index) for index in range(len(images))]
    (folder / f"{split}.json").write_text(json.dumps({"names": names}, ensure_ascii=False), encoding="utf-8")
    for index in find_confident_mistakes(logits, images.targets, MAX_MISTAKES):
        try:
            data = encode_thumbnail(images, int(index))
        except (OSError, ValueError) as error:
            note(f"no thumbnail of {images.name(int(index))}: {error}")
            continue
        (folder / "pictures" / f"{split}-{index:06d}.jpg").write_bytes(data)


def encode_thumbnail(images: Images, index: int) -> bytes:
    """Return a small upright copy of an image as JPEG bytes."""
    with images.open(index) as image:
        thumbnail = convert_image(ImageOps.exif_transpose(image), 3)
    thumbnail.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = BytesIO()
    thumbnail.save(file, "JPEG", quality=88)
    return file.getvalue()

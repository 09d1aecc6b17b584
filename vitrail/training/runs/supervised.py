"""Evaluation of runs that learn labels: outputs of held-out images, their metrics, and the files in `evaluation`.

The task (`vitrail/tasks`) defines outputs, metrics and drawings.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.dataset import Images
from vitrail.data.loader import Batch, Loader
from vitrail.metrics.temperature import TemperatureFit, choose_temperature
from vitrail.models.base import Model
from vitrail.tasks import Task, task_of
from vitrail.tasks.base import Sums, add_sums, reduce_batch
from vitrail.training.distributed import Team
from vitrail.training.runs.models import MODEL, Evaluator, TrainedModel
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.trainer import Metrics, Trainer

MAX_EXAMPLES = 24  # images of a split that are drawn for the report
# Outputs of a batch and the indices of its images, to the images that are kept and their rows, [B, R].
Reduce = Callable[[Tensor, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Predictions:
    """What the metrics of a split are computed from."""

    rows: np.ndarray  # [n, R], zeros where an image could not be read
    readable: np.ndarray  # [n] bool
    sums: Sums  # over the readable images


class LabelEvaluator(Evaluator):
    """Validates and finishes a run that learns labels."""

    def __init__(self, setup: RunSetup, loaders: RunLoaders) -> None:
        super().__init__(setup, loaders)
        self.task: Task = task_of(setup.prepared.train)
        self.task.check_preprocessing(setup.recipe.preprocessing)
        self.score = self.task.score
        self.validated: tuple[int, Predictions] | None = None  # step of the last validation

    def validate(self, trainer: Trainer) -> Metrics:
        """Return the metrics of the validation split."""
        module, images = trainer.loss_module, self.setup.prepared.splits["validation"]
        with trainer.autocast():
            found = self.predict(lambda x: module(x)["logits"], "validation")
        self.validated = trainer.progress.step, found
        rows, readable = found.rows, found.readable
        metrics = self.task.compute_metrics(rows[readable], images.select(readable), intervals=False)
        return {name: float(metrics[name]) for name in self.task.validation_metrics if metrics.get(name) is not None}

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
                step = trainer.progress.best_step if best else trainer.progress.step
                with trainer.autocast():
                    found = self.evaluate(model, split, step if split == "validation" else -1)
                images, rows = setup.prepared.splits[split].select(found.readable), found.rows[found.readable]
                if split == "validation" and setup.recipe.calibrate == "temperature" and self.task.calibrates:
                    fit = self.calibrate(rows, images.targets)
                    if fit.is_scaled:
                        model, rows = trained.scale_written(fit), rows / np.float32(fit.temperature)
                results[split] = self.task.compute_metrics(rows, images)
                for unreadable in setup.team.gather_objects(self.loaders.split(split).unreadable):
                    trainer.progress.unreadable |= unreadable
                if setup.team.is_main:
                    with trainer.autocast():
                        self.write_predictions(split, rows, found.sums, images, model)
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

    def predict(self, model: Callable[[Tensor], Tensor], split: str) -> Predictions:
        """Return the rows and sums of the task for all images of a split."""
        normalise, team, loader = self.setup.recipe.preprocessing.normalise, self.setup.team, self.loaders.split(split)
        sums: Sums = {}

        def reduce(outputs: Tensor, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            nonlocal sums
            indices, rows, more = self.reduce(split, outputs, indices)
            sums = add_sums(sums, more)
            return indices, rows

        rows, readable = predict_split(model, loader, normalise, team, reduce)
        return Predictions(rows, readable, functools.reduce(add_sums, team.gather_objects(sums)))

    def reduce(self, split: str, outputs: Tensor, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, Sums]:
        """Return the readable images of a batch, their rows and sums."""
        images, loader = self.setup.prepared.splits[split], self.loaders.split(split)
        return reduce_batch(self.task, outputs, images, indices, loader.unreadable)

    def evaluate(self, model: Model, split: str, step: int) -> Predictions:
        """Return the rows and sums of the written model.

        Those of the validation at `step` are returned if the model computes the same for the first batch, bit for bit.
        """
        normalise, team = self.setup.recipe.preprocessing.normalise, self.setup.team
        if self.validated is not None and self.validated[0] == step:
            found = self.validated[1]
            batch = next(iter(self.loaders.split(split).iter_once()))
            with torch.no_grad():
                outputs = compute_outputs(model, batch, normalise, team)
            indices, rows, _ = self.reduce(split, outputs, batch.indices.numpy())
            if not any(team.any_process(not np.array_equal(rows, found.rows[indices]))):
                return found
        return self.predict(model, split)

    def write_predictions(self, split: str, rows: np.ndarray, sums: Sums, images: Images, model: Model) -> None:
        """Write the rows, sums, targets and names of a split, and drawings of the worst images."""
        folder, pipeline = self.setup.directory / "evaluation", self.setup.recipe.preprocessing
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        arrays: Any = self.task.stored_arrays(rows, images) | sums
        np.savez_compressed(folder / f"{split}.npz", **arrays)
        names = [images.name(index) for index in range(len(images))]
        (folder / f"{split}.json").write_text(json.dumps({"names": names}, ensure_ascii=False), encoding="utf-8")

        @torch.no_grad()
        def predict(index: int) -> Tensor:
            with images.open(index) as image:
                pixels = pipeline.to_pixels(image)
            return model(pipeline.normalise(pixels[None].to(self.setup.team.device)))[0]

        for index in self.task.find_examples(rows, images, MAX_EXAMPLES).tolist():
            try:
                data = self.task.draw_example(images, index, predict)
            except (OSError, ValueError) as error:
                self.setup.note(f"no thumbnail of {images.name(index)}: {error}")
                continue
            (folder / "pictures" / f"{split}-{index:06d}.jpg").write_bytes(data)


def compute_outputs(
    model: Callable[[Tensor], Tensor], batch: Batch, normalise: Callable[[Tensor], Tensor], team: Team
) -> Tensor:
    """Return the outputs of a batch, which may be empty.

    A sharded model computes on all processes or on none: a process without images left computes on a blank one.
    """
    pixels = batch.pixels if len(batch.pixels) else torch.zeros((1, *batch.pixels.shape[1:]), dtype=torch.uint8)
    return model(normalise(pixels.to(team.device, non_blocking=True)))[: len(batch.pixels)]


@torch.no_grad()
def predict_split(
    model: Callable[[Tensor], Tensor],
    loader: Loader,
    normalise: Callable[[Tensor], Tensor],
    team: Team,
    reduce: Reduce = lambda outputs, indices: (indices, outputs.float().cpu().numpy()),
) -> tuple[np.ndarray, np.ndarray]:
    """Return a row for every image of a loader, [n, R], on every process, and which images were readable, [n].

    A row is the output of the model, or what `reduce` makes of it.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in loader.iter_once():
        outputs = compute_outputs(model, batch, normalise, team)
        if len(batch.indices):
            parts.append(reduce(outputs, batch.indices.numpy()))
    gathered = [part for process in team.gather_objects(parts) for part in process]
    first = gathered[0][1]
    rows = np.zeros((len(loader.images), first.shape[1]), dtype=first.dtype)
    readable = np.zeros(len(loader.images), dtype=bool)
    for indices, values in gathered:
        rows[indices], readable[indices] = values, True
    return rows, readable

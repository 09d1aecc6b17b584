"""Evaluation of runs that learn labels: outputs of held-out images, their metrics, and the files in `evaluation`.

The task (`vitrail/tasks`) defines outputs, metrics and drawings.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.dataset import Images
from vitrail.data.loader import Batch, Loader
from vitrail.metrics.temperature import TemperatureFit, choose_temperature
from vitrail.models.base import Model
from vitrail.tasks import Task, task_of
from vitrail.training.distributed import Team
from vitrail.training.runs.models import MODEL, Evaluator, TrainedModel
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.trainer import Metrics, Trainer

MAX_EXAMPLES = 24  # images of a split that are drawn for the report
Reduce = Callable[[Tensor, np.ndarray], np.ndarray]  # outputs of a batch and the indices of its images, to rows [B, R]


class LabelEvaluator(Evaluator):
    """Validates and finishes a run that learns labels."""

    def __init__(self, setup: RunSetup, loaders: RunLoaders) -> None:
        super().__init__(setup, loaders)
        self.task: Task = task_of(setup.prepared.train)
        self.task.check_preprocessing(setup.recipe.preprocessing)
        self.score = self.task.score
        self.validated: tuple[int, np.ndarray, np.ndarray] | None = None  # step, rows and readable images

    def validate(self, trainer: Trainer) -> Metrics:
        """Return the metrics of the validation split."""
        module, loader = trainer.loss_module, self.loaders.split("validation")
        with trainer.autocast():
            rows, readable = self.predict(lambda x: module(x)["logits"], loader)
        self.validated = trainer.progress.step, rows, readable
        metrics = self.task.compute_metrics(rows[readable], loader.images.select(readable), intervals=False)
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
                loader = self.loaders.split(split)
                step = trainer.progress.best_step if best else trainer.progress.step
                with trainer.autocast():
                    rows, readable = self.evaluate(model, loader, step if split == "validation" else -1)
                images, rows = loader.images.select(readable), rows[readable]
                if split == "validation" and setup.recipe.calibrate == "temperature" and self.task.calibrates:
                    fit = self.calibrate(rows, images.targets)
                    if fit.is_scaled:
                        model, rows = trained.scale_written(fit), rows / np.float32(fit.temperature)
                results[split] = self.task.compute_metrics(rows, images)
                for unreadable in setup.team.gather_objects(loader.unreadable):
                    trainer.progress.unreadable |= unreadable
                if setup.team.is_main:
                    with trainer.autocast():
                        self.write_predictions(split, rows, images, model)
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

    def predict(self, model: Callable[[Tensor], Tensor], loader: Loader) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the task [n, R] for all images of a loader, and which images were readable, [n]."""
        normalise, reduce = self.setup.recipe.preprocessing.normalise, self.task.reduce_outputs
        return predict_split(model, loader, normalise, self.setup.team, lambda x, i: reduce(x, loader.images, i))

    def evaluate(self, model: Model, loader: Loader, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the written model, and which images were readable.

        Those of the validation at `step` are returned if the model computes the same for the first batch, bit for bit.
        """
        normalise, team = self.setup.recipe.preprocessing.normalise, self.setup.team
        if self.validated is not None and self.validated[0] == step:
            _, rows, readable = self.validated
            batch = next(iter(loader.iter_once()))
            with torch.no_grad():
                outputs = compute_outputs(model, batch, normalise, team)
            indices = batch.indices.numpy()
            same = np.array_equal(self.task.reduce_outputs(outputs, loader.images, indices), rows[indices])
            if not any(team.any_process(not same)):
                return rows, readable
        return self.predict(model, loader)

    def write_predictions(self, split: str, rows: np.ndarray, images: Images, model: Model) -> None:
        """Write the rows, targets and names of a split, and drawings of the worst images."""
        folder, pipeline = self.setup.directory / "evaluation", self.setup.recipe.preprocessing
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        arrays: Any = self.task.stored_arrays(rows, images)
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
    reduce: Reduce = lambda outputs, indices: outputs.float().cpu().numpy(),
) -> tuple[np.ndarray, np.ndarray]:
    """Return a row for every image of a loader, [n, R], on every process, and which images were readable, [n].

    A row is the output of the model, or what `reduce` makes of it.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in loader.iter_once():
        outputs = compute_outputs(model, batch, normalise, team)
        if len(batch.indices):
            indices = batch.indices.numpy()
            parts.append((indices, reduce(outputs, indices)))
    gathered = [part for process in team.gather_objects(parts) for part in process]
    first = gathered[0][1]
    rows = np.zeros((len(loader.images), first.shape[1]), dtype=first.dtype)
    readable = np.zeros(len(loader.images), dtype=bool)
    for indices, values in gathered:
        rows[indices], readable[indices] = values, True
    return rows, readable

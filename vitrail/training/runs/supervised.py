"""Evaluation of runs that learn labels: metrics of the logits on held-out images."""

import shutil
from collections.abc import Callable
from typing import Any

from vitrail.checkpoints.load import load
from vitrail.metrics import score_name
from vitrail.objectives.base import Task
from vitrail.training.runs.models import BEST, MODEL, TrainedModel
from vitrail.training.runs.predictions import predict_split, summarise_metrics, validation_metrics, write_predictions
from vitrail.training.runs.record import write_json
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.trainer import Metrics, Trainer


class LabelEvaluator:
    """Validates and finishes a run that learns labels."""

    def __init__(self, setup: RunSetup, loaders: RunLoaders) -> None:
        self.setup, self.loaders = setup, loaders
        self.score = score_name(setup.prepared.train.is_multi_label)

    def check(self) -> None:
        """Raise ValueError for a run that cannot work."""
        self.setup.batch_size()

    def begin(self, build_baseline: Callable[[], Task], resumed: bool) -> None:
        """Do nothing: there is no baseline to measure."""

    def validate(self, trainer: Trainer) -> Metrics:
        """Return the metrics of the validation split."""
        task, loader = trainer.task, self.loaders.split("validation")
        normalise = self.setup.recipe.preprocessing.normalise
        logits, readable = predict_split(lambda x: task(x)["logits"], loader, normalise, self.setup.team)
        return validation_metrics(logits[readable], loader.images.targets[readable])

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Write the model, evaluate the written file, and write the predictions and the summary."""
        setup, trained, progress = self.setup, TrainedModel(self.setup, trainer), trainer.progress
        directory, team = setup.directory, setup.team
        best, adapter = trained.uses_best(), None
        if not best:
            with trainer.kept_weights():
                trained.save(MODEL)
                adapter = trained.save_adapter()
        elif team.is_main:
            shutil.copyfile(directory / BEST, directory / MODEL)
        team.barrier()
        model = load(directory / MODEL, mmap=False).to(team.device)
        results: dict[str, dict[str, Any]] = {}
        for split in ("validation", "test"):
            if split in setup.prepared.splits:
                loader = self.loaders.split(split)
                logits, readable = predict_split(model, loader, setup.recipe.preprocessing.normalise, team)
                results[split] = summarise_metrics(logits[readable], loader.images.targets[readable])
                for unreadable in team.gather_objects(loader.unreadable):
                    progress.unreadable |= unreadable
                if team.is_main:
                    write_predictions(directory, split, logits[readable], loader.images.select(readable), setup.note)
        split = "test" if "test" in results else "validation"
        summary = {
            **results[split],
            "split": split,
            **trained.describe_progress(best),
            **({"adapter": adapter} if adapter is not None else {}),
            **results,
        }
        if team.is_main:
            write_json(directory / "summary.json", summary)
        team.barrier()
        return summary

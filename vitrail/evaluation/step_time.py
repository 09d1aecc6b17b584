"""Measure the time of training steps and validation, to plan a training within a time budget."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from vitrail.models.lora import tune
from vitrail.training.checkpointing import Checkpoints
from vitrail.training.distributed import join_process_group
from vitrail.training.logging import MetricsLog
from vitrail.training.recipe import Machine, Recipe
from vitrail.training.runs.prepare import Prepared
from vitrail.training.runs.run import Run
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.trainer import Plan, Trainer

MEASURED_STEPS = 5  # the first is warm-up
VALIDATIONS_PER_RUN = 1  # at the end


@dataclass(frozen=True)
class StepTime:
    """Duration of the parts of a training, in seconds."""

    startup: float  # until the end of the first step
    step: float
    evaluation: float  # of validation and test, as often as a run does them
    steps_per_epoch: int

    def fit_steps(self, seconds: float) -> int:
        """Return the number of steps that fit into a time budget, besides startup and evaluation."""
        return int(max(0.0, seconds - self.startup - self.evaluation) / self.step)

    def total_minutes(self, steps: int) -> float:
        """Return the minutes of a training of this length."""
        return (self.startup + self.evaluation + steps * self.step) / 60


def measure_step_time(recipe: Recipe, prepared: Prepared, machine: Machine) -> StepTime:
    """Run a few training steps of a recipe without saving, and return their duration."""
    with join_process_group(machine.device, machine.parallel) as team:
        start = time.monotonic()
        run = Run(RunSetup(recipe, prepared, Path(), machine, team))
        model = run.prepare_model()
        tune(model, recipe.tune)
        loader = run.loaders.training()
        steps, accumulate = MEASURED_STEPS, recipe.accumulate
        plan = Plan(steps, steps, accumulate=accumulate, precision=recipe.precision, seed=recipe.seed)
        training = Trainer(
            task=run.build_task(model, MEASURED_STEPS),
            loader=loader,
            normalise=recipe.preprocessing.normalise,
            optim=recipe.optimizer,
            schedule=recipe.schedule,
            plan=plan,
            team=team,
            journal=MetricsLog(None),
            checkpoints=Checkpoints(Path(), team),  # unused: nothing is saved
            validate=dict,
            on_best=lambda: None,
            ema=recipe.ema,
        )
        marks: list[float] = []
        try:
            for step, epoch, batch in training.batches():
                training.train_step(step, epoch, batch)
                marks.append(time.monotonic())
            step = (marks[-1] - marks[0]) / (len(marks) - 1)
            evaluation = measure_evaluation(run.loaders, training)
            return StepTime(marks[0] - start, step, evaluation, loader.steps_per_epoch)
        finally:
            run.loaders.close()


def measure_evaluation(loaders: RunLoaders, training: Trainer) -> float:
    """Return the seconds of all validations of a run, the one at the end, and the test split."""
    splits = loaders.setup.prepared.splits
    n_images = len(splits["validation"]) * (VALIDATIONS_PER_RUN + 1) + len(splits.get("test", ()))
    training.task.eval()
    seconds, previous = 0.0, time.monotonic()
    with torch.inference_mode():
        for index, batch in enumerate(loaders.split("validation").iter_once()):
            arrived = time.monotonic()
            training.task(training.normalise(batch.pixels.to(loaders.setup.team.device)))
            # The first batch waits for workers to start; only the second includes the loading time.
            since = arrived if index == 0 else previous
            previous = time.monotonic()
            seconds = (previous - since) / max(1, len(batch.indices))
            if index == 1:
                break
    return seconds * n_images

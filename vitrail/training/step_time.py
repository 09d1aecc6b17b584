"""Measure the time of training steps and evaluation, to plan a training within a time budget."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitrail.data.transforms.user import UserFunction
from vitrail.models.lora import tune
from vitrail.tasks import task_of
from vitrail.training.checkpointing import Checkpoints
from vitrail.training.distributed import Team, join_process_group
from vitrail.training.logging import MetricsLog
from vitrail.training.recipe import Machine, Recipe
from vitrail.training.runs.prepare import Prepared
from vitrail.training.runs.run import Run
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.trainer import Plan, Trainer
from vitrail.utils.devices import synchronise

MEASURED_STEPS = 5  # the first is warm-up
MAX_MEASURED_STEPS = 60
VALIDATIONS_PER_RUN = 1  # at the end
GOLDEN_RATIO = 0.6180339887  # its multiples, modulo 1, are spread evenly


@dataclass(frozen=True)
class StepTime:
    """Duration of the parts of a training, in seconds."""

    startup: float  # until the end of the first step
    step: float
    evaluation: float  # of validation and test, as often as a run does them
    steps_per_epoch: int
    image: float = 0.0  # to evaluate one image
    save: float = 0.0  # to write a checkpoint

    def fit_steps(self, seconds: float) -> int:
        """Return the number of steps that fit into a time budget, besides startup and evaluation."""
        return int(max(0.0, seconds - self.startup - self.evaluation) / self.step)

    def total_minutes(self, steps: int) -> float:
        """Return the minutes of a training of this length."""
        return (self.startup + self.evaluation + steps * self.step) / 60


def measure_step_time(recipe: Recipe, prepared: Prepared, machine: Machine) -> StepTime:
    """Run a few training steps of a recipe without saving, and return their duration."""
    with join_process_group(**machine.group()) as team:
        return measure_on_team(recipe, prepared, machine, team)


def measure_on_team(
    recipe: Recipe,
    prepared: Prepared,
    machine: Machine,
    team: Team,
    seconds: float | None = None,
    functions: Sequence[UserFunction] = (),
) -> StepTime:
    """Measure on all processes of a team, MEASURED_STEPS or about so many seconds; return the times of the main process."""
    start = time.monotonic()
    run = Run(RunSetup(recipe, prepared, Path(), machine, team, functions=functions))
    try:
        run.check_inputs(resumed=False)
        training = build_measured_trainer(run)
        first, step = measure_steps(training, seconds)
        image = measure_image(run.loaders, training)
        splits, save = prepared.splits, measure_save(training) if seconds is not None else 0.0
        n_images = len(splits["validation"]) * (VALIDATIONS_PER_RUN + 1) + len(splits.get("test", ()))
        per_epoch = training.loader.steps_per_epoch
        return team.broadcast_object(StepTime(first - start, step, image * n_images, per_epoch, image, save))
    finally:
        run.loaders.close()


def build_measured_trainer(run: Run) -> Trainer:
    """Return the training loop of a run, without files and listeners."""
    recipe, team = run.setup.recipe, run.setup.team
    model = run.prepare_model()
    tune(model, recipe.tune)
    loader = run.loaders.training()
    if run.teacher is not None:
        run.teacher.attach_outputs(loader)
    steps = MAX_MEASURED_STEPS
    return Trainer(
        loss_module=run.build_loss(model, steps),
        loader=loader,
        normalise=run.setup.normalise,
        optim=recipe.optimizer,
        schedule=recipe.schedule,
        plan=Plan(steps, steps, seed=recipe.seed, skip_nonfinite=steps, precision=recipe.precision),
        team=team,
        journal=MetricsLog(None),
        checkpoints=Checkpoints(Path(), team),  # unused: nothing is saved
        validate=dict,
        on_best=lambda: None,
        ema=recipe.ema,
    )


def measure_steps(training: Trainer, seconds: float | None) -> tuple[float, float]:
    """Return when the first step ended, and the seconds of a later one.

    The batches that workers prepared during the first step are not counted if there are enough others: a step then takes as
    long as its batch, where that is longer.
    """
    marks: list[float] = []
    ahead, wanted = 2 * training.loader.workers, MEASURED_STEPS
    for step, epoch, batch in training.batches():
        # Steps from all parts of the run: the number of tokens may depend on the step.
        training.train_step(int(training.plan.steps * (step * GOLDEN_RATIO % 1)), epoch, batch)
        synchronise(training.team.device)
        marks.append(time.monotonic())
        if len(marks) == 2 and seconds is not None:
            last = marks[1] - marks[0]
            wanted = 2 + int(min(seconds, max(seconds / 2, (ahead + 3) * last)) / last)
            wanted = training.team.broadcast_object(min(wanted, MAX_MEASURED_STEPS))
        if len(marks) >= wanted:
            break
    skipped = ahead if len(marks) > ahead + 3 else 0
    return marks[0], (marks[-1] - marks[skipped]) / max(1, len(marks) - 1 - skipped)


@torch.inference_mode()
def measure_image(loaders: RunLoaders, training: Trainer) -> float:
    """Return the seconds that one held-out image takes in an evaluation."""
    model = getattr(training.loss_module.eval(), loaders.setup.recipe.objective.keeps)
    normalise, device = loaders.setup.recipe.preprocessing.normalise, loaders.setup.team.device
    images = loaders.setup.prepared.splits["validation"]
    seconds, previous = 0.0, time.monotonic()
    with loaders.setup.team.unsharded(training.loss_module), training.autocast():
        for index, batch in enumerate(loaders.split("validation").iter_once()):
            arrived = time.monotonic()
            outputs = model(normalise(batch.pixels.to(device)))
            if images.masks is not None:  # counting pixels takes longer than keeping logits
                task_of(images).reduce_outputs(outputs, images, batch.indices.numpy())
            synchronise(device)
            # The first batch waits for workers to start; only the second includes the loading time.
            since = arrived if index == 0 else previous
            previous = time.monotonic()
            seconds = (previous - since) / max(1, len(batch.indices)) / loaders.setup.team.world_size
            if index == 1:
                break
    return seconds


def measure_save(training: Trainer) -> float:
    """Return the seconds that a checkpoint takes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vitrail-") as folder:
        training.checkpoints.directory = Path(training.team.broadcast_object(folder))
        training.save()
    return time.monotonic() - start

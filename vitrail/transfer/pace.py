"""How long a training would take: a few of its steps are done, and some pictures are judged."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from vitrail.engine.distributed import joined
from vitrail.engine.journal import Journal
from vitrail.engine.loop import Plan, Training
from vitrail.engine.state import Checkpoints
from vitrail.models.tuning import tune
from vitrail.recipe import Machine, Recipe
from vitrail.run.prepare import Prepared
from vitrail.run.supervised import Supervised

STEPS = 5  # that are done; the first is not counted, because memory and workers are only getting ready
VALIDATIONS = 1  # of a run: at its end


@dataclass(frozen=True)
class Pace:
    """What a training costs in seconds."""

    beginning: float  # before the second step: reading the model, the first pictures
    step: float
    judging: float  # of all that is held out, as often as a run does it
    per_epoch: int  # steps

    def steps(self, seconds: float) -> int:
        """How many steps fit into so much time, beside the rest."""
        return int(max(0.0, seconds - self.beginning - self.judging) / self.step)


def measured(recipe: Recipe, prepared: Prepared, machine: Machine) -> Pace:
    """Does a few steps of a recipe, on copies that nobody keeps."""
    with joined(machine.device, machine.parallel) as team:
        began = time.monotonic()
        run = Supervised(recipe, prepared, Path(), machine, team)
        run.loaders = {}
        model = run.begun()
        tune(model, recipe.tune)
        loader = run.training_loader()
        nowhere = Checkpoints(Path(), team)  # nothing is saved: only single steps are asked for
        training = Training(
            task=run.task(model, STEPS),
            loader=loader,
            normalise=recipe.preprocessing.normalise,
            optim=recipe.optimizer,
            schedule=recipe.schedule,
            plan=Plan(STEPS, STEPS, accumulate=recipe.accumulate, precision=recipe.precision, seed=recipe.seed),
            team=team,
            journal=Journal(None),
            checkpoints=nowhere,
            validate=dict,
            improved=lambda: None,
            ema=recipe.ema,
        )
        marks: list[float] = []
        try:
            for step, epoch, batch in training.batches():
                training.train(step, epoch, batch)
                marks.append(time.monotonic())
            return Pace(
                beginning=marks[0] - began,
                step=(marks[-1] - marks[0]) / (len(marks) - 1),
                judging=judging(run, training),
                per_epoch=loader.steps,
            )
        finally:
            loader.close()
            for other in run.loaders.values():
                other.close()


def judging(run: Supervised, training: Training) -> float:
    """Seconds for all that a run judges: validation as often as it is due and once more at the end, and the test split."""
    splits = run.prepared.splits
    pictures = len(splits["validation"]) * (VALIDATIONS + 1) + len(splits.get("test", ()))
    training.task.eval()
    seconds, began = 0.0, time.monotonic()
    with torch.inference_mode():
        for place, batch in enumerate(run.loader("validation").once()):
            arrived = time.monotonic()
            training.task(training.normalise(batch.pixels.to(run.team.device)))
            # The first batch waits for workers to start; how long pictures take to arrive is seen with the second.
            since = arrived if place == 0 else began
            began = time.monotonic()
            seconds = (began - since) / max(1, len(batch.indices))
            if place == 1:
                break
    return seconds * pictures

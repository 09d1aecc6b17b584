"""A recipe on prepared data, from its first step or from a checkpoint, to a finished run directory."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.files.atomic import staged
from vitrail.checkpoints.loading import describe, save
from vitrail.data.loader import Loader
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation, Prepare
from vitrail.data.pipeline import Training as Augmentation
from vitrail.data.sources.pixels import Pixels
from vitrail.engine.distributed import Team, whole
from vitrail.engine.journal import Journal, Listener
from vitrail.engine.loop import Metrics, Plan, Training
from vitrail.engine.state import Checkpoints
from vitrail.engine.trackers import TRACKERS
from vitrail.models.bit import BiT
from vitrail.models.build import build_from
from vitrail.models.tuning import merged, tune
from vitrail.models.vit import ViT
from vitrail.models.written import to_json
from vitrail.nn.block import EncoderBlock
from vitrail.objectives.task import Task
from vitrail.recipe import Machine, Recipe, write_recipe
from vitrail.run.lock import alone
from vitrail.run.prepare import Prepared
from vitrail.run.record import fingerprints, read_json, record, same, write_json

Progress = Callable[[str, int, int], None]
BEST = "best.safetensors"  # what validated best


@dataclass
class Run:
    """One recipe on its way through one directory. What is learnt, and how it is judged, its kinds say."""

    recipe: Recipe
    prepared: Prepared
    directory: Path
    machine: Machine
    team: Team
    chosen: list[str] = field(default_factory=list)
    listeners: tuple[Listener, ...] = ()
    trackers: tuple[str, ...] = ()
    progress: Progress | None = None

    def start(self) -> dict[str, Any]:
        """Trains from the beginning."""
        self.agree()
        model = self.begun()
        tune(model, self.recipe.tune)
        if self.team.leads:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            with staged(self.directory) as place:  # a kill leaves a whole run to go on with, or none
                place.mkdir()
                write_recipe(self.recipe, place / "recipe.json")
                about = record(self.recipe, self.prepared, self.machine, self.team, model, self.chosen)
                write_json(place / "run.json", about | self.about())
        return self.go(model, None)

    def resume(self) -> dict[str, Any]:
        """Goes on from the newest checkpoint that is whole; from the beginning where there is none yet."""
        self.agree()
        same(self.directory, self.prepared)
        checkpoints = Checkpoints(self.directory / "checkpoints", self.team)
        newest, complaints = self.team.said_by_first(checkpoints.newest() if self.team.leads else None)
        for complaint in complaints:
            self.tell(complaint)
        if newest is None:
            self.tell("no whole checkpoint: starting from the beginning")
        if self.team.leads and complaints:
            checkpoints.forget_after(0 if newest is None else int(newest.name.removeprefix("step-")))
        model = self.begun() if newest is None else fresh(self.recipe)
        tune(model, self.recipe.tune)
        return self.go(model, newest)

    def go(self, model: ViT | BiT, checkpoint: Path | None) -> dict[str, Any]:
        """Trains, as the only one who writes here."""
        self.loaders: dict[str, Loader] = {}
        with alone(self.directory) if self.team.leads else nullcontext():
            self.team.wait()
            try:
                return self.trained(model, checkpoint)
            finally:
                for loader in self.loaders.values():
                    loader.close()  # or its worker processes would keep this one waiting at its end

    def trained(self, model: ViT | BiT, checkpoint: Path | None) -> dict[str, Any]:
        """The loop, and what follows it."""
        recipe, machine, team = self.recipe, self.machine, self.team
        if recipe.tune.startswith("lora") and team.world > 1 and team.parallel == "fsdp":
            raise ValueError("LoRA's matrices are too small to be sharded: use --parallel ddp")
        loader = self.loaders["training"] = self.training_loader()
        steps, per_epoch = recipe.length(loader.steps), loader.steps
        task = self.task(model, steps)
        if machine.compile:
            compile_task(task)
        plan = Plan(
            steps=steps,
            validate_every=max(1, round(recipe.validate_every * per_epoch)),
            log_every=max(1, min(50, per_epoch // 10)),
            save_seconds=machine.save_seconds,
            accumulate=recipe.accumulate,
            precision=recipe.precision,
            seed=recipe.seed,
            patience=recipe.patience,
            skip_nonfinite=recipe.skip_nonfinite,
            score=self.score,
        )
        self.training = Training(
            task=task,
            loader=loader,
            normalise=self.normalise,
            optim=recipe.optimizer,
            schedule=recipe.schedule,
            plan=plan,
            team=team,
            journal=Journal(self.directory if team.leads else None, self.heard()),
            checkpoints=Checkpoints(self.directory / "checkpoints", team, machine.keep_checkpoints),
            validate=self.validate,
            improved=lambda: self.save_model(BEST, step=self.training.progress.step),
            ema=recipe.ema,
        )
        if checkpoint is not None:
            self.training.resume(checkpoint)
            self.tell(f"resuming at step {self.training.progress.step:,} of {steps:,}")
        if recipe.schedule.warmup >= steps:
            self.tell(
                f"the warm-up of {recipe.schedule.warmup:,} steps is longer than the run of {steps:,}: the learning rate stays "
                "below its full value; --set schedule.warmup=N changes it"
            )
        self.training.journal.tell({"kind": "begin", "steps": steps, "steps_per_epoch": per_epoch})
        self.training.run()
        return self.finish()

    def about(self) -> dict[str, Any]:
        """What else stands in run.json of a run of this kind."""
        return {}

    @property
    def score(self) -> str:
        """What a validation is to make higher."""
        raise AssertionError("a run says what it is judged by")

    def task(self, model: ViT | BiT, steps: int) -> Task:
        """The model with its objective."""
        raise AssertionError("a run says what is learnt")

    def validate(self) -> Metrics:
        """The numbers of a validation, with the weights that would be kept in place."""
        raise AssertionError("a run says how it is judged")

    def finish(self) -> dict[str, Any]:
        """Writes what a finished run holds, and gives its summary."""
        raise AssertionError("a run says how it ends")

    def normalise(self, pixels: Tensor) -> Any:
        """From the bytes of a batch to what the task takes."""
        return self.recipe.preprocessing.normalise(pixels)

    def augmentation(self) -> Prepare:
        """How a picture becomes a row of a training batch."""
        recipe = self.recipe
        return Augmentation(
            recipe.augment, recipe.preprocessing.size, recipe.preprocessing.channels, recipe.preprocessing.turn
        )

    def batch(self) -> int:
        """Pictures of a step, over all processes: as the recipe says, or as many as there are. What cannot be is refused."""
        asked, world, count = self.recipe.batch_size, self.team.world, len(self.prepared.train)
        if count < world:
            raise ValueError(f"{count} training pictures for {world} processes: use fewer processes")
        batch = asked if asked <= count else max(world, count // world * world)
        if batch % world:
            raise ValueError(f"a batch of {batch} cannot be shared equally by {world} processes")
        return batch

    def training_loader(self) -> Loader:
        """Pictures in a new order every epoch, augmented."""
        recipe, team, train = self.recipe, self.team, self.prepared.train
        batch = self.batch()
        if batch != recipe.batch_size:
            self.tell(f"batch size {batch} instead of {recipe.batch_size}: there are {len(train)} training pictures")
        return Loader(
            train,
            None,
            self.augmentation(),
            batch_size=batch,
            seed=recipe.seed,
            rank=team.rank,
            world=team.world,
            workers=self.workers(train),
            weights="balanced" if recipe.data.balance == "sampling" else None,
            epochs=-(-recipe.length(len(train) // batch) // (len(train) // batch)),
            progress=self.decoding,
        )

    def loader(self, split: str) -> Loader:
        """Every picture of a split, in its order, as the model will see pictures ever after."""
        return self.evaluated(split, self.prepared.splits[split])

    def evaluated(self, name: str, pictures: Pictures) -> Loader:
        """Some pictures the same way, by a name of their own."""
        if name not in self.loaders:
            self.loaders[name] = Loader(
                pictures,
                None,
                Evaluation(self.recipe.preprocessing),
                batch_size=min(256, max(16, self.recipe.batch_size)) * self.team.world,
                seed=self.recipe.seed,
                rank=self.team.rank,
                world=self.team.world,
                workers=self.workers(pictures),
                progress=self.decoding,
            )
        return self.loaders[name]

    def workers(self, pictures: Pictures) -> int:
        """Processes that prepare pictures: none for pixels that lie in memory, few beside a model on the same cores."""
        if self.machine.workers is not None:
            return self.machine.workers
        if isinstance(pictures.store, Pixels):
            return 0
        cores = (os.cpu_count() or 1) // self.team.world
        return max(1, min(8, cores if self.team.device.type == "cuda" else cores // 2))

    def decoding(self, done: int, total: int) -> None:
        if self.progress is not None and self.team.leads:
            self.progress("decoding", done, total)

    def weights(self, part: str | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a part of the task as they stand now, put together from all processes: of the model that is kept."""
        task, prefix = self.training.task, f"{part or self.recipe.objective.keeps}."
        found = {
            name.removeprefix(prefix): whole(tensor.detach()).cpu().clone()
            for name, tensor in task.state_dict().items()
            if name.startswith(prefix)
        }
        return found if part else task.written(found)

    def tuned(self) -> ViT | BiT:
        """A model with the weights as they stand now, low-rank additions by themselves."""
        model = fresh(self.recipe)
        tune(model, self.recipe.tune)
        model.load_state_dict(self.weights())
        return model

    def model(self) -> ViT | BiT:
        """A plain model with the weights as they stand now, its labels and its preprocessing."""
        model = self.tuned()
        merged(model)
        model.preprocessing = self.recipe.preprocessing
        if self.recipe.model.classes is not None:
            model.labels = self.prepared.labels.names
        for parameter in model.parameters():
            parameter.requires_grad = True
        return model.eval()

    def save_model(self, name: str, **card: Any) -> None:
        """The model as it stands now, as an artifact."""
        model = self.model()
        if self.team.leads:
            save(model, self.directory / name, recipe=to_json(self.recipe), **card)

    def begun(self) -> ViT | BiT:
        """The model as training finds it."""
        raise AssertionError("a run says what it begins with")

    def agree(self) -> None:
        """All processes see the same data, or none begins."""
        prints = self.team.everybody(fingerprints(self.prepared.splits))
        if any(other != prints[0] for other in prints):
            raise ValueError("the processes do not see the same data: is it on a disk that all of them read?")

    def best_is_ours(self) -> bool:
        """Whether the file with the best weights is of this very run, not left by one that was killed and went otherwise."""
        with describe(self.directory / BEST) as found:
            ours = found.contract.card.get("step") == self.training.progress.best_step
        if not ours:
            self.tell(f"{BEST} is not of step {self.training.progress.best_step}: the last weights are kept instead")
        return ours

    def tell(self, text: str) -> None:
        """A line for whoever watches."""
        if self.team.leads:
            for listener in self.listeners:
                listener({"kind": "note", "text": text})

    def heard(self) -> tuple[Listener, ...]:
        """Those who hear of every record: on the process that leads, and there alone."""
        if not self.team.leads:
            return ()
        settings, identity = to_json(self.recipe), read_json(self.directory / "run.json").get("id", self.directory.name)
        return (*self.listeners, *(TRACKERS[t](self.directory, identity, settings) for t in self.trackers))


def compile_task(task: Task) -> None:
    """`torch.compile` of every model in it, and of the blocks by themselves, for objectives that call a model part by part."""
    found = [module for module in task.modules() if isinstance(module, ViT | BiT | EncoderBlock)]
    # Blocks share one piece of code, and each rate of stochastic depth is another graph of it: PyTorch gives up after eight.
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, 4 * len(found))
    for module in found:
        module.compile()


def fresh(recipe: Recipe) -> ViT | BiT:
    """A model with weights from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    return build_from(recipe.model)

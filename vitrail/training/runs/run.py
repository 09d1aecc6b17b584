"""A training run: a recipe on prepared data, started or resumed, to a finished run directory."""

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitrail.data.loader import split_share
from vitrail.models.base import Model
from vitrail.models.lora import tune
from vitrail.nn.block import EncoderBlock
from vitrail.objectives.base import LossInputs, LossModule, Parts
from vitrail.training.checkpointing import Checkpoints
from vitrail.training.logging import MetricsLog
from vitrail.training.recipe import Recipe, method_of, write_recipe
from vitrail.training.runs.captions import CaptionEvaluator, write_tokenizer
from vitrail.training.runs.models import BEST, Evaluator, TrainedModel, build_model, load_initial_model
from vitrail.training.runs.pretraining import Collapsed, FeatureEvaluator
from vitrail.training.runs.record import (
    build_run_record,
    check_same_data,
    check_shared,
    fingerprint_splits,
    lock_run,
    store_recipe,
    write_json,
)
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.runs.supervised import LabelEvaluator
from vitrail.training.runs.teaching import RunTeacher
from vitrail.training.runs.validation import count_passes, count_training_passes
from vitrail.training.trainer import Plan, Trainer
from vitrail.utils.files import DiskFullError, disk_full_error, is_disk_full, stage_output


class Run:
    """One recipe in one directory. The objective builds the loss module, the evaluator validates it, a teacher may teach it."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup, self.loaders = setup, RunLoaders(setup)
        self.teacher: RunTeacher | None = None
        self.parts: Parts | None = None  # of the initial checkpoint, beside the model
        captions = setup.prepared.train.captions is not None and not method_of(setup.recipe)
        evaluator = CaptionEvaluator if captions else FeatureEvaluator if method_of(setup.recipe) else LabelEvaluator
        self.evaluator: Evaluator = evaluator(setup, self.loaders)

    def start(self) -> dict[str, Any]:
        """Train from the first step; return the summary."""
        setup, recipe = self.setup, self.setup.recipe
        self.check_inputs(resumed=False)
        model = self.prepare_model()
        tune(model, recipe.tune)
        if setup.team.is_main:
            setup.directory.parent.mkdir(parents=True, exist_ok=True)
            with stage_output(setup.directory) as staged:  # a kill leaves a whole directory or none
                staged.mkdir()
                write_recipe(recipe, staged / "recipe.json")
                if setup.prepared.tokenizer is not None:
                    write_tokenizer(staged, setup.prepared.tokenizer)
                record = build_run_record(recipe, setup.prepared, setup.machine, setup.team, model, setup.chosen)
                write_json(staged / "run.json", record | ({"teacher": self.teacher.describe()} if self.teacher else {}))
        return self.train(model, None)

    def resume(self) -> dict[str, Any]:
        """Train from the newest intact checkpoint, or from the first step where there is none; return the summary."""
        setup, team = self.setup, self.setup.team
        self.check_inputs(resumed=True)
        check_same_data(setup.directory, setup.prepared)
        checkpoints = Checkpoints(setup.directory / "checkpoints", team)
        newest, complaints = team.broadcast_object(checkpoints.newest_intact() if team.is_main else None)
        for complaint in complaints:
            setup.note(complaint)
        if newest is None:
            setup.note("no intact checkpoint: starting from the first step")
        if team.is_main and complaints:
            checkpoints.remove_after(0 if newest is None else int(newest.name.removeprefix("step-")))
        model = self.prepare_model() if newest is None else build_model(setup.recipe)
        self.check_batch(model)  # the number of processes may have changed
        tune(model, setup.recipe.tune)
        return self.train(model, newest)

    def check_inputs(self, resumed: bool) -> None:
        """Load the teacher, if the recipe or its objective has one; raise ValueError unless all processes see the same data."""
        recipe = self.setup.recipe
        if recipe.teacher is not None or recipe.objective.teacher_output is not None:
            self.teacher = RunTeacher(self.setup)
            if resumed:
                self.teacher.check_resumed()
        prints = self.setup.team.gather_objects(fingerprint_splits(self.setup.prepared))
        if any(other != prints[0] for other in prints):
            raise ValueError("the processes do not see the same data: put it on a file system that all of them read")

    def prepare_model(self) -> Model:
        """Check the run and return the model that training starts from."""
        recipe = self.setup.recipe
        self.evaluator.check()
        model = load_initial_model(self.setup)
        recipe.objective.check_model(model)
        self.check_batch(model)
        if recipe.init is not None and self.parts is None:
            self.parts, note = recipe.objective.read_parts(recipe.init, recipe.model)
            if note:
                self.setup.note(note)
        if self.teacher is not None:
            self.build_loss(model, 0)  # raises for a student that does not fit, before anything is written
        return model

    def check_batch(self, model: Model) -> None:
        """Raise ValueError if the images that all processes compute at a time are too few for the model."""
        recipe, world = self.setup.recipe, self.setup.team.world_size
        bounds = split_share(self.setup.batch_size() // world, recipe.accumulate)
        smallest = world * min(end - start for start, end in pairwise(bounds))
        if smallest < model.min_batch:
            least = f"{model.min_batch} images at a time, got {smallest}"
            remedy = (
                "use a larger batch_size=" if recipe.accumulate == 1 else "use a larger batch_size= or less accumulate="
            )
            raise ValueError(f"{recipe.model.describe()} trains on at least {least}: {remedy}")

    def build_loss(self, model: Model, steps: int) -> LossModule:
        """Return the loss module of the objective for a run of this many steps."""
        setup, recipe = self.setup, self.setup.recipe
        inputs = LossInputs(
            steps=steps,
            preprocessing=recipe.preprocessing,
            class_weights=None if recipe.model.classes is None else setup.class_weights(),
            teacher=self.teacher.teacher if self.teacher is not None else None,
            cached=recipe.teacher is not None and recipe.teacher.cached,
            group=dist.group.WORLD if setup.team.world_size > 1 else None,
            parts=self.parts or {},
        )
        torch.manual_seed(recipe.seed)  # modules beside the model start the same on every process
        return recipe.objective.build_loss(model, inputs)

    def train(self, model: Model, checkpoint: Path | None) -> dict[str, Any]:
        """Train and finish the run, holding its lock."""
        directory = self.setup.directory
        with lock_run(directory) if self.setup.team.is_main else nullcontext():
            check_shared(directory, self.setup.team)
            try:
                self.evaluator.begin(lambda: self.build_loss(self.prepare_model(), 1), checkpoint is not None)
                trainer = self.build_trainer(model)
                try:
                    if checkpoint is not None:
                        trainer.resume(checkpoint)
                        self.setup.note(f"resuming at step {trainer.progress.step:,} of {trainer.plan.steps:,}")
                    if self.setup.team.is_main:
                        store_recipe(directory, self.setup.recipe)
                    self.run_trainer(trainer)
                    return self.evaluator.finish(trainer)
                finally:
                    # The callbacks refer to the trainer: without them its memory is freed at once.
                    trainer.validate, trainer.on_best = dict, lambda: None
            except OSError as error:
                if isinstance(error, DiskFullError) or not is_disk_full(error):
                    raise
                raise disk_full_error(directory / directory.name) from error
            finally:
                self.loaders.close()  # worker processes would keep this one from exiting

    def build_trainer(self, model: Model) -> Trainer:
        """Return the training loop of this run."""
        setup, recipe, machine, team = self.setup, self.setup.recipe, self.setup.machine, self.setup.team
        if team.is_sharded:
            check_sharding(recipe, team.parallel)
        loader = self.loaders.training()
        if self.teacher is not None:
            self.teacher.attach_outputs(loader)
        steps, per_epoch = recipe.total_steps(loader.steps_per_epoch), loader.steps_per_epoch
        cost = count_passes(recipe, setup.prepared)
        loss_module = self.build_loss(model, steps)
        if machine.compile:
            compile_loss(loss_module, team.device.type)
        plan = Plan(
            steps=steps,
            validate_every=max(1, round(recipe.validate_every * per_epoch)),
            log_every=max(1, min(50, per_epoch // 10)),
            save_seconds=machine.save_seconds,
            precision=recipe.precision,
            seed=recipe.seed,
            patience=recipe.patience,
            skip_nonfinite=recipe.skip_nonfinite,
            score=self.evaluator.score,
            validation_steps=cost.validation / (count_training_passes(recipe) * loader.batch_size),
            ending=cost.ending / cost.validation,
        )
        trainer = Trainer(
            loss_module=loss_module,
            loader=loader,
            normalise=setup.normalise,
            optim=recipe.optimizer,
            schedule=recipe.schedule,
            plan=plan,
            team=team,
            journal=MetricsLog(setup.directory if team.is_main else None, setup.record_listeners()),
            checkpoints=Checkpoints(setup.directory / "checkpoints", team, machine.keep_checkpoints),
            validate=lambda: self.evaluator.validate(trainer),
            on_best=lambda: TrainedModel(setup, trainer).save(BEST, step=trainer.progress.step),
            ema=recipe.ema,
        )
        return trainer

    def run_trainer(self, trainer: Trainer) -> None:
        """Run the loop to its end, or until the training alarm stops it."""
        steps, warmup = trainer.plan.steps, self.setup.recipe.schedule.warmup
        if warmup >= steps:
            self.setup.note(
                f"the warm-up of {warmup:,} steps is longer than the run of {steps:,}: the learning rate stays below its full "
                "value; change it with settings=['schedule.warmup=N']"
            )
        media = self.setup.prepared.train.media
        trainer.journal.notify(
            {"kind": "begin", "steps": steps, "steps_per_epoch": trainer.loader.steps_per_epoch, "media": media}
        )
        try:
            trainer.run()
        except Collapsed:
            trainer.save()


def check_sharding(recipe: Recipe, parallel: str) -> None:
    """Raise ValueError for a recipe whose weights cannot be sharded."""
    if recipe.tune.startswith("lora"):
        raise ValueError("LoRA matrices are too small to be sharded: use parallel='ddp'")
    if not recipe.objective.can_shard:
        name = type(recipe.objective).__name__
        raise ValueError(f"{name} does not support parallel={parallel!r}: use parallel='ddp'")
    if recipe.objective.calls_parts_of_layers:
        raise ValueError("objective.tokens=TokenMerging calls parts of layers, which are sharded: use parallel='ddp'")


def compile_loss(loss_module: LossModule, device_type: str = "cpu") -> None:
    """Compile every model of a loss module with `torch.compile`, and its blocks for objectives that call a model part by part.

    On CUDA the compiled parts are replayed as CUDA graphs, which saves the launch of each kernel.
    """
    modules = [module for module in loss_module.modules() if isinstance(module, Model | EncoderBlock)]
    # Blocks share one piece of code, and each rate of stochastic depth is another graph of it: PyTorch gives up after eight.
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, 4 * len(modules))
    options = {"mode": "reduce-overhead"} if device_type == "cuda" else {}
    for module in modules:
        module.compile(**options)

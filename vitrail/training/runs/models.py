"""Models of a run: the one it starts from, the trained one with its files, and the interface that evaluates it."""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.adapter import write_adapter
from vitrail.checkpoints.checkpoint import check_tokenizer
from vitrail.checkpoints.load import inspect_checkpoint, load, load_towers, save
from vitrail.checkpoints.targets import check_expressible
from vitrail.metrics.temperature import TemperatureFit
from vitrail.models.adapt import KEEP
from vitrail.models.base import Model, ModelConfig
from vitrail.models.lora import merge_lora, tune
from vitrail.models.registry import build_from
from vitrail.nn.embed import Tubelets
from vitrail.objectives.base import LossModule
from vitrail.tasks import task_of
from vitrail.tasks.numbers import is_regression
from vitrail.training.distributed import full_tensor
from vitrail.training.recipe import Recipe
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.trainer import Metrics, Trainer
from vitrail.utils.files import stage_output
from vitrail.utils.json import to_json

BEST, MODEL = "best.safetensors", "model.safetensors"  # weights with the best validation score; the model of the run


def build_model(recipe: Recipe) -> Model:
    """Return a model with weights drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    return build_from(recipe.model)


def load_initial_model(setup: RunSetup) -> Model:
    """Return the model that training starts from: new, or from the recipe's checkpoint with a head for these labels."""
    recipe, init = setup.recipe, setup.recipe.init
    config = recipe.model
    if config.text_tower is not None:
        return load_initial_towers(setup)
    if init is None:
        return build_model(recipe)
    classes = None if config.classes is None else KEEP  # other classes are the affair of `start_from`
    # Not memory-mapped: the alignment of a file's pages differs from that of memory, and sums could differ in the last bit.
    options: dict[str, Any] = {"classes": classes, "mmap": False}
    if recipe.preprocessing.sound is None:
        source = load(init, image_size=config.image_size, channels=config.channels, **options)
    else:
        source = load_for_sounds(init, config, **options)
    if config.frames is not None and config.frames != source.config.frames:
        if source.config.frames is None:
            tokens = config.require_tokens("inflation of a model of images", clips=True)
            assert isinstance(tokens.embed, Tubelets)
            attention = "divided" if tokens.block.is_divided else "joint"
            source = source.inflate(config.frames, tokens.embed.frames, attention=attention)
        else:
            source = source.resize(frames=config.frames)
    if config.classes is None:
        if config.resampling is not None and source.config.resampling not in (None, config.resampling):
            source = source.resize(config.image_size, config.resampling)  # recipes of earlier versions do not record it
        if source.config != config:
            raise ValueError(f"{init} is another model than the recipe's: leave out settings that change the model")
        return source.train()
    model = build_model(recipe)
    same_head = source.config.output_kind == config.output_kind and source.labels == setup.prepared.labels.names
    same_head = same_head and is_regression(source) == (setup.prepared.train.target_kind == "numbers")
    try:
        model.start_from(source, keep_classifier=same_head)
    except ValueError as error:
        raise ValueError(f"{init} is another model than the recipe's: {error}") from None
    if same_head:
        recipe.objective.adopt_head(model)
        setup.note(f"{init} has the same labels: its head is kept")
    return model


def load_for_sounds(init: str, config: ModelConfig, **options: Any) -> Model:
    """Return a model of spectrograms: one that was trained on sounds at the recipe's size, or one made from a model of images."""
    source = load(init, **options)
    if getattr(source.preprocessing, "sound", None) is None:
        return source.take_spectrograms(config.image_size, config.overlap)
    return source.resize(config.image_size)


def load_initial_towers(setup: RunSetup) -> Model:
    """Return the two towers that training starts from, with the tokeniser of the run."""
    recipe, tokenizer = setup.recipe, setup.prepared.tokenizer
    if recipe.init is not None:
        size = recipe.model.image_size
        model = load_towers(recipe.init, tokenizer=tokenizer, image_size=size, mmap=False).train()
        if model.config != recipe.model:
            raise ValueError(
                f"{recipe.init} is another model than the recipe's: leave out settings that change the model"
            )
        return model
    model = build_model(recipe)
    if recipe.init_image is not None:
        image, where = recipe.model.image_tower, recipe.init_image
        shape = {"classes": None, "image_size": image.image_size, "channels": image.channels}
        source = load(where, mmap=False, **shape)
        if source.config != image:
            raise ValueError(f"{where} is another model than the recipe's: leave out settings that change the model")
        model.require_towers("init_image=").image.load_state_dict(source.state_dict())
    if tokenizer is not None:
        model.tokenizer = check_tokenizer(tokenizer, recipe.model)
    return model


class Evaluator:
    """Validation and end of a run: base of `LabelEvaluator` with labels and `FeatureEvaluator` without."""

    score: str  # the metric of a validation to maximise

    def __init__(self, setup: RunSetup, loaders: RunLoaders) -> None:
        self.setup, self.loaders = setup, loaders

    def check(self) -> None:
        """Raise ValueError for a run that cannot work."""
        self.setup.batch_size()

    def begin(self, build_baseline: Callable[[], LossModule], resumed: bool) -> None:
        """Prepare the first validation."""

    def validate(self, trainer: Trainer) -> Metrics:
        """Return the metrics of a validation."""
        raise NotImplementedError

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Write the model and everything that is measured of it; return the summary."""
        raise NotImplementedError


class TrainedModel:
    """The weights of a trainer as a model and as files. Methods must be called on all processes."""

    def __init__(self, setup: RunSetup, trainer: Trainer) -> None:
        self.setup, self.trainer = setup, trainer

    def weights(self, part: str | None = None) -> dict[str, Tensor]:
        """Return the unsharded tensors of a module of the loss module; by default those of the model that is kept.

        Tensors are gathered one by one, and only the main process keeps them: the others return none.
        """
        loss_module, prefix = self.trainer.loss_module, f"{part or self.setup.recipe.objective.keeps}."
        tensors: dict[str, Tensor] = {}
        for name, tensor in loss_module.state_dict().items():
            if name.startswith(prefix):
                whole = full_tensor(tensor.detach())
                if self.setup.team.is_main:
                    tensors[name.removeprefix(prefix)] = whole.cpu().clone()
        return tensors if part or not self.setup.team.is_main else loss_module.export_weights(tensors)

    def build_tuned(self, weights: dict[str, Tensor]) -> Model:
        """Return a model with these weights, LoRA matrices apart from the weights that they change."""
        model = build_model(self.setup.recipe)
        tune(model, self.setup.recipe.tune)
        model.load_state_dict(weights)
        return model

    def build(self, weights: dict[str, Tensor]) -> Model:
        """Return a plain model with these weights, its labels and its preprocessing."""
        model = self.build_tuned(weights)
        merge_lora(model)
        model.preprocessing = self.setup.recipe.preprocessing
        if self.setup.recipe.model.text_tower is not None:
            model.tokenizer = self.setup.prepared.tokenizer
        if self.setup.recipe.model.classes is not None:
            model.labels = self.setup.prepared.labels.names
        for parameter in model.parameters():
            parameter.requires_grad = True
        return model.eval()

    def save(self, name: str, **card: Any) -> None:
        """Write the current model into the run directory."""
        weights, train = self.weights(), self.setup.prepared.train
        if not self.setup.team.is_main:
            return
        if self.setup.recipe.model.classes is not None:
            card |= task_of(train).describe_outputs(train)
        save(self.build(weights), self.setup.directory / name, recipe=to_json(self.setup.recipe), **card)

    def save_parts(self) -> None:
        """Write what the objective saves beside the model."""
        objective = self.setup.recipe.objective
        if objective.saved_parts:
            weights, parts = self.weights(), {name: self.weights(name) for name in objective.saved_parts}
            if self.setup.team.is_main:
                objective.write_parts(self.build(weights), parts, self.setup.directory)

    def save_adapter(self, temperature: float) -> str | None:
        """Write the LoRA matrices as a PEFT adapter; return where, or why not. None for a run without LoRA."""
        recipe, directory = self.setup.recipe, self.setup.directory / "adapter"
        if not recipe.tune.startswith("lora"):
            return None
        weights = self.weights()
        if not self.setup.team.is_main:
            return None
        model = self.build_tuned(weights)
        model.divide_logits(temperature)
        try:
            vit = model.require_tokens("PEFT's form")
            check_expressible("hf", recipe.model)
        except ValueError as reason:
            return f"not written: {reason}"
        shutil.rmtree(directory, ignore_errors=True)  # left by a run that was killed after writing it
        write_adapter(
            directory,
            vit,
            base=recipe.init.removeprefix("hf://") if recipe.init else None,
            labels=self.setup.prepared.labels.names,
            preprocessing=recipe.preprocessing,
        )
        return f"{directory.name}, in PEFT's form"

    def uses_best(self) -> bool:
        """Return whether the best weights become the model: not if their file is of a run that was resumed from before it."""
        if self.setup.recipe.keep != "best" and self.trainer.stopped != "early":
            return False
        step = self.trainer.progress.best_step
        with inspect_checkpoint(self.setup.directory / BEST) as checkpoint:
            current = checkpoint.contract.card.get("step") == step
        if not current:
            self.setup.note(f"{BEST} is not of step {step}: the last weights are kept instead")
        return current

    def load_written(self, best: bool) -> Model:
        """Return the written model of the run; with `best`, the file of the best weights becomes it first."""
        directory, team = self.setup.directory, self.setup.team
        if best and team.is_main:
            with stage_output(directory / MODEL, (directory / BEST).stat().st_size) as staged:
                shutil.copyfile(directory / BEST, staged)
        team.barrier()
        read = load if self.setup.recipe.model.text_tower is None else load_towers
        return read(directory / MODEL, mmap=False).to(team.device)

    def scale_written(self, fit: TemperatureFit) -> Model:
        """Divide the logits of the written model by a temperature, in its file; return the model that the file has now."""
        if self.setup.team.is_main:
            path = self.setup.directory / MODEL
            model = load(path, mmap=False)
            model.divide_logits(fit.temperature)
            save(model, path, calibration=fit.as_dict())
        return self.load_written(best=False)

    def describe_progress(self, best: bool) -> dict[str, Any]:
        """Return the fields of summary.json that every run has."""
        progress, average = self.trainer.progress, self.trainer.average
        return {
            "seconds": round(progress.seconds, 3),
            "steps": progress.step,
            "images_per_second": progress.images / max(1e-9, progress.seconds),
            "media": self.setup.prepared.train.media,
            "weights": "best" if best else "last" if average is None else "ema",
            "stopped": self.trainer.stopped,
            "validation_score": self.trainer.plan.score,
            "last_validation": progress.last,
            "best_validation": progress.best,
            "best_step": progress.best_step,
            "skipped_nonfinite": progress.nonfinite,
            "unreadable": progress.unreadable,
        }

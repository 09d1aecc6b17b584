"""Evaluation of runs that learn without labels: signals of the features on held-out images, and the training alarm."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Required, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import Images
from vitrail.data.loader import Loader
from vitrail.data.rng import StepRandom
from vitrail.metrics.collapse import Collapse, detect_collapse
from vitrail.metrics.convergence import is_falling
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.knn import predict_knn
from vitrail.metrics.paired import compare_correct
from vitrail.metrics.signals import effective_rank, feature_spread
from vitrail.metrics.verdict import RunFacts, describe_difference, suggest_changes
from vitrail.models.base import Model, TokenConfig
from vitrail.nn.embed import ConvStem, Patches
from vitrail.objectives.base import LossModule
from vitrail.reports.run import Number
from vitrail.training.logging import finite_or_name, read_json_lines
from vitrail.training.recipe import Facts, Recipe, method_of
from vitrail.training.recipes import build_recipe
from vitrail.training.recipes.common import is_small
from vitrail.training.runs.models import MODEL, Evaluator, TrainedModel, build_model
from vitrail.training.runs.setup import RunLoaders, RunSetup
from vitrail.training.runs.supervised import predict_split
from vitrail.training.runs.validation import count_queries, count_references, has_knn
from vitrail.training.trainer import Metrics, Trainer
from vitrail.utils.json import to_json, value_from_json
from vitrail.utils.precision import autocast

MIN_IMAGES = 8  # training images
FEW_HELD_OUT = 50  # below this, rank and spread are unreliable
N_RECONSTRUCTIONS = 8
PIXEL_SIDE = 32  # longest side of raw pixels used as features
REFERENCES, QUERIES, LOSS = "references", "queries", "loss"  # names of the loaders
NO_LABELS = "that needs images with one label each. Measure it with vitrail evaluate MODEL LABELLED --probe knn"


class Signals(TypedDict, total=False):
    """A validation in metrics.jsonl, as far as the training alarm uses it."""

    step: Required[int]
    loss: Number
    spread: Number
    rank: Number
    knn: Number
    teacher_entropy: Number
    teacher_diversity: Number


class Collapsed(Exception):
    """The training alarm stopped the run."""


class FeatureEvaluator(Evaluator):
    """Validates and finishes a run without labels."""

    def __init__(self, setup: RunSetup, loaders: RunLoaders) -> None:
        super().__init__(setup, loaders)
        self.objective, prepared = setup.recipe.objective, setup.prepared
        self.has_knn = has_knn(prepared)
        self.score = "knn" if self.has_knn else self.objective.unlabelled_score
        self.collapse: Collapse | None = None
        self.baseline: dict[str, Any] | None = None  # the validation before the first step
        self.sizes = setup.recipe  # decides the number of images; without limits for the written model
        self.memos: dict[int, dict[str, Tensor]] = {}  # by batch of the loss loader; see `LossModule.signals`

    def check(self) -> None:
        recipe, splits = self.setup.recipe, self.setup.prepared.splits
        needed = max(2, self.setup.team.world_size)  # each process needs one
        train, held = len(splits["train"]), len(splits["validation"])
        if train < MIN_IMAGES or held < needed:
            present = f"{recipe.data.where} has {train} training and {held} held-out {splits['train'].media}s"
            raise ValueError(f"{present}: pretraining needs at least {MIN_IMAGES} and {needed}")
        self.objective.check_run(recipe.model, self.setup.batch_size(), recipe.views, recipe.ema is not None)
        if recipe.tune != "full":
            frozen = f"settings=['tune={recipe.tune}'] freezes the encoder"
            raise ValueError(f"{frozen}: pretraining trains all of it, use settings=['tune=full']")
        self.setup.augmentation()  # raises for crops of another size

    def begin(self, build_baseline: Callable[[], LossModule], resumed: bool) -> None:
        """Measure the signals before the first step, or restore the alarm of a resumed run."""
        history = self.read_history() if resumed else []
        if not history:
            validation = self.setup.prepared.splits["validation"]
            held_out = len(validation)
            if not self.has_knn and held_out < FEW_HELD_OUT:
                self.setup.note(
                    f"{held_out} held-out {validation.media}s without labels: rank and spread are unreliable; "
                    "hold out more with fractions=(0.8, 0.2, 0)"
                )
            # Before the trainer exists, whose loss module takes memory too.
            loss_module = build_baseline().to(self.setup.team.device).eval()
            self.baseline = {
                "kind": "validation",
                "step": 0,
                "epoch": 0.0,
                **self.measure(loss_module, 0),
                "best": False,
            }
        elif self.setup.recipe.collapse == "warn":  # the alarm was raised before the stop
            histories = (history[:n] for n in range(2, len(history) + 1))
            self.collapse = next(filter(None, map(self.detect, histories)), None)

    def validate(self, trainer: Trainer) -> Metrics:
        """Return the signals, and raise the alarm where a condition of it holds."""
        history = self.read_history()
        if not history:
            assert self.baseline is not None
            trainer.journal.write(self.baseline)
            history.append(self.baseline)
        metrics = self.measure(trainer.loss_module, trainer.progress.step)
        history.append(trainer.describe_step("validation") | metrics)
        collapse = self.setup.team.broadcast_object(self.detect(history))
        if collapse is not None and self.collapse is None:
            self.collapse = collapse
            self.setup.note(f"collapse at step {collapse.step:,}: {collapse.cause}. {collapse.advice}")
            if self.setup.recipe.collapse == "stop":
                trainer.journal.write({**history[-1], "best": False})
                raise Collapsed
        return metrics

    def read_history(self) -> list[dict[str, Any]]:
        """Return the validations that the main process has logged."""
        path, team = self.setup.directory / "metrics.jsonl", self.setup.team
        lines = enumerate(read_json_lines(path), 1) if team.is_main else ()
        records = [(number, line) for number, line in lines if line.get("kind") == "validation"]
        checked = [value_from_json(line, Signals, f"{path}, line {number}") for number, line in records]
        return team.broadcast_object(checked)

    def detect(self, history: list[dict[str, Any]]) -> Collapse | None:
        """Return the condition of the alarm that holds after the last of these validations, if any."""
        recipe = self.setup.recipe
        return detect_collapse(
            history,
            str(method_of(recipe)),
            lr=recipe.optimizer.lr,
            objective=to_json(self.objective),
            images=count_queries(recipe, self.setup.prepared),
            untrained=recipe.init is None,
        )

    # --- signals ---

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the run's precision: the signals are measured in it too."""
        return autocast(self.setup.team.device.type, self.setup.recipe.precision)

    def loader(self, name: str) -> Loader:
        """Return the loader of the k-NN references, of the k-NN queries or of the images of the loss."""
        split, count = ("train", count_references) if name == REFERENCES else ("validation", count_queries)
        most = count(self.sizes, self.setup.prepared)
        images, name = thin_images(self.setup.prepared.splits[split], most), f"{most} {name}"
        return self.loaders.augmented(name, images) if LOSS in name else self.loaders.evaluation(name, images)

    def measure(self, loss_module: LossModule, step: int) -> Metrics:
        """Return all signals of a loss module."""
        with self.setup.team.unsharded(loss_module):
            metrics = self.measure_losses(loss_module, step)
            features, correct = self.measure_features(
                getattr(loss_module, self.objective.keeps), loss_module.standardise_features
            )
        metrics |= {"spread": feature_spread(features), "rank": effective_rank(features)}
        return metrics if correct is None else metrics | {"knn": float(correct.mean())}

    def measure_losses(self, loss_module: LossModule, step: int) -> Metrics:
        """Return the loss module's own signals on held-out images, with the same crops and random numbers every time."""
        loader, team, sums = self.loader(LOSS), self.setup.team, dict[str, Tensor]()
        for number, batch in enumerate(loader.iter_epoch(0)):
            mine = len(batch.indices)
            at = step if self.objective.signals_follow_step else number
            draw = StepRandom(self.setup.recipe.seed, at, team.rank * mine, mine, team.world_size * mine, team.device)
            images = self.setup.normalise(batch.pixels.to(team.device))
            with torch.no_grad(), self.autocast():
                signals = loss_module.signals(images, draw, self.memos.setdefault(number, {}))
            for name, value in signals.items():
                sums[name] = sums.get(name, torch.zeros((), device=team.device)) + value.detach().float()
        return {name: float(team.all_reduce_mean(value / loader.steps_per_epoch)) for name, value in sums.items()}

    def measure_features(
        self, model: Any, standardise: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the features of the query images [n, F], and where they have a class, whether k-NN predicts it, [n].

        Only k-NN uses standardised features: their spread would always look healthy.
        """
        queries, normalise, team = self.loader(QUERIES), self.setup.recipe.preprocessing.normalise, self.setup.team
        with self.autocast():
            features, readable = predict_split(model, queries, normalise, team)
        if not self.has_knn:
            return features[readable], None
        references = self.loader(REFERENCES)
        with self.autocast():
            known, known_readable = predict_split(model, references, normalise, team)
        pair = [known[known_readable], np.nan_to_num(features[readable])]
        if standardise is not None:
            pair = [standardise(torch.from_numpy(values).to(team.device)).cpu().numpy() for values in pair]
        classes = len(self.setup.prepared.labels)
        votes = predict_knn(pair[0], references.images.targets[known_readable], pair[1], classes)
        return features[readable], votes.argmax(1) == queries.images.targets[readable]

    # --- the end of a run ---

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """Write the model and what the objective saves beside it, evaluate the written file, and write the summary."""
        setup, team, trained = self.setup, self.setup.team, TrainedModel(self.setup, trainer)
        method, best = method_of(setup.recipe), trained.uses_best()
        if setup.recipe.validation_images:
            self.sizes, self.memos = replace(setup.recipe, validation_images=None), {}
        summary: dict[str, Any] = {"method": method, "split": "validation"}
        with trainer.evaluation_weights():
            with team.unsharded(trainer.loss_module):
                summary |= self.measure_losses(trainer.loss_module, trainer.progress.step)
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in trained.weights().values())
            finite = team.broadcast_object(finite)  # the main process alone has the weights
            if finite:
                trained.save_parts()
                self.write_reconstructions(trainer.loss_module)
                if not best:
                    trained.save(MODEL, method=method)
        if finite or best:
            summary |= self.evaluate_model(trained.load_written(best))
        else:
            setup.note("the weights are not finite: no model file is written")
            summary["verdict"] = {"baselines": {}, "reason": "the weights are not finite"}
        summary |= trained.describe_progress(best)
        if not best and trainer.average is None:
            summary["weights"] = self.objective.keeps
        if self.collapse is not None:
            if setup.recipe.collapse == "stop":
                summary["stopped"] = "collapse"
            fields = ("condition", "cause", "advice", "step")
            summary["collapse"] = {name: getattr(self.collapse, name) for name in fields}
        findings = [baseline["finding"] for baseline in summary["verdict"]["baselines"].values()]
        needs_advice = self.collapse is not None or set(findings) != {"better"}
        advice = suggest_changes(findings, self.collect_facts(trainer)) if needs_advice else []
        summary["verdict"]["suggestions"] = advice
        setup.write_summary({name: finite_or_name(value) for name, value in summary.items()})
        return summary

    def evaluate_model(self, model: Model) -> dict[str, Any]:
        """Return the signals of the written model, and the k-NN accuracy of raw pixels and of the untrained model."""
        features, correct = self.measure_features(model)
        summary: dict[str, Any] = {"images": len(features)}
        summary |= {"spread": feature_spread(features), "rank": effective_rank(features)}
        if correct is None:
            return summary | {"verdict": {"baselines": {}, "reason": NO_LABELS}}
        summary["knn"] = float(correct.mean())
        summary["knn_interval"] = list(wilson_interval(int(correct.sum()), len(correct)))
        untrained = build_model(self.setup.recipe).eval().to(self.setup.team.device)
        baselines: dict[str, Any] = {}
        for name, other in (("knn_pixels", flatten_pixels), ("knn_random", untrained)):
            _, theirs = self.measure_features(other)
            assert theirs is not None
            summary[name] = float(theirs.mean())
            baselines[name] = describe_difference(compare_correct(theirs, correct))
        return summary | {"verdict": {"baselines": baselines}}

    def collect_facts(self, trainer: Trainer) -> RunFacts:
        """Return the facts that decide what to try next."""
        recipe, prepared, progress = self.setup.recipe, self.setup.prepared, trainer.progress
        log = read_json_lines(self.setup.directory / "metrics.jsonl") if self.setup.team.is_main else []
        losses = [float(line["loss"]) for line in log if line.get("kind") == "train" and "loss" in line]
        losses = self.setup.team.broadcast_object(losses)
        measured = replace(prepared.measure_facts(), teacher=recipe.teacher)
        return RunFacts(
            str(method_of(recipe)),
            len(prepared.train),
            progress.step / trainer.loader.steps_per_epoch,
            None if recipe.steps is None else progress.step,
            find_recipe_epochs(recipe, measured),
            is_falling(losses),
            recipe.patience if trainer.stopped == "early" else None,
            is_small(measured) and takes_stem(recipe),
            recipe.init is not None,
            recipe.optimizer.lr,
            None if self.collapse is None else (self.collapse.cause, self.collapse.advice),
            prepared.train.media,
        )

    def write_reconstructions(self, loss_module: LossModule) -> None:
        """Write original, masked and reconstructed images, where the loss module reconstructs any."""
        if not loss_module.reconstructs:
            return
        pipeline, team = self.setup.recipe.preprocessing, self.setup.team
        with team.unsharded(loss_module):  # on all processes, because layers may be sharded
            batch = next(iter(self.loader(QUERIES).iter_once()))
            images = pipeline.normalise(batch.pixels[:N_RECONSTRUCTIONS].to(team.device))
            draw = StepRandom(self.setup.recipe.seed, 0, 0, len(images), len(images), team.device)
            result = loss_module.reconstruct(images, draw, pipeline.mean, pipeline.std)
        if not team.is_main:
            return
        folder = self.setup.directory / "evaluation" / "reconstructions"
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("original", "masked", "reconstructed"):
            for number, image in enumerate(getattr(result, kind).cpu()):
                array = image.permute(1, 2, 0).squeeze(-1).numpy()
                Image.fromarray(array).save(folder / f"{number:02d}-{kind}.png")


def find_recipe_epochs(recipe: Recipe, measured: Facts) -> float | None:
    """Return the epochs that the method's recipe has for this data, whatever the length of this run."""
    try:
        return build_recipe(str(method_of(recipe)), measured, recipe.data).epochs
    except ValueError:  # it does not fit the data without the settings of this run
        return None


def takes_stem(recipe: Recipe) -> bool:
    """Return whether the method could train this model, whose patches are plain, with a convolutional stem instead."""
    model = recipe.model
    if recipe.init is not None or not isinstance(model, TokenConfig) or not isinstance(model.embed, Patches):
        return False
    try:
        stem = ConvStem(model.embed.patch)
        stem.build(model.channels, model.size.width)
        recipe.objective.check(replace(model, embed=stem), recipe.batch_size)
    except ValueError:
        return False
    return True


def thin_images(images: Images, most: int) -> Images:
    """Return at most `most` images, evenly spaced in the order of the split."""
    if len(images) <= most:
        return images
    return images.select(np.linspace(0, len(images) - 1, most).round().astype(np.int64))


def flatten_pixels(images: Tensor) -> Tensor:
    """Return raw pixels, at most 32×32 of each frame, as features: the baseline that any training has to beat."""
    images = images.flatten(1, -3)  # frames of clips as channels
    if max(images.shape[-2:]) > PIXEL_SIDE:  # on the CPU: Metal has no area interpolation
        images = torch.nn.functional.interpolate(images.cpu(), (PIXEL_SIDE, PIXEL_SIDE), mode="area")
    return images.flatten(1)

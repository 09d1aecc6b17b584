"""Compare probes and fine-tuning methods of one model on one dataset within a time budget.

For classes of images: two probes, a head, LoRA and full fine-tuning. For masks: two linear decoders on the frozen backbone, and
LoRA and full fine-tuning with the recipe's decoder.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.checkpoints.known_models import expand_name
from vitrail.checkpoints.load import find_weights
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.evaluation.frozen_head import train_head
from vitrail.evaluation.probes import ProbeSettings, probe
from vitrail.evaluation.selection import describe_ignored
from vitrail.evaluation.transfer_table import (
    CLASS_METHODS,
    MASK_METHODS,
    METHODS,
    TransferRow,
    TransferTable,
    read_earlier_table,
)
from vitrail.metrics.convergence import has_converged
from vitrail.metrics.linear import LinearProbe
from vitrail.models.base import ModelConfig, Unsupported
from vitrail.models.sizes import closest
from vitrail.reports.page import write_report
from vitrail.tasks import Task, task_of
from vitrail.training.distributed import pick_device
from vitrail.training.features import extract_features, hash_model
from vitrail.training.logging import Listener, read_json_lines
from vitrail.training.recipe import Data, Facts, Machine, Recipe
from vitrail.training.recipe_choice import build_named_recipe
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.record import fingerprint_splits, read_run_record, write_json
from vitrail.training.step_time import VALIDATIONS_PER_RUN, StepTime, measure_step_time
from vitrail.training.train import resume, train
from vitrail.utils.progress import ProgressCallback

PROBES = ("knn", "linear")
TRAININGS = ("lora", "full")  # by expected gain per minute: LoRA gains more in the first minutes (docs/transfer.md)
READ_LAYERS = 4  # of the decoder linear-4
FROZEN = ("linear", "linear-4")  # of masks: methods that train this decoder on a frozen backbone
MIN_STEPS = 50  # or one epoch; shorter trainings are skipped
USEFUL_STEPS, USEFUL_EPOCHS = 500, 4  # whichever is less: a shorter training is not worth a share of a small budget


@dataclass
class TransferComparison:
    """Comparison of the methods for one model on one dataset."""

    model: str
    data: Data
    prepared: Prepared
    facts: Facts
    table: TransferTable
    directory: Path
    seed: int
    size: tuple[int, int] | None
    machine: Machine
    cache: bool
    listeners: tuple[Listener, ...]
    progress: ProgressCallback | None
    fitted: LinearProbe | None = None  # of the probe in this call
    feature_seconds: float = 0.0  # of the probes in this call
    forward: float | None = None  # seconds of an image through the frozen model, where features were computed
    pace: tuple[str, StepTime] | None = None  # of the training measured last

    @property
    def task(self) -> Task:
        return task_of(self.prepared.train)

    def report(self, text: str) -> None:
        for listener in self.listeners:
            listener({"kind": "note", "text": text})

    @contextmanager
    def count_time(self, *methods: str) -> Iterator[Callable[[], float]]:
        """Add the time of a block to the table, also if it is interrupted; yield a function of the elapsed seconds."""
        start = time.monotonic()

        def elapsed() -> float:
            return time.monotonic() - start

        try:
            yield elapsed
        finally:
            self.table.spent = round(self.table.spent + elapsed(), 3)
            for method in methods:
                if not self.table.has_method(method) and method not in self.table.left_out:
                    self.table.begun[method] = self.total_seconds(method, elapsed())
            self.table.write(self.directory)

    def total_seconds(self, method: str, seconds: float) -> float:
        """Return the seconds of a method in this call and interrupted earlier calls."""
        return round(self.table.begun.get(method, 0.0) + seconds, 3)

    def add_result(self, row: TransferRow) -> None:
        """Add a row and write the table."""
        self.table.add_row(row)
        self.table.write(self.directory)
        low, high = row.interval
        self.report(f"{row.method}: {100 * row.score:.2f} % ({100 * low:.1f}–{100 * high:.1f})")

    def skip_method(self, method: str, reason: str) -> None:
        self.table.left_out[method] = reason
        self.table.write(self.directory)
        self.report(f"{method} is skipped: {reason}")

    def run_probes(self, methods: Sequence[str]) -> None:
        """Run probes, which share their features. They are not limited by the budget."""
        with self.count_time(*methods):
            options = {"device": self.machine.device, "workers": self.machine.workers, "cache": self.cache}
            options |= {"size": self.size, "prepared": self.prepared, "progress": self.progress}
            report = probe(self.model, self.data, methods, ProbeSettings(seed=self.seed), **options)
            self.table.unreadable |= report.unreadable
            self.feature_seconds = report.seconds
            self.forward = report.seconds / report.n_computed if report.n_computed else None
            for note in report.notes:
                self.report(note)
            for row in report.results:
                assert row.interval is not None
                self.fitted = row.fitted or self.fitted
                seconds = self.total_seconds(row.probe, report.seconds + row.seconds)
                about = f"{row.description}, cached features" if report.cached else row.description
                converged = row.fitted is None or row.fitted.converged
                values = (row.score, row.interval, seconds, row.parameters, about)
                self.add_result(TransferRow(row.probe, *values, converged=converged))

    def run_head(self, shares_features: bool) -> None:
        """Train the head on cached features. It is not limited by the budget, as probes are not."""
        extract = partial(
            extract_features, device=pick_device(self.machine.device), workers=self.machine.workers, cache=self.cache
        )
        with self.count_time("head") as elapsed:
            result = train_head(
                self.model,
                self.data,
                self.prepared,
                partial(extract, progress=self.progress),
                self.directory / "head",
                size=self.size,
                seed=self.seed,
                fitted=self.fitted if shares_features else None,
            )
            self.table.unreadable |= result.unreadable
            about = f"C {result.c:g}, the linear probe as a model" if shares_features else f"C {result.c:g}"
            seconds = self.total_seconds("head", self.feature_seconds + elapsed())
            values = (result.score, result.interval, seconds, result.parameters, about)
            self.add_result(TransferRow("head", *values, run="head", converged=result.converged))

    def run_training(self, method: str, n_remaining: int) -> None:
        """Train within the remaining time, of which the remaining methods get a share where that is worth it."""
        seconds = 60 * self.table.minutes - self.table.spent
        directory = self.directory / method
        with self.count_time(method) as elapsed:
            if (directory / "recipe.json").is_file():
                self.report(f"{method}: resuming {directory}")
                _, summary = resume(directory, changes={}, listeners=self.listeners, progress=self.progress)
                # A killed process could not record its time, but the training loop did.
                spent = max(self.total_seconds(method, elapsed()), summary["seconds"])
                self.add_result(self.build_row(method, directory, summary, spent))
            elif seconds <= 0:
                self.skip_method(method, self.explain_no_time(method))
            elif (planned := self.plan_steps(method, seconds, n_remaining)) is not None:
                steps, pace = planned
                overrides = self.overrides(method) | {"steps": steps}
                settings = [f"validate_every={steps / VALIDATIONS_PER_RUN / pace.steps_per_epoch}"]
                options = {"machine": self.machine, "listeners": self.listeners, "progress": self.progress}
                directory, summary = train(
                    self.data, init=self.model, out=directory, settings=settings, **overrides, **options
                )
                self.add_result(self.build_row(method, directory, summary, self.total_seconds(method, elapsed())))

    def explain_no_time(self, method: str) -> str:
        """Return why a method without time was skipped, and the time it would need where that can be estimated."""
        used = f"the budget of {self.table.minutes:g} minutes is used up"
        source, pace = self.pace or ("the features", self.estimate_pace(method))
        if pace is None:
            return f"{used}; raise --minutes"
        needed = pace.total_minutes(count_useful_steps(pace, self.count_recipe_steps(method, pace.steps_per_epoch)))
        total = math.ceil(self.table.spent / 60 + needed)
        return f"{used}, and at the pace of {source} it needs {needed:.1f} more; raise --minutes to {total}"

    def estimate_pace(self, method: str) -> StepTime | None:
        """Return the pace of a training from that of the features: forward and backward pass take three forward passes."""
        if self.forward is None:
            return None
        recipe, splits = self.build_recipe(method), self.prepared.splits
        batch = min(recipe.batch_size, len(splits["train"]))
        patches = 1 - getattr(recipe.objective, "patch_dropout", 0.0)
        n_evaluated = sum(len(splits[split]) for split in ("validation", "test") if split in splits)
        evaluation = self.forward * (n_evaluated + VALIDATIONS_PER_RUN * len(splits["validation"]))
        return StepTime(0.0, 3 * patches * self.forward * batch, evaluation, max(1, len(splits["train"]) // batch))

    def plan_steps(self, method: str, seconds: float, n_remaining: int) -> tuple[int, StepTime] | None:
        """Return the steps that fit into the remaining seconds, by measuring some; None if they are too few."""
        start = time.monotonic()
        try:
            pace = measure_step_time(self.build_recipe(method), self.prepared, self.machine)
        except Unsupported as reason:  # by this family of models
            self.skip_method(method, str(reason))
            return None
        self.pace = (method, pace)
        available = seconds - (time.monotonic() - start)
        max_steps = self.count_recipe_steps(method, pace.steps_per_epoch)
        steps = choose_steps(pace, max_steps, available, n_remaining)
        if not steps:
            useful = count_useful_steps(pace, max_steps)
            needed = pace.total_minutes(useful)
            total = math.ceil((self.table.minutes * 60 - available) / 60 + needed)
            short = f"{max(0.0, available) / 60:.1f} minutes are left, and {useful:,} steps with evaluation take"
            self.skip_method(method, f"{short} {needed:.1f}; raise --minutes to {total}")
            return None
        length = f"{format_length(steps, max_steps, pace.steps_per_epoch)} at {pace.step:.2f} s per step"
        self.report(f"{method}: {length}, about {pace.total_minutes(steps):.1f} minutes")
        return steps, pace

    def count_recipe_steps(self, method: str, steps_per_epoch: int) -> int:
        """Return the steps of a method without a time budget."""
        return self.build_recipe(method).total_steps(steps_per_epoch)

    def overrides(self, method: str) -> dict[str, Any]:
        """Return the overrides of the recipe: of masks, the decoder on a frozen backbone; others have the recipe's."""
        frozen = {"tune": "head", "decoder": method} if self.task.name == "masks" and method in FROZEN else {}
        return {"tune": method, "seed": self.seed} | frozen | ({"size": self.size} if self.size else {})

    def build_recipe(self, method: str) -> Recipe:
        """Return the recipe of a method, with its default length."""
        facts = replace(self.facts, overrides={}, chosen=[], used=set())
        return build_named_recipe(self.task.recipe, facts, self.data, self.model, self.overrides(method))

    def build_row(self, method: str, directory: Path, summary: dict[str, Any], seconds: float) -> TransferRow:
        """Return the row of a finished run, after marking the run if it has not converged."""
        records = [row for row in read_json_lines(directory / "metrics.jsonl") if row.get("kind") == "train"]
        per_epoch = max(1, round(records[-1]["step"] / records[-1]["epoch"]))
        steps, max_steps = summary["steps"], self.count_recipe_steps(method, per_epoch)
        converged = steps >= max_steps or has_converged([row["loss"] for row in records])
        write_json(directory / "summary.json", summary | {"converged": converged, "recipe_steps": max_steps})
        write_report(directory)
        (low, high), trained = summary["interval"], read_run_record(directory)["model"]["trained"]
        decoder = self.build_recipe(method).model.find_decoder()
        about = f"{type(decoder).__name__}, " * (decoder is not None) + format_length(steps, max_steps, per_epoch)
        return TransferRow(method, summary[self.table.measure], (low, high), seconds, trained, about, method, converged)


def count_useful_steps(pace: StepTime, max_steps: int) -> int:
    """Return the steps from which on a training is worth a share of the budget."""
    return min(max_steps, USEFUL_STEPS, max(MIN_STEPS, USEFUL_EPOCHS * pace.steps_per_epoch))


def choose_steps(pace: StepTime, max_steps: int, seconds: float, n_remaining: int) -> int:
    """Return the steps of a training within the remaining seconds, 0 if not even the fewest fit.

    The remaining methods share the time equally if that gives this one useful steps. Otherwise it gets them first, and all of
    the time if the rest is too short for another training at this pace.
    """
    fewest, useful = min(max_steps, pace.steps_per_epoch, MIN_STEPS), count_useful_steps(pace, max_steps)
    fitting, shared = (min(max_steps, pace.fit_steps(time)) for time in (seconds, seconds / n_remaining))
    if fitting < fewest:
        return 0
    if shared >= useful:
        return shared
    left = seconds - 60 * pace.total_minutes(useful)
    return useful if n_remaining > 1 and pace.fit_steps(left) >= fewest else fitting


def format_length(steps: int, max_steps: int, steps_per_epoch: int) -> str:
    """Return "78 of 500 steps, 3.12 epochs"."""
    cut = "" if steps >= max_steps else f" of {max_steps:,}"
    return f"{steps:,}{cut} steps, {round(steps / steps_per_epoch, 2):g} epochs"


def transfer(
    model: str,
    data: str | Data,
    *,
    minutes: float = 10.0,
    methods: Sequence[str] | None = None,
    out: str | Path,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    machine: Machine = Machine(),  # noqa: B008
    cache: bool = True,
    listeners: tuple[Listener, ...] = (),
    progress: ProgressCallback | None = None,
) -> TransferTable:
    """Compare the methods within `minutes`, all that the data allows by default; resume an earlier call with the same `out`."""
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes must be > 0, got {minutes}")
    if unknown := [method for method in methods or () if method not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}: {closest(unknown[0], list(METHODS))}")
    if methods is not None and not methods:
        raise ValueError(f"no method given: use {', '.join(METHODS)}")
    start = time.monotonic()
    source = Data(data) if isinstance(data, str) else data
    model = expand_name(model)
    model = model if model.startswith("hf://") else str(find_weights(model))
    directory = Path(out)
    earlier = read_earlier_table(directory)
    opened = open_checkpoint(model, size=size)  # first: an invalid size must leave no files
    assert opened.model is not None
    content, config = hash_model(opened.model, opened.contract.preprocessing), opened.model.config
    prepared = prepare_data(source, progress, default_ignore=opened.contract.ignore or ())
    task, notes = task_of(prepared.train), list[str]()
    methods = choose_methods(methods, task, source)
    if task.name == "masks" and source.ignore is None and opened.contract.ignore:
        source, notes = replace(source, ignore=opened.contract.ignore), list(describe_ignored(prepared.train, [opened]))
    split = "test" if "test" in prepared.splits else "validation"
    identity, measure = comparison_identity(content, prepared, seed, size), task.score
    n_images, skipped = len(prepared.splits[split]), dict(prepared.skipped)
    table = TransferTable(
        model, source.where, identity, measure, split, n_images, minutes, unreadable=skipped, media=prepared.train.media
    )
    if earlier is not None:
        if earlier.identity != table.identity:
            held = f"{earlier.model} on {earlier.data} with other weights, data or settings"
            raise ValueError(f"{directory} holds {held}: give another --out")
        table.rows, table.spent, table.begun = earlier.rows, earlier.spent, earlier.begun
    directory.mkdir(parents=True, exist_ok=True)
    table.spent = round(table.spent + time.monotonic() - start, 3)
    table.write(directory)
    facts = prepared.measure_facts()
    comparison = TransferComparison(
        model, source, prepared, facts, table, directory, seed, size, machine, cache, listeners, progress
    )
    for note in notes:
        comparison.report(note)
    missing = [method for method in methods if not table.has_method(method)]
    if task.name == "masks":
        if "linear-4" in missing and config.depth < READ_LAYERS:
            comparison.skip_method("linear-4", f"it reads {READ_LAYERS} layers, and the model has {config.depth}")
            missing.remove("linear-4")
        for index, method in enumerate(missing):
            comparison.run_training(method, len(missing) - index)
        return table
    if probes := [method for method in PROBES if method in missing]:
        comparison.run_probes(probes)
    if "head" in missing:
        # A new head replaces CLIP's projection, so its features are others than those of the probes.
        comparison.run_head(shares_features=not config.has_tokens or has_same_features(config))
    trainings = [method for method in TRAININGS if method in missing]
    for index, method in enumerate(trainings):
        if config.has_tokens:
            comparison.run_training(method, len(trainings) - index)
        else:
            comparison.skip_method(method, "the recipe fine-tunes Vision Transformers, not ResNets")
    return table


def choose_methods(methods: Sequence[str] | None, task: Task, data: Data) -> tuple[str, ...]:
    """Return the methods of a task in their order, all or those given; raise ValueError for one of another task."""
    known = MASK_METHODS if task.name == "masks" else CLASS_METHODS
    if other := [method for method in methods or () if method not in known]:
        raise ValueError(f"{other[0]} does not apply to {task.title}, which {data.where} has: use {', '.join(known)}")
    return tuple(method for method in known if methods is None or method in methods)


def has_same_features(config: ModelConfig) -> bool:
    """Return whether a new head reads the features that probes read: not if it replaces a projection."""
    tokens = config.require_tokens("a new head", clips=True)
    return tokens.with_classes(1).head == tokens.head


def comparison_identity(content: str, prepared: Prepared, seed: int, size: tuple[int, int] | None) -> str:
    """Return a hash of the model, the images and the settings."""
    parts = [content, fingerprint_splits(prepared), prepared.labels.names, seed, size]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

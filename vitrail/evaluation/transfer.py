"""Compare probes and fine-tuning methods of one model on one dataset within a time budget."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail.checkpoints.known_models import expand_name
from vitrail.checkpoints.load import find_weights
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.evaluation.probes import ProbeSettings, probe
from vitrail.evaluation.step_time import VALIDATIONS_PER_RUN, StepTime, measure_step_time
from vitrail.metrics import score_name
from vitrail.models.sizes import closest
from vitrail.training.features import hash_model
from vitrail.training.logging import Listener
from vitrail.training.recipe import Data, Facts, Machine, Recipe, read_recipe
from vitrail.training.runs.prepare import Prepared, prepare_data
from vitrail.training.runs.record import fingerprint_splits, read_run_record
from vitrail.training.train import build_named_recipe, resume, train
from vitrail.utils.files import atomic_write
from vitrail.utils.progress import ProgressCallback
from vitrail.utils.text import format_table

METHODS = ("knn", "linear", "head", "lora", "full")
TABLE_FILE = "table.json"
PROBES, TRAININGS = ("knn", "linear"), ("head", "lora", "full")
MIN_STEPS = 50  # or one epoch; shorter trainings are skipped


@dataclass(frozen=True)
class TransferRow:
    """One method on one dataset."""

    method: str
    score: float  # top-1; mAP for multi-label data
    interval: tuple[float, float]
    seconds: float  # wall time over all calls: features, measuring, training, evaluation
    trainable: int  # parameters
    about: str = ""  # settings: k, C, epochs
    run: str | None = None  # run directory, relative to the table


@dataclass
class TransferTable:
    """Results so far, of one model, one dataset and one seed."""

    model: str
    data: str
    identity: str  # hash of the model, the images and the settings
    measure: str  # "top1" or "map"
    split: str
    images: int  # evaluated
    minutes: float
    spent: float = 0.0  # seconds of all calls
    begun: dict[str, float] = field(default_factory=dict)  # interrupted methods, and their seconds
    rows: tuple[TransferRow, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)  # method and reason
    unreadable: dict[str, str] = field(default_factory=dict)  # skipped images and reasons

    def has_method(self, method: str) -> bool:
        return any(row.method == method for row in self.rows)

    def add_row(self, row: TransferRow) -> None:
        """Add or replace the row of a method, in the order of the methods."""
        rows = [*(other for other in self.rows if other.method != row.method), row]
        self.rows = tuple(sorted(rows, key=lambda other: METHODS.index(other.method)))
        self.left_out.pop(row.method, None)
        self.begun.pop(row.method, None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, directory: Path) -> None:
        """Write the table atomically."""
        with atomic_write(directory / TABLE_FILE) as file:
            file.write((json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n").encode())

    def format_lines(self) -> list[str]:
        """Return the table as lines of text."""
        name = "top-1" if self.measure == "top1" else "mAP"
        cells = [["method", "", name, "95 %", "minutes", "trainable"]]
        for row in self.rows:
            interval = "–".join(f"{100 * edge:.1f}" for edge in row.interval)
            score, minutes = f"{100 * row.score:.2f} %", f"{row.seconds / 60:.1f}"
            cells.append([row.method, row.about, score, interval, minutes, f"{row.trainable:,}"])
        lines = [f"{self.model} on {self.data}: evaluated on {self.images:,} {self.split} images"]
        lines += format_table(cells, right=range(2, 6))
        lines += [f"{method} was skipped: {reason}" for method, reason in self.left_out.items()]
        if self.unreadable:
            path, reason = next(iter(self.unreadable.items()))
            lines.append(f"skipped {len(self.unreadable):,} unreadable images, {path} first ({reason})")
        return lines


def read_table(directory: Path) -> TransferTable | None:
    """Return the table of an earlier call, or None."""
    path = directory / TABLE_FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        intervals = [(row["interval"][0], row["interval"][1]) for row in data["rows"]]
        pairs = zip(data["rows"], intervals, strict=True)
        rows = tuple(TransferRow(**{**row, "interval": interval}) for row, interval in pairs)
        if unknown := [row.method for row in rows if row.method not in METHODS]:
            raise ValueError(f"unknown method {unknown[0]!r}")
        return TransferTable(**{**data, "rows": rows})
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid table ({error}): give another --out") from None


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
            for note in report.notes:
                self.report(note)
            for row in report.results:
                assert row.interval is not None
                seconds = self.total_seconds(row.probe, report.seconds + row.seconds)
                about = f"{row.description}, cached features" if report.cached else row.description
                self.add_result(TransferRow(row.probe, row.score, row.interval, seconds, row.parameters, about))

    def run_training(self, method: str, n_remaining: int) -> None:
        """Train within an equal share of the remaining time for each of the remaining methods."""
        share = (60 * self.table.minutes - self.table.spent) / n_remaining
        directory = self.directory / method
        with self.count_time(method) as elapsed:
            if (directory / "recipe.json").is_file():
                self.report(f"{method}: resuming {directory}")
                _, summary = resume(directory, changes={}, listeners=self.listeners, progress=self.progress)
                # A killed process could not record its time, but the training loop did.
                seconds = max(self.total_seconds(method, elapsed()), summary["seconds"])
                self.add_result(self.build_row(method, directory, summary, seconds))
            elif share <= 0:
                self.skip_method(method, f"the budget of {self.table.minutes:g} minutes is used up; raise --minutes")
            elif (planned := self.plan_steps(method, share)) is not None:
                steps, pace = planned
                overrides = self.overrides(method) | {"steps": steps}
                settings = [f"validate_every={steps / VALIDATIONS_PER_RUN / pace.steps_per_epoch}"]
                options = {"machine": self.machine, "listeners": self.listeners, "progress": self.progress}
                directory, summary = train(
                    self.data, init=self.model, out=directory, settings=settings, **overrides, **options
                )
                self.add_result(self.build_row(method, directory, summary, self.total_seconds(method, elapsed())))

    def plan_steps(self, method: str, share: float) -> tuple[int, StepTime] | None:
        """Return the steps that fit into a share of seconds, by measuring some; None if they are too few."""
        start = time.monotonic()
        recipe = self.build_recipe(method)
        pace = measure_step_time(recipe, self.prepared, self.machine)
        available = share - (time.monotonic() - start)
        max_steps, fitting = recipe.total_steps(pace.steps_per_epoch), pace.fit_steps(available)
        min_steps = min(max_steps, pace.steps_per_epoch, MIN_STEPS)
        if fitting < min_steps:
            short = f"its share of {max(0.0, available) / 60:.1f} minutes is too short for {min_steps} steps"
            needed = f"which take {pace.total_minutes(min_steps):.1f} with evaluation"
            self.skip_method(method, f"{short}, {needed}; raise --minutes, or give fewer --methods")
            return None
        steps = min(max_steps, fitting)
        cut = "" if steps == max_steps else f" of the recipe's {max_steps:,}"
        length = f"{steps:,} steps{cut}, {steps / pace.steps_per_epoch:.1f} epochs at {pace.step:.2f} s per step"
        self.report(f"{method}: {length}, about {pace.total_minutes(steps):.1f} minutes")
        return steps, pace

    def overrides(self, method: str) -> dict[str, Any]:
        return {"tune": method, "seed": self.seed} | ({"size": self.size} if self.size else {})

    def build_recipe(self, method: str) -> Recipe:
        """Return the recipe of a method, with its default length."""
        facts = replace(self.facts, overrides={}, chosen=[], used=set())
        return build_named_recipe(None, facts, self.data, self.model, self.overrides(method))

    def build_row(self, method: str, directory: Path, summary: dict[str, Any], seconds: float) -> TransferRow:
        """Return the row of a finished run."""
        run = read_run_record(directory)
        n_images = summary["steps"] * read_recipe(directory / "recipe.json").batch_size
        epochs = n_images / max(1, run["data"]["splits"]["train"]["images"])
        (low, high), trained = summary["interval"], run["model"]["trained"]
        about = f"{summary['steps']:,} steps, {epochs:.1f} epochs"
        return TransferRow(method, summary[self.table.measure], (low, high), seconds, trained, about, method)


def transfer(
    model: str,
    data: str | Data,
    *,
    minutes: float = 10.0,
    methods: Sequence[str] = METHODS,
    out: str | Path,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    machine: Machine = Machine(),  # noqa: B008
    cache: bool = True,
    listeners: tuple[Listener, ...] = (),
    progress: ProgressCallback | None = None,
) -> TransferTable:
    """Compare the methods within `minutes`, and resume an earlier call with the same `out`."""
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes must be > 0, got {minutes}")
    if unknown := [method for method in methods if method not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}: {closest(unknown[0], list(METHODS))}")
    if not methods:
        raise ValueError(f"no method given: use {', '.join(METHODS)}")
    start = time.monotonic()
    source = Data(data) if isinstance(data, str) else data
    model = expand_name(model)
    model = model if model.startswith("hf://") else str(find_weights(model))
    directory = Path(out)
    earlier = read_earlier_table(directory)
    opened = open_checkpoint(model, size=size)  # first: an invalid size must leave no files
    assert opened.model is not None
    content, has_tokens = hash_model(opened.model, opened.contract.preprocessing), opened.model.config.has_tokens
    prepared = prepare_data(source, progress)
    split = "test" if "test" in prepared.splits else "validation"
    identity, measure = comparison_identity(content, prepared, seed, size), score_name(prepared.train.is_multi_label)
    n_images, skipped = len(prepared.splits[split]), dict(prepared.skipped)
    table = TransferTable(model, source.where, identity, measure, split, n_images, minutes, unreadable=skipped)
    if earlier is not None:
        if earlier.identity != table.identity:
            held = f"{earlier.model} on {earlier.data} with other weights, images or settings"
            raise ValueError(f"{directory} holds {held}: give another --out")
        table.rows, table.spent, table.begun = earlier.rows, earlier.spent, earlier.begun
    directory.mkdir(parents=True, exist_ok=True)
    table.spent = round(table.spent + time.monotonic() - start, 3)
    table.write(directory)
    facts = prepared.measure_facts()
    comparison = TransferComparison(
        model, source, prepared, facts, table, directory, seed, size, machine, cache, listeners, progress
    )
    if probes := [method for method in PROBES if method in methods and not table.has_method(method)]:
        comparison.run_probes(probes)
    trainings = [method for method in TRAININGS if method in methods and not table.has_method(method)]
    for index, method in enumerate(trainings):
        if has_tokens:
            comparison.run_training(method, len(trainings) - index)
        else:
            comparison.skip_method(method, "the recipe fine-tunes Vision Transformers, not ResNets")
    return table


def read_earlier_table(directory: Path) -> TransferTable | None:
    """Return the table of an earlier call in a directory; raise ValueError if it holds other files."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--out {directory} is a file: give a directory")
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    table = read_table(directory)
    if table is None:
        raise ValueError(f"{directory} is not empty and has no {TABLE_FILE}: give another --out")
    return table


def comparison_identity(content: str, prepared: Prepared, seed: int, size: tuple[int, int] | None) -> str:
    """Return a hash of the model, the images and the settings."""
    parts = [content, fingerprint_splits(prepared.splits), prepared.labels.names, seed, size]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

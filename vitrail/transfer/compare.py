"""Probes and trainings of one model on one dataset, one after the other, each within its share of the time."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.checkpoints.loading import describe, load
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.journal import Listener
from vitrail.evaluate import score_name
from vitrail.evaluation.features import checksum
from vitrail.evaluation.opening import weights_of
from vitrail.evaluation.probing import Settings, probe
from vitrail.models.sizes import closest
from vitrail.models.vit import ViTConfig
from vitrail.recipe import Data, Facts, Machine, Recipe
from vitrail.run.prepare import Prepared, prepare
from vitrail.run.record import fingerprints, read_json
from vitrail.training import named, resume, train
from vitrail.transfer.pace import VALIDATIONS, Pace, measured
from vitrail.transfer.table import FILE, METHODS, Row, Table, read_table

Progress = Callable[[str, int, int], None]
PROBES, TRAININGS = ("knn", "linear"), ("head", "lora", "full")
LEAST = 50  # steps, or one epoch: what is shorter says nothing


@dataclass
class Comparison:
    """One model on one dataset, on its way through the methods."""

    model: str
    data: Data
    prepared: Prepared
    facts: Facts
    table: Table
    directory: Path
    deadline: float  # on time.monotonic's clock
    seed: int
    size: tuple[int, int] | None
    machine: Machine
    cache: bool
    listeners: tuple[Listener, ...]
    progress: Progress | None

    def tell(self, text: str) -> None:
        for listener in self.listeners:
            listener({"kind": "note", "text": text})

    def done(self, row: Row) -> None:
        """A row that is kept from now on."""
        self.table.add(row)
        self.table.write(self.directory)
        low, high = row.interval
        self.tell(f"{row.method}: {100 * row.score:.2f} % ({100 * low:.1f}–{100 * high:.1f})")

    def leave_out(self, method: str, why: str) -> None:
        self.table.left_out[method] = why
        self.table.write(self.directory)
        self.tell(f"{method} is left out: {why}")

    def probe(self, methods: Sequence[str]) -> None:
        """Probes, which share their features."""
        found = probe(
            self.model,
            self.data,
            methods,
            Settings(seed=self.seed),
            device=self.machine.device,
            workers=self.machine.workers,
            cache=self.cache,
            size=self.size,
            prepared=self.prepared,
            progress=self.progress,
        )
        self.table.unreadable |= found.unreadable
        for note in found.notes:
            self.tell(note)
        for row in found.rows:
            assert row.interval is not None
            seconds = round(found.seconds + row.seconds, 3)
            about = f"{row.about}, features from the cache" if found.cached else row.about
            self.done(Row(row.probe, row.score, row.interval, seconds, row.parameters, about))

    def train(self, method: str, left: int) -> None:
        """One training within its share: an equal part of the time that is left, for each method that is left."""
        began, place = time.monotonic(), self.directory / method
        share = (self.deadline - began) / left
        if (place / "recipe.json").is_file():
            self.tell(f"{method}: going on with {place}")
            _, summary = resume(place, changes={}, listeners=self.listeners, progress=self.progress)
            self.done(self.row(method, place, summary, max(time.monotonic() - began, summary["seconds"])))
            return
        if share <= 0:
            self.leave_out(method, f"the {self.table.minutes:g} minutes are over; give it more with --minutes")
            return
        whole = self.recipe(method)
        pace = measured(whole, self.prepared, self.machine)
        room = share - (time.monotonic() - began)
        most, fitting = whole.length(pace.per_epoch), pace.steps(room)
        least = min(most, pace.per_epoch, LEAST)
        if fitting < least:
            needed = (pace.beginning + pace.judging + least * pace.step) / 60
            self.leave_out(
                method,
                f"the {max(0.0, room) / 60:.1f} minutes left of its share are not enough for {least} steps, which take "
                f"{needed:.1f} with judging; give it more with --minutes, or name fewer --methods",
            )
            return
        steps = min(most, fitting)
        self.tell(planned(method, steps, most, pace))
        place, summary = train(
            self.data,
            init=self.model,
            out=place,
            wishes=self.wishes(method) | {"steps": steps},
            settings=[f"validate_every={steps / VALIDATIONS / pace.per_epoch}"],
            machine=self.machine,
            listeners=self.listeners,
            progress=self.progress,
        )
        self.done(self.row(method, place, summary, time.monotonic() - began))

    def wishes(self, method: str) -> dict[str, Any]:
        return {"tune": method, "seed": self.seed} | ({"size": self.size} if self.size else {})

    def recipe(self, method: str) -> Recipe:
        """What would be trained, with the length that the recipe would choose."""
        facts = replace(self.facts, wishes={}, chosen=[], heard=set())
        return named(None, facts, self.data, self.model, self.wishes(method))

    def row(self, method: str, place: Path, summary: dict[str, Any], seconds: float) -> Row:
        """A row from what a run left behind."""
        about = read_json(place / "run.json")
        pictures = summary["steps"] * read_json(place / "recipe.json")["batch_size"]
        epochs = pictures / max(1, about["data"]["splits"]["train"]["images"])
        low, high = summary["interval"]
        return Row(
            method,
            summary[self.table.measure],
            (low, high),
            round(seconds, 3),
            about["model"]["trained"],
            f"{summary['steps']:,} steps, {epochs:.1f} epochs",
            method,
        )


def planned(method: str, steps: int, most: int, pace: Pace) -> str:
    """What is about to be trained, in a line."""
    minutes = (pace.beginning + pace.judging + steps * pace.step) / 60
    cut = "" if steps == most else f" of the {most:,} that the recipe would choose"
    return (
        f"{method}: {steps:,} steps{cut}, {steps / pace.per_epoch:.1f} epochs at {pace.step:.2f} s a step, "
        f"about {minutes:.1f} minutes"
    )


def transfer(
    model: str,
    data: str | Data,
    *,
    minutes: float = 10.0,
    methods: Sequence[str] = METHODS,
    out: str | Path,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    machine: Machine = Machine(),  # noqa: B008 (a value)
    cache: bool = True,
    listeners: tuple[Listener, ...] = (),
    progress: Progress | None = None,
) -> Table:
    """Compares the methods within so many minutes, and goes on where an earlier call with the same `out` stopped."""
    if not 0 < minutes < float("inf"):
        raise ValueError(f"{minutes} minutes: give more than 0")
    if unknown := [method for method in methods if method not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}: {closest(unknown[0], list(METHODS))}")
    if not methods:
        raise ValueError(f"no method: use {', '.join(METHODS)}")
    began = time.monotonic()
    source = Data(data) if isinstance(data, str) else data
    model = model if model.startswith("hf://") else str(weights_of(model))
    directory = Path(out)
    before = known(directory)
    prepared = prepare(source, progress)
    with describe(model) as checkpoint:
        transformer = isinstance(checkpoint.contract.config, ViTConfig)
    split = "test" if "test" in prepared.splits else "validation"
    table = Table(
        model=model,
        data=source.where,
        identity=identity(model, prepared, seed, size),
        measure=score_name(prepared.train.several),
        split=split,
        images=len(prepared.splits[split]),
        minutes=minutes,
        unreadable=dict(prepared.skipped),
    )
    if before is not None:
        if before.identity != table.identity:
            raise ValueError(
                f"{directory} is of {before.model} on {before.data} with other weights, pictures or settings: "
                "give --out another name"
            )
        table.rows = before.rows
    directory.mkdir(parents=True, exist_ok=True)
    table.write(directory)
    deadline = began + 60 * minutes - table.spent
    comparison = Comparison(
        model,
        source,
        prepared,
        prepared.facts(),
        table,
        directory,
        deadline,
        seed,
        size,
        machine,
        cache,
        listeners,
        progress,
    )
    if probes := [method for method in PROBES if method in methods and not table.has(method)]:
        comparison.probe(probes)
    trainings = [method for method in TRAININGS if method in methods and not table.has(method)]
    for place, method in enumerate(trainings):
        if transformer:
            comparison.train(method, len(trainings) - place)
        else:
            comparison.leave_out(method, "the recipe fine-tunes Vision Transformers, and this is a ResNet")
    return table


def known(directory: Path) -> Table | None:
    """What an earlier call left in a directory; one that holds something else is refused."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give --out the name of a directory")
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    found = read_table(directory)
    if found is None:
        raise ValueError(f"{directory} is there, is not empty and has no {FILE}: give --out another name")
    return found


def identity(model: str, prepared: Prepared, seed: int, size: tuple[int, int] | None) -> str:
    """The model's content, the pictures and the settings, in short."""
    body = load(model)
    pipeline = body.preprocessing
    if not isinstance(pipeline, Preprocessing):
        pipeline = Preprocessing(body.config.image_size, body.config.image_size)
    parts = [checksum(body, pipeline), fingerprints(prepared.splits), prepared.labels.names, seed, size]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

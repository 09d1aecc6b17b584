"""Probes and trainings of one model on one dataset, one after the other, each within its share of the time."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.engine.journal import Listener
from vitrail.evaluate import score_name
from vitrail.evaluation.opening import open_model, weights_of
from vitrail.evaluation.probes import Settings
from vitrail.evaluation.probing import probe
from vitrail.models.sizes import closest
from vitrail.models.vit import ViTConfig
from vitrail.recipe import Data, Facts, Machine, Recipe
from vitrail.run.features import content_of_model
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
    seed: int
    size: tuple[int, int] | None
    machine: Machine
    cache: bool
    listeners: tuple[Listener, ...]
    progress: Progress | None

    def tell(self, text: str) -> None:
        for listener in self.listeners:
            listener({"kind": "note", "text": text})

    @contextmanager
    def counted(self, *methods: str) -> Iterator[Callable[[], float]]:
        """Counts the seconds of a part as spent, whether it ends or is stopped; what it gives tells them so far."""
        began = time.monotonic()

        def elapsed() -> float:
            return time.monotonic() - began

        try:
            yield elapsed
        finally:
            self.table.spent = round(self.table.spent + elapsed(), 3)
            for method in methods:
                if not self.table.has(method) and method not in self.table.left_out:
                    self.table.begun[method] = self.with_earlier(method, elapsed())
            self.table.write(self.directory)

    def with_earlier(self, method: str, seconds: float) -> float:
        """Seconds of this call and of those that were stopped in this method."""
        return round(self.table.begun.get(method, 0.0) + seconds, 3)

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
        """Probes, which share their features. They run to their end, whatever the budget is."""
        with self.counted(*methods):
            probed = probe(
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
            self.table.unreadable |= probed.unreadable
            for note in probed.notes:
                self.tell(note)
            for row in probed.rows:
                assert row.interval is not None
                seconds = self.with_earlier(row.probe, probed.seconds + row.seconds)
                about = f"{row.about}, features from the cache" if probed.cached else row.about
                self.done(Row(row.probe, row.score, row.interval, seconds, row.parameters, about))

    def train(self, method: str, left: int) -> None:
        """One training within its share: an equal part of the time that is left, for each method that is left."""
        share = (60 * self.table.minutes - self.table.spent) / left
        place = self.directory / method
        with self.counted(method) as elapsed:
            if (place / "recipe.json").is_file():
                self.tell(f"{method}: going on with {place}")
                _, summary = resume(place, changes={}, listeners=self.listeners, progress=self.progress)
                # A process that was killed could not tell its time; what the loop took is known even then.
                seconds = max(self.with_earlier(method, elapsed()), summary["seconds"])
                self.done(self.row(method, place, summary, seconds))
            elif share <= 0:
                self.leave_out(method, f"the {self.table.minutes:g} minutes are over; give it more with --minutes")
            elif (planned := self.plan(method, share)) is not None:
                steps, pace = planned
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
                self.done(self.row(method, place, summary, self.with_earlier(method, elapsed())))

    def plan(self, method: str, share: float) -> tuple[int, Pace] | None:
        """How many steps fit into so many seconds, by measuring some; none where they are too few to say anything."""
        began = time.monotonic()
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
            return None
        steps = min(most, fitting)
        self.tell(described(method, steps, most, pace))
        return steps, pace

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
            seconds,
            about["model"]["trained"],
            f"{summary['steps']:,} steps, {epochs:.1f} epochs",
            method,
        )


def described(method: str, steps: int, most: int, pace: Pace) -> str:
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
    content, transformer = looked_at(model, size)  # first: a size that does not fit leaves nothing behind
    prepared = prepare(source, progress)
    split = "test" if "test" in prepared.splits else "validation"
    table = Table(
        model=model,
        data=source.where,
        identity=identity(content, prepared, seed, size),
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
        table.rows, table.spent, table.begun = before.rows, before.spent, before.begun
    directory.mkdir(parents=True, exist_ok=True)
    table.spent = round(table.spent + time.monotonic() - began, 3)
    table.write(directory)
    comparison = Comparison(
        model=model,
        data=source,
        prepared=prepared,
        facts=prepared.facts(),
        table=table,
        directory=directory,
        seed=seed,
        size=size,
        machine=machine,
        cache=cache,
        listeners=listeners,
        progress=progress,
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


def looked_at(model: str, size: tuple[int, int] | None) -> tuple[str, bool]:
    """The content of a model at this size, and whether it is a Vision Transformer."""
    opened = open_model(model, size=size)
    return content_of_model(opened.model, opened.preprocessing), isinstance(opened.model.config, ViTConfig)


def identity(content: str, prepared: Prepared, seed: int, size: tuple[int, int] | None) -> str:
    """The model's content, the pictures and the settings, in short."""
    parts = [content, fingerprints(prepared.splits), prepared.labels.names, seed, size]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

"""A study in its directory: what was asked for, and what is known by now.

STUDY/plan.json             which study, scale, data and settings; the facts of the data, computed once
STUDY/cells/NAME/run        a finished run; run-3 while the owner of claim-3 is at it
STUDY/cells/NAME/result.json, failed.json, claim-0 …
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import vitrail
from vitrail.checkpoints.files.atomic import staged
from vitrail.models.sizes import closest
from vitrail.models.written import dataclass_from_json, to_json
from vitrail.recipe import Data, Facts, with_settings
from vitrail.run.prepare import prepare
from vitrail.run.record import place, write_json
from vitrail.studies import study_named
from vitrail.studies.study import DIVIDED, Cell, Result, Scale, Setting, Setup, Study

Progress = Callable[[str, int, int], None]
FILE = "plan.json"
FACTS = ("images", "classes", "several", "side", "channels", "several_sizes")


@dataclass(frozen=True)
class Failed:
    """A cell that ended with an error."""

    name: str
    at: Mapping[str, Setting]
    phase: str
    line: str  # what went wrong
    id: str = ""  # of this very failure


@dataclass(frozen=True)
class State:
    """What is known of a study: the cells that are planned by now, and what became of them."""

    cells: dict[str, Cell]  # in the plan's order
    results: dict[str, Result]
    failed: dict[str, Failed]

    @property
    def missing(self) -> list[str]:
        """Cells without a result, failed or not."""
        return [name for name in self.cells if name not in self.results]

    def seconds_left(self) -> float | None:
        """About how long what is missing takes one runner: as long as finished cells of the same phase took."""
        if not self.results:
            return None
        took: dict[str, list[float]] = {}
        for result in self.results.values():
            took.setdefault(result.phase, []).append(result.seconds)
        usual = fmean(result.seconds for result in self.results.values())
        open_cells = [self.cells[name] for name in self.missing if name not in self.failed]
        return sum(fmean(took[cell.phase]) if cell.phase in took else usual for cell in open_cells)


@dataclass
class Sweep:
    """A study, what it was set up for, and its directory."""

    study: Study
    scale: str
    setup: Setup
    settings: tuple[str, ...] = ()
    # A result never changes, and a plan is pure: neither is asked for twice.
    _results: dict[str, Result] = field(default_factory=dict, init=False, repr=False)
    _plans: dict[frozenset[str], dict[str, Cell]] = field(default_factory=dict, init=False, repr=False)

    @property
    def directory(self) -> Path:
        return self.setup.place

    def home(self, name: str) -> Path:
        """A cell's directory."""
        return self.directory / "cells" / name

    def state(self) -> State:
        """Plans, reads the results of what is planned, and plans with them, until nothing new comes of it."""
        results: dict[str, Result] = {}
        plans, self._plans = self._plans, {}
        while True:
            key = frozenset(results)
            cells = self._plans[key] = plans.get(key) or self.planned(list(results.values()))
            found = {name: result for name, cell in cells.items() if (result := self.result(name, cell)) is not None}
            assert results.keys() <= found.keys(), f"the plan of {self.study.name} forgets cells that are finished"
            if len(found) == len(results):
                failed = [self.failure(name, cell) for name, cell in cells.items() if name not in found]
                return State(cells, found, {each.name: each for each in failed if each is not None})
            results = found

    def planned(self, results: Sequence[Result]) -> dict[str, Cell]:
        """The plan's cells by name, with the user's settings; only those that are reported see test pictures."""
        cells: dict[str, Cell] = {}
        asked = self.study.plan(self.setup, results)
        self.check_settings(asked)
        for cell in asked:
            recipe = with_settings(cell.recipe, list(self.settings))
            if cell.phase != "final":
                recipe = replace(recipe, data=replace(recipe.data, test=False))
            cell = replace(cell, recipe=recipe)
            cells[self.name(cell)] = cell
        return cells

    def check_settings(self, cells: Sequence[Cell]) -> None:
        """A setting of the user's must leave different what the study compares."""
        before: dict[str, Cell] = {}
        for cell in cells if self.settings else ():
            changed = with_settings(cell.recipe, list(self.settings))
            same = before.setdefault(json.dumps([cell.phase, to_json(changed)], sort_keys=True), cell)
            if same.recipe != cell.recipe:
                told = " and ".join(", ".join(f"{n} {v}" for n, v in each.at.items()) for each in (same, cell))
                raise ValueError(f"--set {' --set '.join(self.settings)} makes runs the same that are compared: {told}")

    def name(self, cell: Cell) -> str:
        """A cell's name, which is the same wherever the study lies: a model of its own is named from its directory on."""
        init = cell.recipe.init
        if init is None or not Path(init).is_relative_to(self.directory):
            return cell.name
        inside = Path(init).relative_to(self.directory).as_posix()
        return replace(cell, recipe=replace(cell.recipe, init=inside)).name

    def result(self, name: str, cell: Cell) -> Result | None:
        """What a cell gave, if it is finished."""
        if name not in self._results:
            data = read_table(self.home(name) / "result.json")
            if data is None:
                return None
            run = f"cells/{name}/run"
            self._results[name] = Result(cell.at, cell.phase, data["numbers"], data["seconds"], run)
        return self._results[name]

    def finish(self, name: str, cell: Cell, numbers: Mapping[str, Any], seconds: float) -> None:
        """Writes a cell's result, all of it or nothing."""
        about = {"at": dict(cell.at), "phase": cell.phase, "numbers": dict(numbers), "seconds": round(seconds, 3)}
        write_json(self.home(name) / "result.json", about)
        (self.home(name) / "failed.json").unlink(missing_ok=True)

    def failure(self, name: str, cell: Cell) -> Failed | None:
        """What a cell failed with, if it did."""
        data = read_table(self.home(name) / "failed.json")
        return None if data is None else Failed(name, cell.at, cell.phase, data["line"], data["id"])


def read_table(path: Path) -> dict[str, Any] | None:
    """A file of ours, if it is there."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, and what it says is found again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is no table: delete it, and what it says is found again")
    return data


def open_sweep(directory: str | Path) -> Sweep:
    """The study that lies in a directory."""
    path = Path(directory).resolve()
    data = read_table(path / FILE)
    if data is None:
        raise ValueError(f"{directory} holds no study: there is no {FILE} in it")
    study = study_named(data["study"])
    scale = replace(scale_named(study, data["scale"]), seeds=data["seeds"])
    facts = Facts(**{name: data["facts"][name] for name in FACTS if name != "side"}, side=tuple(data["facts"]["side"]))
    source = dataclass_from_json(data["data"], Data, f"{path / FILE}: data")
    return Sweep(study, data["scale"], Setup(scale, source, facts, path, data.get("init")), tuple(data["set"]))


def begin_sweep(
    directory: str | Path,
    study: Study,
    scale: str,
    data: Data | None = None,
    seeds: int | None = None,
    settings: Sequence[str] = (),
    progress: Progress | None = None,
    init: str | None = None,
) -> Sweep:
    """Sets a study up in a directory, or goes on with the same one there, with more seeds if asked; another one is refused."""
    where = Path(directory)
    chosen = scale_named(study, scale)
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds {seeds}: use 1 or more")
    if init is not None and not study.takes_init:
        raise ValueError(f"{study.name} makes its own models: leave out --init")
    given = data or Data(chosen.data)
    about = {
        "vitrail": vitrail.__version__,
        "study": study.name,
        "scale": scale,
        "asked": to_json(replace(given, where=place(given.where) or given.where)),
        "seeds": seeds or chosen.seeds,
        "set": list(settings),
        "init": init and (place(init) or init),
    }
    if where.exists() and not where.is_dir():
        raise ValueError(f"{where} is a file: give --out the name of a directory")
    if not (where / FILE).is_file():
        if where.is_dir() and any(where.iterdir()):
            raise ValueError(f"{where} is there, is not empty and holds no study: give --out another name")
        source = dataclass_from_json(about["asked"], Data, "data")
        known = study.look(source) if study.look is not None else None
        source, facts = (source, known) if known is not None else looked_at(source, progress)
        # What cannot be planned, or set, is refused before anything is written.
        Sweep(study, scale, Setup(chosen, source, facts, where, about["init"]), tuple(settings)).planned([])
        told = {name: getattr(facts, name) for name in FACTS}
        write_plan(where, about | {"data": to_json(source), "facts": told})
    before = read_table(where / FILE) or {}
    if (begun := before.get("vitrail")) != vitrail.__version__:
        raise ValueError(
            f"{where} was begun with vitrail {begun}, and this is {vitrail.__version__}, whose runs may be others: go on with "
            f"{begun}, or give --out another name"
        )
    for name in ("asked", "data"):  # what an older plan does not say of the data means the same
        before[name] = to_json(dataclass_from_json(before.get(name), Data, f"{where / FILE}: {name}"))
    if before["data"] == about["asked"]:  # the fractions that were chosen then are asked for now
        before["asked"] = about["asked"]
    more = about["seeds"] > before["seeds"]  # what is there stays, and others join it
    for name, word in (
        ("study", "study"),
        ("scale", "scale"),
        ("asked", "data"),
        ("seeds", "number of seeds"),
        ("set", "--set"),
        ("init", "--init"),
    ):
        if before.get(name) != about[name] and not (name == "seeds" and more):
            raise ValueError(
                f"{where} holds a study with another {word}, {in_words(before.get(name))} and not "
                f"{in_words(about[name])}: give --out another name"
            )
    if more:
        write_json(where / FILE, (read_table(where / FILE) or {}) | {"seeds": about["seeds"]})
    return open_sweep(where)


def write_plan(directory: Path, about: dict[str, Any]) -> None:
    """A directory with its plan in it, in one step: of several runners that start together, one makes it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with staged(directory) as made:
            made.mkdir()
            write_json(made / FILE, about)
    except OSError:
        if not (directory / FILE).is_file():
            raise


def looked_at(data: Data, progress: Progress | None) -> tuple[Data, Facts]:
    """The data as cells will read it, and its facts. It must have pictures to choose on, and others to report on."""
    prepared = prepare(data, progress)
    if "test" not in prepared.splits and data.fractions is None:
        data = replace(data, fractions=DIVIDED)
        prepared = prepare(data, progress)
    if "test" not in prepared.splits:
        raise ValueError(
            f"{data.where} has no test pictures, and a study reports on others than it chooses by: "
            "add a test folder, or give --split 0.8,0.1,0.1 where there are no splits"
        )
    return data, prepared.facts()


def scale_named(study: Study, name: str) -> Scale:
    """A study's scale."""
    if name not in study.scales:
        raise ValueError(f"{study.name} has no scale {name!r}: {closest(name, list(study.scales))}")
    return study.scales[name]


def in_words(value: Any) -> str:
    """Something of a plan in an error message."""
    if isinstance(value, dict) and "where" in value:
        usual = {f.name: to_json(f.default) for f in fields(Data) if f.name != "where"}
        others = [f"{name} {value[name]}" for name in usual if name in value and value[name] != usual[name]]
        return ", ".join(
            [os.path.relpath(value["where"]) if os.path.isabs(value["where"]) else value["where"], *others]
        )
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)

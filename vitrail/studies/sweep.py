"""A study's directory: its plan, cells, results and failures.

STUDY/plan.json             study, scale, data and settings; the facts of the data, computed once
STUDY/cells/NAME/run        a finished run; run-3 while the owner of claim-3 works on it
STUDY/cells/NAME/result.json, failed.json, claim-0 …
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Required, TypedDict

import vitrail
from vitrail.studies import load_study
from vitrail.studies.given import read_given
from vitrail.studies.study import (
    DEFAULT_FRACTIONS,
    Cell,
    CellResult,
    Numbers,
    Results,
    Setting,
    Study,
    StudySetup,
    format_point,
)
from vitrail.training.recipe import Data, Facts, with_settings
from vitrail.training.runs.prepare import prepare_data
from vitrail.training.runs.record import absolute_path, write_json
from vitrail.utils.files import stage_output
from vitrail.utils.json import Finite, dataclass_from_json, read_json_file, to_json
from vitrail.utils.progress import ProgressCallback

PLAN_FILE = "plan.json"
FACT_FIELDS = ("images", "classes", "several", "side", "channels", "several_sizes")


class FactRecord(TypedDict):
    """The facts of the data in plan.json."""

    images: int
    classes: int
    several: bool
    side: tuple[int, int]
    channels: int
    several_sizes: bool


class PlanRecord(TypedDict, total=False):
    """The content of plan.json."""

    vitrail: str
    study: Required[str]
    scale: Required[str]
    seeds: Required[int]
    set: Required[list[str]]
    init: str | None
    asked: dict[str, Any]
    data: Required[dict[str, Any]]
    facts: Required[FactRecord]


class ResultRecord(TypedDict):
    """The content of result.json that is read."""

    numbers: Numbers
    seconds: Finite


class FailureRecord(TypedDict):
    """The content of failed.json that is read."""

    line: str
    id: str


@dataclass(frozen=True)
class FailedCell:
    """A cell whose run raised an error."""

    name: str
    at: Mapping[str, Setting]
    phase: str
    line: str  # first line of the error
    id: str = ""  # unique per failure


@dataclass(frozen=True)
class SweepState:
    """Planned cells of a study with their results and failures."""

    cells: dict[str, Cell]  # in the plan's order
    results: dict[str, CellResult]
    failed: dict[str, FailedCell]

    @property
    def missing(self) -> list[str]:
        """Return the cells without a result, failed or not."""
        return [name for name in self.cells if name not in self.results]

    def seconds_left(self) -> float | None:
        """Return the estimated time of the missing cells for one runner, from finished cells of the same phase."""
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
    """A study with its setup and directory."""

    study: Study
    scale: str
    setup: StudySetup
    settings: tuple[str, ...] = ()
    # Caches: a result never changes and a plan is a pure function.
    _results: dict[str, CellResult] = field(default_factory=dict, init=False, repr=False)
    _plans: dict[frozenset[str], dict[str, Cell]] = field(default_factory=dict, init=False, repr=False)

    @property
    def directory(self) -> Path:
        return self.setup.directory

    def cell_directory(self, name: str) -> Path:
        """Return a cell's directory."""
        return self.directory / "cells" / name

    def read_state(self) -> SweepState:
        """Plan and read results repeatedly until no new result appears, and return the state."""
        results: dict[str, CellResult] = {}
        plans, self._plans = self._plans, {}
        while True:
            key = frozenset(results)
            cells = self._plans[key] = plans.get(key) or self.plan_cells(list(results.values()))
            finished = {name: result for name, cell in cells.items() if (result := self.read_result(name, cell))}
            assert results.keys() <= finished.keys(), f"the plan of {self.study.name} dropped finished cells"
            if len(finished) == len(results):
                missing = {name: cell for name, cell in cells.items() if name not in finished}
                failed = {name: failure for name, cell in missing.items() if (failure := self.read_failure(name, cell))}
                return SweepState(cells, finished, failed)
            results = finished

    def plan_cells(self, results: Results) -> dict[str, Cell]:
        """Return the plan's cells by name, with the user's settings. Only final cells see test images."""
        cells: dict[str, Cell] = {}
        planned = self.study.plan(self.setup, results)
        self.check_settings(planned)
        for cell in planned:
            recipe = with_settings(cell.recipe, list(self.settings))
            if cell.phase != "final":
                recipe = replace(recipe, data=replace(recipe.data, test=False))
            cell = replace(cell, recipe=recipe)
            cells[self.cell_name(cell)] = cell
        return cells

    def check_settings(self, cells: Sequence[Cell]) -> None:
        """Raise ValueError if the user's settings make two compared runs equal."""
        before: dict[str, Cell] = {}
        for cell in cells if self.settings else ():
            changed = with_settings(cell.recipe, list(self.settings))
            same = before.setdefault(json.dumps([cell.phase, to_json(changed)], sort_keys=True), cell)
            if same.recipe != cell.recipe:
                pair = f"{format_point(same.at)} and {format_point(cell.at)}"
                raise ValueError(f"--set {' --set '.join(self.settings)} makes compared runs equal: {pair}")

    def cell_name(self, cell: Cell) -> str:
        """Return a cell's name, independent of the study's path: models inside it are named relative to its directory."""
        init = cell.recipe.init
        if init is None or not Path(init).is_relative_to(self.directory):
            return cell.name
        inside = Path(init).relative_to(self.directory).as_posix()
        return replace(cell, recipe=replace(cell.recipe, init=inside)).name

    def read_result(self, name: str, cell: Cell) -> CellResult | None:
        """Return the result of a cell; None if it is not finished."""
        path, run = self.cell_directory(name) / "result.json", f"cells/{name}/run"
        if name not in self._results and (data := read_json_object(path, ResultRecord)) is not None:
            self._results[name] = CellResult(cell.at, cell.phase, data["numbers"], data["seconds"], run)
        return self._results.get(name)

    def write_result(self, name: str, cell: Cell, numbers: Mapping[str, Any], seconds: float) -> None:
        """Write a cell's result atomically."""
        about = {"at": dict(cell.at), "phase": cell.phase, "numbers": dict(numbers), "seconds": round(seconds, 3)}
        write_json(self.cell_directory(name) / "result.json", about)
        (self.cell_directory(name) / "failed.json").unlink(missing_ok=True)

    def read_failure(self, name: str, cell: Cell) -> FailedCell | None:
        """Return the failure of a cell; None if it did not fail."""
        data = read_json_object(self.cell_directory(name) / "failed.json", FailureRecord)
        return None if data is None else FailedCell(name, cell.at, cell.phase, data["line"], data["id"])


def read_json_object(path: Path, kind: Any) -> dict[str, Any] | None:
    """Return the JSON object in a file, of this TypedDict; None if there is no file."""
    try:
        return read_json_file(path, kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {error}: delete it to compute it again") from None


def open_sweep(directory: str | Path) -> Sweep:
    """Return the study in a directory."""
    path = Path(directory).resolve()
    data = read_json_object(path / PLAN_FILE, PlanRecord)
    if data is None:
        raise ValueError(f"{directory} is not a study: it has no {PLAN_FILE}")
    study = load_study(data["study"])
    scale = replace(study.get_scale(data["scale"]), seeds=data["seeds"])
    facts = Facts(**{name: data["facts"][name] for name in FACT_FIELDS})
    source = dataclass_from_json(data["data"], Data, f"{path / PLAN_FILE}: data")
    setup = StudySetup(scale, source, facts, path, data.get("init"), read_given(path))
    return Sweep(study, data["scale"], setup, tuple(data["set"]))


def begin_sweep(
    directory: str | Path,
    study: Study,
    scale: str,
    data: Data | None = None,
    seeds: int | None = None,
    settings: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    init: str | None = None,
) -> Sweep:
    """Set up a study in a directory, or resume the same one there, possibly with more seeds. Refuse a different one."""
    where = Path(directory)
    chosen = study.get_scale(scale)
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds must be >= 1, got {seeds}")
    if init is not None and not study.takes_init:
        raise ValueError(f"study {study.name} does not support --init: it trains its own models")
    given = data or Data(chosen.data)
    about = {
        "vitrail": vitrail.__version__,
        "study": study.name,
        "scale": scale,
        "asked": to_json(replace(given, where=absolute_path(given.where) or given.where)),
        "seeds": seeds or chosen.seeds,
        "set": list(settings),
        "init": init and (absolute_path(init) or init),
    }
    if where.exists() and not where.is_dir():
        raise ValueError(f"{where} is a file: choose a directory with --out")
    if not (where / PLAN_FILE).is_file():
        if where.is_dir() and any(where.iterdir()):
            raise ValueError(f"{where} is not empty and is not a study: choose another directory with --out")
        source = dataclass_from_json(about["asked"], Data, "data")
        known = study.inspect_data(source) if study.inspect_data is not None else None
        source, facts = (source, known) if known is not None else inspect_data(source, progress)
        # Plan once before writing anything: an impossible plan or setting raises here.
        Sweep(study, scale, StudySetup(chosen, source, facts, where, about["init"]), tuple(settings)).plan_cells([])
        saved_facts = {name: getattr(facts, name) for name in FACT_FIELDS}
        write_plan(where, about | {"data": to_json(source), "facts": saved_facts})
    before = read_json_object(where / PLAN_FILE, PlanRecord) or {}
    if (begun := before.get("vitrail")) != vitrail.__version__:
        versions = f"vitrail {begun}, not {vitrail.__version__}"
        raise ValueError(f"{where} was started with {versions}: use {begun}, or choose another directory with --out")
    for name in ("asked", "data"):  # fields missing in older plans have their defaults
        before[name] = to_json(dataclass_from_json(before.get(name), Data, f"{where / PLAN_FILE}: {name}"))
    if before["data"] == about["asked"]:  # default fractions, now given explicitly
        before["asked"] = about["asked"]
    more = about["seeds"] > before["seeds"]  # finished runs are kept
    labels = {"asked": "data", "seeds": "number of seeds", "set": "--set", "init": "--init"}
    for name in ("study", "scale", *labels):
        if before.get(name) != about[name] and not (name == "seeds" and more):
            values = f"{format_plan_value(before.get(name))}, not {format_plan_value(about[name])}"
            different = f"{where} holds a study with a different {labels.get(name, name)}"
            raise ValueError(f"{different}: {values}; choose another directory with --out")
    if more:
        write_json(
            where / PLAN_FILE, (read_json_object(where / PLAN_FILE, PlanRecord) or {}) | {"seeds": about["seeds"]}
        )
    return open_sweep(where)


def write_plan(directory: Path, plan: dict[str, Any]) -> None:
    """Create a directory with its plan atomically: of several runners that start together, one succeeds."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with stage_output(directory) as staged:
            staged.mkdir()
            write_json(staged / PLAN_FILE, plan)
    except OSError:
        if not (directory / PLAN_FILE).is_file():
            raise


def inspect_data(data: Data, progress: ProgressCallback | None) -> tuple[Data, Facts]:
    """Return the data as cells read it, and its facts. It must have validation and test images."""
    prepared = prepare_data(data, progress)
    if "test" not in prepared.splits and data.fractions is None:
        data = replace(data, fractions=DEFAULT_FRACTIONS)
        prepared = prepare_data(data, progress)
    if "test" not in prepared.splits:
        remedy = "add a test folder, or use --fractions 0.8,0.1,0.1 for data without splits"
        raise ValueError(f"{data.where} has no test images, which a study needs: {remedy}")
    return data, prepared.measure_facts()


def format_plan_value(value: Any) -> str:
    """Return a value of a plan as text for an error message."""
    if isinstance(value, dict) and "where" in value:
        usual = {f.name: to_json(f.default) for f in fields(Data) if f.name != "where"}
        others = [f"{name} {value[name]}" for name in usual if name in value and value[name] != usual[name]]
        where = os.path.relpath(value["where"]) if os.path.isabs(value["where"]) else value["where"]
        return ", ".join([where, *others])
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)

"""A runner: takes what is missing of a study, cell after cell, until nothing is missing. Any number of them share a directory."""

import gc
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch

from vitrail.engine.journal import Listener
from vitrail.engine.loop import Diverged, Stopped
from vitrail.recipe import Machine
from vitrail.run.record import write_json
from vitrail.studies.claims import Claim, Lost, Watcher
from vitrail.studies.runcell import compute, numbers, run_at, settle
from vitrail.studies.study import Cell, Setting
from vitrail.studies.sweep import State, Sweep

POLL = 2.0  # seconds before looking again whether others are done
SELDOM = 1.0  # seconds between words about what is being read or decoded


@dataclass
class Runner:
    """One process at work on a study. Those who watch hear of cells, of the state, and whatever the runs say."""

    sweep: Sweep
    machine: Machine = Machine()  # noqa: RUF009 (a value)
    hear: Listener = lambda record: None  # noqa: E731
    watcher: Watcher = field(default_factory=Watcher)
    poll: float = POLL

    def run(self) -> State:
        """Works to the end. Cells that failed before are tried again, once; those that others fail at meanwhile are left."""
        gc.freeze()  # what is there already is not looked through after every cell
        try:
            return self.cells()
        finally:
            gc.unfreeze()

    def cells(self) -> State:
        """Cell after cell."""
        before = {failed.id for failed in self.sweep.state().failed.values()}
        while True:
            state = self.sweep.state()
            self.hear(counted(state))
            given_up = {name for name, failed in state.failed.items() if failed.id not in before}
            left = [name for name in state.missing if name not in given_up]
            if not left:
                return state
            if not any(self.take(name, state.cells[name]) for name in left):
                time.sleep(self.poll)

    def take(self, name: str, cell: Cell) -> bool:
        """Runs a cell, if it can be had."""
        claim = self.watcher.take(self.sweep.home(name))
        if claim is None:
            return False
        try:
            if self.sweep.result(name, cell) is None:  # it may have been finished since we looked
                self.work(name, cell, claim)
        finally:
            claim.release()
            tidy_memory()
        return True

    def work(self, name: str, cell: Cell, claim: Claim) -> None:
        """A cell of ours from where it stands to its result; or to a line that says why there is none."""
        about = {"cell": name, "label": label(cell.phase, cell.at)}
        began = time.monotonic()

        def hear(record: dict[str, Any]) -> None:
            claim.check()
            self.hear(record | about)

        told = began

        def progress(doing: str, done: int, total: int) -> None:
            nonlocal told
            if time.monotonic() - told > SELDOM:
                told = time.monotonic()
                hear({"kind": "progress", "doing": doing, "done": done, "total": total})

        hear({"kind": "cell", "what": "begins"})
        home = self.sweep.home(name)
        try:
            place = run_at(home, claim)
            try:
                summary = compute(cell.recipe, place, self.machine, (hear,), progress)
                found = numbers(self.sweep.study, cell, place, summary)
                seconds = max(time.monotonic() - began, summary["seconds"])
            except Diverged as error:
                if cell.phase == "final" or "rate" not in cell.at or (cell.phase == "base" and cell.at["seed"] != 0):
                    raise
                # A rate that is too high is a try like any other, and the worst.
                found = {"validation": 0.0, "diverged": str(error)}
                seconds = time.monotonic() - began
            settle(home, place, claim)
            self.sweep.finish(name, cell, found, seconds)
        except Stopped:
            raise
        except Lost:
            self.hear({"kind": "cell", "what": "lost"} | about)
        except Exception as error:  # whatever it is, the other cells are not concerned
            self.fail(claim, error, about)
        else:
            shown = {key: found[key] for key in ("validation", "test") if key in found}
            self.hear({"kind": "cell", "what": "done", "seconds": seconds, **shown} | about)

    def fail(self, claim: Claim, error: Exception, about: Mapping[str, Any]) -> None:
        """Writes down why a cell has no result; unless it is somebody else's by now, and that was why."""
        try:
            claim.check_now()
        except Lost:
            self.hear({"kind": "cell", "what": "lost"} | dict(about))
            return
        line = first_line(error)
        where = "".join(traceback.format_exception(error))
        write_json(claim.directory / "failed.json", {"id": uuid4().hex, "line": line, "traceback": where})
        self.hear({"kind": "cell", "what": "failed", "line": line} | dict(about))


def counted(state: State) -> dict[str, Any]:
    """How far a study is, for those who watch."""
    return {
        "kind": "state",
        "known": len(state.cells),
        "done": len(state.results),
        "failed": len(state.failed),
        "seconds_left": state.seconds_left(),
    }


def label(phase: str, at: Mapping[str, Setting]) -> str:
    """A cell for people: tune: positions 2-D, rate 0.001, seed 0."""
    return f"{phase}: " + ", ".join(f"{name} {value}" for name, value in at.items())


def first_line(error: Exception) -> str:
    """What an error says, in one line; errors that were not meant for users are named."""
    said = (str(error).strip().splitlines() or [""])[0]
    return said if isinstance(error, (ValueError, OSError)) and said else f"{type(error).__name__}: {said}"


def tidy_memory() -> None:
    """Runs hold on to themselves in circles: what a cell leaves is given back before the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

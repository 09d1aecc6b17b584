"""Exclusive claims on cells for runners that share a directory, and the run of a claimed cell.

A claim is a file claim-0, claim-1, … in the cell's directory, created exclusively; the highest number owns the cell. The owner
touches its file regularly. A runner that sees no touch for STALE_SECONDS, by its own clock, creates the next number; for a dead
process of the same machine it does not wait. An owner that finds a higher number than its own has lost the claim.
"""

import json
import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from vitrail.studies.study import Cell, Study
from vitrail.training.logging import Listener
from vitrail.training.recipe import Machine, Recipe, method_of
from vitrail.training.runs.record import write_json
from vitrail.training.train import pretrain, resume, train
from vitrail.utils.json import parse_json, untyped_from_json
from vitrail.utils.progress import ProgressCallback

HEARTBEAT_SECONDS = 5.0  # between touches
STALE_SECONDS = 120.0  # without a touch; network file systems cache attributes for up to a minute
MIN_OBSERVATIONS = 4  # before a claim is stale: this process may have been suspended as long as the owner
DISCARDED = ("checkpoints", "best.safetensors", "pretraining.safetensors")  # deleted when a cell is finished


class ClaimLost(Exception):
    """Raised when another runner owns the cell."""


@dataclass(frozen=True)
class ClaimOwner:
    """Identity of a process that runs cells."""

    machine: str
    pid: int
    id: str  # unique, because process numbers are reused
    over: bool = False  # True once released


@cache
def _make_owner(pid: int) -> ClaimOwner:
    parts = [socket.gethostname()]
    with suppress(OSError):  # two containers may share a host name
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return ClaimOwner(" ".join(parts), pid, uuid4().hex)


def current_owner() -> ClaimOwner:
    """Return the identity of this process."""
    return _make_owner(os.getpid())


@dataclass
class CellClaim:
    """A claim of this process on a cell, kept alive by a thread."""

    directory: Path
    number: int
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    is_lost: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self.directory / f"claim-{self.number}"

    def _keep_alive(self) -> None:
        while not self._stop.wait(self.heartbeat_seconds):
            try:
                os.utime(self.path)
                self.is_lost = latest_claim(self.directory) > self.number
            except FileNotFoundError:
                self.is_lost = True
            except OSError:  # network file system unavailable: if it lasts, another runner takes the cell
                continue
            if self.is_lost:
                return

    def check(self) -> None:
        """Raise ClaimLost if the claim was lost at the last heartbeat."""
        if self.is_lost:
            raise ClaimLost

    def check_now(self) -> None:
        """Raise ClaimLost if the claim is lost now. Call it before writing a shared file."""
        self.is_lost = self.is_lost or not self.path.is_file() or latest_claim(self.directory) > self.number
        self.check()

    def release(self) -> None:
        """Stop the heartbeat and mark the claim as released."""
        self._stop.set()
        self._thread.join()
        with suppress(FileNotFoundError):  # the cell's directory was deleted
            if self.path.is_file():
                write_json(self.path, asdict(replace(current_owner(), over=True)))


@dataclass
class CellClaimer:
    """Claims cells that are free or whose owner is dead."""

    stale_seconds: float = STALE_SECONDS
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    _seen: dict[Path, tuple[int, float, float]] = field(default_factory=dict)

    def claim(self, directory: Path) -> CellClaim | None:
        """Return a claim on the cell, or None if it is taken. Read the cell's result again afterwards: it may be finished."""
        directory.mkdir(parents=True, exist_ok=True)
        number = latest_claim(directory)
        if number >= 0 and not self.is_stale(directory / f"claim-{number}"):
            return None
        path = directory / f"claim-{number + 1}"
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return None
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(current_owner()), file)
        return CellClaim(directory, number + 1, self.heartbeat_seconds)

    def is_stale(self, path: Path) -> bool:
        """Return True if the owner released the claim, died on this machine, or did not touch its file for long."""
        try:
            with path.open(encoding="utf-8") as file:  # makes a network file system refresh the modification time
                text, stamp = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return False
        owner = _read_owner(text)
        if owner is not None and (owner.over or is_dead(owner)):
            return True
        now = time.monotonic()
        before, waited, last = self._seen.get(path, (stamp, 0.0, now))
        waited = waited + min(now - last, self.stale_seconds / MIN_OBSERVATIONS) if before == stamp else 0.0
        self._seen[path] = (stamp, waited, now)
        return waited >= self.stale_seconds


def latest_claim(directory: Path) -> int:
    """Return the highest claim number in a directory, -1 if there is none."""
    numbers = [entry.name.removeprefix("claim-") for entry in os.scandir(directory) if entry.name.startswith("claim-")]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def is_dead(owner: ClaimOwner) -> bool:
    """Return True if the owner is a process of this machine that no longer exists."""
    me = current_owner()
    if owner.machine != me.machine or os.name != "posix":
        return False
    if owner.pid == me.pid:
        return owner.id != me.id
    try:
        with suppress(PermissionError):  # alive, owned by another user
            os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    return False


def _read_owner(text: str) -> ClaimOwner | None:
    """Return the owner of a claim; None while the file is being written."""
    try:
        return untyped_from_json(parse_json(text), ClaimOwner, "claim")
    except ValueError:
        return None


def adopt_run(home: Path, claim: CellClaim) -> Path:
    """Return the run directory of a claim: `run` if finished, else an earlier owner's directory, renamed for this claim.

    The rename stops an earlier owner that has not noticed its loss from writing into it.
    """
    if (home / "run").is_dir():
        return home / "run"
    mine = home / f"run-{claim.number}"
    left = sorted(home.glob("run-*"), key=lambda path: int(path.name.removeprefix("run-")))
    if left:
        os.replace(left[-1], mine)
        (mine / ".lock").unlink(missing_ok=True)  # of an owner that lost its claim
    return mine


def run_training(
    recipe: Recipe, run: Path, machine: Machine, listeners: tuple[Listener, ...], progress: ProgressCallback | None
) -> dict[str, Any]:
    """Train or resume a run to its end and return its summary."""
    if (run / "recipe.json").is_file():
        return resume(run, changes=dict(vars(machine)), listeners=listeners, progress=progress)[1]
    begin = pretrain if method_of(recipe) else train
    return begin(recipe=recipe, out=run, machine=machine, listeners=listeners, progress=progress)[1]


def collect_numbers(study: Study, cell: Cell, directory: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a finished run: "validation", "test", "pictures" (test images), and the study's own measures.

    For pre-training without labels "validation" is the k-NN accuracy, if the data has labels.
    """
    numbers: dict[str, Any] = {"steps": summary["steps"], "stopped": summary["stopped"]}
    if method_of(cell.recipe):
        numbers |= {"validation": summary["knn"]} if "knn" in summary else {}
    else:
        numbers |= {split: summary[split]["top1"] for split in ("validation", "test") if split in summary}
        numbers |= {"pictures": summary["test"]["images"]} if "test" in summary else {}
    return numbers | (study.measure(cell, directory) if study.measure is not None else {})


def finalise_run(home: Path, directory: Path, claim: CellClaim) -> None:
    """Delete the large files of a finished run and rename its directory to `run`. Only the owner may do so."""
    for path in (directory / name for name in DISCARDED):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    claim.check_now()
    if directory != home / "run" and directory.is_dir():
        try:
            os.rename(directory, home / "run")
        except OSError:
            if (home / "run").is_dir():  # another owner was faster
                raise ClaimLost from None
            raise
    for left in (*home.glob("run-*"), *home.glob(".run-*.partial")):
        shutil.rmtree(left, ignore_errors=True)  # left by killed owners

"""Who runs a cell, when several runners share a directory: one at a time, and another one when it is dead.

A claim is a file claim-0, claim-1, … in the cell's directory, made exclusively, so two can never make the same one; the highest
number owns. The owner touches its file all the time. Whoever sees no touch for long, by its own clock, takes the next number;
on the same machine it need not wait where the process is gone. An owner who finds a higher number than its own has lost.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from uuid import uuid4

from vitrail.checkpoints.files.atomic import atomic

BEAT = 5.0  # seconds between touches
PATIENCE = (
    120.0  # seconds without a touch: more than the minute that network file systems remember what a file was like
)
LOOKS = 4  # a watcher looks so often at least, however long it looked away: it may have slept as long as the owner


class Lost(Exception):
    """Somebody else owns the cell by now."""


@dataclass(frozen=True)
class Owner:
    """A process that runs cells."""

    machine: str
    pid: int
    id: str  # numbers of processes are used again, this is not
    over: bool = False  # whether it let go


@cache
def _owner(pid: int) -> Owner:
    parts = [socket.gethostname()]
    with suppress(OSError):  # a host name alone may be that of two containers
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return Owner(" ".join(parts), pid, uuid4().hex)


def myself() -> Owner:
    """This process."""
    return _owner(os.getpid())


@dataclass
class Claim:
    """A cell that is ours, until somebody finds that we were dead."""

    directory: Path
    number: int
    beat: float = BEAT
    lost: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._touch, daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self.directory / f"claim-{self.number}"

    def _touch(self) -> None:
        while not self._stop.wait(self.beat):
            try:
                os.utime(self.path)
                self.lost = newest(self.directory) > self.number
            except FileNotFoundError:
                self.lost = True
            except OSError:  # a network file system that is away: if it is for long, another one takes the cell
                continue
            if self.lost:
                return

    def check(self) -> None:
        """Raises where the cell is no longer ours, as far as the last touch told."""
        if self.lost:
            raise Lost

    def check_now(self) -> None:
        """The same after another look: before something is written that others rely on."""
        self.lost = self.lost or not self.path.is_file() or newest(self.directory) > self.number
        self.check()

    def release(self) -> None:
        """Lets go: others need not wait."""
        self._stop.set()
        self._thread.join()
        with suppress(FileNotFoundError):  # the cell's directory was taken away
            if self.path.is_file():
                _write(self.path, replace(myself(), over=True))


@dataclass
class Watcher:
    """Takes cells that nobody has, or whose owner is dead."""

    patience: float = PATIENCE
    beat: float = BEAT
    _seen: dict[Path, tuple[int, float, float]] = field(default_factory=dict)

    def take(self, directory: Path) -> Claim | None:
        """The cell, if it can be had. What is known of it must be looked at again then: it may be finished."""
        directory.mkdir(parents=True, exist_ok=True)
        number = newest(directory)
        if number >= 0 and not self.dead(directory / f"claim-{number}"):
            return None
        path = directory / f"claim-{number + 1}"
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return None
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(myself()), file)
        return Claim(directory, number + 1, self.beat)

    def dead(self, path: Path) -> bool:
        """Whether an owner let go, is gone from this machine, or was not seen to touch its file for long."""
        try:
            with open(path, encoding="utf-8") as file:  # opened, so that a network file system asks for its time anew
                text, stamp = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return False
        owner = _read(text)
        if owner is not None and (owner.over or gone(owner)):
            return True
        now = time.monotonic()
        before, waited, last = self._seen.get(path, (stamp, 0.0, now))
        waited = waited + min(now - last, self.patience / LOOKS) if before == stamp else 0.0
        self._seen[path] = (stamp, waited, now)
        return waited >= self.patience


def newest(directory: Path) -> int:
    """The highest number that was claimed; -1 for none."""
    found = [entry.name.removeprefix("claim-") for entry in os.scandir(directory) if entry.name.startswith("claim-")]
    return max((int(number) for number in found if number.isdecimal()), default=-1)


def gone(owner: Owner) -> bool:
    """Whether an owner is known to be dead: a process of this machine that is no more."""
    me = myself()
    if owner.machine != me.machine or os.name != "posix":
        return False
    if owner.pid == me.pid:
        return owner.id != me.id
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, and alive
        return False
    return False


def _write(path: Path, owner: Owner) -> None:
    with atomic(path) as file:
        file.write(json.dumps(asdict(owner)).encode())


def _read(text: str) -> Owner | None:
    """Whose claim it is; None while it is being written."""
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None

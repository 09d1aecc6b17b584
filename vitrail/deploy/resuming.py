"""Rows on their way to a file, so that whatever ends the process costs a second of work and no row.

Rows are added to `OUT.partial` (to `OUT.rank0` and so on where several processes share the work), and about once a second what
was added is brought to the disk; then a small journal beside it says how many rows and bytes are whole. Who goes on cuts off
what the journal does not know and makes the next row. The file takes its name when it has all rows.
"""

import glob
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.checkpoints.files.atomic import atomic
from vitrail.deploy.rows import Form, Row, joined

EVERY = 1.0  # seconds of work that a kill may cost
MOST = 4096  # rows that wait for the disk
WORDS = {"model": "another model", "pictures": "other pictures", "processes": "another number of processes"}


class Part:
    """The rows of one process: those that are on the disk, and those that wait for it."""

    def __init__(
        self,
        out: Path,
        form: Form,
        total: int,
        what: Mapping[str, Any],  # what has to be the same when it is gone on with
        *,
        rank: int = 0,
        world: int = 1,
        width: Callable[[], int] = lambda: 0,  # how many features there are, if no picture could be read so far
    ) -> None:
        self.out, self.form, self.total, self.what = out, form, total, json.loads(json.dumps(dict(what)))
        self.rank, self.world, self.ask_width = rank, world, width
        self.base = part_of(out, rank, world)
        self.journal = journal_of(self.base)
        self.rows, self.count, self.finished = 0, 0, False  # on the disk; to be made
        self.errors = 0
        self.width = 0
        self.sizes = [0] * len(form.streams)
        self.files: list[BinaryIO] = []
        self.waiting: list[Row] = []
        self.saving = False
        self.last = time.monotonic()

    def begin(self, count: int, *, resume: bool, force: bool) -> int:
        """Takes its place in the directory; how many of its `count` rows are there already."""
        self.count = count
        there = check_free(self.out, self.rank, self.world, resume=resume, force=force)
        going_on = there and not force
        if going_on:
            self.read_journal()
        if self.finished:  # all that is missing is its name
            return self.rows
        with self.told():
            streams = [self.base.with_name(self.base.name + end) for end in self.form.streams]
            self.files = [open(stream, "ab", buffering=0) for stream in streams]  # noqa: SIM115 (to the end)
            hold(self.files[0], self.out)
            if going_on:
                self.read_journal()  # again: nobody else changes it from now on
                self.check_sizes()
            self.cut()
            self.write_journal()
        return self.rows

    def read_journal(self) -> None:
        """What is known to be whole, and that it is the same work."""
        try:
            told = json.loads(self.journal.read_text(encoding="utf-8"))
            rows, sizes, what = int(told["rows"]), [int(size) for size in told["bytes"]], dict(told["what"])
            self.width, self.finished, self.errors = int(told["width"]), bool(told["finished"]), int(told["errors"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.journal} is damaged: --force begins anew") from None
        if what != self.what:
            raise ValueError(
                f"{self.base} was begun {differs(what, self.what)}: give what it was begun with, or --force"
            )
        if len(sizes) != len(self.form.streams) or not 0 <= rows <= self.count:
            raise ValueError(f"{self.journal} is damaged: --force begins anew")
        self.rows, self.sizes = rows, sizes

    def check_sizes(self) -> None:
        """Refuses files that somebody made shorter."""
        for file, size in zip(self.files, self.sizes, strict=True):
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"{os.fspath(file.name)} is shorter than it was: rows are gone, --force begins anew")

    def cut(self) -> None:
        """Nothing stands behind what is known to be whole."""
        for file, size in zip(self.files, self.sizes, strict=True):
            file.truncate(size)

    def add(self, row: Row) -> None:
        """One more row. It is on the disk a second later, or when `save` is called."""
        self.waiting.append(row)
        if time.monotonic() - self.last > EVERY or len(self.waiting) >= MOST:
            self.save()

    def save(self) -> None:
        """Brings what waits to the disk, and then says so in the journal.

        Where that was interrupted nothing more is written: what the journal does not know is made again.
        """
        if not self.waiting or self.saving:
            return
        self.saving = True
        with self.told():
            for file, data in zip(self.files, self.written(), strict=True):
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            self.sizes = [os.fstat(file.fileno()).st_size for file in self.files]
            self.rows += len(self.waiting)
            self.errors += sum(row.error is not None for row in self.waiting)
            self.waiting = []
            self.write_journal()
        self.last, self.saving = time.monotonic(), False

    def written(self) -> list[bytes]:
        """What waits, as bytes; before the first row of all, what stands above it."""
        if not self.width:
            known = next((len(row.features) for row in self.waiting if row.features is not None), 0)
            self.width = known or (self.ask_width() if self.form.wide else 0)
        rows = self.form.rows(self.waiting, self.width)
        if self.rows or self.rank:
            return rows
        return [above + row for above, row in zip(self.form.begin(self.total, self.width), rows, strict=True)]

    def write_journal(self) -> None:
        told = {"rows": self.rows, "bytes": self.sizes, "width": self.width, "errors": self.errors}
        with atomic(self.journal) as file:
            file.write(json.dumps(told | {"finished": self.finished, "what": self.what}).encode())

    def finish(self) -> bool:
        """The file takes its name, if all processes have made their rows; whether it has."""
        assert self.rows + len(self.waiting) == self.count
        self.save()
        with self.told():
            self.finished = True
            self.write_journal()
            if self.world == 1:
                self.named([self.base])
                return True
            with alone(self.out.with_name(self.out.name + ".lock")) as lock:
                parts = [part_of(self.out, rank, self.world) for rank in range(self.world)]
                if not self.journal.is_file():  # another process came last and joined them
                    lock.unlink(missing_ok=True)
                    return True
                if not all(self.is_finished(part) for part in parts):
                    return False
                self.named(parts)
                lock.unlink(missing_ok=True)
            return True

    def is_finished(self, part: Path) -> bool:
        """Whether another process's part of the same work is whole."""
        try:
            told = json.loads(journal_of(part).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(told.get("finished")) and told.get("what") == self.what

    def named(self, parts: list[Path]) -> None:
        """The parts become the file; those that lie beside it first, so that it is never there without them."""
        for number, end in reversed(list(enumerate(self.form.streams))):
            streams = [part.with_name(part.name + end) for part in parts]
            place = self.out.with_name(self.out.name + end) if number else self.out
            if not all(stream.is_file() for stream in streams):
                continue  # it has its name already: what was killed was killed after that
            whole = streams[0]
            if len(streams) > 1:
                whole = part_of(self.out, 0, 1).with_name(part_of(self.out, 0, 1).name + end)
                joined(streams, whole)
            if number:
                whole.replace(place)
            else:
                self.form.finish(whole, place)
        self.close()
        for part in parts:
            for end in self.form.streams:
                part.with_name(part.name + end).unlink(missing_ok=True)
        for part in parts:
            journal_of(part).unlink(missing_ok=True)

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files = []

    @contextmanager
    def told(self) -> Iterator[None]:
        """What goes wrong with the disk, in one line that says what is kept."""
        try:
            yield
        except OSError as error:
            kept = f"; {self.rows:,} rows are kept: make room and go on with --resume" if self.rows else ""
            why = error.strerror or str(error).split(" was not written: ")[-1]
            raise OSError(f"{self.out} was not written: {why}{kept}") from error


def part_of(out: Path, rank: int, world: int) -> Path:
    """Where a process's rows are while they are being made."""
    return out.with_name(f"{out.name}.partial" if world == 1 else f"{out.name}.rank{rank}")


def journal_of(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def check_free(out: Path, rank: int, world: int, *, resume: bool, force: bool) -> bool:
    """Refuses to write over anything that nobody said may go; whether there is something to go on with."""
    if out.is_dir():
        raise ValueError(f"{out} is a directory: give the name of a file")
    if not out.parent.is_dir():
        raise ValueError(f"there is no directory {out.parent} to write {out.name} to")
    part = part_of(out, rank, world)
    there = journal_of(part).is_file()
    if there and not resume and not force:
        raise ValueError(f"{part} is there, of a run that was stopped: --resume goes on with it, --force begins anew")
    if not there and not force and (others := of_others(out, world)) is not None:
        lies, count = others
        how = f"torchrun --nproc-per-node {count}" if count > 1 else "no torchrun"
        raise ValueError(
            f"{lies} is there, of a run of {count} process{'es' if count > 1 else ''} that was stopped: "
            f"--resume with {how} goes on with it, --force begins anew"
        )
    if out.exists() and not force and not there:
        more = ", and nothing of it is left to do" if resume else ""
        raise ValueError(f"{out} is there{more}: give another name, or --force to replace it")
    return there


def of_others(out: Path, world: int) -> tuple[Path, int] | None:
    """A part that a run of another number of processes left there, and of how many."""
    for journal in sorted(out.parent.glob(f"{glob.escape(out.name)}.*.json")):
        part = journal.with_suffix("")
        if not re.fullmatch(r"partial|rank\d+", part.name.removeprefix(f"{out.name}.")):
            continue
        try:
            count = json.loads(journal.read_text(encoding="utf-8"))["what"]["processes"]
        except (OSError, ValueError, KeyError, TypeError):  # none of ours, or taken away in this moment
            continue
        if isinstance(count, int) and count != world:
            return part, count
    return None


def differs(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not as it was, in words."""
    name = next(name for name in {**was, **now} if was.get(name) != now.get(name))
    if name in WORDS:
        return f"with {WORDS[name]}"
    return f"with --{name} {was.get(name)}, which is {now.get(name)} now"


def hold(file: BinaryIO, out: Path) -> None:
    """Nobody else may write the same rows; the system lets go when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process is writing {out}: wait for it, or stop it first") from None


@contextmanager
def alone(path: Path) -> Iterator[Path]:
    """One process after another; the system lets go of the lock when a process ends."""
    with open(path, "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # not on Windows
            pass
        yield path

"""Write rows to a file so that an interrupted process loses at most a second of work and can resume.

Rows are appended to `OUT.partial` (`OUT.part-1-of-8`, … with several processes) and synced to disk about once a second; then a
journal beside the file records the number of complete rows and bytes. To resume, the file is truncated to the journal's length
and continued. It is renamed to `OUT` when it has all rows. Parts are joined by the process that finds all of them complete, or
by `vitrail join` (`join.py`) where hosts do not share a disk.
"""

import glob
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

from vitrail.deploy.predict.formats import PredictionRow, RowFormat, concatenate_files
from vitrail.utils.files import (
    DiskFullError,
    atomic_write,
    check_free_space,
    disk_full_error,
    is_disk_full,
    lock_file,
    remove_stale_partials,
    try_lock,
)
from vitrail.utils.json import read_json_file

COMMIT_INTERVAL_SECONDS = 1.0  # work that a killed process loses, at most
MAX_PENDING_ROWS = 4096  # rows in memory
PART = r"part-\d+-of-\d+"  # after the name of the output, of one of several processes
DIFFERENCES = {"model": "another model", "pictures": "other images", "processes": "another number of processes"}


class Journal(TypedDict):
    """The rows and bytes that are complete, and the run that they belong to."""

    rows: int
    bytes: list[int]
    width: int
    errors: int
    finished: bool
    what: dict[str, Any]
    precision: NotRequired[str | None]  # in which a resumed run computes; None while it is not decided
    joining: NotRequired[dict[str, Any]]  # what the format needs to join the parts


class RowOutput:
    """Rows of a format, encoded as they are computed."""

    def __init__(self, row_format: RowFormat, total: int, width: Callable[[], int]) -> None:
        self.row_format, self.total, self.ask_width = row_format, total, width
        self.rows = self.errors = self.width = 0  # written rows, those with an error, and the number of features
        self.pending: list[PredictionRow] = []

    def encode_pending(self, with_header: bool) -> list[bytes]:
        """Return the pending rows as bytes, after the header if they are the first."""
        if not self.width:
            width = next((len(row.features) for row in self.pending if row.features is not None), 0)
            self.width = width or (self.ask_width() if self.row_format.needs_width else 0)
        rows = self.row_format.encode_rows(self.pending, self.width)
        if not with_header:
            return rows
        headers = self.row_format.encode_header(self.total, self.width)
        return [header + row for header, row in zip(headers, rows, strict=True)]

    def count_pending(self) -> None:
        """Count the pending rows as written."""
        self.rows += len(self.pending)
        self.errors += sum(row.error is not None for row in self.pending)
        self.pending = []


class StreamOutput(RowOutput):
    """Rows written to standard output as they are computed."""

    def add(self, row: PredictionRow) -> None:
        self.pending = [row]
        sys.stdout.buffer.write(self.encode_pending(with_header=not self.rows)[0])
        sys.stdout.buffer.flush()
        self.count_pending()

    def save(self) -> None:
        sys.stdout.buffer.flush()

    def finish(self) -> bool:
        return True

    def close(self) -> None:
        """Leave standard output open: it is the process's."""


class PartialOutput(RowOutput):
    """The rows of one process, on disk and pending."""

    def __init__(
        self,
        out: Path,
        row_format: RowFormat,
        total: int,
        identity: Mapping[str, Any],  # must be equal to resume
        *,
        rank: int = 0,
        world: int = 1,
        width: Callable[[], int] = lambda: 0,  # number of features, if no image could be read so far
    ) -> None:
        super().__init__(row_format, total, width)
        self.out, self.rank, self.world = out, rank, world
        self.identity = json.loads(json.dumps(dict(identity)))
        self.base = partial_path(out, rank, world)
        self.journal = journal_path(self.base)
        self.count, self.finished, self.saving = 0, False, False  # rows of this process
        self.sizes = [0] * len(row_format.streams)
        self.files: list[BinaryIO] = []
        self.last = time.monotonic()
        self.read_precision: Callable[[], str | None] = lambda: None

    def start(self, count: int, *, resume: bool, force: bool) -> int:
        """Create or resume the files; return how many of the `count` rows exist already."""
        self.count = count
        exists = check_resumable(self.out, self.rank, self.world, resume=resume, force=force)
        resuming = exists and not force
        if resuming:
            self.read_journal()
        if self.finished:  # only the renaming is missing
            return self.rows
        with self.explain_disk_errors():
            self.files = [open(file, "ab", buffering=0) for file in self.row_format.stream_paths(self.base)]  # noqa: SIM115
            claim_file(self.files[0], self.out)
            remove_stale_partials(self.base.parent, self.journal.name)
            if resuming:
                self.read_journal()  # again, now that the file is locked
            for file, size in zip(self.files, self.sizes, strict=True):
                if os.fstat(file.fileno()).st_size < size:
                    raise ValueError(f"{os.fspath(file.name)} has lost rows: use --force to start again")
            for file, size in zip(self.files, self.sizes, strict=True):
                file.truncate(size)  # removes what follows the complete rows
            self.write_journal()
        return self.rows

    def read_journal(self) -> None:
        """Read the journal; raise ValueError if it is damaged or of another run."""
        try:
            journal: Journal = read_json_file(self.journal, Journal)
        except ValueError as error:
            raise ValueError(f"{error}; the journal is damaged: use --force to start again") from None
        rows, sizes, self.errors, self.width = journal["rows"], journal["bytes"], journal["errors"], journal["width"]
        self.finished = journal["finished"]
        if difference := describe_difference(journal["what"], self.identity):
            raise ValueError(f"{self.base} was started {difference}: use the same options, or --force")
        if len(sizes) != len(self.row_format.streams) or not 0 <= rows <= self.count or min(sizes) < 0:
            raise ValueError(f"{self.journal} is damaged: use --force to start again")
        self.rows, self.sizes = rows, sizes

    def add(self, row: PredictionRow) -> None:
        """Add a row; it is on disk a second later, or when `save` is called."""
        self.pending.append(row)
        if time.monotonic() - self.last > COMMIT_INTERVAL_SECONDS or len(self.pending) >= MAX_PENDING_ROWS:
            self.save()

    def save(self) -> None:
        """Sync pending rows to disk, then update the journal.

        After an interrupted save nothing more is written: rows not in the journal are computed again.
        """
        if not self.pending or self.saving:
            return
        self.saving = True
        with self.explain_disk_errors():
            encoded = self.encode_pending(with_header=not self.rows and not self.rank)
            if not self.rows:
                check_free_space(self.base, self.count * self.width * self.row_format.feature_bytes)
            for file, data in zip(self.files, encoded, strict=True):
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            self.sizes = [os.fstat(file.fileno()).st_size for file in self.files]
            self.count_pending()
            self.write_journal()
        self.last, self.saving = time.monotonic(), False

    def write_journal(self) -> None:
        journal = {"rows": self.rows, "bytes": self.sizes, "width": self.width, "errors": self.errors}
        with atomic_write(self.journal) as file:
            journal |= {"finished": self.finished, "what": self.identity, "precision": self.read_precision()}
            journal |= {"joining": self.row_format.describe_joining()}
            file.write(json.dumps(journal).encode())

    def finish(self) -> bool:
        """Rename the file if all processes have written their rows; return True if they have."""
        assert self.rows + len(self.pending) == self.count
        self.save()
        with self.explain_disk_errors():
            self.finished = True
            self.write_journal()
            if self.world == 1:
                self.join([self.base])
                return True
            lock = self.out.with_name(self.out.name + ".lock")
            with lock.open("wb") as file, lock_file(file):
                parts = [partial_path(self.out, rank, self.world) for rank in range(self.world)]
                if not self.journal.is_file():  # another process finished last and joined the parts
                    lock.unlink(missing_ok=True)
                    return True
                if not all(self.is_finished(part) for part in parts):
                    return False
                self.join(parts)
                lock.unlink(missing_ok=True)
            return True

    def is_finished(self, part: Path) -> bool:
        """Return True if another process's part of the same run is complete."""
        try:
            journal: Journal = read_json_file(journal_path(part), Journal)
        except (OSError, ValueError):
            return False
        return journal["finished"] and journal["what"] == self.identity

    def join(self, parts: list[Path]) -> None:
        """Join the parts to the output files and remove them."""
        join_streams(self.row_format, self.out, parts)
        self.close()
        remove_parts(self.row_format, parts)

    def close(self) -> None:
        """Close the files, which releases their locks; closing twice is fine."""
        for file in self.files:
            file.close()
        self.files = []

    @contextmanager
    def explain_disk_errors(self) -> Iterator[None]:
        """Raise OSError with the file name and the number of saved rows if writing fails."""
        try:
            yield
        except OSError as error:
            saved = f"; {self.rows:,} rows are saved: free disk space and use --resume" if self.rows else ""
            if isinstance(error, DiskFullError) or is_disk_full(error):
                full = error if isinstance(error, DiskFullError) else disk_full_error(self.out)
                raise DiskFullError(f"{full}{saved}") from error
            reason = error.strerror or str(error).split(" was not written: ")[-1]
            raise OSError(f"{self.out} was not written: {reason}{saved}") from error


def join_streams(row_format: RowFormat, out: Path, parts: list[Path]) -> None:
    """Join the parts to the output files, the main file last, so that it never exists without the others."""
    targets, whole = row_format.stream_paths(out), row_format.stream_paths(partial_path(out, 0, 1))
    streams = [row_format.stream_paths(part) for part in parts]
    for number, target in reversed(list(enumerate(targets))):
        pieces = [paths[number] for paths in streams]
        if not all(piece.is_file() for piece in pieces):
            continue  # renamed before an interruption
        if len(pieces) > 1:
            concatenate_files(pieces, whole[number])
        if number:
            whole[number].replace(target)
        else:
            row_format.finish_file(whole[number], target)


def remove_parts(row_format: RowFormat, parts: list[Path]) -> None:
    """Remove parts that were joined, with their journals."""
    for part in parts:
        for path in (*row_format.stream_paths(part), journal_path(part)):
            path.unlink(missing_ok=True)


def partial_path(out: Path, rank: int, world: int) -> Path:
    """Return the path of a process's rows until the file is complete."""
    return out.with_name(f"{out.name}.partial" if world == 1 else f"{out.name}.part-{rank + 1}-of-{world}")


def journal_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def read_recorded_precision(out: Path, rank: int, world: int) -> tuple[str, str]:
    """Return the precision that an interrupted run was given, and the one that it used: auto if none is recorded."""
    try:
        journal: Journal = read_json_file(journal_path(partial_path(out, rank, world)), Journal)
    except (OSError, ValueError):  # `PartialOutput.start` explains it
        return "auto", "auto"
    given = journal["what"].get("precision", "auto")
    chosen = journal.get("precision") if journal["rows"] else None
    return given, chosen or given


def check_resumable(out: Path, rank: int, world: int, *, resume: bool, force: bool) -> bool:
    """Return True if there is a run to resume; raise ValueError before overwriting anything without `force`."""
    if out.is_dir():
        raise ValueError(f"{out} is a directory: give a file name")
    if not out.parent.is_dir():
        raise ValueError(f"no such directory: {out.parent}")
    part = partial_path(out, rank, world)
    exists = journal_path(part).is_file()
    if exists and not resume and not force:
        raise ValueError(
            f"{part} exists, of an interrupted run: use --resume to continue it, or --force to start again"
        )
    if not exists and not force and (others := find_other_parts(out, world)) is not None:
        other, count = others
        how = f"with {count} processes" if count > 1 else "without torchrun"
        run = f"an interrupted run with {count} process{'es' if count > 1 else ''}"
        raise ValueError(f"{other} exists, of {run}: use --resume {how}, or --force to start again")
    if out.exists() and not force and not exists:
        state = "is complete" if resume else "exists"
        raise ValueError(f"{out} {state}: give another name, or --force to replace it")
    return exists


def find_streams(out: Path) -> list[Path]:
    """Return the files of interrupted runs beside `out`."""
    pattern = re.compile(rf"{re.escape(out.name)}\.(partial|{PART})")
    return sorted(path for path in out.parent.iterdir() if pattern.fullmatch(path.name))


def find_other_parts(out: Path, world: int) -> tuple[Path, int] | None:
    """Return a part of an interrupted run with another number of processes, and that number."""
    for journal in sorted(out.parent.glob(f"{glob.escape(out.name)}.*.json")):
        part = journal.with_suffix("")
        if not re.fullmatch(f"partial|{PART}", part.name.removeprefix(f"{out.name}.")):
            continue
        try:
            count = json.loads(journal.read_text(encoding="utf-8"))["what"]["processes"]
        except (OSError, ValueError, KeyError, TypeError):  # not a journal, or just removed
            continue
        if isinstance(count, int) and count != world:
            return part, count
    return None


def describe_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first difference between two runs; "" if there is none."""
    name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    if name is None:
        return ""
    if name in DIFFERENCES:
        return f"with {DIFFERENCES[name]}"
    flag = f"--{name.replace('_', '-')}"
    if before.get(name) is None and now.get(name) is True:
        return f"without {flag}"
    if before.get(name) is True and now.get(name) is None:
        return f"with {flag}"
    return f"with {flag} {before.get(name)}, which is {now.get(name)} now"


def claim_file(file: BinaryIO, out: Path) -> None:
    """Lock the file against other processes; the system releases the lock when the process ends."""
    try:
        try_lock(file)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another process is writing {out}: wait for it, or stop it") from None
    except OSError:  # no locks here
        return

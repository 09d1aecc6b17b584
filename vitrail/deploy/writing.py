"""Answers for many pictures into a file: each process its share, gone on with after whatever stopped it."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitrail.data.sources.parts import Progress
from vitrail.deploy.feeding import width_of
from vitrail.deploy.inputs import Inputs
from vitrail.deploy.predicting import Answering, How, Ready
from vitrail.deploy.resuming import Part
from vitrail.deploy.rows import Form, Row
from vitrail.deploy.runtime import Deployed


@dataclass(frozen=True)
class Share:
    """Which process this is, of how many: as torchrun tells."""

    rank: int = 0
    world: int = 1

    def span(self, count: int) -> tuple[int, int]:
        """Its pictures, one after another: parts in the order of the processes are in the order of the pictures."""
        return count * self.rank // self.world, count * (self.rank + 1) // self.world


def share(environment: Mapping[str, str] = os.environ) -> Share:
    """This process's share."""
    try:
        found = Share(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    except ValueError:
        found = Share(0, 0)
    if not 0 <= found.rank < found.world:
        told = " and ".join(f"{name}={environment.get(name)}" for name in ("RANK", "WORLD_SIZE"))
        raise ValueError(f"{told}: torchrun sets them to a process's number and how many there are")
    return found


@dataclass(frozen=True)
class Summary:
    """What was done, for machines."""

    out: str
    pictures: int  # of this process
    errors: int  # of them, rows that say why there is no answer
    resumed: int  # rows that were there before
    seconds: float  # from the first picture to the last
    pictures_per_second: float
    runtime: str
    batch: int  # pictures at once, in the end
    workers: int
    rank: int = 0
    processes: int = 1
    whole: bool = True  # whether the file has all rows; not, while other processes are at work
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"notes": list(self.notes)}


class Interrupted(Exception):
    """Ctrl-C, after what was made is on the disk."""

    def __init__(self, rows: int, count: int) -> None:
        super().__init__(f"{rows:,} of {count:,}")
        self.rows, self.count = rows, count


def write(
    ready: Ready,
    inputs: Inputs,
    out: str,
    form: Form,
    how: How,
    *,
    top: int = 1,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,  # what else makes the rows what they are
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Makes a row for each picture and writes it to a file, or to standard output where `out` is a dash."""
    total = len(inputs) if limit is None else min(limit, len(inputs))
    place = share()
    start, stop = place.span(total)
    deployed, answering = ready.deployed, Answering(ready, inputs, how, top)
    width = width_of(deployed.runtime, deployed.contract.preprocessing)
    if out == "-":
        if place.world > 1:
            raise ValueError("several processes have one standard output: give --out FILE")
        sink: Part | Stream = Stream(form, total, width)
        before = 0
    else:
        what = {"model": identity(deployed), "pictures": inputs.fingerprint(total), "processes": place.world}
        sink = Part(Path(out), form, total, what | dict(options or {}), rank=place.rank, world=place.world, width=width)
        before = sink.begin(stop - start, resume=resume, force=force)
    began = time.perf_counter()
    try:
        for row in answering.rows(start + before, stop, progress):
            sink.add(row)
    except KeyboardInterrupt:
        sink.save()
        raise Interrupted(sink.rows, stop - start) from None
    whole = sink.finish()
    seconds, count = time.perf_counter() - began, stop - start
    return Summary(
        out,
        count,
        sink.errors,
        before,
        round(seconds, 3),
        round((count - before) / max(1e-9, seconds), 3),
        deployed.runtime.name,
        answering.pace.size,
        len(ready.lanes),
        place.rank,
        place.world,
        whole,
        (*inputs.notes, *deployed.notes),
    )


def identity(deployed: Deployed) -> str:
    """What the rows were made by: the weights, or the exported file as it is."""
    if deployed.model is not None or deployed.file is None:
        return deployed.contract.checksum
    found = hashlib.sha256()
    for path in (Path(deployed.file), Path(deployed.file).with_suffix(".bin")):
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


class Stream:
    """Rows to standard output, as they come."""

    def __init__(self, form: Form, total: int, width: Callable[[], int]) -> None:
        self.form, self.total, self.ask_width = form, total, width
        self.rows = self.errors = self.width = 0

    def add(self, row: Row) -> None:
        if not self.width and self.form.wide:
            self.width = self.ask_width() if row.features is None else len(row.features)
        if not self.rows:
            sys.stdout.buffer.write(self.form.begin(self.total, self.width)[0])
        sys.stdout.buffer.write(self.form.rows([row], self.width)[0])
        sys.stdout.buffer.flush()
        self.rows += 1
        self.errors += row.error is not None

    def save(self) -> None:
        sys.stdout.buffer.flush()

    def finish(self) -> bool:
        sys.stdout.buffer.flush()
        return True

"""Scan of a dataset: every image is read once, by all cores, and summarised in arrays of about 100 bytes per image.

Worker processes inspect the images, so that a crashing decoder costs one image and not the run.
"""

import hashlib
import multiprocessing
import os
import signal
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.audit.image import THUMB_SIDE, ImageInspection, inspect_image
from vitrail.data.dataset import Dataset, Images, MaskStore, Store
from vitrail.data.remote.urls import RemoteError
from vitrail.utils.devices import count_cores
from vitrail.utils.files import cache_directory
from vitrail.utils.progress import ProgressCallback

Inspector = Callable[[Images, int], Any]  # images and an index to the record of an inspection
InspectionTask = tuple[int, list[int]]  # index of a split, and indices of its images
IMAGES_PER_TASK = 32
TASKS_PER_WORKER = 2  # one in progress, one waiting
CACHE_QUERY_SIZE = 2048  # images per cache lookup
# A forked process shares the listing of a million files without a copy. Forking is safe on Linux only.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


FileStamp = tuple[int, int]  # size and time
COMMIT_INTERVAL_SECONDS = 2.0  # at most this much work is lost when the process is killed
MAX_NAMES_PER_QUERY = 500
CACHE_FILE = "check.sqlite"
LOCK_SECONDS = 5.0  # for another process that writes


class InspectionCache:
    """Cache of inspections by absolute path without links, size and modification time. Closing saves them.

    `record` is the dataclass of an inspection, with plain fields, `is_valid()` and `passing`.
    It is one SQLite file for all datasets, in the user's cache directory: an image is found by whatever route it is reached. A
    damaged file is replaced. If it cannot be written, or `enabled` is False, nothing is cached.
    """

    def __init__(self, enabled: bool = True, record: type[Any] = ImageInspection, prefix: str = "looks_1_") -> None:
        self.record = record
        self.columns = [field.name for field in fields(record)]
        # The name has a hash of the fields: a changed record uses a new table.
        self.table = prefix + hashlib.blake2b(" ".join(self.columns).encode(), digest_size=4).hexdigest()
        self.types = [int if field.type is bool else field.type for field in fields(record)]  # of an SQLite row
        self.connection: sqlite3.Connection | None = None
        self.last_commit = time.monotonic()
        self.waiting: list[tuple] = []  # rows that are not written yet, so that other processes are not locked out
        if enabled:
            with suppress(OSError, RuntimeError):  # no home directory or no permission: no cache
                path = cache_directory() / CACHE_FILE
                path.parent.mkdir(parents=True, exist_ok=True)
                self.connection = _open_database(path, self.table, self.columns)

    def get(self, names: Sequence[str], stamps: Sequence[FileStamp | None]) -> list[Any | None]:
        """Return the inspection of each image, or None."""
        rows: dict[tuple, tuple] = {}  # by name, size and time
        keys = [os.fsencode(name) for name in names]
        with self._disable_on_error() as connection:
            for start in range(0, len(keys) if connection else 0, MAX_NAMES_PER_QUERY):
                part = keys[start : start + MAX_NAMES_PER_QUERY]
                query = f"SELECT * FROM {self.table} WHERE path IN ({','.join('?' * len(part))})"
                rows |= {row[:3]: row[3:] for row in connection.execute(query, part)}
        found = [rows.get((key, *stamp)) if stamp else None for key, stamp in zip(keys, stamps, strict=True)]
        return [self.parse_row(row) if row else None for row in found]

    def parse_row(self, row: tuple) -> Any | None:
        """Return the inspection of a row, or None if its types or sizes do not fit."""
        if len(row) != len(self.columns) or any(type(v) is not kind for v, kind in zip(row, self.types, strict=True)):
            return None
        inspection = self.record(*row)
        return inspection if inspection.is_valid() else None

    def put(self, rows: Iterable[tuple[str, FileStamp | None, Any]]) -> None:
        """Store the inspections of images that have a stamp."""
        if self.connection is not None:
            self.waiting += [(os.fsencode(name), *stamp, *astuple(found)) for name, stamp, found in rows if stamp]
            if time.monotonic() - self.last_commit > COMMIT_INTERVAL_SECONDS:
                self.commit()

    def commit(self) -> None:
        """Write the waiting rows in one transaction."""
        with self._disable_on_error() as connection:
            if connection:
                marks = ",".join("?" * (3 + len(self.columns)))
                connection.executemany(f"INSERT OR REPLACE INTO {self.table} VALUES ({marks})", self.waiting)
                connection.commit()
        self.waiting, self.last_commit = [], time.monotonic()

    def close(self) -> None:
        self.commit()
        with self._disable_on_error() as connection:
            if connection:
                connection.close()
        self.connection = None

    @contextmanager
    def _disable_on_error(self) -> Iterator[Any]:
        """Yield the connection; after an error, such as a full disk or a lock held too long, go on without a cache."""
        try:
            yield self.connection
        except sqlite3.Error:
            connection, self.connection = self.connection, None
            if connection:
                with suppress(sqlite3.Error):
                    connection.close()


def _open_database(path: Path, table: str, names: Sequence[str]) -> sqlite3.Connection | None:
    """Open the database and create the table; replace a damaged file."""
    for attempt in range(2):
        connection = None
        try:
            connection = sqlite3.connect(path, timeout=LOCK_SECONDS)
            connection.execute("PRAGMA synchronous = OFF")  # a corrupt file is replaced
            if path.stat().st_size < 2**24:
                connection.execute("PRAGMA quick_check(1)")
            columns = f"path BLOB PRIMARY KEY, size, time, {', '.join(names)}"
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns}) WITHOUT ROWID")
            return connection
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.OperationalError) or attempt:  # locked or no permission: not damaged
                return None
            with suppress(OSError):
                path.unlink()
    return None


class FileScan:
    """Base of the inspection results of one split: the key of an image in the cache, and what is done with its result."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def cache_key(self, index: int) -> tuple[str, FileStamp | None]:
        """Return the name and the stamp by which an image's result is cached."""
        raise NotImplementedError

    def add(self, index: int, inspection: Any) -> None:
        """Add the result of one image."""
        raise NotImplementedError


class SplitScan(FileScan):
    """The inspection results of one split."""

    def __init__(self, images: Images) -> None:
        super().__init__(images)
        count = len(images)
        self.bad_masks: frozenset[int] = frozenset()  # images with an unusable mask
        self.mask_digests: np.ndarray | None = None  # [n, 2] uint64, of the decoded masks
        self.digests = np.zeros((count, 2), dtype=np.uint64)
        self.has_digest = np.zeros(count, dtype=bool)
        self.thumbs = np.zeros((count, THUMB_SIDE * THUMB_SIDE), dtype=np.uint8)
        self.has_thumb = np.zeros(count, dtype=bool)
        self.sizes = np.zeros((count, 2), dtype=np.int32)  # width, height
        self.unusable: set[int] = set()
        self.notable: dict[int, ImageInspection] = {}  # images that may give a finding
        self.wrong_suffix: dict[int, str] = {}  # actual format of images with another format's suffix

    def cache_key(self, index: int) -> tuple[str, FileStamp | None]:
        return self.images.real_name(index), read_stamp(self.images.store, int(self.images.items[index]))

    def add_content(self, index: int, digest: bytes, thumb: bytes, size: tuple[int, int]) -> None:
        """Add what images are compared by, and the width and height."""
        if digest:
            self.digests[index] = np.frombuffer(digest, dtype=np.uint64)
            self.has_digest[index] = True
        if thumb:
            self.thumbs[index] = np.frombuffer(thumb, dtype=np.uint8)
            self.has_thumb[index] = True
        self.sizes[index] = size

    def add(self, index: int, inspection: ImageInspection) -> None:
        self.add_content(index, inspection.digest, inspection.thumb, (inspection.width, inspection.height))
        if inspection.problem:
            self.unusable.add(index)
        if inspection.problem or inspection.turned or inspection.animated or inspection.mode not in ("RGB", "L"):
            self.notable[index] = inspection
        if inspection.has_wrong_suffix(self.images.name(index)):
            self.wrong_suffix[index] = inspection.format

    def find_usable(self) -> np.ndarray:
        """Return a mask of the images without a problem, [n]."""
        usable = np.ones(len(self.images), dtype=bool)
        usable[list(self.unusable)] = False
        usable[list(self.bad_masks)] = False
        return usable


Scans = dict[str, SplitScan]  # by split


def is_in_memory(store: Store) -> bool:
    """Return True if the store is an array of decoded pixels, which cannot be corrupt."""
    return isinstance(getattr(store, "pixels", None), np.ndarray)


def is_made(store: Store) -> bool:
    """Return True if the items are in memory, or made when they are read: neither can be corrupt."""
    return is_in_memory(store) or getattr(store, "is_generated", False)


def scan_dataset(dataset: Dataset, cache: bool, workers: int | None, progress: ProgressCallback | None) -> Scans:
    """Inspect every image, video or sound, or take its result from the cache."""
    from vitrail.data.audit.sound import SoundInspection, SoundScan, inspect_sound
    from vitrail.data.audit.video import VideoInspection, VideoScan, inspect_video

    media = next((images.media for images in dataset.splits.values()), "image")
    make_scan = {"image": SplitScan, "video": VideoScan, "sound": SoundScan}[media]
    scans: Scans = {split: make_scan(images) for split, images in dataset.splits.items()}
    total, done = sum(map(len, dataset.splits.values())), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress("checking", done, total)

    for scan in scans.values():
        if is_in_memory(scan.images.store):
            _hash_arrays(scan)
            report(len(scan.images))
    file_scans = [scan for scan in scans.values() if not is_made(scan.images.store) and len(scan.images)]
    if file_scans:
        record, prefix, inspect = {
            "image": (ImageInspection, "looks_1_", inspect_image),
            "video": (VideoInspection, "videos_1_", inspect_video),
            "sound": (SoundInspection, "sounds_1_", inspect_sound),
        }[media]
        with closing(InspectionCache(cache, record, prefix)) as inspections:
            scan_files(file_scans, inspections, workers, report, inspect)
    return scans


def _hash_arrays(scan: SplitScan) -> None:
    """Compute the digests and sizes of an array's images."""
    pixels: np.ndarray = getattr(scan.images.store, "pixels")  # noqa: B009
    digests = b"".join(hashlib.blake2b(pixels[item].tobytes(), digest_size=16).digest() for item in scan.images.items)
    scan.digests[:] = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
    scan.has_digest[:] = True
    scan.sizes[:] = pixels.shape[2], pixels.shape[1]


def scan_files(
    scans: Sequence[FileScan],
    cache: InspectionCache,
    workers: int | None,
    report: Callable[[int], None],
    inspect: Inspector,
) -> None:
    """Inspect files and archive members that are not in the cache."""
    pending: dict[tuple[int, int], tuple[str, FileStamp | None]] = {}  # (split, index): name and stamp

    def tasks() -> Iterator[InspectionTask]:
        for split, scan in enumerate(scans):
            unknown: list[int] = []
            for start in range(0, len(scan.images), CACHE_QUERY_SIZE):
                indices = range(start, min(start + CACHE_QUERY_SIZE, len(scan.images)))
                names, stamps = zip(*map(scan.cache_key, indices), strict=True)
                cached = cache.get(names, stamps)
                for index, name, stamp, inspection in zip(indices, names, stamps, cached, strict=True):
                    if inspection is not None:
                        scan.add(index, inspection)
                    else:
                        unknown.append(index)
                        pending[split, index] = name, stamp
                report(sum(inspection is not None for inspection in cached))
                while len(unknown) >= IMAGES_PER_TASK:
                    yield split, unknown[:IMAGES_PER_TASK]
                    unknown = unknown[IMAGES_PER_TASK:]
            if unknown:
                yield split, unknown

    if workers is None:
        workers = min(count_cores(), -(-sum(len(scan.images) for scan in scans) // IMAGES_PER_TASK))
    images = [scan.images for scan in scans]
    for (split, indices), results in inspect_in_parallel(images, tasks(), workers, inspect, cache.record):
        names, stamps = zip(*(pending.pop((split, index)) for index in indices), strict=True)
        for index, inspection in zip(indices, results, strict=True):
            scans[split].add(index, inspection)
        rows = zip(names, stamps, results, strict=True)
        cache.put(row for row in rows if not row[2].passing)  # transient problems are not cached
        report(len(indices))


def read_stamp(store: Store | MaskStore, item: int) -> FileStamp | None:
    """Return the stamp of a file, or None if it is missing."""
    try:
        return store.stamp(item)
    except OSError:  # a broken link: the inspection reports it
        return None


def inspect_in_parallel(
    splits: list[Images],
    tasks: Iterable[InspectionTask],
    workers: int,
    inspect: Inspector = inspect_image,
    record: type[Any] = ImageInspection,
) -> Iterator[tuple[InspectionTask, list[Any]]]:
    """Yield every task with its results, in order of completion; with 0 workers, inspect in this process.

    `record` is the dataclass of a result; for an image at which a worker crashed, it is made here.
    """
    if not workers:
        for task in tasks:
            yield task, _inspect_task(splits, task, inspect)
        return
    waiting = iter(tasks)
    if (first := next(waiting, None)) is None:
        return
    retries = deque([first])
    pool = [_Worker(splits, inspect) for _ in range(workers)]
    try:
        while True:
            for worker in pool:
                while len(worker.tasks) < TASKS_PER_WORKER:
                    if (task := retries.popleft() if retries else next(waiting, None)) is None:
                        break
                    worker.send_task(task)
            busy = [worker for worker in pool if worker.tasks]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy])
            for worker in (worker for worker in busy if worker.pipe in ready):
                try:
                    results = worker.pipe.recv()
                except (EOFError, OSError):
                    pool[pool.index(worker)] = _Worker(splits, inspect)
                    crashed, *rest = worker.tasks
                    cause = worker.stop()
                    retries.extend(rest)
                    if len(crashed[1]) == 1:
                        yield crashed, [record(record.UNREADABLE, f"the decoder crashed ({cause})", passing=True)]
                    else:
                        retries.extend((crashed[0], [index]) for index in crashed[1])
                else:
                    if isinstance(results, RemoteError):
                        raise results
                    yield worker.tasks.popleft(), results
    finally:
        for worker in pool:
            worker.pipe.close()  # the worker exits when its pipe closes
        for worker in pool:
            worker.stop()


class _Worker:
    """A worker process and its unfinished tasks, in order."""

    def __init__(self, splits: list[Images], inspect: Inspector) -> None:
        context = multiprocessing.get_context(START_METHOD)
        self.tasks = deque[InspectionTask]()
        self.pipe, worker_pipe = context.Pipe()
        arguments = (worker_pipe, self.pipe, splits, inspect)
        self.process = context.Process(target=_run_worker, args=arguments, daemon=True)
        self.process.start()
        worker_pipe.close()

    def send_task(self, task: InspectionTask) -> None:
        self.tasks.append(task)
        with suppress(OSError):  # a dead worker is noticed when its pipe is read
            self.pipe.send(task)

    def stop(self) -> str:
        """Wait for the process to exit, and return its signal or exit code."""
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        self.process.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _run_worker(pipe: Connection, parent_pipe: Connection, splits: list[Images], inspect: Inspector) -> None:
    """Inspect tasks until the pipe closes."""
    parent_pipe.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)  # silences C libraries; their errors are in the inspections
    try:
        while True:
            task = pipe.recv()
            try:
                results: Any = _inspect_task(splits, task, inspect)
            except RemoteError as error:  # no defect of an image
                results = error
            pipe.send(results)
    except (EOFError, OSError):
        return


def _inspect_task(splits: list[Images], task: InspectionTask, inspect: Inspector) -> list[Any]:
    split, indices = task
    return [inspect(splits[split], index) for index in indices]

"""Worker processes that prepare batches, and their replacement when the system kills one."""

import atexit
import logging
import os
import signal
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from multiprocessing.connection import wait
from typing import Any

from vitrail.data.workers import BatchPreparer, BatchRequest, PreparedBatch

GRACE_SECONDS = 30  # time for the parent process to save before a terminated worker exits
MAX_DEATHS = 1  # of worker processes, after which a pool is not replaced again
WORKER = "a data loading worker"
SIGKILL, SIGBUS = getattr(signal, "SIGKILL", 9), getattr(signal, "SIGBUS", None)  # Windows has neither
REMEDY = "use fewer workers or a smaller image size"
log = logging.getLogger("vitrail.data")


class WorkersLost(OSError):
    """Worker processes died repeatedly. Nothing is wrong with the batches so far."""

    exit_code = 1


class WorkerPool:
    """Worker processes that prepare batches ahead of time, in the order of the requests.

    A batch is a function of its request, so processes that die are replaced without a trace in the batches. That is done
    once. After a second death, batches are prepared in this process, or with `fallback=False` WorkersLost is raised.
    """

    def __init__(
        self,
        preparer: BatchPreparer,
        workers: int,
        start_method: str | None = None,
        fallback: bool = True,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        self._preparer, self._fallback, self._report = preparer, fallback, report
        self._deaths, self._requests = 0, _RequestSource()
        self._options: dict[str, Any] = {
            "num_workers": workers,
            "multiprocessing_context": start_method or ("fork" if sys.platform == "linux" else "spawn"),
        }
        self._running: list[Any] = []  # the iterator of the DataLoader
        # Runs at exit too, before multiprocessing terminates the workers, which would take GRACE_SECONDS.
        self._finalizer = weakref.finalize(self, _shut_down, self._running)

    @property
    def processes(self) -> list[Any]:
        """Return the worker processes."""
        return list(self._running[0]._workers) if self._running else []

    def close(self) -> None:
        """Stop the worker processes; the next run starts new ones."""
        _shut_down(self._running)

    def run(self, requests: Iterable[BatchRequest]) -> Iterator[PreparedBatch]:
        """Yield the batches of these requests; unfinished batches of an earlier run are dropped."""
        waiting: deque[BatchRequest] = deque()  # requested batches that have not arrived
        remaining = iter(requests)
        while self._deaths <= MAX_DEATHS:
            self._requests.current = _remember(chain(tuple(waiting), remaining), waiting)
            waiting.clear()
            try:
                iterator = self._start()
                while (batch := next(iterator, None)) is not None:
                    waiting.popleft()
                    yield batch
                    if any(process.exitcode is not None for process in self.processes):  # else found after 5 seconds
                        raise ConnectionError("a process has ended")
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not is_death(error):
                    raise
                code = self._kill()
                self._deaths += 1
                cause = describe_death(code)
                if self._deaths <= MAX_DEATHS:
                    self._report(f"{cause}: started new workers; fewer need less memory")
                elif self._fallback and -code in (SIGKILL, SIGBUS):  # a crash could end this process too
                    self._report(f"{cause}, again: this process prepares the images from now on")
                else:
                    raise WorkersLost(f"{cause}: {REMEDY}") from error
        yield from map(self._preparer.make_batch_single_threaded, chain(tuple(waiting), remaining))

    def _start(self) -> Any:
        """Return an iterator over the batches of the current requests, from new processes where there are none."""
        from torch.utils.data import DataLoader
        from torch.utils.data._utils import signal_handling

        if self._running:
            self._running[0]._reset(self._loader)
            return self._running[0]
        self._loader: Any = DataLoader(
            self._preparer,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=self._requests,
            persistent_workers=True,
            prefetch_factor=2,
            worker_init_fn=_init_worker,
            **self._options,
        )
        iterator = self._loader._get_iterator()
        # PyTorch's handler of SIGCHLD would raise an exception anywhere in this process, in the middle of an optimiser step
        # too. Without it a death is found by the wait for its batch.
        signal_handling._remove_worker_pids(id(iterator))  # pyright: ignore[reportPrivateImportUsage]
        iterator._worker_pids_set = False
        self._running.append(iterator)
        return iterator

    def _kill(self) -> int:
        """End all worker processes after the death of one; return its exit code, or 0 where it is unknown."""
        iterator = self._running.pop()
        wait([process.sentinel for process in iterator._workers], timeout=2)  # a lost connection is seen first
        code = next((process.exitcode for process in iterator._workers if process.exitcode), 0)
        # Not PyTorch's way: a killed process may hold a lock that it waits for.
        iterator._shutdown = True
        for process in iterator._workers:
            process.kill()
            process.join()
        for queue in (*iterator._index_queues, iterator._worker_result_queue):
            queue.cancel_join_thread()
            queue.close()
        return code


def is_death(error: Exception) -> bool:
    """Return True if an error of a DataLoader is the death of a process, not an exception that was raised in it."""
    text = str(error)
    lost = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    return not text.startswith("Caught ") and (lost or "DataLoader worker" in text)


def describe_death(code: int) -> str:
    """Return the likely cause of a death by its exit code, which is negative for a signal."""
    if SIGBUS is not None and -code == SIGBUS:
        return f"{WORKER} was killed, probably for lack of shared memory (/dev/shm)"
    if code in (0, -SIGKILL):
        return f"{WORKER} was killed, probably out of memory"
    try:
        how = signal.Signals(-code).name
    except ValueError:
        how = f"exit code {code}"
    return f"{WORKER} crashed ({how})"


def _shut_down(running: list[Any]) -> None:
    while running:
        running.pop()._shutdown_workers()


def _remember(requests: Iterable[BatchRequest], waiting: deque[BatchRequest]) -> Iterator[BatchRequest]:
    """Yield requests and note each of them as waiting."""
    for request in requests:
        waiting.append(request)
        yield request


class _RequestSource:
    """The sampler of the DataLoader: iterates over the current requests."""

    def __init__(self) -> None:
        self.current: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.current)


def _init_worker(_worker: int) -> None:
    """Ignore signals sent to the process group: the main process saves first, then stops its workers."""
    atexit.register(_exit_worker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM sends it to all processes of a task
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, _schedule_exit)


def _exit_worker() -> None:
    """Exit a spawned worker without PyTorch's destructors, which abort while threads are waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _schedule_exit(_signal: int, _frame: object) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(GRACE_SECONDS)

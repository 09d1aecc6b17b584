"""One set of worker processes for a whole run, and what to do when one of them dies."""

import atexit
import os
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from vitrail.data.work import Prepared, Request, Work

GRACE = 30  # seconds that a worker works on after it was asked to end, while its parent saves


class Crew:
    """Worker processes that make batches ahead of time, in the order of the requests."""

    def __init__(self, work: Work, workers: int, method: str | None = None) -> None:
        from torch.utils.data import DataLoader

        self._requests = _Requests()
        self._loader: Any = DataLoader(
            work,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=self._requests,
            num_workers=workers,
            collate_fn=_as_it_is,
            persistent_workers=True,
            prefetch_factor=2,
            worker_init_fn=_begin,
            multiprocessing_context=method or ("fork" if sys.platform == "linux" else "spawn"),
        )

        # Also when the program ends: before multiprocessing asks the workers to, which they would take their time for.
        self.close = weakref.finalize(self, _end, self._loader)

    def run(self, requests: Iterable[Request]) -> Iterator[Prepared]:
        """The batches for these requests. What an earlier run had under way is dropped."""
        self._requests.now = requests
        try:
            yield from self._loader
        except (RuntimeError, OSError, EOFError) as error:
            if str(error).startswith("Caught "):  # raised by the work itself
                raise
            died = isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) or "DataLoader worker" in str(
                error
            )
            if not died:
                raise
            why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise OSError(
                f"a worker process that loads pictures died ({why}): often for lack of memory; use fewer workers"
            ) from error


class _Requests:
    """What the loader takes its requests from, now."""

    def __init__(self) -> None:
        self.now: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)


def _end(loader: Any) -> None:
    loader._iterator = None  # its end sends the workers home


def _as_it_is(made: Any) -> Any:
    return made


def _begin(_worker: int) -> None:
    """Signals to the whole group are the main process's affair: it saves, and then lets its workers go."""
    atexit.register(_leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, _later)


def _leave() -> None:
    """Ends a spawned worker that has nothing left to do, without PyTorch's destructors: they abort where threads still wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _later(_signal: int, _frame: object) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(GRACE)

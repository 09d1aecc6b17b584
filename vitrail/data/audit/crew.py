"""Processes that look at pictures, and one that watches them: a decoder that crashes costs one picture, not the run."""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from vitrail.data.audit.look import Look, look
from vitrail.data.pictures import Pictures

Task = tuple[int, list[int]]  # the place of a split among the splits, and indices of it
AHEAD = 2  # tasks that a process has before it: one to do, one to go on with
# A child of a fork shares the listing of a million files without a copy. Elsewhere, forking is not safe.
START = "fork" if sys.platform == "linux" else "spawn"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def looks(splits: list[Pictures], tasks: Iterable[Task], workers: int) -> Iterator[tuple[Task, list[Look]]]:
    """Every task with what was seen, as they are done; with 0 workers, in this process."""
    if not workers:
        for task in tasks:
            yield task, _done(splits, task)
        return
    waiting = iter(tasks)
    if (first := next(waiting, None)) is None:
        return
    left = deque([first])
    crew = [_Worker(splits) for _ in range(workers)]
    try:
        while True:
            for worker in crew:
                while len(worker.tasks) < AHEAD and (task := left.popleft() if left else next(waiting, None)):
                    worker.give(task)
            busy = [worker for worker in crew if worker.tasks]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe not in ready:
                    continue
                try:
                    found = worker.pipe.recv()
                except (EOFError, OSError):
                    crew[crew.index(worker)] = _Worker(splits)
                    crashed, *rest = worker.tasks
                    how = worker.stop()
                    left.extend(rest)
                    if len(crashed[1]) == 1:
                        yield crashed, [Look("unreadable", f"its decoder crashed ({how})", passing=True)]
                    else:
                        left.extend((crashed[0], [index]) for index in crashed[1])
                    continue
                yield worker.tasks.popleft(), found
    finally:
        for worker in crew:
            worker.pipe.close()  # which ends it, as this process' own end would
        for worker in crew:
            worker.stop()


class _Worker:
    """One process, and the tasks it was given, in order."""

    def __init__(self, splits: list[Pictures]) -> None:
        context = multiprocessing.get_context(START)
        self.tasks = deque[Task]()
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, self.pipe, splits), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        self.tasks.append(task)
        with suppress(OSError):  # if it has died, the next look at its pipe finds that
            self.pipe.send(task)

    def stop(self) -> str:
        """Waits for its end; how it ended."""
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        self.process.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _work(pipe: Connection, other: Connection, splits: list[Pictures]) -> None:
    """What a process does until nobody is at the other end."""
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that watches
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # C libraries complain there; what they find comes back as a Look
    try:
        while True:
            pipe.send(_done(splits, pipe.recv()))
    except (EOFError, OSError):
        return


def _done(splits: list[Pictures], task: Task) -> list[Look]:
    split, indices = task
    return [look(splits[split], index) for index in indices]

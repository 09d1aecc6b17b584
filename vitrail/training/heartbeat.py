"""Heartbeats of processes: if that of one stops, the others end, so that their launcher can start them again.

A host that loses power or its network closes no connection: a collective would wait for it until its timeout, which has to be
hours, because the others wait while the main process audits a large dataset. So every process counts in a key of the store
that the group was made with. The main process reads all counts, the others read its count and its verdict.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

BEATS = 6  # in the time after which a process counts as lost
EXIT_CODE = 75  # EX_TEMPFAIL: nothing is wrong with the run, start it again


def heartbeat_key(group: str, rank: int) -> str:
    """Return the key of a process's count."""
    return f"{group}-alive-{rank}"


def first_beat() -> str:
    """Return the value of a key before the thread of its process runs."""
    return json.dumps({"count": 0, "host": socket.gethostname(), "lost": []})


class Heartbeat:
    """Threads of one process that count for the others, and end the process when one of them is lost.

    Two threads, because a call of a store that cannot be reached may not return.
    """

    def __init__(
        self,
        store: Store,
        group: str,
        rank: int,
        world: int,
        seconds: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.group, self.rank, self.seconds = group, rank, seconds
        self.store = connect_again(store, seconds)  # a call of the given one may hold it for hours
        self.end = end or end_process
        self.watched = range(1, world) if rank == 0 else (0,)
        self.count, self.lost, self.problem = 0, list[str](), ""
        now = time.monotonic()
        self.reached = now  # when the store last answered
        self.heard = dict.fromkeys(self.watched, (0, now))  # the last count of each process, and when it changed
        self.left = threading.Event()
        for target in (self.beat, self.watch):
            threading.Thread(target=target, daemon=True, name=f"heartbeat-{target.__name__}").start()

    def leave(self) -> None:
        """Stop counting and watching."""
        self.left.set()

    def beat(self) -> None:
        """Count, and read the counts of the others, until the process leaves."""
        while not self.left.wait(self.seconds / BEATS):
            try:
                self.exchange()
            except RuntimeError as error:  # of a store that does not answer: `watch` ends the process if that lasts
                self.problem = f" ({str(error).splitlines()[0]})"
                continue
            self.reached = time.monotonic()

    def exchange(self) -> None:
        """Read the counts that this process watches, and write its own with what it knows of lost processes."""
        values = self.store.multi_get([heartbeat_key(self.group, other) for other in self.watched])
        now, lost = time.monotonic(), list[str]()
        for other, value in zip(self.watched, values, strict=True):
            beat = json.loads(value)
            count, since = self.heard[other]
            if beat["count"] != count:
                self.heard[other] = beat["count"], now
            elif now - since > self.seconds:
                lost.append(f"process {other} on {beat['host']}")
            lost += beat["lost"]
        self.count += 1
        mine = {"count": self.count, "host": socket.gethostname(), "lost": lost}
        self.store.set(heartbeat_key(self.group, self.rank), json.dumps(mine))
        self.lost = lost

    def watch(self) -> None:
        """End this process when another one is lost, or when the store has not answered for as long."""
        while not self.left.wait(self.seconds / BEATS / 2):
            silent = time.monotonic() - self.reached
            if self.lost:
                if self.rank == 0:
                    self.left.wait(2 * self.seconds / BEATS)  # the others read the verdict
                self.end(f"no heartbeat for {self.seconds:g} s from {describe_lost(self.lost)}")
                return
            if (
                silent > self.seconds + 2 * self.seconds / BEATS
            ):  # the main process has published its verdict before that
                self.end(f"no connection for {silent:.0f} s to the other processes{self.problem}")
                return


def connect_again(store: Store, seconds: float) -> Store:
    """Return a connection of its own to a store, whose calls fail after some seconds."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def describe_lost(lost: Sequence[str]) -> str:
    """Return the names of the lost processes, at most four."""
    return ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")


def end_process(reason: str) -> None:
    """Print the reason and end this process at once: its main thread may wait for ever in a collective."""
    print(f"vitrail: {reason}: this process ends; resume from the last checkpoint", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)

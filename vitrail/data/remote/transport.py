"""Requests of remote files through fsspec, with retries, time-outs and a check of every response.

One attempt is a request of a range. It is complete if all its bytes came; what came before an interruption is kept, and the next
attempt asks for the rest. Every response must be of the same version of the file, by its length, ETag and time of modification.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vitrail.data.remote.settings import FIRST_ATTEMPTS, MAX_PAUSE_SECONDS, PAUSE_SECONDS, TIMEOUT, read_settings
from vitrail.data.remote.urls import RemoteError, plain_name

Sink = Callable[[bytes], None]  # takes the bytes of a response as they come
T = TypeVar("T")
MAX_RETRY_AFTER_SECONDS = 60.0
CHANGED = "changed while it was being read"


class Interrupted(Exception):
    """An attempt that failed and may be repeated."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class AccessError(RemoteError):
    """A file that is missing or that the server refuses."""


@dataclass(frozen=True)
class Version:
    """The facts that a server states of a file: its size, what identifies its content, and whether parts can be requested."""

    size: int
    etag: str = ""
    modified: str = ""
    ranges: bool = True

    @property
    def text(self) -> str:
        """Return what identifies the content."""
        return f"{self.size} {self.etag} {self.modified}"

    def check(self, url: str, size: int | None, etag: str, modified: str) -> None:
        """Raise RemoteError if a response is of another version."""
        pairs = ((self.etag, etag, "ETag"), (self.modified, modified, "time of modification"))
        if size is not None and size != self.size:
            raise RemoteError(f"{plain_name(url)} {CHANGED}: it had {self.size:,} bytes, now {size:,}; start again")
        for before, now, what in pairs:
            if before and now and before != now:
                raise RemoteError(f"{plain_name(url)} {CHANGED}: it has another {what}; start again")
            if before and now and what == "ETag":
                return  # the content is the same, whatever its time


class Transport(Protocol):
    """One attempt of each request; raises Interrupted for what may be repeated, RemoteError for the rest."""

    def read_version(self, url: str) -> Version: ...

    def receive(self, url: str, version: Version, start: int, stop: int, sink: Sink) -> None:
        """Send the bytes from `start` to `stop` to `sink`; without ranges, all bytes of the file."""
        ...

    def list_files(self, pattern: str) -> list[str]: ...


class _Connections:
    """The transports of this process. A forked process makes its own, and never touches those of its parent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.transports: dict[str, Transport] = {}
        self.inherited: list[Any] = []  # kept: finalisers would close the parent's connections
        self.answered: set[str] = set()  # servers

    def leave_to_parent(self) -> None:
        self.lock = threading.Lock()
        self.inherited.append(self.transports)
        self.transports = {}

    def find(self, url: str) -> Transport:
        scheme = url.partition(":")[0].lower()
        kind = "s3" if scheme == "s3" else "http"
        with self.lock:
            if kind not in self.transports:
                self.transports[kind] = open_transport(kind)
            return self.transports[kind]


CONNECTIONS = _Connections()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CONNECTIONS.leave_to_parent)


def open_transport(kind: str) -> Transport:
    """Return the transport of a protocol; raise an error that tells how to install it."""
    try:
        if kind == "s3":
            from vitrail.data.remote.s3 import S3Transport

            return S3Transport()
        from vitrail.data.remote.http import HTTPTransport

        return HTTPTransport()
    except ImportError as error:
        extra = "s3" if kind == "s3" else "remote"
        raise RemoteError(f"{kind} needs {error.name}: pip install 'vitrail[{extra}]'") from None


def read_version(url: str) -> Version:
    """Return the version of a file, with retries."""
    transport = CONNECTIONS.find(url)
    return retry(url, lambda: transport.read_version(url))


def fetch(url: str, version: Version, start: int, stop: int) -> bytes:
    """Return a range of a file, with retries; what came before an interruption is not requested again."""
    transport, received = CONNECTIONS.find(url), bytearray()

    def attempt() -> None:
        if start + len(received) < stop:
            transport.receive(url, version, start + len(received), stop, received.extend)
        if len(received) != stop - start:
            raise Interrupted(f"{len(received):,} of {stop - start:,} bytes came")

    retry(url, attempt, lambda: len(received))
    return bytes(received)


def retry(url: str, attempt: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """Return the result of an attempt; repeat it after an interruption, with growing pauses. Progress resets the count."""
    server = url.split("/", 3)[2]
    most = read_settings().attempts
    limit = most if server in CONNECTIONS.answered else min(most, FIRST_ATTEMPTS)
    count, pause, before = 0, PAUSE_SECONDS, progress()
    while True:
        try:
            result = attempt()
            CONNECTIONS.answered.add(server)
            return result
        except Interrupted as error:
            problem = error
        if progress() > before:
            count, pause, before, limit = 0, PAUSE_SECONDS, progress(), most
        count += 1
        if count >= limit:
            raise RemoteError(f"{plain_name(url)}: {problem} ({count} attempts)") from None
        time.sleep(max(pause * random.uniform(0.5, 1.5), min(problem.retry_after, MAX_RETRY_AFTER_SECONDS)))
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def describe_stall(seconds: float) -> str:
    """Return the reason of an attempt that timed out."""
    return f"no data for {seconds:g} s (${TIMEOUT})"


def check_status(url: str, status: int, reason: str, retry_after: str = "") -> None:
    """Raise the error of a response that is not the file, or Interrupted if the request may be repeated."""
    name, said = plain_name(url), f"{status} {reason}".strip()
    if status in (200, 206):
        return
    if status in (404, 410):
        raise AccessError(f"{name}: not found ({said})")
    if status in (401, 403):
        raise AccessError(f"{name}: access denied ({said}): check the credentials, or whether a signed address expired")
    if status in (408, 425, 429) or status >= 500:
        raise Interrupted(f"the server answered {said}", float(retry_after) if retry_after.isdecimal() else 0.0)
    raise RemoteError(f"{name}: the server answered {said}")

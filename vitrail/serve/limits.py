"""What the service takes, and what it does not: every refusal is one line with the status that fits."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitrail.serve.memory import Memory

MEGABYTE = 2**20


class Refused(Exception):
    """A request that gets no answer but this line."""

    def __init__(self, status: int, line: str, retry: int | None = None) -> None:
        super().__init__(line)
        self.status, self.line, self.retry = status, line, retry  # seconds until it may be tried again


@dataclass(frozen=True)
class Limits:
    """How much one client, and all of them together, may ask for."""

    body: int = 32 * MEGABYTE  # bytes of a request
    pixels: int = 50_000_000  # of a picture, which its header tells
    pictures: int = 64  # in a request
    queue: int = 256  # pictures that are taken and not answered, of all clients
    looks: int = 8  # requests for attention that wait or run
    seconds: float = 30.0  # from the last byte of a request to its answer
    body_seconds: float = 30.0  # from the first byte of a body to its last

    def __post_init__(self) -> None:
        for name in ("body", "pixels", "pictures", "queue", "looks"):
            if getattr(self, name) < 1:
                raise ValueError(f"a limit of {getattr(self, name)} for {name}: give at least 1")
        for name in ("seconds", "body_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"a limit of {getattr(self, name)} for {name}: give more than 0")
        if self.pictures > self.queue:
            raise ValueError(
                f"a request may hold {self.pictures} pictures and the queue {self.queue}: "
                "make --queue at least as long as --max-pictures"
            )

    @property
    def held(self) -> int:
        """Bytes of bodies that may lie in memory at once."""
        return 8 * self.body


class Places:
    """The places of a queue: whoever finds none is sent away at once, and told when to come again."""

    def __init__(self, count: int, what: str) -> None:
        self.count, self.what = count, what
        self.taken = 0
        self.usual = 1.0  # seconds that a place is held, lately

    def check(self) -> None:
        """Refuses where not even one place is free."""
        if self.taken >= self.count:
            raise self.full()

    @contextmanager
    def taking(self, number: int) -> Iterator[None]:
        """So many places, for as long as it takes."""
        if self.taken + number > self.count:
            raise self.full()
        self.taken += number
        begin = time.monotonic()
        try:
            yield
        finally:
            self.taken -= number
            self.usual += 0.1 * (time.monotonic() - begin - self.usual)

    def full(self) -> Refused:
        retry = max(1, min(30, math.ceil(self.usual)))
        return Refused(503, f"busy: {self.count} {self.what} are waiting already, try again in {retry} s", retry)


class Held:
    """Bytes of bodies in memory, of all requests together."""

    def __init__(self, most: int, memory: Memory) -> None:
        self.most, self.memory, self.bytes = most, memory, 0

    @contextmanager
    def holding(self) -> Iterator["Hold"]:
        """What one request holds, given back at its end."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self.bytes -= hold.bytes
            self.memory.saw(hold.bytes)


class Hold:
    """The part of one request."""

    def __init__(self, held: Held) -> None:
        self.held, self.bytes = held, 0

    def add(self, count: int) -> None:
        """So many bytes more, or a refusal where all requests together hold too many."""
        if self.held.bytes + count > self.held.most:
            raise Refused(503, "busy: too many large requests at once, try again in a second", 1)
        self.held.bytes += count
        self.bytes += count

"""Limits of the service: request sizes, queue slots and memory, and the exception for refused requests."""

import ctypes
import math
import platform
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LARGE_BYTES = 1_000_000  # pixels or bytes; memory of smaller items is reused soon
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # accepted unless others are asked for
VIDEO_FRAMES, VIDEO_SECONDS = 20_000, 600.0  # of one video
RESERVED_SHARE = 4  # 1/4 of queue and memory is kept for requests with one image, of at most LARGE_BYTES
OTHERS_SHARE = 8  # 1/8 of a queue is kept for addresses other than the one that fills it


class MemoryTrimmer:
    """Returns freed memory to the system after large requests. glibc keeps freed memory in each thread's heap."""

    def __init__(self) -> None:
        self.is_needed = False
        self.libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None

    def record(self, size: int) -> None:
        """Record the size of an image in pixels or of a body in bytes."""
        self.is_needed = self.is_needed or size >= LARGE_BYTES

    def trim(self) -> None:
        """Return freed memory to the system if something large was recorded."""
        if self.is_needed and self.libc is not None:
            self.is_needed = False
            self.libc.malloc_trim(0)


MEGABYTE = 2**20


class RequestRefused(Exception):
    """Raised to refuse a request with a status and a one-line message."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after  # retry_after in seconds


LIMIT_OPTIONS = {
    "body": "--max-body",
    "pixels": "--max-pixels",
    "images": "--max-images",
    "frames": "--max-frames",
    "video_seconds": "--max-duration",
    "queue": "--queue",
    "seconds": "--timeout",
    "body_seconds": "--body-timeout",
    "attention_requests": "attention_requests",
}


@dataclass(frozen=True)
class RequestLimits:
    """Limits per request and for all requests together."""

    body: int = 32 * MEGABYTE  # bytes per request
    pixels: int = 50_000_000  # per image, from its header, or per frame of a video
    frames: int = VIDEO_FRAMES  # of a video
    video_seconds: float = VIDEO_SECONDS  # duration of a video or a sound
    images: int = 64  # per request
    formats: tuple[str, ...] = IMAGE_FORMATS  # names of `vitrail.data.decode.FORMATS`
    queue: int = 256  # images waiting or running, of all clients
    attention_requests: int = 8  # waiting or running
    seconds: float = 30.0  # from the last byte of a request to the response
    body_seconds: float = 30.0  # from the first to the last byte of a body

    def __post_init__(self) -> None:
        for name, option in LIMIT_OPTIONS.items():
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{option} must be > 0 and finite, got {getattr(self, name)}")
        if self.images > self.queue:
            raise ValueError(f"--queue must be >= --max-images, got {self.queue} and {self.images}")

    @property
    def body_memory(self) -> int:
        """Return the limit of all bodies in memory, in bytes."""
        return 8 * self.body

    @property
    def request_pixels(self) -> int:
        """Return the limit of the pixels of all images of a request."""
        return 4 * self.pixels


class QueueSlots:
    """Slots of a queue. A request that finds none free is refused with a Retry-After."""

    def __init__(self, count: int, what: str) -> None:
        self.count, self.what = count, what
        self.taken = 0
        self.taken_by: Counter[str] = Counter()  # by client address
        self.mean_seconds = 1.0  # moving average of the time a slot is held

    def check_free(self, number: int = 1, address: str = "") -> None:
        """Raise RequestRefused if `number` slots are not free for this client.

        Requests for several slots leave a share to those for one, and an address leaves a share to all others.
        """
        limit = max(number, self.count - (self.count // RESERVED_SHARE if number > 1 else 0))
        own_limit = max(number, self.count - self.count // OTHERS_SHARE)
        if self.taken + number > limit or self.taken_by[address] + number > own_limit:
            raise self.refuse_full()

    @contextmanager
    def reserve(self, number: int, address: str = "") -> Iterator[None]:
        """Hold `number` slots during the block."""
        self.check_free(number, address)
        self.taken += number
        self.taken_by[address] += number
        begin = time.monotonic()
        try:
            yield
        finally:
            self.taken -= number
            self.taken_by[address] -= number
            if not self.taken_by[address]:
                del self.taken_by[address]
            self.mean_seconds += 0.1 * (time.monotonic() - begin - self.mean_seconds)

    def refuse_full(self) -> RequestRefused:
        retry = max(1, min(30, math.ceil(self.mean_seconds)))
        return RequestRefused(503, f"busy: {self.count} {self.what} in the queue, try again in {retry} s", retry)


class BodyMemory:
    """Total bytes of request bodies in memory."""

    def __init__(self, max_bytes: int, memory: MemoryTrimmer) -> None:
        self.max_bytes, self.memory, self.bytes = max_bytes, memory, 0

    @contextmanager
    def reserve(self) -> Iterator["BodyReservation"]:
        """Yield the reservation of one request, released at the end of the block."""
        reservation = BodyReservation(self)
        try:
            yield reservation
        finally:
            self.bytes -= reservation.bytes
            self.memory.record(reservation.bytes)


class BodyReservation:
    """Bytes reserved by one request."""

    def __init__(self, total: BodyMemory) -> None:
        self.total, self.bytes = total, 0

    def reserve(self, count: int) -> None:
        """Reserve `count` more bytes; raise RequestRefused if all requests together exceed the limit.

        Large requests leave a share to small ones.
        """
        large = self.bytes + count > LARGE_BYTES
        if self.total.bytes + count > self.total.max_bytes - (self.total.max_bytes // RESERVED_SHARE if large else 0):
            raise RequestRefused(503, "busy: too many large requests, try again in 1 s", 1)
        self.total.bytes += count
        self.bytes += count

"""Pictures of many clients to one model: decoded beside each other, answered together.

A picture's way: bytes → a thread of the pool decodes it → it waits in line → a worker takes it, with those that wait beside it or
come within a few milliseconds → its row of numbers goes back to the event loop. Nothing waits for company that is not
on its way: a client that is alone gets its answer as fast as the model is.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtime import Runtime
from vitrail.serve.decoding import Decoder
from vitrail.serve.limits import Refused
from vitrail.serve.multipart import Part

log = logging.getLogger("vitrail.serve")


class Failed(Exception):
    """The model itself could not answer: nothing that a client did."""


class Asked:
    """A picture on its way. `answer` is of the event loop, and set only there."""

    __slots__ = ("answer", "loop", "part", "pixels")

    def __init__(self, part: Part, loop: asyncio.AbstractEventLoop) -> None:
        self.part: Part | None = part
        self.pixels: np.ndarray | None = None
        self.loop, self.answer = loop, loop.create_future()

    @property
    def unwanted(self) -> bool:
        """Nobody waits for it any more."""
        return self.answer.cancelled()


def tell(asked: Sequence[Asked], found: Sequence[np.ndarray | Exception]) -> None:
    """Brings answers to those who wait, from any thread."""
    if not asked:
        return

    def deliver() -> None:
        for each, answer in zip(asked, found, strict=True):
            if each.answer.done():
                continue
            if isinstance(answer, Exception):
                each.answer.set_exception(answer)
            else:
                each.answer.set_result(answer)

    try:
        asked[0].loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # the loop has ended, and with it everybody who waited
        log.warning("%d answers came after the service had stopped", len(asked))


class Batcher:
    """The line before a model, and the threads that work it off: one for each runtime."""

    def __init__(
        self,
        runtimes: Sequence[Runtime],
        preprocessing: Preprocessing,
        decoder: Decoder,
        pool: ThreadPoolExecutor,
        *,
        largest: int = 8,
        wait: float = 0.005,
        saw: Callable[[int, float], None] = lambda pictures, seconds: None,
    ) -> None:
        """Batches of at most `largest`, for which nobody waits longer than `wait` seconds; `saw` hears of each."""
        self.preprocessing, self.decoder, self.pool = preprocessing, decoder, pool
        self.largest, self.wait, self.saw = largest, wait, saw
        self.line: deque[Asked] = deque()
        self.coming = 0  # pictures that are being decoded
        self.idle = len(runtimes)
        self.closed = False
        self.change = threading.Condition()
        self.gathering = threading.Lock()
        self.threads = [
            threading.Thread(target=self.work, args=(runtime,), name=f"model-{number}", daemon=True)
            for number, runtime in enumerate(runtimes)
        ]
        for thread in self.threads:
            thread.start()

    def ask(self, parts: Sequence[Part]) -> list[asyncio.Future[np.ndarray]]:
        """Called in the event loop: an answer to come for each picture, a row of numbers or a refusal."""
        loop = asyncio.get_running_loop()
        asked = [Asked(part, loop) for part in parts]
        with self.change:
            self.coming += len(asked)
        for each in asked:
            self.pool.submit(self.decode, each)
        return [each.answer for each in asked]

    def decode(self, asked: Asked) -> None:
        """In a thread of the pool."""
        part, asked.part = asked.part, None
        assert part is not None
        refused: Refused | None = None
        if not asked.unwanted:
            try:
                asked.pixels = self.decoder(part, self.preprocessing)
            except Refused as error:
                refused = error
        with self.change:
            self.coming -= 1
            if asked.pixels is not None:
                self.line.append(asked)
            self.change.notify_all()
        if refused is not None:
            tell([asked], [refused])

    def work(self, runtime: Runtime) -> None:
        """A worker's life: until the line is closed and empty."""
        while True:
            with self.gathering:
                batch = self.take()
            if batch is None:
                return
            if not batch:
                continue
            begin = time.perf_counter()
            found: list[np.ndarray | Exception]
            try:
                rows = runtime(np.stack([asked.pixels for asked in batch if asked.pixels is not None]))
                found = [row if np.isfinite(row).all() else Failed("the model's answer is not finite") for row in rows]
            except Exception:
                log.exception("the model could not answer %d pictures", len(batch))
                found = [Failed("the model could not answer")] * len(batch)
            self.saw(len(batch), time.perf_counter() - begin)
            tell(batch, found)
            with self.change:
                self.idle += 1
            del batch, found  # nothing is kept while it waits for more

    def take(self) -> list[Asked] | None:
        """The next pictures, None at the end. Only one worker at a time gathers; the others work or wait their turn."""
        with self.change:
            while not self.line:
                if self.closed and not self.coming:
                    return None
                self.change.wait()
            end = time.monotonic() + self.wait
            # Company is waited for only while it is on its way, and only where no other worker is free to take it.
            while self.idle == 1 and self.coming and len(self.line) < self.largest:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self.change.wait(left)
            share = min(self.largest, -(-len(self.line) // self.idle))  # so that free workers get as much
            batch: list[Asked] = []
            while self.line and len(batch) < share:
                asked = self.line.popleft()
                if not asked.unwanted:
                    batch.append(asked)
            if batch:
                self.idle -= 1
            return batch

    def close(self) -> None:
        """No more will come: what is in line is answered, then the threads end."""
        with self.change:
            self.closed = True
            self.change.notify_all()

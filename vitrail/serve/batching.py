"""Dynamic batching: images of many clients are decoded in parallel and run through the model in batches.

bytes → decoded in threads or processes → queued → taken by a worker in a batch with other queued images → outputs delivered to
the event loop. A worker waits up to `max_wait` only while other images are being decoded, so a single client is never delayed.
Requests take turns in both queues.
"""

import asyncio
import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import Runtime
from vitrail.serve.body import ImagePart
from vitrail.serve.decoding import Decode, DecodingPool, LargeImage
from vitrail.serve.limits import RequestRefused

log = logging.getLogger("vitrail.serve")
Convert = Callable[[np.ndarray, tuple[int, int]], Any]  # of a row of outputs and the size of its image


class InferenceFailed(Exception):
    """Raised when the model fails. Not the client's fault."""


class PendingImage:
    """An image in the queue. `answer` is a future of the event loop, and set only there."""

    __slots__ = ("answer", "budget", "convert", "loop", "part", "pixels", "size", "turn")

    def __init__(
        self,
        part: ImagePart,
        loop: asyncio.AbstractEventLoop,
        turn: float,
        budget: "PixelBudget",
        convert: "Convert | None" = None,
    ) -> None:
        self.part: ImagePart | None = part
        self.pixels: np.ndarray | None = None
        self.size, self.convert = (0, 0), convert  # height and width of the whole image
        self.loop, self.turn, self.budget = loop, turn, budget
        self.answer = loop.create_future()
        self.answer.add_done_callback(self.release)

    def __lt__(self, other: "PendingImage") -> bool:
        return self.turn < other.turn

    def release(self, _: object) -> None:
        """Free the memory once no request waits for it, although the image may still be in a queue."""
        self.part = None

    def finish(self, row: np.ndarray) -> Any:
        """Return the result of the outputs for this image, or the error."""
        if not np.isfinite(row).all():
            return InferenceFailed("the model's output is not finite")
        try:
            return row if self.convert is None else self.convert(row, self.size)
        except RequestRefused as refused:
            return refused

    @property
    def is_cancelled(self) -> bool:
        """Return True if the client no longer waits."""
        return self.answer.cancelled()


class PixelBudget:
    """The pixels that the images of one request may still cost."""

    def __init__(self, pixels: int) -> None:
        self.pixels = self.left = pixels

    def check(self) -> None:
        """Refuse a further image if nothing is left."""
        if self.left <= 0:
            raise RequestRefused(413, f"the request has more than {self.pixels / 1e6:g} million pixels: split it")


def deliver_results(pending: Sequence[PendingImage], results: Sequence[Any]) -> None:
    """Set the results of pending images from any thread."""
    if not pending:
        return

    def deliver() -> None:
        for image, result in zip(pending, results, strict=True):
            if image.answer.done():
                continue
            if isinstance(result, Exception):
                image.answer.set_exception(result)
            else:
                image.answer.set_result(result)

    try:
        pending[0].loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # the event loop has ended
        log.warning("dropped %d results: the service has stopped", len(pending))


class Batcher:
    """Queue of a model and its worker threads, one for each runtime."""

    def __init__(
        self,
        runtimes: Sequence[Runtime],
        preprocessing: Preprocessing,
        pool: DecodingPool,
        *,
        request_pixels: int = 10**12,
        max_batch_size: int = 8,
        max_wait: float = 0.005,
        on_batch: Callable[[int, float], None] = lambda n_images, seconds: None,
    ) -> None:
        """Start the workers. `max_wait` is in seconds; `on_batch` receives size and seconds of each batch."""
        self.preprocessing, self.pool, self.request_pixels = preprocessing, pool, request_pixels
        self.max_batch_size, self.max_wait, self.on_batch = max_batch_size, max_wait, on_batch
        self.queue: list[PendingImage] = []  # a heap
        self.running: dict[int, tuple[float, list[PendingImage]]] = {}  # begin and images of batches, by worker
        self.n_decoding = 0
        self.idle = len(runtimes)
        self.closed = False
        self.change = threading.Condition()
        self.gathering = threading.Lock()
        self.threads = [
            threading.Thread(target=self.run_worker, args=(number, runtime), name=f"model-{number}", daemon=True)
            for number, runtime in enumerate(runtimes)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, parts: Sequence[ImagePart], convert: Convert | None = None) -> list[asyncio.Future[Any]]:
        """Queue images and return a future for each: a row of outputs or a RequestRefused. Call it in the event loop.

        `convert` turns a row into the result in the worker: for outputs that are too large to be kept.
        """
        loop = asyncio.get_running_loop()
        turn, budget = self.pool.turn, PixelBudget(self.request_pixels)
        images = [PendingImage(part, loop, turn + number, budget, convert) for number, part in enumerate(parts)]
        with self.change:
            self.n_decoding += len(images)
        for image in images:
            self.pool.submit(image.turn, partial(self.decode, image))
        return [image.answer for image in images]

    def decode(self, pending: PendingImage, decode: Decode) -> None:
        """Decode an image and queue it. Runs in a thread of the pool."""
        refused: RequestRefused | None = None
        if (part := pending.part) is not None:  # its client still waits
            try:
                pending.budget.check()
                try:
                    pending.pixels, n_pixels, pending.size = decode(part, self.preprocessing)
                except LargeImage:
                    self.pool.submit(pending.turn, partial(self.decode, pending), large=True)
                    return
                pending.budget.left -= n_pixels
            except RequestRefused as error:
                refused = error
        pending.part = None
        with self.change:
            self.n_decoding -= 1
            if pending.pixels is not None:
                heapq.heappush(self.queue, pending)
            else:
                self.pool.pass_turn(pending.turn)
            self.change.notify_all()
        if refused is not None:
            deliver_results([pending], [refused])

    def run_worker(self, number: int, runtime: Runtime) -> None:
        """Run batches until the queue is closed and empty."""
        while True:
            with self.gathering:
                batch = self.take_batch()
            if batch is None:
                return
            if not batch:
                continue
            begin = time.perf_counter()
            self.running[number] = begin, batch
            results: list[Any]
            try:
                rows = runtime(np.stack([image.pixels for image in batch if image.pixels is not None]))
                if len(rows) != len(batch):
                    raise ValueError(f"the model returned {len(rows)} rows for {len(batch)} images")
                results = [image.finish(row) for image, row in zip(batch, rows, strict=True)]
                del rows
            except BaseException:  # even one that would end the thread, which is the only one that serves the queue
                log.exception("inference failed for %d images", len(batch))
                results = [InferenceFailed("inference failed")] * len(batch)
            self.on_batch(len(batch), time.perf_counter() - begin)
            deliver_results(batch, results)
            del self.running[number]
            with self.change:
                self.idle += 1
            del batch, results  # free the memory while waiting

    def take_batch(self) -> list[PendingImage] | None:
        """Return the next batch, None at the end. One worker at a time gathers a batch."""
        with self.change:
            while not self.queue:
                if self.closed and not self.n_decoding:
                    return None
                self.change.wait()
            end = time.monotonic() + self.max_wait
            # Wait only while other images are being decoded and no other worker is idle.
            while self.idle == 1 and self.n_decoding and len(self.queue) < self.max_batch_size:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self.change.wait(left)
            share = min(self.max_batch_size, -(-len(self.queue) // self.idle))  # equal shares for idle workers
            batch: list[PendingImage] = []
            while self.queue and len(batch) < share:
                image = heapq.heappop(self.queue)
                if not image.is_cancelled:
                    batch.append(image)
                    self.pool.pass_turn(image.turn)
            if batch:
                self.idle -= 1
            return batch

    def fail_overdue(self, seconds: float) -> bool:
        """Fail batches that have run for longer than this; return True if no other worker is left."""
        overdue = [batch for begin, batch in tuple(self.running.values()) if time.perf_counter() - begin > seconds]
        for batch in overdue:
            deliver_results(batch, [InferenceFailed(f"inference took longer than {seconds:g} s")] * len(batch))
        return len(overdue) == len(self.threads)

    def close(self) -> None:
        """Accept no more images; the workers finish the queue and end."""
        with self.change:
            self.closed = True
            self.change.notify_all()

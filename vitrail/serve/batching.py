"""Dynamic batching: images of many clients are decoded in parallel and run through the model in batches.

bytes → decoded in a thread pool → queued → taken by a worker in a batch with other queued images → outputs delivered to the event
loop. A worker waits up to `max_wait` only while other images are being decoded, so a single client is never delayed.
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
from vitrail.deploy.runtimes.base import Runtime
from vitrail.serve.body import ImagePart
from vitrail.serve.decoding import ImageDecoder
from vitrail.serve.limits import RequestRefused

log = logging.getLogger("vitrail.serve")


class InferenceFailed(Exception):
    """Raised when the model fails. Not the client's fault."""


class PendingImage:
    """An image in the queue. `answer` is a future of the event loop, and set only there."""

    __slots__ = ("answer", "loop", "part", "pixels")

    def __init__(self, part: ImagePart, loop: asyncio.AbstractEventLoop) -> None:
        self.part: ImagePart | None = part
        self.pixels: np.ndarray | None = None
        self.loop, self.answer = loop, loop.create_future()

    @property
    def is_cancelled(self) -> bool:
        """Return True if the client no longer waits."""
        return self.answer.cancelled()


def deliver_results(pending: Sequence[PendingImage], results: Sequence[np.ndarray | Exception]) -> None:
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
        decoder: ImageDecoder,
        pool: ThreadPoolExecutor,
        *,
        max_batch_size: int = 8,
        max_wait: float = 0.005,
        on_batch: Callable[[int, float], None] = lambda n_images, seconds: None,
    ) -> None:
        """Start the workers. `max_wait` is in seconds; `on_batch` receives size and seconds of each batch."""
        self.preprocessing, self.decoder, self.pool = preprocessing, decoder, pool
        self.max_batch_size, self.max_wait, self.on_batch = max_batch_size, max_wait, on_batch
        self.queue: deque[PendingImage] = deque()
        self.n_decoding = 0
        self.idle = len(runtimes)
        self.closed = False
        self.change = threading.Condition()
        self.gathering = threading.Lock()
        self.threads = [
            threading.Thread(target=self.run_worker, args=(runtime,), name=f"model-{number}", daemon=True)
            for number, runtime in enumerate(runtimes)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, parts: Sequence[ImagePart]) -> list[asyncio.Future[np.ndarray]]:
        """Queue images and return a future for each: a row of outputs or a RequestRefused. Call it in the event loop."""
        loop = asyncio.get_running_loop()
        images = [PendingImage(part, loop) for part in parts]
        with self.change:
            self.n_decoding += len(images)
        for image in images:
            self.pool.submit(self.decode, image)
        return [image.answer for image in images]

    def decode(self, pending: PendingImage) -> None:
        """Decode an image and queue it. Runs in the thread pool."""
        part, pending.part = pending.part, None
        assert part is not None
        refused: RequestRefused | None = None
        if not pending.is_cancelled:
            try:
                pending.pixels = self.decoder(part, self.preprocessing)
            except RequestRefused as error:
                refused = error
        with self.change:
            self.n_decoding -= 1
            if pending.pixels is not None:
                self.queue.append(pending)
            self.change.notify_all()
        if refused is not None:
            deliver_results([pending], [refused])

    def run_worker(self, runtime: Runtime) -> None:
        """Run batches until the queue is closed and empty."""
        while True:
            with self.gathering:
                batch = self.take_batch()
            if batch is None:
                return
            if not batch:
                continue
            begin = time.perf_counter()
            results: list[np.ndarray | Exception]
            try:
                rows = runtime(np.stack([image.pixels for image in batch if image.pixels is not None]))
                results = [
                    row if np.isfinite(row).all() else InferenceFailed("the model's output is not finite")
                    for row in rows
                ]
            except Exception:
                log.exception("inference failed for %d images", len(batch))
                results = [InferenceFailed("inference failed")] * len(batch)
            self.on_batch(len(batch), time.perf_counter() - begin)
            deliver_results(batch, results)
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
                image = self.queue.popleft()
                if not image.is_cancelled:
                    batch.append(image)
            if batch:
                self.idle -= 1
            return batch

    def close(self) -> None:
        """Accept no more images; the workers finish the queue and end."""
        with self.change:
            self.closed = True
            self.change.notify_all()

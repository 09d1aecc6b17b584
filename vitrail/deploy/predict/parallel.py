"""Run a model over images with several threads, each of which decodes a batch and then runs the model on it.

On a CPU every thread has its own single-threaded runtime, so no core waits for another. While one thread decodes, another
computes; batches come out in the order of the images.

B images or videos, V views of a video, C channels, T frames, H×W pixels, K values.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from PIL import Image

from vitrail.data.decode import IMAGE_ERRORS, format_image_error, name_image_errors
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.video import Video
from vitrail.deploy.predict.inputs import ImageInputs
from vitrail.deploy.runtimes.base import Runtime, random_pixels
from vitrail.inference import compute_views

INITIAL_BATCH_SIZE = {"cpu": 4, "cuda": 32, "mps": 16}  # on a CPU, what its caches hold
MAX_BATCH_SIZE = {"cpu": 64, "cuda": 512, "mps": 128}
MIN_TRIALS = 4  # batches of a size before it is compared
MIN_GAIN = 1.03  # required of another size, because of noise


class BatchSizeTuner:
    """A batch size that doubles or halves towards the fastest. Thread-safe."""

    def __init__(self, initial: int, maximum: int, fixed: bool = False) -> None:
        self.maximum, self.fixed = max(1, maximum), fixed
        self.size = min(initial, self.maximum)
        self.seconds: dict[int, list[float]] = {}  # per image, of batches of each size
        self.lock = threading.Lock()

    def record(self, size: int, seconds: float) -> None:
        """Record the time of a batch; sizes other than the current one are ignored."""
        with self.lock:
            if self.fixed or size != self.size:
                return
            times = self.seconds.setdefault(size, [])
            times.append(seconds / size)
            if len(times) >= MIN_TRIALS:
                self.size = self.next_size()

    def next_size(self) -> int:
        """Return the fastest size so far, or an untried neighbour of it."""
        fastest = self.size
        for size, times in self.seconds.items():
            if len(times) >= MIN_TRIALS and min(times) * MIN_GAIN < min(self.seconds[fastest]):
                fastest = size
        for neighbour in (2 * fastest, fastest // 2):
            if 1 <= neighbour <= self.maximum and len(self.seconds.get(neighbour, ())) < MIN_TRIALS:
                return neighbour
        return fastest

    def limit_size(self, maximum: int) -> None:
        """Limit the size from now on."""
        with self.lock:
            self.maximum = max(1, min(self.maximum, maximum))
            self.size = min(self.size, self.maximum)

    def record_out_of_memory(self, size: int) -> None:
        """Limit the size after a batch did not fit into memory."""
        self.limit_size(size // 2)


MAX_PENDING_BATCHES = 4  # finished batches per thread that wait for an earlier one
MAX_BATCH_BYTES = 2**28  # of the images and masks of a batch, whose size is that of the files
MAX_PENDING_BYTES = 2**28  # of the finished batches of all threads, likewise
NOT_FINITE = "the outputs of the model are not finite"


class ImageInference(Protocol):
    """The way from an image to a result of it."""

    def prepare(self, image: Any) -> Any:
        """Return what the model needs of an image or a video."""
        ...

    def count_bytes(self, item: Any) -> int:
        """Return the bytes of what `prepare` returned or of a result; 0 if they do not grow with the image."""
        ...

    def run(self, run: Callable[[np.ndarray], np.ndarray], inputs: Sequence[Any]) -> Iterable[Any | None]:
        """Return the result of each image, given a function that runs the model; None if it is not finite."""
        ...


@dataclass(frozen=True)
class RowInference:
    """Logits or features of images, float32 [K] each."""

    preprocessing: Preprocessing

    def prepare(self, image: Image.Image) -> np.ndarray:
        return self.preprocessing.to_pixels(image).numpy()

    def count_bytes(self, item: np.ndarray) -> int:
        return 0

    def run(self, run: Callable[[np.ndarray], np.ndarray], inputs: Sequence[np.ndarray]) -> Iterator[np.ndarray | None]:
        for output in run(np.stack(inputs)):
            yield output if np.isfinite(output).all() else None


@dataclass(frozen=True)
class ClipInference:
    """Logits or features of videos, float32 [K] each: the mean over their views, of logits that of their probabilities."""

    preprocessing: Preprocessing
    activation: str | None = None  # softmax or sigmoid; None for features and numbers

    def prepare(self, image: Video) -> np.ndarray:
        return self.preprocessing.to_views(image).numpy()

    def count_bytes(self, item: np.ndarray) -> int:
        return item.nbytes if item.ndim > 1 else 0

    def run(self, run: Callable[[np.ndarray], np.ndarray], inputs: Sequence[np.ndarray]) -> Iterator[np.ndarray | None]:
        for output in compute_views(run, np.stack(inputs), self.activation):
            yield output if np.isfinite(output).all() else None


@dataclass(frozen=True)
class BatchOutput:
    """The outputs of a batch."""

    start: int
    names: list[str]
    values: list[Any | None]  # the result of each image
    errors: dict[int, str]  # by the index in the batch
    nbytes: int = 0  # of the results, if they grow with the images


class ParallelInference:
    """Worker threads that process batches, and an iterator that yields them in order."""

    def __init__(
        self,
        inputs: ImageInputs,
        start: int,
        stop: int,
        inference: ImageInference,
        runtimes: Sequence[Runtime],
        batch_size: BatchSizeTuner,
    ) -> None:
        """Start one thread per runtime; a runtime listed several times is used by one thread at a time."""
        self.inputs, self.stop, self.inference, self.batch_size = inputs, stop, inference, batch_size
        self.next = self.next_output = start
        self.runtimes, self.ended, self.change = runtimes, False, threading.Condition()
        self.finished: dict[int, BatchOutput] = {}
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[BatchOutput]:
        """Yield every batch in order; the threads end with the iterator."""
        locks = {id(runtime): threading.Lock() for runtime in self.runtimes}
        threads = [
            threading.Thread(target=self.run_worker, args=(runtime, locks[id(runtime)]), daemon=True)
            for runtime in self.runtimes
        ]
        for thread in threads:
            thread.start()
        try:
            while self.next_output < self.stop:
                with self.change:
                    while self.next_output not in self.finished and self.failure is None:
                        self.change.wait()
                    if self.failure is not None:
                        raise self.failure
                    batch = self.finished.pop(self.next_output)
                    self.next_output += len(batch.names)
                    self.change.notify_all()
                yield batch
        finally:
            with self.change:
                self.ended = True
                self.change.notify_all()
            for thread in threads:
                thread.join()

    def run_worker(self, runtime: Runtime, lock: threading.Lock) -> None:
        """Process batches until there are no more."""
        try:
            while (span := self.take_range()) is not None:
                start, count = span
                while count:  # in several batches if the images are large
                    self.wait_for_space(start)
                    batch = self.process_batch(start, count, runtime, lock)
                    start, count = start + len(batch.names), count - len(batch.names)
                    with self.change:
                        self.finished[batch.start] = batch
                        self.change.notify_all()
        except ConsumerStopped:
            return
        except BaseException as error:  # raised again by the iterator
            with self.change:
                self.failure = self.failure or error
                self.change.notify_all()

    def take_range(self) -> tuple[int, int] | None:
        """Return start and length of the next batch; batches shrink at the end so that all threads finish together."""
        with self.change:
            while len(self.finished) >= MAX_PENDING_BATCHES * len(self.runtimes) and not self.ended:
                self.change.wait()
            remaining = self.stop - self.next
            if self.ended or self.failure is not None or remaining <= 0:
                return None
            count = min(self.batch_size.size, -(-remaining // len(self.runtimes)))
            start, self.next = self.next, self.next + count
            return start, count

    def wait_for_space(self, start: int) -> None:
        """Wait while the finished batches are too large; the batch that the iterator needs next never waits."""
        with self.change:
            while start != self.next_output and not self.ended and self.failure is None and self.is_full():
                self.change.wait()

    def is_full(self) -> bool:
        return sum(batch.nbytes for batch in self.finished.values()) >= MAX_PENDING_BYTES

    def process_batch(self, start: int, count: int, runtime: Runtime, lock: threading.Lock) -> BatchOutput:
        """Decode up to `count` images, fewer if they are large, and run the model on those that can be read."""
        names, errors, prepared, size = [], {}, {}, 0
        for index in range(count):
            if self.ended:
                raise ConsumerStopped
            if size >= MAX_BATCH_BYTES:
                break
            name = self.inputs.name(start + index)
            names.append(name)
            try:
                with name_image_errors(name), self.inputs.open(start + index) as image:
                    prepared[index] = self.inference.prepare(image)
                size += self.inference.count_bytes(prepared[index])
            except IMAGE_ERRORS as error:
                errors[index] = format_image_error(error, name)
        values: list[Any | None] = [None] * len(names)
        if prepared:
            with lock:
                start_time = time.perf_counter()
                outputs = list(self.inference.run(partial(self.run_model, runtime), list(prepared.values())))
                if not getattr(runtime, "is_checking", False):  # computed in two precisions
                    self.batch_size.record(len(prepared), time.perf_counter() - start_time)
            for index, output in zip(prepared, outputs, strict=True):
                values[index] = output
                if output is None:
                    errors[index] = NOT_FINITE
        nbytes = sum(self.inference.count_bytes(value) for value in values if value is not None)
        return BatchOutput(start, names, values, errors, nbytes)

    def run_model(self, runtime: Runtime, pixels: np.ndarray) -> np.ndarray:
        """Return the outputs of the model, in two halves if the batch does not fit into memory."""
        try:
            return runtime(pixels)
        except (MemoryError, RuntimeError) as error:
            if len(pixels) == 1 or not (isinstance(error, MemoryError) or "memory" in str(error).lower()):
                raise
        self.batch_size.record_out_of_memory(len(pixels))
        half = len(pixels) // 2
        return np.concatenate([self.run_model(runtime, pixels[:half]), self.run_model(runtime, pixels[half:])])


class ConsumerStopped(Exception):
    """Raised in a thread when the iterator has ended."""


def output_width(runtime: Runtime, preprocessing: Preprocessing) -> Callable[[], int]:
    """Return a function that measures the number of outputs with a random image."""
    return lambda: runtime(random_pixels(preprocessing, 1)).shape[1]

"""Pictures through a model on all cores: several lanes, each of which decodes a few pictures and then runs the model on them.

On a CPU every lane has the model for itself with one thread: no core waits for another, and pixels stay where they were made.
While one lane decodes, another computes; what they make comes out in the order of the pictures.

B pictures, C channels, H×W pixels, K values.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.data.decode import UNREADABLE
from vitrail.data.opening import named, reason
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.inputs import Inputs
from vitrail.deploy.pace import Pace
from vitrail.deploy.runtime import Runtime

AHEAD = 4  # batches a lane that wait for an earlier one
NOT_FINITE = "the model gives no finite numbers for it"


@dataclass(frozen=True)
class Made:
    """What a batch gave."""

    start: int
    names: list[str]
    values: list[np.ndarray | None]  # float32 [K] each
    errors: dict[int, str]  # by the place in the batch


class Lanes:
    """Threads that make batches, and the one that reads them in order."""

    def __init__(
        self,
        inputs: Inputs,
        start: int,
        stop: int,
        preprocessing: Preprocessing,
        runtimes: Sequence[Runtime],
        pace: Pace,
    ) -> None:
        """One lane for each runtime; a runtime that stands there more than once is used by one lane at a time."""
        self.inputs, self.stop, self.preprocessing, self.pace = inputs, stop, preprocessing, pace
        self.next = self.wanted = start
        self.made: dict[int, Made] = {}
        self.failure: BaseException | None = None
        self.ended = False
        self.change = threading.Condition()
        self.runtimes = runtimes

    def __iter__(self) -> Iterator[Made]:
        """Every batch in order. Whoever stops listening ends the lanes."""
        locks = {id(runtime): threading.Lock() for runtime in self.runtimes}
        lanes = [
            threading.Thread(target=self.lane, args=(runtime, locks[id(runtime)]), daemon=True)
            for runtime in self.runtimes
        ]
        for lane in lanes:
            lane.start()
        try:
            while self.wanted < self.stop:
                with self.change:
                    while self.wanted not in self.made and self.failure is None:
                        self.change.wait()
                    if self.failure is not None:
                        raise self.failure
                    found = self.made.pop(self.wanted)
                    self.wanted += len(found.names)
                    self.change.notify_all()
                yield found
        finally:
            with self.change:
                self.ended = True
                self.change.notify_all()
            for lane in lanes:
                lane.join()

    def lane(self, runtime: Runtime, lock: threading.Lock) -> None:
        """Batch after batch, until there are no more."""
        try:
            while (span := self.taken()) is not None:
                found = self.batch(*span, runtime, lock)
                with self.change:
                    self.made[found.start] = found
                    self.change.notify_all()
        except Stopped:
            return
        except BaseException as error:  # it is raised again where somebody listens
            with self.change:
                self.failure = self.failure or error
                self.change.notify_all()

    def taken(self) -> tuple[int, int] | None:
        """The next pictures: fewer towards the end, so that all lanes end at once."""
        with self.change:
            while len(self.made) >= AHEAD * len(self.runtimes) and not self.ended:
                self.change.wait()
            left = self.stop - self.next
            if self.ended or self.failure is not None or left <= 0:
                return None
            count = min(self.pace.size, -(-left // len(self.runtimes)))
            start, self.next = self.next, self.next + count
            return start, count

    def batch(self, start: int, count: int, runtime: Runtime, lock: threading.Lock) -> Made:
        """Some pictures decoded, and what the model says of those that could be."""
        shape = (self.preprocessing.channels, *self.preprocessing.size)
        pixels = np.empty((count, *shape), dtype=np.uint8)
        names, errors, read = [], {}, []
        for place in range(count):
            if self.ended:
                raise Stopped
            name = self.inputs.name(start + place)
            names.append(name)
            try:
                with named(name), self.inputs.open(start + place) as image:
                    pixels[len(read)] = self.preprocessing.pixels(image).numpy()
                read.append(place)
            except UNREADABLE as error:
                errors[place] = reason(error, name)
        values: list[np.ndarray | None] = [None] * count
        if read:
            with lock:
                began = time.perf_counter()
                answers = self.answers(runtime, pixels[: len(read)])
                self.pace.took(len(read), time.perf_counter() - began)
            for place, answer in zip(read, answers, strict=True):
                if np.isfinite(answer).all():
                    values[place] = answer
                else:
                    errors[place] = NOT_FINITE
        return Made(start, names, values, errors)

    def answers(self, runtime: Runtime, pixels: np.ndarray) -> np.ndarray:
        """What the model gives, in two halves where there is no memory for all at once."""
        try:
            return runtime(pixels)
        except (MemoryError, RuntimeError) as error:
            if len(pixels) == 1 or not (isinstance(error, MemoryError) or "memory" in str(error).lower()):
                raise
        self.pace.too_large(len(pixels))
        half = len(pixels) // 2
        return np.concatenate([self.answers(runtime, pixels[:half]), self.answers(runtime, pixels[half:])])


class Stopped(Exception):
    """Nobody listens any more."""


def width_of(runtime: Runtime, preprocessing: Preprocessing) -> Callable[[], int]:
    """Asks a model how many values it gives, with a black picture."""
    shape = (1, preprocessing.channels, *preprocessing.size)
    return lambda: runtime(np.zeros(shape, dtype=np.uint8)).shape[1]

"""How many pictures go through a model at once: found out while working, within what memory there is."""

import threading

FIRST = {"cpu": 4, "cuda": 32, "mps": 16}  # what a batch begins with: on a CPU, what its caches hold
MOST = {"cpu": 64, "cuda": 512, "mps": 128}
TRIES = 4  # batches of a size before it is judged
BETTER = 1.03  # what another size has to gain, so that noise moves nothing


class Pace:
    """A batch size that doubles or halves towards the quickest; any number of threads may ask and tell."""

    def __init__(self, first: int, most: int, fixed: bool = False) -> None:
        self.most = max(1, most)
        self.size = min(first, self.most)
        self.fixed = fixed
        self.seconds: dict[int, list[float]] = {}  # for a picture, by size: of the last few batches
        self.lock = threading.Lock()

    def took(self, size: int, seconds: float) -> None:
        """A batch of this size took so long; others than the size that is being tried tell nothing."""
        with self.lock:
            if self.fixed or size != self.size:
                return
            known = self.seconds.setdefault(size, [])
            known.append(seconds / size)
            if len(known) >= TRIES:
                self.size = self.better()

    def better(self) -> int:
        """The quickest size so far, or its neighbour that has not been tried."""
        quickest = self.size
        for size, known in self.seconds.items():
            if len(known) >= TRIES and min(known) * BETTER < min(self.seconds[quickest]):
                quickest = size
        for near in (2 * quickest, quickest // 2):
            if 1 <= near <= self.most and len(self.seconds.get(near, ())) < TRIES:
                return near
        return quickest

    def too_large(self, size: int) -> None:
        """There was no memory for so many."""
        with self.lock:
            self.most = max(1, size // 2)
            self.size = min(self.size, self.most)

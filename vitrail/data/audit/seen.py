"""What was seen of all pictures of a dataset, in a few arrays: a hundred bytes for each picture."""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from vitrail.data.audit.cache import Cache, Stamp
from vitrail.data.audit.crew import Task, cores, looks
from vitrail.data.audit.look import SIDE, Look
from vitrail.data.pictures import Dataset, Pictures, Store

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, how much there is
CHUNK = 32  # pictures for a process at a time
AT_ONCE = 2048  # pictures that the cache is asked for at a time


class Seen:
    """The looks of one split."""

    def __init__(self, pictures: Pictures) -> None:
        count = len(pictures)
        self.pictures = pictures
        self.digests = np.zeros((count, 2), dtype=np.uint64)
        self.known = np.zeros(count, dtype=bool)  # has a digest
        self.thumbs = np.zeros((count, SIDE * SIDE), dtype=np.uint8)
        self.decoded = np.zeros(count, dtype=bool)  # has a thumb
        self.sizes = np.zeros((count, 2), dtype=np.int32)  # width, height
        self.remarkable: dict[int, Look] = {}  # those with something to say about
        self.misnamed: dict[int, str] = {}  # the format of those whose name says another

    def add(self, index: int, name: str, seen: Look) -> None:
        if seen.digest:
            self.digests[index] = np.frombuffer(seen.digest, dtype=np.uint64)
            self.known[index] = True
        if seen.thumb:
            self.thumbs[index] = np.frombuffer(seen.thumb, dtype=np.uint8)
            self.decoded[index] = True
        self.sizes[index] = seen.width, seen.height
        if seen.problem or seen.turned or seen.animated or seen.mode not in ("RGB", "L"):
            self.remarkable[index] = seen
        if seen.misnamed(name):
            self.misnamed[index] = seen.format


def in_memory(store: Store) -> bool:
    """Whether pictures are slices of an array: published, decoded, nothing to be broken."""
    return isinstance(getattr(store, "pixels", None), np.ndarray)


def see(dataset: Dataset, cache: bool, workers: int | None, progress: Progress | None) -> dict[str, Seen]:
    """Looks at every picture that is not known from before."""
    seen = {split: Seen(pictures) for split, pictures in dataset.splits.items()}
    total = sum(map(len, dataset.splits.values()))
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        if progress:
            progress("checking", done, total)

    for each in seen.values():
        if in_memory(each.pictures.store):
            _hashed(each)
            tell(len(each.pictures))
    files = [each for each in seen.values() if not in_memory(each.pictures.store) and len(each.pictures)]
    if files:
        remembered = Cache(dataset.where) if cache else None
        try:
            _looked(files, dataset.where, remembered, workers, tell)
        finally:
            if remembered:
                remembered.close()
    return seen


def _hashed(each: Seen) -> None:
    """Rows of an array: the digest alone."""
    pixels: np.ndarray = getattr(each.pictures.store, "pixels")  # noqa: B009
    digests = b"".join(hashlib.blake2b(pixels[item].tobytes(), digest_size=16).digest() for item in each.pictures.items)
    each.digests[:] = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
    each.known[:] = True
    each.sizes[:] = pixels.shape[2], pixels.shape[1]


def _looked(
    files: list[Seen], root: str, remembered: Cache | None, workers: int | None, tell: Callable[[int], None]
) -> None:
    """Files and members of archives: from the cache, and what is not there by all cores."""
    asked: dict[tuple[int, int], tuple[str, Stamp | None]] = {}  # what is being looked at: its name and stamp

    def tasks() -> Iterator[Task]:
        for place, each in enumerate(files):
            unknown: list[int] = []
            for start in range(0, len(each.pictures), AT_ONCE):
                indices = range(start, min(start + AT_ONCE, len(each.pictures)))
                names = [each.pictures.name(index).removeprefix(root) for index in indices]
                stamps = [_stamp(each.pictures, index) if remembered else None for index in indices]
                found = remembered.get(names, stamps) if remembered else [None] * len(names)
                for index, name, stamp, known in zip(indices, names, stamps, found, strict=True):
                    if known is not None:
                        each.add(index, name, known)
                    else:
                        unknown.append(index)
                        asked[place, index] = name, stamp
                tell(sum(known is not None for known in found))
                while len(unknown) >= CHUNK:
                    yield place, unknown[:CHUNK]
                    unknown = unknown[CHUNK:]
            if unknown:
                yield place, unknown

    if workers is None:
        workers = min(cores(), -(-sum(len(each.pictures) for each in files) // CHUNK))
    for (place, indices), found in looks([each.pictures for each in files], tasks(), workers):
        names, stamps = zip(*(asked.pop((place, index)) for index in indices), strict=True)
        for index, name, one in zip(indices, names, found, strict=True):
            files[place].add(index, name, one)
        if remembered:  # what may be otherwise another time is looked at again
            kept = [each for each in zip(names, stamps, found, strict=True) if not each[2].passing]
            if kept:
                remembered.put(*zip(*kept, strict=True))
        tell(len(indices))


def _stamp(pictures: Pictures, index: int) -> Stamp | None:
    try:
        return pictures.store.stamp(int(pictures.items[index]))
    except OSError:  # a link to nowhere: why, the look at it says
        return None

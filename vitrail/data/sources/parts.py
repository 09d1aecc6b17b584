"""Train, validation, test: what the parts are called, and a stable division by the pictures' content where there are none.

A picture's side is decided by a hash of its bytes alone. So adding pictures moves no other, renaming moves none, and two
copies of one picture are never on both sides.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from vitrail.data.pictures import Pictures, Store

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, how much there is (0: not known)
Fractions = tuple[float, float, float]  # train, validation, test
# Whether a picture may have several labels; None: the data tells. Or it needs none: what has no labels is of one class.
Several = bool | Literal["unlabelled"] | None
UNLABELLED = "unlabelled"
PICTURE = "picture"  # the class of everything that has none

NAMES = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
WHOLE: Fractions = (0.8, 0.2, 0.0)  # of what has no parts
UNDIVIDED: Fractions = (1.0, 0.0, 0.0)  # as it lies there: nothing is held out
HELD_OUT: Fractions = (0.9, 0.1, 0.0)  # of a training set that is published with a test set alone
TOP = float(2**64)


def called(name: str) -> str | None:
    """train, validation or test, however it is spelt; None for something else."""
    return NAMES.get(name.strip().casefold())


def checked(fractions: Fractions) -> Fractions:
    """The fractions, if they are some."""
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6 or not fractions[0]:
        raise ValueError(
            f"fractions {fractions}: give train, validation and test, which add to 1, with something to train on"
        )
    return fractions


def completed(
    found: dict[str, Pictures],
    fractions: Fractions | None,
    otherwise: Fractions,
    notes: list[str],
    progress: Progress | None = None,
) -> dict[str, Pictures]:
    """The splits with one to validate on: where the data has none, it is divided off the training split by content."""
    if "train" not in found or "validation" in found:
        if fractions and fractions != UNDIVIDED:
            notes.append("the data has its own splits: the fractions asked for are not used")
        return found
    train, validation, test = checked(fractions or (otherwise if len(found) == 1 else HELD_OUT))
    if "test" in found:
        train, validation, test = train / (train + validation), validation / (train + validation), 0.0
    if not validation + test:
        return found
    notes.append(in_words((train, validation, test), "split" if len(found) == 1 else "training split divided"))
    return divided(found["train"], (train, validation, test), progress) | {
        k: v for k, v in found.items() if k == "test"
    }


def divided(pictures: Pictures, fractions: Fractions, progress: Progress | None = None) -> dict[str, Pictures]:
    """The parts of what has none, by content. Every part has all the classes."""
    sides = assign(hashes(pictures.store, pictures.items, progress), pictures.targets, len(pictures.classes), fractions)
    parts = {}
    for side, split in enumerate(("train", "validation", "test")):
        if fractions[side] or (sides == side).any():
            parts[split] = pictures.only(sides == side, split)
    return parts


def assign(hashed: np.ndarray, targets: np.ndarray, classes: int, fractions: Fractions) -> np.ndarray:
    """The side of each picture (0 train, 1 validation, 2 test) by its hash: small ones to validation, large ones to train.

    A class with two pictures or more has one to train on, and one to validate on: the largest or the smallest is moved there.
    With three it has one to test on, if there is a test split.
    """
    _, validation, test = checked(fractions)
    place = hashed / TOP
    sides = np.where(place < validation, 1, np.where(place < validation + test, 2, 0)).astype(np.int8)
    for members in by_class(hashed, targets, classes):
        if not len(members) or hashed[members[0]] == hashed[members[-1]]:
            continue
        if not (sides[members] == 0).any():
            sides[hashed == hashed[members[-1]]] = 0
        if validation and not (sides[members] == 1).any():
            sides[hashed == hashed[members[0]]] = 1
        if test and not (sides[members] == 2).any():
            training = members[sides[members] == 0]
            if len(training) and hashed[training[0]] != hashed[training[-1]]:
                sides[hashed == hashed[training[0]]] = 2
    return sides


def by_class(hashed: np.ndarray, targets: np.ndarray, classes: int) -> Iterator[np.ndarray]:
    """The pictures of each class, from the smallest hash to the largest."""
    if targets.ndim == 1:
        order = np.lexsort((hashed, targets))
        yield from np.split(order, np.searchsorted(targets[order], np.arange(1, classes)))
    else:
        order = np.argsort(hashed, kind="stable")
        yield from (order[targets[order, label] > 0] for label in range(classes))


def hashes(store: Store, items: np.ndarray, progress: Progress | None = None) -> np.ndarray:
    """The first 64 bits of a hash of each picture's bytes, [n] uint64, on all cores."""

    def part(chunk: np.ndarray) -> list[int]:
        return [content(store, int(item)) for item in chunk]

    size = max(1, min(256, len(items) // (4 * (os.cpu_count() or 1)) + 1))
    found = np.empty(len(items), dtype=np.uint64)
    pool = ThreadPoolExecutor(os.cpu_count())  # reading and hashing both happen outside Python's lock
    try:
        done = 0
        for values in pool.map(part, (items[start : start + size] for start in range(0, len(items), size))):
            found[done : done + len(values)] = values
            done += len(values)
            if progress:
                progress("splitting by content", done, len(items))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted reading does not wait for the rest
    return found


def content(store: Store, item: int) -> int:
    """A picture's bytes as a number of 64 bits; of one that cannot be read, its name: finding that out is the audit's work."""
    try:
        data = store.data(item)
    except (OSError, ValueError):
        data = store.name(item).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def in_words(fractions: Fractions, what: str = "split") -> str:
    """How it was divided, for a note."""
    shares = zip(("train", "validation", "test"), fractions, strict=True)
    return f"{what} by content: " + ", ".join(f"{100 * share:g} % {name}" for name, share in shares if share)

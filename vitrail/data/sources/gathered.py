"""Pictures that each come with a label, or labels, and perhaps a split: made into a dataset."""

from collections.abc import Sequence

import numpy as np

from vitrail.data.labels import normal, ordered
from vitrail.data.pictures import SPLITS, Dataset, Pictures, Store
from vitrail.data.sources import parts

Label = str | tuple[str, ...]


def gathered(
    where: str,
    kind: str,
    store: Store,
    labels: Sequence[Label],
    splits: Sequence[str | None],
    *,
    items: np.ndarray | None = None,
    order: Sequence[str] | None = None,
    shards: np.ndarray | None = None,
    otherwise: parts.Fractions = parts.WHOLE,
    fractions: parts.Fractions | None = None,
    progress: parts.Progress | None = None,
    notes: Sequence[str] = (),
    passed_over: Sequence[tuple[str, str]] = (),
) -> Dataset:
    """The dataset. Classes are in the given order where the data states one; else every split has those that occur in it.

    `items` are the places in the store, if not all are taken.
    """
    if not len(labels):
        raise ValueError(f"{where} holds no pictures")
    side = np.array([-1 if split is None else SPLITS.index(split) for split in splits], dtype=np.int8)
    if (side < 0).any() and (side >= 0).any():
        raise ValueError(f"{where} says for some pictures which split they are of, and not for others")
    found = {}
    for place, split in enumerate(SPLITS):
        chosen = np.flatnonzero(side == place) if (side >= 0).any() else np.arange(len(labels) if place == 0 else 0)
        if len(chosen):
            classes, targets = encoded([labels[index] for index in chosen.tolist()], order)
            found[split] = Pictures(
                store,
                chosen if items is None else items[chosen],
                targets,
                classes,
                split,
                None if shards is None else shards[chosen],
            )
    said = list(notes)
    found = parts.completed(found, fractions, otherwise, said, progress)
    return Dataset(where, kind, found, tuple(said), tuple(passed_over))


def encoded(labels: Sequence[Label], order: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes, and the labels as indices into them: [n], or [n, K] of 0 and 1 where a picture has several."""
    several = any(isinstance(label, tuple) for label in labels)
    spelt = {name: normal(name) for label in labels for name in ((label,) if isinstance(label, str) else label)}
    classes = tuple(map(normal, order)) if order else ordered(spelt.values())
    place = {name: index for index, name in enumerate(classes)}
    index = {name: place[said] for name, said in spelt.items()}
    if not several:
        return classes, np.array([index[label] for label in labels if isinstance(label, str)], dtype=np.int64)
    targets = np.zeros((len(labels), len(classes)), dtype=np.uint8)
    for row, label in enumerate(labels):
        for name in (label,) if isinstance(label, str) else label:
            targets[row, index[name]] = 1
    return classes, targets


def split_of(path: str) -> str | None:
    """The split that a file's name begins with, or its folder has for a name: `train-00000-of-00002`, `val/0.tar`."""
    folder, _, name = path.replace("\\", "/").rpartition("/")
    word = ""
    for letter in name:
        if not letter.isalpha():
            break
        word += letter
    return parts.called(word) or parts.called(folder.rpartition("/")[2])

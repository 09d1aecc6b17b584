"""What a user calls data, recognised: a name, a folder, a file, or a pattern of files."""

import os
from dataclasses import replace

import numpy as np

from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import cifar, digits, folders, idx, parts


def read(
    where: str | os.PathLike[str],
    *,
    fractions: parts.Fractions | None = None,
    several: bool | None = None,
    progress: parts.Progress | None = None,
) -> Dataset:
    """The pictures and labels that a name, a folder, a file or a pattern stands for.

    `fractions` (train, validation, test) divide what has no splits; without them 80, 20 and 0 %, and of a training set
    that comes with a test set alone 90 and 10 %. `several` says whether a picture may have several labels; without it, the
    data tells. `progress` is called with what is being done, how much is done, and how much there is (0: not known).
    """
    where = os.fspath(where)
    found = recognised(where, fractions, progress)
    if several and not all(pictures.several for pictures in found.splits.values()):
        found = replace(found, splits={name: one_hot(pictures) for name, pictures in found.splits.items()})
    return replace(found, where=where)


def recognised(where: str, fractions: parts.Fractions | None, progress: parts.Progress | None) -> Dataset:
    if where == "digits":
        return digits.read(where, fractions, progress)
    if os.path.isdir(where):
        names = os.listdir(where)
        if any(map(idx.NAME.fullmatch, names)):
            return idx.read(where, fractions, progress)
        if cifar.form_of(names):
            return cifar.read(where, fractions, progress)
        return folders.read(where, fractions, progress)
    if os.path.isfile(where):
        return cifar.read(where, fractions, progress)
    raise FileNotFoundError(f"{where}: neither a folder nor a file nor a name")


def one_hot(pictures: Pictures) -> Pictures:
    """The same with its one label of several possible."""
    targets = np.zeros((len(pictures), len(pictures.classes)), dtype=np.uint8)
    targets[np.arange(len(pictures)), pictures.targets] = 1
    return replace(pictures, targets=targets)

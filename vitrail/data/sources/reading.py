"""What a user calls data, recognised: a name, a folder, a file, or a pattern of files."""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import cifar, digits, folders, idx, manifest, names, parquet, parts, patterns, tar, vtab

TABLES = (".csv", ".tsv")
ARCHIVES = (".tar.gz", ".tgz")


def read(
    where: str | os.PathLike[str],
    *,
    fractions: parts.Fractions | None = None,
    several: parts.Several = None,
    progress: parts.Progress | None = None,
) -> Dataset:
    """The pictures and labels that a name, a folder, a file or a pattern stands for.

    `fractions` (train, validation, test) divide what has no splits; without them 80, 20 and 0 %, and of a training set
    that comes with a test set alone 90 and 10 %. `several` says whether a picture may have several labels; without it, the
    data tells; "unlabelled" takes what has no labels too, flat folders for example. `progress` is called with what is being
    done, how much is done, and how much there is (0: not known).
    """
    where = os.fspath(where)
    found = recognised(where, fractions, several, progress)
    if several is True and not all(pictures.several for pictures in found.splits.values()):
        found = replace(found, splits={name: one_hot(pictures) for name, pictures in found.splits.items()})
    return replace(found, where=where)


def recognised(
    where: str, fractions: parts.Fractions | None, several: parts.Several, progress: parts.Progress | None
) -> Dataset:
    """The dataset by its kind. A path that is there comes before a name."""
    path = os.path.expanduser(where)
    if os.path.isdir(path):
        found = in_folder(path, fractions, several, progress)
        here = f"the folder {where} here, not the data that is known by this name"
        return replace(found, notes=(*found.notes, here)) if where in names.NAMES else found
    if os.path.isfile(path):
        return in_files(where, [path], fractions, several, progress)
    if published := vtab.asked(path):
        return vtab.read(published[0], os.path.expanduser(published[1]), fractions, progress)
    if where == names.EMBEDDED:
        return digits.read(where, fractions, progress)
    if where in names.PUBLISHED:
        return recognised(names.fetched(where, progress), fractions, several, progress)
    if patterns.is_pattern(path):
        return in_files(where, patterns.expanded(path), fractions, several, progress)
    raise FileNotFoundError(names.no_such(where))


def in_folder(
    folder: str, fractions: parts.Fractions | None, several: parts.Several, progress: parts.Progress | None
) -> Dataset:
    """A folder by what lies in it."""
    inside = sorted(os.listdir(folder))
    if any(map(idx.NAME.fullmatch, inside)):
        return idx.read(folder, fractions, progress)
    if cifar.form_of(inside):
        return cifar.read(folder, fractions, progress)
    if found := manifest.beside(folder, inside):
        return in_files(folder, [found], fractions, several, progress)
    if tables := shards_in(folder, inside, ".parquet"):
        return in_files(folder, tables, fractions, several, progress)
    # A tar file beside folders is the archive that they were unpacked from; shards have no other folders beside them.
    shards = shards_in(folder, inside, ".tar")
    if shards and not class_folders(folder, inside, shards):
        return in_files(folder, shards, fractions, several, progress)
    return folders.read(folder, fractions, progress, labelled=several != parts.UNLABELLED)


def shards_in(folder: str, inside: Sequence[str], suffix: str) -> list[str]:
    """The shards in a folder, in its folder `data`, and in folders named like splits in either."""
    found: list[str] = []
    for name in inside:
        path = os.path.join(folder, name)
        if name.lower().endswith(suffix) and not folders.is_tools(name):
            found.append(path)
        elif (name == "data" or parts.called(name)) and os.path.isdir(path):
            below = sorted(os.listdir(path))
            if name != "data":
                below = [each for each in below if each.lower().endswith(suffix)]
            found += shards_in(path, below, suffix)
    return found


def class_folders(folder: str, inside: Sequence[str], shards: Sequence[str]) -> bool:
    """Whether there are folders in which no shard lies."""
    below = [os.path.join(folder, name) for name in inside if not folders.is_tools(name)]
    return any(os.path.isdir(path) and not any(each.startswith(path + os.sep) for each in shards) for path in below)


def in_files(
    where: str,
    files: Sequence[str],
    fractions: parts.Fractions | None,
    several: parts.Several,
    progress: parts.Progress | None,
) -> Dataset:
    """Files by their suffixes, which must be of one kind."""
    kinds = {kind(file) for file in files}
    if len(kinds) > 1:
        raise ValueError(f"{where} stands for files of different kinds ({', '.join(sorted(kinds))}): give one kind")
    match kinds.pop():
        case "parquet":
            return parquet.read(where, files, several, fractions, progress)
        case "tar":
            return tar.read(where, files, several, fractions, progress)
        case "csv" if len(files) == 1:
            return manifest.read_csv(files[0], several, fractions, progress)
        case "archive" if len(files) == 1:
            return cifar.read(files[0], fractions, progress)
        case "idx":
            raise ValueError(f"{files[0]} is one of four files: give the folder that they are in")
        case "csv" | "archive":
            raise ValueError(f"{where} stands for {len(files)} files: give one of them")
    raise ValueError(
        f"{files[0]} is nothing that data is read from: give a folder, a CSV or Parquet file, tar shards, "
        f"or a name ({', '.join(names.NAMES)})"
    )


def kind(file: str) -> str:
    """What a file's name says it is."""
    name = os.path.basename(file).lower()
    if name.endswith(ARCHIVES):
        return "archive"
    if name.endswith(TABLES):
        return "csv"
    if idx.NAME.fullmatch(name):
        return "idx"
    return os.path.splitext(name)[1].removeprefix(".") or "without a suffix"


def one_hot(pictures: Pictures) -> Pictures:
    """The same with its one label of several possible."""
    targets = np.zeros((len(pictures), len(pictures.classes)), dtype=np.uint8)
    targets[np.arange(len(pictures)), pictures.targets] = 1
    return replace(pictures, targets=targets)

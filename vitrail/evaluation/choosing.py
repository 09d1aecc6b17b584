"""Which pictures a model is judged on: the split, how many, and without those that cannot be read."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.audit import UNUSABLE, audit
from vitrail.data.audit.quarantine import read_quarantine, without
from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import names, parts, read
from vitrail.data.sources.folders import NoClassFoldersError
from vitrail.evaluation.filenames import read_by_name

SEVERAL = {"auto": None, "single": False, "multi": True}
WHOLE = "all"  # where the data has no splits


@dataclass(frozen=True)
class Wanted:
    """What a user says of the data."""

    where: str
    split: str | None = None  # train, validation, test; None for what is held out, or everything
    task: str = "auto"
    quarantine: str | None = None
    limit: int | None = None
    label_from: str | None = None


@dataclass(frozen=True)
class Chosen:
    """The pictures, and what was left out on the way to them."""

    where: str
    kind: str
    split: str  # train, validation, test, or all
    pictures: Pictures
    left_out: dict[str, str]  # path and reason
    notes: tuple[str, ...]

    @property
    def word(self) -> str:
        """What to call its pictures: test pictures, evaluated pictures."""
        return "evaluated" if self.split == WHOLE else self.split


def choose(
    wanted: Wanted,
    trained: Mapping[str, Mapping[str, Any] | None] | None = None,
    progress: parts.Progress | None = None,
    fit: Callable[[Pictures], object] | None = None,
) -> Chosen:
    """The pictures that are asked for. `trained` is what each model, by name, tells of the data it was trained on: that is
    divided as it was then.

    `fit` may refuse them, before every one of them is looked at.
    """
    if wanted.limit is not None and wanted.limit < 1:
        raise ValueError(f"--limit {wanted.limit}: at least 1 picture")
    known = {name: data for name, data in (trained or {}).items() if data and same_place(data, wanted.where)}
    dataset = found(wanted, next(iter(known.values()), None), progress)
    notes = list(dataset.notes)
    split, pictures = picked(dataset, wanted.split)
    notes += flattered(known, wanted.where, split)
    if wanted.limit is not None and wanted.limit < len(pictures):
        places = np.linspace(0, len(pictures) - 1, wanted.limit).round().astype(np.int64)
        notes.append(f"{wanted.limit:,} of {len(pictures):,} pictures, evenly spread over their order")
        pictures = pictures.only(places)
    if fit is not None:
        fit(pictures)
    return readable(wanted, replace(dataset, splits={pictures.split: pictures}), split, notes, progress)


def found(wanted: Wanted, trained: Mapping[str, Any] | None, progress: parts.Progress | None) -> Dataset:
    """The data as it lies there; divided as for training only where a split is asked for that it may not have."""
    if wanted.label_from is not None:
        return read_by_name(wanted.where, wanted.label_from, progress)
    embedded = wanted.where == names.EMBEDDED and not os.path.exists(wanted.where)
    fractions = parts.UNDIVIDED
    if wanted.split is not None or embedded:
        told = (trained or {}).get("fractions")
        fractions = None if told is None else (float(told[0]), float(told[1]), float(told[2]))
    try:
        return read(wanted.where, fractions=fractions, several=SEVERAL[wanted.task], progress=progress)
    except NoClassFoldersError as error:
        raise ValueError(f"{error}; or --label-from '^(.+?)_' to find it in the files' names") from None


def picked(dataset: Dataset, asked: str | None) -> tuple[str, Pictures]:
    """The split's name and its pictures: test before validation before everything."""
    splits = {name: pictures for name, pictures in dataset.splits.items() if len(pictures)}
    if asked is not None:
        name = parts.called(asked)
        if name is None or name not in splits:
            raise ValueError(f"{dataset.where} has no {asked} split: it has {', '.join(splits)}")
        return name, splits[name]
    for name in ("test", "validation"):
        if name in splits:
            return name, splits[name]
    return WHOLE, splits["train"]


def readable(wanted: Wanted, dataset: Dataset, split: str, notes: list[str], progress: parts.Progress | None) -> Chosen:
    """Without pictures that cannot be read or that a list names, each with the reason."""
    checked = audit(dataset, progress=progress, near=None)
    left_out = {each.path: each.detail for each in checked.of(UNUSABLE)}
    clean = checked.clean()
    if wanted.quarantine:
        clean, listed = without(clean, read_quarantine(Path(wanted.quarantine)))
        left_out |= dict.fromkeys(listed, f"named in {wanted.quarantine}")
    (pictures,) = clean.splits.values()
    if not len(pictures):
        path, why = next(iter(left_out.items()))
        raise ValueError(f"none of the {len(left_out):,} pictures of {wanted.where} can be used: {path}: {why}")
    return Chosen(wanted.where, dataset.kind, split, pictures, left_out, tuple(notes))


def flattered(known: Mapping[str, Mapping[str, Any]], where: str, split: str) -> Iterator[str]:
    """What is to be said of models that were trained on this data."""
    divided = [data.get("fractions") for data in known.values()]
    for (name, _), fractions in zip(known.items(), divided, strict=True):
        if split in ("train", WHOLE):
            better = "" if split == "train" else ": --split validation takes those it was not trained on"
            yield f"{name} was trained on pictures of {where}, so these numbers flatter it{better}"
        elif fractions != divided[0]:
            yield f"{name} was trained on {where} divided otherwise: it may have seen some of these pictures"


def same_place(data: Mapping[str, Any], where: str) -> bool:
    """Whether this is the data of a training: by the place that its run wrote down, else by what was typed."""
    theirs = data.get("path") or data.get("where")
    if not isinstance(theirs, str):
        return False
    ours, theirs = (os.path.realpath(os.path.expanduser(path)) for path in (where, theirs))
    return ours == theirs

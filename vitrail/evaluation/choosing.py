"""Which pictures a model is judged on: the split, how many, and without those that cannot be read."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.audit import UNUSABLE, audit
from vitrail.data.audit.quarantine import read_quarantine, without
from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import names, parts, read
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
    recipe: Mapping[str, Any] | None = None,
    progress: parts.Progress | None = None,
    fit: Callable[[Pictures], object] | None = None,
) -> Chosen:
    """The pictures that are asked for. `recipe` is the model's own: data that it was trained on is divided as it was then.

    `fit` may refuse them, before every one of them is looked at.
    """
    if wanted.limit is not None and wanted.limit < 1:
        raise ValueError(f"--limit {wanted.limit}: at least 1 picture")
    trained = trained_on(recipe, wanted.where)
    dataset = found(wanted, trained, progress)
    notes = list(dataset.notes)
    split, pictures = picked(dataset, wanted.split)
    if trained is not None and split in ("train", WHOLE):
        better = "" if split == "train" else ": --split validation takes those it was not trained on"
        notes.append(f"the model was trained on pictures of {wanted.where}, so these numbers flatter it{better}")
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
    except ValueError as error:
        if "no class folders" in str(error):
            raise ValueError(f"{error}; or --label-from '^(.+?)_' to find it in the files' names") from None
        raise


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


def trained_on(recipe: Mapping[str, Any] | None, where: str) -> Mapping[str, Any] | None:
    """What a model's recipe says of this data, if it was trained on it."""
    data = (recipe or {}).get("data")
    if not isinstance(data, dict) or not isinstance(data.get("where"), str):
        return None
    ours, theirs = (os.path.realpath(os.path.expanduser(path)) for path in (where, data["where"]))
    return data if ours == theirs else None

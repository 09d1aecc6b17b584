"""Select the images of an evaluation: split, limit, and without unreadable images."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.audit import UNUSABLE_KINDS, audit_dataset, exclude_images, read_quarantine
from vitrail.data.dataset import Dataset, Images
from vitrail.data.sources import downloads, load_dataset
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FolderWalker, NoClassFoldersError, printable_path
from vitrail.data.sources.manifest import build_dataset
from vitrail.utils.progress import ProgressCallback

TrainingData = Mapping[str, Any]  # `data` of a model's recipe
TASKS = {"auto": None, "single": False, "multi": True}
WHOLE_SPLIT = "all"  # if the data has no splits


def read_labels_from_names(folder: str, pattern: str, progress: ProgressCallback | None = None) -> Dataset:
    """Read all images below a folder; the class is the first group (or the match) of a pattern in the file name."""
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"label_from='{pattern}' is not a regular expression: {error}") from None
    path = os.path.expanduser(folder)
    if not os.path.isdir(path):
        raise ValueError(f"label_from= needs a folder of images, got {folder}")
    walk = FolderWalker(progress=progress)
    walk.add_tree(path, set())
    store, labels = walk.files, []
    for item in range(len(store)):
        name = os.path.basename(store.path(item))
        match = regex.search(name)
        label = (match[1] if regex.groups else match[0]) if match else None
        if not label or not label.strip() or printable_path(label) != label:
            raise ValueError(f"label_from='{pattern}' matches no class in {store.name(item)}: change the pattern")
        labels.append(label)
    notes, splits = (f"classes are matches of '{pattern}' in file names",), [None] * len(labels)
    options = parts.ReadOptions(parts.TRAIN_ONLY_FRACTIONS)
    return build_dataset(folder, "file names", store, labels, splits, options, notes=notes, skipped=walk.skipped)


@dataclass(frozen=True)
class EvaluationData:
    """Data of an evaluation, as requested."""

    where: Any  # a path, a name, or a Python object
    split: str | None = None  # train, validation, test; None: held-out data, or everything
    task: str = "auto"
    quarantine: str | None = None
    limit: int | None = None
    label_from: str | None = None

    @property
    def source(self) -> str:
        """Return the path or the name of the data; of a Python object that of its type."""
        where = self.where
        return where if isinstance(where, str) else where.source if isinstance(where, Dataset) else str(where)


@dataclass(frozen=True)
class SelectedData:
    """The selected images, and those that were skipped."""

    where: str
    kind: str
    split: str  # train, validation, test, or all
    images: Images
    skipped: dict[str, str]  # path and reason
    notes: tuple[str, ...]

    @property
    def split_label(self) -> str:
        """Return the adjective of its images: test, validation, evaluated."""
        return "evaluated" if self.split == WHOLE_SPLIT else self.split


def select_images(
    request: EvaluationData,
    trained: Mapping[str, TrainingData | None] | None = None,
    progress: ProgressCallback | None = None,
    check: Callable[[Images], object] | None = None,
) -> SelectedData:
    """Return the requested images.

    `trained` maps model names to their training data: if it is the same data, it is split as for training. `check` may raise
    an error for the images before all of them are read.
    """
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit= must be >= 1, got {request.limit}")
    if isinstance(request.where, os.PathLike):
        request = replace(request, where=os.fspath(request.where))
    elif not isinstance(request.where, str):  # a Python object, read once and split below
        options = {"multi_label": TASKS[request.task], "progress": progress}
        whole = load_dataset(request.where, fractions=parts.TRAIN_ONLY_FRACTIONS, **options)
        request = replace(request, where=whole)
    known = {name: data for name, data in (trained or {}).items() if data and is_same_data(data, request.where)}
    dataset = read_dataset(request, next(iter(known.values()), None), progress)
    notes = list(dataset.notes)
    split, images = select_split(dataset, request.split)
    notes += warn_trained_on(known, request.source, split)
    if request.limit is not None and request.limit < len(images):
        indices = np.linspace(0, len(images) - 1, request.limit).round().astype(np.int64)
        notes.append(f"{request.limit:,} of {len(images):,} images, evenly spaced")
        images = images.select(indices)
    if check is not None:
        check(images)
    return drop_unreadable(request, replace(dataset, splits={images.split: images}), split, notes, progress)


def read_dataset(request: EvaluationData, trained: TrainingData | None, progress: ProgressCallback | None) -> Dataset:
    """Read the dataset; split it as for training only if a split is requested."""
    if request.label_from is not None:
        return read_labels_from_names(request.where, request.label_from, progress)
    embedded = request.source == downloads.BUILTIN and not os.path.exists(request.where)
    fractions = parts.TRAIN_ONLY_FRACTIONS
    if request.split is not None or embedded:
        known = (trained or {}).get("fractions")
        fractions = None if known is None else (float(known[0]), float(known[1]), float(known[2]))
    try:
        return load_dataset(request.where, fractions=fractions, multi_label=TASKS[request.task], progress=progress)
    except NoClassFoldersError as error:
        raise ValueError(f"{error}; or label_from='^(.+?)_' to read it from file names") from None


def select_split(dataset: Dataset, requested: str | None) -> tuple[str, Images]:
    """Return the name and images of the requested split; by default test, else validation, else everything."""
    splits = {name: images for name, images in dataset.splits.items() if len(images)}
    if requested is not None:
        name = parts.parse_split_name(requested)
        if name is None or name not in splits:
            raise ValueError(f"{dataset.source} has no {requested} split: it has {', '.join(splits)}")
        return name, splits[name]
    for name in ("test", "validation"):
        if name in splits:
            return name, splits[name]
    return WHOLE_SPLIT, splits["train"]


def drop_unreadable(
    request: EvaluationData, dataset: Dataset, split: str, notes: list[str], progress: ProgressCallback | None
) -> SelectedData:
    """Drop unreadable and quarantined images, with a reason for each."""
    checked = audit_dataset(dataset, progress=progress, max_hash_distance=None)
    skipped = {finding.path: finding.detail for finding in checked.select_findings(UNUSABLE_KINDS)}
    clean = checked.clean_dataset()
    if request.quarantine:
        clean, listed = exclude_images(clean, read_quarantine(Path(request.quarantine)))
        skipped |= dict.fromkeys(listed, f"listed in {request.quarantine}")
    (images,) = clean.splits.values()
    if not len(images):
        path, reason = next(iter(skipped.items()))
        raise ValueError(f"none of the {len(skipped):,} images of {request.source} can be used: {path}: {reason}")
    return SelectedData(request.source, dataset.kind, split, images, skipped, tuple(notes))


def warn_trained_on(known: Mapping[str, TrainingData], where: str, split: str) -> Iterator[str]:
    """Yield warnings about models trained on this data."""
    divided = [data.get("fractions") for data in known.values()]
    for (name, _), fractions in zip(known.items(), divided, strict=True):
        if split in ("train", WHOLE_SPLIT):
            hint = "" if split == "train" else ": use split='validation' for held-out images"
            yield f"{name} was trained on images of {where}, so its metrics are too optimistic{hint}"
        elif fractions != divided[0]:
            yield f"{name} was trained on another split of {where}: some of these images may be its training images"


def is_same_data(data: TrainingData, where: str | Dataset) -> bool:
    """Return True if a model was trained on this data, by the path or the fingerprint recorded in its run or its recipe."""
    if isinstance(where, Dataset):
        return where.fingerprint is not None and data.get("fingerprint") == where.fingerprint
    trained_on = data.get("path") or data.get("where")
    if not isinstance(trained_on, str):
        return False
    first, second = (os.path.realpath(os.path.expanduser(path)) for path in (where, trained_on))
    return first == second

"""Select the images of an evaluation: split, limit, and without unreadable images."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.audit import UNUSABLE_KINDS, audit_dataset, exclude_images, read_quarantine
from vitrail.data.dataset import IGNORED, Dataset, Images
from vitrail.data.sources import downloads, load_dataset
from vitrail.data.sources import splits as parts
from vitrail.data.sources.detect import resolve_source
from vitrail.data.sources.objects import PREFIX
from vitrail.data.sources.tables import HUB_PREFIX
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.training.recipe import Data
from vitrail.training.runs.prepare import prepare_data
from vitrail.utils.json import dataclass_from_json
from vitrail.utils.progress import ProgressCallback

TrainingData = Mapping[str, Any]  # `data` of a model's recipe
TASKS = {"auto": None, "single": False, "multi": True}
WHOLE_SPLIT = "all"  # if the data has no splits


@dataclass(frozen=True)
class EvaluationData:
    """Data of an evaluation, as requested."""

    where: Any  # a path, a name, or a Python object; None: the data that the model was trained on
    split: str | None = None  # train, validation, test; None: held-out data, or everything
    task: str = "auto"
    quarantine: str | None = None
    limit: int | None = None
    label_from: str | None = None
    names: str | None = None  # file of readable class names, or "imagenet"
    ignore: tuple[int, ...] | None = (
        None  # stored values of masks that do not count; None: those of the models' training
    )
    targets: tuple[str, ...] | None = None  # columns of numbers: those that the model predicts


@dataclass(frozen=True)
class SelectedData:
    """The selected images, and those that were skipped."""

    where: str
    kind: str
    split: str  # train, validation, test, or all
    images: Images
    skipped: dict[str, str]  # path and reason
    notes: tuple[str, ...]
    mask_digests: Mapping[int, np.ndarray] = field(default_factory=dict)  # those of the audit

    @property
    def split_label(self) -> str:
        """Return the adjective of its images: test, validation, evaluated."""
        return "evaluated" if self.split == WHOLE_SPLIT else self.split


def select_images(
    request: EvaluationData,
    trained: Mapping[str, TrainingData | None] | None = None,
    progress: ProgressCallback | None = None,
    check: Callable[[Images], object] | None = None,
    models: Sequence[DeployedModel] = (),
) -> SelectedData:
    """Return the requested images.

    `trained` maps model names to their training data: if it is the same data, it is split as for training. `check` may raise
    an error for the images before all of them are read. Of masks, the values that a training of `models` ignored are ignored
    here too, unless the request states others.
    """
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit= must be >= 1, got {request.limit}")
    if request.where is None:
        return select_own_images(request, next(iter((trained or {}).items())), progress, check)
    default = sorted({value for model in models for value in model.contract.ignore or ()})
    ignore = request.ignore
    if isinstance(request.where, os.PathLike):
        request = replace(request, where=os.fspath(request.where))
    elif not isinstance(request.where, str):  # a Python object, read once and split below
        options = {"multi_label": TASKS[request.task], "progress": progress, "label_from": request.label_from}
        options |= {"ignore": request.ignore, "default_ignore": default, "targets": request.targets}
        whole = load_dataset(request.where, fractions=parts.TRAIN_ONLY_FRACTIONS, **options)
        request = replace(request, where=whole, label_from=None, ignore=None, targets=None)
    known = {name: data for name, data in (trained or {}).items() if data and is_same_data(data, request.where)}
    dataset = read_dataset(request, request.where, next(iter(known.values()), None), progress, default)
    notes = list(dataset.notes)
    split, images = select_split(dataset, request.split)
    if ignore is None and images.masks is not None:
        notes += describe_ignored(images, models)
    notes += warn_trained_on(known, dataset.source, split)
    images = limit_images(images, request.limit, notes)
    if check is not None:
        check(images)
    return drop_unreadable(request, replace(dataset, splits={images.split: images}), split, notes, progress)


def describe_ignored(images: Images, models: Sequence[DeployedModel]) -> Iterator[str]:
    """Yield a note for each model whose training ignored values of masks that are ignored here for that reason, besides 255.

    Raise ValueError if such a value is a class of a model in this data: its classes have other values than those of training.
    """
    named = {value: name for value, name in images.ignored if name}
    for model in models:
        ignored = model.contract.ignore or ()
        for value in ignored:
            if lost := [other.name for other in models if named.get(value) in (other.class_names or ())]:
                about = f"the value {value} of the masks is {named[value]!r}, a class of {lost[0]}"
                raise ValueError(f"{about}, and the training of {model.name} ignored it: give ignore=")
        if values := [str(value) for value in ignored if value != IGNORED]:
            plural = "s" * (len(values) > 1)
            shown = f"the value{plural} {', '.join(values)} of the masks"
            yield f"{shown} {'are' if plural else 'is'} ignored, as in the training of {model.name}: ignore= changes that"


def limit_images(images: Images, limit: int | None, notes: list[str]) -> Images:
    """Return at most `limit` images, evenly spaced, and note it."""
    if limit is None or limit >= len(images):
        return images
    notes.append(f"{limit:,} of {len(images):,} {images.media}s, evenly spaced")
    return images.select(np.linspace(0, len(images) - 1, limit).round().astype(np.int64))


def select_own_images(
    request: EvaluationData,
    trained: tuple[str, TrainingData | None],
    progress: ProgressCallback | None,
    check: Callable[[Images], object] | None,
) -> SelectedData:
    """Return the test images, else the validation images, of the data that a model was trained on, split as for training."""
    data = parse_own_data(*trained)
    changes = {"quarantine": request.quarantine, "label_from": request.label_from, "names": request.names}
    changes |= {"ignore": request.ignore, "task": None if request.task == "auto" else request.task}
    changes |= {"targets": request.targets}
    data = replace(data, **{name: value for name, value in changes.items() if value is not None})
    prepared = prepare_data(data, progress)
    split, images = select_split(replace(prepared.dataset, splits=prepared.splits), request.split)
    notes = [f"data and splits of the training run of {trained[0]}", *prepared.dataset.notes, *prepared.warnings]
    if split == "train":
        notes.append(f"{trained[0]} was trained on these {images.media}s, so its metrics are too optimistic")
    images = limit_images(images, request.limit, notes)
    if check is not None:
        check(images)
    skipped, digests = dict(prepared.skipped), prepared.audit.mask_digests
    return SelectedData(data.where, prepared.dataset.kind, split, images, skipped, tuple(notes), digests)


def parse_own_data(name: str, trained: TrainingData | None) -> Data:
    """Return the data that a model was trained on, at the path where it was then, or as it was given."""
    if not trained or not isinstance(trained.get("where"), str):
        raise ValueError(f"{name} does not record the data it was trained on: give DATA")
    found = {key: value for key, value in trained.items() if key not in ("path", "fingerprint")}
    data = dataclass_from_json(found, Data, f"{name}: recipe.data")
    if data.where.startswith(PREFIX):
        raise ValueError(f"{name} was trained on {data.where}: give that Python object, or other DATA")
    for where in (trained.get("path"), data.where):
        known = isinstance(where, str) and (where in downloads.DATASET_NAMES or where.startswith(HUB_PREFIX))
        if isinstance(where, str) and (known or resolve_source(where)):
            return replace(data, where=where)
    raise ValueError(f"the data of {name} is not at {trained.get('path') or data.where} any more: give DATA")


def read_dataset(
    request: EvaluationData,
    where: str | Dataset,
    trained: TrainingData | None,
    progress: ProgressCallback | None,
    ignore: Sequence[int] = (),
) -> Dataset:
    """Read the dataset with the labels of training; split it as for training only if a split is requested.

    `ignore` are the values of masks to ignore if the request states none.
    """
    embedded = where == downloads.BUILTIN and not os.path.exists(downloads.BUILTIN)
    fractions = parts.TRAIN_ONLY_FRACTIONS
    if request.split is not None or embedded:
        known = (trained or {}).get("fractions")
        fractions = None if known is None else (float(known[0]), float(known[1]), float(known[2]))
    given = {"label_from": request.label_from, "names": request.names, "targets": request.targets}
    known = {} if isinstance(where, Dataset) else trained or {}
    labels = {name: known.get(name) if value is None else value for name, value in given.items()}
    task = TASKS[request.task]
    ignored = {"ignore": request.ignore, "default_ignore": ignore}
    return load_dataset(where, fractions=fractions, multi_label=task, progress=progress, **labels, **ignored)


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
        raise ValueError(
            f"none of the {len(skipped):,} {images.media}s of {dataset.source} can be used: {path}: {reason}"
        )
    return SelectedData(dataset.source, dataset.kind, split, images, skipped, tuple(notes), checked.mask_digests)


def warn_trained_on(known: Mapping[str, TrainingData], where: str, split: str) -> Iterator[str]:
    """Yield warnings about models trained on this data."""
    divided = [data.get("fractions") for data in known.values()]
    for (name, _), fractions in zip(known.items(), divided, strict=True):
        if split in ("train", WHOLE_SPLIT):
            hint = "" if split == "train" else ": use split='validation' for held-out data"
            yield f"{name} was trained on {where}, so its metrics are too optimistic{hint}"
        elif fractions != divided[0]:
            yield f"{name} was trained on another split of {where}: it may have been trained on some of this one"


def is_same_data(data: TrainingData, where: str | Dataset) -> bool:
    """Return True if a model was trained on this data, by the path or the fingerprint recorded in its run or its recipe."""
    if isinstance(where, Dataset):
        return where.fingerprint is not None and data.get("fingerprint") == where.fingerprint
    trained_on = data.get("path") or data.get("where")
    if not isinstance(trained_on, str):
        return False
    first, second = (resolve_source(path) or path for path in (where, trained_on))
    return first == second

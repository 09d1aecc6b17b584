"""The images and labels of a dataset as one list, the images of an unlabelled folder, and their features.

n images, D features, K classes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitrail.data.audit.duplicates import find_near_pairs, group_identical
from vitrail.data.audit.scan import scan_dataset
from vitrail.data.dataset import Dataset, Images
from vitrail.data.labels import LabelMap, sort_class_names
from vitrail.data.sources import load_dataset
from vitrail.data.sources.joined import join_images
from vitrail.data.sources.splits import TRAIN_ONLY_FRACTIONS, Fractions
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.labelling.folds import join_groups
from vitrail.tasks import task_of
from vitrail.training.features import extract_features
from vitrail.training.runs.pseudo_labels import load_unlabelled
from vitrail.utils.devices import pick_device
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class Compute:
    """Options of computing features: device, processes that decode, cache, and how the checkpoint is read."""

    device: str = "auto"
    workers: int | None = None
    cache: bool = True
    size: tuple[int, int] | None = None
    assume: Mapping[str, Any] = field(default_factory=dict)
    take: str | None = None


@dataclass(frozen=True)
class LabelledImages:
    """The images of all splits in one list, with classes in common."""

    dataset: Dataset
    images: Images  # targets are indices of the classes
    splits: np.ndarray  # [n]: name of the split of each image

    @property
    def classes(self) -> tuple[str, ...]:
        return self.images.classes

    def paths(self) -> list[str]:
        """Return the path of every image."""
        return [self.images.name(index) for index in range(len(self.images))]


def load_labelled(
    source: Any,
    *,
    label_from: str | None = None,
    fractions: Fractions | None = TRAIN_ONLY_FRACTIONS,
    progress: ProgressCallback | None = None,
) -> LabelledImages:
    """Read files of images with one label each. The default `fractions` divide nothing."""
    dataset = load_dataset(source, label_from=label_from, fractions=fractions, progress=progress)
    for images in dataset.splits.values():
        check_images(images, dataset.source)
        if task_of(images).name != "single":
            raise ValueError(f"{dataset.source} has {task_of(images).title}: labelling needs one class per image")
    names = LabelMap(sort_class_names(name for images in dataset.splits.values() for name in images.classes))
    mapped = [names.apply(images, allow_mismatch=True).images for images in dataset.splits.values()]
    joined = mapped[0]
    for images in mapped[1:]:
        joined = append_images(joined, images)
    return LabelledImages(dataset, joined, np.repeat(list(dataset.splits), [len(images) for images in mapped]))


def require_classes(labelled: LabelledImages) -> None:
    """Raise ValueError unless there are two classes or more."""
    if len(labelled.classes) < 2:
        only = "".join(labelled.classes)
        raise ValueError(f"{labelled.dataset.source} has only one class, {only!r}: give images of two or more")


def append_images(first: Images, second: Images) -> Images:
    """Return two splits as one list."""
    if first.store is not second.store:
        return join_images(first, second)
    items, targets = (np.concatenate((getattr(first, name), getattr(second, name))) for name in ("items", "targets"))
    return replace(first, items=items, targets=targets, shards=None)


def check_images(images: Images, source: str) -> None:
    """Raise ValueError unless these are files of images."""
    if images.media != "image":
        raise ValueError(f"{source} has {images.media}s: labelling is for images")
    if not has_files(images):
        raise ValueError(f"{source} has images inside other files: labelling needs a folder or a CSV of image files")


def has_files(images: Images) -> bool:
    """Return True if each image is a file, which may be missing."""
    try:
        return not len(images) or images.store.stamp(int(images.items[0])) is not None
    except OSError:  # a missing file is reported when it is read
        return True


def load_unlabelled_images(
    source: str, labelled: LabelledImages, progress: ProgressCallback | None = None
) -> tuple[Images, int]:
    """Return the images of a folder that are not among the labelled ones, and the number of those that are."""
    images = load_unlabelled(source, progress)
    check_images(images, source)
    known = {os.path.realpath(path) for path in labelled.paths()}
    fresh = np.array([os.path.realpath(images.name(index)) not in known for index in range(len(images))], dtype=bool)
    if not fresh.any():
        raise ValueError(f"all {len(images):,} images of unlabelled={source!r} are labelled already: give others")
    return images.select(fresh), int((~fresh).sum())


def group_duplicates(dataset: Dataset, cache: bool = True, progress: ProgressCallback | None = None) -> np.ndarray:
    """Return a number for each image of all splits, [n], that copies and near-duplicates share."""
    scans = list(scan_dataset(dataset, cache, None, progress).values())
    digests = np.concatenate([scan.digests for scan in scans])
    first = group_identical(digests)
    first = np.where(np.concatenate([scan.has_digest for scan in scans]), first, np.arange(len(first)))
    copies = np.stack((np.arange(len(first)), first), 1)
    near = find_near_pairs(np.concatenate([scan.thumbs for scan in scans]))
    return join_groups(len(first), np.concatenate((copies, near[:, :2])))


@dataclass(frozen=True)
class ReadFeatures:
    """Features, or logits, of the images that can be read."""

    values: np.ndarray  # float32 [n, D]
    indices: np.ndarray  # int64 [n], in the images
    unreadable: dict[str, str]  # name and reason
    notes: tuple[str, ...] = ()


def open_features(where: str, compute: Compute) -> DeployedModel:
    """Open a model without its classifier."""
    options = {"size": compute.size, "assume": compute.assume, "take": compute.take}
    return open_checkpoint(where, pick_device(compute.device), output_kind="features", **options)


def compute_features(
    opened: DeployedModel, images: Images, compute: Compute, progress: ProgressCallback | None = None
) -> ReadFeatures:
    """Return the features of images, or the logits of a model that was opened for them; those in the cache are read."""
    if opened.model is None:
        raise ValueError(f"{opened.where} is an exported file: give the checkpoint")
    numbered = replace(images, targets=np.arange(len(images)))
    found = extract_features(
        opened.model,
        opened.contract.preprocessing,
        numbered,
        kind=opened.output_kind,
        device=pick_device(compute.device),
        workers=compute.workers,
        cache=compute.cache,
        progress=progress,
    )
    return ReadFeatures(found.values, found.targets, found.unreadable, found.notes)


def note_own_data(opened: DeployedModel, labelled: LabelledImages) -> tuple[str, ...]:
    """Return a note where a model was trained on these very labels, which it may have memorised."""
    recipe = opened.model.card.get("recipe") if opened.model is not None else None
    data = recipe.get("data") if isinstance(recipe, dict) else None
    trained = data.get("where") if isinstance(data, dict) else None
    if not isinstance(trained, str) or os.path.realpath(trained) != os.path.realpath(labelled.dataset.source):
        return ()
    return (f"{opened.name} was trained on {trained}: it may have memorised wrong labels, a public checkpoint has not",)

"""Preparation of data for training: reading, audit, label map, splits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from vitrail.data.audit import (
    UNUSABLE_KINDS,
    Audit,
    audit_dataset,
    exclude_images,
    read_quarantine,
    summarise_numbers,
)
from vitrail.data.clip import Clip
from vitrail.data.dataset import Dataset, Images
from vitrail.data.labels import LabelMap
from vitrail.data.remote.urls import refuse_credentials
from vitrail.data.sources import load_dataset
from vitrail.data.sources.splits import CAPTIONS, HOLDOUT_FRACTIONS, UNLABELLED, UNLABELLED_CLASS, Fractions
from vitrail.data.tokenizer import Tokenizer
from vitrail.data.video import Video, first_frame
from vitrail.tasks import task_of
from vitrail.training.recipe import Data, Facts
from vitrail.training.runs.pseudo_labels import add_pseudo_labels
from vitrail.utils.progress import ProgressCallback

SAMPLE_SIZE, VIDEO_SAMPLE_SIZE = 1024, 64  # images whose size and mode are measured; videos, also their length
MIN_UNLABELLED = 10  # images for pretraining, training and held-out together
GREY_MODES = ("1", "L", "LA", "I", "F")


@dataclass(frozen=True)
class Prepared:
    """Audited splits and their label map."""

    dataset: Dataset  # without unreadable images
    labels: LabelMap
    splits: dict[str, Images]  # targets are indices of the label map
    audit: Audit
    skipped: list[tuple[str, str]]  # path and reason
    warnings: list[str] = field(default_factory=list)
    tokenizer: Tokenizer | None = None  # of captions

    @property
    def train(self) -> Images:
        return self.splits["train"]

    @property
    def labelled(self) -> bool:
        """Return True if there is more than one class."""
        return len(self.labels) > 1

    def require_classes(self, purpose: str) -> None:
        """Raise ValueError if images have no classes of their own, but masks or numbers."""
        task = task_of(self.train)
        if not task.has_image_classes:
            raise ValueError(
                f"{purpose} needs classes of images, and {self.dataset.source} has {task.title}: use {task.alternative}"
            )

    def count_images(self, split: str) -> dict[str, int]:
        """Return the number of images of each class in a split; of masks, the images in which it occurs; none of numbers."""
        if (counts := self.audit.mask_counts.get(split)) is not None:
            found = dict(zip(counts.classes, counts.images.tolist(), strict=True))
            return {name: found.get(name, 0) for name in self.labels.names}
        return self.splits[split].class_counts

    def count_targets(self) -> np.ndarray:
        """Return the number of training targets of each class, [K]: images, or of masks pixels."""
        if (counts := self.audit.mask_counts.get("train")) is not None:
            found = dict(zip(counts.classes, counts.pixels.tolist(), strict=True))
            return np.array([found.get(name, 0) for name in self.labels.names])
        return self.train.count_classes()

    def measure_facts(self) -> Facts:
        """Return the properties that recipes adapt to."""
        if self.train.media == "sound":
            return self._measure_sounds()
        most = SAMPLE_SIZE if self.train.media == "image" else VIDEO_SAMPLE_SIZE
        sample = np.linspace(0, len(self.train) - 1, min(most, len(self.train))).round().astype(int)
        sizes, modes, numbers = [], [], summarise_numbers(self.train).values()
        lengths: list[int] = []
        rates: list[float] = []
        for index in sample:
            with self.train.open(int(index)) as opened:
                image = first_frame(opened)
                sizes.append((image.height, image.width))
                modes.append(image.mode)
                if isinstance(opened, Video):
                    lengths.append(len(opened))
                    rates += [] if opened.rate is None else [opened.rate]
        return Facts(
            images=len(self.train),
            classes=len(self.labels),
            several=self.train.is_multi_label,
            side=(int(median(h for h, _ in sizes)), int(median(w for _, w in sizes))),
            channels=1 if all(mode.split(";")[0] in GREY_MODES for mode in modes) else 3,
            several_sizes=len(set(sizes)) > 1,
            tokenizer=self.tokenizer,
            frames=int(median(lengths)) if lengths else None,
            rate=median(rates) if rates else None,
            target_mean=tuple(each.mean for each in numbers),
            target_std=tuple(each.std for each in numbers),
        )

    def _measure_sounds(self) -> Facts:
        """Return the properties of sounds: their lengths and rates are those of the audit."""
        sounds, numbers = self.audit.sounds["train"], summarise_numbers(self.train).values()
        rate = int(sounds.rates[1])
        return Facts(
            images=len(self.train),
            classes=len(self.labels),
            several=self.train.is_multi_label,
            side=(128, round(100 * sounds.usual_seconds)),
            channels=1,
            several_sizes=True,
            target_mean=tuple(each.mean for each in numbers),
            target_std=tuple(each.std for each in numbers),
            seconds=sounds.usual_seconds,
            sample_rate=rate,
        )


def prepare_data(
    data: Data,
    progress: ProgressCallback | None = None,
    cache: bool = True,
    source: Any = None,
    default_ignore: Sequence[int] = (),
) -> Prepared:
    """Read and audit a dataset; bad images are left out and listed, other problems are errors.

    `source` is the Python object that `data.where` names, if it is one. `default_ignore` are values of masks to ignore if the
    data has masks and states none.
    """
    # Pretraining holds out a few images for its signals.
    fractions = data.fractions or (HOLDOUT_FRACTIONS if data.task == "none" else None)
    prepared = audit_and_split(data, load_data(data, fractions, progress, source, default_ignore), progress, cache)
    if "validation" not in prepared.splits:
        remedy = "add images, or give one" if fractions is None or fractions[1] else "give fractions=(0.8, 0.2, 0)"
        raise ValueError(f"{data.where} has no images for a validation split: {remedy}")
    return prepared


def limit_per_class(images: Images, data: Data) -> Images:
    """Return at most `per_class` random images of each class, in order; a smaller draw is part of a larger one."""
    if data.per_class is None:
        return images
    if images.target_kind != "single":
        raise ValueError(f"{data.where}: per_class= needs one label per image")
    order = np.random.default_rng(data.drawn).permutation(len(images))
    mine = [order[images.targets[order] == label][: data.per_class] for label in np.unique(images.targets)]
    return images.select(np.sort(np.concatenate(mine)))


def select_classes(dataset: Dataset, data: Data) -> Dataset:
    """Return the dataset with the selected classes of the training split only."""
    if data.classes is None:
        return dataset
    if dataset["train"].target_kind != "single":
        raise ValueError(f"{data.where}: data.classes needs one label per image")
    first, step = data.classes
    kept = set(dataset["train"].classes[first::step])
    splits = {}
    for split, images in dataset.splits.items():
        names = tuple(name for name in images.classes if name in kept)
        index = np.array([names.index(name) if name in kept else -1 for name in images.classes])
        chosen = images.select(index[images.targets] >= 0)
        splits[split] = replace(chosen, targets=index[chosen.targets], classes=names)
    return replace(dataset, splits=splits)


def draw_examples(splits: dict[str, Images], data: Data) -> dict[str, Images]:
    """Return random training and validation images of any class, as in VTAB (800 and 200). With a test split, nothing is
    tuned any more, and training uses both."""
    if data.examples is None or "validation" not in splits:
        return splits
    rng = np.random.default_rng(data.drawn)
    train, held = (
        splits[split].select(np.sort(rng.permutation(len(splits[split]))[:count]))
        for split, count in zip(("train", "validation"), data.examples, strict=True)
    )
    return splits | {"train": concatenate_images(train, held) if data.test else train, "validation": held}


def concatenate_images(first: Images, second: Images) -> Images:
    """Return two parts of a dataset as one."""
    assert first.store is second.store, "splits of a dataset share one store"
    both = first.shards is not None and second.shards is not None
    return replace(
        first,
        items=np.concatenate((first.items, second.items)),
        targets=np.concatenate((first.targets, second.targets)),
        shards=np.concatenate((first.shards, second.shards)) if both else None,  # type: ignore[arg-type]
    )


def load_data(
    data: Data,
    fractions: Fractions | None,
    progress: ProgressCallback | None = None,
    source: Any = None,
    default_ignore: Sequence[int] = (),
) -> Dataset:
    """Read a dataset, split by these fractions where it has no splits."""
    several = {"auto": None, "single": False, "multi": True, "none": UNLABELLED, "captions": CAPTIONS}[data.task]
    labels = {"label_from": data.label_from, "names": data.names, "targets": data.targets}
    ignored = {"ignore": data.ignore, "default_ignore": default_ignore}
    if source is None:
        refuse_credentials(data.where)
    where = data.where if source is None else source
    return load_dataset(where, fractions=fractions, multi_label=several, progress=progress, **labels, **ignored)


def audit_and_split(
    data: Data, dataset: Dataset, progress: ProgressCallback | None = None, cache: bool = True
) -> Prepared:
    """Return the audited dataset without bad images, every split matched to the labels of the training split."""
    if "train" not in dataset.splits:
        raise ValueError(f"{data.where} has no training split: it has {', '.join(dataset.splits)}")
    # No video is too short here: the recipe chooses a clip that fits the lengths.
    checked = audit_dataset(dataset, cache=cache, progress=progress, clip=Clip(1, 1))
    clean = checked.clean_dataset()
    usable = sum(map(len, clean.splits.values()))
    if data.task == "none" and usable < MIN_UNLABELLED:
        raise ValueError(f"{data.where} has {usable} usable images: pretraining needs {MIN_UNLABELLED}")
    skipped = [(finding.path, finding.detail) for finding in checked.select_findings(UNUSABLE_KINDS)]
    warnings: list[str] = []
    if data.quarantine:
        clean, left_out = exclude_images(clean, read_quarantine(Path(data.quarantine)))
        skipped += [(name, f"listed in {data.quarantine}") for name in left_out]
    clean = select_classes(clean, data)
    unlabelled = data.task == "none"
    if unlabelled and len({images.classes for images in clean.splits.values()}) > 1:
        plain = {
            split: replace(images, targets=np.zeros(len(images), dtype=np.int64), classes=(UNLABELLED_CLASS,))
            for split, images in clean.splits.items()
        }
        note = "the splits do not have the same classes: labels are not used"
        clean = replace(clean, splits=plain, notes=(*clean.notes, note))
    if not len(clean["train"]) and skipped:
        path, detail = skipped[0]
        raise ValueError(
            f"no training image of {data.where} can be used; {len(skipped):,} are bad, first {path}: {detail}"
        )
    allow = data.allow_class_mismatch or unlabelled
    labels = LabelMap.from_images(clean["train"], allow_mismatch=allow)
    if len(labels) < task_of(clean["train"]).min_outputs and not unlabelled:
        raise ValueError(f"{data.where} has only one class, {labels.names[0]!r}: training needs two or more")
    splits = {}
    for split, images in clean.splits.items():
        if len(images):
            applied = labels.apply(images, allow_mismatch=allow)
            warnings += applied.warnings if not unlabelled else ()
            splits[split] = applied.images
    splits["train"] = limit_per_class(splits["train"], data)
    splits = draw_examples(splits, data)
    if data.unlabelled is not None and data.pseudo_labels is not None:
        splits["train"], note = add_pseudo_labels(splits["train"], data.unlabelled, Path(data.pseudo_labels))
        warnings.append(note)
    if not data.test:
        splits.pop("test", None)
    return Prepared(clean, labels, splits, checked, skipped, warnings)

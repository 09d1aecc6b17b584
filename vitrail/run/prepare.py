"""Data made ready for training: read, audited, its labels fixed and held against every split."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from vitrail.data.audit import UNUSABLE, Audit, audit
from vitrail.data.audit.quarantine import read_quarantine, without
from vitrail.data.labels import LabelMap
from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.sources import read
from vitrail.data.sources.parts import HELD_OUT, PICTURE, UNLABELLED, Fractions
from vitrail.recipe import Data, Facts

Progress = Callable[[str, int, int], None]
LOOKED_AT = 1024  # pictures whose size and mode stand for all
FEWEST = 10  # pictures to learn from without labels, and to watch
GREY = ("1", "L", "LA", "I", "F")


@dataclass(frozen=True)
class Prepared:
    """What a run is given to learn from and to be judged by."""

    dataset: Dataset  # without the pictures that cannot be read
    labels: LabelMap
    splits: dict[str, Pictures]  # their targets are the label map's indices
    audit: Audit
    skipped: list[tuple[str, str]]  # path and reason
    warnings: list[str] = field(default_factory=list)

    @property
    def train(self) -> Pictures:
        return self.splits["train"]

    @property
    def labelled(self) -> bool:
        """Whether there is something to tell apart."""
        return len(self.labels) > 1

    def facts(self) -> Facts:
        """What recipes adapt to."""
        sample = np.linspace(0, len(self.train) - 1, min(LOOKED_AT, len(self.train))).round().astype(int)
        sizes, modes = [], []
        for index in sample:
            with self.train.open(int(index)) as picture:
                sizes.append((picture.height, picture.width))
                modes.append(picture.mode)
        return Facts(
            images=len(self.train),
            classes=len(self.labels),
            several=self.train.several,
            side=(int(median(h for h, _ in sizes)), int(median(w for _, w in sizes))),
            channels=1 if all(mode.split(";")[0] in GREY for mode in modes) else 3,
            several_sizes=len(set(sizes)) > 1,
        )


def prepare(data: Data, progress: Progress | None = None, cache: bool = True) -> Prepared:
    """Reads and audits a dataset. Pictures that would fail are left out by name; what cannot be mended that way is an error."""
    # Without labels a few held-out pictures are enough: they are watched, nothing is chosen by them.
    fractions = data.fractions or (HELD_OUT if data.task == "none" else None)
    prepared = audited(data, found(data, fractions, progress), progress, cache)
    if "validation" not in prepared.splits:
        raise ValueError(f"{data.where} has no picture to validate on: give --split 0.8,0.2,0 or a validation folder")
    return prepared


def few(pictures: Pictures, data: Data) -> Pictures:
    """At most `per_class` pictures of each class, drawn at random and left in their order; fewer are the first of more."""
    if data.per_class is None:
        return pictures
    if pictures.several:
        raise ValueError(f"{data.where}: pictures with several labels have no {data.per_class} of each class to draw")
    order = np.random.default_rng(data.drawn).permutation(len(pictures))
    mine = [order[pictures.targets[order] == label][: data.per_class] for label in np.unique(pictures.targets)]
    return pictures.only(np.sort(np.concatenate(mine)))


def of_classes(dataset: Dataset, data: Data) -> Dataset:
    """Every so-manieth class of the training split alone, and the same ones of the other splits."""
    if data.classes is None:
        return dataset
    if dataset["train"].several:
        raise ValueError(f"{data.where}: pictures with several labels cannot be divided by classes")
    first, step = data.classes
    kept = set(dataset["train"].classes[first::step])
    splits = {}
    for split, pictures in dataset.splits.items():
        names = tuple(name for name in pictures.classes if name in kept)
        place = np.array([names.index(name) if name in kept else -1 for name in pictures.classes])
        chosen = pictures.only(place[pictures.targets] >= 0)
        splits[split] = replace(chosen, targets=place[chosen.targets], classes=names)
    return replace(dataset, splits=splits)


def at_random(splits: dict[str, Pictures], data: Data) -> dict[str, Pictures]:
    """VTAB's examples, 800 to learn from and 200 to validate on, whatever their class. Where test pictures are looked at,
    nothing is chosen any more, and all of them are learnt from."""
    if data.examples is None or "validation" not in splits:
        return splits
    chance = np.random.default_rng(data.drawn)
    train, held = (
        splits[split].only(np.sort(chance.permutation(len(splits[split]))[:count]))
        for split, count in zip(("train", "validation"), data.examples, strict=True)
    )
    return splits | {"train": joined(train, held) if data.test else train, "validation": held}


def joined(first: Pictures, second: Pictures) -> Pictures:
    """Two parts of one data set as one."""
    assert first.store is second.store, "splits of a data set lie in one store"
    both = first.shards is not None and second.shards is not None
    return replace(
        first,
        items=np.concatenate((first.items, second.items)),
        targets=np.concatenate((first.targets, second.targets)),
        shards=np.concatenate((first.shards, second.shards)) if both else None,  # type: ignore[arg-type]
    )


def without_labels(pictures: Pictures) -> Pictures:
    """The same pictures, all of one class."""
    return replace(pictures, targets=np.zeros(len(pictures), dtype=np.int64), classes=(PICTURE,))


def found(data: Data, fractions: Fractions | None, progress: Progress | None = None) -> Dataset:
    """The data as it is read, divided by these fractions where it has no splits of its own."""
    several = {"auto": None, "single": False, "multi": True, "none": UNLABELLED}[data.task]
    return read(data.where, fractions=fractions, several=several, progress=progress)


def audited(data: Data, dataset: Dataset, progress: Progress | None = None, cache: bool = True) -> Prepared:
    """Data that was read, without what cannot be used, its splits held against the training split's labels."""
    if "train" not in dataset.splits:
        raise ValueError(f"{data.where} has no training split: it has {', '.join(dataset.splits)}")
    checked = audit(dataset, cache=cache, progress=progress)
    clean = checked.clean()
    usable = sum(map(len, clean.splits.values()))
    if data.task == "none" and usable < FEWEST:
        raise ValueError(f"{data.where} has {usable} pictures that can be used: learning without labels needs {FEWEST}")
    skipped = [(finding.path, finding.detail) for finding in checked.of(UNUSABLE)]
    warnings: list[str] = []
    if data.quarantine:
        reasons = read_quarantine(Path(data.quarantine))
        clean, left_out = without(clean, reasons)
        skipped += [(name, f"named in {data.quarantine}") for name in left_out]
    clean = of_classes(clean, data)
    unlabelled = data.task == "none"
    if unlabelled and len({pictures.classes for pictures in clean.splits.values()}) > 1:
        plain = {split: without_labels(pictures) for split, pictures in clean.splits.items()}
        note = "the splits do not have the same classes: labels are not used"
        clean = replace(clean, splits=plain, notes=(*clean.notes, note))
    allow = data.allow_class_mismatch or unlabelled
    labels = LabelMap.of(clean["train"], allow=allow)
    if len(labels) < 2 and not clean["train"].several and not unlabelled:
        raise ValueError(f"{data.where} has one class, {labels.names[0]!r}: there is nothing to tell apart")
    splits = {}
    for split, pictures in clean.splits.items():
        if len(pictures):
            applied = labels.apply(pictures, allow=allow)
            warnings += applied.warnings if not unlabelled else ()
            splits[split] = applied.pictures
    splits["train"] = few(splits["train"], data)
    splits = at_random(splits, data)
    if not data.test:
        splits.pop("test", None)
    return Prepared(clean, labels, splits, checked, skipped, warnings)

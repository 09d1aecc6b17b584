"""The pictures that two models are compared on: files, or a data set whose labels a probe can be fitted to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.data.decode import UNREADABLE
from vitrail.data.labels import LabelMap
from vitrail.data.opening import SUFFIXES, named
from vitrail.data.pictures import Dataset, Pictures
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import parts, read
from vitrail.data.sources.files import Files
from vitrail.data.sources.folders import NoClassFoldersError
from vitrail.views.pictures import listed, none_read

Tell = Callable[[str, int, int], None]
MEASURED = 128  # pictures that attention and frequencies are measured on: as many as for the paper's figure 7 (right)
PROBED = 1024  # at most so many that a probe is fitted to, and so many that it is judged on
EACH, JUDGED = 2, 10  # fewer training pictures of a class, or fewer to judge on, say nothing
BATCH, TOKENS = 8, 2048  # at most so many pictures together, and so many tokens where there is more than one


@dataclass(frozen=True)
class Gathered:
    """What is measured, and what a probe is fitted to and judged on; or why there is no probe."""

    where: str
    measured: Pictures
    fitted: Pictures | None = None
    judged: Pictures | None = None
    no_probe: str = ""
    notes: tuple[str, ...] = ()


def gathered(places: list[str], limit: int | None = None, progress: parts.Progress | None = None) -> Gathered:
    """Pictures by what the user calls them: one folder of class folders or another data set, or pictures and folders of them."""
    where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
    if len(places) == 1 and Path(where).suffix.lower() not in SUFFIXES:
        try:
            return of_dataset(where, limit, progress)
        except NoClassFoldersError:
            pass  # a folder of pictures without labels: these are taken as they are
    files = Files.of(str(path) for path in listed(places))
    every = np.arange(len(files))
    pictures = Pictures(files, every, np.zeros(len(every), dtype=np.int64), ("",))
    return Gathered(where, some(pictures, limit or MEASURED), no_probe=UNLABELLED)


UNLABELLED = "the pictures have no labels: give one folder that has a folder for each class"


def of_dataset(where: str, limit: int | None, progress: parts.Progress | None) -> Gathered:
    """Measured on the split that models are judged on, or on everything where there is none; a probe needs labels and a split."""
    whole = read(where, fractions=parts.UNDIVIDED, progress=progress)
    splits = {name: pictures for name, pictures in whole.splits.items() if len(pictures)}
    if not splits:
        raise ValueError(f"{where} holds no pictures: give a folder or a data set that does")
    first = next(iter(splits.values()))
    if len(first.classes) < 2 and not first.several and Path(where).is_dir():
        raise NoClassFoldersError(f"{where} has one class")
    own = next((splits[name] for name in ("test", "validation") if name in splits), None)
    measured = some(own or first, limit or MEASURED)
    if first.several:
        return Gathered(where, measured, no_probe="its pictures have several labels each", notes=whole.notes)
    divided = whole if own is not None else read(where, progress=progress)
    try:
        fitted, judged = to_probe(divided, limit or PROBED)
    except ValueError as error:
        return Gathered(where, measured, no_probe=str(error), notes=divided.notes)
    return Gathered(where, measured, fitted, judged, notes=divided.notes)


def to_probe(dataset: Dataset, most: int) -> tuple[Pictures, Pictures]:
    """Training pictures, and those to judge on with the same classes; an error where that is not possible, or worth nothing."""
    splits = {name: pictures for name, pictures in dataset.splits.items() if len(pictures)}
    name = next((name for name in ("test", "validation") if name in splits), None)
    if name is None or "train" not in splits:
        raise ValueError(f"there are no pictures to {'judge on' if name is None else 'fit it to'} beside the others")
    labels = LabelMap.of(splits["train"], allow=True)
    judged = labels.apply(splits[name], allow=True).pictures
    if not len(judged):
        raise ValueError(f"the {name} split has no picture of a class that training has")
    fitted, judged = some(splits["train"], most), some(judged, most)
    check_enough(fitted.targets, judged.targets)
    return fitted, judged


def check_enough(fitted: np.ndarray, judged: np.ndarray) -> None:
    """Refuses targets [n] and [m] that are too few for a probe to say anything."""
    classes = len(np.unique(fitted))
    if classes < 2:
        raise ValueError("its training pictures are of one class")
    if len(fitted) < EACH * classes or len(judged) < JUDGED:
        raise ValueError(
            f"{len(fitted):,} pictures to fit it to and {len(judged):,} to judge it on are too few for {classes} classes: "
            f"it takes {EACH * classes} and {JUDGED}"
        )


def some(pictures: Pictures, most: int) -> Pictures:
    """At most so many, spread evenly over all."""
    if len(pictures) <= most:
        return pictures
    return pictures.only(np.linspace(0, len(pictures) - 1, most).round().astype(np.int64))


class Reading:
    """Pictures in normalised batches, as a model's own preprocessing prepares them; what cannot be read is left out."""

    def __init__(self, pictures: Pictures, preprocessing: Preprocessing, patches: int, device: torch.device) -> None:
        self.pictures, self.preprocessing, self.device = pictures, preprocessing, device
        self.most = max(1, min(BATCH, TOKENS // patches))
        self.read: list[int] = []  # those that could be, in order
        self.skipped: list[str] = []

    @property
    def targets(self) -> np.ndarray:
        """Of the pictures that were read."""
        return self.pictures.targets[self.read]

    def batches(self, tell: Tell, doing: str) -> Iterator[Tensor]:
        """[B, C, H, W] on the device."""
        held: list[Tensor] = []
        for index in range(len(self.pictures)):
            name = self.pictures.name(index)
            try:
                with named(name), self.pictures.open(index) as image:
                    held.append(self.preprocessing.pixels(image))
                self.read.append(index)
            except UNREADABLE as error:
                said = " ".join(str(error).split())
                self.skipped.append(said if name in said else f"{name}: {said or type(error).__name__}")
            if len(held) == self.most:
                yield self.preprocessing.normalise(torch.stack(held).to(self.device))
                held = []
            tell(doing, index + 1, len(self.pictures))
        if held:
            yield self.preprocessing.normalise(torch.stack(held).to(self.device))
        if not self.read:
            raise none_read(self.skipped)

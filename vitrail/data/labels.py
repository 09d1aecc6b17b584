"""The contract of labels: made once, from the training split, and held against everything that comes later.

labels = LabelMap.of(dataset["train"])
validation = labels.apply(dataset["validation"])   # its targets are now the map's indices
LabelMap(model.labels).apply(pictures)             # the same for a model that was loaded
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from vitrail.data.pictures import Pictures

MADE_UP = re.compile(r"LABEL_\d+")  # what transformers calls classes that nobody named


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in their order: sorted, or by value where all are whole numbers, so that 10 comes after 9."""
    names = sorted(set(names))
    if all(name.isascii() and name.removeprefix("-").isdecimal() for name in names):
        names.sort(key=int)
    return tuple(names)


def normal(name: str) -> str:
    """A class name without spaces around it, and with accents written the one way that every system agrees on."""
    return unicodedata.normalize("NFC", name.strip())


def named(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    """A model's names for its classes, unless they are made up."""
    if labels is None or all(MADE_UP.fullmatch(label) for label in labels):
        return None
    return tuple(map(normal, labels))


@dataclass(frozen=True)
class Applied:
    """A split in the indices of a label map."""

    pictures: Pictures  # its classes are the map's
    warnings: tuple[str, ...] = ()  # what was allowed, in words
    left_out: int = 0  # pictures of classes that the map does not know


@dataclass(frozen=True)
class LabelMap:
    """The names of a model's classes; a name's place is the index of its output."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise ValueError("no classes: a label map needs one at least")
        if twice := sorted(name for name, count in Counter(self.names).items() if count > 1):
            raise ValueError(f"classes named twice: {listed(twice)}")

    @classmethod
    def of(cls, pictures: Pictures, *, allow: bool = False) -> "LabelMap":
        """The map of a training split. A class without a picture is an error; allowed, it keeps its place in the map."""
        if not len(pictures):
            raise ValueError(f"the {pictures.split} split holds no pictures")
        empty = [name for name, count in zip(pictures.classes, pictures.counts(), strict=True) if not count]
        if empty and not allow:
            raise ValueError(
                f"the {pictures.split} split has no picture of {listed(empty)}: add some, remove the class, "
                f"or allow classes that differ"
            )
        return cls(pictures.classes)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """The place of a class."""
        if name not in self.names:
            raise ValueError(f"{self.unknown(name)}: not one of the {len(self)} classes")
        return self.names.index(name)

    def apply(self, pictures: Pictures, *, allow: bool = False) -> Applied:
        """A split with its targets in this map's indices, matched by name.

        Classes that are new in it, or missing from it, are an error that names them. Allowed, they are warnings: pictures that
        have new classes only are left out and counted.
        """
        counts = dict(zip(pictures.classes, pictures.counts().tolist(), strict=True))
        known = set(self.names)
        new = [name for name in pictures.classes if name not in known]
        missing = [name for name in self.names if not counts.get(name)]
        differences = []
        if new:
            differences.append(f"has classes that training did not: {listed(new, self.unknown)}")
        if missing:
            differences.append(f"has no picture of {listed(missing)}")
        if differences and not allow:
            raise ValueError(
                f"the {pictures.split} split {' and '.join(differences)}: mend the data, or allow classes that differ"
            )
        targets, keep = self._targets(pictures)
        left_out = int((~keep).sum())
        kept = pictures if not left_out else pictures.only(keep)
        warnings = [f"the {pictures.split} split {difference}" for difference in differences]
        if left_out:
            warnings.append(f"{left_out:,} pictures of the {pictures.split} split are left out: their classes are new")
        return Applied(replace(kept, targets=targets[keep], classes=self.names), tuple(warnings), left_out)

    def _targets(self, pictures: Pictures) -> tuple[np.ndarray, np.ndarray]:
        """The targets in this map's indices, and which pictures have one."""
        places = {name: place for place, name in enumerate(self.names)}
        table = np.array([places.get(name, -1) for name in pictures.classes], dtype=np.int64)
        if not pictures.several:
            targets = table[pictures.targets] if len(pictures) else pictures.targets
            return targets, targets >= 0
        targets = np.zeros((len(pictures), len(self)), dtype=np.uint8)
        targets[:, table[table >= 0]] = pictures.targets[:, table >= 0]
        # A picture with no label at all is an example of none; one with new labels alone is an example of nothing known.
        return targets, np.logical_or(targets.any(1), np.logical_not(pictures.targets.any(1)))

    def unknown(self, name: str) -> str:
        """A name that is not in the map, with the one that was perhaps meant."""
        folded = {known.casefold(): known for known in self.names}
        near = get_close_matches(name.casefold(), folded, n=1, cutoff=0.8)
        return f"{name!r} (like {folded[near[0]]!r}?)" if near else repr(name)


def listed(names: Iterable[str], say: Callable[[str], str] = repr, most: int = 8) -> str:
    """The first of some names, and how many more there are."""
    names = list(names)
    return ", ".join(map(say, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")

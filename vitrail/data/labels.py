"""Class names: the map from names to outputs, made from the training split and checked against every other split.

labels = LabelMap.from_images(dataset["train"])
validation = labels.apply(dataset["validation"]).images   # targets in the map's indices
LabelMap(model.labels).apply(images)                       # the same for a loaded model
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from vitrail.data.dataset import IGNORED, MAX_MASK_CLASSES, Images

PLACEHOLDER_LABEL = re.compile(r"LABEL_\d+")  # transformers' default names


def sort_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the unique class names sorted, by value if all are integers, so that 10 comes after 9."""
    names = sorted(set(names))
    if all(name.isascii() and name.removeprefix("-").isdecimal() for name in names):
        names.sort(key=int)
    return tuple(names)


def normalise_class_name(name: str) -> str:
    """Strip the name and apply Unicode NFC, so that accents are written the same way on every system."""
    return unicodedata.normalize("NFC", name.strip())


def drop_placeholder_labels(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return a model's class names, or None if they are missing or placeholders."""
    if labels is None or all(PLACEHOLDER_LABEL.fullmatch(label) for label in labels):
        return None
    return tuple(map(normalise_class_name, labels))


@dataclass(frozen=True)
class MappedImages:
    """A split with targets in the indices of a label map."""

    images: Images  # with the classes of the map
    warnings: tuple[str, ...] = ()  # allowed differences, in words
    n_dropped: int = 0  # images whose classes are not in the map


@dataclass(frozen=True)
class LabelMap:
    """The class names of a model; the position of a name is the index of its output."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise ValueError("a label map needs at least one class")
        if repeated := sorted(name for name, count in Counter(self.names).items() if count > 1):
            raise ValueError(f"duplicate class names: {format_names(repeated)}")

    @classmethod
    def from_images(cls, images: Images, *, allow_mismatch: bool = False) -> "LabelMap":
        """Return the map of a training split. A class without images is an error, unless `allow_mismatch` keeps it."""
        if not len(images):
            raise ValueError(f"the {images.split} split has no images")
        if images.target_kind in ("masks", "numbers", "captions"):  # a class that occurs in no mask keeps its index
            return cls(images.classes)
        empty = format_names(name for name, count in images.class_counts.items() if not count)
        if empty and not allow_mismatch:
            raise ValueError(
                f"the {images.split} split has no images of {empty}: add some, remove the class, or use allow_class_mismatch=True"
            )
        return cls(images.classes)

    def __len__(self) -> int:
        return len(self.names)

    def apply(self, images: Images, *, allow_mismatch: bool = False) -> MappedImages:
        """Return the split with its targets in this map's indices, matched by name.

        New and missing classes are an error that names them. With `allow_mismatch` they are warnings, and images that have
        new classes only are dropped and counted; in masks, pixels of new classes are ignored.
        """
        if images.target_kind == "numbers":
            return MappedImages(self._map_numbers(images))
        if images.target_kind == "captions":
            return MappedImages(images)
        counts, known = images.class_counts, set(self.names)
        has_masks = images.target_kind == "masks"
        new = [name for name in images.classes if name not in known]
        missing = [name for name in self.names if not (name in images.classes if has_masks else counts.get(name))]
        differences = []
        if new:
            differences.append(f"has classes not in training: {format_names(new, self.format_unknown)}")
        if missing:
            differences.append(f"has no {'class' if has_masks else 'images of'} {format_names(missing)}")
        if differences and not allow_mismatch:
            found = " and ".join(differences)
            raise ValueError(f"the {images.split} split {found}: fix the data, or use allow_class_mismatch=True")
        warnings = [f"the {images.split} split {difference}" for difference in differences]
        if has_masks:
            return MappedImages(self._map_masks(images), tuple(warnings))
        targets, keep = self._map_targets(images)
        n_dropped = int((~keep).sum())
        kept = images.select(keep) if n_dropped else images
        if n_dropped:
            warnings.append(f"{n_dropped:,} images of the {images.split} split are dropped: their classes are new")
        return MappedImages(replace(kept, targets=targets[keep], classes=self.names), tuple(warnings), n_dropped)

    def _map_masks(self, images: Images) -> Images:
        """Return the split with masks in this map's indices; pixels of new classes are ignored."""
        if len(self) > MAX_MASK_CLASSES:
            raise ValueError(f"masks have at most {MAX_MASK_CLASSES} classes, got {len(self):,}")
        index = {name: i for i, name in enumerate(self.names)}
        table = np.full(256, IGNORED, dtype=np.uint8)
        table[: len(images.classes)] = [index.get(name, IGNORED) for name in images.classes]

        def reorder(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            known = {} if values is None else dict(zip(images.classes, values, strict=True))
            return tuple(known[name] for name in self.names) if known and set(self.names) <= set(known) else None

        if images.mask_classes is not None:
            table = table[images.mask_classes]
        facts = {"colours": reorder(images.colours), "things": reorder(images.things)}
        return replace(images, classes=self.names, mask_classes=table, **facts)

    def _map_numbers(self, images: Images) -> Images:
        """Return the split with its numbers in the order of this map; raise ValueError unless the names are the same."""
        if set(images.classes) != set(self.names):
            names = f"{format_names(images.classes)}, expected {format_names(self.names)}"
            raise ValueError(f"the {images.split} split has the targets {names}: give these columns as targets=")
        columns = [images.classes.index(name) for name in self.names]
        return replace(images, targets=images.targets[:, columns], classes=self.names)

    def _map_targets(self, images: Images) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets in this map's indices, and which images have one."""
        index = {name: i for i, name in enumerate(self.names)}
        table = np.array([index.get(name, -1) for name in images.classes], dtype=np.int64)
        if not images.is_multi_label:
            targets = table[images.targets] if len(images) else images.targets
            return targets, targets >= 0
        targets = np.zeros((len(images), len(self)), dtype=np.uint8)
        targets[:, table[table >= 0]] = images.targets[:, table >= 0]
        # An image without labels is a negative example of every class; one with only new labels is dropped.
        return targets, np.logical_or(targets.any(1), np.logical_not(images.targets.any(1)))

    def format_unknown(self, name: str) -> str:
        """Return an unknown name with the closest known one."""
        folded = {known.casefold(): known for known in self.names}
        near = get_close_matches(name.casefold(), folded, n=1, cutoff=0.8)
        return f"{name!r} (like {folded[near[0]]!r}?)" if near else repr(name)


def format_names(names: Iterable[str], format_name: Callable[[str], str] = repr, limit: int = 8) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(format_name, names[:limit])) + more

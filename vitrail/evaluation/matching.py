"""Classes of the data as classes of the model: by name, by number where a model has no names, or as a file translates them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.data.labels import listed, named, normal
from vitrail.data.pictures import Pictures
from vitrail.evaluation.likeness import alike
from vitrail.evaluation.translation import Translation

HOW = (
    "--map FILE says which class is which: imagenet_class_index.json, LOC_synset_mapping.txt, a list of names in order, "
    "or two columns of data and model"
)


@dataclass(frozen=True)
class Matching:
    """Where each class of the data is among the model's outputs."""

    places: np.ndarray  # [classes of the data] int64; -1 for a class that no picture has
    labels: tuple[str, ...]  # what the model's outputs are called
    how: str  # in words

    @property
    def present(self) -> np.ndarray:
        """The model's outputs that the data has pictures of, in order."""
        return np.unique(self.places[self.places >= 0])

    def targets(self, pictures: Pictures) -> np.ndarray:
        """The pictures' labels in the model's outputs: [n], or [n, K] where a picture may have several."""
        if not pictures.several:
            return self.places[pictures.targets]
        targets = np.zeros((len(pictures), len(self.labels)), dtype=np.uint8)
        for column, place in enumerate(self.places):
            if place >= 0:
                targets[:, place] |= pictures.targets[:, column]
        return targets


def match(
    pictures: Pictures, labels: Sequence[str] | None, outputs: int, translation: Translation | str | None = None
) -> Matching:
    """The classes that some picture has, in the model's outputs; those that have no place are an error with the closest.

    `translation` is what a file says, or "index", where the data's classes are the model's indices.
    """
    names = named(labels)
    used = [bool(count) for count in pictures.counts()]
    classes = [normal(name) for name, there in zip(pictures.classes, used, strict=True) if there]
    if translation == "index" or (names is None and translation is None):
        found, how = by_number(classes, outputs, names is None), "by number"
    else:
        found, how = by_name(classes, names, translation if isinstance(translation, Translation) else None)
    table = np.full(len(used), -1, dtype=np.int64)
    table[np.flatnonzero(used)] = found
    told = translation.labels if isinstance(translation, Translation) else {}
    return Matching(table, names or tuple(told.get(place, str(place)) for place in range(outputs)), how)


def by_number(classes: list[str], outputs: int, nameless: bool) -> list[int]:
    """Indices, where every class is a number that the model has."""
    words = [name for name in classes if not (name.isascii() and name.isdecimal())]
    if words and nameless:
        raise ValueError(
            f"the model has no class names, and {listed(words, most=3)} cannot be an index of its outputs: {HOW}"
        )
    if words:
        raise ValueError(f"--map index: {listed(words, most=3)} cannot be an index")
    if beyond := [name for name in classes if int(name) >= outputs]:
        raise ValueError(f"the class {beyond[0]} is not one of the model's {outputs:,}, which are 0 to {outputs - 1:,}")
    return [int(name) for name in classes]


def by_name(
    classes: list[str], names: tuple[str, ...] | None, translation: Translation | None
) -> tuple[list[int], str]:
    """Indices by what the file says, and where it says nothing, by the model's names."""
    known: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(names or ()):
        known[name] = (*known.get(name, ()), place)
    if translation is not None:
        known |= translation.places
        for name in classes:  # 0007 is 7
            if name not in known and name.isascii() and name.isdecimal() and str(int(name)) in translation.places:
                known[name] = translation.places[str(int(name))]
    if unknown := [name for name in classes if name not in known]:
        where = f"the model and {translation.file} do not know" if translation else "the model does not know"
        count = f"{len(unknown):,} of {len(classes):,} classes that {where}"
        hint = "--map index, if these are the model's indices" if all(map(str.isdecimal, unknown)) else "--map FILE"
        said = listed(unknown, lambda name: alike(name, known), most=5)
        raise ValueError(f"the data has {count}: {said}; rename them, or translate with {hint}")
    for name in classes:
        if len(known[name]) > 1:
            first, second = known[name][:2]
            raise ValueError(
                f"{name!r} is the name of two of the model's classes, {first} and {second}: translate with --map FILE"
            )
    return [known[name][0] for name in classes], f"through {translation.file}" if translation else "by name"

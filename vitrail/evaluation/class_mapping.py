"""Match the classes of a dataset to the outputs of a model, by name, index or a mapping file (`--map`).

A mapping file holds pairs of a data class and a model class (name or index), or lists the model's classes in the order of their
indices, each with one or several names, like ImageNet's index files.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.data.class_names import (
    ClassNames,
    ClassPairs,
    NamesByIndex,
    clean_names,
    find_duplicates,
    is_index,
    read_names_file,
)
from vitrail.data.dataset import Images
from vitrail.data.labels import drop_placeholder_labels, format_names, normalise_class_name
from vitrail.utils.text import suggest_closest

MAP_FILES = "imagenet_class_index.json, LOC_synset_mapping.txt, a list of names in order"
MAP_HINT = f"give class_map=FILE: {MAP_FILES}, or two columns of data and model"


@dataclass(frozen=True)
class ClassMap:
    """Content of a mapping file."""

    file: str
    indices: dict[str, tuple[int, ...]]  # data class to model indices; several if a name is ambiguous
    labels: dict[int, str]  # names of the model's classes in the file


def read_class_map(file: str | Path, names: Sequence[str] | None, outputs: int) -> ClassMap:
    """Read a mapping file for a model with `outputs` classes, named `names` if known."""
    parsed = read_names_file(file, "class_map=")
    if isinstance(parsed, NamesByIndex):
        return _map_by_index(str(file), parsed.names, outputs, parsed.is_complete)
    return _map_by_pairs(str(file), parsed, names, outputs)


def _map_by_index(file: str, names_by_index: ClassNames, outputs: int, is_complete: bool) -> ClassMap:
    if is_complete and len(names_by_index) != outputs:
        raise ValueError(f"{file} lists {len(names_by_index):,} classes, but the model has {outputs:,}")
    if duplicates := find_duplicates(index for index, _ in names_by_index):
        raise ValueError(f"{file} lists the index {duplicates[0]} twice")
    indices: dict[str, dict[int, None]] = {}
    for index, names in names_by_index:
        if index >= outputs:
            raise ValueError(f"{file}: index {index:,} is out of range: classes are 0 to {outputs - 1:,}")
        for name in names:
            indices.setdefault(normalise_class_name(name), {})[index] = None
    for index, _ in names_by_index:  # the index is also a name, unless another class has it
        indices.setdefault(str(index), {index: None})
    labels = {index: normalise_class_name(names[0]) for index, names in names_by_index}
    return ClassMap(file, {name: tuple(found) for name, found in indices.items()}, labels)


def _map_by_pairs(file: str, pairs: ClassPairs, names: Sequence[str] | None, outputs: int) -> ClassMap:
    if duplicates := find_duplicates(normalise_class_name(data) for data, _ in pairs):
        raise ValueError(f"{file} lists {duplicates[0]!r} twice: remove one")
    known = _group_by_name(map(normalise_class_name, names or ()))
    unknown = [model for _, model in pairs if isinstance(model, str) and not _is_model_class(model, known)]
    if len(unknown) == len(pairs) and all(is_index(data) for data, _ in pairs):
        return _map_by_index(file, [(int(data), clean_names(file, model)) for data, model in pairs], outputs, False)
    if unknown:
        if known:
            raise ValueError(f"{file}: the model has no class {suggest_closest(unknown[0], known)}")
        raise ValueError(f"{file}: the model has no class names, so {unknown[0]!r} must be an index from 0")
    matched = {}
    for data, model in pairs:
        indices = known.get(normalise_class_name(model), ()) if isinstance(model, str) else ()
        index = indices[0] if indices else int(model)
        if len(indices) > 1:
            first, second = indices[:2]
            raise ValueError(f"{file}: {model!r} names the model's classes {first} and {second}: give the index")
        if not 0 <= index < outputs:
            raise ValueError(f"{file}: index {index:,} of {data!r} is out of range: classes are 0 to {outputs - 1:,}")
        matched[normalise_class_name(data)] = (index,)
    return ClassMap(file, matched, {index: data for data, (index,) in reversed(matched.items())})


def _is_model_class(model: str, known: Container[str]) -> bool:
    return normalise_class_name(model) in known or is_index(model.removeprefix("-"))


def _group_by_name(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the indices of each name."""
    groups: dict[str, tuple[int, ...]] = {}
    for index, name in enumerate(names):
        groups[name] = (*groups.get(name, ()), index)
    return groups


@dataclass(frozen=True)
class ClassMatching:
    """Position of each data class among the model's outputs."""

    indices: np.ndarray  # int64 [classes of the data]; -1 for a class without images
    labels: tuple[str, ...]  # of the model's outputs
    method: str  # for display

    @property
    def present(self) -> np.ndarray:
        """Return the model's outputs present in the data, in order."""
        return np.unique(self.indices[self.indices >= 0])

    def map_targets(self, images: Images) -> np.ndarray:
        """Return targets as model outputs: [n], or [n, K] for multi-label data."""
        if not images.is_multi_label:
            return self.indices[images.targets]
        targets = np.zeros((len(images), len(self.labels)), dtype=np.uint8)
        for column, index in enumerate(self.indices):
            if index >= 0:
                targets[:, index] |= images.targets[:, column]
        return targets


def match_classes(
    images: Images, labels: Sequence[str] | None, outputs: int, class_map: ClassMap | str | None = None
) -> ClassMatching:
    """Match the classes with images to the model's outputs; raise ValueError with suggestions for unknown classes.

    `class_map` is a mapping file, or "index" if the data's classes are the model's indices.
    """
    names = drop_placeholder_labels(labels)
    used = [bool(count) for count in images.count_classes()]
    classes = [normalise_class_name(name) for name, has_images in zip(images.classes, used, strict=True) if has_images]
    if class_map == "index" or (names is None and class_map is None):
        indices, method = match_by_index(classes, outputs, names is None), "by number"
    else:
        indices, method = match_by_name(classes, names, class_map if isinstance(class_map, ClassMap) else None)
    table = np.full(len(used), -1, dtype=np.int64)
    table[np.flatnonzero(used)] = indices
    mapped = class_map.labels if isinstance(class_map, ClassMap) else {}
    return ClassMatching(table, names or tuple(mapped.get(k, str(k)) for k in range(outputs)), method)


def match_by_index(classes: list[str], outputs: int, nameless: bool) -> list[int]:
    """Return the class names as indices; raise ValueError if they are not indices of the model."""
    if words := [name for name in classes if not is_index(name)]:
        shown = f"{format_names(words, limit=3)} is not an index"
        text = f"the model has no class names, and {shown}: {MAP_HINT}" if nameless else f"class_map='index': {shown}"
        raise ValueError(text)
    if beyond := [name for name in classes if int(name) >= outputs]:
        raise ValueError(f"class {beyond[0]} is out of range: the model's classes are 0 to {outputs - 1:,}")
    return [int(name) for name in classes]


def match_by_name(classes: list[str], names: Sequence[str] | None, class_map: ClassMap | None) -> tuple[list[int], str]:
    """Return the indices of classes by the mapping file, else by the model's names, and the method."""
    known = _group_by_name(names or ())
    if class_map is not None:
        known |= class_map.indices
        for name in classes:  # 0007 is 7
            if name not in known and is_index(name) and str(int(name)) in class_map.indices:
                known[name] = class_map.indices[str(int(name))]
    if unknown := [name for name in classes if name not in known]:
        where = f"the model and {class_map.file}" if class_map else "the model"
        hint = (
            "class_map='index' if these are the model's indices"
            if all(map(str.isdecimal, unknown))
            else "class_map=FILE"
        )
        shown = format_names(unknown, lambda name: suggest_closest(name, known), limit=5)
        count = f"{len(unknown):,} of {len(classes):,} classes are unknown to {where}"
        raise ValueError(f"{count}: {shown}; rename them, or use {hint}")
    for name in classes:
        if len(known[name]) > 1:
            first, second = known[name][:2]
            raise ValueError(f"{name!r} names two of the model's classes, {first} and {second}: use class_map=FILE")
    return [known[name][0] for name in classes], f"through {class_map.file}" if class_map else "by name"

"""Key tables: the mapping between our tensors and those of a format, used to read and to write.

A table is a list of `KeyMapping`s for one configuration: the names of our tensors and theirs, and how the values are
rearranged between them. `import_state` and `export_state` are strict: any difference is an error that lists it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import Tensor

from vitrail.models.base import ModelConfig
from vitrail.models.registry import build_from

Tensors = list[Tensor]
State = Mapping[str, Tensor]
Names = str | tuple[str, ...]


@dataclass(frozen=True)
class TensorTransform:
    """A rearrangement of values and its inverse, between their tensors and ours."""

    read: Callable[[Tensors], Tensors] = list
    write: Callable[[Tensors], Tensors] = list
    row_splits: tuple[int, ...] | None = None  # rows of each of theirs, if they are row blocks of ours


IDENTITY = TensorTransform()


def concatenate(dim: int, sizes: list[int]) -> TensorTransform:
    """Return the transform from several of their tensors, of these sizes along a dimension, to one of ours."""
    return TensorTransform(
        read=lambda theirs: [torch.cat(theirs, dim)],
        write=lambda ours: [part.contiguous() for part in ours[0].split(sizes, dim)],
        row_splits=tuple(sizes) if dim == 0 else None,
    )


def reshape(theirs: tuple[int, ...], ours: tuple[int, ...]) -> TensorTransform:
    """Return the transform to another shape with the same values in the same order."""
    return TensorTransform(read=lambda t: [t[0].reshape(ours)], write=lambda o: [o[0].reshape(theirs)])


def permute(*order: int) -> TensorTransform:
    """Return the transform that reorders dimensions: dimension i of ours is dimension order[i] of theirs."""
    inverse = [order.index(dim) for dim in range(len(order))]
    return TensorTransform(
        read=lambda t: [t[0].permute(order).contiguous()], write=lambda o: [o[0].permute(inverse).contiguous()]
    )


def flatten_patches(channels: int, patch: int) -> TensorTransform:
    """Return the transform from a convolution's [D, C, P, P] to a matrix [D, C·P²]."""
    shape = (channels, patch, patch)
    return TensorTransform(read=lambda t: [t[0].flatten(1)], write=lambda o: [o[0].unflatten(1, shape)])


def flatten_tubelets(channels: int, frames: int, patch: int) -> TensorTransform:
    """Return the transform from a convolution's [D, C, F, P, P] to a matrix [D, C·F·P²]."""
    shape = (channels, frames, patch, patch)
    return TensorTransform(read=lambda t: [t[0].flatten(1)], write=lambda o: [o[0].unflatten(1, shape)])


def reorder_patches(channels: int, patch: int, dim: int = -1, frames: int = 1) -> TensorTransform:
    """Return the transform from patches, of clips tubelets, flattened pixel by pixel (theirs) to channel by channel (ours)."""

    def read(theirs: Tensors) -> Tensors:
        pixels = theirs[0].movedim(dim, -1).unflatten(-1, (frames * patch, patch, channels))
        return [pixels.movedim(-1, -3).flatten(-3).movedim(-1, dim).contiguous()]

    def write(ours: Tensors) -> Tensors:
        pixels = ours[0].movedim(dim, -1).unflatten(-1, (channels, frames * patch, patch))
        return [pixels.movedim(-3, -1).flatten(-3).movedim(-1, dim).contiguous()]

    return TensorTransform(read, write)


@dataclass(frozen=True)
class KeyMapping:
    """Our tensors, their tensors, and the transform between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: TensorTransform = IDENTITY

    def replace(self, old: str, new: str) -> "KeyMapping":
        """Return the mapping with a part of all names replaced."""
        ours, theirs = (tuple(name.replace(old, new) for name in names) for names in (self.ours, self.theirs))
        return KeyMapping(ours, theirs, self.transform)


def map_key(ours: Names, theirs: Names, transform: TensorTransform = IDENTITY) -> KeyMapping:
    """Return a `KeyMapping`; a single name needs no tuple."""
    ours, theirs = ((names,) if isinstance(names, str) else names for names in (ours, theirs))
    return KeyMapping(ours, theirs, transform)


def stack_layers(keys: list[KeyMapping]) -> KeyMapping:
    """Map the same key of every layer to tensors of theirs that hold all layers, along a new first dimension."""

    def read(theirs: Tensors) -> Tensors:
        return [o for layer, key in enumerate(keys) for o in key.transform.read([t[layer] for t in theirs])]

    def write(ours: Tensors) -> Tensors:
        parts = [key.transform.write([tensor]) for key, tensor in zip(keys, ours, strict=True)]
        return [torch.stack(part) for part in zip(*parts, strict=True)]

    return KeyMapping(tuple(key.ours[0] for key in keys), keys[0].theirs, TensorTransform(read, write))


@dataclass(frozen=True)
class IgnoredKeys:
    """Tensors of theirs, by a name with `*`, that our model does not use, and the reason."""

    theirs: str
    reason: str


KeyTable = Sequence[KeyMapping | IgnoredKeys]


def add_root(table: KeyTable, root: str) -> KeyTable:
    """Return the table with a prefix added to all of their names."""
    if not root:
        return table
    return [
        KeyMapping(entry.ours, tuple(root + name for name in entry.theirs), entry.transform)
        if isinstance(entry, KeyMapping)
        else IgnoredKeys(root + entry.theirs, entry.reason)
        for entry in table
    ]


def add_prefix(table: Iterable[KeyMapping], prefix: str) -> list[KeyMapping]:
    """Return the table of a part of a model: with a prefix added to all of our names."""
    return [KeyMapping(tuple(prefix + name for name in e.ours), e.theirs, e.transform) for e in table]


def select_mappings(table: KeyTable) -> list[KeyMapping]:
    return [entry for entry in table if isinstance(entry, KeyMapping)]


def find_ignored(table: KeyTable, names: Iterable[str]) -> dict[str, str]:
    """Return the names that the table ignores on purpose, with the reason."""
    entries = [entry for entry in table if isinstance(entry, IgnoredKeys)]
    wanted = {name for entry in select_mappings(table) for name in entry.theirs}
    ignored = {}
    for name in names:
        reason = next((entry.reason for entry in entries if fnmatchcase(name, entry.theirs)), None)
        if reason is not None and name not in wanted:
            ignored[name] = reason
    return ignored


@lru_cache(maxsize=8)
def build_meta_state(config: ModelConfig) -> dict[str, Tensor]:
    """Return every tensor of a model on the meta device."""
    with torch.device("meta"):
        return dict(build_from(config).state_dict())


Rules = dict[str, str | tuple[Names, TensorTransform]]


def map_tensors(format: str, config: ModelConfig, rules: Rules, *entries: KeyMapping) -> list[KeyMapping]:
    """Return the table that rules describe, and further entries; raise with the tensors that the format lacks.

    A rule gives their name, or several and a transform, for one of ours. In both, `#` stands for every layer's number and
    `*` for weight and bias. A rule that begins with `?` is for models that have the tensor. If `#` is in our name only,
    their tensor holds all layers.
    """
    return expand_rules(format, build_meta_state(config), config.depth, rules, *entries)


def expand_rules(format: str, names: Iterable[str], depth: int, rules: Rules, *entries: KeyMapping) -> list[KeyMapping]:
    """Return the table that rules describe for our tensors of these names and this number of layers; see `map_tensors`."""
    known = {name: index for index, name in enumerate(names)}
    table = list(entries)
    for rule, value in rules.items():
        theirs, transform = (value, IDENTITY) if isinstance(value, str) else value
        pattern = map_key(rule.removeprefix("?"), theirs, transform)
        parts = [pattern.replace("*", part) for part in ("weight", "bias")] if rule.endswith("*") else [pattern]
        if rule.startswith("?") and not any(part.ours[0].replace("#", "0") in known for part in parts):
            continue
        for part in parts:
            layers = [part.replace("#", str(layer)) for layer in range(depth)] if "#" in rule else [part]
            table += [stack_layers(layers)] if "#" in rule and "#" not in part.theirs[0] else layers
    named = [name for entry in table for name in entry.ours]
    if sorted(named) != sorted(known):
        raise ValueError(f"{format} cannot express this model: {_format_difference(set(named), set(known))}")
    return sorted(table, key=lambda entry: known[entry.ours[0]] if entry.ours else 0)


def compute_expected_shapes(table: KeyTable, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of their tensors for a model: ours, mapped by the table."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in export_state(table, build_meta_state(config)).items()}


def import_state(table: KeyTable, theirs: State) -> dict[str, Tensor]:
    """Return our tensors from theirs. The table must name every tensor, and every named tensor must be there."""
    keys = select_mappings(table)
    names = {name for key in keys for name in key.theirs}
    _check_names("the checkpoint", names, set(theirs) - set(find_ignored(table, theirs)))
    return {
        name: tensor
        for entry in keys
        for name, tensor in zip(entry.ours, entry.transform.read([theirs[n] for n in entry.theirs]), strict=True)
    }


def export_state(table: KeyTable, ours: State) -> dict[str, Tensor]:
    """Return their tensors from ours."""
    keys = select_mappings(table)
    _check_names("the model", {name for entry in keys for name in entry.ours}, set(ours))
    return {
        name: tensor
        for entry in keys
        for name, tensor in zip(entry.theirs, entry.transform.write([ours[n] for n in entry.ours]), strict=True)
    }


def _check_names(where: str, wanted: set[str], found: set[str]) -> None:
    if wanted != found:
        raise ValueError(f"{where} does not match the key table: {_format_difference(wanted, found)}")


def _format_difference(wanted: set[str], found: set[str]) -> str:
    parts = {"missing": sorted(wanted - found), "unexpected": sorted(found - wanted)}
    return "; ".join(f"{what} {len(names)}: {format_names(names)}" for what, names in parts.items() if names)


def format_names(names: Iterable[str], limit: int = 8) -> str:
    """Return the first names, and the number of the others."""
    names = list(names)
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")

"""What a key table is made of, and how it is read and written.

A table is a list of `Key`s for one configuration: which of our tensors are which of theirs, and how the values are
rearranged between the two. `read` and `write` are strict; what does not match is an error that lists the difference.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import Tensor

from vitrail.models.build import Config, build_from

Tensors = list[Tensor]
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Change:
    """A rearrangement of values and its inverse, between their tensors and ours."""

    read: Callable[[Tensors], Tensors] = list
    write: Callable[[Tensors], Tensors] = list
    rows: tuple[int, ...] | None = None  # where theirs are ours cut along the first dimension: how many rows each has


SAME = Change()


def joined(dim: int, sizes: list[int]) -> Change:
    """Their several tensors, of these sizes along a dimension, are one of ours."""
    return Change(
        read=lambda theirs: [torch.cat(theirs, dim)],
        write=lambda ours: [part.contiguous() for part in ours[0].split(sizes, dim)],
        rows=tuple(sizes) if dim == 0 else None,
    )


def reshaped(theirs: tuple[int, ...], ours: tuple[int, ...]) -> Change:
    """The same values in the same order, in another shape."""
    return Change(read=lambda t: [t[0].reshape(ours)], write=lambda o: [o[0].reshape(theirs)])


def transposed() -> Change:
    """Theirs multiplies from the other side: [inputs, outputs]."""
    return Change(read=lambda t: [t[0].T.contiguous()], write=lambda o: [o[0].T.contiguous()])


def patch_last(channels: int, patch: int) -> Change:
    """Patches flattened pixel by pixel (theirs) against channel by channel (ours), along the last dimension."""

    def read(theirs: Tensors) -> Tensors:
        return [theirs[0].unflatten(-1, (patch, patch, channels)).movedim(-1, -3).flatten(-3)]

    def write(ours: Tensors) -> Tensors:
        return [ours[0].unflatten(-1, (channels, patch, patch)).movedim(-3, -1).flatten(-3)]

    return Change(read, write)


@dataclass(frozen=True)
class Key:
    """Our tensors, their tensors, and the change between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    change: Change = field(default=SAME)


def key(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], change: Change = SAME) -> Key:
    """A `Key`; a single name may stand without its tuple."""
    return Key(
        (ours,) if isinstance(ours, str) else ours,
        (theirs,) if isinstance(theirs, str) else theirs,
        change,
    )


def both(ours: str, theirs: str, change: Change = SAME) -> list[Key]:
    """Weight and bias of a layer."""
    return [key(f"{ours}.{part}", f"{theirs}.{part}", change) for part in ("weight", "bias")]


def empty(theirs: str, *shape: int) -> Key:
    """A tensor of theirs without any value, which there must be all the same."""
    return Key((), (theirs,), Change(read=lambda t: [], write=lambda o: [torch.zeros(shape)]))


def stacked(layers: list[list[Key]]) -> list[Key]:
    """The same keys for every layer, where theirs holds all layers in one tensor, along a new first dimension."""

    def stack(keys: tuple[Key, ...]) -> Key:
        def read(theirs: Tensors) -> Tensors:
            return [o for layer, one in enumerate(keys) for o in one.change.read([t[layer] for t in theirs])]

        def write(ours: Tensors) -> Tensors:
            each = len(keys[0].ours)
            parts = [one.change.write(ours[layer * each : (layer + 1) * each]) for layer, one in enumerate(keys)]
            return [torch.stack(part) for part in zip(*parts, strict=True)]

        return Key(tuple(name for one in keys for name in one.ours), keys[0].theirs, Change(read, write))

    return [stack(keys) for keys in zip(*layers, strict=True)]


@dataclass(frozen=True)
class LeftOut:
    """Tensors of theirs, by a name with `*`, that our model has no use for, and why."""

    theirs: str
    reason: str


Table = list[Key | LeftOut]


def rooted(table: Table, root: str) -> Table:
    """The table for names that all have something before them."""
    if not root:
        return table
    return [
        Key(entry.ours, tuple(root + name for name in entry.theirs), entry.change)
        if isinstance(entry, Key)
        else LeftOut(root + entry.theirs, entry.reason)
        for entry in table
    ]


def keys_of(table: Table) -> list[Key]:
    return [entry for entry in table if isinstance(entry, Key)]


def left_out(table: Table, names: Iterable[str]) -> dict[str, str]:
    """Those of the names that the table leaves out on purpose, with the reason."""
    entries = [entry for entry in table if isinstance(entry, LeftOut)]
    wanted = {name for entry in keys_of(table) for name in entry.theirs}
    found = {}
    for name in names:
        reason = next((entry.reason for entry in entries if fnmatchcase(name, entry.theirs)), None)
        if reason is not None and name not in wanted:
            found[name] = reason
    return found


@lru_cache(maxsize=8)
def layout(config: Config) -> dict[str, Tensor]:
    """Every tensor of such a model, without values."""
    with torch.device("meta"):
        return dict(build_from(config).state_dict())


def complete(format: str, table: Table, config: Config) -> Table:
    """The table, if it names every tensor of such a model; else an error that says what the format has no name for."""
    ours = set(layout(config))
    named = {name for entry in keys_of(table) for name in entry.ours}
    if ours != named:
        raise ValueError(f"{format} cannot express this model: {_difference(named, ours)}")
    return table


def expected(table: Table, config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes that their tensors have for such a model: ours, sent through the table."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in write(table, layout(config)).items()}


def read(table: Table, theirs: State) -> dict[str, Tensor]:
    """Our tensors from theirs. Every tensor must be named by the table and every name be there."""
    keys = keys_of(table)
    _agree("the checkpoint", {name for k in keys for name in k.theirs}, set(theirs) - set(left_out(table, theirs)))
    return {
        name: tensor
        for entry in keys
        for name, tensor in zip(entry.ours, entry.change.read([theirs[n] for n in entry.theirs]), strict=True)
    }


def write(table: Table, ours: State) -> dict[str, Tensor]:
    """Their tensors from ours."""
    keys = keys_of(table)
    _agree("the model", {name for entry in keys for name in entry.ours}, set(ours))
    return {
        name: tensor
        for entry in keys
        for name, tensor in zip(entry.theirs, entry.change.write([ours[n] for n in entry.ours]), strict=True)
    }


def _agree(where: str, wanted: set[str], found: set[str]) -> None:
    if wanted != found:
        raise ValueError(f"{where} does not match the key table: {_difference(wanted, found)}")


def _difference(wanted: set[str], found: set[str]) -> str:
    parts = {"missing": sorted(wanted - found), "unexpected": sorted(found - wanted)}
    return "; ".join(f"{what} {len(names)}: {some(names)}" for what, names in parts.items() if names)


def some(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")

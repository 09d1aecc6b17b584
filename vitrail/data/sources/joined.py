"""Two stores as one, so that images of different sources make one split."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitrail.data.dataset import Images, Media, Store


@dataclass(frozen=True)
class JoinedStore:
    """The items of one store, then those of another."""

    first: Store
    second: Store

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def find(self, item: int) -> tuple[Store, int]:
        """Return the store that has an item, and the item's number in it."""
        count = len(self.first)
        return (self.first, item) if item < count else (self.second, item - count)

    @property
    def media(self) -> Media:
        return getattr(self.first, "media", "image")

    def name(self, item: int) -> str:
        store, number = self.find(item)
        return store.name(number)

    def open(self, item: int) -> Any:
        store, number = self.find(item)
        return store.open(number)

    def data(self, item: int) -> bytes:
        store, number = self.find(item)
        return store.data(number)

    def stamp(self, item: int) -> tuple[int, int] | None:
        store, number = self.find(item)
        return store.stamp(number)


def join_images(first: Images, second: Images) -> Images:
    """Return the images of both, each with one label, as one split with the classes of the first; raise ValueError if
    one has videos and the other images."""
    if first.media != second.media:
        media = f"{first.name(0)} belongs to {first.media}s, and {second.name(0)} to {second.media}s"
        raise ValueError(f"{media}: give one kind")
    assert first.target_kind == second.target_kind == "single"
    assert first.classes == second.classes
    shards = None
    if first.shards is not None and second.shards is not None:
        shards = np.concatenate((first.shards, second.shards + 1 + first.shards.max(initial=-1)))
    return replace(
        first,
        store=JoinedStore(first.store, second.store),
        items=np.concatenate((first.items, second.items + len(first.store))),
        targets=np.concatenate((first.targets, second.targets)),
        shards=shards,
    )

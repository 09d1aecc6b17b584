"""Captions as targets: a text for each image, from a column of a table. n images, C different captions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.data.dataset import Dataset, Images, Store
from vitrail.data.sources import splits as parts

CAPTION_COLUMNS = ("caption", "captions", "text", "description", "alt_text", "title")
SKIP_NO_CAPTION = "no caption"  # how the reason of a row without a usable caption begins
SKIP_SAME_PAIR = "listed twice with the same caption"
TARGET = "caption"  # the name of what is learnt, in place of classes
MAX_CHARACTERS = 100_000  # of a caption: more is a mistake in the table


def parse_caption(cell: Any) -> tuple[str, str]:
    """Return a caption with single spaces, and the reason why there is none, or ""."""
    if cell is None:
        return "", "is missing"
    if not isinstance(cell, str):
        return "", f"{str(cell)[:24]!r} is not a text"
    if len(cell) > MAX_CHARACTERS:
        return "", f"has {len(cell):,} characters, at most {MAX_CHARACTERS:,} are read"
    try:
        cell.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return "", "is not valid Unicode"
    caption = " ".join(cell.split())
    return caption, "" if caption else "is empty"


@dataclass
class CaptionRows:
    """Captions of the rows of a table, and the rows that lack one."""

    captions: dict[str, int] = field(default_factory=dict)  # different ones, and their numbers
    targets: list[int] = field(default_factory=list)  # of the kept rows
    kept: list[int] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # image and reason
    pairs: set[tuple[int, int]] = field(default_factory=set)  # image and caption

    def add(self, row: int, cell: Any, image: str, item: int, location: str = "") -> None:
        """Keep a row, or list it as skipped. `item` is the image in the store; `location` is the file and the line."""
        caption, problem = parse_caption(cell)
        where = f" ({location})" if location else ""
        if problem:
            self.skipped.append((image, f"{SKIP_NO_CAPTION}: it {problem}{where}"))
            return
        number = self.captions.setdefault(caption, len(self.captions))
        if (item, number) in self.pairs:
            self.skipped.append((image, f"{SKIP_SAME_PAIR}{where}"))
            return
        self.pairs.add((item, number))
        self.targets.append(number)
        self.kept.append(row)


def build_caption_dataset(
    source: str,
    kind: str,
    store: Store,
    rows: CaptionRows,
    splits: Sequence[str | None],
    options: parts.ReadOptions,
    *,
    items: np.ndarray,
    shards: np.ndarray | None = None,
) -> Dataset:
    """Build a dataset of the kept rows; `splits`, `items` and `shards` are of all rows."""
    if not rows.kept:
        first = f": {rows.skipped[0][0]}: {rows.skipped[0][1]}" if rows.skipped else ""
        raise ValueError(f"{source} has no image with a caption{first}")
    kept, targets, captions = np.array(rows.kept), np.array(rows.targets, dtype=np.int64), tuple(rows.captions)
    mine, shards = items[kept], None if shards is None else shards[kept]
    built = {}
    for split, chosen in parts.group_by_split(source, [splits[row] for row in rows.kept]).items():
        of_split = None if shards is None else shards[chosen]
        built[split] = Images(store, mine[chosen], targets[chosen], (TARGET,), split, of_split, captions=captions)
    return parts.add_validation_split(Dataset(source, kind, built, skipped=tuple(rows.skipped)), options)

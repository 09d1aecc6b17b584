"""Numbers as targets: columns of a table, or values of Python samples. n images, M targets."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.data.dataset import Dataset, Images, Store
from vitrail.data.sources import splits as parts
from vitrail.utils.text import suggest_closest

SKIP_NO_NUMBER = "no number"  # how the reason of a row without a usable number begins
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+", re.ASCII)
MAX_NUMBER = 1e30  # training computes in float32
MAX_SHOWN = 24  # characters of a cell in a message


def parse_targets(targets: str | Sequence[str] | None, given: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the columns of numbers; `given` are options that are for classes or masks only."""
    if targets is None:
        return None
    names = (targets,) if isinstance(targets, str) else tuple(map(str, targets))
    if not names or not all(name.strip() for name in names):
        raise ValueError("targets= must name one or more columns of numbers, got none")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"targets= names {repeated[0]!r} twice: name each column once")
    if reserved := [name for name in names if name in ("path", "error")]:
        raise ValueError(f"a target cannot be named {reserved[0]!r}, which predictions use: rename the column")
    if wrong := [name for name, value in given.items() if value not in (None, False, "auto", "none")]:
        raise ValueError(f"{wrong[0]}= is for classes or masks, and targets= are numbers: leave out one of them")
    return names


def find_target_columns(columns: Sequence[str], targets: Sequence[str], source: str) -> list[int]:
    """Return the indices of the columns of numbers; raise ValueError if one is missing or ambiguous."""
    names = [str(name).strip() for name in columns]
    for target in targets:
        if names.count(target) != 1:
            problem = "no column" if target not in names else f"{names.count(target)} columns"
            shown = suggest_closest(target, names) if target not in names else repr(target)
            raise ValueError(f"{source} has {problem} {shown}: its columns are {', '.join(names)}")
    return [names.index(target) for target in targets]


def parse_number(cell: Any) -> float | str:
    """Return a finite number, or the reason why there is none."""
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, str):
        cell = cell.strip()
        if not NUMBER.fullmatch(cell):
            if cell.casefold() in ("", "na", "n/a", "null", "none", "nan"):
                return "is missing"
            remedy = ": use a decimal point" if DECIMAL_COMMA.fullmatch(cell) else ""
            return f"{cell[:MAX_SHOWN] + '…' * (len(cell) > MAX_SHOWN)!r} is not a number{remedy}"
    elif cell is None:
        return "is missing"
    elif isinstance(cell, bool) or not isinstance(cell, Real | Decimal):
        return f"{str(cell)[:MAX_SHOWN]!r} is not a number"
    try:
        number = float(cell)
    except (OverflowError, ValueError):
        return "is too large"
    if math.isnan(number):
        return "is NaN"
    return number if abs(number) <= MAX_NUMBER else "is infinite" if math.isinf(number) else "is too large"


def looks_numeric(labels: Sequence[str]) -> str | None:
    """Return a label that shows that labels are measured numbers: all are numbers, most occur once, some have decimals."""
    distinct = dict.fromkeys(labels)
    if len(distinct) <= len(labels) // 2 or len(distinct) < 3:
        return None
    numbers = [parse_number(label) for label in distinct]
    if not all(isinstance(number, float) for number in numbers):
        return None
    return next((label for label, n in zip(distinct, numbers, strict=True) if not float(n).is_integer()), None)


def list_cells(value: Any) -> list[Any]:
    """Return the numbers of a Python sample as a list: one, or several in a sequence."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass
class NumberRows:
    """Numbers of the rows of a table, and the rows that lack some."""

    names: tuple[str, ...]
    values: list[list[float]] = field(default_factory=list)  # of the kept rows
    kept: list[int] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # image and reason

    def add(self, row: int, cells: Sequence[Any], image: str, location: str = "") -> None:
        """Keep a row, or list it as skipped; `location` is the file and the line."""
        if len(cells) != len(self.names):
            raise ValueError(f"{location or image} has {len(cells)} numbers for {len(self.names)} targets")
        numbers = list(map(parse_number, cells))
        for name, number in zip(self.names, numbers, strict=True):
            if isinstance(number, str):
                where = f" ({location})" if location else ""
                self.skipped.append((image, f"{SKIP_NO_NUMBER}: {name} {number}{where}"))
                return
        self.values.append([float(number) for number in numbers])
        self.kept.append(row)


def build_number_dataset(
    source: str,
    kind: str,
    store: Store,
    rows: NumberRows,
    splits: Sequence[str | None],
    options: parts.ReadOptions,
    *,
    items: np.ndarray | None = None,
    shards: np.ndarray | None = None,
    notes: Sequence[str] = (),
    skipped: Sequence[tuple[str, str]] = (),
) -> Dataset:
    """Build a dataset of the kept rows; `splits`, `items` and `shards` are of all rows."""
    if not rows.kept:
        first = f": {rows.skipped[0][0]}: {rows.skipped[0][1]}" if rows.skipped else ""
        raise ValueError(f"{source} has no image with numbers{first}")
    kept, values = np.array(rows.kept, dtype=np.int64), np.array(rows.values, dtype=np.float64)
    mine, shards = kept if items is None else items[kept], None if shards is None else shards[kept]
    built = {}
    for split, chosen in parts.group_by_split(source, [splits[row] for row in rows.kept]).items():
        of_split = None if shards is None else shards[chosen]
        built[split] = Images(store, mine[chosen], values[chosen], rows.names, split, of_split)
    dataset = Dataset(source, kind, built, tuple(notes), (*skipped, *rows.skipped))
    return parts.add_validation_split(dataset, options)

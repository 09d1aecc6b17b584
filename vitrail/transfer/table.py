"""The table of a comparison: its rows, the file that they are kept in, and the lines that people read."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitrail.checkpoints.files.atomic import atomic

METHODS = ("knn", "linear", "head", "lora", "full")
FILE = "table.json"


@dataclass(frozen=True)
class Row:
    """One method on one dataset."""

    method: str
    score: float  # top-1; mAP with several labels
    interval: tuple[float, float]
    seconds: float  # by the clock, in all calls, of what the method needs: features, measuring, training, judging
    trainable: int  # parameters
    about: str = ""  # k, C, epochs
    run: str | None = None  # the run directory, beside the table


@dataclass
class Table:
    """What is known so far. It belongs to one model, one dataset and one seed."""

    model: str
    data: str
    identity: str  # of the model's content, the pictures and the settings: another comparison has another
    measure: str  # "top1" or "map"
    split: str
    images: int  # that everything is judged on
    minutes: float
    spent: float = 0.0  # seconds of all calls together, each of them counted once
    begun: dict[str, float] = field(default_factory=dict)  # methods that were stopped, and the seconds that they took
    rows: tuple[Row, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)  # method and why
    unreadable: dict[str, str] = field(default_factory=dict)  # pictures that were left out, and why

    def has(self, method: str) -> bool:
        return any(row.method == method for row in self.rows)

    def add(self, row: Row) -> None:
        """A row in the order of the methods."""
        rows = [*(other for other in self.rows if other.method != row.method), row]
        self.rows = tuple(sorted(rows, key=lambda each: METHODS.index(each.method)))
        self.left_out.pop(row.method, None)
        self.begun.pop(row.method, None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, directory: Path) -> None:
        """All of it or nothing."""
        with atomic(directory / FILE) as file:
            file.write((json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n").encode())

    def lines(self) -> list[str]:
        """For people."""
        name = "top-1" if self.measure == "top1" else "mAP"
        cells = [("method", "", name, "95 %", "minutes", "trainable")]
        for row in self.rows:
            interval = "–".join(f"{100 * edge:.1f}" for edge in row.interval)
            score, minutes = f"{100 * row.score:.2f} %", f"{row.seconds / 60:.1f}"
            cells.append((row.method, row.about, score, interval, minutes, f"{row.trainable:,}"))
        widths = [max(len(each[column]) for each in cells) for column in range(6)]
        lines = [f"{self.model} on {self.data}: judged on {self.images:,} {self.split} pictures"]
        for each in cells:
            left = [each[0].ljust(widths[0]), each[1].ljust(widths[1])]
            lines.append("  ".join([*left, *(each[i].rjust(widths[i]) for i in range(2, 6))]))
        lines += [f"{method} was left out: {why}" for method, why in self.left_out.items()]
        if self.unreadable:
            path, why = next(iter(self.unreadable.items()))
            lines.append(f"{len(self.unreadable):,} pictures could not be read and are left out, {path} first ({why})")
        return lines


def read_table(directory: Path) -> Table | None:
    """The table of a comparison that was begun before, or none."""
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(Row(**{**row, "interval": (row["interval"][0], row["interval"][1])}) for row in data["rows"])
        if unknown := [row.method for row in rows if row.method not in METHODS]:
            raise ValueError(f"unknown method {unknown[0]!r}")
        return Table(**{**data, "rows": rows})
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is no table that can be read ({error}): give --out another name") from None

"""The table of a comparison of transfer methods: rows, text, and `table.json`, from which a comparison is resumed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitrail.utils.files import atomic_write
from vitrail.utils.text import format_table

CLASS_METHODS = ("knn", "linear", "head", "lora", "full")  # for classes of images
MASK_METHODS = ("linear", "linear-4", "lora", "full")  # for masks
METHODS = ("knn", "linear", "linear-4", "head", "lora", "full")  # in the order of the table
MEASURES = {"top1": "top-1", "map": "mAP", "miou": "mIoU"}
TABLE_FILE = "table.json"


@dataclass(frozen=True)
class TransferRow:
    """One method on one dataset."""

    method: str
    score: float  # top-1; mAP for multi-label data; mean IoU of masks
    interval: tuple[float, float]
    seconds: float  # wall time over all calls: features, measuring, training, evaluation
    trainable: int  # parameters
    about: str = ""  # settings: k, C, epochs
    run: str | None = None  # directory of its model, relative to the table
    converged: bool = True  # False for a training that the budget cut short, and whose loss had not stopped falling


@dataclass
class TransferTable:
    """Results so far, of one model, one dataset and one seed."""

    model: str
    data: str
    identity: str  # hash of the model, the images and the settings
    measure: str  # "top1", "map" or "miou"
    split: str
    images: int  # evaluated
    minutes: float
    spent: float = 0.0  # seconds of all calls
    begun: dict[str, float] = field(default_factory=dict)  # interrupted methods, and their seconds
    rows: tuple[TransferRow, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)  # method and reason
    unreadable: dict[str, str] = field(default_factory=dict)  # skipped images and reasons
    media: str = "image"  # what the samples are

    def has_method(self, method: str) -> bool:
        return any(row.method == method for row in self.rows)

    def add_row(self, row: TransferRow) -> None:
        """Add or replace the row of a method, in the order of the methods."""
        rows = [*(other for other in self.rows if other.method != row.method), row]
        self.rows = tuple(sorted(rows, key=lambda other: METHODS.index(other.method)))
        self.left_out.pop(row.method, None)
        self.begun.pop(row.method, None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, directory: Path) -> None:
        """Write the table atomically."""
        with atomic_write(directory / TABLE_FILE) as file:
            file.write((json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n").encode())

    def format_lines(self) -> list[str]:
        """Return the table as lines of text."""
        cells = [["method", "", MEASURES[self.measure], "95 %", "minutes", "trainable"]]
        for row in self.rows:
            interval = "–".join(f"{100 * edge:.1f}" for edge in row.interval)
            score, minutes = f"{100 * row.score:.2f} %", f"{row.seconds / 60:.1f}"
            about = row.about if row.converged else f"{row.about}, not converged"
            cells.append([row.method, about, score, interval, minutes, f"{row.trainable:,}"])
        lines = [f"{self.model} on {self.data}: evaluated on {self.images:,} {self.split} {self.media}s"]
        lines += format_table(cells, right=range(2, 6))
        if unfinished := [row.method for row in self.rows if not row.converged]:
            lines.append(
                f"{' and '.join(unfinished)} not converged: the score may rise with more time; raise --minutes"
            )
        lines += [f"{method} was skipped: {reason}" for method, reason in self.left_out.items()]
        if self.unreadable:
            path, reason = next(iter(self.unreadable.items()))
            lines.append(f"skipped {len(self.unreadable):,} unreadable {self.media}s, {path} first ({reason})")
        return lines


def read_table(directory: Path) -> TransferTable | None:
    """Return the table of an earlier call, or None."""
    path = directory / TABLE_FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        intervals = [(row["interval"][0], row["interval"][1]) for row in data["rows"]]
        pairs = zip(data["rows"], intervals, strict=True)
        rows = tuple(TransferRow(**{**row, "interval": interval}) for row, interval in pairs)
        if unknown := [row.method for row in rows if row.method not in METHODS]:
            raise ValueError(f"unknown method {unknown[0]!r}")
        return TransferTable(**{**data, "rows": rows})
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid table ({error}): give another --out") from None


def read_earlier_table(directory: Path) -> TransferTable | None:
    """Return the table of an earlier call in a directory; raise ValueError if it holds other files."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--out {directory} is a file: give a directory")
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    table = read_table(directory)
    if table is None:
        raise ValueError(f"{directory} is not empty and has no {TABLE_FILE}: give another --out")
    return table

"""Answers as rows of a file: CSV, JSON lines, Parquet, and for features NumPy's array with a list of paths beside it.

While rows are being made, every form is something that bytes are added to at its end: so it can be cut off where it is known to
be whole, gone on with, and joined with others. Parquet is none of that; its rows wait as a stream of Arrow's, and become Parquet
when all are there. N rows, F features.
"""

import csv
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from vitrail.checkpoints.files.atomic import atomic

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npy": "npy"}
ANSWER = (("label", "text"), ("score", "number"))
GROUP = 2**14  # rows of a row group of Parquet, at least


@dataclass(frozen=True)
class Row:
    """What is said of one picture: its answers, the surest first, or its features; or why there is nothing to say."""

    path: str
    answers: tuple[tuple[str, float], ...] = ()
    features: np.ndarray | None = None  # float32 [F]
    error: str | None = None

    @property
    def label(self) -> str | None:
        return self.answers[0][0] if self.answers else None

    @property
    def score(self) -> float | None:
        return self.answers[0][1] if self.answers else None


class Form(Protocol):
    """How rows are written. `streams` are the endings of the files' names: the first is the one that was asked for."""

    streams: ClassVar[tuple[str, ...]]
    wide: ClassVar[bool]  # whether it has to know how many features there are before it begins

    def begin(self, total: int, width: int) -> list[bytes]:
        """What stands before the first row, in each stream."""
        ...

    def rows(self, rows: Sequence[Row], width: int) -> list[bytes]:
        """Some rows, in each stream."""
        ...

    def finish(self, whole: Path, out: Path) -> None:
        """A stream that has all rows becomes the file that was asked for."""
        ...


class Plain:
    """Rows that are in the file as they will stay."""

    streams: ClassVar[tuple[str, ...]] = ("",)
    wide: ClassVar[bool] = False

    def finish(self, whole: Path, out: Path) -> None:
        """The file takes its name."""
        whole.replace(out)


@dataclass(frozen=True)
class LabelsCSV(Plain):
    """path, label, score, error; then the answers that come after the first."""

    top: int = 1

    def columns(self) -> list[str]:
        more = [f"{name}{place}" for place in range(2, self.top + 1) for name in ("label", "score")]
        return ["path", "label", "score", "error", *more]

    def begin(self, total: int, width: int) -> list[bytes]:
        return [table([self.columns()])]

    def rows(self, rows: Sequence[Row], width: int) -> list[bytes]:
        return [table([self.cells(row) for row in rows])]

    def cells(self, row: Row) -> list[str]:
        said = [cell for label, score in row.answers for cell in (label, number(score))]
        said += [""] * (2 * self.top - len(said))
        return [row.path, *said[:2], row.error or "", *said[2:]]


@dataclass(frozen=True)
class LabelsLines(Plain):
    """An object a line."""

    top: int = 1

    def begin(self, total: int, width: int) -> list[bytes]:
        return [b""]

    def rows(self, rows: Sequence[Row], width: int) -> list[bytes]:
        return [lines([self.told(row) for row in rows])]

    def told(self, row: Row) -> dict[str, Any]:
        answers = [{"label": label, "score": float(number(score))} for label, score in row.answers]
        first = answers[0] if answers else {"label": None, "score": None}
        return {"path": row.path, **first, "error": row.error} | ({"answers": answers} if self.top > 1 else {})


@dataclass(frozen=True)
class FeaturesCSV(Plain):
    """path, error, and a column for each feature."""

    wide: ClassVar[bool] = True

    def begin(self, total: int, width: int) -> list[bytes]:
        return [table([["path", "error", *(f"f{place}" for place in range(width))]])]

    def rows(self, rows: Sequence[Row], width: int) -> list[bytes]:
        return [table([[row.path, row.error or "", *self.cells(row, width)] for row in rows])]

    def cells(self, row: Row, width: int) -> list[str]:
        return [""] * width if row.features is None else [f"{value:.9g}" for value in row.features.tolist()]


@dataclass(frozen=True)
class FeaturesLines(Plain):
    """An object a line, with a list of numbers."""

    def begin(self, total: int, width: int) -> list[bytes]:
        return [b""]

    def rows(self, rows: Sequence[Row], width: int) -> list[bytes]:
        return [lines([self.told(row) for row in rows])]

    def told(self, row: Row) -> dict[str, Any]:
        values = None if row.features is None else [float(f"{value:.9g}") for value in row.features.tolist()]
        return {"path": row.path, "error": row.error, "features": values}


@dataclass(frozen=True)
class FeaturesArray(Plain):
    """NumPy's float32 [N, F], with a CSV of the paths beside it; a picture that could not be read is a row of nan."""

    streams: ClassVar[tuple[str, ...]] = ("", ".paths.csv")
    wide: ClassVar[bool] = True

    def begin(self, total: int, width: int) -> list[bytes]:
        head = io.BytesIO()
        np.lib.format.write_array_header_2_0(head, {"descr": "<f4", "fortran_order": False, "shape": (total, width)})
        return [head.getvalue(), table([["path", "error"]])]

    def rows(self, rows: Sequence[Row], width: int) -> list[bytes]:
        values = np.full((len(rows), width), np.nan, dtype="<f4")
        for place, row in enumerate(rows):
            if row.features is not None:
                values[place] = row.features
        return [values.tobytes(), table([[row.path, row.error or ""] for row in rows])]


@dataclass(frozen=True)
class Parquet:
    """Rows of Arrow's stream, which become row groups at the end."""

    columns: tuple[tuple[str, str], ...]  # names, and the kinds of their values
    cells: Callable[[Row], list[Any]]  # of a row, in the order of the columns
    streams: ClassVar[tuple[str, ...]] = ("",)
    wide: ClassVar[bool] = False

    def schema(self) -> Any:
        arrow = library()
        kinds = {"text": arrow.string(), "number": arrow.float32(), "numbers": arrow.list_(arrow.float32())}
        return arrow.schema([(name, kinds[kind]) for name, kind in self.columns])

    def begin(self, total: int, width: int) -> list[bytes]:
        return [self.schema().serialize().to_pybytes()]

    def rows(self, rows: Sequence[Row], width: int) -> list[bytes]:
        arrow, schema = library(), self.schema()
        columns = zip(*(self.cells(row) for row in rows), strict=True)
        arrays = [arrow.array(list(column), kind) for column, kind in zip(columns, schema.types, strict=True)]
        return [arrow.record_batch(arrays, schema=schema).serialize().to_pybytes()]

    def finish(self, whole: Path, out: Path) -> None:
        """One part after another is read and written, so that memory never holds all."""
        arrow = library()
        from pyarrow import ipc, parquet

        with whole.open("rb") as source, atomic(out) as file:
            waiting: list[Any] = []
            with parquet.ParquetWriter(file, self.schema()) as writer:
                for batch in ipc.open_stream(source):
                    waiting.append(batch)
                    if sum(len(each) for each in waiting) >= GROUP:
                        writer.write_table(arrow.Table.from_batches(waiting))
                        waiting = []
                if waiting:
                    writer.write_table(arrow.Table.from_batches(waiting))
        whole.unlink()


def labels_parquet(top: int) -> Parquet:
    """path, label, score, error; then the answers that come after the first."""

    def cells(row: Row) -> list[Any]:
        said: list[Any] = [cell for answer in row.answers for cell in answer]
        said += [None] * (2 * top - len(said))
        return [row.path, *said[:2], row.error, *said[2:]]

    more = [(f"{name}{place}", kind) for place in range(2, top + 1) for name, kind in ANSWER]
    return Parquet((("path", "text"), *ANSWER, ("error", "text"), *more), cells)


def features_parquet() -> Parquet:
    """path, error, and a list of numbers."""
    columns = (("path", "text"), ("error", "text"), ("features", "numbers"))
    return Parquet(columns, lambda row: [row.path, row.error, row.features])


def library() -> Any:
    """pyarrow, or an error that says how to get it."""
    try:
        import pyarrow
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'vitrail[parquet]'") from None
    return pyarrow


def form_of(out: str, told: str | None, gives: str, top: int) -> Form:
    """The form that a name's ending or --format asks for."""
    ending = Path(out).suffix.lower()
    name = told or ("csv" if out == "-" else SUFFIXES.get(ending))
    forms: Mapping[str, Form] = (
        {"csv": LabelsCSV(top), "jsonl": LabelsLines(top), "parquet": labels_parquet(top)}
        if gives == "logits"
        else {"csv": FeaturesCSV(), "jsonl": FeaturesLines(), "parquet": features_parquet(), "npy": FeaturesArray()}
    )
    if name is None or name not in forms:
        said = f"--format {told}" if told else f"--out {out}"
        raise ValueError(f"{said}: the forms are {', '.join(forms)}; end the name in one of them, or say --format")
    if out == "-" and name not in ("csv", "jsonl"):
        raise ValueError(f"--format {name} cannot be written to standard output: use csv or jsonl, or --out FILE")
    if name == "parquet":
        library()
    return forms[name]


def table(cells: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")


def lines(told: list[dict[str, Any]]) -> bytes:
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in told)
    return text.encode("utf-8", "backslashreplace")


def number(score: float) -> str:
    """A score to six digits: what comes after them depends on the size of the batch."""
    return f"{score:.6g}"


def joined(parts: Sequence[Path], whole: Path) -> None:
    """Streams one after another."""
    with atomic(whole) as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file, 2**22)

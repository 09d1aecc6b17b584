"""Formats of prediction files: CSV, JSON lines, Parquet, and for features a NumPy array with a list of paths.

While rows are computed, every format is an append-only byte stream, so it can be truncated, resumed and concatenated. Parquet
rows are first written as an Arrow stream and converted at the end. N rows, F features.
"""

import csv
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vitrail.deploy.runtimes.panoptic import PanopticSegment
from vitrail.reports.masks import measure_shares
from vitrail.utils.files import atomic_write

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npy": "npy"}
PREDICTION_COLUMNS = (("label", "text"), ("score", "number"))
MIN_ROW_GROUP = 2**14  # rows of a Parquet row group


@dataclass(frozen=True)
class PredictionRow:
    """The result for one image: predictions, the most probable first, or numbers, features, a mask or segments, or an error."""

    path: str
    predictions: tuple[tuple[str, float], ...] = ()
    features: np.ndarray | None = None  # float32 [F]
    values: tuple[tuple[str, float], ...] = ()  # numbers by the names of the targets
    error: str | None = None
    mask: np.ndarray | None = None  # uint8 [H, W], indices of labels
    labels: tuple[str, ...] = ()  # the classes of a mask, or of segments
    segments: tuple[PanopticSegment, ...] = ()  # of a panoptic prediction
    segment_ids: np.ndarray | None = None  # int32 [H, W], the id of the segment of each pixel, 0 for none
    overlay: bytes | None = None  # a JPEG of the mask or the segments over their image
    index: int = field(default=0, compare=False)  # of the image, in the order of the inputs

    @property
    def shares(self) -> tuple[tuple[str, float], ...]:
        """Return the classes that the mask has and their shares of its pixels, the largest first."""
        shares = {} if self.mask is None else measure_shares(self.mask)
        return tuple((self.labels[index], share) for index, share in shares.items())

    @property
    def label(self) -> str | None:
        return self.predictions[0][0] if self.predictions else None

    @property
    def score(self) -> float | None:
        return self.predictions[0][1] if self.predictions else None


@dataclass(frozen=True)
class RowFormat:
    """A file format. `streams` are the suffixes of its files; the first is the requested file."""

    streams: ClassVar[tuple[str, ...]] = ("",)
    needs_width: ClassVar[bool] = False  # True if the header needs the number of features
    feature_bytes: ClassVar[int] = 0  # of one feature, if all have the same size

    def encode_header(self, total: int, width: int) -> list[bytes]:
        """Return the header of each stream."""
        return [b""]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        """Return the rows encoded for each stream."""
        raise NotImplementedError

    def finish_file(self, stream: Path, out: Path) -> None:
        """Convert a complete stream to the requested file: by renaming, if they are the same."""
        stream.replace(out)

    def stream_paths(self, path: Path) -> list[Path]:
        """Return the files of this format beside a path, which is the first of them."""
        return [path.with_name(path.name + suffix) for suffix in self.streams]

    def describe_joining(self) -> dict[str, Any]:
        """Return what `join.py` needs to join parts of this format: its name, and the values that `finish_file` reads."""
        return {"format": type(self).__name__}


def label_columns(top: int) -> list[tuple[str, str]]:
    """Return the columns path, label, score, error, then label2, score2, … and the kinds of their values."""
    more = [(f"{name}{rank}", kind) for rank in range(2, top + 1) for name, kind in PREDICTION_COLUMNS]
    return [("path", "text"), *PREDICTION_COLUMNS, ("error", "text"), *more]


def label_values(row: PredictionRow, top: int) -> list[Any]:
    """Return the values of a row in the order of `label_columns`; None where there is none."""
    values: list[Any] = [value for prediction in row.predictions for value in prediction]
    values += [None] * (2 * top - len(values))
    return [row.path, *values[:2], row.error, *values[2:]]


@dataclass(frozen=True)
class LabelsCSV(RowFormat):
    """A CSV of labels and scores."""

    top: int = 1

    def encode_header(self, total: int, width: int) -> list[bytes]:
        return [encode_csv([[name for name, _ in label_columns(self.top)]])]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [encode_csv([[format_cell(value) for value in label_values(row, self.top)] for row in rows])]


@dataclass(frozen=True)
class LabelsJSONL(RowFormat):
    """One JSON object per line."""

    top: int = 1

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [encode_jsonl([self.to_dict(row) for row in rows])]

    def to_dict(self, row: PredictionRow) -> dict[str, Any]:
        predictions = [{"label": label, "score": float(format_cell(score))} for label, score in row.predictions]
        first = predictions[0] if predictions else {"label": None, "score": None}
        return {"path": row.path, **first, "error": row.error} | ({"answers": predictions} if self.top > 1 else {})


@dataclass(frozen=True)
class NumbersCSV(RowFormat):
    """Columns path, one per target, and error."""

    targets: tuple[str, ...] = ()

    def encode_header(self, total: int, width: int) -> list[bytes]:
        return [encode_csv([["path", *self.targets, "error"]])]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [encode_csv([[format_cell(value) for value in number_values(row, self.targets)] for row in rows])]


@dataclass(frozen=True)
class NumbersJSONL(RowFormat):
    """One JSON object per line, with a key for each target."""

    targets: tuple[str, ...] = ()

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        names = ("path", *self.targets, "error")
        cells = ([round_number(value) for value in number_values(row, self.targets)] for row in rows)
        return [encode_jsonl([dict(zip(names, values, strict=True)) for values in cells])]


def number_values(row: PredictionRow, targets: tuple[str, ...]) -> list[Any]:
    """Return the path, the number of each target and the error of a row."""
    return [row.path, *(dict(row.values).get(target) for target in targets), row.error]


def round_number(value: Any) -> Any:
    """Return a number with six significant digits, other values as they are."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class FeaturesCSV(RowFormat):
    """Columns path, error, and one per feature."""

    needs_width: ClassVar[bool] = True

    def encode_header(self, total: int, width: int) -> list[bytes]:
        return [encode_csv([["path", "error", *(f"f{index}" for index in range(width))]])]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        values = [[""] * width if row.features is None else [f"{v:.9g}" for v in row.features.tolist()] for row in rows]
        return [encode_csv([[row.path, row.error or "", *cells] for row, cells in zip(rows, values, strict=True)])]


@dataclass(frozen=True)
class FeaturesJSONL(RowFormat):
    """One JSON object per line, with the features as a list."""

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [encode_jsonl([self.to_dict(row) for row in rows])]

    def to_dict(self, row: PredictionRow) -> dict[str, Any]:
        values = None if row.features is None else [float(f"{value:.9g}") for value in row.features.tolist()]
        return {"path": row.path, "error": row.error, "features": values}


@dataclass(frozen=True)
class FeaturesNPY(RowFormat):
    """A float32 array [N, F], with a CSV of the paths; an unreadable image is a row of NaN."""

    streams: ClassVar[tuple[str, ...]] = ("", ".paths.csv")
    needs_width: ClassVar[bool] = True
    feature_bytes: ClassVar[int] = 4

    def encode_header(self, total: int, width: int) -> list[bytes]:
        head = io.BytesIO()
        np.lib.format.write_array_header_2_0(head, {"descr": "<f4", "fortran_order": False, "shape": (total, width)})
        return [head.getvalue(), encode_csv([["path", "error"]])]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        values = np.full((len(rows), width), np.nan, dtype="<f4")
        for index, row in enumerate(rows):
            if row.features is not None:
                values[index] = row.features
        return [values.tobytes(), encode_csv([[row.path, row.error or ""] for row in rows])]


@dataclass(frozen=True)
class ParquetFormat(RowFormat):
    """An Arrow stream, converted to Parquet row groups at the end."""

    columns: Sequence[tuple[str, str]]  # names and kinds of values
    values: Callable[[PredictionRow], list[Any]]  # of a row, in the order of the columns

    def schema(self) -> Any:
        arrow = import_pyarrow()
        kinds = {"text": arrow.string(), "number": arrow.float32(), "numbers": arrow.list_(arrow.float32())}
        return arrow.schema([(name, kinds[kind]) for name, kind in self.columns])

    def encode_header(self, total: int, width: int) -> list[bytes]:
        return [self.schema().serialize().to_pybytes()]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        arrow, schema = import_pyarrow(), self.schema()
        columns = zip(*(self.values(row) for row in rows), strict=True)
        arrays = [arrow.array(list(column), kind) for column, kind in zip(columns, schema.types, strict=True)]
        return [arrow.record_batch(arrays, schema=schema).serialize().to_pybytes()]

    def finish_file(self, stream: Path, out: Path) -> None:
        """Convert the stream batch by batch, so that memory never holds all rows."""
        arrow = import_pyarrow()
        from pyarrow import ipc, parquet

        with stream.open("rb") as source, atomic_write(out) as file:
            pending: list[Any] = []
            batches = ipc.open_stream(source)
            with parquet.ParquetWriter(file, batches.schema) as writer:
                for batch in batches:
                    pending.append(batch)
                    if sum(map(len, pending)) >= MIN_ROW_GROUP:
                        writer.write_table(arrow.Table.from_batches(pending))
                        pending = []
                if pending:
                    writer.write_table(arrow.Table.from_batches(pending))
        stream.unlink()


def import_pyarrow() -> Any:
    """Return pyarrow; raise ValueError if it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'vitrail[parquet]'") from None
    return pyarrow


def labels_formats(top: int) -> dict[str, RowFormat]:
    """Return the formats of predictions by name."""
    parquet = ParquetFormat(label_columns(top), lambda row: label_values(row, top))
    return {"csv": LabelsCSV(top), "jsonl": LabelsJSONL(top), "parquet": parquet}


def numbers_formats(targets: tuple[str, ...]) -> dict[str, RowFormat]:
    """Return the formats of numbers by name."""
    columns = [("path", "text"), *((name, "number") for name in targets), ("error", "text")]
    parquet = ParquetFormat(columns, lambda row: number_values(row, targets))
    return {"csv": NumbersCSV(targets), "jsonl": NumbersJSONL(targets), "parquet": parquet}


def features_formats() -> dict[str, RowFormat]:
    """Return the formats of features by name."""
    columns = [("path", "text"), ("error", "text"), ("features", "numbers")]
    parquet = ParquetFormat(columns, lambda row: [row.path, row.error, row.features])
    return {"csv": FeaturesCSV(), "jsonl": FeaturesJSONL(), "parquet": parquet, "npy": FeaturesNPY()}


def select_format(
    out: str, requested: str | None, output_kind: str, top: int, targets: tuple[str, ...] | None = None
) -> RowFormat:
    """Return the format of --format or of the suffix of `out`; `targets` are the names of predicted numbers."""
    name = requested or ("csv" if out == "-" else SUFFIXES.get(Path(out).suffix.lower()))
    formats = labels_formats(top) if output_kind == "logits" else features_formats()
    formats = numbers_formats(targets) if targets is not None else formats
    if name is None or name not in formats:
        option = f"--format {requested}" if requested else f"--out {out}"
        raise ValueError(f"unknown format of {option}: use --format or a file suffix of {', '.join(formats)}")
    if out == "-" and name not in ("csv", "jsonl"):
        raise ValueError(f"--format {name} cannot be written to standard output: use csv or jsonl, or --out FILE")
    if name == "parquet":
        import_pyarrow()
    return formats[name]


def encode_csv(cells: list[list[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")


def encode_jsonl(objects: list[dict[str, Any]]) -> bytes:
    text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in objects)
    return text.encode("utf-8", "backslashreplace")


def format_cell(value: Any) -> str:
    """Return a cell of a CSV; numbers have six significant digits, because further ones depend on the batch size."""
    if isinstance(value, float) and 1e6 <= abs(value) < 1e16:
        return f"{float(f'{value:.6g}'):.0f}"  # a price is not written as 1.23457e+06
    return f"{value:.6g}" if isinstance(value, float) else value or ""


def concatenate_files(parts: Sequence[Path], out: Path) -> None:
    """Concatenate streams."""
    with atomic_write(out, sum(part.stat().st_size for part in parts)) as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file, 2**22)

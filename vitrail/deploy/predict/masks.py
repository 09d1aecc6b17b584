"""Formats of predicted masks: palette PNGs in a directory, JSON lines, a COCO file, and lines of text.

Run lengths are COCO's compressed strings. All formats are append-only streams of rows, as those of labels: the COCO file is made
from JSON lines at the end, and the stream of a directory is the table of its masks.
"""

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

import numpy as np

from vitrail.data.sources.files import is_image_name
from vitrail.deploy.predict.formats import PredictionRow, RowFormat, encode_csv, encode_jsonl
from vitrail.deploy.predict.inputs import ImageInputs
from vitrail.deploy.predict.resume import Journal, find_streams, journal_path
from vitrail.reports.masks import Colour, encode_palette_png, format_colour, measure_shares
from vitrail.utils.files import atomic_write
from vitrail.utils.json import read_json_file
from vitrail.utils.rle import encode_rle

TABLE, PANOPTIC_TABLE = "masks.csv", "panoptic.json"  # of the masks in a directory, and of panoptic ones
COLUMNS = ("path", "mask", "error")  # of the table, before the classes
PANOPTIC_HEADER = b'{\n"info": {"description": "vitrail predict --panoptic"}'
HEADERS = {TABLE: re.compile(rb"path,mask,error(?=[,\r\n]|$)"), PANOPTIC_TABLE: re.compile(re.escape(PANOPTIC_HEADER))}
SHARE_DIGITS = 6
SUFFIXES = {".json": "coco", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def is_directory(out: str) -> bool:
    """Return whether a name is that of a directory: it ends with a slash, or there is one."""
    return out.endswith(("/", os.sep)) or Path(out).is_dir()


def needs_masks(out: str, requested: str | None) -> bool:
    """Return whether only masks can be written to `out`, whatever the model is."""
    name = requested or ("png" if out != "-" and is_directory(out) else SUFFIXES.get(Path(out).suffix.lower()))
    return name in ("png", "coco", "text")


def check_directory(directory: Path, name: str = TABLE) -> None:
    """Raise ValueError for a directory with files that `predict` did not write with this table: a mask could replace an image."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give the name of a directory")
    if not directory.is_dir() or all(path.name.startswith(f"{name}.") for path in directory.iterdir()):
        return  # empty, or with no more than the streams of processes that have just started
    table = directory / name
    if not is_table(table) and not any(is_stream(path) for path in find_streams(table)):
        raise ValueError(f"{directory} has other files: give a new or an empty directory")


def is_table(path: Path) -> bool:
    """Return whether a file begins as a table of masks."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(len(PANOPTIC_HEADER))
    return HEADERS[find_table_name(path)].match(start) is not None


def find_table_name(path: Path) -> str:
    """Return the name of the table that a file is, or that it becomes."""
    return PANOPTIC_TABLE if path.name.startswith(PANOPTIC_TABLE) else TABLE


def is_stream(path: Path) -> bool:
    """Return whether a file is an unfinished table of masks: it has the header or a journal."""
    if is_table(path):
        return True
    try:
        read_json_file(journal_path(path), Journal)
    except (OSError, ValueError):  # none, or of another program
        return False
    return True


def read_mask_names(table: Path) -> set[str]:
    """Return the masks that a table lists; none if it is not a table of masks. A row that was cut off is left out."""
    if find_table_name(table) == PANOPTIC_TABLE:
        return read_panoptic_names(table)
    if not is_table(table):
        return set()
    with table.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.reader(file) if len(row) >= len(COLUMNS)]
    return {row[1] for row in rows[1:] if row[1]}


def read_panoptic_names(table: Path) -> set[str]:
    """Return the PNGs that a panoptic file, or the JSON lines that it is made from, list."""
    if not table.is_file():
        return set()
    try:
        if is_table(table):
            return {str(annotation["file_name"]) for annotation in json.loads(table.read_bytes())["annotations"]}
        with table.open("rb") as file:
            rows = [json.loads(line) for line in file if line.endswith(b"\n")]
        return {str(row["mask"]) for row in rows if "mask" in row}
    except (ValueError, KeyError, TypeError):  # damaged, or of another program: its files stay
        return set()


def delete_masks(directory: Path, names: Set[str], keep: Set[str] = frozenset(), keep_overlays: bool = False) -> None:
    """Delete the masks of a table and their overlays, except the masks to keep; names that leave the directory are ignored."""
    kept = {name.casefold() for name in keep}
    for name in names:
        path = PurePosixPath(name)
        if path.suffix != ".png" or path.is_absolute() or ".." in path.parts:
            continue
        if name.casefold() not in kept:
            (directory / path).unlink(missing_ok=True)
        if name.casefold() not in kept or not keep_overlays:
            (directory / path.with_suffix(".overlay.jpg")).unlink(missing_ok=True)


def delete_interrupted_masks(directory: Path, name: str = TABLE) -> None:
    """Delete the masks that the table of an interrupted run lists."""
    for stream in find_streams(directory / name):
        delete_masks(directory, read_mask_names(stream))


def describe_classes(
    mask: np.ndarray, labels: Sequence[str], colours: Sequence[Colour] | None = None
) -> list[dict[str, Any]]:
    """Return label, share of the pixels, run lengths and, if given, colour of each class of a mask, the largest first."""
    return [
        {"label": labels[index], "share": round(share, SHARE_DIGITS), "rle": encode_class(mask, index)}
        | ({} if colours is None else {"colour": format_colour(colours[index])})
        for index, share in measure_shares(mask).items()
    ]


def encode_class(mask: np.ndarray, index: int) -> dict[str, Any]:
    """Return the run lengths of the pixels of a class, as COCO files have them."""
    return {"size": list(mask.shape), "counts": encode_rle(mask == index)}


@dataclass(frozen=True)
class MasksJSONL(RowFormat):
    """One JSON object per line."""

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [encode_jsonl([self.to_dict(row) for row in rows])]

    def to_dict(self, row: PredictionRow) -> dict[str, Any]:
        if row.mask is None:
            return {"path": row.path, "height": None, "width": None, "classes": [], "error": row.error}
        height, width = row.mask.shape
        classes = describe_classes(row.mask, row.labels)
        return {"path": row.path, "height": height, "width": width, "classes": classes, "error": row.error}


@dataclass(frozen=True)
class MasksText(RowFormat):
    """A line per image with the shares of its classes, for a terminal."""

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return ["".join(f"{row.path}: {row.error or format_shares(row)}\n" for row in rows).encode("utf-8", "replace")]


def format_shares(row: PredictionRow) -> str:
    """Return the classes of a mask with their shares in per cent, the largest first."""
    return ", ".join(f"{label} {100 * share:.1f} %" for label, share in row.shares)


@dataclass(frozen=True)
class MasksCOCO(RowFormat):
    """A COCO file: an annotation per image and class. Images that cannot be read are listed under `errors`."""

    labels: tuple[str, ...]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [encode_jsonl([self.to_dict(row) for row in rows])]

    def to_dict(self, row: PredictionRow) -> dict[str, Any]:
        """Return the image and its annotations, as yet without their numbers."""
        if row.mask is None:
            return {"file_name": row.path, "error": row.error}
        mask, (height, width) = row.mask, row.mask.shape
        annotations = [
            {
                "category_id": index + 1,
                "segmentation": encode_class(mask, index),
                "area": int((mask == index).sum()),
                "bbox": find_box(mask == index),
                "iscrowd": 0,
            }
            for index in sorted(measure_shares(mask))
        ]
        return {"file_name": row.path, "height": height, "width": width, "annotations": annotations}

    def describe_joining(self) -> dict[str, Any]:
        return {**super().describe_joining(), "labels": self.labels}

    def finish_file(self, stream: Path, out: Path) -> None:
        """Convert the stream line by line, so that memory never holds all rows."""

        def images() -> Iterator[dict[str, Any]]:
            for number, row in read_lines(stream):
                if "error" not in row:
                    yield {"id": number, **{name: row[name] for name in ("file_name", "height", "width")}}

        def annotations() -> Iterator[dict[str, Any]]:
            count = 0
            for number, row in read_lines(stream):
                for annotation in row.get("annotations", ()):
                    count += 1
                    yield {"id": count, "image_id": number, **annotation}

        errors = (row for _, row in read_lines(stream) if "error" in row)
        categories = ({"id": index + 1, "name": name} for index, name in enumerate(self.labels))
        parts = {"images": images(), "annotations": annotations(), "categories": categories, "errors": errors}
        write_parts(out, parts)
        stream.unlink()


def read_lines(stream: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number, from 1, and content of each JSON line."""
    with stream.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, json.loads(line)


def write_parts(out: Path, parts: Mapping[str, Iterator[dict[str, Any]]], header: bytes = b"{") -> None:
    """Write a JSON object of lists, item by item, after a header that begins it."""
    with atomic_write(out) as file:
        file.write(header)
        for number, (name, items) in enumerate(parts.items()):
            file.write(f"{',' if number or header != b'{' else ''}\n{json.dumps(name)}: ".encode())
            write_list(file, items)
        file.write(b"\n}\n")


def write_list(file: IO[bytes], items: Iterator[dict[str, Any]]) -> None:
    """Write objects as a JSON list, one per line."""
    file.write(b"[")
    for number, item in enumerate(items):
        file.write((",\n" if number else "\n").encode() + encode_jsonl([item]).rstrip())
    file.write(b"]")


def find_box(pixels: np.ndarray) -> list[int]:
    """Return left, top, width and height of the box around the pixels of a bool mask that has some."""
    rows, columns = np.flatnonzero(pixels.any(1)), np.flatnonzero(pixels.any(0))
    return [int(value) for value in (columns[0], rows[0], np.ptp(columns) + 1, np.ptp(rows) + 1)]


@dataclass(frozen=True)
class MaskFiles(RowFormat):
    """Palette PNGs in a directory, and overlays beside them. The stream is a table of path, mask, error and the shares."""

    table: ClassVar[str] = TABLE

    directory: Path
    names: Sequence[str]  # of the masks, relative to the directory, without a suffix, by the index of the image
    labels: tuple[str, ...]
    colours: tuple[Colour, ...]
    overlays: bool = False

    def encode_header(self, total: int, width: int) -> list[bytes]:
        return [encode_csv([[*COLUMNS, *self.labels]])]

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        """Write the masks of these rows, then return the rows: a row in the table has its mask."""
        return [encode_csv([self.write_row(row) for row in rows])]

    def write_row(self, row: PredictionRow) -> list[str]:
        if row.mask is None:
            return [row.path, "", row.error or "", *[""] * len(self.labels)]
        name = self.names[row.index]
        path = self.directory / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, encode_palette_png(row.mask, self.colours))
        if row.overlay is not None:
            write_synced(self.directory / f"{name}.overlay.jpg", row.overlay)
        shares = measure_shares(row.mask)
        return [row.path, f"{name}.png", "", *(f"{shares.get(index, 0.0):.6g}" for index in range(len(self.labels)))]

    def describe_joining(self) -> dict[str, Any]:
        return {**super().describe_joining(), "labels": self.labels, "overlays": self.overlays}

    def finish_file(self, stream: Path, out: Path) -> None:
        """Replace the table, and delete the masks and overlays that only the earlier one lists."""
        delete_masks(self.directory, read_mask_names(out), read_mask_names(stream), self.overlays)
        super().finish_file(stream, out)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file to the disk. What an interruption leaves of it is not in the table, and is written again on resuming."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def name_masks(inputs: ImageInputs, count: int) -> list[str]:
    """Return a name without a suffix for the mask of each image: its path below the folder that all images share.

    Row 12 of `train.parquet` is `train-12`. A name that another image has already gets a number, `cat-2`; names that differ
    only in case count as equal.
    """
    paths = [PurePosixPath(inputs.name(index).replace("\\", "/")) for index in range(count)]
    is_mixed = len({path.is_absolute() for path in paths}) > 1
    shared = "" if is_mixed else os.path.commonpath({path.parent for path in paths})
    names: list[str] = []
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # the last of each base name
    for path in paths:
        relative = path.relative_to(shared) if shared else path
        parts = [part for part in relative.with_name(remove_suffix(path.name)).parts if part not in ("/", "..")]
        base = name = "/".join(parts)
        while name.casefold() in taken:
            numbers[base.casefold()] = numbers.get(base.casefold(), 1) + 1
            name = f"{base}-{numbers[base.casefold()]}"
        taken.add(name.casefold())
        names.append(name)
    return names


def remove_suffix(name: str) -> str:
    """Return the name of a file without an image suffix, or that of a row, `train.parquet[12]`, as `train-12`."""
    if row := re.fullmatch(r"(.+?)(\.[A-Za-z]\w*)?\[(\d+)\]", name):
        return f"{row[1]}-{row[3]}"
    return PurePosixPath(name).stem if is_image_name(name) else name


def select_mask_format(
    out: str,
    requested: str | None,
    labels: tuple[str, ...],
    colours: tuple[Colour, ...],
    inputs: ImageInputs,
    count: int,
) -> RowFormat:
    """Return the format of masks of --format or of the suffix of `out`."""
    default = "text" if out == "-" else "png" if is_directory(out) else SUFFIXES.get(Path(out).suffix.lower())
    name, option = requested or default, f"--format {requested}" if requested else f"--out {out}"
    if name not in ("png", "jsonl", "coco", "text") or (name == "png") != is_directory(out):
        raise ValueError(f"{option} is not for masks: use --out masks/ (PNG), masks.jsonl or masks.json (COCO)")
    if (out == "-" and name == "coco") or (out != "-" and name == "text"):
        raise ValueError(
            f"--format {name} is not for --out {out}: use {'jsonl' if out == '-' else 'png, jsonl or coco'}"
        )
    if name == "png":
        return MaskFiles(Path(out), name_masks(inputs, count), labels, colours)
    return {"jsonl": MasksJSONL(), "coco": MasksCOCO(labels), "text": MasksText()}[name]

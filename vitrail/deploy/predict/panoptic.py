"""Formats of panoptic segments: COCO's panoptic format in a directory, JSON lines, and lines of text.

In COCO's format, a PNG has the id of the segment of each pixel as R + 256 G + 65536 B, 0 for none, and one JSON file lists the
segments of all images. It is made from JSON lines at the end, as that of masks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from vitrail.deploy.predict.formats import PredictionRow, RowFormat, encode_jsonl
from vitrail.deploy.predict.inputs import ImageInputs
from vitrail.deploy.predict.masks import (
    PANOPTIC_HEADER,
    PANOPTIC_TABLE,
    SUFFIXES,
    delete_masks,
    is_directory,
    name_masks,
    read_lines,
    read_mask_names,
    write_parts,
    write_synced,
)
from vitrail.deploy.runtimes.panoptic import PanopticSegment
from vitrail.utils.rle import encode_rle

SCORE_DIGITS = 6


def describe_segments(ids: np.ndarray, segments: Sequence[PanopticSegment]) -> list[dict[str, Any]]:
    """Return id, label, kind, score, area, box and run lengths of each segment, for JSON."""
    return [
        {
            "id": segment.id,
            "label": segment.label,
            "thing": segment.thing,
            "score": round(segment.score, SCORE_DIGITS),
            "area": segment.area,
            "bbox": list(segment.box),
            "rle": {"size": list(ids.shape), "counts": encode_rle(ids == segment.id)},
        }
        for segment in segments
    ]


@dataclass(frozen=True)
class PanopticJSONL(RowFormat):
    """One JSON object per line."""

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [encode_jsonl([self.to_dict(row) for row in rows])]

    def to_dict(self, row: PredictionRow) -> dict[str, Any]:
        if row.segment_ids is None:
            return {"path": row.path, "height": None, "width": None, "segments": [], "error": row.error}
        height, width = row.segment_ids.shape
        segments = describe_segments(row.segment_ids, row.segments)
        return {"path": row.path, "height": height, "width": width, "segments": segments, "error": row.error}


@dataclass(frozen=True)
class PanopticText(RowFormat):
    """A line per image with its segments, for a terminal."""

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        return [
            "".join(f"{row.path}: {row.error or format_segments(row)}\n" for row in rows).encode("utf-8", "replace")
        ]


def format_segments(row: PredictionRow) -> str:
    """Return the segments of an image with their shares of its pixels in per cent, the largest first."""
    assert row.segment_ids is not None
    largest = sorted(row.segments, key=lambda segment: -segment.area)
    shares = (f"{segment.label} {100 * segment.area / row.segment_ids.size:.1f} %" for segment in largest)
    return ", ".join(shares) or "no segments"


def encode_panoptic_png(ids: np.ndarray) -> bytes:
    """Return a PNG file whose pixels are the ids of a map, int32 [H, W], as R + 256 G + 65536 B."""
    pixels = np.stack([ids >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()


@dataclass(frozen=True)
class PanopticFiles(RowFormat):
    """COCO's panoptic format in a directory, and overlays beside the PNGs. The stream is JSON lines of images and segments."""

    table: ClassVar[str] = PANOPTIC_TABLE

    directory: Path
    names: Sequence[str]  # of the PNGs, relative to the directory, without a suffix, by the index of the image
    labels: tuple[str, ...]
    things: tuple[bool, ...]
    overlays: bool = False

    def encode_rows(self, rows: Sequence[PredictionRow], width: int) -> list[bytes]:
        """Write the PNGs of these rows, then return the rows: a row in the stream has its PNG."""
        return [encode_jsonl([self.write_row(row) for row in rows])]

    def write_row(self, row: PredictionRow) -> dict[str, Any]:
        if row.segment_ids is None:
            return {"file_name": row.path, "error": row.error}
        name, (height, width) = self.names[row.index], row.segment_ids.shape
        path = self.directory / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, encode_panoptic_png(row.segment_ids))
        if row.overlay is not None:
            write_synced(self.directory / f"{name}.overlay.jpg", row.overlay)
        segments = [
            {
                "id": segment.id,
                "category_id": segment.index + 1,
                "area": segment.area,
                "bbox": list(segment.box),
                "iscrowd": 0,
                "score": round(segment.score, SCORE_DIGITS),
            }
            for segment in row.segments
        ]
        return {
            "file_name": row.path,
            "height": height,
            "width": width,
            "mask": f"{name}.png",
            "segments_info": segments,
        }

    def describe_joining(self) -> dict[str, Any]:
        facts = {"labels": self.labels, "things": self.things, "overlays": self.overlays}
        return {**super().describe_joining(), **facts}

    def finish_file(self, stream: Path, out: Path) -> None:
        """Convert the stream line by line; delete the PNGs and overlays that only the earlier file lists."""
        delete_masks(self.directory, read_mask_names(out), read_mask_names(stream), self.overlays)

        def images() -> Iterator[dict[str, Any]]:
            for number, row in read_lines(stream):
                if "error" not in row:
                    yield {"id": number, **{name: row[name] for name in ("file_name", "height", "width")}}

        def annotations() -> Iterator[dict[str, Any]]:
            for number, row in read_lines(stream):
                if "error" not in row:
                    yield {"image_id": number, "file_name": row["mask"], "segments_info": row["segments_info"]}

        errors = (row for _, row in read_lines(stream) if "error" in row)
        categories = (
            {"id": number, "name": name, "isthing": int(thing)}
            for number, (name, thing) in enumerate(zip(self.labels, self.things, strict=True), start=1)
        )
        parts = {"images": images(), "annotations": annotations(), "categories": categories, "errors": errors}
        write_parts(out, parts, PANOPTIC_HEADER)
        stream.unlink()


def select_panoptic_format(
    out: str,
    requested: str | None,
    labels: tuple[str, ...],
    things: tuple[bool, ...],
    inputs: ImageInputs,
    count: int,
) -> RowFormat:
    """Return the format of segments of --format or of the suffix of `out`."""
    default = "text" if out == "-" else "png" if is_directory(out) else SUFFIXES.get(Path(out).suffix.lower())
    name, option = requested or default, f"--format {requested}" if requested else f"--out {out}"
    formats = ("text", "jsonl") if out == "-" else ("png",) if is_directory(out) else ("jsonl",)
    if name not in formats:
        raise ValueError(f"{option} is not for segments: use --out panoptic/ (COCO) or segments.jsonl")
    if name == "png":
        return PanopticFiles(Path(out), name_masks(inputs, count), labels, things)
    return PanopticJSONL() if name == "jsonl" else PanopticText()

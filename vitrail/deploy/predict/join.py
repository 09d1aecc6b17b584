"""Join the parts that hosts have written to one file: the bytes that one process would have written."""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.deploy.predict.formats import FeaturesNPY, ParquetFormat, RowFormat
from vitrail.deploy.predict.masks import COLUMNS, MaskFiles, MasksCOCO, read_panoptic_names
from vitrail.deploy.predict.panoptic import PanopticFiles
from vitrail.deploy.predict.resume import Journal, describe_difference, join_streams, remove_parts
from vitrail.utils.json import read_json_file

# Formats whose parts are more than one file of rows, by name: what they need is in the journal.
FORMATS: dict[str, Callable[[dict[str, Any], Path], RowFormat]] = {
    "FeaturesNPY": lambda facts, out: FeaturesNPY(),
    "ParquetFormat": lambda facts, out: ParquetFormat((), lambda row: []),
    "MasksCOCO": lambda facts, out: MasksCOCO(tuple(facts["labels"])),
    "MaskFiles": lambda facts, out: MaskFiles(out.parent, (), tuple(facts["labels"]), (), facts["overlays"]),
    "PanopticFiles": lambda facts, out: PanopticFiles(
        out.parent, (), tuple(facts["labels"]), tuple(facts["things"]), facts["overlays"]
    ),
}


@dataclass(frozen=True)
class Part:
    """The complete rows of one process."""

    path: Path
    number: int  # from 1
    count: int
    journal: Journal


def join_parts(out: Path, places: Sequence[Path], *, keep: bool = False, force: bool = False) -> dict[str, Any]:
    """Join the parts of `out` that are in these directories; return a summary. Parts are checked before anything is written."""
    parts = find_parts(out, places)
    check_parts(out, parts)
    row_format = choose_format(parts[0].journal.get("joining", {}), out)
    for part in parts:
        check_bytes(part, row_format)
    if out.exists() and not force:
        raise ValueError(f"{out} exists: give another name, or --force to replace it")
    if isinstance(row_format, MaskFiles | PanopticFiles):
        check_masks(out, parts, row_format)
    paths = [part.path for part in parts]
    join_streams(row_format, out, paths)
    if not keep:
        remove_parts(row_format, paths)
        for folder in {path.parent for path in paths}:
            (folder / f"{out.name}.lock").unlink(missing_ok=True)
    precisions = sorted({str(part.journal.get("precision")) for part in parts if part.journal["rows"]})
    rows, errors = (sum(part.journal[name] for part in parts) for name in ("rows", "errors"))
    return {"out": str(out), "parts": len(parts), "rows": rows, "errors": errors, "precisions": precisions}


def find_parts(out: Path, places: Sequence[Path]) -> list[Part]:
    """Return the parts of `out` in these directories, by number; raise ValueError if some are missing."""
    pattern = re.compile(rf"{re.escape(out.name)}\.part-(\d+)-of-(\d+)\.json")
    found: dict[int, Part] = {}
    for place in places:
        if not place.is_dir():
            raise ValueError(f"{place} is not a directory: give the directories of the parts")
        for path in sorted(place.iterdir()):
            if (match := pattern.fullmatch(path.name)) is None:
                continue
            part = Part(path.with_suffix(""), int(match[1]), int(match[2]), read_json_file(path, Journal))
            if (other := found.get(part.number)) is not None and not other.journal["finished"]:
                del found[part.number]  # begun there, and computed elsewhere
            elif other is not None and not part.journal["finished"]:
                continue
            found.setdefault(part.number, part)
    if not found:
        raise ValueError(f"no parts of {out} in {', '.join(map(str, places))}: they are named {out.name}.part-1-of-8")
    counts = {part.count for part in found.values()}
    if len(counts) > 1:
        raise ValueError(f"parts of {' and '.join(map(str, sorted(counts)))} processes: keep those of one run")
    count = counts.pop()
    if missing := [number for number in range(1, count + 1) if number not in found]:
        named = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise ValueError(
            f"{len(missing)} of {count} parts of {out} are missing: {named}; copy them here, "
            f"or compute one with --part {missing[0]}/{count} --resume"
        )
    return [found[number] for number in sorted(found)]


def check_parts(out: Path, parts: Sequence[Part]) -> None:
    """Raise ValueError unless all parts are complete and of one run."""
    for part in parts:
        if not part.journal["finished"]:
            rows = part.journal["rows"]
            how = f"continue it with --part {part.number}/{part.count} --resume"
            raise ValueError(f"{part.path} is not complete, it has {rows:,} rows: {how}")
        if difference := describe_difference(parts[0].journal["what"], part.journal["what"]):
            raise ValueError(f"{part.path} and {parts[0].path} are of different runs: one was started {difference}")


def choose_format(facts: dict[str, Any], out: Path) -> RowFormat:
    """Return the format of the parts of a journal."""
    name = str(facts.get("format"))
    if name in FORMATS:
        return FORMATS[name](facts, out)
    if name.endswith(("CSV", "JSONL")):
        return RowFormat()  # one file of rows
    raise ValueError(f"the parts of {out} have the unknown format {name}: join them with the version that wrote them")


def check_bytes(part: Part, row_format: RowFormat) -> None:
    """Raise ValueError unless the files of a part are as long as its journal says."""
    for path, size in zip(row_format.stream_paths(part.path), part.journal["bytes"], strict=True):
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise ValueError(f"{path} has {found:,} bytes, {size:,} were written: copy it again")


def check_masks(out: Path, parts: Sequence[Part], row_format: MaskFiles | PanopticFiles) -> None:
    """Raise ValueError unless the masks that the parts list are in the directory of the table."""
    list_names = read_panoptic_names if isinstance(row_format, PanopticFiles) else read_row_names
    names = sorted(name for part in parts for name in list_names(part.path))
    if missing := [name for name in names if not (out.parent / name).is_file()]:
        raise ValueError(
            f"{out.parent} lacks {len(missing):,} of {len(names):,} masks, such as {missing[0]}: copy them"
        )


def read_row_names(part: Path) -> set[str]:
    """Return the masks that rows of a table list; only those of the first part have a header."""
    with part.open(newline="", encoding="utf-8", errors="replace") as file:
        return {row[1] for row in csv.reader(file) if len(row) > 1 and row[1] and row[:3] != list(COLUMNS)}

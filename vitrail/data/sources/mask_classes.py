"""Classes of masks: a file beside the data that names stored values and colours, or the values themselves.

`classes.txt` has a name per line (the line number from 0 is the value), or `value name`, or `value name #rrggbb`; the name
`ignore` marks a value that neither trains nor counts. `classes.json` is {"0": "sky"}, a list of names, or a list of
{"id", "name", "color", "ignore", "isthing"}; {"classes": …, "ignore": [255]} adds values to ignore. `isthing` is that of
COCO's panoptic categories: 1 for a class with objects, 0 for one without, such as sky. `labelmap.txt` of CVAT and
`class_dict.csv` of CamVid name colours.
"""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.class_names import HINTS, find_duplicates, is_index
from vitrail.data.dataset import IGNORED, MAX_MASK_CLASSES
from vitrail.data.labels import normalise_class_name
from vitrail.data.remote.file import open_binary
from vitrail.utils.colours import Colour, format_colour, is_colour, parse_colour

CLASS_FILES = ("classes.txt", "classes.json", "labelmap.txt", "class_dict.csv")
IGNORE_NAME = "ignore"
NO_CLASS = -1
MIN_SMOOTHED_VALUES, SMOOTHED_TOP, SMOOTHED_SHARE = 32, 8, 0.05  # many values, of which all but 8 are rare
FILE_HELP = "use a name per line, `value name`, or `value name #rrggbb`"


class ClassEntry(NamedTuple):
    """A stored value with its class."""

    value: int
    name: str
    colour: Colour | None = None
    ignored: bool = False
    thing: bool | None = None  # whether the class has objects, if the file states it


@dataclass(frozen=True)
class MaskClasses:
    """The classes of stored values, and of colours if the data states them."""

    names: tuple[str, ...]
    table: np.ndarray  # [256] int16: stored value -> index into `names`, IGNORED or NO_CLASS
    colours: tuple[Colour, ...] | None = None  # of the names
    by_colour: tuple[tuple[int, int], ...] = ()  # (packed RGB, index or IGNORED), sorted
    colours_only: bool = False  # the file has no values: a palette is read by its colours
    note: str = ""
    things: tuple[bool, ...] | None = None  # whether the names have objects, if the data states it for all
    ignored: tuple[
        tuple[int, str], ...
    ] = ()  # values, and the names of those that the data names and does not ignore itself
    counts: np.ndarray | None = None  # [256] pixels of each stored value, where the classes are the values

    def map_values(self, values: np.ndarray) -> np.ndarray:
        """Return the classes of stored values, int16: indices, IGNORED or NO_CLASS."""
        return self.table[values]

    def map_colours(self, pixels: np.ndarray) -> np.ndarray:
        """Return the classes of RGB pixels [H, W, 3], int16 [H, W]: indices, IGNORED or NO_CLASS."""
        packed = pack_colours(pixels)
        keys, found = np.array(self.by_colour, dtype=np.int64).T
        position = np.searchsorted(keys, packed).clip(max=len(keys) - 1)
        return np.where(keys[position] == packed, found[position], NO_CLASS).astype(np.int16)


def pack_colours(pixels: np.ndarray) -> np.ndarray:
    """Return RGB pixels [..., 3] as one number each."""
    wide = pixels.astype(np.int64)
    return wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]


def build_classes(
    entries: Sequence[ClassEntry], ignore: Sequence[int], file: str, colours_only: bool = False
) -> MaskClasses:
    """Return the classes of a file's entries, in the order of their values. 255 is ignored unless the file names it."""
    entries = sorted(entries, key=lambda entry: entry.value)
    for kind, values in (
        ("value", [entry.value for entry in entries]),
        ("name", [entry.name for entry in entries if not entry.ignored]),
        ("colour", [format_colour(entry.colour) for entry in entries if entry.colour]),
    ):
        if repeated := find_duplicates(values):
            raise ValueError(f"{file} lists the {kind} {repeated[0]!r} twice: remove one")
    if wrong := [entry.value for entry in entries if not 0 <= entry.value <= 255]:
        raise ValueError(f"{file}: the value {wrong[0]} must be from 0 to 255")
    if wrong := [value for value in ignore if value > 255]:
        raise ValueError(f"ignore={wrong[0]} must be a value of masks, from 0 to 255")
    kept = [entry for entry in entries if not entry.ignored and entry.value not in ignore]
    if len(kept) > MAX_MASK_CLASSES:
        raise ValueError(f"{file} has {len(kept)} classes: masks have at most {MAX_MASK_CLASSES}")
    if not kept:
        raise ValueError(f"{file} names no class that is not ignored: {FILE_HELP}")
    table = np.full(256, NO_CLASS, dtype=np.int16)
    table[[IGNORED, *ignore]] = IGNORED
    index = {entry.value: IGNORED for entry in entries} | {entry.value: i for i, entry in enumerate(kept)}
    for value, target in index.items():
        table[value] = target
    known = sorted((int(pack_colours(np.array(e.colour))), index[e.value]) for e in entries if e.colour)
    colours = tuple(entry.colour for entry in kept if entry.colour)
    names, named = tuple(entry.name for entry in kept), {e.value: e.name for e in entries if not e.ignored}
    ignored = tuple((value, named.get(value, "")) for value in np.flatnonzero(table == IGNORED).tolist())
    things = tuple(entry.thing for entry in kept if entry.thing is not None)
    return MaskClasses(
        names,
        table,
        colours if len(colours) == len(kept) else None,
        tuple(known),
        colours_only,
        things=things if len(things) == len(kept) else None,
        ignored=ignored,
    )


def classes_from_values(counts: np.ndarray, ignore: Sequence[int], source: str) -> MaskClasses:
    """Return the values that occur as classes, named by their value. 255 is ignored if at least two others are left.

    `counts` is the number of pixels of each value, [256].
    """
    values = [int(value) for value in np.flatnonzero(counts) if value not in ignore]
    rare = np.sort(counts)[::-1][SMOOTHED_TOP:].sum()
    if len(values) >= MIN_SMOOTHED_VALUES and rare < SMOOTHED_SHARE * counts.sum():
        found = f"the masks of {source} have {len(values)} values, most of them rare, as smoothing makes"
        raise ValueError(f"{found}: name the real ones in classes.txt")
    others = [value for value in values if value != IGNORED]
    values = others if len(others) > 1 else values
    if not values:
        raise ValueError(f"{source} has no mask with a value that is not ignored")
    if len(values) > MAX_MASK_CLASSES:
        raise ValueError(f"the masks of {source} have {len(values)} values: at most {MAX_MASK_CLASSES} can be classes")
    classes = build_classes([ClassEntry(value, str(value)) for value in values], ignore, source)
    ignored = [str(value) for value in np.flatnonzero(counts) if value not in values]
    count = f"{len(values)} values" if len(values) > 1 else "only value"
    note = f"classes are the {count} of the masks{HINTS[0]}"
    return replace(classes, note=f"{note}; {', '.join(ignored)} ignored" if ignored else note, counts=counts)


def find_class_file(folders: Sequence[str]) -> str | None:
    """Return the first class file of these folders."""
    paths = (os.path.join(folder, name) for folder in folders for name in CLASS_FILES)
    return next((path for path in paths if os.path.isfile(path)), None)


def read_class_file(path: str, ignore: Sequence[int]) -> MaskClasses:
    """Read a file that names the classes of masks."""
    with open_binary(path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: {FILE_HELP}") from None
    name = os.path.basename(path)
    if name.endswith(".json"):
        entries, more = parse_json_classes(path, text)
        return build_classes(entries, (*ignore, *more), path)
    lines = {
        number: line.strip()
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("# ")
    }
    if name == "labelmap.txt":
        return build_classes(parse_labelmap(path, list(lines.values())), ignore, path, colours_only=True)
    if name.endswith(".csv"):
        return build_classes(parse_class_dict(path, text), ignore, path, colours_only=True)
    entries, valued = parse_class_lines(path, lines)
    return build_classes(entries, ignore, path, not valued and all(entry.colour for entry in entries))


def parse_class_lines(path: str, lines: Mapping[int, str]) -> tuple[list[ClassEntry], bool]:
    """Return the entries of classes.txt, and True if its lines start with values. `lines` are by their number in the file."""
    if not lines:
        raise ValueError(f"{path} is empty: {FILE_HELP}")
    words = {number: line.split() for number, line in lines.items()}
    starts = {number: is_index(line[0]) and len(line) > 1 for number, line in words.items()}
    valued = next(iter(starts.values()))
    if other := [number for number, start in starts.items() if start != valued]:
        mixed = "some lines start with a value and some do not"
        raise ValueError(f"{path}, line {other[0]}: {mixed}: number all or none")
    entries = []
    for index, (number, line) in enumerate(words.items()):
        colour = parse_colour(line.pop()) if is_colour(line[-1]) else None
        value = int(line.pop(0)) if valued else index
        if not line:
            raise ValueError(f"{path}, line {number}: no name: {FILE_HELP}")
        entries.append(make_entry(value, " ".join(line), colour))
    return entries, valued


def make_entry(
    value: int, name: str, colour: Colour | None = None, ignored: bool = False, thing: bool | None = None
) -> ClassEntry:
    """Return an entry; the name `ignore` marks its value as ignored."""
    name = normalise_class_name(name)
    return ClassEntry(value, name, colour, ignored or name == IGNORE_NAME, thing)


def parse_json_classes(path: str, text: str) -> tuple[list[ClassEntry], list[int]]:
    """Return the entries of classes.json and the values to ignore."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    ignore: Any = []
    if isinstance(data, dict) and "ignore" in data:
        ignore = data.pop("ignore")
        ignore = ignore if isinstance(ignore, list) else [ignore]
        if not all(type(value) is int and 0 <= value <= 255 for value in ignore):
            raise ValueError(f"{path}: ignore must be values from 0 to 255, got {ignore}")
    if isinstance(data, dict) and set(data) == {"classes"}:
        data = data["classes"]
    if isinstance(data, dict):
        items = [(key, {"name": value} if isinstance(value, str) else value) for key, value in data.items()]
    elif isinstance(data, list):
        items = [(str(i), {"name": value} if isinstance(value, str) else value) for i, value in enumerate(data)]
    else:
        raise ValueError(f"{path} must hold names: {{'0': 'sky'}}, ['sky'], or [{{'id': 0, 'name': 'sky'}}]")
    return [parse_json_entry(path, key, value) for key, value in items], ignore


def parse_json_entry(path: str, key: str, value: Any) -> ClassEntry:
    """Return the entry of a JSON object with a name, and optionally id, color, ignore and isthing."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].strip():
        raise ValueError(f"{path}: the class {key} needs a name, got {str(value)[:60]}")
    number = value.get("id", int(key) if is_index(key) else None)
    if type(number) is not int:
        raise ValueError(f"{path}: the class {value['name']!r} needs a whole number as its id, got {number or key!r}")
    colour = value.get("color", value.get("colour"))
    if isinstance(colour, list) and len(colour) == 3 and all(type(c) is int and 0 <= c <= 255 for c in colour):
        colour = (colour[0], colour[1], colour[2])
    elif isinstance(colour, str) and is_colour(colour.strip()):
        colour = parse_colour(colour.strip())
    elif colour is not None:
        raise ValueError(f"{path}: the class {value['name']!r} needs a color as #rrggbb or [r, g, b], got {colour!r}")
    thing = value.get("isthing")
    if thing not in (None, 0, 1):
        raise ValueError(f"{path}: isthing of the class {value['name']!r} must be 0 or 1, got {str(thing)[:60]!r}")
    return make_entry(number, value["name"], colour, value.get("ignore") is True, None if thing is None else thing == 1)


def parse_labelmap(path: str, lines: Sequence[str]) -> list[ClassEntry]:
    """Return the entries of CVAT's labelmap.txt: `name:r,g,b:parts:actions`."""
    rows = (line.split(":") for line in lines if not line.startswith("#"))
    return [colour_entry(path, i, row[0], row[1].split(",") if len(row) > 1 else []) for i, row in enumerate(rows)]


def parse_class_dict(path: str, text: str) -> list[ClassEntry]:
    """Return the entries of CamVid's class_dict.csv: `name,r,g,b`."""
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if any(row)]
    rows = rows[1:] if rows and rows[0][1:2] and not is_index(rows[0][1].strip()) else rows
    return [colour_entry(path, i, row[0], row[1:4]) for i, row in enumerate(rows)]


def colour_entry(path: str, value: int, name: str, cells: Sequence[str]) -> ClassEntry:
    """Return the entry of a name and the cells of its colour."""
    numbers = [int(cell) for cell in cells if is_index(cell.strip())]
    if len(numbers) != 3 or max(numbers) > 255 or not name.strip():
        raise ValueError(f"{path}: {name!r} needs a colour of three numbers from 0 to 255, got {','.join(cells)!r}")
    return make_entry(value, name, (numbers[0], numbers[1], numbers[2]))

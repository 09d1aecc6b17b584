"""Files of class names: lists in order, JSON, CSV, ImageNet's index files; and the names of ImageNet-1k in the package.

`names=` gives the classes of a dataset readable names, `class_map=` matches them to the outputs of a model.
"""

import ast
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.data.dataset import Dataset
from vitrail.data.labels import format_names, normalise_class_name

SYNSET = re.compile(r"(n\d{8})[\s,]+(\S.*)")
HEADER_WORDS = {"class", "label", "name", "data", "model", "index", "id", "wnid", "synset", "folder"}
HEADER_WORDS |= {"from", "to", "target"}
ClassPairs = list[tuple[str, Any]]  # data class, and model class or display name
ClassNames = list[tuple[int, list[str]]]  # index and class names, the display name first
HINTS = (": name them in classes.txt", ": name them with names=")  # in notes on values of masks, of files and objects
IMAGENET = "imagenet"  # the word for the names of ImageNet-1k in the package
IMAGENET_FILE = Path(__file__).with_name("imagenet.txt")  # WordNet id and name of each class, in order


def read_names_file(file: str | Path, option: str) -> "ClassPairs | NamesByIndex":
    """Read a file of class names, or the names of ImageNet-1k for the word imagenet; `option` is named in errors."""
    path = IMAGENET_FILE if str(file) == IMAGENET and not Path(file).is_file() else Path(file)
    if path.is_dir():
        raise IsADirectoryError(
            f"{option}{str(file)!r} is a directory: give JSON, CSV, or a file with one name per line"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: {option} takes JSON, CSV, or one name per line") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"{option}{str(file)!r}: no such file") from None
    except OSError as error:
        raise OSError(f"{option}{str(file)!r} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise ValueError(f"{file} is empty: {option} takes JSON, CSV, or one name per line")
    if text.lstrip()[0] in "{[":
        return _parse_json(str(file), text)
    if path.suffix.lower() in (".csv", ".tsv"):
        return _parse_csv(str(file), text, "\t" if path.suffix.lower() == ".tsv" else None)
    return _parse_lines(str(file), [line.strip() for line in text.splitlines() if line.strip()])


@dataclass(frozen=True)
class NamesByIndex:
    """Class names by index; `is_complete` if the file lists every class."""

    names: ClassNames
    is_complete: bool


class JSONObject(list[tuple[str, Any]]):
    """A JSON object with duplicate keys."""


def _parse_json(file: str, text: str) -> ClassPairs | NamesByIndex:
    try:
        data = json.loads(text, object_pairs_hook=JSONObject)
    except (ValueError, RecursionError) as error:
        try:  # a Python dict literal, a common form of ImageNet's names
            read = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{file} is not valid JSON: {error}") from None
        data = JSONObject((str(key), value) for key, value in read.items()) if isinstance(read, dict) else read
    if isinstance(data, list) and not isinstance(data, JSONObject):
        return NamesByIndex([(index, clean_names(file, names)) for index, names in enumerate(data)], True)
    if not isinstance(data, JSONObject):
        raise ValueError(f"{file} must hold a JSON object or list")
    if all(isinstance(value, list | tuple) and not isinstance(value, JSONObject) for _, value in data):
        return NamesByIndex([(_parse_index(file, key), clean_names(file, value)) for key, value in data], False)
    for key, value in data:
        if isinstance(value, bool) or not isinstance(value, str | int):
            got = json.dumps(value, default=str, skipkeys=True)[:60]
            raise ValueError(f"{file}: {key!r} must map to a class name or index, got {got}")
    return list(data)


def clean_names(file: str, value: Any) -> list[str]:
    """Return the names of one class; ImageNet's entries hold a folder name and words."""
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file}: {str(value)[:60]!r} is not a class name")
    if len(names) > 1:  # a folder name, then words: the first word is for display
        return [*split_synonyms(", ".join(names[1:]).replace("_", " ")), *names[1:], names[0]]
    return [*names, *split_synonyms(names[0])]


def split_synonyms(text: str) -> list[str]:
    """Return the synonyms of a text like `tench, Tinca tinca`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def is_index(text: str) -> bool:
    """Return True for ASCII digits."""
    return text.isascii() and text.isdecimal()


def _parse_index(file: str, key: str) -> int:
    if not is_index(key):
        raise ValueError(f"{file}: {key!r} is not an index: expected integers from 0")
    return int(key)


def _parse_csv(file: str, text: str, delimiter: str | None) -> ClassPairs:
    if delimiter is None:
        first = text.lstrip().splitlines()[0]
        delimiter = next((mark for mark in ",;\t" if len(first.split(mark)) > 1), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows: ClassPairs = []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != 2:
                raise ValueError(f"{file}, line {reader.line_num}: expected two cells, data and model, got {len(row)}")
            rows.append((row[0].strip(), row[1].strip()))
    except csv.Error as error:
        raise ValueError(f"{file} is not valid CSV: {error}") from None
    if not rows:
        raise ValueError(f"{file} has no rows: expected two cells per row, data and model")
    if {word for cell in rows[0] for word in re.split(r"[\s_-]+", cell.casefold())} <= HEADER_WORDS:
        rows = rows[1:]
    return rows


def _parse_lines(file: str, lines: list[str]) -> ClassPairs | NamesByIndex:
    synsets = [SYNSET.fullmatch(line) for line in lines]
    if all(synsets):
        names = [[*split_synonyms(match[2]), match[2], match[1]] for match in synsets if match]
        return NamesByIndex(list(enumerate(names)), True)
    if all(line.count("\t") == 1 for line in lines):
        return _parse_csv(file, "\n".join(lines), "\t")
    return NamesByIndex([(index, clean_names(file, line)) for index, line in enumerate(lines)], True)


def find_duplicates(values: Iterable[Any]) -> list[Any]:
    """Return the values that occur more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


def find_output_names(file: str | Path, outputs: int | None, option: str = "names=") -> tuple[str, ...] | None:
    """Return the names of a model's outputs in order, or None if the file does not name them all; None outputs: any number."""
    parsed = read_names_file(file, option)
    if isinstance(parsed, NamesByIndex):
        by_index = {index: normalise_class_name(names[0]) for index, names in parsed.names}
    else:
        by_index = {int(key): normalise_class_name(str(name)) for key, name in _order_pairs(parsed) if is_index(key)}
    count = len(by_index) if outputs is None else outputs
    is_whole = bool(by_index) and sorted(by_index) == list(range(count))
    return tuple(by_index[index] for index in range(count)) if is_whole else None


def name_outputs(file: str | Path, outputs: int | None, option: str = "names=") -> tuple[str, ...]:
    """Return the names of a model's outputs in order; raise ValueError if the file does not name them all."""
    if names := find_output_names(file, outputs, option):
        return names
    expected = "the classes in order" if outputs is None else f"the {outputs:,} classes of the model in order"
    raise ValueError(f"{option}{str(file)!r} must list {expected}: one name per line, or a JSON list")


def rename_classes(dataset: Dataset, file: str) -> Dataset:
    """Return the dataset with the readable names of a file (`--names`); the order of the classes stays.

    Names that several classes share get the former name in brackets: crane (n02012849). Classes of masks are often values with
    gaps, 0 and 255: a list with as many names as classes names them in order of their values.
    """
    classes = list(dict.fromkeys(name for images in dataset.splits.values() for name in images.classes))
    has_masks = any(images.target_kind == "masks" for images in dataset.splits.values())
    found = _find_names(file, classes, in_order=has_masks)
    if missing := [name for name in classes if name not in found]:
        count = f"{len(missing):,} of {len(classes):,} classes"
        raise ValueError(
            f"names={str(file)!r} has no name for {count}, first {missing[0]!r}: add it, or rename the class"
        )
    shared = set(find_duplicates(found[name] for name in classes))
    names = {name: f"{found[name]} ({name})" if found[name] in shared else found[name] for name in classes}
    splits = {
        split: replace(images, classes=tuple(names[name] for name in images.classes))
        for split, images in dataset.splits.items()
    }
    shown = format_names((name for name in classes), lambda name: f"{name} is {names[name]}", limit=3)
    notes = [note.replace(HINTS[0], "").replace(HINTS[1], "") for note in dataset.notes]
    return replace(dataset, splits=splits, notes=(*notes, f"class names from {file}: {shown}"))


def _find_names(file: str, classes: list[str], in_order: bool = False) -> dict[str, str]:
    """Return the display name of each class that the file names; `in_order` allows numbers with gaps for a list of names."""
    parsed = read_names_file(file, "names=")
    if not isinstance(parsed, NamesByIndex):
        pairs = [(normalise_class_name(key), normalise_class_name(str(name))) for key, name in _order_pairs(parsed)]
        if duplicates := find_duplicates(key for key, _ in pairs):
            raise ValueError(f"{file} lists {duplicates[0]!r} twice: remove one")
        known = {name: name for _, name in pairs} | dict(pairs)
        indices = {int(key): name for key, name in pairs if is_index(key)}
        return _look_up(classes, known, indices)
    if duplicates := find_duplicates(index for index, _ in parsed.names):
        raise ValueError(f"{file} lists the index {duplicates[0]} twice")
    indices = {index: normalise_class_name(names[0]) for index, names in parsed.names}
    numbers = {int(name) for name in classes if is_index(name)}
    if parsed.is_complete and len(indices) in numbers and 0 not in numbers:  # the data counts from 1, as Flowers-102
        indices = {index + 1: name for index, name in indices.items()}
    elif (
        in_order and parsed.is_complete and len(indices) == len(classes) == len(numbers) and not numbers <= set(indices)
    ):
        indices = dict(zip(sorted(numbers), indices.values(), strict=True))
    known, used = {}, set(classes)
    for index, names in parsed.names:
        for name in map(normalise_class_name, names):
            display = normalise_class_name(names[0])
            if name in used and known.setdefault(name, display) != display:
                first = next(other for other, others in parsed.names if name in map(normalise_class_name, others))
                raise ValueError(f"{file}: {name!r} names the classes {first} and {index}: rename the data's class")
            known.setdefault(name, display)
    return _look_up(classes, known, indices)


def _look_up(classes: list[str], known: dict[str, str], indices: dict[int, str]) -> dict[str, str]:
    """Return the known names of the classes, by name or by index; 0007 is 7."""
    found = {name: known[name] for name in classes if name in known}
    by_index = {name: indices[int(name)] for name in classes if is_index(name) and int(name) in indices}
    return by_index | found


def _order_pairs(pairs: ClassPairs) -> ClassPairs:
    """Return pairs with the name last: {"cat": 0}, as torchvision's class_to_idx, is turned round."""
    keys, values = ([str(pair[side]) for pair in pairs] for side in (0, 1))
    if all(map(is_index, values)) and not all(map(is_index, keys)):
        return list(zip(values, keys, strict=True))
    return pairs

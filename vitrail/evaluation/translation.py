"""Files that say which class of the data is which of the model: `--map`.

Two kinds are told apart. Pairs name a class of the data and the model's class, by name or index. Lists name the model's classes
in the order of their indices, each perhaps with several names: ImageNet's index files are such lists.
"""

import ast
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.labels import normal
from vitrail.evaluation.likeness import alike

SYNSET = re.compile(r"(n\d{8})[\s,]+(\S.*)")
HEADS = {"class", "label", "name", "data", "model", "index", "id", "wnid", "synset", "folder", "from", "to", "target"}


@dataclass(frozen=True)
class Translation:
    """What a file says."""

    file: str
    places: dict[str, tuple[int, ...]]  # the data's class to the model's index; to several, where a name is not unique
    labels: dict[int, str]  # what the file calls the model's classes


Pairs = list[tuple[str, Any]]  # the data's class, and the model's: a name, an index
Names = list[tuple[int, list[str]]]  # an index of the model, and what its class is called: first what is shown


def read_translation(file: str | Path, names: Sequence[str] | None, outputs: int) -> Translation:
    """The file, held against a model of so many outputs, and of these names where it has any."""
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(f"--map {file} is a directory: give a file of JSON, CSV, or a name on each line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8: --map takes JSON, CSV, or a name on each line") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"--map {file}: there is no such file") from None
    except OSError as error:
        raise OSError(f"--map {file} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise ValueError(f"{file} is empty: --map takes JSON, CSV, or a name on each line")
    if text.lstrip()[0] in "{[":
        found = _json(str(file), text)
    elif path.suffix.lower() in (".csv", ".tsv"):
        found = _table(str(file), text, "\t" if path.suffix.lower() == ".tsv" else None)
    else:
        found = _lines(str(file), [line.strip() for line in text.splitlines() if line.strip()])
    if isinstance(found, Listed):
        return _by_index(str(file), found.names, outputs, found.whole)
    return _by_pairs(str(file), found, names, outputs)


@dataclass(frozen=True)
class Listed:
    """Names by index; `whole` where the file has a line for every class."""

    names: Names
    whole: bool


class Table(list[tuple[str, Any]]):
    """An object of JSON as it stands there, with what it says twice."""


def _json(file: str, text: str) -> Pairs | Listed:
    try:
        data = json.loads(text, object_pairs_hook=Table)
    except (ValueError, RecursionError) as error:
        try:  # a dictionary as Python writes it, which goes round for ImageNet's names
            read = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{file} is no JSON: {error}") from None
        data = Table((str(key), value) for key, value in read.items()) if isinstance(read, dict) else read
    if isinstance(data, list) and not isinstance(data, Table):
        return Listed([(place, _spelt(file, each)) for place, each in enumerate(data)], True)
    if not isinstance(data, Table):
        raise ValueError(f"{file} holds neither an object nor a list")
    if all(isinstance(value, list | tuple) and not isinstance(value, Table) for _, value in data):
        return Listed([(_index(file, key), _spelt(file, value)) for key, value in data], False)
    for key, value in data:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(
                f"{file}: {key!r} is given {json.dumps(value, default=str, skipkeys=True)[:60]}: a class's name or index is meant"
            )
    return list(data)


def _spelt(file: str, value: Any) -> list[str]:
    """The names of one class: of ImageNet's, the folder's and the word."""
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file}: {str(value)[:60]!r} is no name of a class")
    if len(names) > 1:  # a folder's name and words, of which the first is what people say
        return [*synonyms(", ".join(names[1:]).replace("_", " ")), *names[1:], names[0]]
    return [*names, *synonyms(names[0])]


def synonyms(text: str) -> list[str]:
    """The words of `tench, Tinca tinca`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _index(file: str, key: str) -> int:
    if not (key.isascii() and key.isdecimal()):
        raise ValueError(f"{file}: {key!r} is no index: a file of index and names has numbers from 0")
    return int(key)


def _table(file: str, text: str, delimiter: str | None) -> Pairs:
    if delimiter is None:
        first = text.lstrip().splitlines()[0]
        delimiter = next((each for each in ",;\t" if len(first.split(each)) > 1), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows: Pairs = []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != 2:
                raise ValueError(f"{file}, line {reader.line_num}: {len(row)} cells, and two are meant: data, model")
            rows.append((row[0].strip(), row[1].strip()))
    except csv.Error as error:
        raise ValueError(f"{file} is not readable as CSV: {error}") from None
    if not rows:
        raise ValueError(f"{file} has no row with anything in it: two cells are meant, data and model")
    if {word for cell in rows[0] for word in re.split(r"[\s_-]+", cell.casefold())} <= HEADS:
        rows = rows[1:]
    return rows


def _lines(file: str, lines: list[str]) -> Pairs | Listed:
    synsets = [SYNSET.fullmatch(line) for line in lines]
    if all(synsets):
        found = []
        for place, match in enumerate(synsets):
            assert match is not None
            found.append((place, [*synonyms(match[2]), match[2], match[1]]))
        return Listed(found, True)
    if all(line.count("\t") == 1 for line in lines):
        return _table(file, "\n".join(lines), "\t")
    return Listed([(place, _spelt(file, line)) for place, line in enumerate(lines)], True)


def _by_index(file: str, found: Names, outputs: int, whole: bool) -> Translation:
    if whole and len(found) != outputs:
        raise ValueError(f"{file} names {len(found):,} classes, and the model has {outputs:,}: it was made for another")
    if twice := _twice(index for index, _ in found):
        raise ValueError(f"{file} names the index {twice[0]} twice")
    places: dict[str, dict[int, None]] = {}
    for index, names in found:
        if index >= outputs:
            raise ValueError(f"{file} names the index {index:,}, and the model has {outputs:,} classes from 0")
        for name in names:
            places.setdefault(normal(name), {})[index] = None
    for index, _ in found:  # a class may also be called by its index, unless that is another's name
        places.setdefault(str(index), {index: None})
    return Translation(
        file, {name: tuple(at) for name, at in places.items()}, {index: normal(names[0]) for index, names in found}
    )


def _by_pairs(file: str, pairs: Pairs, names: Sequence[str] | None, outputs: int) -> Translation:
    if twice := _twice(normal(data) for data, _ in pairs):
        raise ValueError(f"{file} names {twice[0]!r} twice: which of the two is meant?")
    known: dict[str, list[int]] = {}
    for place, name in enumerate(names or ()):
        known.setdefault(normal(name), []).append(place)
    strange = [model for _, model in pairs if isinstance(model, str) and not _names_one(model, known)]
    if len(strange) == len(pairs) and all(data.isascii() and data.isdecimal() for data, _ in pairs):
        return _by_index(file, [(int(data), _spelt(file, model)) for data, model in pairs], outputs, False)
    if strange:
        if known:
            raise ValueError(f"{file}: {alike(strange[0], known)} is no class of the model")
        raise ValueError(f"{file}: the model has no class {strange[0]!r}, nor any names: give indices from 0")
    places = {}
    for data, model in pairs:
        at = known.get(normal(model)) if isinstance(model, str) else None
        at = at or [int(model)]
        if len(at) > 1:
            raise ValueError(
                f"{file}: {model!r} is the name of the model's classes {at[0]} and {at[1]}: give the index"
            )
        if not 0 <= at[0] < outputs:
            raise ValueError(f"{file}: {data!r} is given the index {at[0]:,}, and the model has {outputs:,} from 0")
        places[normal(data)] = (at[0],)
    return Translation(file, places, {at: data for data, (at,) in reversed(places.items())})


def _names_one(model: str, known: dict[str, list[int]]) -> bool:
    return normal(model) in known or (model.isascii() and model.removeprefix("-").isdecimal())


def _twice(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]

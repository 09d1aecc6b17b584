"""JSON of our own files is checked against type hints."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

import pytest

from vitrail.utils.json import Finite, parse_json, read_json_file, remove_invalid, untyped_from_json, value_from_json


class Part(TypedDict, total=False):
    images: Required[int]
    share: Finite


class Whole(TypedDict):
    name: str
    parts: dict[str, Part]
    sizes: list[int]


@dataclass
class Counts:
    rows: int = 0
    loss: float = 0.0
    names: dict[str, str] = field(default_factory=dict)


GOOD = {"name": "a", "parts": {"train": {"images": 3, "share": 1}}, "sizes": [1, 2], "later": [None]}


def changed(**values: Any) -> dict[str, Any]:
    return GOOD | values


def test_typed_dictionaries_are_checked_and_keep_further_keys():
    assert value_from_json(GOOD, Whole, "") == GOOD


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"it is \[\], which is not an object"),
        ({"name": "a"}, "it lacks parts, sizes"),
        (changed(name=1), "name is 1, which is not str"),
        (changed(parts=-1), "parts is -1, which is not an object"),
        (changed(parts={"train": {}}), "parts.train lacks images"),
        (changed(parts={"train": {"images": True}}), "parts.train.images is True, which is not int"),
        (changed(parts={"train": {"images": 2**63}}), "parts.train.images is 9223372036854775808"),
        (changed(parts={"train": {"images": 1, "share": math.nan}}), "share is nan, which is not a finite number"),
        (changed(parts={"train": {"images": 1, "share": 10**400}}), "share is 1000+…, which is not a finite number"),
        (changed(sizes=[1, "x"]), r"sizes\[1\] is 'x', which is not int"),
    ],
)
def test_values_of_another_type_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        value_from_json(data, Whole, "")


def test_dataclasses_without_a_type_name():
    assert untyped_from_json({"rows": 2, "loss": math.inf}, Counts, "counts") == Counts(2, math.inf)
    for data, message in [([], "counts is"), ({"rows": "x"}, "counts.rows is 'x'"), ({"a": 1}, "unknown 'a'")]:
        with pytest.raises(ValueError, match=message):
            untyped_from_json(data, Counts, "counts")


def test_a_type_that_is_no_name_is_unknown():
    with pytest.raises(ValueError, match=r"has the unknown type \[\]"):
        value_from_json({"type": []}, Counts, "counts")


def test_values_that_do_not_fit_are_removed_and_reported():
    class Outer(TypedDict, total=False):
        part: Part
        name: str

    data = {"part": {"images": "x", "share": 0.5}, "name": [], "more": {}}
    problems = remove_invalid(data, Outer, "run.json")
    assert data == {"part": {"share": 0.5}, "more": {}}
    assert problems == ["run.json.part.images is 'x', which is not int", "run.json.name is [], which is not str"]


def test_errors_of_a_file_name_it(tmp_path):
    path = tmp_path / "a.json"
    for text, message in [("{", "Expecting"), (json.dumps(changed(name=1)), "name is 1"), ("[" * 10**5, "nested")]:
        path.write_text(text)
        with pytest.raises(ValueError, match=f"a.json: .*{message}"):
            read_json_file(path, Whole)
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 10**5)

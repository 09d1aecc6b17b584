"""Names of classes without objects: as a list, with commas, and in files."""

import json
from pathlib import Path

import pytest

from vitrail.data.things import find_things

LABELS = ("sky", "car, automobile", "été")


@pytest.mark.parametrize(
    ("stuff", "things"),
    [
        ([], (True, True, True)),
        (["car, automobile"], (True, False, True)),
        ("sky, été", (False, True, False)),
        ("all", (False, False, False)),
        ("", (True, True, True)),
    ],
)
def test_names(stuff: object, things: tuple[bool, ...]) -> None:
    assert find_things(stuff, LABELS) == things  # pyright: ignore[reportArgumentType]


def test_a_class_named_all_is_meant() -> None:
    assert find_things("all", ("all", "none")) == (False, True)


@pytest.mark.parametrize(
    "text",
    [
        "sky\ncar, automobile\n\n",
        json.dumps([{"name": name, "isthing": int(name == "été")} for name in LABELS]),
        json.dumps({"categories": [{"name": name, "isthing": name == "été"} for name in LABELS]}),
        json.dumps({"classes": [{"id": 3, "name": name, "isthing": name == "été"} for name in LABELS]}),
    ],
)
def test_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "stuff").write_text(text, encoding="utf-8")
    assert find_things(str(tmp_path / "stuff"), LABELS) == (False, False, True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[", "is not valid JSON"),
        (b'["sky"]', "must be a list of categories with name and isthing"),
        (b'{"a": 1}', "must be a list of categories with name and isthing"),
        (b"moon", "the model has no class 'moon': use names with commas, all, or a file"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "stuff").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        find_things(str(tmp_path / "stuff"), LABELS)

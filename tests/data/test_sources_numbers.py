"""Numbers as targets: columns of CSV, TSV, JSONL and Parquet tables, values of Python samples, and hostile cells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.data.labels import LabelMap
from vitrail.data.sources import load_dataset
from vitrail.data.sources.numbers import parse_number

ROWS = [("0.png", "train", "1.5", "-3"), ("1.png", "train", "2e1", ".5"), ("2.png", "val", "+7", "0")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def write(path: Path, rows: list[tuple[str, ...]], header: str = "path,split,price,age", separator: str = ",") -> str:
    lines = [header.replace(",", separator), *(separator.join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(("name", "separator"), [("t.csv", ","), ("t.csv", ";"), ("t.tsv", "\t")])
def test_named_columns_of_a_table_are_numbers(folder: Path, name: str, separator: str) -> None:
    found = load_dataset(write(folder / name, ROWS, separator=separator), targets=("age", "price"))
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 2, "validation": 1}
    assert (found["train"].target_kind, found["train"].classes) == ("numbers", ("age", "price"))
    assert found["train"].targets.tolist() == [[-3.0, 1.5], [0.5, 20.0]]
    assert not found["train"].is_multi_label


def test_json_lines_and_parquet_hold_the_same_numbers(folder: Path) -> None:
    rows = [{"path": name, "split": split, "price": float(price)} for name, split, price, _ in ROWS]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = load_dataset(folder / "t.jsonl", targets="price")
    assert found["train"].targets.tolist() == [[1.5], [20.0]]
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(rows), folder / "t.parquet")
    assert load_dataset(folder / "t.parquet", targets="price")["train"].targets.tolist() == [[1.5], [20.0]]
    images = [{"image": {"bytes": (folder / row["path"]).read_bytes()}, "price": row["price"]} for row in rows]
    parquet.write_table(arrow.Table.from_pylist([*images, images[0] | {"price": None}]), folder / "train-0.parquet")
    embedded = load_dataset(folder / "train-0.parquet", targets="price", fractions=(1, 0, 0))
    assert embedded["train"].targets.tolist() == [[1.5], [20.0], [7.0]]
    ((name, reason),) = embedded.skipped
    assert name.endswith("train-0.parquet[3]")
    assert reason == "no number: price is missing"


def test_json_lines_of_labels_are_classes(folder: Path) -> None:
    rows = [{"file_name": f"{number}.png", "label": "ab"[number % 2]} for number in range(12)]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_dataset(folder / "t.jsonl")["train"].classes == ("a", "b")


@pytest.mark.parametrize(
    "make",
    [
        lambda images, values: list(zip(images, values[:, :1], strict=True)),
        lambda images, values: (np.stack(images), values[:, 0]),
        lambda images, values: [{"image": image, "x": value[0]} for image, value in zip(images, values, strict=True)],
    ],
)
def test_python_samples_have_numbers(make: Any) -> None:
    images = [np.full((8, 8), 10 * number, np.uint8) for number in range(9)]
    values = np.arange(18, dtype=np.float32).reshape(9, 2)
    found = load_dataset(make(images, values), targets="x", fractions=(1, 0, 0))
    assert found["train"].targets.tolist() == [[2.0 * number] for number in range(9)]


def test_frames_have_columns_of_numbers(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": [str(folder / f"{n}.png") for n in range(4)], "age": [1, 2.5, None, 4]})
    found = load_dataset(frame, targets="age", fractions=(1, 0, 0))
    assert found["train"].targets.tolist() == [[1.0], [2.5], [4.0]]
    assert found.skipped[0][1] == "no number: age is NaN"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("", "is missing"),
        ("N/A", "is missing"),
        ("nan", "is missing"),
        (float("nan"), "is NaN"),
        (float("inf"), "is infinite"),
        ("inf", "'inf' is not a number"),
        ("1e999", "is infinite"),
        ("1e31", "is too large"),
        (10**400, "is too large"),
        ("12a", "'12a' is not a number"),
        ("1_000", "'1_000' is not a number"),
        ("1,5", "'1,5' is not a number: use a decimal point"),
        ("1,5,2", "'1,5,2' is not a number"),
        ("\u0661\u0662", "'\u0661\u0662' is not a number"),  # digits, but not ASCII
        ("0x10", "'0x10' is not a number"),
        ("=1+1", "'=1+1' is not a number"),
        (True, "'True' is not a number"),
        ([1.0], "'[1.0]' is not a number"),
    ],
)
def test_cells_without_a_finite_number_are_named(cell: Any, reason: str) -> None:
    assert parse_number(cell) == reason


@pytest.mark.parametrize(("cell", "number"), [(" 1.5 ", 1.5), ("-2E-3", -0.002), (".5", 0.5), (np.float32(2), 2.0)])
def test_cells_with_a_number_are_read(cell: Any, number: float) -> None:
    assert parse_number(cell) == number


def test_rows_without_a_number_are_skipped_with_file_and_line(folder: Path) -> None:
    path = write(folder / "t.csv", [*ROWS, ("3.png", "train", "?", "1"), ("4.png", "train", "1", "")])
    found = load_dataset(path, targets=("price", "age"))
    assert sum(map(len, found.splits.values())) == 3
    assert [reason for _, reason in found.skipped] == [
        f"no number: price '?' is not a number ({path}, line 5)",
        f"no number: age is missing ({path}, line 6)",
    ]
    with pytest.raises(ValueError, match=r"t.csv has no image with numbers: .*0.png: no number: split 'train' is not"):
        load_dataset(path, targets="split")


def test_splits_by_content_do_not_depend_on_the_numbers(folder: Path) -> None:
    paths = [f"{number}.png" for number in range(12)]
    one, two = (
        load_dataset(write(folder / f"{k}.csv", [(p, str(k * n)) for n, p in enumerate(paths)], "path,x"), targets="x")
        for k in (1, 3)
    )
    assert [one["train"].name(i) for i in range(len(one["train"]))] == [
        two["train"].name(i) for i in range(len(two["train"]))
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "prise"}, r"has no column 'prise' \(like 'price'\?\): its columns are path, split, price, age"),
        ({"targets": ("age", "age")}, "targets= names 'age' twice"),
        ({"targets": ()}, "targets= must name one or more columns"),
        ({"targets": "error"}, "a target cannot be named 'error'"),
        ({"targets": "age", "names": "imagenet"}, "names= is for classes or masks, and targets= are numbers"),
        ({"targets": "age", "multi_label": True}, "task= is for classes or masks"),
        ({"targets": "age", "label_from": "^(.)"}, "label_from= is for classes or masks"),
        ({"targets": "age", "ignore": 3}, "ignore= is for classes or masks"),
        ({}, "columns of numbers need targets="),
    ],
)
def test_wrong_targets_are_one_line(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(write(folder / "t.csv", ROWS), **options)


def test_a_column_that_occurs_twice_is_ambiguous(folder: Path) -> None:
    path = write(folder / "t.csv", [("0.png", "1", "2")], "path,age,age")
    with pytest.raises(ValueError, match=r"t.csv has 2 columns 'age'"):
        load_dataset(path, targets="age")


@pytest.mark.parametrize("source", ["digits", "."])
def test_targets_need_a_table(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "photos").mkdir()
    monkeypatch.chdir(folder / "photos")
    with pytest.raises(ValueError, match="is no table with columns of numbers"):
        load_dataset(source, targets="x")


def test_labels_that_are_measured_numbers_are_not_silently_classes(folder: Path) -> None:
    rows = [(f"{number}.png", f"{number / 7:.3f}") for number in range(12)]
    path = write(folder / "t.csv", rows, "path,label")
    with pytest.raises(ValueError, match=r"the labels are numbers such as 0.143: use targets='label' to learn numbers"):
        load_dataset(path)
    assert load_dataset(path, targets="label")["train"].target_kind == "numbers"
    assert load_dataset(path, multi_label=False)["train"].target_kind == "single"  # as asked


@pytest.mark.parametrize("labels", ["0123456789ab", "000011112222", ["0.5", "1.5"] * 6, ["1.0", "2.0", "3.0"] * 4])
def test_labels_that_are_numbers_of_classes_stay_classes(folder: Path, labels: Any) -> None:
    path = write(folder / "t.csv", [(f"{n}.png", label) for n, label in enumerate(labels)], "path,label")
    assert load_dataset(path)["train"].target_kind == "single"


def test_splits_are_matched_by_the_names_of_their_targets(folder: Path) -> None:
    path = write(folder / "t.csv", ROWS)
    both, other = load_dataset(path, targets=("price", "age"))["train"], load_dataset(path, targets="age")["train"]
    mapped = LabelMap(("age", "price")).apply(both).images
    assert (mapped.classes, mapped.targets[0].tolist()) == (("age", "price"), [-3.0, 1.5])
    with pytest.raises(ValueError, match="the train split has the targets 'age', expected 'price', 'age'"):
        LabelMap(("price", "age")).apply(other)

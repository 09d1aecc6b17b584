"""Which pictures a run learns from, and which it is not shown."""

import json
from pathlib import Path

import numpy as np
import pytest

from vitrail.cli import main
from vitrail.training.recipe import Data
from vitrail.training.runs.prepare import prepare_data


def names(prepared, split: str) -> list[str]:
    return [prepared.splits[split].name(index) for index in range(len(prepared.splits[split]))]


def test_per_class_limits_the_training_split_only() -> None:
    every, few = prepare_data(Data("digits")), prepare_data(Data("digits", per_class=7))
    assert np.bincount(few.train.targets).tolist() == [7] * 10
    assert set(names(few, "train")) < set(names(every, "train"))
    assert names(few, "test") == names(every, "test")
    assert names(few, "validation") == names(every, "validation")
    assert few.measure_facts().images == 70


def test_smaller_draws_are_part_of_larger_ones() -> None:
    seven, three, other = (
        set(names(prepare_data(Data("digits", per_class=count, drawn=drawn)), "train"))
        for count, drawn in ((7, 0), (3, 0), (7, 1))
    )
    assert three < seven
    assert len(seven & other) < 70


def test_test_split_can_be_left_out() -> None:
    assert set(prepare_data(Data("digits", test=False)).splits) == {"train", "validation"}


def test_per_class_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = ["--per-class", "2", "--per-class-seed", "3", "--steps", "1"]
    assert main(["train", "digits", *options, "--out", str(run)]) == 0
    assert "20 train, 234 validation, 270 test" in capsys.readouterr().err
    data = json.loads((run / "recipe.json").read_text())["data"]
    assert (data["per_class"], data["drawn"]) == (2, 3)
    assert main(["train", "digits", "--per-class", "0", "--out", str(tmp_path / "none")]) == 2
    assert "per_class must be >= 1, got 0" in capsys.readouterr().err
    assert main(["train", "digits", "--per-class-seed", "3", "--out", str(tmp_path / "none")]) == 2
    assert "--per-class-seed needs --per-class: give it too" in capsys.readouterr().err


def test_classes_are_selected_in_all_splits():
    odd, even = (prepare_data(Data("digits", classes=every)) for every in ((1, 2), (0, 2)))
    assert (odd.labels.names, even.labels.names) == (tuple("13579"), tuple("02468"))
    whole = prepare_data(Data("digits"))
    for split, pictures in whole.splits.items():
        assert set(names(odd, split)) | set(names(even, split)) == set(names(whole, split))
        assert not set(names(odd, split)) & set(names(even, split))
        assert odd.splits[split].count_classes().tolist() == pictures.count_classes()[1::2].tolist()
    few = prepare_data(Data("digits", classes=(1, 2), per_class=3))
    assert few.train.count_classes().tolist() == [3] * 5


@pytest.mark.parametrize("classes", [(2, 2), (-1, 2), (0, 0)])
def test_invalid_classes_and_examples_are_refused(classes):
    with pytest.raises(ValueError, match="first, step"):
        Data("digits", classes=classes)
    with pytest.raises(ValueError, match="examples must be >= 1"):
        Data("digits", examples=(0, 200))


def test_vtab_examples_with_and_without_a_test_split():
    choosing, last = (prepare_data(Data("digits", examples=(80, 20), test=test)) for test in (False, True))
    assert {split: len(pictures) for split, pictures in choosing.splits.items()} == {"train": 80, "validation": 20}
    assert {split: len(pictures) for split, pictures in last.splits.items()} == {
        "train": 100,
        "validation": 20,
        "test": 270,
    }
    assert set(names(last, "train")) == set(names(choosing, "train")) | set(names(choosing, "validation"))
    assert not set(names(choosing, "train")) & set(names(choosing, "validation"))
    assert names(prepare_data(Data("digits", examples=(80, 20), drawn=1)), "train") != names(last, "train")
    assert len(choosing.labels) == 10  # whichever were drawn

"""Which pictures a run learns from, and which it is not shown."""

import json
from pathlib import Path

import numpy as np
import pytest

from vitrail.cli import main
from vitrail.recipe import Data
from vitrail.run.prepare import prepare


def names(prepared, split: str) -> list[str]:
    return [prepared.splits[split].name(index) for index in range(len(prepared.splits[split]))]


def test_a_few_pictures_of_each_class_are_learnt_from_and_the_other_splits_stay_whole() -> None:
    every, few = prepare(Data("digits")), prepare(Data("digits", per_class=7))
    assert np.bincount(few.train.targets).tolist() == [7] * 10
    assert set(names(few, "train")) < set(names(every, "train"))
    assert names(few, "test") == names(every, "test")
    assert names(few, "validation") == names(every, "validation")
    assert few.facts().images == 70


def test_fewer_pictures_are_among_more_and_another_draw_draws_others() -> None:
    seven, three, other = (
        set(names(prepare(Data("digits", per_class=count, drawn=drawn)), "train"))
        for count, drawn in ((7, 0), (3, 0), (7, 1))
    )
    assert three < seven
    assert len(seven & other) < 70


def test_test_pictures_are_not_looked_at_while_something_is_chosen() -> None:
    assert set(prepare(Data("digits", test=False)).splits) == {"train", "validation"}


def test_the_command_line_learns_from_a_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "digits", "--per-class", "2", "--drawn", "3", "--steps", "1", "--out", str(run)]) == 0
    assert "20 train, 234 validation, 270 test" in capsys.readouterr().err
    data = json.loads((run / "recipe.json").read_text())["data"]
    assert (data["per_class"], data["drawn"]) == (2, 3)
    assert main(["train", "digits", "--per-class", "0", "--out", str(tmp_path / "none")]) == 2
    assert "0 pictures of each class to learn from: use 1 or more" in capsys.readouterr().err

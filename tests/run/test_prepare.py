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


def test_every_other_class_is_taken_in_all_splits():
    odd, even = (prepare(Data("digits", classes=every)) for every in ((1, 2), (0, 2)))
    assert (odd.labels.names, even.labels.names) == (tuple("13579"), tuple("02468"))
    whole = prepare(Data("digits"))
    for split, pictures in whole.splits.items():
        assert set(names(odd, split)) | set(names(even, split)) == set(names(whole, split))
        assert not set(names(odd, split)) & set(names(even, split))
        assert odd.splits[split].counts().tolist() == pictures.counts()[1::2].tolist()
    few = prepare(Data("digits", classes=(1, 2), per_class=3))
    assert few.train.counts().tolist() == [3] * 5


@pytest.mark.parametrize("classes", [(2, 2), (-1, 2), (0, 0)])
def test_classes_that_are_none_are_refused(classes):
    with pytest.raises(ValueError, match="give the first and the step"):
        Data("digits", classes=classes)
    with pytest.raises(ValueError, match="use 1 or more to learn from"):
        Data("digits", examples=(0, 200))


def test_vtabs_examples_are_chosen_by_a_part_and_all_learnt_from_in_the_end():
    choosing, last = (prepare(Data("digits", examples=(80, 20), test=test)) for test in (False, True))
    assert {split: len(pictures) for split, pictures in choosing.splits.items()} == {"train": 80, "validation": 20}
    assert {split: len(pictures) for split, pictures in last.splits.items()} == {
        "train": 100,
        "validation": 20,
        "test": 270,
    }
    assert set(names(last, "train")) == set(names(choosing, "train")) | set(names(choosing, "validation"))
    assert not set(names(choosing, "train")) & set(names(choosing, "validation"))
    assert names(prepare(Data("digits", examples=(80, 20), drawn=1)), "train") != names(last, "train")
    assert len(choosing.labels) == 10  # whichever were drawn

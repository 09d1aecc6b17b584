"""Rates are chosen by validation, with as many tries for each family, and only when all tries are there."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.studies.tiny import made
from vitrail.recipe import Data, Facts
from vitrail.studies.study import Cell, Result, Scale, Setting, Setup
from vitrail.studies.tuning import best_rate, tuned

FAMILIES = ({"pool": "class"}, {"pool": "mean"})
FACTS = Facts(images=1000, classes=10, several=False, side=(8, 8), channels=1, several_sizes=False)
SETUP = Setup(Scale("digits", 1, "one core", seeds=3, rates=(1e-4, 1e-3, 1e-2)), Data("digits"), FACTS, Path("study"))


def planned(results: list[Result], setup: Setup = SETUP) -> list[Cell]:
    return tuned(setup, results, FAMILIES, lambda place, rate, seed: made(setup, place, rate, seed))


def tried(place: Mapping[str, Setting], scores: dict[float, float]) -> list[Result]:
    return [
        Result({**place, "rate": rate, "seed": 0}, "tune", {"validation": score}, 1.0) for rate, score in scores.items()
    ]


def test_first_every_family_tries_every_rate():
    cells = planned([])
    assert {cell.phase for cell in cells} == {"tune"}
    assert [(cell.at["pool"], cell.at["rate"], cell.at["seed"]) for cell in cells] == [
        (pool, rate, 0) for pool in ("class", "mean") for rate in (1e-4, 1e-3, 1e-2)
    ]
    assert all(cell.recipe.optimizer.lr == cell.at["rate"] for cell in cells)


def test_a_family_whose_tries_are_finished_has_final_cells_with_its_best_rate():
    cells = planned(tried(FAMILIES[0], {1e-4: 0.2, 1e-3: 0.3, 1e-2: 0.5}) + tried(FAMILIES[1], {1e-4: 0.9, 1e-3: 0.1}))
    finals = [cell for cell in cells if cell.phase == "final"]
    assert [dict(cell.at) for cell in finals] == [{"pool": "class", "rate": 1e-2, "seed": seed} for seed in range(3)]
    assert [cell.recipe.seed for cell in finals] == [0, 1, 2]
    assert {cell.recipe.optimizer.lr for cell in finals} == {1e-2}
    assert sum(cell.phase == "tune" for cell in cells) == 6  # finished ones are named again


def test_the_same_plan_has_the_same_names():
    results = tried(FAMILIES[0], {1e-4: 0.2, 1e-3: 0.3, 1e-2: 0.5})
    assert [cell.name for cell in planned(results)] == [cell.name for cell in planned(results)]
    assert {cell.name for cell in planned([])} < {cell.name for cell in planned(results)}


def test_final_results_do_not_choose():
    finals = [Result({**FAMILIES[0], "rate": rate, "seed": 0}, "final", {"validation": 1}, 1) for rate in (1e-4, 1e-3)]
    assert best_rate(FAMILIES[0], (1e-4, 1e-3), finals) is None


def test_one_rate_needs_no_tries():
    cells = planned([], replace(SETUP, scale=replace(SETUP.scale, rates=(3e-3,))))
    assert {cell.phase for cell in cells} == {"final"}
    assert len(cells) == 6


@pytest.mark.parametrize(
    ("scores", "best"),
    [({1e-4: 0.5, 1e-3: 0.5}, 1e-4), ({1e-4: float("nan"), 1e-3: 0.1}, 1e-3), ({1e-4: 0.0, 1e-3: 0.1}, 1e-3)],
)
def test_the_first_of_equals_is_taken_and_what_is_no_number_is_the_worst(scores, best):
    assert best_rate(FAMILIES[0], tuple(scores), tried(FAMILIES[0], scores)) == best

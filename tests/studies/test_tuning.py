"""Selection of learning rates on validation, with equal tuning for each family, once all runs are finished."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.studies.tiny import made
from vitrail.studies.base import plan_tuned, select_lr
from vitrail.studies.study import Cell, CellResult, Setting, StudyScale, StudySetup
from vitrail.training.recipe import Data, Facts

FAMILIES = ({"pool": "class"}, {"pool": "mean"})
FACTS = Facts(images=1000, classes=10, several=False, side=(8, 8), channels=1, several_sizes=False)
SETUP = StudySetup(
    StudyScale("digits", 1, "one core", seeds=3, lrs=(1e-4, 1e-3, 1e-2)), Data("digits"), FACTS, Path("study")
)


def planned(results: list[CellResult], setup: StudySetup = SETUP) -> list[Cell]:
    return plan_tuned(setup, results, FAMILIES, lambda place, lr, seed: made(setup, place, lr, seed))


def tried(place: Mapping[str, Setting], scores: dict[float, float]) -> list[CellResult]:
    return [
        CellResult({**place, "rate": lr, "seed": 0}, "tune", {"validation": score}, 1.0) for lr, score in scores.items()
    ]


def test_every_family_tries_every_learning_rate():
    cells = planned([])
    assert {cell.phase for cell in cells} == {"tune"}
    assert [(cell.at["pool"], cell.at["rate"], cell.at["seed"]) for cell in cells] == [
        (pool, lr, 0) for pool in ("class", "mean") for lr in (1e-4, 1e-3, 1e-2)
    ]
    assert all(cell.recipe.optimizer.lr == cell.at["rate"] for cell in cells)


def test_finished_tuning_gives_final_cells_at_the_best_lr():
    cells = planned(tried(FAMILIES[0], {1e-4: 0.2, 1e-3: 0.3, 1e-2: 0.5}) + tried(FAMILIES[1], {1e-4: 0.9, 1e-3: 0.1}))
    finals = [cell for cell in cells if cell.phase == "final"]
    assert [dict(cell.at) for cell in finals] == [{"pool": "class", "rate": 1e-2, "seed": seed} for seed in range(3)]
    assert [cell.recipe.seed for cell in finals] == [0, 1, 2]
    assert {cell.recipe.optimizer.lr for cell in finals} == {1e-2}
    assert sum(cell.phase == "tune" for cell in cells) == 6  # finished cells are planned again


def test_cell_names_are_stable():
    results = tried(FAMILIES[0], {1e-4: 0.2, 1e-3: 0.3, 1e-2: 0.5})
    assert [cell.name for cell in planned(results)] == [cell.name for cell in planned(results)]
    assert {cell.name for cell in planned([])} < {cell.name for cell in planned(results)}


def test_final_results_do_not_select_the_lr():
    finals = [CellResult({**FAMILIES[0], "rate": lr, "seed": 0}, "final", {"validation": 1}, 1) for lr in (1e-4, 1e-3)]
    assert select_lr(FAMILIES[0], (1e-4, 1e-3), finals) is None


def test_one_learning_rate_needs_no_tuning():
    cells = planned([], replace(SETUP, scale=replace(SETUP.scale, lrs=(3e-3,))))
    assert {cell.phase for cell in cells} == {"final"}
    assert len(cells) == 6


@pytest.mark.parametrize(
    ("scores", "best"),
    [({1e-4: 0.5, 1e-3: 0.5}, 1e-4), ({1e-4: float("nan"), 1e-3: 0.1}, 1e-3), ({1e-4: 0.0, 1e-3: 0.1}, 1e-3)],
)
def test_ties_take_the_first_and_nan_is_worst(scores, best):
    assert select_lr(FAMILIES[0], tuple(scores), tried(FAMILIES[0], scores)) == best

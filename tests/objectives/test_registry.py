"""The table of objectives agrees with the names of recipes and of command line options."""

import pytest

from vitrail.objectives.base import Objective
from vitrail.objectives.registry import DISTILLATION, OBJECTIVES, PRETRAINING
from vitrail.training.recipes import DISTILLATION_METHODS, METHODS


def test_pretraining_methods_have_a_recipe_each() -> None:
    assert set(PRETRAINING) == set(METHODS)


def test_distillation_methods_are_those_of_the_command_line() -> None:
    assert tuple(DISTILLATION) == DISTILLATION_METHODS
    assert all(objective.teacher_output is not None for objective in DISTILLATION.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_builds_a_task_and_declares_its_labels(name: str) -> None:
    kind = OBJECTIVES[name]
    assert kind.build_loss is not Objective.build_loss
    assert kind.label_use in ("required", "optional", "none")
    assert (kind.method is None) == (kind.label_use == "required")
    assert kind().method_for(None) == kind.method
    assert kind().method_for(10) is None or kind.label_use == "none"


def test_unused_views_and_ema_are_refused_by_the_base_class() -> None:
    from tests.objectives.made import encoder
    from vitrail.data.transforms.pipeline import Views

    config = encoder().config
    OBJECTIVES["MAE"]().check_run(config, 8, None, True)
    with pytest.raises(ValueError, match="MAE does not use several crops"):
        OBJECTIVES["MAE"]().check_run(config, 8, Views(), False)
    with pytest.raises(ValueError, match="DINO needs several crops"):
        OBJECTIVES["DINO"]().check_run(config, 8, None, False)

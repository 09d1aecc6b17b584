"""Losses of numbers, and predictions in their own units."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.objectives.made import draw, pictures
from vitrail.models.base import Model
from vitrail.objectives.registry import OBJECTIVES, ObjectiveSlot
from vitrail.objectives.regression import Regression, unscale_outputs
from vitrail.utils.json import to_json, value_from_json

MEAN, STD = (100.0, -3.0), (20.0, 0.5)


def model(**slots: object) -> Model:
    """A small model of two outputs, with a head that is not zero."""
    torch.manual_seed(0)
    given: dict[str, object] = {"patch": 8, "width": 32, "depth": 1, "heads": 2, "classes": 2, "image_size": 32}
    made = vitrail.build(None, **(given | slots))
    for parameter in made.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def numbers(count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 2, generator=generator) * torch.tensor(STD) + torch.tensor(MEAN)


@pytest.mark.parametrize(
    ("spec", "function"),
    [
        (Regression(), F.mse_loss),
        (Regression("l1"), F.l1_loss),
        (Regression("huber", delta=0.7), lambda y, t: F.huber_loss(y, t, delta=0.7)),
    ],
)
def test_losses_are_pytorchs(spec, function) -> None:
    task, targets = spec.build(model()), numbers()
    torch.testing.assert_close(task(pictures(), targets, draw())["loss"], function(task.model(pictures()), targets))


def test_targets_are_standardised() -> None:
    task, targets = Regression(mean=MEAN, std=STD).build(model()), numbers()
    scaled = (targets - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(task(pictures(), targets)["loss"], F.mse_loss(task.model(pictures()), scaled))


def test_the_mean_over_equal_shares_of_a_batch_is_that_of_the_batch() -> None:
    task, targets = Regression("huber", mean=MEAN, std=STD).build(model()), numbers()
    halves = [task(pictures()[part], targets[part])["loss"] for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(torch.stack(halves).mean(), task(pictures(), targets)["loss"])


@pytest.mark.parametrize("slots", [{}, {"head": "pre-logits"}, {"prefix": "class+distillation"}])
def test_the_model_file_predicts_in_the_units_of_the_targets(slots) -> None:
    task = Regression(mean=MEAN, std=STD).build(model(**slots))
    predicted = task(pictures())["logits"]
    torch.testing.assert_close(predicted, task.model(pictures()) * torch.tensor(STD) + torch.tensor(MEAN))
    written = model(**slots)
    written.load_state_dict(task.export_weights(task.model.state_dict()))
    torch.testing.assert_close(written(pictures()), predicted)
    unscale_outputs(task.model, MEAN, STD)
    torch.testing.assert_close(task.model(pictures()), predicted)


def test_targets_that_are_not_standardised_need_no_scaling() -> None:
    task = Regression().build(model())
    torch.testing.assert_close(task(pictures())["logits"], task.model(pictures()))
    weights = task.model.state_dict()
    assert task.export_weights(weights) is weights


def test_models_without_such_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match="mean and std are of 2 targets, the model has 3 outputs"):
        Regression(mean=MEAN, std=STD).build(model(classes=3))
    with pytest.raises(ValueError, match="the model's last layer has no bias"):
        unscale_outputs(model(classes=None), MEAN, STD)
    with pytest.raises(ValueError, match=r"head.weight has 2 outputs, but there are 1 targets"):
        unscale_outputs(model(), (1.0,), (1.0,))


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"targets are \[4\], but the model's outputs \[4, 2\]"):
        Regression().build(model())(pictures(), torch.zeros(4))


def test_objective_is_registered_and_stored_as_json() -> None:
    spec = Regression("huber", mean=MEAN, std=STD)
    assert OBJECTIVES["Regression"] is Regression
    assert value_from_json(json.loads(json.dumps(to_json(spec))), ObjectiveSlot, "objective") == spec


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": "hinge"}, "unknown loss 'hinge': use mse, l1 or huber"),
        ({"delta": 0.0}, "delta must be > 0, got 0"),
        ({"mean": (1.0,)}, "mean has 1 values and std 0"),
        ({"mean": (1.0,), "std": (0.0,)}, "std must be > 0 for every target, got 0"),
    ],
)
def test_invalid_settings_are_refused(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        Regression(**wrong)


def test_training_on_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not learn") as caught:
        vitrail.train("digits", settings=["objective=Regression"], out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()

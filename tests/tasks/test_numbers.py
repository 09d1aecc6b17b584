"""The task of numbers: what it refuses, what a model file says about it, and the recipe that learns it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from vitrail.data.dataset import Images
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.arrays import ArrayStore
from vitrail.deploy.runtimes.base import contract_from_json, contract_to_json
from vitrail.deploy.runtimes.open import build_contract
from vitrail.objectives.regression import Regression
from vitrail.tasks import TASKS, task_of
from vitrail.tasks.comparison import TargetStatistics
from vitrail.tasks.numbers import is_regression, read_statistics
from vitrail.training.recipe import Data

TASK = TASKS["numbers"]


def images(values: Sequence[Sequence[float]], names: tuple[str, ...] = ("x", "y")) -> Images:
    pixels = np.zeros((len(values), 8, 8), np.uint8)
    store = ArrayStore(pixels, ((0, "made"),))
    return Images(store, np.arange(len(values)), np.array(values, np.float64), names)


def save(path: Path, **card: Any) -> Path:
    torch.manual_seed(0)
    model = vitrail.build(patch=8, width=16, depth=1, heads=2, classes=2, image_size=16)
    labels = card.pop("labels", ("x", "y"))
    vitrail.save(model, path, labels=labels, preprocessing=Preprocessing((16, 16), (16, 16)), **card)
    return path


def test_targets_that_cannot_be_learnt_are_refused() -> None:
    varied, flat = images([[0, 5], [1, 5], [2, 5]]), images([[1, 2], [1, 2]])
    assert task_of(varied) is TASK
    with pytest.raises(ValueError, match=r"'y' is the same for all training images of t.csv: leave it out of targets="):
        TASK.check_splits({"train": varied}, "t.csv")
    good = images([[0, 5], [1, 6]])
    TASK.check_splits({"train": good, "validation": varied}, "t.csv")
    with pytest.raises(ValueError, match=r"all validation images of t.csv have the same numbers: R² needs different"):
        TASK.check_splits({"train": good, "validation": flat}, "t.csv")


def test_the_card_has_the_statistics_of_the_training_split(tmp_path: Path) -> None:
    card = TASK.describe_outputs(images([[0, 10], [4, 30]]))
    assert card == {"targets": {"mean": [2.0, 20.0], "std": [2.0, 10.0]}}
    model = vitrail.load(save(tmp_path / "m.safetensors", **card))
    assert read_statistics(model) == TargetStatistics((2.0, 20.0), (2.0, 10.0))  # type: ignore[arg-type]
    contract = build_contract("m", None, model)
    assert (contract.target_kind, contract.labels) == ("numbers", ("x", "y"))
    assert contract_from_json(contract_to_json(contract, "uint8"))[0] == contract


def test_a_model_with_a_new_head_predicts_no_numbers(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", targets={"mean": [0, 0], "std": [1, 1]})
    assert not is_regression(vitrail.load(path, classes=5))
    assert not is_regression(vitrail.load(path, classes=None))
    assert not is_regression(vitrail.load(save(tmp_path / "c.safetensors")))


@pytest.mark.parametrize(
    "targets",
    [
        {"mean": [0.0], "std": [1.0]},
        {"mean": [0, 0], "std": [1, 0]},
        {"mean": ["a", 1], "std": [1, 1]},
        {"mean": [1, 2]},
    ],
)
def test_damaged_statistics_are_refused(tmp_path: Path, targets: dict[str, Any]) -> None:
    model = vitrail.load(save(tmp_path / "m.safetensors", targets=targets))
    with pytest.raises(ValueError, match=r"targets|mean"):
        read_statistics(model)


def test_the_head_of_the_same_targets_is_taken_over_in_units_of_the_new_statistics() -> None:
    torch.manual_seed(0)
    model = vitrail.build(patch=8, width=16, depth=1, heads=2, classes=2, image_size=16).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter)
    pixels = torch.randn(3, 3, 16, 16)
    before = model(pixels)
    objective = Regression().fit_targets((10.0, -1.0), (4.0, 0.5))
    objective.adopt_head(model)
    torch.testing.assert_close(objective.build(model)(pixels)["logits"], before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("balance", "weights"),
        ("per_class", 3),
        ("task", "multi"),
        ("classes", (0, 2)),
        ("names", "imagenet"),
        ("label_from", "^(.)"),
        ("ignore", (3,)),
        ("allow_class_mismatch", True),
    ],
)
def test_options_of_classes_are_refused_with_targets(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}= is for classes or masks, and targets= are numbers"):
        Data("t.csv", targets=("x",), **{option: value})

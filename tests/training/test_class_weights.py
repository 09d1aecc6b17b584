"""Weights of classes in the loss, from the images or pixels of each."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vitrail.training.runs.setup import RunSetup


def weigh(counts: list[int], masks: bool) -> list[float]:
    train = SimpleNamespace(masks=object() if masks else None, is_multi_label=False)
    prepared = SimpleNamespace(train=train, count_targets=lambda: np.array(counts))
    given: Any = SimpleNamespace(recipe=SimpleNamespace(data=SimpleNamespace(balance="weights")), prepared=prepared)
    weights = RunSetup.class_weights(given)
    assert weights is not None
    return weights.tolist()


@pytest.mark.parametrize("masks", [False, True])
def test_weights_are_inverse_to_the_counts_and_1_on_average(masks: bool) -> None:
    weights = weigh([100, 300, 200], masks)
    assert weights == pytest.approx([2.0, 2 / 3, 1.0])
    assert np.average(weights, weights=[100, 300, 200]) == pytest.approx(1.0)


def test_weights_of_pixels_are_bounded_and_absent_classes_weigh_nothing() -> None:
    assert weigh([10**9, 1, 0], masks=True) == pytest.approx([0.5, 100.0, 0.0])

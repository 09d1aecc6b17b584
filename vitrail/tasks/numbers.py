"""Numbers of a whole image: regression. n images, M targets."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from vitrail.data.audit.numbers import summarise_numbers
from vitrail.data.dataset import Images, TargetKind
from vitrail.data.labels import format_names
from vitrail.metrics.regression import compare_regression, find_largest_errors, summarise_regression
from vitrail.models.base import Model
from vitrail.tasks.base import Task
from vitrail.tasks.comparison import OutputComparison, PairedScore, TargetStatistics, check_shapes, read_interval
from vitrail.utils.json import untyped_from_json

ROUNDINGS = 8  # of a number in float32: few, but its standard deviation may be small beside it


class Numbers(Task):
    """One or several numbers per image; rows are predictions [n, M] in the units of the targets."""

    name: ClassVar[TargetKind] = "numbers"
    title: ClassVar[str] = "numbers"
    noun: ClassVar[str] = "targets"
    outputs: ClassVar[str] = "numbers"
    min_outputs: ClassVar[int] = 1
    recipe: ClassVar[str | None] = "regress"
    score: ClassVar[str] = "r2"
    validation_metrics: ClassVar[tuple[str, ...]] = ("r2", "mae", "rmse")

    def check_splits(self, splits: Mapping[str, Images], where: str) -> None:
        """Raise ValueError for a target that cannot be learnt, and for splits whose R² is undefined."""
        for split, images in splits.items():
            constant = [name for name, found in summarise_numbers(images).items() if found.is_constant]
            if split == "train" and constant:
                raise ValueError(
                    f"{constant[0]!r} is the same for all training images of {where}: leave it out of targets="
                )
            if len(constant) == len(images.classes):
                raise ValueError(f"all {split} images of {where} have the same numbers: R² needs different ones")

    def describe_targets(self, images: Images) -> str:
        count = len(images.classes)
        return f"{count} target{'s' * (count > 1)}, {format_names(images.classes, str)}"

    def describe_split(self, images: Images) -> dict[str, Any]:
        return {"targets": {name: found.to_dict() for name, found in summarise_numbers(images).items()}}

    def describe_outputs(self, train: Images) -> dict[str, Any]:
        found = summarise_numbers(train).values()
        return {"targets": {"mean": [each.mean for each in found], "std": [each.std for each in found]}}

    def reduce_outputs(self, outputs: Tensor, images: Images, indices: np.ndarray) -> np.ndarray:
        return outputs.float().cpu().numpy()

    def compute_metrics(self, rows: np.ndarray, images: Images, *, intervals: bool = True) -> dict[str, Any]:
        return summarise_regression(rows, images.targets, intervals=intervals)

    def compare_outputs(
        self,
        first: np.ndarray,
        second: np.ndarray,
        targets: np.ndarray | None = None,
        statistics: TargetStatistics | None = None,
    ) -> OutputComparison:
        """Compare numbers [n, M] in standard deviations of the training targets, and R²."""
        check_shapes(first, second, "numbers")
        assert statistics is not None
        if not np.isfinite(second).all():
            return OutputComparison("numbers", math.inf, float(np.abs(first).max()), relative=math.inf)
        one, two, std = first.astype(np.float64), second.astype(np.float64), np.array(statistics.std)
        difference = np.abs(one - two) / std
        score = None
        if targets is not None and len(targets) > 1 and (targets.std(0) > 0).any():
            before, after = (summarise_regression(values, targets) for values in (one, two))
            intervals = tuple(read_interval(metrics.get("r2_interval")) for metrics in (before, after))
            paired = compare_regression(one, two, targets)
            scores = (before["r2"], after["r2"], intervals[0], intervals[1])
            score = PairedScore("R²", *scores, paired.difference, paired.interval)
        return OutputComparison(
            "numbers",
            float(np.abs(one - two).max()),
            float(np.abs(one).max()),
            score=score,
            relative=float(difference.max()),
            mean_relative=float(difference.mean()),
            rounding=float((ROUNDINGS * np.finfo(np.float32).eps * np.abs(one).max(0) / std).max()),
        )

    def stored_arrays(self, rows: np.ndarray, images: Images) -> dict[str, np.ndarray]:
        return {"predictions": rows, "numbers": images.targets}

    def find_examples(self, rows: np.ndarray, images: Images, count: int) -> np.ndarray:
        """Return the images with the largest errors."""
        return find_largest_errors(rows, images.targets, count)


def read_statistics(model: Model) -> TargetStatistics | None:
    """Return the statistics of the targets of a regression model; None for another.

    The card of a model whose head was replaced describes its former outputs: such a model has no labels any more.
    """
    stored = model.card.get("targets")
    if not isinstance(stored, dict) or model.labels is None or model.config.output_kind != "classes":
        return None
    statistics = untyped_from_json(stored, TargetStatistics, "targets")
    if len(statistics.mean) != model.config.classes:
        raise ValueError(
            f"the model has {model.config.classes} outputs and statistics of {len(statistics.mean)} targets"
        )
    return statistics


def is_regression(model: Model) -> bool:
    """Return whether a model predicts numbers."""
    return read_statistics(model) is not None

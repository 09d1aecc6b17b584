"""Classes of a whole image: one, or several."""

import math
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from vitrail.data.dataset import Images, TargetKind
from vitrail.metrics import compute_metrics, find_confident_mistakes
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.linear import score_logits
from vitrail.metrics.paired import compare_correct, compare_map
from vitrail.tasks.base import Task
from vitrail.tasks.comparison import (
    OutputComparison,
    PairedScore,
    TargetStatistics,
    check_shapes,
    mean_confidence,
    measure_difference,
)


class SingleLabel(Task):
    """One class per image; rows are logits [n, K]."""

    name: ClassVar[TargetKind] = "single"
    title: ClassVar[str] = "one class per image"
    score: ClassVar[str] = "top1"
    validation_metrics: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5")
    has_image_classes: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    several: ClassVar[bool] = False  # classes of an image

    def reduce_outputs(self, outputs: Tensor, images: Images, indices: np.ndarray) -> np.ndarray:
        return outputs.float().cpu().numpy()

    def compute_metrics(self, rows: np.ndarray, images: Images, *, intervals: bool = True) -> dict[str, Any]:
        return summarise_logits(rows, images.targets, intervals=intervals)

    def compare_outputs(
        self,
        first: np.ndarray,
        second: np.ndarray,
        targets: np.ndarray | None = None,
        statistics: TargetStatistics | None = None,
    ) -> OutputComparison:
        """Compare logits [n, K] by the predictions, their confidence, and accuracy or mAP."""
        check_shapes(first, second, "logits")
        difference, largest = measure_difference(first, second)
        same = (self.choose(first) == self.choose(second)).all(1)
        score = None if targets is None else score_pair(first, second, targets)
        interval, shift = wilson_interval(float(same.sum()), len(same)), math.nan
        if math.isfinite(difference):
            shift = mean_confidence(second, self.several) - mean_confidence(first, self.several)
        return OutputComparison("logits", difference, largest, float(same.mean()), interval, score, shift)

    def choose(self, logits: np.ndarray) -> np.ndarray:
        """Return the prediction of each image, [n, 1], or [n, K] of several classes."""
        return logits >= 0 if self.several else logits.argmax(1)[:, None]

    def stored_arrays(self, rows: np.ndarray, images: Images) -> dict[str, np.ndarray]:
        return {"logits": rows, "targets": images.targets}

    def find_examples(self, rows: np.ndarray, images: Images, count: int) -> np.ndarray:
        return find_confident_mistakes(rows, images.targets, count)


class MultiLabel(SingleLabel):
    """Any number of classes per image; rows are logits [n, K]."""

    name: ClassVar[TargetKind] = "multi"
    title: ClassVar[str] = "several classes per image"
    several: ClassVar[bool] = True
    min_outputs: ClassVar[int] = 1
    score: ClassVar[str] = "map"
    validation_metrics: ClassVar[tuple[str, ...]] = ("loss", "top1", "map")


def summarise_logits(logits: np.ndarray, targets: np.ndarray, intervals: bool = True) -> dict[str, Any]:
    """Return all metrics. For multi-label images `top1` is how often the class with the highest logit is one of the labels."""
    metrics = compute_metrics(logits, targets, intervals=intervals)
    if targets.ndim == 2:
        correct = np.take_along_axis(targets, logits.argmax(1)[:, None], 1)
        metrics["top1"] = float(correct.mean())
        if intervals:
            metrics["top1_interval"] = list(wilson_interval(int(correct.sum()), len(correct)))
    return metrics


def score_pair(first: np.ndarray, second: np.ndarray, targets: np.ndarray) -> PairedScore:
    """Return the accuracy or mAP of both outputs, and their paired difference."""
    if targets.ndim == 2:
        paired = compare_map(first, second, targets)
        one, two = score_logits(first, targets), score_logits(second, targets)
        return PairedScore("mAP", one, two, None, None, paired.difference, paired.interval)
    correct = [logits.argmax(1) == targets for logits in (first, second)]
    paired, count = compare_correct(correct[0], correct[1]), len(targets)
    one, two = (float(row.sum()) for row in correct)
    intervals = wilson_interval(one, count), wilson_interval(two, count)
    return PairedScore("accuracy", one / count, two / count, *intervals, paired.difference, paired.interval)

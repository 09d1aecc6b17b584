"""Classes of a whole image: one, or several."""

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from vitrail.data.dataset import Images, TargetKind
from vitrail.metrics import compute_metrics, find_confident_mistakes
from vitrail.metrics.intervals import wilson_interval
from vitrail.tasks.base import Task


class SingleLabel(Task):
    """One class per image; rows are logits [n, K]."""

    name: ClassVar[TargetKind] = "single"
    title: ClassVar[str] = "one class per image"
    score: ClassVar[str] = "top1"
    validation_metrics: ClassVar[tuple[str, ...]] = ("loss", "top1", "top5")
    has_image_classes: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True

    def reduce_outputs(self, outputs: Tensor, images: Images, indices: np.ndarray) -> np.ndarray:
        return outputs.float().cpu().numpy()

    def compute_metrics(self, rows: np.ndarray, images: Images, *, intervals: bool = True) -> dict[str, Any]:
        return summarise_logits(rows, images.targets, intervals=intervals)

    def stored_arrays(self, rows: np.ndarray, images: Images) -> dict[str, np.ndarray]:
        return {"logits": rows, "targets": images.targets}

    def find_examples(self, rows: np.ndarray, images: Images, count: int) -> np.ndarray:
        return find_confident_mistakes(rows, images.targets, count)


class MultiLabel(SingleLabel):
    """Any number of classes per image; rows are logits [n, K]."""

    name: ClassVar[TargetKind] = "multi"
    title: ClassVar[str] = "several classes per image"
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

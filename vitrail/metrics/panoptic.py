"""Panoptic quality ("Panoptic Segmentation", Kirillov et al. 2019), from segments of one image after the other.

A predicted and a true segment of one class match if their IoU is above 0.5; so a segment has at most one match. Pixels without
a true segment count for nothing. A crowd, a true segment of many objects, need not be found: a prediction that lies in it, or
in pixels without a segment, by more than a half is not wrong. These are the rules of COCO's evaluation.

K classes, H×W pixels.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

VOID = 0  # the id of pixels without a segment
MIN_IOU = 0.5


def count_segments(
    predicted: np.ndarray,
    predicted_classes: Mapping[int, int],
    target: np.ndarray,
    target_classes: Mapping[int, int],
    classes: int,
    crowds: Collection[int] = (),
) -> np.ndarray:
    """Return for each class the sum of the IoU of matches, and the number of matches, wrong and missed segments, float64 [K, 4].

    The maps, [H, W], have ids of segments, VOID for none; the class of each id is 0 to K - 1. `crowds` are ids of the target.
    """
    if predicted.shape != target.shape:
        raise ValueError(f"the predicted map is {list(predicted.shape)} and the true one {list(target.shape)}")
    sizes: list[dict[int, int]] = []  # pixels of the segments
    numbers = []
    for name, ids, known in (("predicted", predicted, predicted_classes), ("true", target, target_classes)):
        found, number, counts = np.unique(ids, return_inverse=True, return_counts=True)
        numbers.append((found.tolist(), number.reshape(ids.shape)))
        sizes.append(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        for segment in found.tolist():
            if segment != VOID and not 0 <= known.get(segment, -1) < classes:
                got = known.get(segment)
                raise ValueError(f"the {name} segment {segment} needs a class from 0 to {classes - 1}, got {got}")
    (predicted_ids, rows), (target_ids, columns) = numbers
    shared = np.bincount((rows * len(target_ids) + columns).ravel(), minlength=len(predicted_ids) * len(target_ids))
    pairs = {
        (predicted_ids[at // len(target_ids)], target_ids[at % len(target_ids)]): int(shared[at])
        for at in np.flatnonzero(shared)
    }
    result = np.zeros((classes, 4))
    matched: set[tuple[str, int]] = set()
    outside = dict.fromkeys(sizes[0], 0)  # pixels of predictions in no segment, or in crowds of their class
    for (mine, true), intersection in pairs.items():
        if VOID in (mine, true) or predicted_classes[mine] != target_classes[true]:
            outside[mine] += intersection if true == VOID else 0
            continue
        if true in crowds:
            outside[mine] += intersection
            continue
        union = sizes[0][mine] + sizes[1][true] - intersection - pairs.get((mine, VOID), 0)
        if intersection / union > MIN_IOU:
            result[target_classes[true], :2] += intersection / union, 1
            matched |= {("predicted", mine), ("true", true)}
    for mine, size in sizes[0].items():
        if mine != VOID and ("predicted", mine) not in matched and outside[mine] / size <= MIN_IOU:
            result[predicted_classes[mine], 2] += 1
    for true in sizes[1]:
        if true != VOID and true not in crowds and ("true", true) not in matched:
            result[target_classes[true], 3] += 1
    return result


def compute_panoptic_quality(counts: np.ndarray, things: Sequence[bool] | None = None) -> dict[str, Any]:
    """Return PQ, SQ and RQ from `count_segments`, summed over images, [K, 4]: means over the classes that occur, ready for JSON.

    PQ = SQ · RQ of each class: SQ is the mean IoU of the matches, RQ = TP / (TP + FP / 2 + FN / 2). With `things`, also the means
    over classes with objects and over those without. A mean over no class, and a class that does not occur, is None.
    """
    iou, matched, wrong, missed = counts.T
    occurs = matched + wrong + missed > 0
    segmentation = np.divide(iou, matched, out=np.zeros(len(counts)), where=matched > 0)
    recognition = np.divide(matched, matched + (wrong + missed) / 2, out=np.zeros(len(counts)), where=occurs)
    values = {"pq": segmentation * recognition, "sq": segmentation, "rq": recognition}

    def average(kept: np.ndarray) -> dict[str, float | None]:
        return {name: float(value[kept].mean()) if kept.any() else None for name, value in values.items()}

    result: dict[str, Any] = average(occurs)
    if things is not None:
        groups = {"things": np.array(things, bool), "stuff": ~np.array(things, bool)}
        result |= {group: average(occurs & chosen) for group, chosen in groups.items()}
    rows = zip(occurs, *values.values(), strict=True)
    result["classes"] = [dict(zip(values, map(float, row[1:]), strict=True)) if row[0] else None for row in rows]
    return result

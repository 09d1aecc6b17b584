"""Metrics of segmentation, from the pixels of each class that are hit, true and predicted in each image.

Everything here sums over images, so a split is evaluated one image after the other and no array of all pixels is made. A mean
over classes takes those that occur in the true or the predicted masks, as torchmetrics 1.x with average='macro' and
scikit-learn do.

n images, K classes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.metrics.intervals import bootstrap, choose_resamples, mean_ignoring_nan, percentile_interval
from vitrail.metrics.paired import PairedTest

IGNORED = 255  # the value of pixels that do not count, as in vitrail.data.dataset
VALUES = 256  # of a mask
BLOCK = 2**22  # pixels counted at once
BOUNDARY_WIDTH = 0.02  # of the image's diagonal


def count_confusion(predicted: np.ndarray, target: np.ndarray, classes: int) -> np.ndarray:
    """Return the number of pixels by true class (rows) and predicted class (columns), int64 [K, K].

    Both masks have the same shape. Pixels whose target is IGNORED are left out; other values must be 0 to K - 1.
    """
    predicted, target = (_check_mask(mask, name) for mask, name in ((predicted, "predicted"), (target, "true")))
    _check_shapes(predicted, target)
    counts = np.zeros(VALUES * VALUES, np.int64)
    for start in range(0, target.size, BLOCK):
        rows, columns = (mask.reshape(-1)[start : start + BLOCK] for mask in (target, predicted))
        counts += np.bincount(rows.astype(np.uint16) * VALUES + columns, minlength=VALUES * VALUES)
    table = counts.reshape(VALUES, VALUES)[:IGNORED]
    for name, seen in (("true", table.sum(1)), ("predicted", table.sum(0))):
        if len(wrong := np.flatnonzero(seen[classes:])):
            raise ValueError(f"a {name} mask has the value {classes + wrong[0]}: classes are 0 to {classes - 1}")
    return table[:classes, :classes].copy()


def count_boundary(
    predicted: np.ndarray, target: np.ndarray, classes: int, width: float = BOUNDARY_WIDTH
) -> np.ndarray:
    """Return intersection and union of the boundaries of each class in pixels, int64 [K, 2] (Cheng et al. 2021).

    The boundary of a class are its pixels within d pixels (Chebyshev distance) of another class or of the outside of the image;
    d is `width` of the diagonal. IGNORED pixels of the target belong to no boundary and make none.
    """
    predicted, target = (_check_mask(mask, name) for mask, name in ((predicted, "predicted"), (target, "true")))
    _check_shapes(predicted, target)
    distance = max(1, round(width * float(np.hypot(*target.shape))))
    counted = target != IGNORED
    edges = [find_boundary(mask, counted, distance) for mask in (predicted, target)]
    both = edges[0] & edges[1] & (predicted == target)
    found, true, shared = (
        np.bincount(mask[edge], minlength=VALUES)[:classes]
        for mask, edge in ((predicted, edges[0]), (target, edges[1]), (target, both))
    )
    return np.stack([shared, found + true - shared], axis=1).astype(np.int64)


def find_boundary(mask: np.ndarray, counted: np.ndarray, distance: int) -> np.ndarray:
    """Return the counted pixels within `distance` of a counted pixel of another class or of the outside, bool [H, W].

    The other pixels of a class are its erosion by a square of 2 · distance + 1. A square holds only one class if its least and
    its largest value are equal, so two filters serve all classes at once.
    """
    from scipy.ndimage import maximum_filter, minimum_filter

    side = 2 * distance + 1
    low = minimum_filter(np.where(counted, mask, IGNORED), side, mode="nearest")
    high = maximum_filter(np.where(counted, mask, 0), side, mode="nearest")
    edge = low != high
    edge[:distance] = edge[-distance:] = edge[:, :distance] = edge[:, -distance:] = True
    return edge & counted


def _check_mask(mask: np.ndarray, name: str) -> np.ndarray:
    mask = np.asarray(mask)
    if mask.dtype == np.uint8:
        return mask
    if not np.issubdtype(mask.dtype, np.integer) or (mask.size and (mask.min() < 0 or mask.max() > IGNORED)):
        raise ValueError(f"a {name} mask must have integers from 0 to {IGNORED}, got {mask.dtype}")
    return mask.astype(np.uint8)


def _check_shapes(predicted: np.ndarray, target: np.ndarray) -> None:
    if predicted.shape != target.shape:
        shapes = f"{list(predicted.shape)} but the true one {list(target.shape)}"
        raise ValueError(f"the predicted mask is {shapes}: resize the prediction")


def sum_pixels(confusions: np.ndarray) -> np.ndarray:
    """Return the pixels of each class that are hit, that are true and that are predicted, [..., 3, K]."""
    return np.stack([np.diagonal(confusions, axis1=-2, axis2=-1), confusions.sum(-1), confusions.sum(-2)], axis=-2)


def compute_iou(pixels: np.ndarray) -> np.ndarray:
    """Return the intersection over union of each class, [..., K], of `sum_pixels`; NaN for a class that does not occur."""
    hits, true, predicted = np.moveaxis(pixels, -2, 0)
    return divide(hits, true + predicted - hits)


def compute_image_iou(pixels: np.ndarray) -> np.ndarray:
    """Return the mIoU of each image over the classes that it has or is predicted to have, [n]; NaN without counted pixels."""
    return mean_ignoring_nan(compute_iou(pixels))


def find_worst_images(pixels: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of at most `count` images, lowest mIoU first; ties in order of index."""
    scores = compute_image_iou(pixels)
    return np.argsort(scores, kind="stable")[: min(count, int((~np.isnan(scores)).sum()))]  # NaN sorts last


def divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) > 0)


def validate_pixels(pixels: np.ndarray) -> np.ndarray:
    """Return the counts as an array; raise ValueError if they are not [n, 3, K] or count no pixel."""
    pixels = np.asarray(pixels)
    if pixels.ndim != 3 or pixels.shape[1] != 3 or not pixels.shape[2]:
        raise ValueError(f"expected pixels that are hit, true and predicted, [n, 3, K], got {list(pixels.shape)}")
    if not len(pixels):
        raise ValueError("no images to evaluate")
    if not pixels.any():
        raise ValueError(f"none of the {len(pixels)} masks has a pixel that counts: mIoU is undefined")
    return pixels


def compute_mask_metrics(
    pixels: np.ndarray, *, boundary: np.ndarray | None = None, intervals: bool = True
) -> dict[str, Any]:
    """Return name and value of every metric, ready for JSON, from the pixels of `sum_pixels` of images, [n, 3, K].

    `boundary`, [n, K, 2], are the counts of `count_boundary`. Intervals are of a seeded bootstrap over images.
    """
    return dict(iter_mask_metrics(validate_pixels(pixels), boundary, intervals))


def iter_mask_metrics(pixels: np.ndarray, boundary: np.ndarray | None, intervals: bool) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each metric."""
    count, _, classes = pixels.shape
    edges = np.zeros((count, 2, 0), np.int64) if boundary is None else np.moveaxis(np.asarray(boundary), 2, 1)
    total = pixels.sum(0)
    values = summarise(total, edges.sum(0))
    yield "images", count
    yield "pixels", int(total[1].sum())
    found: dict[str, list[float]] = {}
    if intervals and count > 1:
        rows = np.concatenate([pixels.reshape(count, -1), edges.reshape(count, -1)], axis=1).astype(np.float64)
        split = pixels[0].size

        def resample(counts: np.ndarray) -> np.ndarray:
            sums = counts @ rows
            parts = summarise(sums[:, :split].reshape(-1, 3, classes), sums[:, split:].reshape(len(sums), 2, -1))
            return np.stack(list(parts.values()), axis=1)

        drawn = bootstrap(resample, count, choose_resamples(rows.size))  # [resamples, metrics]
        columns = zip(values, drawn.T, strict=True)
        found = {name: percentile_interval(column) for name, column in columns if not np.isnan(values[name])}
    for name, value in zip(values, list_values(np.array(list(values.values()))), strict=True):
        yield name, value
        if name in found:
            yield f"{name}_interval", found[name]
    yield "iou", list_values(compute_iou(total))
    yield "class_accuracy", list_values(divide(total[0], total[1]))
    yield "support", total[1].tolist()
    if boundary is not None:
        yield "class_boundary_iou", list_values(divide(*edges.sum(0)))


def summarise(pixels: np.ndarray, edges: np.ndarray) -> dict[str, np.ndarray]:
    """Return the means over classes of pixels [..., 3, K] and, if there are any, boundaries [..., 2, K]."""
    hits, true, predicted = np.moveaxis(pixels, -2, 0)
    values = {
        "miou": mean_ignoring_nan(compute_iou(pixels)),
        "pixel_accuracy": divide(hits.sum(-1), true.sum(-1)),
        "mean_class_accuracy": mean_ignoring_nan(divide(hits, true)),
        "dice": mean_ignoring_nan(divide(2 * hits, true + predicted)),
    }
    if edges.shape[-1]:
        values["boundary_iou"] = mean_ignoring_nan(divide(edges[..., 0, :], edges[..., 1, :]))
    return values


def list_values(values: np.ndarray) -> list[float | None]:
    """Return an array as a list for JSON, with None for NaN."""
    return [None if np.isnan(value) else float(value) for value in values]


def compare_masks(first: np.ndarray, second: np.ndarray) -> PairedTest:
    """Test the difference of mIoU from the pixels of `sum_pixels` of both models, [n, 3, K], by a bootstrap over images.

    `first_only` and `second_only` count the images on which one model has the higher mIoU.
    """
    one, two = validate_pixels(first), validate_pixels(second)
    if one.shape != two.shape or not np.array_equal(one[:, 1], two[:, 1]):
        raise ValueError("the models were not evaluated on the same masks: evaluate both on the same images")
    count = len(one)
    rows = np.stack([one, two], axis=1).reshape(count, -1).astype(np.float64)

    def difference(counts: np.ndarray) -> np.ndarray:
        scores = mean_ignoring_nan(compute_iou((counts @ rows).reshape(len(counts), 2, *one.shape[1:])))
        return scores[:, 1] - scores[:, 0]

    low, high = percentile_interval(bootstrap(difference, count, choose_resamples(rows.size)))
    scores = [mean_ignoring_nan(compute_iou(pixels)) for pixels in (one, two)]
    lost, won = int((scores[0] > scores[1]).sum()), int((scores[0] < scores[1]).sum())
    return PairedTest(count, lost, won, float(difference(np.ones((1, count)))[0]), (low, high), None, "better")

"""Metrics of numeric targets: mean absolute error, root mean squared error, R².

n images, M targets. The means over targets are those of scikit-learn ("uniform_average").
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.metrics.intervals import bootstrap, choose_resamples, mean_ignoring_nan, percentile_interval
from vitrail.metrics.paired import PairedTest


def validate_values(predicted: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both as float64 [n, M]; raise ValueError if their shapes do not match or values are not finite."""
    predicted, targets = np.asarray(predicted, np.float64), np.asarray(targets, np.float64)
    if targets.ndim != 2 or predicted.shape != targets.shape or not targets.shape[1]:
        shapes = f"predictions {list(predicted.shape)} and targets {list(targets.shape)}"
        raise ValueError(f"{shapes}: expected [n, M] for both")
    if not len(targets):
        raise ValueError("no images to evaluate")
    for name, values in (("predictions", predicted), ("targets", targets)):
        if not np.isfinite(values).all():
            raise ValueError(f"the {name} of image {int(np.argmin(np.isfinite(values).all(1)))} are not finite")
    return predicted, targets


def sum_errors(predicted: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return what all metrics are computed from, summed over images, of each image: [n, 4, M].

    These are the absolute and the squared error, and the target and its square, around the mean of the split.
    """
    error, centred = predicted - targets, targets - targets.mean(0)
    return np.stack([np.abs(error), error**2, centred, centred**2], axis=1)


def compute_target_metrics(sums: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Return MAE, RMSE and R² of each target, [..., M], from sums [..., 4, M]; R² of a constant target is NaN."""
    absolute, squared, total, total_squared = np.moveaxis(sums, -2, 0)
    variation = total_squared - total**2 / count
    varies = variation > 1e-12 * total_squared  # otherwise the rest is rounding
    unexplained = np.divide(squared, variation, out=np.full(variation.shape, np.nan), where=varies)
    return {"mae": absolute / count, "rmse": np.sqrt(squared / count), "r2": 1 - unexplained}


def compute_regression_metrics(predicted: np.ndarray, targets: np.ndarray, *, intervals: bool = True) -> dict[str, Any]:
    """Return name and value of every metric, ready for JSON, from predictions and targets [n, M].

    `mae`, `rmse` and `r2` are means over targets, `target_mae`, `target_mae_interval` and so on lists. R² of constant targets is
    None, and left out of the mean. Intervals are of a seeded bootstrap over images.
    """
    return dict(iter_regression_metrics(*validate_values(predicted, targets), intervals))


def summarise_regression(predicted: np.ndarray, targets: np.ndarray, *, intervals: bool = True) -> dict[str, Any]:
    """Return the metrics of a model: errors are not averaged over several targets, which have units of their own."""
    metrics = compute_regression_metrics(predicted, targets, intervals=intervals)
    if len(metrics["target_mae"]) > 1:
        metrics = {name: value for name, value in metrics.items() if not name.startswith(("mae", "rmse"))}
    return metrics | ({"interval": metrics["r2_interval"]} if "r2_interval" in metrics else {})


def measure_errors(predicted: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the error of each image, [n]: the root of the mean over targets of the squared error over the target's variance."""
    predicted, targets = validate_values(predicted, targets)
    variance = targets.var(0)
    scale = np.where(variance > 0, variance, 1.0)
    return np.sqrt(((predicted - targets) ** 2 / scale).mean(1))


def find_largest_errors(predicted: np.ndarray, targets: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the images with the largest errors, the largest first."""
    return np.argsort(-measure_errors(predicted, targets), kind="stable")[:count]


def iter_regression_metrics(predicted: np.ndarray, targets: np.ndarray, intervals: bool) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each metric."""
    count, width = targets.shape
    sums = sum_errors(predicted, targets)
    values, rows = compute_target_metrics(sums.sum(0), count), sums.reshape(count, -1)
    drawn: dict[str, np.ndarray] = {}
    if intervals and count > 1:

        def resample(counts: np.ndarray) -> np.ndarray:
            found = compute_target_metrics((counts @ rows).reshape(-1, 4, width), count)
            return np.stack(list(found.values()), axis=1).reshape(len(counts), -1)

        samples = bootstrap(resample, count, choose_resamples(rows.size)).reshape(-1, len(values), width)
        drawn = {name: samples[:, index] for index, name in enumerate(values)}
    yield "images", count
    for name, value in values.items():
        mean = mean_ignoring_nan(value)
        yield name, None if np.isnan(mean) else float(mean)
        if name in drawn and not np.isnan(mean):
            yield f"{name}_interval", percentile_interval(mean_ignoring_nan(drawn[name]))
    for name, value in values.items():
        yield f"target_{name}", [None if np.isnan(each) else float(each) for each in value]
        if name in drawn:
            columns = (None if np.isnan(each) else drawn[name][:, k] for k, each in enumerate(value))
            intervals_of = (None if column is None else percentile_interval(column) for column in columns)
            yield f"target_{name}_interval", list(intervals_of)


def compare_regression(first: np.ndarray, second: np.ndarray, targets: np.ndarray) -> PairedTest:
    """Test the difference of R² from the predictions of both models, [n, M], by a bootstrap over images.

    `first_only` and `second_only` count the images on which one model has the smaller error, the mean over targets of the
    squared error in units of the target's variance.
    """
    sums = [sum_errors(*validate_values(predicted, targets)) for predicted in (first, second)]
    count, _, width = sums[0].shape
    rows = np.stack(sums, axis=1).reshape(count, -1)

    def difference(counts: np.ndarray) -> np.ndarray:
        scores = compute_target_metrics((counts @ rows).reshape(len(counts), 2, 4, width), count)["r2"]
        return np.diff(mean_ignoring_nan(scores), axis=1)[:, 0]

    value = float(difference(np.ones((1, count)))[0])
    if np.isnan(value):
        raise ValueError("all targets are constant: R² is undefined, and models cannot be compared by it")
    low, high = percentile_interval(bootstrap(difference, count, choose_resamples(rows.size)))
    varying = ~np.isnan(compute_target_metrics(sums[0].sum(0), count)["r2"])
    one, two = (part[:, 1, varying] @ (1 / part[:, 3, varying].mean(0)) for part in sums)
    return PairedTest(count, int((one < two).sum()), int((two < one).sum()), value, (low, high), None, "better", "R²")

"""Weighted k-nearest-neighbour classifier on frozen features, as in DINO (Caron et al. 2021, appendix F.1; eval_knn.py).

n training images, m queries, D features, K classes. Features are normalised to length 1; the k training images with the largest
cosine similarity vote for their classes, each with weight exp(cosine / temperature).
"""

from collections.abc import Callable

import numpy as np

NEIGHBOURS, TEMPERATURE = 20, 0.07  # DINO's values; 20 was best of 10, 20, 100 and 200
# Rows of queries and of training images at once: except for the result, [m, K], memory does not grow with the data.
QUERIES, CHUNK = 512, 8192


def predict_knn(
    train: np.ndarray,  # [n, D]
    targets: np.ndarray,  # [n] classes, or [n, K] of 0 and 1
    queries: np.ndarray,  # [m, D]
    classes: int,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Return the share of votes of each class, [m, K]. Of equally near images, the first ones vote."""
    if not len(train):
        raise ValueError("k-NN needs at least 1 training image, got 0")
    if neighbours < 1 or not 0 < temperature < np.inf:
        raise ValueError(f"neighbours and temperature must be > 0, got {neighbours} and {temperature}")
    votes = np.empty((len(queries), classes))
    for start in range(0, len(queries), QUERIES):
        part = slice(start, min(start + QUERIES, len(queries)))
        unit_queries = normalise_rows(queries[part])
        cosines, indices = find_nearest(train, unit_queries, min(neighbours, len(train)), normalise_rows)  # [q, k] both
        # The subtraction cancels in the shares and gives the nearest weight 1 at any temperature.
        difference = cosines - cosines.max(1, keepdims=True)
        with np.errstate(over="ignore"):  # at a tiny temperature, -inf: weight 0
            weights = np.exp(difference / temperature)
        votes[part] = count_votes(weights, targets[indices], classes)
        votes[part] /= weights.sum(1, keepdims=True)
    return votes


def find_nearest(
    vectors: np.ndarray,  # [n, D], in memory or memory-mapped
    queries: np.ndarray,  # [q, D]
    count: int,
    prepare: Callable[[np.ndarray], np.ndarray],  # of a chunk of the vectors to rows of length 1
    chunk: int = CHUNK,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest cosines of each query, and the indices of these vectors in ascending order, [q, count] both."""
    best = np.empty((len(queries), 0), queries.dtype)
    indices = np.empty((len(queries), 0), dtype=np.int64)
    for start in range(0, len(vectors), chunk):
        part = prepare(vectors[start : start + chunk])
        cosines = np.concatenate((best, queries @ part.T), 1)
        here = np.broadcast_to(np.arange(start, start + len(part)), (len(queries), len(part)))
        candidates = np.concatenate((indices, here), 1)
        chosen = find_largest(cosines, min(count, cosines.shape[1]))
        best, indices = np.take_along_axis(cosines, chosen, 1), np.take_along_axis(candidates, chosen, 1)
    return best, indices


def normalise_rows(features: np.ndarray) -> np.ndarray:
    """Return rows of length 1 in double precision; a row of zeros stays zero."""
    double = features.astype(np.float64)
    return double / np.maximum(np.linalg.norm(double, axis=1, keepdims=True), 1e-12)


def find_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the column indices of the largest values of each row, [rows, count], ascending; of equals the first."""
    width = values.shape[1]
    threshold = np.partition(values, width - count, 1)[:, width - count, None]  # the smallest selected value
    above, equal = values > threshold, values == threshold
    remaining = count - above.sum(1, keepdims=True)
    selected = above | (equal & (np.cumsum(equal, 1) <= remaining))
    return np.nonzero(selected)[1].reshape(-1, count)


def count_votes(weights: np.ndarray, targets: np.ndarray, classes: int) -> np.ndarray:
    """Return the votes for each class, [q, K], from single-label [q, k] or multi-label [q, k, K] neighbours."""
    if targets.ndim == 3:
        return np.einsum("qk,qkc->qc", weights, targets.astype(np.float64))
    cells = np.arange(len(weights))[:, None] * classes + targets
    return np.bincount(cells.ravel(), weights.ravel(), len(weights) * classes).reshape(-1, classes)

"""Weighted nearest neighbours on frozen features, as DINO judges them (Caron et al. 2021, appendix F.1; eval_knn.py).

n training pictures, m queries, D values each, K classes. Features are normalised to length 1; the k training pictures with the
largest cosine vote for their classes, each with exp(cosine / temperature).
"""

import numpy as np

NEIGHBOURS, TEMPERATURE = 20, 0.07  # DINO's; it tries 10, 20, 100 and 200, and finds 20 best
# Rows of queries and of training pictures at once: beside what is given back, [m, K], memory does not grow with the data.
QUERIES, CHUNK = 512, 8192


def knn(
    train: np.ndarray,  # [n, D]
    targets: np.ndarray,  # [n] classes, or [n, K] of 0 and 1
    queries: np.ndarray,  # [m, D]
    classes: int,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """The share of the vote that each class gets, [m, K]. Of pictures equally near, the first in order votes."""
    if not len(train):
        raise ValueError("nearest neighbours need a training picture at least")
    if neighbours < 1 or not 0 < temperature < np.inf:
        raise ValueError(f"{neighbours} neighbours at temperature {temperature}: both are above 0")
    votes = np.empty((len(queries), classes))
    for start in range(0, len(queries), QUERIES):
        part = slice(start, min(start + QUERIES, len(queries)))
        cosines, places = nearest(train, queries[part], min(neighbours, len(train)))  # [q, k] both
        # What is subtracted cancels; so the nearest has weight 1, however small the temperature.
        nearer = cosines - cosines.max(1, keepdims=True)
        with np.errstate(over="ignore"):  # at a temperature of almost nothing, -inf: weight 0
            weights = np.exp(nearer / temperature)
        votes[part] = counted(weights, targets[places], classes)
        votes[part] /= weights.sum(1, keepdims=True)
    return votes


def nearest(train: np.ndarray, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest cosines of each query and the training pictures they belong to, [q, count] both."""
    asked = normalised(queries)
    best = np.empty((len(queries), 0))
    places = np.empty((len(queries), 0), dtype=np.int64)
    for start in range(0, len(train), CHUNK):
        part = normalised(train[start : start + CHUNK])
        cosines = np.concatenate((best, asked @ part.T), 1)
        here = np.broadcast_to(np.arange(start, start + len(part)), (len(queries), len(part)))
        candidates = np.concatenate((places, here), 1)
        chosen = largest(cosines, min(count, cosines.shape[1]))
        best, places = np.take_along_axis(cosines, chosen, 1), np.take_along_axis(candidates, chosen, 1)
    return best, places


def normalised(features: np.ndarray) -> np.ndarray:
    """Rows of length 1, in double precision; a row of zeros stays one."""
    wide = features.astype(np.float64)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Where the largest of each row are, [rows, count], in order of place; of equals the first."""
    width = values.shape[1]
    least = np.partition(values, width - count, 1)[:, width - count, None]  # the smallest that is still taken
    above, equal = values > least, values == least
    spare = count - above.sum(1, keepdims=True)
    taken = above | (equal & (np.cumsum(equal, 1) <= spare))
    return np.nonzero(taken)[1].reshape(-1, count)


def counted(weights: np.ndarray, targets: np.ndarray, classes: int) -> np.ndarray:
    """Votes for each class: of neighbours with one class, [q, k], or with several, [q, k, K]."""
    if targets.ndim == 3:
        return np.einsum("qk,qkc->qc", weights, targets.astype(np.float64))
    cells = np.arange(len(weights))[:, None] * classes + targets
    return np.bincount(cells.ravel(), weights.ravel(), len(weights) * classes).reshape(-1, classes)

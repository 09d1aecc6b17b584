"""Neighbours in feature space: which label they have, without the image itself and its near-duplicates.

n images, D features, K classes, k neighbours.
"""

import numpy as np

from vitrail.metrics.knn import QUERIES, TEMPERATURE, count_votes, find_nearest, normalise_rows
from vitrail.utils.progress import ProgressCallback

MAX_NEIGHBOURS, MIN_NEIGHBOURS = 20, 3
MAX_DUPLICATES = 64  # near-duplicates of an image that are searched for and left out


def choose_neighbours(labels: np.ndarray) -> int:
    """Return the number of neighbours: half of the images of the median class, 3 to 20."""
    counts = np.bincount(labels)
    return int(np.clip(np.median(counts[counts > 0]) // 2, MIN_NEIGHBOURS, MAX_NEIGHBOURS))


def predict_from_neighbours(
    features: np.ndarray,  # [n, D]
    labels: np.ndarray,  # [n]
    classes: int,
    groups: np.ndarray,  # [n]
    neighbours: int,
    progress: ProgressCallback | None = None,
) -> np.ndarray:
    """Return the share of votes of each class among the nearest images of other groups, [n, K], weighted as in DINO's k-NN."""
    counts = np.bincount(np.unique(groups, return_inverse=True)[1])
    searched = min(len(features), neighbours + min(int(counts.max()), MAX_DUPLICATES))
    votes = np.empty((len(features), classes))
    for start in range(0, len(features), QUERIES):
        if progress:
            progress("finding neighbours", start, len(features))
        part = slice(start, min(start + QUERIES, len(features)))
        cosines, indices = find_nearest(features, normalise_rows(features[part]), searched, normalise_rows)
        order = np.argsort(-cosines, axis=1, kind="stable")
        cosines, indices = np.take_along_axis(cosines, order, 1), np.take_along_axis(indices, order, 1)
        other = groups[indices] != groups[part, None]
        used = other & (np.cumsum(other, 1) <= neighbours)
        # The nearest has weight 1 at any temperature; images that are left out have none.
        best = np.where(used, cosines, -1.0).max(1, keepdims=True)
        weights = np.where(used, np.exp((np.where(used, cosines, best) - best) / TEMPERATURE), 0.0)
        weights[~used.any(1)] = 1.0  # nothing but near-duplicates: they vote
        votes[part] = count_votes(weights, labels[indices], classes) / weights.sum(1, keepdims=True)
    if progress:
        progress("finding neighbours", len(features), len(features))
    return votes

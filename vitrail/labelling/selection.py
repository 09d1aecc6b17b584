"""Selection of images to label next: uncertain ones (margin, entropy), different ones (k-center, k-means++), or both.

n labelled images, m unlabelled ones, D features, K classes.

The default is diverse mini-batch active learning (Zhdanov 2019): of the most uncertain images, several times as many as wanted,
one for each cluster of a k-means in feature space, so that a batch does not ask the same question many times.
"""

import numpy as np

from vitrail.labelling import METHODS
from vitrail.metrics.knn import normalise_rows

CANDIDATES = 8  # times the budget: the uncertain images that are clustered


def compute_class_margins(probabilities: np.ndarray) -> np.ndarray:
    """Return the highest probability minus the second one, [m]; 0 is the most uncertain."""
    highest = np.partition(probabilities, -2, axis=1)[:, -2:]
    return highest[:, 1] - highest[:, 0]


def compute_entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy of each row in bits, [m]."""
    positive = np.maximum(probabilities, 1e-300)
    return -(probabilities * np.log2(positive)).sum(1)


def compute_distances(features: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the distance of each row of length 1, [m, D], to the nearest of the others, [n, D]; infinite without others."""
    if not len(others):
        return np.full(len(features), np.inf)
    cosines = np.full(len(features), -1.0)
    for start in range(0, len(others), 4096):
        cosines = np.maximum(cosines, (features @ others[start : start + 4096].T).max(1))
    return np.sqrt(np.maximum(0.0, 2 - 2 * cosines))


def choose_images(
    method: str,
    features: np.ndarray,  # [m, D]
    probabilities: np.ndarray,  # [m, K]
    labelled: np.ndarray,  # [n, D]
    budget: int,
    seed: int = 0,
) -> np.ndarray:
    """Return the indices of the images to label next, [budget] or fewer, the most useful first."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
    if budget < 1:
        raise ValueError(f"budget must be >= 1, got {budget}")
    budget, generator = min(budget, len(features)), np.random.default_rng(seed)
    if method == "random":
        return generator.permutation(len(features))[:budget]
    if method == "margin":
        return np.argsort(compute_class_margins(probabilities), kind="stable")[:budget]
    if method == "entropy":
        return np.argsort(-compute_entropy(probabilities), kind="stable")[:budget]
    rows, known = normalise_rows(features), normalise_rows(labelled)
    if method == "uncertain-diverse":
        return choose_uncertain_diverse(rows, probabilities, budget, seed)
    return choose_diverse(rows, known, budget, None if method == "k-center" else generator)


def choose_uncertain_diverse(rows: np.ndarray, probabilities: np.ndarray, budget: int, seed: int) -> np.ndarray:
    """Return the image nearest to the centre of each cluster of the most uncertain ones, the most uncertain first."""
    from sklearn.cluster import KMeans

    margins = compute_class_margins(probabilities)
    candidates = np.argsort(margins, kind="stable")[: CANDIDATES * budget]
    if len(candidates) <= budget:
        return candidates
    weights = 1 - margins[candidates] + 1e-6
    clusters = KMeans(budget, random_state=seed).fit(  # one run, k-means++
        rows[candidates], sample_weight=weights
    )
    distances = clusters.transform(rows[candidates])  # [candidates, budget]
    chosen = np.unique(distances.argmin(0))
    if len(chosen) < budget:  # copies of an image share a centre: the most uncertain of the rest fill up
        rest = np.setdiff1d(np.arange(len(candidates)), chosen)
        chosen = np.concatenate((chosen, rest[: budget - len(chosen)]))
    return candidates[np.sort(chosen)]


def choose_diverse(
    rows: np.ndarray, known: np.ndarray, budget: int, generator: np.random.Generator | None
) -> np.ndarray:
    """Return images far from the known ones and from each other: the farthest (k-center), or random by squared distance.

    The farthest first is the greedy 2-approximation of the core-set (Sener and Savarese 2018); with a generator, the images are
    drawn as the seeds of k-means++.
    """
    distances, chosen = compute_distances(rows, known), list[int]()
    for _ in range(budget):
        if np.isinf(distances).any():  # the first one, without labelled images: the most central
            pick = int((rows @ rows.mean(0)).argmax())
        elif generator is None or not (distances > 0).any():
            pick = int(np.where(np.isin(np.arange(len(rows)), chosen), -1.0, distances).argmax())
        else:
            pick = int(generator.choice(len(rows), p=distances**2 / (distances**2).sum()))
        chosen.append(pick)
        distances = np.minimum(distances, compute_distances(rows, rows[pick : pick + 1]))
        distances[chosen] = 0.0
    return np.array(chosen, dtype=np.int64)

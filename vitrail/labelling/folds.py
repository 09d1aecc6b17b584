"""Cross-validation: folds that keep groups together, and predictions for images that their classifier has not seen.

n images, D features, K classes, F folds.
"""

from dataclasses import dataclass

import numpy as np

from vitrail.metrics.calibration import probabilities
from vitrail.metrics.linear import C_GRID, fit_classifier, fit_linear_probe, predict_logits
from vitrail.metrics.temperature import choose_temperature
from vitrail.utils.progress import ProgressCallback

FOLDS = 5
MAX_IMAGES_FOR_C = 5000  # images that the strength of the penalty is chosen with


def join_groups(count: int, pairs: np.ndarray) -> np.ndarray:
    """Return a group number for each of `count` images, [n], the lowest index of the group; pairs [m, 2] are in one group."""
    parent = np.arange(count)

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = int(parent[item])
        return item

    for first, second in pairs[:, :2].tolist():
        low, high = sorted((find(first), find(second)))
        parent[high] = low
    return np.array([find(item) for item in range(count)], dtype=np.int64)


def assign_folds(labels: np.ndarray, folds: int, groups: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    """Return the fold of each image, [n]: random, stratified by label, with the images of a group in one fold.

    Of each label, a fold has the same number of groups, or one more. A group counts for the label of its first image.
    """
    groups = np.arange(len(labels)) if groups is None else groups
    firsts, member = np.unique(groups, return_inverse=True)  # firsts are indices of images
    order = np.random.default_rng(seed).permutation(len(firsts))
    order = order[np.argsort(labels[firsts[order]], kind="stable")]  # by label, random within it
    fold = np.empty(len(firsts), dtype=np.int64)
    fold[order] = (
        np.arange(len(firsts)) % folds
    )  # consecutive, so that classes smaller than `folds` fill all folds evenly
    return fold[member]


def choose_penalty(features: np.ndarray, labels: np.ndarray, classes: int, seed: int = 0) -> float:
    """Return the C of a linear classifier that is best on held-out images, chosen with at most `MAX_IMAGES_FOR_C` of them."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(labels))[:MAX_IMAGES_FOR_C])
    if (np.bincount(labels[chosen]) >= 2).sum() < 2:
        return 1.0  # too few images to hold some out
    return fit_linear_probe(features[chosen], labels[chosen], features[chosen[:1]], classes, C_GRID, seed).c


def predict_out_of_fold(
    features: np.ndarray,  # [n, D]
    labels: np.ndarray,  # [n]
    classes: int,
    fold: np.ndarray,  # [n]
    *,
    c: float | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> np.ndarray:
    """Return the logits [n, K] that a linear classifier of the other folds gives to the images of each fold."""
    c, numbers = c or choose_penalty(features, labels, classes, seed), np.unique(fold)
    logits = np.zeros((len(labels), classes))
    for done, number in enumerate(numbers):
        if progress:
            progress("cross-validating", done, len(numbers))
        held = fold == number
        if len(np.unique(labels[~held])) < 2:
            raise ValueError("cross-validation needs 2 classes with images outside each fold: add images")
        logits[held] = predict_logits(fit_classifier(features[~held], labels[~held], c, []), features[held], classes)
    if progress:
        progress("cross-validating", len(numbers), len(numbers))
    return logits


@dataclass(frozen=True)
class LinearClassifier:
    """A linear classifier of features, whose temperature was fitted to its cross-validated predictions."""

    weight: np.ndarray  # [K, D]
    bias: np.ndarray  # [K]
    temperature: float
    c: float

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return the probabilities of features [m, D], [m, K]."""
        logits = features.astype(np.float64) @ self.weight.T + self.bias
        return probabilities(logits / self.temperature, multilabel=False)


def fit_linear_classifier(
    features: np.ndarray, labels: np.ndarray, classes: int, *, seed: int = 0, progress: ProgressCallback | None = None
) -> LinearClassifier:
    """Fit a linear classifier to features [n, D] and labels [n]; without enough images for folds its temperature is 1."""
    c, temperature = choose_penalty(features, labels, classes, seed), 1.0
    fold = assign_folds(labels, FOLDS, seed=seed)
    if all(len(np.unique(labels[fold != number])) == classes for number in range(FOLDS)):
        logits = predict_out_of_fold(features, labels, classes, fold, c=c, seed=seed, progress=progress)
        temperature = choose_temperature(logits, labels, seed).temperature
    fitted = fit_linear_probe(features, labels, features[:1], classes, (c,), seed)
    return LinearClassifier(fitted.weight, fitted.bias, temperature, c)

"""Linear probe on frozen features: logistic regression by L-BFGS (scikit-learn).

n training images, m queries, D features, K classes. Features are standardised with the training mean and deviation, so that one
grid of C suits every model. C is chosen on a held-out fifth of the training images; the classifier is then fitted to all of them.
The queries have no influence.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.metrics.multilabel import Ranking, mean_average_precision

C_GRID = tuple(10.0**power for power in range(-4, 3))  # C is the inverse strength of the L2 penalty
HELD_OUT_FRACTION = 0.2
MAX_ITERATIONS = 1000


@dataclass(frozen=True)
class LinearProbe:
    """Logits of the queries, and the chosen C with the scores of the grid."""

    logits: np.ndarray  # [m, K]
    c: float
    parameters: int  # fitted weights and biases
    score_by_c: dict[float, float]  # on held-out training images: accuracy, or mAP for multi-label data
    notes: tuple[str, ...] = ()


def fit_linear_probe(
    train: np.ndarray,  # [n, D]
    targets: np.ndarray,  # [n] classes, or [n, K] of 0 and 1
    queries: np.ndarray,  # [m, D]
    classes: int,
    grid: tuple[float, ...] = C_GRID,
    seed: int = 0,
) -> LinearProbe:
    """Choose C, fit, and predict the queries. Multi-label targets have one classifier per class."""
    if targets.ndim == 1 and len(np.unique(targets)) < 2:
        raise ValueError("a linear probe needs training images of at least 2 classes")
    notes: list[str] = []
    best_c, scores = grid[0], {}
    train, queries = train.astype(np.float64), queries.astype(np.float64)
    if len(grid) > 1:
        part, held = split_held_out(targets, seed)
        fit_features, held_features = train[part], train[held]
        for c in grid:
            model = fit_classifier(fit_features, targets[part], c, notes)
            scores[c] = score_logits(predict_logits(model, held_features, classes), targets[held])
        best_c = max(grid, key=lambda c: (scores[c], -c))  # of equals the strongest penalty
        if best_c in (min(grid), max(grid)):
            notes.append(f"C {best_c:g} is at an end of the grid")
    model = fit_classifier(train, targets, best_c, notes)
    logits = predict_logits(model, queries, classes)
    return LinearProbe(logits, best_c, count_parameters(model), scores, tuple(dict.fromkeys(notes)))


def split_held_out(targets: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices to fit and held-out indices, stratified by class; classes with one image are only fitted."""
    from sklearn.model_selection import StratifiedShuffleSplit

    indices = np.arange(len(targets))
    if targets.ndim == 1:
        counts = np.bincount(targets)
        divisible = indices[counts[targets] >= 2]
        single = np.setdiff1d(indices, divisible)
        n_classes = len(np.unique(targets[divisible]))
        held = max(n_classes, round(HELD_OUT_FRACTION * len(divisible)))
        if n_classes >= 2 and len(divisible) - held >= n_classes:
            splitter = StratifiedShuffleSplit(1, test_size=held, random_state=seed)
            fit, choose = next(splitter.split(divisible, targets[divisible]))
            return np.sort(np.concatenate((divisible[fit], single))), np.sort(divisible[choose])
    order = np.random.default_rng(seed).permutation(len(targets))
    held = max(1, round(HELD_OUT_FRACTION * len(targets)))
    if held >= len(targets):
        raise ValueError(f"{len(targets)} training images are too few to choose C: give one C")
    return np.sort(order[held:]), np.sort(order[:held])


def build_classifier(c: float, multilabel: bool) -> Any:
    """Return the unfitted scikit-learn estimator."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = LogisticRegression(C=c, solver="lbfgs", max_iter=MAX_ITERATIONS)
    return make_pipeline(StandardScaler(), OneVsRestClassifier(classifier) if multilabel else classifier)


def fit_classifier(train: np.ndarray, targets: np.ndarray, c: float, notes: list[str]) -> Any:
    """Return the fitted estimator; add a note if it did not converge."""
    from sklearn.exceptions import ConvergenceWarning

    model = build_classifier(c, targets.ndim == 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(train, targets)
    for warning in caught:
        if issubclass(warning.category, ConvergenceWarning):
            notes.append(f"not converged after {MAX_ITERATIONS} iterations at C {c:g}")
    return model


def predict_logits(model: Any, queries: np.ndarray, classes: int) -> np.ndarray:
    """Return the logits of the queries, [m, K]."""
    from sklearn.multiclass import OneVsRestClassifier

    scores = np.asarray(model.decision_function(queries))
    if isinstance(model[-1], OneVsRestClassifier):
        return scores.reshape(len(queries), -1)
    known = np.asarray(model.classes_)
    if scores.ndim == 1:  # two classes have one decision value
        scores = np.stack((-scores / 2, scores / 2), 1)
    logits = np.full(
        (len(queries), classes), scores.min() - 1000.0
    )  # classes without training images are not predicted
    logits[:, known] = scores
    return logits


def count_parameters(model: Any) -> int:
    """Return the number of weights and biases: one vector for two classes, none for a label of no or every image."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    last = model[-1]
    models = last.estimators_ if isinstance(last, OneVsRestClassifier) else [last]
    return sum(np.size(m.coef_) + np.size(m.intercept_) for m in models if isinstance(m, LogisticRegression))


def score_logits(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the accuracy, or mAP for multi-label targets."""
    if targets.ndim == 1:
        return float((logits.argmax(1) == targets).mean())
    present = np.flatnonzero(targets.any(0))
    if not len(present):
        return 0.0
    return float(mean_average_precision([Ranking(logits[:, k], targets[:, k]) for k in present])[0])

"""A linear classifier on frozen features: logistic regression by L-BFGS, through scikit-learn.

n training pictures, m queries, D values each, K classes. Features are standardised by the training pictures' mean and
deviation, so that one grid of C serves every model. C is chosen on a fifth of the training pictures, held out for that, and the
classifier is then fitted to all of them; pictures that it is judged on have no say.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.evaluate.several import Ranking, mean_average_precision

GRID = tuple(10.0**power for power in range(-4, 3))  # of C, which is one over the strength of the penalty
HELD_OUT = 0.2
ITERATIONS = 1000


@dataclass(frozen=True)
class LinearProbe:
    """What a linear probe says, and what was chosen for it."""

    logits: np.ndarray  # [m, K]
    c: float
    parameters: int  # that were fitted: weights and biases
    tried: dict[float, float]  # score on held-out training pictures by C: accuracy, or mAP with several labels
    notes: tuple[str, ...] = ()


def linear_probe(
    train: np.ndarray,  # [n, D]
    targets: np.ndarray,  # [n] classes, or [n, K] of 0 and 1
    queries: np.ndarray,  # [m, D]
    classes: int,
    grid: tuple[float, ...] = GRID,
    seed: int = 0,
) -> LinearProbe:
    """Chooses C, fits, and answers. With several labels a picture there is one classifier for each class."""
    if targets.ndim == 1 and len(np.unique(targets)) < 2:
        raise ValueError("a linear probe needs training pictures of two classes at least")
    notes: list[str] = []
    chosen, tried = grid[0], {}
    train, queries = train.astype(np.float64), queries.astype(np.float64)
    if len(grid) > 1:
        part, held = divided(targets, seed)
        some, others = train[part], train[held]
        for c in grid:
            model = fitted(some, targets[part], c, notes)
            tried[c] = score(answered(model, others, classes), targets[held])
        chosen = max(grid, key=lambda c: (tried[c], -c))  # of equals the strongest penalty
        if chosen in (min(grid), max(grid)):
            notes.append(f"C {chosen:g} is at an end of the grid")
    model = fitted(train, targets, chosen, notes)
    logits = answered(model, queries, classes)
    return LinearProbe(logits, chosen, parameters(model), tried, tuple(dict.fromkeys(notes)))


def divided(targets: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices to fit to and indices to choose by; each class is in both in its proportion, where it has two pictures."""
    from sklearn.model_selection import StratifiedShuffleSplit

    every = np.arange(len(targets))
    if targets.ndim == 1:
        counts = np.bincount(targets)
        divisible = every[counts[targets] >= 2]  # a class with one picture is fitted to, and has none to be chosen by
        alone = np.setdiff1d(every, divisible)
        kinds = len(np.unique(targets[divisible]))
        held = max(kinds, round(HELD_OUT * len(divisible)))
        if kinds >= 2 and len(divisible) - held >= kinds:
            splitter = StratifiedShuffleSplit(1, test_size=held, random_state=seed)
            fit, choose = next(splitter.split(divisible, targets[divisible]))
            return np.sort(np.concatenate((divisible[fit], alone))), np.sort(divisible[choose])
    order = np.random.default_rng(seed).permutation(len(targets))
    held = max(1, round(HELD_OUT * len(targets)))
    if held >= len(targets):
        raise ValueError(f"{len(targets)} training pictures: too few to choose C by; give one C")
    return np.sort(order[held:]), np.sort(order[:held])


def classifier(c: float, several: bool) -> Any:
    """The scikit-learn estimator, unfitted."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    one = LogisticRegression(C=c, solver="lbfgs", max_iter=ITERATIONS)
    return make_pipeline(StandardScaler(), OneVsRestClassifier(one) if several else one)


def fitted(train: np.ndarray, targets: np.ndarray, c: float, notes: list[str]) -> Any:
    """The estimator, fitted to training pictures; what is to be said of that goes to the notes."""
    from sklearn.exceptions import ConvergenceWarning

    model = classifier(c, targets.ndim == 2)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model.fit(train, targets)
    for warning in heard:
        if issubclass(warning.category, ConvergenceWarning):
            notes.append(f"not converged after {ITERATIONS} iterations at C {c:g}")
    return model


def answered(model: Any, queries: np.ndarray, classes: int) -> np.ndarray:
    """Logits of the queries, [m, K]."""
    from sklearn.multiclass import OneVsRestClassifier

    said = np.asarray(model.decision_function(queries))
    if isinstance(model[-1], OneVsRestClassifier):
        return said.reshape(len(queries), -1)
    known = np.asarray(model.classes_)
    if said.ndim == 1:  # two classes have one number between them
        said = np.stack((-said / 2, said / 2), 1)
    logits = np.full((len(queries), classes), said.min() - 1000.0)  # a class without training pictures is never said
    logits[:, known] = said
    return logits


def parameters(model: Any) -> int:
    """Weights and biases: of two classes one vector, and none of a class that no picture or every picture has."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    last = model[-1]
    each = last.estimators_ if isinstance(last, OneVsRestClassifier) else [last]
    return sum(np.size(one.coef_) + np.size(one.intercept_) for one in each if isinstance(one, LogisticRegression))


def score(logits: np.ndarray, targets: np.ndarray) -> float:
    """Accuracy; mAP with several labels."""
    if targets.ndim == 1:
        return float((logits.argmax(1) == targets).mean())
    there = np.flatnonzero(targets.any(0))
    if not len(there):
        return 0.0
    return float(mean_average_precision([Ranking(logits[:, k], targets[:, k]) for k in there])[0])

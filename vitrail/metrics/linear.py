"""Linear classifiers on frozen features: a linear probe, and few-shot accuracy (section 4.1 of the paper).

n training images, m queries, D features, K classes.

The linear probe is a logistic regression by L-BFGS (scikit-learn). Features are standardised with the training mean and
deviation, so that one grid of C suits every model. C is chosen on a held-out fifth of the training images; the classifier is then
fitted to all of them. The queries have no influence.

Few-shot accuracy uses regularised least squares in closed form. The features of a few images per class are mapped to targets in
{-1, 1}^K. Details follow the authors' code (big_vision, evaluators/fewshot_lsr.py): features are standardised over the sampled
images, the bias is a constant feature of 100 so that it is hardly penalised, the penalty is 2^10, and the images of fewer shots
are a subset of those of more. Double precision.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.metrics.multilabel import Ranking, mean_average_precision

C_GRID = tuple(10.0**power for power in range(-4, 3))  # C is the inverse strength of the L2 penalty
HELD_OUT_FRACTION = 0.2
MAX_ITERATIONS = 1000
SHOTS, DRAWS, PENALTY, BIAS = (1, 5, 10, 25), 5, 2.0**10, 100.0
MISSING_MARGIN = 30.0  # of the bias of a class without training images, below the lowest of the others
EPSILON = 1e-5  # added to standard deviations


@dataclass(frozen=True)
class LinearProbe:
    """Logits of the queries, the classifier, and the chosen C with the scores of the grid."""

    logits: np.ndarray  # [m, K]
    weight: np.ndarray  # [K, D]: of features as they are, not standardised
    bias: np.ndarray  # [K]
    c: float
    converged: bool
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
    last: list[str] = []
    model = fit_classifier(train, targets, best_c, last)
    logits, fitted = predict_logits(model, queries, classes), extract_classifier(model, train.shape[1], classes)
    return LinearProbe(
        logits, *fitted, best_c, not last, count_parameters(model), scores, tuple(dict.fromkeys(notes + last))
    )


def extract_classifier(model: Any, width: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weight [K, D] and bias [K] of the fitted estimator, its standardisation included."""
    bias = predict_logits(model, np.zeros((1, width)), classes)[0]
    weight = (predict_logits(model, np.eye(width), classes) - bias).T
    if len(known := getattr(model, "classes_", ())) < classes and not is_one_vs_rest(model):
        missing = np.setdiff1d(np.arange(classes), known)
        weight[missing], bias[missing] = 0.0, bias[known].min() - MISSING_MARGIN
    return weight, bias


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


def fit_classifier(train: np.ndarray, targets: np.ndarray, c: float, notes: list[str]) -> Any:
    """Return the fitted scikit-learn estimator; add a note if it did not converge."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = LogisticRegression(C=c, solver="lbfgs", max_iter=MAX_ITERATIONS)
    model = make_pipeline(StandardScaler(), OneVsRestClassifier(classifier) if targets.ndim == 2 else classifier)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(train, targets)
    for warning in caught:
        if issubclass(warning.category, ConvergenceWarning):
            notes.append(f"not converged after {MAX_ITERATIONS} iterations at C {c:g}")
    return model


def is_one_vs_rest(model: Any) -> bool:
    """Return whether the estimator has one classifier per label, for multi-label data."""
    from sklearn.multiclass import OneVsRestClassifier

    return isinstance(model[-1], OneVsRestClassifier)


def predict_logits(model: Any, queries: np.ndarray, classes: int) -> np.ndarray:
    """Return the logits of the queries, [m, K]."""
    scores = np.asarray(model.decision_function(queries))
    if is_one_vs_rest(model):
        return scores.reshape(len(queries), -1)
    known = np.asarray(model.classes_)
    if scores.ndim == 1:  # two classes have one decision value
        scores = np.stack((-scores / 2, scores / 2), 1)
    logits = np.full((len(queries), classes), scores.min() - 1000.0)  # never predicts classes without training images
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


@dataclass(frozen=True)
class FewShotResult:
    """Accuracies for one number of shots over several random samples."""

    shots: int
    accuracies: tuple[float, ...]
    images: int  # per sample: fewer than shots × K if classes have fewer images
    scarce_classes: tuple[int, ...] = ()  # classes with fewer images than shots: all their images are used

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return Student's 95 % interval of the mean over samples, None for one; it ignores the sampling of test images."""
        if len(self.accuracies) < 2:
            return None
        from scipy.stats import t

        spread = float(np.std(self.accuracies, ddof=1)) / math.sqrt(len(self.accuracies))
        half = float(t.ppf(0.975, len(self.accuracies) - 1)) * spread
        return max(0.0, self.mean - half), min(1.0, self.mean + half)


def evaluate_few_shot(
    train: np.ndarray,  # [n, D]
    targets: np.ndarray,  # [n]
    queries: np.ndarray,  # [m, D]
    truth: np.ndarray,  # [m]
    classes: int,
    shots: int,
    draws: int = DRAWS,
    seed: int = 0,
) -> FewShotResult:
    """Return the accuracy with `shots` images per class over samples with the seeds `seed`, `seed + 1`, …

    If no class has more images than that, all samples are equal and only one is evaluated.
    """
    if targets.ndim != 1:
        raise ValueError("few-shot needs single-label targets: use knn or linear for multi-label data")
    if draws < 1 or shots < 1:
        raise ValueError(f"draws and shots must be >= 1, got {draws} and {shots}")
    counts = np.bincount(targets, minlength=classes)
    n_samples = draws if counts.max() > shots else 1
    samples = [sample_shots(targets, classes, shots, seed + k) for k in range(n_samples)]
    predicted = [predict_least_squares(train[s], targets[s], queries, classes).argmax(1) for s in samples]
    accuracies = tuple(float((labels == truth).mean()) for labels in predicted)
    return FewShotResult(shots, accuracies, len(samples[0]), tuple(int(k) for k in np.flatnonzero(counts < shots)))


def sample_shots(targets: np.ndarray, classes: int, shots: int, seed: int) -> np.ndarray:
    """Return the indices of `shots` random images of each class, or of all if a class has fewer; class by class."""
    generator = np.random.default_rng(seed)
    return np.concatenate([generator.permutation(np.flatnonzero(targets == k))[:shots] for k in range(classes)])


def predict_least_squares(
    train: np.ndarray, targets: np.ndarray, queries: np.ndarray, classes: int, penalty: float = PENALTY
) -> np.ndarray:
    """Fit to the training features and return the outputs of the queries, [m, K]."""
    double = train.astype(np.float64)
    mean, deviation = double.mean(0), double.std(0) + EPSILON

    def standardise(features: np.ndarray) -> np.ndarray:
        rows = (features.astype(np.float64) - mean) / deviation
        return np.concatenate((rows, np.full((len(rows), 1), BIAS)), 1)  # [·, D + 1]

    x = standardise(train)
    y = np.where(np.arange(classes) == targets[:, None], 1.0, -1.0)  # [n, K]
    if len(x) >= x.shape[1]:
        w = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
    else:  # the same w from the smaller matrix
        w = x.T @ np.linalg.solve(x @ x.T + penalty * np.eye(len(x)), y)
    return standardise(queries) @ w

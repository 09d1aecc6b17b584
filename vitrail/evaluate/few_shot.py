"""Few-shot accuracy of frozen features by least squares in closed form, as in the paper (section 4.1).

The paper maps the features of a few pictures of each class to targets in {-1, 1}^K. What it leaves open follows its authors'
code (big_vision, evaluators/fewshot_lsr.py): features are standardised over the pictures that were drawn, a column of 100 stands
for the bias so that it is hardly penalised, the penalty is 2^10, and the pictures of fewer shots are among those of more. All in
double precision. n pictures, m queries, D values each, K classes.
"""

import math
from dataclasses import dataclass

import numpy as np

SHOTS, DRAWS, PENALTY, BIAS = (1, 5, 10, 25), 5, 2.0**10, 100.0
SMALL = 1e-5  # added to deviations


@dataclass(frozen=True)
class FewShot:
    """Accuracies of one number of shots over draws."""

    shots: int
    accuracies: tuple[float, ...]
    pictures: int  # that were drawn each time: fewer than shots × K where classes have fewer
    scarce: tuple[int, ...] = ()  # classes with fewer pictures than shots: all of theirs are taken

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean over draws; None for one. It knows of the draws, not of the test pictures."""
        if len(self.accuracies) < 2:
            return None
        from scipy.stats import t

        spread = float(np.std(self.accuracies, ddof=1)) / math.sqrt(len(self.accuracies))
        half = float(t.ppf(0.975, len(self.accuracies) - 1)) * spread
        return max(0.0, self.mean - half), min(1.0, self.mean + half)


def few_shot(
    train: np.ndarray,  # [n, D]
    targets: np.ndarray,  # [n]
    queries: np.ndarray,  # [m, D]
    truth: np.ndarray,  # [m]
    classes: int,
    shots: int,
    draws: int = DRAWS,
    seed: int = 0,
) -> FewShot:
    """Accuracy with so many pictures of each class, over draws with the seeds `seed`, `seed + 1`…

    Where no class has more pictures than that, every draw would be of the same pictures, and there is only one.
    """
    if targets.ndim != 1:
        raise ValueError("few-shot is for pictures with one label each: use knn or linear for several")
    if draws < 1 or shots < 1:
        raise ValueError(f"{draws} draws of {shots} shots: both are 1 or more")
    counts = np.bincount(targets, minlength=classes)
    different = draws if counts.max() > shots else 1
    drawn = [draw(targets, classes, shots, seed + each) for each in range(different)]
    said = [least_squares(train[d], targets[d], queries, classes).argmax(1) for d in drawn]
    right = tuple(float((answers == truth).mean()) for answers in said)
    return FewShot(shots, right, len(drawn[0]), tuple(int(k) for k in np.flatnonzero(counts < shots)))


def draw(targets: np.ndarray, classes: int, shots: int, seed: int) -> np.ndarray:
    """Indices of so many pictures of each class, or of all that there are; class by class."""
    chance = np.random.default_rng(seed)
    return np.concatenate([chance.permutation(np.flatnonzero(targets == k))[:shots] for k in range(classes)])


def least_squares(
    train: np.ndarray, targets: np.ndarray, queries: np.ndarray, classes: int, penalty: float = PENALTY
) -> np.ndarray:
    """What the solution says of the queries, [m, K]."""
    wide = train.astype(np.float64)
    mean, deviation = wide.mean(0), wide.std(0) + SMALL

    def standardised(features: np.ndarray) -> np.ndarray:
        rows = (features.astype(np.float64) - mean) / deviation
        return np.concatenate((rows, np.full((len(rows), 1), BIAS)), 1)  # [·, D + 1]

    x = standardised(train)
    y = np.where(np.arange(classes) == targets[:, None], 1.0, -1.0)  # [n, K]
    if len(x) >= x.shape[1]:
        w = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
    else:  # the same w from the smaller matrix
        w = x.T @ np.linalg.solve(x @ x.T + penalty * np.eye(len(x)), y)
    return standardised(queries) @ w

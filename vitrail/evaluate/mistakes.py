"""Where a model was wrong and sure of it: what is most worth looking at."""

import numpy as np

from vitrail.evaluate.several import probabilities
from vitrail.evaluate.verdicts import checked, judge


def surest_mistakes(logits: np.ndarray, targets: np.ndarray, count: int) -> np.ndarray:
    """Indices of the pictures that were got wrong, the surest first, at most `count`; of equals the first in order."""
    logits, targets = checked(logits, targets)
    if targets.ndim == 1:
        verdicts = judge(logits, targets)
        # Softmax rounds to 1 long before the logits stop telling more; the loss then tells who is further off.
        wrong = np.flatnonzero(~verdicts.right)
        order = np.lexsort((-verdicts.loss[wrong], -verdicts.sure[wrong]))
    else:
        off = np.where((logits >= 0) != (targets > 0), np.abs(logits.astype(np.float64)), -1).max(1)
        wrong = np.flatnonzero(off >= 0)
        order = np.argsort(-off[wrong], kind="stable")
    return wrong[order][:count]


def worst_label(logits: np.ndarray, targets: np.ndarray) -> tuple[int, float]:
    """Of one picture with several labels: the class that was got most surely wrong, and the probability it was given."""
    off = np.where((logits >= 0) != (targets > 0), np.abs(logits), -np.inf)
    worst = int(off.argmax())
    return worst, float(probabilities(logits[worst]))

"""Labels, and what a teacher said of the same pictures beforehand, in one row of numbers for each picture.

A loader carries such rows as its targets, so the loop need not know of teachers. B pictures, K classes, W values of the teacher.
"""

import numpy as np
from torch import Tensor


def rows(labels: np.ndarray | None, said: np.ndarray) -> np.ndarray:
    """[n, 1 + W] for labels that are indices [n], [n, K + W] for 0 and 1 of each class [n, K], [n, W] without labels."""
    if labels is None:
        return said.astype(np.float32)
    columns = labels[:, None] if labels.ndim == 1 else labels
    return np.concatenate((columns.astype(np.float32), said.astype(np.float32)), 1)


def apart(targets: Tensor, width: int, classes: int | None) -> tuple[Tensor | None, Tensor]:
    """Labels as they were, [B] or [B, K], or none; and what the teacher said, [B, W]."""
    labels, said = targets[:, : targets.shape[1] - width], targets[:, targets.shape[1] - width :]
    if not labels.shape[1] or classes is None:
        return None, said
    # A single label is one of two classes at least, so a lone column of one class is a label that may be there or not.
    single = labels.shape[1] == 1 and classes > 1
    return (labels[:, 0].long() if single else labels), said

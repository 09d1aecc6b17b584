"""Averages over the views of a video: its clips and their crops.

B videos, V views, K classes.
"""

import numpy as np

from vitrail.metrics.calibration import sigmoid, softmax


def average_views(outputs: np.ndarray, activation: str | None = None) -> np.ndarray:
    """Return the mean over views of outputs [B, V, K], float32 [B, K].

    With an `activation`, "softmax" or "sigmoid", outputs are logits, and probabilities are averaged: the result is the logits
    whose probabilities are that mean, so that it is used like the logits of one view.
    """
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    wide = outputs.astype(np.float64)
    if activation is None:
        return wide.mean(1).astype(np.float32)
    tiny = np.finfo(np.float64).tiny  # a probability that is rounded to 0 keeps a finite logarithm
    mean = (softmax(wide) if activation == "softmax" else sigmoid(wide)).mean(1)
    logits = np.log(np.maximum(mean, tiny))
    if activation == "sigmoid":
        logits -= np.log(np.maximum(sigmoid(-wide).mean(1), tiny))
    logits[~np.isfinite(wide).all((1, 2))] = np.nan
    return logits.astype(np.float32)

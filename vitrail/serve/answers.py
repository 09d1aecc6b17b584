"""What a row of numbers says, in a client's words."""

from typing import Any

import numpy as np


def scores(logits: np.ndarray, several: bool) -> np.ndarray:
    """Probabilities: of all classes together, or of each alone where a picture may have several."""
    logits = logits.astype(np.float64)
    if several:
        return 1 / (1 + np.exp(-logits.clip(-60, 60)))
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def answers(logits: np.ndarray, labels: tuple[str, ...] | None, several: bool, top: int) -> list[dict[str, Any]]:
    """The likeliest classes, the likeliest first; the first of equals is the one that comes first in the model."""
    odds = scores(logits, several)
    return [
        {"label": labels[k] if labels else str(k), "score": float(f"{odds[k]:.7g}")}
        for k in np.argsort(-odds, kind="stable")[:top].tolist()
    ]

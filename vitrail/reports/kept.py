"""The weights that a run kept, and the scores of the last and of the best ones, in words."""

from typing import Any

from vitrail.utils.scores import METRICS, SCORES
from vitrail.utils.text import is_number

PERCENTAGES = {name: METRICS[name].short for name in SCORES if METRICS[name].is_share} | {"knn": "k-NN accuracy"}
KEEP_BEST = "--set keep=best or --patience N"


def format_score(summary: dict[str, Any], value: float) -> str:
    """Return a validation score with its name."""
    name = str(summary.get("validation_score"))
    if name in SCORES and name not in PERCENTAGES:
        return f"{METRICS[name].short} {value:.4f}"
    return f"{PERCENTAGES[name]} {100 * value:.2f} %" if name in PERCENTAGES else f"{name} {value:.4g}"


def describe_weights(summary: dict[str, Any]) -> tuple[str, str] | None:
    """Return sentences on the weights in model.safetensors and on the others; None where the last weights are the best.

    Runs of earlier versions did not store the last score: None too.
    """
    last, best, at = (summary.get(name) for name in ("last_validation", "best_validation", "best_step"))
    if not (is_number(last) and is_number(best) and is_number(at)) or at == summary.get("steps"):
        return None
    last_is = f"step {summary.get('steps'):,}: validation {format_score(summary, last)}"
    best_is = f"step {at:,}: validation {format_score(summary, best)}"
    if summary.get("weights") == "best":
        return f"best weights, {best_is}", f"last weights, {last_is}"
    if not last < best:
        return None
    kept = "EMA of the weights" if summary.get("weights") == "ema" else "last weights"
    return f"{kept}, {last_is}", f"{best_is}; {KEEP_BEST} keeps these"

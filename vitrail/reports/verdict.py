"""The verdict of a self-supervised run in sentences, the same on the terminal and in the report."""

from collections.abc import Mapping
from typing import Any

from vitrail.utils.text import is_interval, is_number

BASELINES = {"knn_random": "the untrained network", "knn_pixels": "raw pixels"}  # by the key of their k-NN accuracy
UNKNOWN = "Whether the features are better than untrained ones was not measured"


def format_verdict(summary: Mapping[str, Any]) -> list[str]:
    """Return one sentence or two on the features, and one on what to try; none for runs of earlier versions."""
    verdict = summary.get("verdict")
    if not isinstance(verdict, Mapping):
        return []
    differences = read_differences(summary)
    if differences:
        sentences = [format_differences(differences)]
    elif isinstance(reason := verdict.get("reason"), str):
        sentences = [f"{UNKNOWN}: {reason}."]
    else:
        return []
    suggestions = verdict.get("suggestions")
    if isinstance(suggestions, list) and suggestions:
        listed = "; ".join(map(str, suggestions))
        sentences.append(f"What to try: {listed}.")
    return sentences


def read_differences(summary: Mapping[str, Any]) -> dict[str, tuple[str, float, tuple[float, float]]]:
    """Return finding, difference and interval by baseline, without those that are not complete."""
    verdict = summary.get("verdict")
    stored = verdict.get("baselines") if isinstance(verdict, Mapping) else None
    found = {}
    for key in BASELINES:
        values = stored.get(key) if isinstance(stored, Mapping) else None
        if not isinstance(values, Mapping):
            continue
        finding, difference, interval = (values.get(name) for name in ("finding", "difference", "interval"))
        if finding in FORMATS and is_number(difference) and is_interval(interval):
            found[key] = (finding, difference, (interval[0], interval[1]))
    return found


def format_differences(differences: Mapping[str, tuple[str, float, tuple[float, float]]]) -> str:
    """Return a sentence for each finding, with the baselines that share it."""
    sentences = []
    for finding, format_sentence in FORMATS.items():
        same = {BASELINES[key]: (value, ends) for key, (name, value, ends) in differences.items() if name == finding}
        if same:
            subject = "They" if sentences else "Features"
            sentences.append(format_sentence(subject, same))
    return " ".join(sentences)


Shared = Mapping[str, tuple[float, tuple[float, float]]]  # difference and interval by the words for a baseline


def format_better(subject: str, same: Shared) -> str:
    """Return "Features are better than those of the untrained network by 11.2 points (8.1–14.3) and than …"."""
    return format_order(subject, "better", same, 1)


def format_worse(subject: str, same: Shared) -> str:
    """Return "Features are worse than raw pixels by 26.7 points (22.0–31.4)."."""
    return format_order(subject, "worse", same, -1)


def format_order(subject: str, word: str, same: Shared, sign: int) -> str:
    """Return the sentence on baselines that are all on one side of the features; differences have the given sign."""
    parts = []
    for name, (value, ends) in same.items():
        whose = f"those of {name}" if name == BASELINES["knn_random"] else name
        low, high = sorted(sign * end for end in ends)
        unit = "" if parts else " points"
        parts.append(f"than {whose} by {format_points(sign * value)}{unit} ({format_range(low, high)})")
    return f"{subject} are {word} {' and '.join(parts)}."


def format_unclear(subject: str, same: Shared) -> str:
    """Return "No clear difference from the untrained network: −0.4 points (−2.9 to 2.1)."."""
    parts = [f"{name}: {format_points(value)} points ({format_range(*ends)})" for name, (value, ends) in same.items()]
    return f"No clear difference from {', nor from '.join(parts)}."


FORMATS = {"better": format_better, "worse": format_worse, "no clear difference": format_unclear}


def format_points(share: float) -> str:
    """Return a difference of shares in points, with a minus sign: −0.4."""
    return f"{100 * share:.1f}".replace("-0.0", "0.0").replace("-", "−")


def format_range(low: float, high: float) -> str:
    """Return the ends of an interval in points: 8.1–14.3, or −2.9 to 2.1."""
    return f"{format_points(low)}{' to ' if low < 0 else '–'}{format_points(high)}"

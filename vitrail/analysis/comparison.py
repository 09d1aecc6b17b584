"""Results of a comparison of two models by layer, and their JSON and arrays.

L layers, H heads, F frequencies.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.analysis.results import ModelProfile, to_arrays
from vitrail.metrics.intervals import wilson_interval

MODEL_LETTERS = ("A", "B")
# Features of the probes: every model has them, and the class token of an MAE is not trained.
PROBE_FEATURES = "mean of the patch tokens"


@dataclass(frozen=True)
class LayerProbes:
    """Linear probes on the tokens of each layer: number of correctly classified test images."""

    correct: tuple[int, ...]  # [L+1]
    chosen_c: tuple[float, ...]  # C of each layer, [L+1]
    train_images: int
    test_images: int
    classes: int
    majority_accuracy: float  # of always predicting the most frequent training class

    @property
    def top1(self) -> np.ndarray:
        return np.array(self.correct) / self.test_images

    @property
    def intervals(self) -> np.ndarray:  # [L+1, 2]
        return np.array([wilson_interval(correct, self.test_images) for correct in self.correct])


@dataclass(frozen=True)
class ModelResult:
    """Results of one of the two models."""

    letter: str
    name: str
    profile: ModelProfile
    probe: LayerProbes | None

    @property
    def depth(self) -> int:
        return len(self.profile.distance)

    @property
    def heads(self) -> int:
        return self.profile.distance.shape[1]

    @property
    def high_frequency(self) -> np.ndarray:
        """Return the log amplitude of the highest frequency relative to frequency 0, [L+1]."""
        return self.profile.spectrum[:, -1]


@dataclass(frozen=True)
class ModelComparison:
    """Results of both models, and the data they were compared on."""

    sides: tuple[ModelResult, ModelResult]
    source: str
    no_probe_reason: str = ""
    notes: tuple[str, ...] = ()
    skipped: list[str] = field(default_factory=list)

    @property
    def has_same_depth(self) -> bool:
        return self.sides[0].depth == self.sides[1].depth

    @property
    def has_same_size(self) -> bool:
        """Return whether both models have the same image size, so that distances in pixels are comparable."""
        return self.sides[0].profile.size == self.sides[1].profile.size

    def comparable_distance(self, side: ModelResult) -> np.ndarray:
        """Return distances [L, H] in pixels, or in per cent of the image width if the image sizes differ."""
        return side.profile.distance * (1 if self.has_same_size else 100 / side.profile.size[1])

    @property
    def image_count(self) -> int:
        return min(side.profile.pictures for side in self.sides)


def comparison_to_dict(comparison: ModelComparison) -> dict[str, Any]:
    """Return every number for JSON; missing values are None."""
    return {
        "data": comparison.source,
        "pictures": comparison.image_count,
        "models": [_model_to_dict(side) for side in comparison.sides],
        "no_probe": comparison.no_probe_reason or None,
        "notes": list(comparison.notes),
        "skipped": comparison.skipped,
    }


def _model_to_dict(side: ModelResult) -> dict[str, Any]:
    profile, probe = side.profile, side.probe

    def summarise_heads(values: np.ndarray, spread: np.ndarray) -> dict[str, Any]:
        """Return the mean over heads by layer, the value of each head, and the standard deviation over images."""
        return {"mean": round_numbers(values.mean(1)), "heads": round_numbers(values), "spread": round_numbers(spread)}

    distance = summarise_heads(profile.distance, profile.distance_spread)
    return {
        "letter": side.letter,
        "name": side.name,
        "layers": side.depth,
        "heads": side.heads,
        "grid": list(profile.grid),
        "size": list(profile.size),
        "pictures": profile.pictures,
        "depth": round_numbers(np.arange(side.depth + 1) / side.depth),
        "distance": distance | {"everywhere": round_numbers(profile.everywhere)},
        "diversity": summarise_heads(profile.diversity, profile.diversity_spread),
        "mutual_information": summarise_heads(profile.mutual, profile.mutual_spread),
        "spectrum": {
            "frequencies": round_numbers(profile.frequencies),
            "log_amplitude": round_numbers(profile.spectrum),
            "spread": round_numbers(profile.spectrum_spread),
            "high": round_numbers(side.high_frequency),
        },
        "probe": probe
        and {
            "read": PROBE_FEATURES,
            "top1": round_numbers(probe.top1),
            "intervals": round_numbers(probe.intervals),
            "c": list(probe.chosen_c),
            "fitted": probe.train_images,
            "judged": probe.test_images,
            "classes": probe.classes,
            "commonest": round_numbers(probe.majority_accuracy),
        },
    }


def round_numbers(values: Any) -> Any:
    """Return numbers for JSON with six significant digits; None for values that are not finite."""
    if np.ndim(values):
        return [round_numbers(value) for value in values]
    return float(f"{float(values):.6g}") if np.isfinite(values) else None


def comparison_to_arrays(comparison: ModelComparison) -> dict[str, np.ndarray]:
    """Return the results as arrays with the prefixes A. and B."""
    arrays: dict[str, np.ndarray] = {}
    for side in comparison.sides:
        arrays |= {f"{side.letter}.{key}": value for key, value in to_arrays(side.profile).items()}
        if side.probe is not None:
            arrays[f"{side.letter}.probe"] = side.probe.top1
            arrays[f"{side.letter}.probe_intervals"] = side.probe.intervals
    return arrays

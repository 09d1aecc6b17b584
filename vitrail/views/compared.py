"""What a comparison of two models found: numbers by layer, for figures, tables, files and machines.

L layers, H heads, F frequencies.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from vitrail.analysis.arrays import arrays
from vitrail.analysis.seen import Profile
from vitrail.evaluate.intervals import wilson

LETTERS = ("A", "B")
READ = (
    "mean of the patch tokens"  # what a probe is fitted to: every model has it, and no loss reads an MAE's class token
)


@dataclass(frozen=True)
class Probe:
    """A linear probe on each layer's tokens: how many of the judged pictures it gets right."""

    right: tuple[int, ...]  # [L+1]
    chosen: tuple[float, ...]  # C of each layer, [L+1]
    fitted: int
    judged: int
    classes: int
    commonest: float  # the share of pictures that always saying the commonest training class gets right

    @property
    def top1(self) -> np.ndarray:
        return np.array(self.right) / self.judged

    @property
    def intervals(self) -> np.ndarray:  # [L+1, 2]
        return np.array([wilson(right, self.judged) for right in self.right])


@dataclass(frozen=True)
class Side:
    """One of the two models, and what was found."""

    letter: str
    name: str
    profile: Profile
    probe: Probe | None

    @property
    def depth(self) -> int:
        return len(self.profile.distance)

    @property
    def heads(self) -> int:
        return self.profile.distance.shape[1]

    @property
    def high(self) -> np.ndarray:
        """Log amplitude of the highest frequency less that of 0, [L+1]."""
        return self.profile.spectrum[:, -1]

    def at(self, layer: int) -> Fraction:
        """Relative depth of a layer."""
        return Fraction(layer, self.depth)


@dataclass(frozen=True)
class Comparison:
    """Both sides, and what they were compared on."""

    sides: tuple[Side, Side]
    where: str
    no_probe: str = ""  # why there is none
    notes: tuple[str, ...] = ()
    skipped: list[str] = field(default_factory=list)

    @property
    def one_depth(self) -> bool:
        return self.sides[0].depth == self.sides[1].depth

    @property
    def one_size(self) -> bool:
        """Whether distances in pixels mean the same for both."""
        return self.sides[0].profile.size == self.sides[1].profile.size

    def reach(self, side: Side) -> np.ndarray:
        """Distances to compare, [L, H]: in pixels, or in per cent of the pictures' width where the models see other sizes."""
        return side.profile.distance * (1 if self.one_size else 100 / side.profile.size[1])

    @property
    def pictures(self) -> int:
        return min(side.profile.pictures for side in self.sides)


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Every number, for machines; what there is none of is null."""
    return {
        "data": comparison.where,
        "pictures": comparison.pictures,
        "models": [_side(side) for side in comparison.sides],
        "no_probe": comparison.no_probe or None,
        "notes": list(comparison.notes),
        "skipped": comparison.skipped,
    }


def _side(side: Side) -> dict[str, Any]:
    found, probe = side.profile, side.probe
    return {
        "letter": side.letter,
        "name": side.name,
        "layers": side.depth,
        "heads": side.heads,
        "grid": list(found.grid),
        "size": list(found.size),
        "pictures": found.pictures,
        "depth": [numbered(float(side.at(layer))) for layer in range(side.depth + 1)],
        "distance": _by_head(found.distance, found.distance_spread) | {"everywhere": numbered(found.everywhere)},
        "diversity": _by_head(found.diversity, found.diversity_spread),
        "mutual_information": _by_head(found.mutual, found.mutual_spread),
        "spectrum": {
            "frequencies": numbered(found.frequencies),
            "log_amplitude": numbered(found.spectrum),
            "spread": numbered(found.spectrum_spread),
            "high": numbered(side.high),
        },
        "probe": None
        if probe is None
        else {
            "read": READ,
            "top1": numbered(probe.top1),
            "intervals": numbered(probe.intervals),
            "c": list(probe.chosen),
            "fitted": probe.fitted,
            "judged": probe.judged,
            "classes": probe.classes,
            "commonest": numbered(probe.commonest),
        },
    }


def _by_head(values: np.ndarray, spread: np.ndarray) -> dict[str, Any]:
    """The mean over heads by layer, each head, and the deviation over pictures."""
    return {"mean": numbered(values.mean(1)), "heads": numbered(values), "spread": numbered(spread)}


def numbered(values: Any) -> Any:
    """Numbers in JSON's kinds, six digits each; None for what is no number."""
    if np.ndim(values):
        return [numbered(each) for each in values]
    return float(f"{float(values):.6g}") if np.isfinite(values) else None


def arrays_of(comparison: Comparison) -> dict[str, np.ndarray]:
    """The same as arrays, under A.… and B.…, for NumPy."""
    made: dict[str, np.ndarray] = {}
    for side in comparison.sides:
        made |= {f"{side.letter}.{key}": value for key, value in arrays(side.profile).items()}
        if side.probe is not None:
            made[f"{side.letter}.probe"] = side.probe.top1
            made[f"{side.letter}.probe_intervals"] = side.probe.intervals
    return made

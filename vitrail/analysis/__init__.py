"""What a model looks at and what it has learnt, seen from outside, with fused attention on."""

from vitrail.analysis.arrays import arrays
from vitrail.analysis.distance import distances
from vitrail.analysis.filters import filters
from vitrail.analysis.look import VIEWS, look, patch_at
from vitrail.analysis.positions import positions
from vitrail.analysis.record import Maps, record_attention
from vitrail.analysis.seen import Distances, Filters, Positions, Seen

__all__ = [
    "VIEWS",
    "Distances",
    "Filters",
    "Maps",
    "Positions",
    "Seen",
    "arrays",
    "distances",
    "filters",
    "look",
    "patch_at",
    "positions",
    "record_attention",
]

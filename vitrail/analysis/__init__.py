"""What a model looks at and what it has learnt, seen from outside, with fused attention on."""

from vitrail.analysis.arrays import arrays
from vitrail.analysis.compare import pooled, profile
from vitrail.analysis.distance import distances
from vitrail.analysis.filters import filters
from vitrail.analysis.look import VIEWS, look, patch_at
from vitrail.analysis.positions import positions
from vitrail.analysis.record import Maps, record_attention
from vitrail.analysis.seen import Distances, Filters, Positions, Profile, Seen

__all__ = [
    "VIEWS",
    "Distances",
    "Filters",
    "Maps",
    "Positions",
    "Profile",
    "Seen",
    "arrays",
    "distances",
    "filters",
    "look",
    "patch_at",
    "pooled",
    "positions",
    "profile",
    "record_attention",
]

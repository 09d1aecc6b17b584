"""Analysis of models from outside, with fused attention kernels: attention, rollout, distances, positions, filters."""

from vitrail.analysis.profile import measure_distances, pool_tokens, profile_model
from vitrail.analysis.record import AttentionMaps, record_attention
from vitrail.analysis.results import (
    AttentionDistances,
    ImageTrace,
    ModelProfile,
    PositionMaps,
    PrincipalFilters,
    to_arrays,
)
from vitrail.analysis.stages import LayerTrace, StagedTrace, trace_stages
from vitrail.analysis.trace import TRACE_VIEWS, find_patch, trace_image
from vitrail.analysis.weights import extract_filters, extract_positions

__all__ = [
    "TRACE_VIEWS",
    "AttentionDistances",
    "AttentionMaps",
    "ImageTrace",
    "LayerTrace",
    "ModelProfile",
    "PositionMaps",
    "PrincipalFilters",
    "StagedTrace",
    "extract_filters",
    "extract_positions",
    "find_patch",
    "measure_distances",
    "pool_tokens",
    "profile_model",
    "record_attention",
    "to_arrays",
    "trace_image",
    "trace_stages",
]

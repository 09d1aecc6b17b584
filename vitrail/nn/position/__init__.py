"""Position embeddings: E_pos of equation 1 and its alternatives (appendix D.4).

Positions are added to the tokens (at the stem or at every layer), bias the attention matrix, or rotate queries and keys.
All of them work on any grid: learned tables are resampled, the others are computed. Of clips, the grid is t×h×w.
"""

from vitrail.nn.position.added import (
    AddedPosition,
    AddedPositionEmbedding,
    Factorised,
    FactorisedTable,
    FixedPositionEmbedding,
    Learned1D,
    Learned1DTable,
    Learned2D,
    Learned2DTable,
    SinCos2D,
    Sinusoid1D,
)
from vitrail.nn.position.base import NO_POSITION, LayerPosition, NoPosition, PositionEmbedding, Rotation
from vitrail.nn.position.relative import (
    ComputedPositionBias,
    OffsetBias,
    Relative,
    Relative1D,
    RelativeEmbedding1D,
    RelativeMLP,
    RelativePositionBias,
    compute_log_offsets,
)
from vitrail.nn.position.rotary import (
    ReferenceRotation,
    Rotary2D,
    Rotary3D,
    RotaryDINOv3,
    RotaryEmbedding,
    RotaryEVA02,
    rotate,
)

PositionSlot = (
    NoPosition
    | Learned1D
    | Learned2D
    | Relative
    | Relative1D
    | RelativeMLP
    | SinCos2D
    | Sinusoid1D
    | Rotary2D
    | RotaryDINOv3
    | RotaryEVA02
    | Factorised
    | Rotary3D
)

__all__ = [
    "NO_POSITION",
    "AddedPosition",
    "AddedPositionEmbedding",
    "ComputedPositionBias",
    "Factorised",
    "FactorisedTable",
    "FixedPositionEmbedding",
    "LayerPosition",
    "Learned1D",
    "Learned1DTable",
    "Learned2D",
    "Learned2DTable",
    "NoPosition",
    "OffsetBias",
    "PositionEmbedding",
    "PositionSlot",
    "ReferenceRotation",
    "Relative",
    "Relative1D",
    "RelativeEmbedding1D",
    "RelativeMLP",
    "RelativePositionBias",
    "Rotary2D",
    "Rotary3D",
    "RotaryDINOv3",
    "RotaryEVA02",
    "RotaryEmbedding",
    "Rotation",
    "SinCos2D",
    "Sinusoid1D",
    "compute_log_offsets",
    "rotate",
]

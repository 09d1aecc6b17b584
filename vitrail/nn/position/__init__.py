"""Position embeddings: E_pos of equation 1 and its alternatives (appendix D.4).

Positions are added to the tokens (at the stem or at every layer), bias the attention matrix, or rotate queries and keys.
All of them work on any grid: learned tables are resampled in two dimensions, the others are computed.
"""

from vitrail.nn.position.added import (
    AddedPositionEmbedding,
    FixedPositionEmbedding,
    Learned1D,
    Learned1DTable,
    Learned2D,
    Learned2DTable,
    SinCos2D,
    Sinusoid1D,
)
from vitrail.nn.position.base import NO_POSITION, LayerPosition, NoPosition, PositionEmbedding
from vitrail.nn.position.relative import Relative, Relative1D, RelativeEmbedding1D, RelativePositionBias
from vitrail.nn.position.rotary import Rotary2D, RotaryEmbedding, rotate

PositionSlot = NoPosition | Learned1D | Learned2D | Relative | Relative1D | SinCos2D | Sinusoid1D | Rotary2D

__all__ = [
    "NO_POSITION",
    "AddedPositionEmbedding",
    "FixedPositionEmbedding",
    "LayerPosition",
    "Learned1D",
    "Learned1DTable",
    "Learned2D",
    "Learned2DTable",
    "NoPosition",
    "PositionEmbedding",
    "PositionSlot",
    "Relative",
    "Relative1D",
    "RelativeEmbedding1D",
    "RelativePositionBias",
    "Rotary2D",
    "RotaryEmbedding",
    "SinCos2D",
    "Sinusoid1D",
    "rotate",
]

"""The MLP of equation 3: two layers with GELU, and its alternatives."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """fc2(activation(fc1(x))), applied to each token alone: the same as two 1×1 convolutions."""

    def __init__(self, width: int, hidden: int, activation: nn.Module, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


class GatedMLP(nn.Module):
    """fc2(silu(a) ⊙ b) with a and b from one matrix ("GLU Variants Improve Transformer", Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, -1)
        return self.fc2(self.dropout(F.silu(a) * b))


@dataclass(frozen=True)
class GELU:
    """The paper's: exact GELU, x Φ(x)."""

    def build(self, width: int, hidden: int, dropout: float) -> nn.Module:
        return MLP(width, hidden, nn.GELU(), dropout)


@dataclass(frozen=True)
class TanhGELU:
    """GELU by its tanh approximation, which is what Flax computes: big_vision's models, and SigLIP."""

    def build(self, width: int, hidden: int, dropout: float) -> nn.Module:
        return MLP(width, hidden, nn.GELU(approximate="tanh"), dropout)


class Quick(nn.Module):
    """x σ(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()


@dataclass(frozen=True)
class QuickGELU:
    """GELU by a sigmoid, as in OpenAI's CLIP."""

    def build(self, width: int, hidden: int, dropout: float) -> nn.Module:
        return MLP(width, hidden, Quick(), dropout)


@dataclass(frozen=True)
class ReLU:
    """The 2017 Transformer's."""

    def build(self, width: int, hidden: int, dropout: float) -> nn.Module:
        return MLP(width, hidden, nn.ReLU(), dropout)


@dataclass(frozen=True)
class SwiGLU:
    """Gated, as in DINOv2's giant; `hidden` is the width after the gate."""

    def build(self, width: int, hidden: int, dropout: float) -> nn.Module:
        return GatedMLP(width, hidden, dropout)


MLPSlot = GELU | TanhGELU | QuickGELU | ReLU | SwiGLU

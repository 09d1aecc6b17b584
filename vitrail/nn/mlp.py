"""The MLP of equation 3: two layers with GELU, and its alternatives."""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """fc2(activation(fc1(x))) for each token, equal to two 1×1 convolutions."""

    def __init__(self, width: int, hidden: int, activation: nn.Module, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


class GatedMLP(nn.Module):
    """fc2(norm(silu(a) ⊙ b)) with a and b from one matrix ("GLU Variants Improve Transformer", Shazeer 2020); most have no
    norm."""

    def __init__(self, width: int, hidden: int, dropout: float, norm: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.norm = norm
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, -1)
        return self.fc2(self.norm(self.dropout(F.silu(a) * b)))


@dataclass(frozen=True)
class GELU:
    """The paper's MLP with exact GELU, x Φ(x)."""

    def build(self, width: int, hidden: int, dropout: float, eps: float) -> nn.Module:
        return MLP(width, hidden, nn.GELU(), dropout)


@dataclass(frozen=True)
class TanhGELU:
    """GELU in its tanh approximation, as Flax computes it: big_vision's models and SigLIP."""

    def build(self, width: int, hidden: int, dropout: float, eps: float) -> nn.Module:
        return MLP(width, hidden, nn.GELU(approximate="tanh"), dropout)


class QuickGELUActivation(nn.Module):
    """x σ(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()


@dataclass(frozen=True)
class QuickGELU:
    """GELU in its sigmoid approximation, as in OpenAI's CLIP."""

    def build(self, width: int, hidden: int, dropout: float, eps: float) -> nn.Module:
        return MLP(width, hidden, QuickGELUActivation(), dropout)


@dataclass(frozen=True)
class ReLU:
    """The MLP of the 2017 Transformer."""

    def build(self, width: int, hidden: int, dropout: float, eps: float) -> nn.Module:
        return MLP(width, hidden, nn.ReLU(), dropout)


@dataclass(frozen=True)
class SwiGLU:
    """The gated MLP of DINOv2's giant; `hidden` is the width after the gate. `normed` adds EVA-02's LayerNorm after it."""

    normed: bool = field(default=False, metadata={"omit_default": True})

    def build(self, width: int, hidden: int, dropout: float, eps: float) -> nn.Module:
        norm = nn.LayerNorm(hidden, eps=eps) if self.normed else nn.Identity()
        return GatedMLP(width, hidden, dropout, norm)


MLPSlot = GELU | TanhGELU | QuickGELU | ReLU | SwiGLU

"""From the image's vector to what is asked of it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class TanhHead(nn.Module):
    """The pre-logits layer of the original release: a hidden layer with tanh, kept for pre-training."""

    def __init__(self, features: int, hidden: int, classes: int | None) -> None:
        super().__init__()
        self.pre_logits = nn.Linear(features, hidden)
        self.linear = nn.Identity() if classes is None else nn.Linear(hidden, classes)

    def forward(self, y: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.pre_logits(y)))


class DistilledHead(nn.Module):
    """DeiT's: one head on the class token, one on the distillation token; their mean is the answer."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.label = nn.Linear(features, classes)
        self.teacher = nn.Linear(features, classes)

    def both(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What each head says, apart: the one learns from labels, the other from a teacher."""
        return self.label(y[:, 0]), self.teacher(y[:, 1])

    def forward(self, y: Tensor) -> Tensor:  # [B, 2, D]
        label, teacher = self.both(y)
        return (label + teacher) / 2


@dataclass(frozen=True)
class Linear:
    """One linear layer, zero at first in the `vit` initialisation; two with a distillation token."""

    def build(self, features: int, classes: int | None, vectors: int) -> nn.Module:
        if classes is None:
            return nn.Identity()
        return nn.Linear(features, classes) if vectors == 1 else DistilledHead(features, classes)


@dataclass(frozen=True)
class PreLogits:
    """A hidden layer with tanh before the linear one, as wide as the model unless `hidden` says otherwise."""

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"a pre-logits layer of width {self.hidden}: it must be at least 1")

    def build(self, features: int, classes: int | None, vectors: int) -> nn.Module:
        if vectors != 1:
            raise ValueError("a distillation token has a linear head of its own: use head='linear'")
        return TanhHead(features, features if self.hidden is None else self.hidden, classes)


@dataclass(frozen=True)
class Projection:
    """A matrix into the space that images share with texts, as in CLIP: what comes out are features, not classes."""

    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a projection to {self.width} values: it must be at least 1")

    def build(self, features: int, classes: int | None, vectors: int) -> nn.Module:
        if classes is not None or vectors != 1:
            raise ValueError("a projection gives features of one token: use classes=None and no distillation token")
        return nn.Linear(features, self.width, bias=False)


HeadSlot = Linear | PreLogits | Projection

"""Heads: from the pooled vector to logits or projected features."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.linear import LinearLayer


class HiddenHead(nn.Module):
    """A head that computes features of its own, the pre-logits, before the classifier."""

    def __init__(self, pre_logits: nn.Module, hidden: int, classes: int | None) -> None:
        super().__init__()
        self.pre_logits, self.hidden = pre_logits, hidden
        self.linear = nn.Identity() if classes is None else LinearLayer(hidden, classes)

    def compute_features(self, y: Tensor) -> Tensor:
        """Return the input of the classifier."""
        raise NotImplementedError

    def forward(self, y: Tensor) -> Tensor:
        return self.linear(self.compute_features(y))


class TanhHead(HiddenHead):
    """The pre-logits layer of the original release: a hidden layer with tanh, used in pre-training."""

    def compute_features(self, y: Tensor) -> Tensor:
        return torch.tanh(self.pre_logits(y))


class SimilarityHead(HiddenHead):
    """A classifier of unit vectors. With rows of one length, logits are cosine similarities times that length."""

    def compute_features(self, y: Tensor) -> Tensor:
        return F.normalize(self.pre_logits(y), dim=-1)


class NormHead(HiddenHead):
    """A LayerNorm of the pooled vector, then the classifier (AST, the only layers of its MLP head)."""

    def compute_features(self, y: Tensor) -> Tensor:
        return self.pre_logits(y)


class DistilledHead(nn.Module):
    """DeiT's two heads, on the class token and on the distillation token; the output is their mean."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.label = LinearLayer(features, classes)
        self.teacher = LinearLayer(features, classes)

    def forward_heads(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of both heads: one is trained on labels, the other on a teacher."""
        return self.label(y[:, 0]), self.teacher(y[:, 1])

    def forward(self, y: Tensor) -> Tensor:  # [B, 2, D]
        label, teacher = self.forward_heads(y)
        return (label + teacher) / 2


@dataclass(frozen=True)
class Linear:
    """One linear layer, zero-initialised by the `vit` scheme; two layers with a distillation token."""

    def build(self, features: int, classes: int | None, vectors: int, eps: float = 1e-6) -> nn.Module:
        if classes is None:
            return nn.Identity()
        return LinearLayer(features, classes) if vectors == 1 else DistilledHead(features, classes)


@dataclass(frozen=True)
class PreLogits:
    """A hidden layer with tanh before the linear one, as wide as the model unless `hidden` is given."""

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"pre-logits width must be at least 1, got {self.hidden}")

    def build(self, features: int, classes: int | None, vectors: int, eps: float = 1e-6) -> nn.Module:
        if vectors != 1:
            raise ValueError("pre-logits do not support a distillation token: use head='linear'")
        hidden = features if self.hidden is None else self.hidden
        return TanhHead(LinearLayer(features, hidden), hidden, classes)


@dataclass(frozen=True)
class NormLinear:
    """A LayerNorm before the linear layer, for features that were normed before they were averaged."""

    def build(self, features: int, classes: int | None, vectors: int, eps: float = 1e-6) -> nn.Module:
        if vectors != 1:
            raise ValueError("a head with a norm needs one vector per image: use pool='output-mean', or head='linear'")
        return NormHead(nn.LayerNorm(features, eps=eps), features, classes)


@dataclass(frozen=True)
class Projection:
    """A projection into the space shared by images and texts, as in CLIP; it returns features, not classes."""

    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"projection width must be at least 1, got {self.width}")

    def build(self, features: int, classes: int | None, vectors: int, eps: float = 1e-6) -> nn.Module:
        if classes is not None or vectors != 1:
            raise ValueError("a projection needs classes=None and no distillation token")
        return LinearLayer(features, self.width, bias=False)


@dataclass(frozen=True)
class Similarity:
    """A classifier of unit vectors, as text features are in zero-shot classification; `projection` is CLIP's, if it has one."""

    projection: int | None = None

    def build(self, features: int, classes: int | None, vectors: int, eps: float = 1e-6) -> nn.Module:
        if vectors != 1:
            raise ValueError("a similarity head does not support a distillation token: use head='linear'")
        if self.projection is None:
            return SimilarityHead(nn.Identity(), features, classes)
        return SimilarityHead(Projection(self.projection).build(features, None, vectors), self.projection, classes)


HeadSlot = Linear | PreLogits | Projection | Similarity | NormLinear

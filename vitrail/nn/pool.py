"""From L layers' tokens to one vector for the image: equation 4 and its alternatives.

B images, N patches after the prefix tokens, D width. Where tokens were merged, the pools that read patches are told how many
patches each token stands for, so that every patch counts once.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.mlp import GELU, MLPSlot
from vitrail.nn.shape import Shape


class Pool(nn.Module):
    """Norm and pooling together, so that each can say which comes first and which tokens it reads."""

    reads: int | None = None  # how many of the first tokens are read; None for all
    vectors: int = 1  # that it gives for an image: two with a distillation token
    features: int  # values in a vector

    def __init__(self, shape: Shape, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.prefix = shape.prefix
        self.features = shape.width


def mean(patches: Tensor, size: Tensor | None) -> Tensor:
    """The mean of the patch tokens [B, N, D], where each stands for `size` [B, N] patches: [B, D]."""
    if size is None:
        return patches.mean(1)
    return (patches * size.unsqueeze(-1)).sum(1) / size.sum(1, keepdim=True)


class ClassTokenPool(Pool):
    """y = LN(z_L⁰), equation 4. With a distillation token, both: [B, 2, D]."""

    def __init__(self, shape: Shape, norm: nn.Module) -> None:
        super().__init__(shape, norm)
        self.reads = self.vectors = shape.outputs

    def forward(self, z: Tensor) -> Tensor:
        y = self.norm(z[:, : self.reads])  # eq. 4
        return y[:, 0] if self.reads == 1 else y


class MeanPool(Pool):
    """The mean of the patch tokens."""

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        return mean(self.norm(z)[:, self.prefix :], size)


class MeanThenNormPool(Pool):
    """The mean of the patch tokens, normalised afterwards (MAE's and timm's `fc_norm`)."""

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        return self.norm(mean(z[:, self.prefix :], size))


class ClassAndMeanPool(Pool):
    """Class token and mean of the patches side by side, as DINOv2's linear classifiers take them: [B, 2D]."""

    def __init__(self, shape: Shape, norm: nn.Module) -> None:
        super().__init__(shape, norm)
        self.features = 2 * shape.width

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        y = self.norm(z)
        return torch.cat((y[:, 0], mean(y[:, self.prefix :], size)), -1)


class AttentionPool(Pool):
    """A learned probe attends to the patches, and an MLP follows: the MAP head of "Scaling Vision Transformers"."""

    def __init__(self, shape: Shape, norm: nn.Module, mlp: MLPSlot) -> None:
        super().__init__(shape, norm)
        d = shape.width
        self.heads = shape.heads
        self.probe = nn.Parameter(torch.empty(1, 1, d))
        self.q = nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)
        self.norm2 = nn.LayerNorm(d, eps=shape.eps)
        self.mlp = mlp.build(d, shape.mlp, 0.0)

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        patches = self.norm(z)[:, self.prefix :]
        q = self.q(self.probe).expand(z.shape[0], -1, -1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, *self.kv(patches).chunk(2, -1)))
        bias = None if size is None else size.log()[:, None, None]  # as if each patch were there by itself
        y = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))  # [B, 1, D]
        return (y + self.mlp(self.norm2(y)))[:, 0]


@dataclass(frozen=True)
class ClassToken:
    """The paper's: the class token is the image."""

    needs: ClassVar[int] = 1  # prefix tokens it reads

    def build(self, shape: Shape, norm: nn.Module) -> Pool:
        return ClassTokenPool(shape, norm)


@dataclass(frozen=True)
class Mean:
    """The mean over patches. `norm_after` moves the LayerNorm behind the mean."""

    norm_after: bool = False
    needs: ClassVar[int] = 0

    def build(self, shape: Shape, norm: nn.Module) -> Pool:
        return (MeanThenNormPool if self.norm_after else MeanPool)(shape, norm)


@dataclass(frozen=True)
class ClassAndMean:
    """Class token beside the mean over patches."""

    needs: ClassVar[int] = 1

    def build(self, shape: Shape, norm: nn.Module) -> Pool:
        return ClassAndMeanPool(shape, norm)


@dataclass(frozen=True)
class MAP:
    """Multi-head attention pooling with a learned probe, and an MLP of its own."""

    mlp: MLPSlot = GELU()
    needs: ClassVar[int] = 0

    def build(self, shape: Shape, norm: nn.Module) -> Pool:
        return AttentionPool(shape, norm, self.mlp)


PoolSlot = ClassToken | Mean | ClassAndMean | MAP

"""Pooling of the last layer's tokens to one vector per image: equation 4 and its alternatives.

B images, N patches after the prefix tokens, D width. After token merging, pools that read patches receive the number of
patches that each token represents, so that every patch has the same weight.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.linear import LinearLayer
from vitrail.nn.mlp import GELU, MLPSlot
from vitrail.nn.shape import EncoderShape


class Pool(nn.Module):
    """The final norm and the pooling, in one module: their order and the tokens that are read depend on the pool."""

    n_inputs: int | None = None  # number of first tokens that are read; None for all
    n_vectors: int = 1  # vectors per image: two with a distillation token
    feature_dim: int  # values per vector

    def __init__(self, shape: EncoderShape, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.prefix = shape.prefix
        self.feature_dim = shape.width


def average_patches(patches: Tensor, size: Tensor | None) -> Tensor:
    """Return the mean of the patch tokens [B, N, D], weighted by `size` [B, N], the patches per token: [B, D]."""
    if size is None:
        return patches.mean(1)
    return (patches * size.unsqueeze(-1)).sum(1) / size.sum(1, keepdim=True)


class ClassTokenPool(Pool):
    """y = LN(z_L⁰), equation 4. With a distillation token, both vectors: [B, 2, D]."""

    def __init__(self, shape: EncoderShape, norm: nn.Module) -> None:
        super().__init__(shape, norm)
        self.n_inputs = self.n_vectors = shape.outputs

    def forward(self, z: Tensor) -> Tensor:
        y = self.norm(z[:, : self.n_inputs])  # eq. 4
        return y[:, 0] if self.n_inputs == 1 else y


class OutputMeanPool(Pool):
    """The mean of the output tokens after the norm, such as the class and the distillation token of AST: [B, D]."""

    def __init__(self, shape: EncoderShape, norm: nn.Module) -> None:
        super().__init__(shape, norm)
        self.n_inputs = shape.outputs

    def forward(self, z: Tensor) -> Tensor:
        return self.norm(z[:, : self.n_inputs]).mean(1)


class MeanPool(Pool):
    """The mean of the patch tokens."""

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        return average_patches(self.norm(z)[:, self.prefix :], size)


class MeanThenNormPool(Pool):
    """The mean of the patch tokens, then the norm (MAE's and timm's `fc_norm`)."""

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        return self.norm(average_patches(z[:, self.prefix :], size))


class ClassAndMeanPool(Pool):
    """The class token and the mean of the patches, concatenated as in DINOv2's linear classifiers: [B, 2D]."""

    def __init__(self, shape: EncoderShape, norm: nn.Module) -> None:
        super().__init__(shape, norm)
        self.feature_dim = 2 * shape.width

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        y = self.norm(z)
        return torch.cat((y[:, 0], average_patches(y[:, self.prefix :], size)), -1)


class AttentionPool(Pool):
    """Attention of a learned probe to the patches, then an MLP: the MAP head of "Scaling Vision Transformers"."""

    def __init__(self, shape: EncoderShape, norm: nn.Module, mlp: MLPSlot) -> None:
        super().__init__(shape, norm)
        d = shape.width
        self.heads = shape.heads
        self.probe = nn.Parameter(torch.empty(1, 1, d))
        self.q = LinearLayer(d, d)
        self.kv = LinearLayer(d, 2 * d)
        self.out = LinearLayer(d, d)
        self.norm2 = nn.LayerNorm(d, eps=shape.eps)
        self.mlp = mlp.build(d, shape.mlp, 0.0, shape.eps)

    def forward(self, z: Tensor, size: Tensor | None = None) -> Tensor:
        patches = self.norm(z)[:, self.prefix :]
        q = self.q(self.probe).expand(z.shape[0], -1, -1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, *self.kv(patches).chunk(2, -1)))
        bias = None if size is None else size.log()[:, None, None]  # equals attention to the unmerged patches
        y = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))  # [B, 1, D]
        return (y + self.mlp(self.norm2(y)))[:, 0]


@dataclass(frozen=True)
class ClassToken:
    """The paper's pooling: the class token."""

    required_tokens: ClassVar[int] = 1  # output tokens that it reads

    def build(self, shape: EncoderShape, norm: nn.Module) -> Pool:
        return ClassTokenPool(shape, norm)


@dataclass(frozen=True)
class OutputMean:
    """The mean of the class token and the distillation token (AST, Gong et al. 2021)."""

    required_tokens: ClassVar[int] = 2

    def build(self, shape: EncoderShape, norm: nn.Module) -> Pool:
        return OutputMeanPool(shape, norm)


@dataclass(frozen=True)
class Mean:
    """The mean over patches. `norm_after` applies the LayerNorm after the mean. VideoMAE in transformers has another `eps`
    for that norm than for those of the layers, and, as a model without classes, no norm."""

    norm_after: bool = False
    normed: bool = field(default=True, repr=False, metadata={"omit_default": True})
    eps: float | None = field(default=None, repr=False, metadata={"omit_default": True})  # None: the model's
    required_tokens: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self!r}{'' if self.normed else ' without norm'}{'' if self.eps is None else f', eps {self.eps:g}'}"

    def build(self, shape: EncoderShape, norm: nn.Module) -> Pool:
        if self.eps is not None:
            norm = nn.LayerNorm(shape.width, eps=self.eps)
        norm = norm if self.normed else nn.Identity()
        return (MeanThenNormPool if self.norm_after else MeanPool)(shape, norm)


@dataclass(frozen=True)
class ClassAndMean:
    """The class token concatenated with the mean over patches."""

    required_tokens: ClassVar[int] = 1

    def build(self, shape: EncoderShape, norm: nn.Module) -> Pool:
        return ClassAndMeanPool(shape, norm)


@dataclass(frozen=True)
class MAP:
    """Multi-head attention pooling with a learned probe and its own MLP."""

    mlp: MLPSlot = GELU()
    required_tokens: ClassVar[int] = 0

    def build(self, shape: EncoderShape, norm: nn.Module) -> Pool:
        return AttentionPool(shape, norm, self.mlp)


PoolSlot = ClassToken | Mean | ClassAndMean | MAP | OutputMean

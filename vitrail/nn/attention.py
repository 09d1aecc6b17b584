"""Multi-head self-attention: MSA of equation 2, and softmax(q kᵀ / √d) v of appendix A.

B images, N tokens, D width, H heads, d the width of one head (D/H by default).
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.linear import LinearLayer, linear
from vitrail.nn.position import NO_POSITION, LayerPosition, rotate
from vitrail.nn.shape import EncoderShape

if TYPE_CHECKING:
    from vitrail.nn.block import BlockSlot


MAX_SCORES = 2**18  # of one head, for attention as products of matrices


def dot_product_attention(
    q: Tensor,  # [B, H, N, d]
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q kᵀ / √d + mask) v, [B, H, N, d].

    PyTorch's fused kernel does not store the N×N matrix. In bf16 on a CPU it is slower than two products of
    matrices, forward and backward, which short sequences use.
    """
    is_added = attn_mask is None or attn_mask.is_floating_point()
    is_short = q.shape[-2] * k.shape[-2] <= MAX_SCORES
    if q.dtype is not torch.bfloat16 or q.device.type != "cpu" or dropout_p or not is_added or not is_short:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    batch, (a, b, c) = q.shape[:-2], (part.contiguous().flatten(0, -3) for part in (q, k, v))
    scores = torch.baddbmm(a.new_empty(1, 1, 1), a, b.transpose(1, 2), beta=0, alpha=factor)  # [B·H, N, N]
    if attn_mask is not None:
        scores = (scores.unflatten(0, batch) + attn_mask).flatten(0, -3)
    return torch.bmm(scores.softmax(-1).to(c.dtype), c).unflatten(0, batch)


class KeylessBiasLinear(nn.Linear):
    """The projection of queries, keys and values with a bias of q and v only (BEiT, EVA-02, DINOv3): [2·H·d] values.

    Without rotary positions, a bias of the keys adds the same to a query's product with every key: softmax cancels it.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, 3 * inner)
        self.bias = nn.Parameter(torch.empty(2 * inner))

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.full_bias())

    def full_bias(self) -> Tensor:
        """Return the bias with zeros for the keys, [3·H·d]."""
        q, v = self.bias.chunk(2)
        return torch.cat((q, torch.zeros_like(q), v))


class MSA(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values.

    PyTorch's fused kernel computes the N×N attention matrix without storing it.
    """

    def __init__(self, shape: EncoderShape, spec: "BlockSlot") -> None:
        super().__init__()
        d, inner = shape.head_width, shape.heads * shape.head_width
        self.heads, self.dropout = shape.heads, spec.attention_dropout
        keyless = spec.qkv_bias and not spec.key_bias
        self.qkv = (
            KeylessBiasLinear(shape.width, inner)
            if keyless
            else LinearLayer(shape.width, 3 * inner, bias=spec.qkv_bias)
        )
        self.q_norm = nn.LayerNorm(d, eps=shape.eps) if spec.qk_norm else None
        self.k_norm = nn.LayerNorm(d, eps=shape.eps) if spec.qk_norm else None
        self.norm = nn.LayerNorm(inner, eps=shape.eps) if spec.attention_norm else nn.Identity()
        self.out = LinearLayer(inner, shape.width, bias=spec.out_bias)

    def forward(self, x: Tensor, position: LayerPosition = NO_POSITION, n_outputs: int | None = None) -> Tensor:
        """Return the attention of all tokens, or of the first `n_outputs`, to all tokens: [B, N or n_outputs, D]."""
        qkv = self.qkv(x)  # [B, N, 3·H·d]
        q, k, v = self.split_heads(qkv, position)  # each [B, H, N, d]
        q = q if n_outputs is None else q[:, :, :n_outputs]
        bias = position.compute_bias(q, n_outputs)
        dropout = self.dropout if self.training else 0.0
        y = dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # [B, H, N, d]
        return self.out(self.norm(y.transpose(1, 2).flatten(2)))  # [B, N, D]

    def split_heads(self, qkv: Tensor, position: LayerPosition = NO_POSITION) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values per head, [B, H, N, d] each, after the optional norm and rotation of q and k."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if position.rotation is not None:
            q, k = rotate(q, position.rotation), rotate(k, position.rotation)
        return q, k, v

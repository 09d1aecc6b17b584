"""Multi-head self-attention: MSA of equation 2, and softmax(q kᵀ / √d) v of appendix A.

B images, N tokens, D width, H heads, d = D/H.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.position import NOWHERE, Place, rotate

SHORT = 128  # tokens up to which a CPU trains faster with the attention matrix than without it


class MSA(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values.

    The N×N attention matrix is left to PyTorch's fused kernel, which never stores it. Only training on short sequences on
    a CPU goes another way, to the same result: see `ShortAttention`.
    """

    def __init__(
        self, width: int, heads: int, *, qkv_bias: bool, out_bias: bool, qk_norm: bool, dropout: float, eps: float
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else None
        self.k_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else None
        self.out = nn.Linear(width, width, bias=out_bias)

    def forward(self, x: Tensor, place: Place = NOWHERE, read: int | None = None) -> Tensor:
        """Attention of all tokens, or of the first `read` alone, to all tokens: [B, N or read, D]."""
        qkv = self.qkv(x)  # [B, N, 3D]
        if read is None and self.suits_short(qkv, place):
            return self.out(ShortAttention.apply(qkv, self.heads))
        q, k, v = self.split(qkv, place)  # each [B, H, N, d]
        bias = place.bias
        if read is not None:
            q = q[:, :, :read]
            bias = bias if bias is None else bias[:, :, :read]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # [B, H, N, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [B, N, D]

    def split(self, qkv: Tensor, place: Place = NOWHERE) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, normalised and turned where the model does so: [B, H, N, d] each."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if place.turn is not None:
            q, k = rotate(q, place.turn), rotate(k, place.turn)
        return q, k, v

    def suits_short(self, qkv: Tensor, place: Place) -> bool:
        """Whether `ShortAttention` is both possible here and the faster way."""
        return (
            qkv.device.type == "cpu"
            and qkv.shape[1] <= SHORT
            and qkv.requires_grad
            and not torch.compiler.is_compiling()
            and place.bias is None
            and place.turn is None
            and self.q_norm is None
            and not (self.training and self.dropout)
        )


class ShortAttention(torch.autograd.Function):
    """softmax(q kᵀ / √d) v for short sequences, from the packed qkv, with its derivative written out.

    For 50 tokens the fused kernel's blocks are mostly empty and autograd spends more on copying q, k and v apart than on
    multiplying them. Here they are copied once each way, and the gradients land where the packed layout wants them.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        b, n, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3 // heads
        packed = qkv.view(b, n, 3, heads, d).permute(2, 0, 3, 1, 4).reshape(3, b * heads, n, d)
        q, k, v = packed.unbind()
        scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
        attention = scores.softmax(-1)  # [B·H, N, N]
        ctx.save_for_backward(packed, attention)
        ctx.heads = heads
        return torch.bmm(attention, v).view(b, heads, n, d).transpose(1, 2).reshape(b, n, heads * d)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        packed, attention = ctx.saved_tensors
        (q, k, v), heads = packed.unbind(), ctx.heads
        n, d = q.shape[1:]
        b = q.shape[0] // heads
        dy = grads[0].reshape(b, n, heads, d).transpose(1, 2).reshape(b * heads, n, d)
        d_packed = torch.empty_like(packed)
        dq, dk, dv = d_packed.unbind()
        torch.bmm(attention.transpose(1, 2), dy, out=dv)
        d_attention = torch.bmm(dy, v.transpose(1, 2))
        # the softmax: ds = a ⊙ (da - Σ a ⊙ da), and the scale on the way
        d_scores = torch._softmax_backward_data(d_attention, attention, -1, attention.dtype).mul_(d**-0.5)
        torch.bmm(d_scores, k, out=dq)
        torch.bmm(d_scores.transpose(1, 2), q, out=dk)
        return d_packed.view(3, b, heads, n, d).permute(1, 3, 0, 2, 4).reshape(b, n, 3 * heads * d), None

"""Multi-head self-attention: MSA of equation 2, and softmax(q kᵀ / √d) v of appendix A.

B images, N tokens, D width, H heads, d values a head: D/H, unless a model says otherwise.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.position import NOWHERE, Place, rotate


class MSA(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values.

    The N×N attention matrix is left to PyTorch's fused kernel, which never stores it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        dropout: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * heads * head, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head, eps=eps) if qk_norm else None
        self.k_norm = nn.LayerNorm(head, eps=eps) if qk_norm else None
        self.out = nn.Linear(heads * head, width, bias=out_bias)

    def forward(self, x: Tensor, place: Place = NOWHERE, read: int | None = None) -> Tensor:
        """Attention of all tokens, or of the first `read` alone, to all tokens: [B, N or read, D]."""
        qkv = self.qkv(x)  # [B, N, 3·H·d]
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

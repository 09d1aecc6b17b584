"""Multi-head self-attention: MSA of equation 2, and softmax(q kᵀ / √d) v of appendix A.

B images, N tokens, D width, H heads, d the width of one head (D/H by default).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.position import NO_POSITION, LayerPosition, rotate


class MSA(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values.

    PyTorch's fused kernel computes the N×N attention matrix without storing it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool,
        dropout: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * heads * head_width, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head_width, eps=eps) if qk_norm else None
        self.k_norm = nn.LayerNorm(head_width, eps=eps) if qk_norm else None
        self.out = nn.Linear(heads * head_width, width, bias=out_bias)

    def forward(self, x: Tensor, position: LayerPosition = NO_POSITION, n_outputs: int | None = None) -> Tensor:
        """Return the attention of all tokens, or of the first `n_outputs`, to all tokens: [B, N or n_outputs, D]."""
        qkv = self.qkv(x)  # [B, N, 3·H·d]
        q, k, v = self.split_heads(qkv, position)  # each [B, H, N, d]
        bias = position.bias
        if n_outputs is not None:
            q = q[:, :, :n_outputs]
            bias = bias if bias is None else bias[:, :, :n_outputs]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)  # [B, H, N, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [B, N, D]

    def split_heads(self, qkv: Tensor, position: LayerPosition = NO_POSITION) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values per head, [B, H, N, d] each, after the optional norm and rotation of q and k."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if position.rotation is not None:
            q, k = rotate(q, position.rotation), rotate(k, position.rotation)
        return q, k, v

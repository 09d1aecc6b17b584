"""Attention of a layer as an observer needs it: which module computes it, and where its queries and keys stand.

Families differ: a Vision Transformer attends from all patches to all, Swin inside windows that may be shifted, MViT to keys
that were pooled. A family says it with these values (`Model.attention_layers`), and the analysis draws all alike.

B images, n windows of Nq queries and Nk keys, H heads.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from vitrail.nn.shape import Grid


class WindowTokens(NamedTuple):
    """Tokens of each window, by the cells of a grid over the image. Global attention is one window."""

    grid: Grid
    stride: int  # pixels along the side of a cell
    cells: Tensor  # [n, N]: the cell of each token, in reading order; -1 for padding and for a class token
    regions: Tensor  # [n, N]: a query attends to the keys of its window that have the same number


class AttentionLayer(NamedTuple):
    """Attention of one layer for images of one size."""

    module: nn.Module  # computes it in its forward pass, by a fused kernel
    compute_attention: Callable[..., Tensor]  # the weights for the same inputs, in float32, [B, n, H, Nq, Nk]
    heads: int
    queries: WindowTokens
    keys: WindowTokens
    bias_table: Callable[[], Tensor] | None = None  # learned bias by offset, query minus key, [H, 2h - 1, 2w - 1]

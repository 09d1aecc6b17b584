"""Attention over pooled tokens, and the layers of MViT (Fan et al. 2021) and MViT v2 (Li et al. 2021).

Queries, keys and values are pooled over the grid by a convolution with a stride: pooled keys and values make attention cheap
on large grids, pooled queries make the output grid smaller. Grids may have any number of axes: (h, w) for images, (t, h, w)
for clips.

B images, a grid of N tokens (after P prefix tokens), D width, H heads, d = D/H; Nq and Nk pooled tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.attention import dot_product_attention
from vitrail.nn.block import ResidualBranch
from vitrail.nn.linear import LinearLayer
from vitrail.nn.mlp import MLP
from vitrail.nn.recording import WindowTokens
from vitrail.nn.resampling import Resampling, resample_rows, resample_table
from vitrail.nn.shape import Grid

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}  # by the number of axes
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
OFFSET_RESAMPLING = Resampling("linear", antialias=False)  # of all position tables, in all projects

ResidualPooling = Literal["all", "patches", "none"]
QueryPooling = Literal["all", "strided"]
Positions = Literal["relative", "absolute"]


# --- grids ---


def pool_grid(grid: Grid, stride: Grid) -> Grid:
    """Return the grid after a convolution with this stride, an odd kernel, and half the kernel as padding."""
    return tuple(-(-side // step) for side, step in zip(grid, stride, strict=True))


def count_offsets(queries: int, keys: int) -> int:
    """Return the number of relative positions between this many queries and keys along one axis."""
    return 2 * max(queries, keys) - 1


def compute_offset_index(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Return the row of each query-key offset along one axis in a table of `count_offsets` rows, [queries, keys].

    The coarser of the two is scaled to the cells of the finer one, rounded down.
    """
    cells = max(queries, keys)
    query, key = torch.arange(queries, device=device), torch.arange(keys, device=device)
    return (query * cells // queries)[:, None] + ((keys - 1 - key) * cells // keys)[None, :]


def to_maps(x: Tensor, grid: Grid) -> Tensor:
    """Return tokens [B, N, D] as maps [B, D, *grid], a view."""
    return x.unflatten(1, grid).movedim(-1, 1)


def to_tokens(maps: Tensor) -> Tensor:
    """Return maps [B, D, *grid] as tokens [B, N, D]."""
    return maps.movedim(1, -1).flatten(1, -2)


def locate_tokens(grid: Grid, stride: int, prefix: int) -> WindowTokens:
    """Return the cells of tokens on a grid, one window, after prefix tokens without a cell."""
    cells = torch.cat((torch.full((prefix,), -1), torch.arange(math.prod(grid))))[None]
    return WindowTokens(grid, stride, cells, torch.zeros_like(cells))


# --- positions ---


def resample_cells(table: Tensor, grid: Grid) -> Tensor:
    """Return a table of the cells of a frame, [h, w, D], resampled to another grid."""
    return resample_table(table.movedim(-1, 0), grid, OFFSET_RESAMPLING).movedim(0, -1)


class SeparatePositions(nn.Module):
    """Learned positions of MViT v1, added to the tokens: the sum of a table over a frame's cells and, for clips, one over time.

    Prefix tokens have vectors of their own. Of another grid, both tables are resampled: linearly along each axis.
    """

    def __init__(self, grid: Grid, width: int, prefix: int) -> None:
        super().__init__()
        *frames, rows, columns = grid
        self.space = nn.Parameter(torch.empty(rows, columns, width))
        self.time = nn.Parameter(torch.empty(*frames, width)) if frames else None
        self.prefix = nn.Parameter(torch.empty(prefix, width)) if prefix else None

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Return tokens [B, P + N, D] with their positions added."""
        table = resample_cells(self.space, grid[-2:])  # [h, w, D]
        if self.time is not None:
            table = table + resample_rows(self.time, grid[0], OFFSET_RESAMPLING)[:, None, None]  # [t, h, w, D]
        positions = table.flatten(0, -2)
        return x + (positions if self.prefix is None else torch.cat((self.prefix, positions)))


# --- attention ---


@dataclass(frozen=True)
class PooledShape:
    """The sizes of one layer with pooled attention."""

    width: int  # of the input
    attention_width: int
    output_width: int
    heads: int
    grid: Grid  # of the input at the configured size
    kernel: Grid
    q_stride: Grid
    kv_stride: Grid
    mlp: int
    eps: float
    prefix: int = 0  # tokens before the grid
    residual_pooling: ResidualPooling = "all"
    q_pooling: QueryPooling = "all"
    positions: Positions = "relative"

    def __post_init__(self) -> None:
        if self.attention_width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.attention_width}")

    @property
    def q_grid(self) -> Grid:
        return pool_grid(self.grid, self.q_stride)

    @property
    def kv_grid(self) -> Grid:
        return pool_grid(self.grid, self.kv_stride)

    @property
    def pools_queries(self) -> bool:
        """Return whether the queries go through a convolution: in MViT v1 only where it has a stride."""
        return self.q_pooling == "all" or math.prod(self.q_stride) > 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the number of relative positions along each axis; none with absolute positions."""
        if self.positions == "absolute":
            return ()
        return tuple(count_offsets(q, k) for q, k in zip(self.q_grid, self.kv_grid, strict=True))


class HeadPool(nn.Module):
    """Pooling of queries, keys or values: a convolution per channel, the same for every head, then a norm of each head."""

    def __init__(self, shape: PooledShape, stride: Grid) -> None:
        super().__init__()
        self.heads, self.prefix = shape.heads, shape.prefix
        d = shape.attention_width // shape.heads
        padding = tuple(side // 2 for side in shape.kernel)
        convolution = CONVOLUTIONS[len(shape.kernel)]
        self.conv = convolution(d, d, shape.kernel, stride, padding, groups=d, bias=False)
        self.norm = nn.LayerNorm(d, eps=shape.eps)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Return the pooled heads [B, P + N', H, d] of tokens [B, P + N, D]; prefix tokens are not pooled."""
        conv, maps = self.conv, to_maps(x[:, self.prefix :] if self.prefix else x, grid)
        weight = conv.weight.repeat(self.heads, *[1] * (conv.weight.ndim - 1))  # all heads at once, without a copy of x
        pooled = CONVOLVE[len(grid)](maps, weight, None, conv.stride, conv.padding, conv.dilation, len(weight))
        pooled = to_tokens(pooled)
        if self.prefix:
            pooled = torch.cat((x[:, : self.prefix], pooled), 1)
        return self.norm(pooled.unflatten(-1, (self.heads, -1)))


class PooledAttention(nn.Module):
    """Multi-head attention of pooled queries to pooled keys, in MViT v2 with relative positions along each axis.

    `offsets` has a table for each axis of the grid. The bias of a query and a key is the sum over the axes of the product of
    the query and the vector of their offset along the axis (MViT v2, equation 4).
    """

    def __init__(self, shape: PooledShape, dropout: float) -> None:
        super().__init__()
        self.heads, self.prefix, self.dropout = shape.heads, shape.prefix, dropout
        self.q_stride, self.kv_stride = shape.q_stride, shape.kv_stride
        self.residual_pooling = shape.residual_pooling
        width, d = shape.attention_width, shape.attention_width // shape.heads
        self.q, self.k, self.v = (LinearLayer(shape.width, width) for _ in range(3))
        self.pool_q = HeadPool(shape, shape.q_stride) if shape.pools_queries else None
        self.pool_k = HeadPool(shape, shape.kv_stride)
        self.pool_v = HeadPool(shape, shape.kv_stride)
        self.offsets = nn.ParameterList(nn.Parameter(torch.empty(rows, d)) for rows in shape.offsets)
        self.out = LinearLayer(width, width)

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Return pooled queries [B, P + Nq, H, d] and pooled keys and values [B, P + Nk, H, d]."""
        q = self.q(x)
        q = q.unflatten(-1, (self.heads, -1)) if self.pool_q is None else self.pool_q(q, grid)
        return q, self.pool_k(self.k(x), grid), self.pool_v(self.v(x), grid)

    def compute_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """Return the relative positions' part of q·k, [B, H, P + Nq, P + Nk]: zero for prefix tokens.

        q is [B, P + Nq, H, d]; the tables are resampled if the grid is not the configured one. None with absolute positions.
        """
        if not self.offsets:
            return None
        q_grid, k_grid = pool_grid(grid, self.q_stride), pool_grid(grid, self.kv_stride)
        axes = len(grid)
        cells = (q[:, self.prefix :] if self.prefix else q).unflatten(1, q_grid)  # [B, *q_grid, H, d]
        bias = None
        for axis, (queries, keys) in enumerate(zip(q_grid, k_grid, strict=True)):
            table = resample_rows(self.offsets[axis], count_offsets(queries, keys), OFFSET_RESAMPLING)
            vectors = table[compute_offset_index(queries, keys, table.device)].to(q.dtype)  # [queries, keys, d]
            lines = cells.movedim(axis + 1, 0)  # [queries, B, …, H, d]
            product = torch.bmm(lines.flatten(1, -2), vectors.transpose(1, 2))
            product = product.unflatten(1, lines.shape[1:-1]).movedim(0, axis + 1)  # [B, *q_grid, H, keys]
            product = product.movedim(-2, 1).flatten(2, -2)  # [B, H, Nq, keys]
            product = product.reshape(*product.shape[:3], *[keys if a == axis else 1 for a in range(axes)])
            bias = product if bias is None else bias + product
        assert bias is not None
        return F.pad(bias.flatten(3), (self.prefix, 0, self.prefix, 0)) if self.prefix else bias.flatten(3)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Return the attention of tokens [B, P + N, D] on a grid, [B, P + Nq, D']."""
        q, k, v = self.project(x, grid)
        bias, dropout = self.compute_bias(q, grid), self.dropout if self.training else 0.0
        y = dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), attn_mask=bias, dropout_p=dropout
        ).transpose(1, 2)
        if self.residual_pooling == "all" or (self.residual_pooling == "patches" and not self.prefix):
            y = y + q
        elif self.residual_pooling == "patches":
            y = torch.cat((y[:, : self.prefix], y[:, self.prefix :] + q[:, self.prefix :]), 1)
        return self.out(y.flatten(2))

    def compute_attention(self, x: Tensor, grid: Grid) -> Tensor:
        """Return the attention weights for inputs of `forward` in float32, [B, 1, H, P + Nq, P + Nk]: one window."""
        q, k, _v = self.project(x, grid)
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float().transpose(1, 2) * q.shape[-1] ** -0.5 @ k.float().permute(0, 2, 3, 1)
            bias = self.compute_bias(q, grid)
            return (scores if bias is None else scores + bias.float()).softmax(-1).unsqueeze(1)


# --- layers ---


class MultiscaleBlock(nn.Module):
    """One layer of MViT: equations 2 and 3 of the ViT with pooled attention, a pooled skip and, between stages, more width.

    The width grows in the attention or in the MLP; the skip then starts at the norm and has a projection.
    """

    def __init__(self, shape: PooledShape, dropout: float, attention_dropout: float, stochastic_depth: float) -> None:
        super().__init__()
        self.prefix, self.stride = shape.prefix, shape.q_stride
        width, inner, output = shape.width, shape.attention_width, shape.output_width
        self.norm1 = nn.LayerNorm(width, eps=shape.eps)
        self.skip1 = LinearLayer(width, inner) if inner != width else None
        self.msa = PooledAttention(shape, attention_dropout)
        self.branch1 = ResidualBranch(inner, dropout, None, stochastic_depth)
        self.norm2 = nn.LayerNorm(inner, eps=shape.eps)
        self.skip2 = LinearLayer(inner, output) if output != inner else None
        self.mlp = MLP(inner, shape.mlp, nn.GELU(), dropout)
        if output != inner:
            self.mlp.fc2 = LinearLayer(shape.mlp, output)
        self.branch2 = ResidualBranch(output, dropout, None, stochastic_depth)

    def pool_skip(self, x: Tensor, grid: Grid) -> Tensor:
        """Return the largest values around every pooled query, [B, P + Nq, D]; prefix tokens are not pooled."""
        if math.prod(self.stride) == 1:
            return x
        kernel = tuple(step + 1 if step > 1 else 1 for step in self.stride)
        maps = to_maps(x[:, self.prefix :] if self.prefix else x, grid)
        maps = MAX_POOL[len(grid)](maps, kernel, self.stride, tuple(side // 2 for side in kernel))
        return torch.cat((x[:, : self.prefix], to_tokens(maps)), 1) if self.prefix else to_tokens(maps)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # [B, P + N, D] on a grid
        y = self.norm1(x)
        skip = self.pool_skip(x if self.skip1 is None else self.skip1(y), grid)
        x = skip + self.branch1(self.msa(y, grid))
        y = self.norm2(x)
        return (x if self.skip2 is None else self.skip2(y)) + self.branch2(self.mlp(y))

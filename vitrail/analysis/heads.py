"""Statistics of one layer's attention, computed from a few rows (queries) at a time, and attention rollout over layers.

H heads, T tokens, d values per head, h×w patches, N of them, r rows: the queries processed together.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.nn.shape import Grid

CHUNK = 2**22  # attention weights in memory at a time: 16 MiB
MAX_COMPARED_QUERIES = 512  # evenly spaced, for the similarity of heads
MAX_CELLS = 256  # for 12 heads of 12 layers this is 19 MB of a page


class LayerHeads(NamedTuple):
    """Queries, keys and position bias of one layer, from which its attention is computed."""

    q: Tensor  # [..., H, T, d]
    k: Tensor  # [..., H, T, d]
    bias: Tensor | None  # [..., H, T, T]

    def attention(self, queries: slice | list[int] = slice(None)) -> Tensor:
        """Return softmax(q kᵀ / √d + bias) of these queries in float32, [..., H, r, T]."""
        q, k = self.q[..., queries, :].float(), self.k.float()
        with torch.autocast(q.device.type, enabled=False):
            scores = (q * self.q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            if self.bias is not None:
                scores += self.bias[..., queries, :].float()
            return scores.softmax(-1)

    def select_image(self, index: int) -> "LayerHeads":
        """Return those of one image of a batch, [H, T, d]."""
        bias = self.bias
        if bias is not None:
            bias = bias[index if bias.shape[0] > 1 else 0]
        return LayerHeads(self.q[index], self.k[index], bias)

    def iter_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the attention in chunks of rows: their slice, and [H, r, T]."""
        heads, tokens, _ = self.q.shape
        step = max(1, CHUNK // (heads * tokens))
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            yield rows, self.attention(rows)


def row_entropies(attention: Tensor) -> Tensor:
    """Return the entropy of each row in nats, [..., T] to [...]."""
    return -(attention.clamp_min(1e-30).log() * attention).sum(-1)


class MeanEntropy:
    """Mean entropy over queries of each head: log T for uniform attention, 0 for attention to one token."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.total = torch.zeros(heads, device=device)
        self.queries = 0

    def update(self, rows: slice, attention: Tensor) -> None:
        self.total += row_entropies(attention).sum(1)
        self.queries += attention.shape[1]

    def compute(self) -> Tensor:  # [H]
        return self.total / self.queries


class HeadSimilarity:
    """1 − Jensen-Shannon divergence (bits) of the attention of two heads, the mean over queries.

    1 for equal attention, 0 for attention to disjoint tokens. At most 512 evenly spaced queries are compared: there are H²
    pairs, and neighbouring queries attend alike.
    """

    def __init__(self, heads: int, tokens: int, device: torch.device) -> None:
        self.query_step = math.ceil(tokens / MAX_COMPARED_QUERIES)
        self.total = torch.zeros(heads, heads, device=device)
        self.queries = 0

    def update(self, rows: slice, attention: Tensor) -> None:
        attention = attention[:, -rows.start % self.query_step :: self.query_step]  # [H, r, T]
        separate = row_entropies(attention)  # [H, r]
        for head in range(len(attention) - 1):
            others = slice(head + 1, None)
            mixed = row_entropies((attention[head] + attention[others]) / 2)
            divergence = (mixed - (separate[head] + separate[others]) / 2).sum(1) / math.log(2)
            self.total[head, others] += divergence
            self.total[others, head] += divergence
        self.queries += attention.shape[1]

    def compute(self) -> Tensor:  # [H, H]
        return (1 - self.total / self.queries).clamp(0, 1)


def select_patches(rows: slice, attention: Tensor, prefix: int) -> tuple[Tensor, slice]:
    """Return the attention of patches to patches, [H, r, T] to [H, up to r, N], and which patches the queries are."""
    first = max(rows.start, prefix)
    attention = attention[:, first - rows.start :, prefix:]
    return attention, slice(first - prefix, first - prefix + attention.shape[1])


class HeadDiversity:
    """1 − cosine similarity of the attention of two heads, the mean over queries and over the other heads.

    0 if all heads are equal, 1 if they attend to disjoint patches; NaN for a single head.
    """

    def __init__(self, heads: int, prefix: int, device: torch.device) -> None:
        self.prefix, self.queries = prefix, 0
        self.total = torch.zeros(heads, heads, device=device)

    def update(self, rows: slice, attention: Tensor) -> None:
        """Add some rows, [H, r, T]."""
        unit = F.normalize(select_patches(rows, attention, self.prefix)[0], dim=-1)
        self.queries += unit.shape[1]
        self.total += unit.flatten(1) @ unit.flatten(1).T  # cosines, summed over queries

    def compute(self) -> Tensor:  # [H]
        others = self.total.sum(1) - self.total.diagonal()
        return (1 - others / (self.queries * (len(others) - 1))).clamp(0, 1)


class MutualInformation:
    """Normalised mutual information of query and key, I(q; k) / √(H(q) H(k)), for uniformly distributed queries.

    0 if all queries have the same attention, 1 if each attends to one patch of its own.
    """

    def __init__(self, heads: int, patches: int, prefix: int, device: torch.device) -> None:
        self.prefix, self.patches = prefix, patches
        self.keys = torch.zeros(heads, patches, device=device)  # p(k), times N
        self.conditional_entropy = torch.zeros(heads, device=device)  # H(k | q), times N

    def update(self, rows: slice, attention: Tensor) -> None:
        """Add some rows, [H, r, T]."""
        attention, _ = select_patches(rows, attention, self.prefix)
        share = attention / attention.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        self.keys += share.sum(1)
        self.conditional_entropy += row_entropies(share).sum(1)

    def compute(self) -> Tensor:  # [H]
        key_entropy = row_entropies(self.keys / self.patches)
        scale = (math.log(self.patches) * key_entropy).sqrt()
        information = (key_entropy - self.conditional_entropy / self.patches).clamp_min(0)
        # If all queries attend to one patch, information and scale are 0.
        return torch.where(scale > 1e-6, information / scale.clamp_min(1e-6), 0.0).clamp_max(1)


def patch_centres(grid: Grid, stride: int, device: torch.device) -> Tensor:
    """Return row and column of every patch centre in pixels, [N, 2]."""
    y, x = torch.meshgrid(*(torch.arange(n, device=device, dtype=torch.float32) for n in grid), indexing="ij")
    return (torch.stack((y, x), -1).flatten(0, 1) + 0.5) * stride


class MeanDistance:
    """Mean attention distance of each head in pixels (figure 7, right).

    For each query patch, the distances to all patches are weighted by attention; then the mean over queries is taken. Prefix
    tokens have no position: they are left out on both sides, and attention among patches is renormalised to sum to 1. Without
    that, a head that attends mostly to the class token would seem to have a short distance.
    """

    def __init__(self, heads: int, grid: Grid, stride: int, prefix: int, device: torch.device) -> None:
        self.prefix, self.centres = prefix, patch_centres(grid, stride, device)
        self.total = torch.zeros(heads, device=device)

    def update(self, rows: slice, attention: Tensor) -> None:
        """Add some rows, [H, r, T]."""
        attention, queries = select_patches(rows, attention, self.prefix)
        distance = (self.centres[queries, None] - self.centres[None]).square_().sum(-1).sqrt_()  # [r, N]
        total = attention.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.total += ((attention * distance).sum(-1) / total).sum(1)

    def compute(self) -> Tensor:  # [H]
        return self.total / len(self.centres)


def coarsen_grid(grid: Grid, max_cells: int = MAX_CELLS) -> tuple[Grid, int]:
    """Return a grid of at most `max_cells` cells, and the number of patches along the side of a cell."""
    if max_cells < 1:
        raise ValueError(f"max_cells must be >= 1, got {max_cells}")
    h, w = grid
    side = 1
    while math.ceil(h / side) * math.ceil(w / side) > max_cells:
        side += 1
    return (math.ceil(h / side), math.ceil(w / side)), side


class CellAttention:
    """Attention of every cell to every cell, for each head: summed over keys, averaged over queries."""

    def __init__(self, heads: int, grid: Grid, prefix: int, max_cells: int, device: torch.device) -> None:
        self.prefix, self.grid = prefix, grid
        self.cells, self.side = coarsen_grid(grid, max_cells)
        a, b = self.cells
        self.total = torch.zeros(a * b, heads, a * b, device=device)
        y, x = (torch.arange(n, device=device) // self.side for n in grid)
        self.cell_of_patch = (y[:, None] * b + x[None]).flatten()  # [N]
        self.row_pooling, self.column_pooling = F.one_hot(y, a).T.float(), F.one_hot(x, b).float()  # [a, h], [w, b]

    def update(self, rows: slice, attention: Tensor) -> None:
        """Add some rows, [H, r, T]."""
        attention, queries = select_patches(rows, attention, self.prefix)
        if self.side > 1:
            pooled = self.row_pooling @ (attention.unflatten(-1, self.grid) @ self.column_pooling)
            attention = pooled.flatten(-2)  # [H, r, n]
        self.total.index_add_(0, self.cell_of_patch[queries], attention.transpose(0, 1))

    def compute(self) -> Tensor:  # [H, n, n]
        return (self.total / self.cell_of_patch.bincount()[:, None, None]).transpose(0, 1)


class Rollout:
    """Attention rollout (Abnar and Zuidema 2020; figure 6 and appendix D.7 of the ViT paper).

    Each layer's matrix is 0.5 A + 0.5 I with A the mean over heads; the product over layers says how much of each input token
    reaches the reader. Its row of the reader is computed by a vector from the last layer to the first, without T×T matrices.
    """

    def __init__(self, reader: Tensor) -> None:
        self.row = reader  # [T], sums to 1
        self._next = torch.zeros_like(reader)

    def update(self, rows: slice, attention: Tensor) -> None:
        """Add some rows of this layer, [H, r, T]."""
        self._next += self.row[rows] @ attention.mean(0)

    def next_layer(self) -> None:
        """Finish this layer and go to the one below."""
        self.row = 0.5 * self.row + 0.5 * self._next  # rows of A sum to 1, so those of 0.5 A + 0.5 I do
        self._next = torch.zeros_like(self.row)


class Relevance:
    """Gradient-weighted relevance of the input tokens for the reader: R + mean over heads of (A · dA)⁺ R, layer by layer."""

    def __init__(self, reader: Tensor) -> None:
        self.row = reader  # [T]
        self._next = torch.zeros_like(reader)

    def update(self, rows: slice, attention: Tensor, gradient: Tensor) -> None:
        """Add some rows of this layer and the gradient by them, [H, r, T] each."""
        self._next += self.row[rows] @ (attention * gradient).clamp_min_(0).mean(0)

    def next_layer(self) -> None:
        """Finish this layer and go to the one below."""
        self.row = self.row + self._next
        self._next = torch.zeros_like(self.row)

"""What the heads of one layer attend to, a few queries at a time, and how their attention differs.

H heads, T tokens, d values a head, r rows: the queries that are looked at together.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**22  # numbers of attention in memory at a time: 16 MiB
QUERIES = 512  # at most so many are compared between heads, evenly spaced


class Heads(NamedTuple):
    """Queries and keys of one layer, and the bias of its positions: all that attention is made of."""

    q: Tensor  # [..., H, T, d]
    k: Tensor  # [..., H, T, d]
    bias: Tensor | None  # [..., H, T, T]

    def attention(self, queries: slice | list[int] = slice(None)) -> Tensor:
        """softmax(q kᵀ / √d + bias) of these queries, in float32: [..., H, r, T]."""
        q, k = self.q[..., queries, :].float(), self.k.float()
        with torch.autocast(q.device.type, enabled=False):
            scores = (q * self.q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            if self.bias is not None:
                scores += self.bias[..., queries, :].float()
            return scores.softmax(-1)

    def picture(self, index: int) -> "Heads":
        """Those of one picture of a batch, [H, T, d]."""
        bias = self.bias
        if bias is not None:
            bias = bias[index if bias.shape[0] > 1 else 0]
        return Heads(self.q[index], self.k[index], bias)

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """All of attention, some rows after the others: where they are, and [H, r, T]."""
        heads, tokens, _ = self.q.shape
        step = max(1, CHUNK // (heads * tokens))
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            yield rows, self.attention(rows)


def entropies(attention: Tensor) -> Tensor:
    """Entropy in nats of each row: [..., T] to [...]."""
    return -(attention.clamp_min(1e-30).log() * attention).sum(-1)


class Entropy:
    """The mean entropy over all queries, for each head: log T where a head looks everywhere alike, 0 where at one token."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.total = torch.zeros(heads, device=device)
        self.queries = 0

    def see(self, rows: slice, attention: Tensor) -> None:
        self.total += entropies(attention).sum(1)
        self.queries += attention.shape[1]

    def result(self) -> Tensor:  # [H]
        return self.total / self.queries


class Alike:
    """1 minus the Jensen-Shannon divergence in bits between two heads' attention, the mean over queries.

    1 for heads that attend alike, 0 for those that never look at the same token. Among more than 512 queries, every so
    many-th is compared: there are H² pairs, and neighbouring queries say much the same.
    """

    def __init__(self, heads: int, tokens: int, device: torch.device) -> None:
        self.every = math.ceil(tokens / QUERIES)
        self.total = torch.zeros(heads, heads, device=device)
        self.queries = 0

    def see(self, rows: slice, attention: Tensor) -> None:
        attention = attention[:, -rows.start % self.every :: self.every]  # [H, r, T]
        alone = entropies(attention)  # [H, r]
        for head in range(len(attention) - 1):
            others = slice(head + 1, None)
            together = entropies((attention[head] + attention[others]) / 2)
            divergence = (together - (alone[head] + alone[others]) / 2).sum(1) / math.log(2)
            self.total[head, others] += divergence
            self.total[others, head] += divergence
        self.queries += attention.shape[1]

    def result(self) -> Tensor:  # [H, H]
        return (1 - self.total / self.queries).clamp(0, 1)

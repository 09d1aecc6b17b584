"""Attention rollout (Abnar & Zuidema 2020; figure 6 and appendix D.7 of the ViT paper): where the reader's input comes from.

Heads are averaged, half of each token stays with itself (the residual), and the layers are multiplied: the product's row of the
reader says how much of each token of the input reaches it. One row of a product is had by going back through the layers with a
vector, so no T×T matrix is kept.

H heads, T tokens, r rows.
"""

import torch
from torch import Tensor


class Rollout:
    """The reader's row, carried from the last layer to the first."""

    def __init__(self, reader: Tensor) -> None:
        self.row = reader  # [T], sums to 1
        self._next = torch.zeros_like(reader)

    def see(self, rows: slice, attention: Tensor) -> None:
        """Some rows of this layer, [H, r, T]."""
        self._next += self.row[rows] @ attention.mean(0)

    def descend(self) -> None:
        """All rows of this layer were seen: on to the one below."""
        self.row = 0.5 * self.row + 0.5 * self._next  # rows of attention sum to 1, so those of 0.5 A + 0.5 I do
        self._next = torch.zeros_like(self.row)

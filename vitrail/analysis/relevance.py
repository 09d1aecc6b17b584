"""Gradient-weighted relevance (Chefer et al. 2021, "Generic Attention-model Explainability", equations 5 and 6).

R ← R + E_h[(∇A ⊙ A)⁺] R over the layers, from R = I: what in the attention speaks for a class is followed back to the patches.
As with rollout, the reader's row of R is a vector carried from the last layer to the first.

H heads, T tokens, r rows.
"""

import torch
from torch import Tensor


class Relevance:
    """The reader's row of R."""

    def __init__(self, reader: Tensor) -> None:
        self.row = reader  # [T]
        self._next = torch.zeros_like(reader)

    def see(self, rows: slice, attention: Tensor, gradient: Tensor) -> None:
        """Some rows of this layer and the gradient by them, [H, r, T] each."""
        self._next += self.row[rows] @ (attention * gradient).clamp_min_(0).mean(0)

    def descend(self) -> None:
        """All rows of this layer were seen: on to the one below."""
        self.row = self.row + self._next
        self._next = torch.zeros_like(self.row)

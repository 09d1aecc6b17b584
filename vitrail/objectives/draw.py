"""Chance for one global batch: the same for each of its pictures, whichever process or part of a step computes it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """The rows `first` to `first + count` of what is drawn for a step's whole batch of `total` pictures.

    Whoever computes a part of the batch draws for all of it and takes its own rows, so a run does not depend on how many
    processes share a batch, nor on how many parts each splits its own into.
    """

    seed: int
    step: int
    first: int
    count: int
    total: int
    device: torch.device

    def uniform(self, columns: int, stream: int) -> Tensor:
        """[count, columns] between 0 and 1. Different streams of a step are independent."""
        return self._mine(self._generator(stream).random((self.total, columns), dtype=np.float32))

    def beta(self, alpha: float, stream: int) -> Tensor:
        """[count] from Beta(alpha, alpha), as mixup draws its proportions."""
        return self._mine(self._generator(stream).beta(alpha, alpha, self.total).astype(np.float32))

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, self.step * 64 + stream]))

    def _mine(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows[self.first : self.first + self.count]).to(self.device)

"""Exponential moving averages of many tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def move_averages(averages: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Move averages towards values by a fraction, in one call for all plain tensors and one for all sharded ones."""
    for kind in {type(average.detach()) for average in averages}:
        chosen = [(a, v) for a, v in zip(averages, values, strict=True) if type(a.detach()) is kind]
        old, new = ([tensor.detach() for tensor in column] for column in zip(*chosen, strict=True))
        converted = [value.to(average.dtype) for average, value in zip(old, new, strict=True)]
        torch._foreach_lerp_(old, converted, weight)  # pyright: ignore[reportPrivateImportUsage]

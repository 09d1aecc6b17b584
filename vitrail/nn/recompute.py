"""Activation checkpointing: a block's values are kept for the backward pass, or computed again there."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run(block: nn.Module, recompute: bool, *arguments: object) -> Tensor:
    """One block, kept or to be computed again."""
    if recompute and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(block, *arguments, use_reentrant=False))
    return block(*arguments)


class Stack(nn.Sequential):
    """Blocks one after the other, each kept or to be computed again."""

    recompute = False

    def forward(self, input: Tensor) -> Tensor:
        for block in self:
            input = run(block, self.recompute, input)
        return input


class Recomputing(nn.Module):
    """A model with a switch for all of its blocks."""

    recompute = False

    @property
    def activation_checkpointing(self) -> bool:
        """Compute each block again in the backward pass instead of keeping what it computed: less memory, more time."""
        return self.recompute

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: bool) -> None:
        for module in self.modules():
            if isinstance(module, (Recomputing, Stack)):
                module.recompute = value

"""The tokens before the patches: x_class of equation 1, and those that follow-ups added to it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class PrefixTokens(nn.Module):
    """Learned tokens, the same for every image: first those that are read in the end, then registers."""

    def __init__(self, outputs: int, registers: int, width: int) -> None:
        super().__init__()
        self.outputs = nn.Parameter(torch.empty(1, outputs, width)) if outputs else None
        self.registers = nn.Parameter(torch.empty(1, registers, width)) if registers else None

    def before(self, x: Tensor) -> Tensor:
        """The sequence [prefix; x], [B, T, D]."""
        parts = [part.expand(x.shape[0], -1, -1) for part in (self.outputs, self.registers) if part is not None]
        return torch.cat((*parts, x), 1) if parts else x


@dataclass(frozen=True)
class Prefix:
    """How many tokens stand before the patches."""

    outputs: int = 1  # 1: the class token; 2: and DeiT's distillation token
    registers: int = 0  # "Vision Transformers Need Registers": room for the model, read by nobody

    def __post_init__(self) -> None:
        if self.outputs not in (0, 1, 2):
            raise ValueError(f"{self.outputs} output tokens: 0 for none, 1 for class, 2 for class and distillation")
        if self.registers < 0:
            raise ValueError(f"{self.registers} registers: give 0 or more")

    @property
    def count(self) -> int:
        return self.outputs + self.registers

    def build(self, width: int) -> PrefixTokens:
        return PrefixTokens(self.outputs, self.registers, width)

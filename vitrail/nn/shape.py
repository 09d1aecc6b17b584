"""The sizes that all parts of one model share."""

import math
from dataclasses import dataclass
from typing import NamedTuple

Grid = tuple[
    int, ...
]  # patches along each side: rows and columns of an image, or steps in time, rows and columns of a clip


class FeatureShape(NamedTuple):
    """The sizes of a feature map that do not depend on the image."""

    channels: int
    stride: int  # pixels per cell


@dataclass(frozen=True)
class EncoderShape:
    """The sizes that each part of an encoder is built for."""

    width: int  # D
    depth: int  # L
    heads: int
    grid: Grid  # patches at the configured image size
    mlp: int  # width of the MLP
    outputs: int = 0  # prefix tokens that the pooling reads: class, distillation
    registers: int = 0  # prefix tokens that it does not read
    eps: float = 1e-6  # of every LayerNorm
    head: int | None = None  # width of one head; None: width / heads

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "mlp"):
            if getattr(self, name) < 1:
                label = "MLP width" if name == "mlp" else name
                raise ValueError(f"{label} must be at least 1, got {getattr(self, name)}")
        if self.head is not None and self.head < 1:
            raise ValueError(f"head width must be at least 1, got {self.head}")
        if self.head is None and self.width % self.heads:
            small = [h for h in range(1, math.isqrt(self.width) + 1) if self.width % h == 0]
            near = sorted({*small, *(self.width // h for h in small)}, key=lambda h: abs(h - self.heads))
            heads, width = " or ".join(map(str, near[:2])), self.heads * max(1, round(self.width / self.heads))
            problem = f"{self.heads} heads do not divide the width {self.width}"
            raise ValueError(f"{problem}: use {heads} heads, or the width {width}")

    @property
    def head_width(self) -> int:
        """Return d, the width of one head."""
        return self.width // self.heads if self.head is None else self.head

    @property
    def prefix(self) -> int:
        """Return the number of tokens before the patches."""
        return self.outputs + self.registers

    @property
    def patches(self) -> int:
        return math.prod(self.grid)

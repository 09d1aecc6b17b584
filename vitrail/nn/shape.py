"""What the parts of one model have to agree on."""

import math
from dataclasses import dataclass

Grid = tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True)
class Shape:
    """The sizes that a part is built for."""

    width: int  # D
    depth: int  # L
    heads: int
    grid: Grid  # patches of the image size the model is made for
    mlp: int  # width of the MLP
    outputs: int = 0  # prefix tokens that are read in the end: class, distillation
    registers: int = 0  # prefix tokens that are not
    eps: float = 1e-6  # of every LayerNorm
    head: int | None = None  # values of a head, where heads are not to share the width among them

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "mlp"):
            if getattr(self, name) < 1:
                label = "MLP width" if name == "mlp" else name
                raise ValueError(f"{label} is {getattr(self, name)}: it must be at least 1")
        if self.head is not None and self.head < 1:
            raise ValueError(f"{self.head} values a head: give at least 1")
        if self.head is None and self.width % self.heads:
            small = [h for h in range(1, math.isqrt(self.width) + 1) if self.width % h == 0]
            near = sorted({*small, *(self.width // h for h in small)}, key=lambda h: abs(h - self.heads))
            raise ValueError(
                f"{self.heads} heads do not divide the width {self.width}: use {' or '.join(map(str, near[:2]))} heads, "
                f"or the width {self.heads * max(1, round(self.width / self.heads))}"
            )

    @property
    def head_width(self) -> int:
        """d, the values of one head."""
        return self.width // self.heads if self.head is None else self.head

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return self.outputs + self.registers

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

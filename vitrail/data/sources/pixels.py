"""Pictures of one size that live in memory."""

from dataclasses import dataclass

import numpy as np
from PIL import Image


@dataclass(frozen=True, eq=False)
class Pixels:
    """A store in memory: every picture is a slice of one array."""

    pixels: np.ndarray  # uint8, [n, H, W] for grey or [n, H, W, 3]
    origins: tuple[tuple[int, str], ...]  # where each file's pictures begin, and the file

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, item: int) -> str:
        start, file = next((start, file) for start, file in reversed(self.origins) if start <= item)
        return f"{file}[{item - start}]"

    def open(self, item: int) -> Image.Image:
        return Image.fromarray(self.pixels[item])

    def data(self, item: int) -> bytes:
        return self.pixels[item].tobytes()

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None

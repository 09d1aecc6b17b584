"""A picture as the model saw it, beside what was seen of its way through the model."""

from dataclasses import dataclass

import numpy as np

from vitrail.analysis.seen import Seen

Said = tuple[int, str, float]  # a class, its name, its probability


@dataclass(frozen=True)
class Shown:
    """One picture to draw."""

    name: str
    pixels: np.ndarray  # uint8 [H, W, 3]: resized and cropped, before it is normalised
    seen: Seen
    labels: tuple[str, ...] | None = None  # of the model's classes
    model: str = ""  # what to call the model
    channels: int = 3  # of the picture, as the model takes it
    linear: bool = True  # a patch becomes a token by one matrix, and not by convolutions
    each: bool = False  # the model was trained to judge each class by itself: its probabilities do not sum to 1

    def label(self, index: int) -> str:
        """The name of a class, or its number."""
        return self.labels[index] if self.labels and index < len(self.labels) else f"class {index}"

    def said(self, most: int = 3) -> list[Said]:
        """The likeliest classes, the likeliest first; none for a model that ends in features."""
        if self.seen.logits is None:
            return []
        logits = self.seen.logits.astype(np.float64)
        if self.each:
            odds = 1 / (1 + np.exp(-logits.clip(-60, 60)))
        else:
            odds = np.exp(logits - logits.max())
            odds /= odds.sum()
        return [(int(k), self.label(int(k)), float(odds[k])) for k in np.argsort(-odds, kind="stable")[:most]]

    @property
    def verdict(self) -> str:
        """The likeliest class with its probability, in words."""
        return "".join(f"{name}, {100 * odds:.0f} %" for _, name, odds in self.said(1))

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """The chosen patch as left, top, width and height, in shares of the picture."""
        if self.seen.at is None:
            return None
        (row, column), (h, w) = self.seen.at, self.seen.grid
        return column / w, row / h, 1 / w, 1 / h


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """uint8 [C, H, W] of 1, 3 or 4 channels as [H, W, 3]; of other numbers the mean, in grey."""
    if pixels.shape[0] in (3, 4):
        return np.ascontiguousarray(pixels[:3].transpose(1, 2, 0))
    grey = pixels[0] if pixels.shape[0] == 1 else pixels.mean(0).round().astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2)

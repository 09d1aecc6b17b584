"""Pictures of what a task that hides patches sees and tells, for people to look at.

B pictures of C channels, N patches in a grid of h×w, P pixels along each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.nn.shape import Grid
from vitrail.objectives.draw import Draw


class Guess(NamedTuple):
    """Patches as the model takes them, normalised, [B, N, C·P²]: what stood there for it to see, where nothing did
    (`hidden`, [B, N]), and what it told."""

    seen: Tensor
    hidden: Tensor
    told: Tensor


class Guesses(Protocol):
    """A task that can show what it told."""

    def guess(self, images: Tensor, draw: Draw) -> Guess: ...


@dataclass(frozen=True)
class Reconstruction:
    """Pictures as bytes, uint8 [B, C, H, W] each: hidden patches are grey in `masked`."""

    original: Tensor
    masked: Tensor
    reconstructed: Tensor


def reconstruct(
    task: Guesses, images: Tensor, draw: Draw, mean: Sequence[float], std: Sequence[float]
) -> Reconstruction:
    """What a task makes of normalised pictures [B, C, H, W], back in colours. The task should be in evaluation mode."""
    guess, (_, c, height, width) = task.guess(images, draw), images.shape
    patch = round((guess.seen.shape[2] // c) ** 0.5)
    grid = (height // patch, width // patch)
    scale, shift = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (std, mean))
    masked = bytes_of(assembled(guess.seen, grid, c) * scale + shift)
    grey = assembled(guess.hidden.unsqueeze(-1).expand(-1, -1, guess.seen.shape[2]), grid, c)
    return Reconstruction(
        original=bytes_of(images * scale + shift),
        masked=masked.masked_fill(grey, 128),
        reconstructed=bytes_of(assembled(guess.told, grid, c) * scale + shift),
    )


def assembled(patches: Tensor, grid: Grid, channels: int) -> Tensor:
    """The picture that `patchify` cut, from its patches [B, N, C·P²]."""
    b, (h, w) = patches.shape[0], grid
    patch = round((patches.shape[2] // channels) ** 0.5)
    x = patches.reshape(b, h, w, channels, patch, patch).permute(0, 3, 1, 4, 2, 5)  # [B, C, h, P, w, P]
    return x.reshape(b, channels, h * patch, w * patch)


def bytes_of(pixels: Tensor) -> Tensor:
    """Values between 0 and 1 as bytes; what lies outside is cut off."""
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)

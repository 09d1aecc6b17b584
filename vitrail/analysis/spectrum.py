"""The Fourier spectrum of token maps (Park & Kim 2022, "How Do Vision Transformers Work?", figure 2 of theirs).

Attention smooths: the high frequencies of its output fade with depth, where convolutions sharpen. Shown is, as in their code, the
log amplitude along the diagonal, averaged over channels, less that of frequency 0.

h×w patches, D width, F frequencies.
"""

import torch
from torch import Tensor

from vitrail.nn.shape import Grid


def frequencies(grid: Grid) -> Tensor:
    """From 0 up to 1, in units of pi for a step of one patch: those of the grid's shorter side, [F]."""
    short = min(grid)
    return torch.arange(short // 2 + 1) * 2 / short


def spectrum(tokens: Tensor, grid: Grid) -> Tensor:
    """Relative log amplitude by frequency, [N, D] to [F].

    The diagonal has equal frequencies in rows and columns. Where the grid is not square, the longer side has none at exactly
    these; there the two next to it are weighed.
    """
    maps = tokens.float().T.unflatten(1, grid)  # [D, h, w]
    amplitude = (torch.fft.fft2(maps).abs() + 1e-6).log().mean(0)  # [h, w]
    at = frequencies(grid).to(amplitude.device)
    for side in grid:  # first rows, then columns, come to the end and to the wanted frequencies
        place = at * side / 2
        low = place.floor().long()
        weight = (place - low)[:, None]
        amplitude = amplitude[low % side] * (1 - weight) + amplitude[(low + 1) % side] * weight
        amplitude = amplitude.T
    diagonal = amplitude.diagonal()
    return diagonal - diagonal[0]

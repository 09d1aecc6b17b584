"""Maps of one layer's patch tokens: principal components as colours, similarity to one token, norm, spectrum.

N patches, D width.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.nn.shape import Grid


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a float32 array on the CPU."""
    return tensor.detach().float().cpu().numpy()


def principal_components(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first principal directions of rows [N, D] and their fractions of the variance, [count, D] and [count].

    The sign of a direction is arbitrary; here its largest entry is positive. There are at most min(N, D).
    """
    centred = (values - values.mean(0)).double()
    if len(centred) > centred.shape[1]:  # the covariance matrix is smaller
        variance, columns = torch.linalg.eigh(centred.T @ centred)
        variance, directions = variance.flip(0).clamp_min(0), columns.T.flip(0)
    else:
        _, lengths, directions = torch.linalg.svd(centred, full_matrices=False)
        variance = lengths.square()
    directions = directions[:count]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    share = variance[:count] / variance.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return directions.float(), share.float()


def token_colours(tokens: Tensor) -> Tensor:
    """Return three principal components as red, green and blue, [N, D] to [N, 3] in 0…1.

    Each layer has its own components, each scaled so that 98 % of its values lie between 0 and 1, because few tokens with
    very large values would leave the others grey. Constant components are 0.5.
    """
    tokens = tokens.float()
    directions, _ = principal_components(tokens, 3)
    scores = (tokens - tokens.mean(0)) @ directions.T  # [N, up to 3]
    low, high = scores.quantile(torch.tensor([0.01, 0.99], device=scores.device), 0)
    span = high - low
    flat = span <= 1e-6 * tokens.norm(dim=-1).mean()
    scaled = torch.where(flat, 0.5, (scores - low) / torch.where(flat, 1.0, span))
    return F.pad(scaled.clamp(0, 1), (0, 3 - scaled.shape[1]), value=0.5)


def token_similarity(tokens: Tensor, index: int) -> Tensor:
    """Return the cosine similarity of every token with one of them, [N]."""
    return F.cosine_similarity(tokens.float(), tokens[index].float()[None], dim=-1)


def token_norms(tokens: Tensor) -> Tensor:
    """Return the norm of every token, [N, D] to [N]; registers and artefacts have large norms."""
    return tokens.float().norm(dim=-1)


def grid_frequencies(grid: Grid) -> Tensor:
    """Return the frequencies of the grid's shorter side, [F], from 0 to 1 in units of pi per patch."""
    short = min(grid)
    return torch.arange(short // 2 + 1) * 2 / short


def token_spectrum(tokens: Tensor, grid: Grid) -> Tensor:
    """Return the log amplitude by frequency relative to frequency 0, [N, D] to [F].

    The diagonal of the 2-D spectrum has equal frequencies in rows and columns. For grids that are not square, the longer side
    is interpolated linearly to these frequencies.
    """
    maps = tokens.float().T.unflatten(1, grid)  # [D, h, w]
    amplitude = (torch.fft.fft2(maps).abs() + 1e-6).log().mean(0)  # [h, w]
    frequencies = grid_frequencies(grid).to(amplitude.device)
    for side in grid:  # rows first, then columns: each pass interpolates the first axis and transposes
        index = frequencies * side / 2
        low = index.floor().long()
        weight = (index - low)[:, None]
        amplitude = amplitude[low % side] * (1 - weight) + amplitude[(low + 1) % side] * weight
        amplitude = amplitude.T
    diagonal = amplitude.diagonal()
    return diagonal - diagonal[0]

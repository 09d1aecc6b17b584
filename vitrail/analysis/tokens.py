"""Patch tokens of one layer as pictures: principal components as colours, likeness to one of them, length.

N patches, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def components(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first principal directions of rows [N, D], and each one's share of the variance: [count, D], [count].

    A direction's sign says nothing; here its largest entry is positive. There are at most as many as rows or columns.
    """
    centred = (values - values.mean(0)).double()
    if len(centred) > centred.shape[1]:  # many rows: their covariance is smaller
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


def colours(tokens: Tensor) -> Tensor:
    """Three principal components as red, green and blue, [N, D] to [N, 3] in 0…1.

    Each layer has components of its own, each stretched so that 98 % of its values lie between 0 and 1: tokens with enormous
    values would leave all others grey. What is constant is half grey.
    """
    tokens = tokens.float()
    directions, _ = components(tokens, 3)
    scores = (tokens - tokens.mean(0)) @ directions.T  # [N, up to 3]
    low, high = scores.quantile(torch.tensor([0.01, 0.99], device=scores.device), 0)
    span = high - low
    flat = span <= 1e-6 * tokens.norm(dim=-1).mean()
    scaled = torch.where(flat, 0.5, (scores - low) / torch.where(flat, 1.0, span))
    return F.pad(scaled.clamp(0, 1), (0, 3 - scaled.shape[1]), value=0.5)


def similar(tokens: Tensor, index: int) -> Tensor:
    """Cosine of every token with one of them, [N]."""
    return F.cosine_similarity(tokens.float(), tokens[index].float()[None], dim=-1)


def norms(tokens: Tensor) -> Tensor:
    """Length of every token: [N, D] to [N]. Registers and artefacts stand out."""
    return tokens.float().norm(dim=-1)

"""Mean attention distance, figure 7 (right): how far a head looks, in pixels, as receptive fields are measured.

For each query patch the distance to every patch, weighted by attention; then the mean over queries. Only patches have a place, so
prefix tokens are left out on both sides and what a query attends to among patches is taken as a whole, summing to 1. Were
the class token's share left out without making up for it, a head that mostly looks at the class token would seem to look nearby.

H heads, h×w patches, N of them, r rows.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.analysis.heads import Heads
from vitrail.analysis.inside import evaluating, vit_in
from vitrail.analysis.seen import Distances
from vitrail.analysis.watch import watching
from vitrail.nn.shape import Grid


def centres(grid: Grid, stride: int, device: torch.device) -> Tensor:
    """Row and column of every patch's centre in pixels, [N, 2]."""
    y, x = torch.meshgrid(*(torch.arange(n, device=device, dtype=torch.float32) for n in grid), indexing="ij")
    return (torch.stack((y, x), -1).flatten(0, 1) + 0.5) * stride


class Distance:
    """The mean distance of each head."""

    def __init__(self, heads: int, grid: Grid, stride: int, prefix: int, device: torch.device) -> None:
        self.prefix, self.centres = prefix, centres(grid, stride, device)
        self.total = torch.zeros(heads, device=device)

    def see(self, rows: slice, attention: Tensor) -> None:
        """Some rows, [H, r, T]."""
        skipped = max(0, self.prefix - rows.start)
        attention = attention[:, skipped:, self.prefix :]  # patches to patches
        if not attention.shape[1]:
            return
        first = rows.start + skipped - self.prefix
        here = self.centres[first : first + attention.shape[1]]
        away = (here[:, None] - self.centres[None]).square_().sum(-1).sqrt_()  # [r, N]
        share = attention.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.total += ((attention * away).sum(-1) / share).sum(1)

    def result(self) -> Tensor:  # [H]
        return self.total / len(self.centres)


def distances(model: nn.Module, images: Iterable[Tensor]) -> Distances:
    """Mean attention distance over pictures, given in normalised batches [B, C, H, W] of one size."""
    vit = vit_in(model)
    stride, prefix, depth = vit.embed.stride, vit.config.prefix.count, len(vit.blocks)
    found: list[list[Tensor]] = []  # by picture and layer, [H] each
    size: tuple[int, int] | None = None
    grid = vit.config.shape.grid

    def see(layer: int, heads: Heads) -> None:
        for index, picture in enumerate(found[-heads.q.shape[0] :]):
            distance = Distance(heads.q.shape[1], grid, stride, prefix, heads.q.device)
            for rows, attention in heads.picture(index).rows():
                distance.see(rows, attention)
            picture.append(distance.result().cpu())

    with evaluating(model), torch.no_grad(), watching(vit.blocks, list(range(1, depth + 1)), see):
        for batch in images:
            grid = vit.embed.grid(batch)
            if not len(batch):
                continue
            height, width = batch.shape[-2:]
            if size is not None and size != (height, width):
                raise ValueError(
                    f"a picture of {height}×{width} pixels after others of {size[0]}×{size[1]}: "
                    "distances in pixels are compared at one size, so give them all the same"
                )
            size = height, width
            found += [[] for _ in range(len(batch))]
            model(batch)
    if size is None:
        raise ValueError("no pictures: distances are measured over at least one")
    values = np.stack([torch.stack(picture).numpy() for picture in found])  # [pictures, L, H]
    spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])
    return Distances(values.mean(0), spread, len(values), size)

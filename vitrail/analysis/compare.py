"""What two models are compared by, after Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?"

A model goes over many pictures once. Of each layer's attention a few rows are in memory at a time, and of its tokens those of one
batch; what is kept of a picture is a few numbers for each head and each layer.

L layers, H heads, h×w patches, N of them, D width, F frequencies, n pictures.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.analysis.distance import Distance, centres
from vitrail.analysis.diversity import Diversity, Mutual
from vitrail.analysis.heads import Heads
from vitrail.analysis.inside import evaluating, whole_vit_in
from vitrail.analysis.seen import Profile
from vitrail.analysis.spectrum import frequencies, spectrum
from vitrail.analysis.watch import uncompiled, watching
from vitrail.models.vit import ViT
from vitrail.nn.shape import Grid


def profile(model: nn.Module, images: Iterable[Tensor]) -> Profile:
    """Distance, diversity, mutual information and spectrum by layer, over normalised batches [B, C, H, W] of one size."""
    vit = whole_vit_in(model)
    depth, prefix, stride = len(vit.blocks), vit.config.prefix.count, vit.embed.stride
    of_heads: list[list[Tensor]] = []  # by picture and layer: distance, diversity, mutual information, [3, H]
    of_tokens: list[list[Tensor]] = []  # by picture and layer from 0: [F]
    grid, size = vit.config.shape.grid, (0, 0)

    def see(_: int, heads: Heads) -> None:
        for index, picture in enumerate(of_heads[-heads.q.shape[0] :]):
            picture.append(measured(heads.picture(index), grid, stride, prefix))

    with evaluating(model), torch.no_grad(), watching(vit.blocks, list(range(1, depth + 1)), see):
        for batch in of_one_size(images):
            grid, size = vit.embed.grid(batch), (batch.shape[-2], batch.shape[-1])
            of_heads += [[] for _ in range(len(batch))]
            of_tokens += [[] for _ in range(len(batch))]
            for patches in states(vit, batch):
                for picture, tokens in zip(of_tokens[-len(batch) :], patches, strict=True):
                    picture.append(spectrum(tokens, grid).cpu())
    if not of_heads:
        raise ValueError("no pictures: models are compared over at least one")
    distance, diversity, mutual = (
        averaged([torch.stack([layer[which] for layer in picture]) for picture in of_heads]) for which in range(3)
    )
    amplitude = averaged([torch.stack(picture) for picture in of_tokens])
    return Profile(
        *distance,
        *diversity,
        *mutual,
        *amplitude,
        frequencies=frequencies(grid).numpy(),
        everywhere=everywhere(grid, stride),
        grid=grid,
        size=size,
        pictures=len(of_heads),
    )


def pooled(model: nn.Module, images: Iterable[Tensor]) -> np.ndarray:
    """The mean of the patch tokens after each layer, [n, L+1, D]; 0 is z_0. What a probe by layer is fitted to."""
    vit = whole_vit_in(model)
    with evaluating(model), torch.no_grad(), uncompiled():
        found = [torch.stack([z.mean(1) for z in states(vit, batch)], 1).cpu() for batch in of_one_size(images)]
    if not found:
        raise ValueError("no pictures: tokens are pooled of at least one")
    return torch.cat(found).numpy()


def measured(heads: Heads, grid: Grid, stride: int, prefix: int) -> Tensor:
    """One layer's attention in one picture: distance, diversity and mutual information of each head, [3, H]."""
    count, device = heads.q.shape[0], heads.q.device
    watchers = (
        Distance(count, grid, stride, prefix, device),
        Diversity(count, prefix, device),
        Mutual(count, grid[0] * grid[1], prefix, device),
    )
    for rows, attention in heads.rows():
        for watcher in watchers:
            watcher.see(rows, attention)
    return torch.stack([watcher.result() for watcher in watchers]).cpu()


def states(vit: ViT, batch: Tensor) -> Iterator[Tensor]:
    """The patch tokens z_0 to z_L of a batch, one after the other: [B, N, D]."""
    z = vit.tokens(batch)
    for number, z_l in enumerate(chain([z], vit.states(z, vit.embed.grid(batch)))):
        if not z_l.isfinite().all():
            where = f"after layer {number}" if number else "before the first layer"
            raise ValueError(f"tokens are infinite or no numbers {where}: there is nothing to compare")
        yield z_l[:, vit.config.prefix.count :].float()


def of_one_size(images: Iterable[Tensor]) -> Iterator[Tensor]:
    """The batches that hold something, which must be of one size: distances and frequencies have units."""
    first: torch.Size | None = None
    for batch in images:
        first = batch.shape[-2:] if first is None else first
        if batch.shape[-2:] != first:
            (height, width), (before, across) = batch.shape[-2:], first
            raise ValueError(f"a picture of {height}×{width} pixels after others of {before}×{across}: give one size")
        if len(batch):
            yield batch


def averaged(values: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over pictures; one picture has none."""
    whole = torch.stack(values).double().numpy()
    spread = whole.std(0, ddof=1) if len(whole) > 1 else np.zeros_like(whole[0])
    return whole.mean(0).astype(np.float32), spread.astype(np.float32)


def everywhere(grid: Grid, stride: int) -> float:
    """The mean distance between two patches, which is that of attention to all of them alike, in pixels."""
    place = centres(grid, stride, torch.device("cpu"))
    return sum(float((place - one).square().sum(-1).sqrt().mean()) for one in place) / len(place)

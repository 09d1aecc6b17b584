"""Statistics of a model by layer, after Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?"

The model runs over many images once, with a few rows of attention and the tokens of one batch in memory; a few numbers per head
and layer are kept of each image.

L layers, H heads, h×w patches, N of them, D width, F frequencies, n images.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.analysis import record
from vitrail.analysis.heads import HeadDiversity, LayerHeads, MeanDistance, MutualInformation, patch_centres
from vitrail.analysis.record import evaluation_mode, find_unsharded_vit, find_vit, watch_attention
from vitrail.analysis.results import AttentionDistances, ModelProfile
from vitrail.analysis.tokens import grid_frequencies, token_spectrum
from vitrail.models.base import TokenModel
from vitrail.nn.shape import Grid


def measure_distances(model: nn.Module, images: Iterable[Tensor]) -> AttentionDistances:
    """Return the mean attention distance over normalised batches [B, C, H, W] of images of one size."""
    vit, size = find_vit(model), (0, 0)
    grid, stride, prefix = vit.config.shape.grid, vit.embed.stride, vit.config.prefix.count

    def measure_layer(heads: LayerHeads) -> Tensor:
        return compute_statistics(heads, MeanDistance(heads.q.shape[0], grid, stride, prefix, heads.q.device))[0]

    with measure_layers(model, measure_layer) as distances:
        for batch in require_one_size(images):
            grid, size = vit.embed.grid(batch), (batch.shape[-2], batch.shape[-1])
            model(batch)
    if not distances:
        raise ValueError("no images: attention distances need at least 1")
    return AttentionDistances(*mean_and_std([torch.stack(layers) for layers in distances]), len(distances), size)


def profile_model(model: nn.Module, images: Iterable[Tensor]) -> ModelProfile:
    """Return distance, diversity, mutual information and spectrum by layer over normalised batches [B, C, H, W] of one size."""
    vit, size = find_unsharded_vit(model), (0, 0)
    grid, stride, prefix = vit.config.shape.grid, vit.embed.stride, vit.config.prefix.count
    spectra: list[list[Tensor]] = []  # by image and layer from 0: [F]
    with measure_layers(model, lambda heads: measure_heads(heads, grid, stride, prefix)) as head_values:
        for batch in require_one_size(images):
            grid, size = vit.embed.grid(batch), (batch.shape[-2], batch.shape[-1])
            by_layer = [[token_spectrum(z, grid).cpu() for z in patches] for patches in iter_patch_tokens(vit, batch)]
            spectra += map(list, zip(*by_layer, strict=True))
    if not head_values:
        raise ValueError("no images: a profile needs at least 1")
    distance, diversity, mutual = (
        mean_and_std([torch.stack([layer[k] for layer in layers]) for layers in head_values]) for k in range(3)
    )
    return ModelProfile(
        *distance,
        *diversity,
        *mutual,
        *mean_and_std([torch.stack(layers) for layers in spectra]),
        frequencies=grid_frequencies(grid).numpy(),
        everywhere=uniform_distance(grid, stride),
        grid=grid,
        size=size,
        pictures=len(head_values),
    )


@contextmanager
def measure_layers(model: nn.Module, measure: Callable[[LayerHeads], Tensor]) -> Iterator[list[list[Tensor]]]:
    """Measure every layer of each image that runs through the model; yield the list of values by image and layer."""
    values: list[list[Tensor]] = []

    def measure_layer(layer: int, heads: LayerHeads) -> None:
        if layer == 1:
            values.extend([] for _ in heads.q)
        for index, by_layer in enumerate(values[-len(heads.q) :]):
            by_layer.append(measure(heads.select_image(index)).cpu())

    with evaluation_mode(model), torch.no_grad(), watch_attention(find_vit(model), measure_layer):
        yield values


def pool_tokens(model: nn.Module, images: Iterable[Tensor]) -> np.ndarray:
    """Return the mean of the patch tokens after each layer, [n, L+1, D] (0 is z_0), the features of linear probes by layer."""
    vit = find_unsharded_vit(model)
    with evaluation_mode(model), torch.no_grad(), record.disable_compile():
        means = ([z.mean(1) for z in iter_patch_tokens(vit, batch)] for batch in require_one_size(images))
        pooled = [torch.stack(layers, 1).cpu() for layers in means]
    if not pooled:
        raise ValueError("no images: pooling needs at least 1")
    return torch.cat(pooled).numpy()


def compute_statistics(heads: LayerHeads, *statistics: MeanDistance | HeadDiversity | MutualInformation) -> Tensor:
    """Return n statistics of each head of one layer in one image, [n, H]."""
    for rows, attention in heads.iter_rows():
        for statistic in statistics:
            statistic.update(rows, attention)
    return torch.stack([statistic.compute() for statistic in statistics])


def measure_heads(heads: LayerHeads, grid: Grid, stride: int, prefix: int) -> Tensor:
    """Return distance, diversity and mutual information of each head of one layer in one image, [3, H]."""
    count, device = heads.q.shape[0], heads.q.device
    return compute_statistics(
        heads,
        MeanDistance(count, grid, stride, prefix, device),
        HeadDiversity(count, prefix, device),
        MutualInformation(count, grid[0] * grid[1], prefix, device),
    )


def iter_patch_tokens(vit: TokenModel, batch: Tensor) -> Iterator[Tensor]:
    """Yield the patch tokens z_0 to z_L of a batch, [B, N, D] each."""
    return (z[:, vit.config.prefix.count :].float() for z in record.iter_states(vit, batch))


def require_one_size(images: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the batches that are not empty; raise ValueError if image sizes differ."""
    first: torch.Size | None = None
    for batch in images:
        first = batch.shape[-2:] if first is None else first
        if batch.shape[-2:] != first:
            sizes = " after ".join(f"{height}×{width}" for height, width in (batch.shape[-2:], first))
            raise ValueError(f"images must have one size, got {sizes} pixels")
        if len(batch):
            yield batch


def mean_and_std(values: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation over images; the latter is 0 for one image."""
    stacked = torch.stack(values).double().numpy()
    std = stacked.std(0, ddof=1) if len(stacked) > 1 else np.zeros_like(stacked[0])
    return stacked.mean(0).astype(np.float32), std.astype(np.float32)


def uniform_distance(grid: Grid, stride: int) -> float:
    """Return the mean distance between two patches in pixels, which is that of uniform attention."""
    centres = patch_centres(grid, stride, torch.device("cpu"))
    return sum(float((centres - centre).square().sum(-1).sqrt().mean()) for centre in centres) / len(centres)

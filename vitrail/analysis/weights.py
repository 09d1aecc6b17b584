"""Position embeddings and patch embedding filters of a model, as arrays to draw (figure 7, left and centre).

h×w patches, N of them, T tokens, D width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.analysis.record import find_unsharded_model, find_unsharded_vit
from vitrail.analysis.results import PositionMaps, PrincipalFilters
from vitrail.analysis.tokens import principal_components, to_numpy
from vitrail.models.base import TokenModel, refuse
from vitrail.models.bit import StdConv
from vitrail.nn.embed import PatchEmbedding
from vitrail.nn.position import OffsetBias, RelativeEmbedding1D
from vitrail.nn.shape import Grid


def get_filter_weights(embed: nn.Module, channels: int) -> tuple[Tensor, str]:
    """Return the first filters that see pixels, [D, C, P, P], and their name."""
    if isinstance(embed, PatchEmbedding):
        return embed.projection.weight.unflatten(1, (channels, embed.patch, embed.patch)), "patch projection"
    first = next(module for module in embed.modules() if isinstance(module, nn.Conv2d))
    weight = first.weight
    if first.stride == first.kernel_size:
        return weight, "patch projection"
    if isinstance(first, StdConv):  # standardises each filter before use
        flat = weight.flatten(1)[None]
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8).view_as(weight)
    return weight, "first convolution"


@torch.no_grad()
def extract_filters(model: nn.Module, count: int = 28) -> PrincipalFilters:
    """Return the first principal components of the patch projection, or of the first convolution of stems and hybrids.

    There are at most D − 1 and at most as many as a filter has values. Signs are arbitrary; the largest value is 1.
    """
    if count < 1:
        raise ValueError(f"components must be >= 1, got {count}")
    found = find_unsharded_model(model)
    embed = getattr(found, "embed", None)
    if not isinstance(embed, nn.Module):
        raise refuse(found.config, "the patch embedding")
    weight, source = get_filter_weights(embed, found.config.channels)
    _, channels, height, width = weight.shape
    directions, share = principal_components(weight.flatten(1).float(), min(count, weight.shape[0] - 1))
    tiles = F.normalize(directions, p=float("inf"), dim=1).unflatten(1, (channels, height, width))
    return PrincipalFilters(tiles.permute(0, 2, 3, 1).cpu().numpy(), share.cpu().numpy(), source)


def get_added_positions(vit: TokenModel, grid: Grid) -> Tensor | None:
    """Return the embedding added to the patches, [N, D], at the stem or by the first layer; None if nothing is added."""
    table = vit.position.stem_embedding(grid, None)
    if table is None:
        table = next(iter(vit.position.layer_positions(grid, None))).embedding
    return None if table is None else table[0, vit.config.prefix.count :]


@torch.no_grad()
def extract_positions(model: nn.Module, grid: Grid | None = None) -> PositionMaps:
    """Return maps of the position embedding on the model's grid or on a given one.

    Offsets are key minus query: entry [h-1+r, w-1+c] is for a key r rows below and c columns to the right. If each layer adds
    its own table, the first one is used.
    """
    vit = find_unsharded_vit(model)
    grid = grid or vit.config.shape.grid
    h, w = grid
    if isinstance(vit.position, OffsetBias):
        layers = range(1 if vit.position.at == "shared" else vit.config.depth)
        table = torch.stack([vit.position.table(layer, grid) for layer in layers])  # by query minus key
        table = table.unflatten(2, (2 * h - 1, 2 * w - 1))
        return PositionMaps("bias", grid, bias=to_numpy(table.flip(-2, -1)))
    if isinstance(vit.position, RelativeEmbedding1D):
        return PositionMaps("query", grid)
    table = get_added_positions(vit, grid)
    if table is not None:
        unit = F.normalize(table.float(), dim=-1)
        return PositionMaps("added", grid, similarity=to_numpy((unit @ unit.T).reshape(h, w, h, w)))
    rotation = next(iter(vit.position.layer_positions(grid, None))).rotation
    if rotation is None:
        return PositionMaps("none", grid)
    cosine, sine = (table[0, 0, vit.config.prefix.count :].float() for table in (rotation.cosine, rotation.sine))
    cosine = (cosine * cosine[0] + sine * sine[0]).mean(-1).unflatten(0, grid)  # of the angle from the first patch
    cosine = torch.cat((cosine[1:].flip(0), cosine))  # the cosine is even
    cosine = torch.cat((cosine[:, 1:].flip(1), cosine), 1)
    return PositionMaps("rotary", grid, turn=to_numpy(cosine))

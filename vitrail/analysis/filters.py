"""The filters that make tokens from pixels, figure 7 (left): their principal components as small pictures.

D filters of P×P pixels with C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.analysis.inside import whole_vit_in
from vitrail.analysis.seen import Filters
from vitrail.analysis.tokens import components
from vitrail.models.bit import StdConv
from vitrail.nn.embed import PatchEmbedding


def weights(embed: nn.Module, channels: int) -> tuple[Tensor, str]:
    """The filters nearest to the pixels, [D, C, P, P], and what they are called."""
    if isinstance(embed, PatchEmbedding):
        return embed.projection.weight.unflatten(1, (channels, embed.stride, embed.stride)), "patch projection"
    first = next(module for module in embed.modules() if isinstance(module, nn.Conv2d))
    weight = first.weight
    if isinstance(first, StdConv):  # each filter is standardised before it is used
        flat = weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + 1e-8).sqrt()
        weight = flat.view_as(weight)
    return weight, "first convolution"


@torch.no_grad()
def filters(model: nn.Module, count: int = 28) -> Filters:
    """The first principal components of the patch projection, or of the first convolution of stems and hybrids.

    There are no more than filters less one, and no more than a filter has values. A component's sign says nothing; its largest
    value is 1.
    """
    if count < 1:
        raise ValueError(f"{count} components: ask for at least 1")
    vit = whole_vit_in(model)
    weight, source = weights(vit.embed, vit.config.channels)
    _, channels, height, width = weight.shape
    directions, share = components(weight.flatten(1).float(), min(count, weight.shape[0] - 1))
    tiles = F.normalize(directions, p=float("inf"), dim=1).unflatten(1, (channels, height, width))
    return Filters(tiles.permute(0, 2, 3, 1).cpu().numpy(), share.cpu().numpy(), source)

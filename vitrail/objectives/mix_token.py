"""MixToken (Jiang et al. 2021): CutMix of patch tokens. Neighbours in a batch exchange a box of patches once these are embedded.

Pixels are never cut through, so every token is of one picture and its label goes with it. Positions are added afterwards: a
patch that comes from the neighbour keeps its place. The partner of picture 2i is 2i+1 and the other way round.

B pictures, N = h·w patches, D width, K classes.
"""

import torch
from torch import Tensor

from vitrail.models.vit import ViT
from vitrail.nn.shape import Grid
from vitrail.objectives.draw import Draw

PROPORTION, PLACE = 32, 33  # streams of chance


def boxes(grid: Grid, alpha: float, draw: Draw) -> Tensor:
    """Which patches each picture takes from its partner, bool [B, N]: a box, the same for both of a pair.

    Its area is 1 minus a draw from Beta(alpha, alpha), around a random point, cut off at the border, as CutMix draws it.
    """
    pair = torch.arange(draw.count, device=draw.device) // 2 * 2  # both of a pair use the first one's numbers
    side = (1 - draw.beta(alpha, PROPORTION)[pair, None]).sqrt() / 2
    centre = draw.uniform(2, PLACE)[pair]
    y, x = ((torch.arange(n, device=draw.device) + 0.5) / n for n in grid)
    rows, columns = (y - centre[:, :1]).abs() < side, (x - centre[:, 1:]).abs() < side  # [B, h], [B, w]
    box = (rows[:, :, None] & columns[:, None, :]).flatten(1)
    if draw.count % 2:
        box[-1] = False  # it has no partner
    return box


def exchanged(values: Tensor, box: Tensor) -> Tensor:
    """Values of patches, [B, N, …], those in the box being the partner's."""
    return torch.where(box[..., None], values[partner(len(values), values.device)], values)


def blended(labels: Tensor, box: Tensor) -> Tensor:
    """Labels of pictures, [B, K], mixed by how much of each is there to be seen."""
    share = box.float().mean(1, keepdim=True)  # of the partner
    return labels * (1 - share) + labels[partner(len(labels), labels.device)] * share


def partner(count: int, device: torch.device) -> Tensor:
    """The neighbour that each picture exchanges with; the last one itself, where their number is odd."""
    return (torch.arange(count, device=device) ^ 1).clamp(max=count - 1)


def mixed_tokens(model: ViT, images: Tensor, box: Tensor) -> Tensor:
    """z_0 of equation 1 with the patches in the box exchanged after their embedding, [B, T, D]."""
    z = model.prefix.before(exchanged(model.embed(images), box))
    e_pos = model.position.stem(model.embed.grid(images), None)
    return model.token_norm(model.dropout(z if e_pos is None else z + e_pos))

"""How a model tells where a patch is: likeness of positions, bias by offset, or turn by offset.

h×w patches, N of them, T tokens, D width, H heads.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.analysis.inside import whole_vit_in
from vitrail.analysis.seen import Positions
from vitrail.models.vit import ViT
from vitrail.nn.position import RelativeBias, resample
from vitrail.nn.shape import Grid


def added(vit: ViT, grid: Grid) -> Tensor | None:
    """What is added to the patches, [N, D]: at the stem, or by the first layer where every layer adds its own."""
    table = vit.position.stem(grid, None)
    if table is None:
        table = next(iter(vit.position.layers(grid, None))).add
    return None if table is None else table[0, vit.config.prefix.count :]


@torch.no_grad()
def positions(model: nn.Module, grid: Grid | None = None) -> Positions:
    """What the model knows about places on its own grid, or on another one that it would see.

    Offsets are those of the key as seen from the query: entry [h-1+r, w-1+c] is for a key r rows below and c columns to the
    right. Where each layer adds a table of its own, the first one's is shown.
    """
    vit = whole_vit_in(model)
    grid = grid or vit.config.shape.grid
    h, w = grid
    if isinstance(vit.position, RelativeBias):
        table = resample(vit.position.offsets, (2 * h - 1, 2 * w - 1))  # by query minus key
        return Positions("bias", grid, bias=array(table.flip(-2, -1)))
    table = added(vit, grid)
    if table is not None:
        unit = F.normalize(table.float(), dim=-1)
        return Positions("added", grid, similarity=array((unit @ unit.T).reshape(h, w, h, w)))
    turn = next(iter(vit.position.layers(grid, None))).turn
    if turn is None:
        return Positions("none", grid)
    cosine = (
        turn[0][0, 0, vit.config.prefix.count :].float().mean(-1).unflatten(0, grid)
    )  # from the first patch to each
    cosine = torch.cat((cosine[1:].flip(0), cosine))  # a cosine is the same in both directions
    cosine = torch.cat((cosine[:, 1:].flip(1), cosine), 1)
    return Positions("rotary", grid, turn=array(cosine))


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()

"""The way back through a model, one layer at a time: its attention, and the gradient of an answer by that attention.

Each layer is computed again from its stored input, so that there is never more than one in memory. Attention itself is not
stored even then: from queries, keys, values and the gradient of what attention gave, both A = softmax(q kᵀ / √d) and
dA = dY vᵀ can be had for any few rows.

H heads, T tokens, d values a head, D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.analysis.heads import Heads
from vitrail.models.vit import ViT
from vitrail.nn.attention import MSA
from vitrail.nn.position import Place
from vitrail.nn.shape import Grid


@dataclass(frozen=True)
class Layer:
    """What is to be seen of a layer for one picture."""

    number: int  # 1…L
    heads: Heads
    v: Tensor  # [H, T, d]
    dy: Tensor | None  # [H, T, d]: gradient by what attention gave

    def rows(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Attention and the gradient by it, some rows after the others: [H, r, T] each."""
        for rows, attention in self.heads.rows():
            yield rows, attention, None if self.dy is None else self.dy[:, rows] @ self.v.transpose(-2, -1)


class Caught:
    """What passes through a layer's attention: into it after its projection, out of it before the next."""

    qkv: Tensor
    y: Tensor

    def __init__(self, msa: MSA) -> None:
        self.handles = [msa.qkv.register_forward_hook(self.project), msa.out.register_forward_pre_hook(self.leave)]

    def project(self, _: nn.Module, __: tuple[Any, ...], qkv: Tensor) -> None:
        self.qkv = qkv.detach()

    def leave(self, _: nn.Module, args: tuple[Tensor]) -> None:
        self.y = args[0]

    def let_go(self) -> None:
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def place_of(vit: ViT, grid: Grid, layer: int) -> Place:
    """What this layer is told about positions; made anew, because a bias for every layer would not fit."""
    return next(islice(vit.position.layers(grid, None), layer - 1, None))


def back(vit: ViT, states: list[Tensor], grid: Grid, gradient: Tensor | None) -> Iterator[Layer]:
    """Layers L to 1 of one picture. `states` are z_0 to z_L, [1, T, D]; `gradient`, if any, is that by z_L."""
    for number in range(len(vit.blocks), 0, -1):
        block, place = vit.blocks[number - 1], place_of(vit, grid, number)
        msa = block.msa
        assert isinstance(msa, MSA)
        caught = Caught(msa)
        try:
            with torch.set_grad_enabled(gradient is not None):
                z = states[number - 1].detach().requires_grad_(gradient is not None)
                out = block(place.enter(z), place)
        finally:
            caught.let_go()
        dy = None
        if gradient is not None:
            gradient, dy = torch.autograd.grad(out, (z, caught.y), gradient)
            dy = dy.detach()[0].unflatten(-1, (msa.heads, -1)).transpose(0, 1).float()  # [H, T, d]
        del out
        with torch.no_grad():
            q, k, v = msa.split(caught.qkv, place)
        del caught
        yield Layer(number, Heads(q, k, place.bias).picture(0), v[0].float(), dy)

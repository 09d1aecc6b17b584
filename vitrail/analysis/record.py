"""Attention as a record of what ran: `with record_attention(model) as maps: model(images)`.

B pictures, H heads, T tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.analysis.heads import Heads
from vitrail.analysis.inside import chosen, vit_in
from vitrail.analysis.watch import watching


class Maps(Mapping[int, Tensor]):
    """What was recorded, by layer: 1 to L, or -1 for the last. Pictures of several calls come one after the other."""

    def __init__(self, depth: int, layers: list[int]) -> None:
        self.depth = depth
        self._parts: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def add(self, layer: int, part: Tensor) -> None:
        self._parts[layer].append(part)

    def __getitem__(self, layer: int) -> Tensor:
        at = layer + self.depth + 1 if layer < 0 else layer
        if at not in self._parts:
            raise KeyError(f"layer {layer} was not recorded: record_attention was asked for {list(self._parts)}")
        parts = self._parts[at]
        if not parts:
            raise KeyError(f"layer {layer} has not run: call the model inside of the with block")
        if len({part.shape[1:] for part in parts}) > 1:
            raise ValueError(
                f"layer {layer} saw pictures of several sizes, whose maps do not go together: record each size by itself"
            )
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def listed(numbers: int | Iterable[int]) -> list[int]:
    """One number is a list of one."""
    return [numbers] if isinstance(numbers, int) else list(numbers)


@contextmanager
def record_attention(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    *,
    queries: int | Iterable[int] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Maps]:
    """Records the attention of these layers (all unless given) while the model runs.

        with record_attention(model, layers=[3, 7]) as maps:
            model(images)
        maps[3]  # [B, H, T, T]: softmax of layer 3, float32, on the CPU

    Layers count from 1 to L as in `ViT.features`; -1 is the last. The model computes what it always does, with its fused
    kernel, and its answer is the same to the last bit; the maps are made from the queries and keys of each layer as it runs,
    for all tokens, also in the last layer where the model itself computes fewer. In training mode a map is the softmax
    before dropout. Calls one after the other are put one after the other: three batches of 8 give 24 maps.

    `queries` records the rows of these tokens only (0 is the class token). `reduce` is given each layer's map and what it
    returns is kept in its place, so that one layer is in memory at a time; its first dimension must stay the pictures.

    Models under DDP or FSDP2 record what this process saw. Compiled models run uncompiled while they are recorded, because
    compiled code leaves out hooks that it was not compiled with.
    """
    vit = vit_in(model)
    wanted = chosen(vit, listed(range(1, len(vit.blocks) + 1) if layers is None else layers))
    rows = slice(None) if queries is None else listed(queries)
    maps = Maps(len(vit.blocks), wanted)

    def see(layer: int, heads: Heads) -> None:
        if isinstance(rows, list):
            tokens = heads.q.shape[-2]
            for query in rows:
                if not -tokens <= query < tokens:
                    raise ValueError(f"query {query} of {tokens} tokens: use 0 to {tokens - 1}")
        attention = heads.attention(rows)
        maps.add(layer, (attention if reduce is None else reduce(attention)).detach().cpu())

    with watching(vit.blocks, wanted, see):
        yield maps

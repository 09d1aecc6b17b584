"""Watching layers from outside: what their queries, keys and values are, taken as they are made."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.analysis.heads import Heads
from vitrail.nn.attention import MSA
from vitrail.nn.position import NOWHERE, Place

See = Callable[[int, Heads], None]


class Watcher:
    """Hooks for one layer. The projection's own output is used, so nothing is computed twice and nothing drawn by chance."""

    def __init__(self, layer: int, msa: MSA, see: See) -> None:
        self.layer, self.msa, self.see = layer, msa, see
        self.place = NOWHERE

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer's attention: where its tokens are."""
        self.place: Place = args[1] if len(args) > 1 else kwargs.get("place", NOWHERE)

    def project(self, _: nn.Module, __: tuple[Any, ...], qkv: Tensor) -> None:
        """After its projection: queries and keys of all tokens, also where few of them are read."""
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing comes here again in the backward pass
            return
        with torch.no_grad():
            q, k, _v = self.msa.split(qkv.detach(), self.place)
            self.see(self.layer, Heads(q, k, self.place.bias))


@contextmanager
def watching(blocks: nn.ModuleList, layers: list[int], see: See) -> Iterator[None]:
    """Calls `see` with each of these layers whenever it runs."""
    handles = []
    with uncompiled():
        try:
            for layer in layers:
                msa = blocks[layer - 1].msa
                assert isinstance(msa, MSA)
                watcher = Watcher(layer, msa, see)
                handles.append(msa.register_forward_pre_hook(watcher.enter, with_kwargs=True))
                handles.append(msa.qkv.register_forward_hook(watcher.project))
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled code runs uncompiled for a while: what was compiled without hooks silently leaves them out (PyTorch 2.13)."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and its import would take seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield

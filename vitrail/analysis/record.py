"""Recording of attention while a model runs: `with record_attention(model) as maps: model(images)`.

B images, L layers, H heads, T tokens, D width; of clips t time steps of h·w patches, after P prefix tokens.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.analysis.heads import LayerHeads
from vitrail.models.base import Model, TokenModel, Unsupported
from vitrail.nn.attention import MSA
from vitrail.nn.block import DividedBlock
from vitrail.nn.position import NO_POSITION, LayerPosition
from vitrail.nn.recording import AttentionLayer

HeadsCallback = Callable[[int, LayerHeads], None]
DividedAxis = Literal["space", "time"]


def find_model(model: nn.Module) -> Model:
    """Return the one model in a module, which may be compiled or wrapped for several processes."""
    models = [module for module in model.modules() if isinstance(module, Model)]
    found = [module for module in models if isinstance(module, TokenModel)] or models
    if len(found) == 1:
        return found[0]
    raise ValueError(f"{type(model).__name__} contains {len(found)} models to analyse: give one of them")


def require_attention(model: Model) -> None:
    """Raise Unsupported for a family without attention."""
    if not model.config.has_tokens:
        model.attention_layers(model.config.input_size)


def has_divided_attention(model: Model) -> bool:
    """Return whether the layers attend over time and over space separately."""
    return model.config.has_tokens and model.config.require_tokens("", clips=True).block.is_divided


def find_vit(model: nn.Module, purpose: str = "recording attention") -> TokenModel:
    """Return the one token model in a module; raise Unsupported for a family without patch tokens."""
    return find_model(model).require_tokens(purpose)


def find_unsharded_model(model: nn.Module) -> Model:
    """Return the one model in a module; raise ValueError if its weights are sharded."""
    found = find_model(model)
    if any(hasattr(parameter, "full_tensor") for parameter in found.parameters()):  # a DTensor
        remedy = "load the saved model, or use record_attention, which works on sharded models"
        raise ValueError(f"the weights of this model are sharded over processes: {remedy}")
    return found


def find_unsharded_vit(model: nn.Module, purpose: str = "recording attention") -> TokenModel:
    """Return the token model; raise ValueError if its weights are sharded."""
    return find_unsharded_model(model).require_tokens(purpose)


def resolve_layers(depth: int, layers: int | Iterable[int]) -> list[int]:
    """Return sorted layer numbers 1 to L, as in `ViT.features`; negative ones count from the end."""
    numbers = [layers] if isinstance(layers, int) else list(layers)
    for layer in numbers:
        if layer == 0 or not -depth <= layer <= depth:
            raise ValueError(f"layer must be 1 to {depth}, or -1 for the last, got {layer}")
    return sorted({layer + depth + 1 if layer < 0 else layer for layer in numbers})


def iter_states(vit: TokenModel, images: Tensor) -> Iterator[Tensor]:
    """Yield the tokens z_0 to z_L of a batch, [B, T, D] each; raise ValueError if they are not finite."""
    z_0 = vit.tokens(images)
    for number, z in enumerate(chain([z_0], vit.layer_outputs(z_0, vit.embed.grid(images)))):
        if not z.isfinite().all():
            where = f"after layer {number}" if number else "before the first layer"
            raise ValueError(f"the tokens of this model are not finite {where}")
        yield z


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the context; then restore the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class AttentionHook:
    """Hooks of one layer. They use the output of the qkv projection, so nothing is computed twice."""

    def __init__(self, layer: int, msa: MSA, callback: HeadsCallback) -> None:
        self.layer, self.msa, self.callback = layer, msa, callback
        self.position = NO_POSITION
        self.handles = (
            msa.register_forward_pre_hook(self.before_attention, with_kwargs=True),
            msa.qkv.register_forward_hook(self.after_projection),
        )

    def before_attention(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the positions of the layer's tokens."""
        self.position: LayerPosition = args[1] if len(args) > 1 else kwargs.get("position", NO_POSITION)

    def after_projection(self, _: nn.Module, __: tuple[Any, ...], qkv: Tensor) -> None:
        """Pass queries and keys of all tokens on, also if the layer computes few outputs."""
        if torch._C._current_graph_task_id() != -1:  # recomputation of activation checkpointing in the backward pass
            return
        with torch.no_grad():
            q, k, _v = self.msa.split_heads(qkv.detach(), self.position)
            self.callback(self.layer, LayerHeads(q, k, self.position.compute_bias(q)))


@contextmanager
def watch_attention(vit: TokenModel, callback: HeadsCallback, layers: list[int] | None = None) -> Iterator[None]:
    """Call `callback` with queries and keys of each of these layers (default: all) whenever it runs."""
    if vit.config.block.is_divided:
        raise Unsupported("divided attention has two maps in each layer: record axis='space' or axis='time'")
    with disable_compile(), ExitStack() as stack:
        for layer in range(1, len(vit.blocks) + 1) if layers is None else layers:
            msa = vit.blocks[layer - 1].msa
            assert isinstance(msa, MSA)
            for handle in AttentionHook(layer, msa, callback).handles:
                stack.callback(handle.remove)
        yield


class DividedHook:
    """Hooks of one layer with divided attention, for its attention over space or over time.

    A window of attention over space is a frame, its prefix tokens first; one of attention over time is a place in the frames.
    """

    def __init__(self, layer: int, block: DividedBlock, axis: DividedAxis, callback: HeadsCallback) -> None:
        self.layer, self.axis, self.callback = layer, axis, callback
        self.msa = block.msa if axis == "space" else block.time_msa
        self.windows = 1
        self.handles = (
            block.register_forward_pre_hook(self.before_block, with_kwargs=True),
            self.msa.qkv.register_forward_hook(self.after_projection),
        )

    def before_block(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the windows of each clip."""
        position: LayerPosition = args[1] if len(args) > 1 else kwargs["position"]
        assert position.grid is not None
        self.windows = position.grid[0] if self.axis == "space" else math.prod(position.grid[1:])

    def after_projection(self, _: nn.Module, __: tuple[Any, ...], qkv: Tensor) -> None:
        """Pass queries and keys of all windows on, [B, n, H, N, d]."""
        if torch._C._current_graph_task_id() != -1:  # recomputation of activation checkpointing in the backward pass
            return
        with torch.no_grad():
            q, k, _v = (part.unflatten(0, (-1, self.windows)) for part in self.msa.split_heads(qkv.detach()))
            self.callback(self.layer, LayerHeads(q, k, None))


@contextmanager
def watch_divided(vit: TokenModel, axis: DividedAxis, callback: HeadsCallback, layers: list[int]) -> Iterator[None]:
    """Call `callback` with queries and keys of these layers' attention over space or time whenever it runs."""
    with disable_compile(), ExitStack() as stack:
        for layer in layers:
            block = vit.blocks[layer - 1]
            assert isinstance(block, DividedBlock)
            for handle in DividedHook(layer, block, axis, callback).handles:
                stack.callback(handle.remove)
        yield


@contextmanager
def watch_windows(
    layers: list[AttentionLayer], callback: Callable[[int, Tensor], None], numbers: list[int] | None = None
) -> Iterator[None]:
    """Call `callback` with the attention, [B, n, H, Nq, Nk], of each of these layers (default: all) whenever it runs."""
    with disable_compile(), ExitStack() as stack:
        for number in range(1, len(layers) + 1) if numbers is None else numbers:
            layer = layers[number - 1]

            def record(
                _: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                number: int = number,
                layer: AttentionLayer = layer,
            ) -> None:
                if torch._C._current_graph_task_id() == -1:  # not a recomputation of activation checkpointing
                    with torch.no_grad():
                        callback(number, layer.compute_attention(*args, **kwargs))

            stack.callback(layer.module.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield


@contextmanager
def disable_compile() -> Iterator[None]:
    """Run compiled code eagerly within the context: code compiled without hooks silently skips them (PyTorch 2.13)."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import would take seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class AttentionMaps(Mapping[int, Tensor]):
    """Recorded maps by layer, 1 to L, or -1 for the last. Images of several calls are concatenated."""

    def __init__(self, depth: int, layers: list[int]) -> None:
        self.depth = depth
        self._parts: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def add(self, layer: int, part: Tensor) -> None:
        self._parts[layer].append(part)

    def __getitem__(self, layer: int) -> Tensor:
        number = layer + self.depth + 1 if layer < 0 else layer
        if number not in self._parts:
            raise KeyError(f"layer {layer} was not recorded: recorded are {list(self._parts)}")
        parts = self._parts[number]
        if not parts:
            raise KeyError(f"layer {layer} has not run: call the model inside the with block")
        if len({part.shape[1:] for part in parts}) > 1:
            raise ValueError(f"layer {layer} got images of several sizes: record each size separately")
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@contextmanager
def record_attention(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    *,
    queries: int | Iterable[int] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    axis: DividedAxis | None = None,
) -> Iterator[AttentionMaps]:
    """Record the attention of these layers (default: all) while the model runs.

        with record_attention(model, layers=[3, 7]) as maps:
            model(images)
        maps[3]  # [B, H, T, T]: softmax of layer 3, float32, on the CPU

    Layers count from 1 to L as in `ViT.features`; -1 is the last. In models with windows a map is [B, n, H, N, N] for n
    windows of N tokens, whose cells `Model.attention_layers` gives. The model keeps its fused kernel and its output is
    bit-exact; the maps are computed from the queries and keys of each layer as it runs, for all tokens, also in the last
    layer where the model itself computes fewer. In training mode a map is the softmax before dropout. Calls are
    concatenated: three batches of 8 give 24 maps.

    `queries` limits the rows to these tokens (0 is the class token; with windows, these tokens of each window). `reduce` maps
    each layer's map to what is stored instead, so that one layer is in memory at a time; its first dimension must stay the
    images.

    Divided attention (TimeSformer) has two maps in each layer, and `axis` chooses one. With "space" a map is
    [B, t, H, P + h·w, P + h·w], of each frame with the prefix tokens first; with "time" [B, h·w, H, t, t], of each place in the
    frames.

    Models under DDP or FSDP2 record the batches of this process. Compiled models run eagerly while they are recorded.
    """
    found = find_model(model)
    depth, is_divided = found.config.depth, has_divided_attention(found)
    if axis is not None and not is_divided:
        raise Unsupported(f"axis={axis!r} is for divided attention: leave it out for this model")
    numbers = resolve_layers(depth, range(1, depth + 1) if layers is None else layers)
    rows = [queries] if isinstance(queries, int) else None if queries is None else list(queries)
    maps = AttentionMaps(depth, numbers)

    def check_queries(tokens: int) -> None:
        for query in rows or ():
            if not -tokens <= query < tokens:
                raise ValueError(f"query must be 0 to {tokens - 1}, got {query}")

    def add_attention(layer: int, attention: Tensor) -> None:
        maps.add(layer, (attention if reduce is None else reduce(attention)).detach().cpu())

    def add_heads(layer: int, heads: LayerHeads) -> None:
        check_queries(heads.q.shape[-2])
        add_attention(layer, heads.attention(slice(None) if rows is None else rows))

    def add_windows(layer: int, attention: Tensor) -> None:
        check_queries(attention.shape[-2])
        add_attention(layer, attention if rows is None else attention[..., rows, :])

    if is_divided and axis is not None:
        watching = watch_divided(found.require_tokens("recording attention", clips=True), axis, add_heads, numbers)
    elif found.config.has_tokens:
        watching = watch_attention(found.require_tokens("recording attention", clips=True), add_heads, numbers)
    else:
        watching = watch_windows(found.attention_layers(found.config.input_size), add_windows, numbers)
    with watching:
        yield maps

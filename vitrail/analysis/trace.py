"""Trace of one image through a model: attention, rollout, relevance, token maps of every layer.

After one forward pass that keeps the tokens of each layer, the layers are recomputed from the last to the first, with a few rows
of attention in memory at a time. So memory grows with the tokens, not with the attention.

L layers, H heads, h×w patches, N of them, T tokens, D width, K classes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.analysis import heads, tokens
from vitrail.analysis.heads import LayerHeads, Relevance, Rollout
from vitrail.analysis.record import disable_compile, evaluation_mode, find_unsharded_vit, find_vit, iter_states
from vitrail.analysis.results import ImageTrace
from vitrail.analysis.tokens import to_numpy
from vitrail.analysis.weights import get_added_positions
from vitrail.models.base import TokenModel
from vitrail.nn.attention import MSA
from vitrail.nn.shape import Grid
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class TracedLayer:
    """Queries, keys, values and gradient of a layer for one image."""

    number: int  # 1…L
    heads: LayerHeads
    v: Tensor  # [H, T, d]
    dy: Tensor | None  # [H, T, d]: gradient by the output of attention

    def iter_rows(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield attention and the gradient by it in chunks of rows, [H, r, T] each."""
        for rows, attention in self.heads.iter_rows():
            yield rows, attention, None if self.dy is None else self.dy[:, rows] @ self.v.transpose(-2, -1)


@contextmanager
def capture_attention(msa: MSA) -> Iterator[dict[str, Tensor]]:
    """Capture the output of the qkv projection, "qkv", and the heads before their projection, "y"."""
    captured: dict[str, Tensor] = {}

    def capture_qkv(_: nn.Module, __: tuple[Any, ...], qkv: Tensor) -> None:
        captured["qkv"] = qkv.detach()

    def capture_output(_: nn.Module, args: tuple[Tensor]) -> None:
        captured["y"] = args[0]

    handles = msa.qkv.register_forward_hook(capture_qkv), msa.norm.register_forward_pre_hook(capture_output)
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def iter_backward(vit: TokenModel, states: list[Tensor], grid: Grid, gradient: Tensor | None) -> Iterator[TracedLayer]:
    """Yield layers L to 1 of one image. `states` are z_0 to z_L, [1, T, D]; `gradient`, if any, is that by z_L."""
    for number in range(len(vit.blocks), 0, -1):
        block = vit.blocks[number - 1]
        # Computed on demand, because the biases of all layers would not fit in memory.
        position = next(islice(vit.position.layer_positions(grid, None), number - 1, None))
        msa = block.msa
        assert isinstance(msa, MSA)
        with capture_attention(msa) as captured, torch.set_grad_enabled(gradient is not None):
            z = states[number - 1].detach().requires_grad_(gradient is not None)
            out = block(position.add_to(z), position)
        dy = None
        if gradient is not None:
            gradient, dy = torch.autograd.grad(out, (z, captured["y"]), gradient)
            dy = dy.detach()[0].unflatten(-1, (msa.heads, -1)).transpose(0, 1).float()  # [H, T, d]
        del out
        with torch.no_grad():
            q, k, v = msa.split_heads(captured["qkv"], position)
            attended = LayerHeads(q, k, position.compute_bias(q)).select_image(0)
        del captured
        yield TracedLayer(number, attended, v[0].float(), dy)


ATTENTION_VIEWS = ("attention", "between", "distance", "entropy", "alike", "rollout", "relevance")
TRACE_VIEWS = (*ATTENTION_VIEWS, "colours", "similar", "norms", "spectrum", "embedded", "positions")


def trace_image(
    model: nn.Module,
    image: Tensor,
    *,
    at: tuple[int, int] | None = None,
    target: int | None = None,
    max_cells: int = heads.MAX_CELLS,
    views: Iterable[str] | None = None,
    on_progress: ProgressCallback | None = None,
) -> ImageTrace:
    """Trace one normalised image, [1, C, H, W], through a model.

    `at` is the row and column of a patch for `attention_at` and `similar` (`find_patch` finds it from a pixel). `target` is the
    class of `relevance` (default: the predicted one); a model without classes has no relevance. `between` is on a grid of at
    most `max_cells`: attention is summed over the keys of a cell and averaged over its queries. `views` are names of
    TRACE_VIEWS (default: all). `on_progress` gets the number of finished layers and their total.

    The model runs in evaluation mode, uncompiled, and is restored then. Models with a position bias keep that of one layer in
    memory, H·T·T values.
    """
    vit = find_unsharded_vit(model)
    names = frozenset(TRACE_VIEWS if views is None else (views,) if isinstance(views, str) else views)
    if unknown := sorted(names.difference(TRACE_VIEWS)):
        raise ValueError(f"unknown view {unknown[0]!r}: use {', '.join(TRACE_VIEWS)}")
    grid = vit.embed.grid(image)
    if len(image) != 1:
        raise ValueError(f"image must be one image, [1, C, H, W], got a batch of {len(image)}")
    if not image.isfinite().all():
        raise ValueError("the image has values that are not finite")
    if at is not None and not (0 <= at[0] < grid[0] and 0 <= at[1] < grid[1]):
        raise ValueError(f"patch must be 0,0 to {grid[0] - 1},{grid[1] - 1}, got {at[0]},{at[1]}")
    classes = vit.config.classes
    if target is not None and not 0 <= target < (classes or 0):
        if not classes:
            raise ValueError(f"target {target}: this model has no classes, its output is features")
        raise ValueError(f"target must be 0 to {classes - 1}, got {target}")
    with evaluation_mode(model), disable_compile(), torch.inference_mode(False), torch.no_grad():
        return ImageTracer(vit, image, grid, at, target, max_cells, names, on_progress).trace()


def find_patch(model: nn.Module, x: int, y: int, size: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return row and column of the patch that covers pixel x (to the right), y (down) of the preprocessed image.

    `size` is the height and width of the image (default: the model's).
    """
    vit = find_vit(model)
    height, width = vit.config.image_size if size is None else size
    if not (0 <= x < width and 0 <= y < height):
        raise ValueError(f"pixel must be 0,0 to {width - 1},{height - 1}, got {x},{y}")
    rows, columns = vit.config.grid_of((height, width))
    return min(y // vit.embed.stride, rows - 1), min(x // vit.embed.stride, columns - 1)


@dataclass
class ImageTracer:
    """State of one trace: the requested views, and the results so far by field name of `ImageTrace`."""

    vit: TokenModel
    image: Tensor
    grid: Grid
    at: tuple[int, int] | None
    target: int | None
    max_cells: int
    views: frozenset[str]
    on_progress: ProgressCallback | None
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefix, self.patches = self.vit.config.prefix.count, self.grid[0] * self.grid[1]
        self.patch_index = None if self.at is None else self.at[0] * self.grid[1] + self.at[1]
        self.output_tokens = self.vit.config.pool.required_tokens  # that the pooling reads

    def trace(self) -> ImageTrace:
        vit, depth = self.vit, len(self.vit.blocks)
        self.trace_embedding()
        states = list(iter_states(vit, self.image))
        self.trace_tokens(states)
        gradient = self.trace_logits(states[-1])
        if self.views.intersection(ATTENTION_VIEWS):
            layers: list[dict[str, np.ndarray]] = []
            rollout, relevance = Rollout(self.reader_weights()), Relevance(self.reader_weights())
            for layer in iter_backward(vit, states, self.grid, gradient):
                layers.insert(0, self.trace_layer(layer, rollout, relevance))
                states.pop()  # not needed below this layer
                if self.on_progress is not None:
                    self.on_progress("layers", len(layers), depth)
            self.results |= {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
            if "rollout" in self.views:
                self.results["rollout"] = self.to_grid(rollout.row[self.prefix :])
            if gradient is not None:
                self.results["relevance"] = self.to_grid(relevance.row[self.prefix :])
        return ImageTrace(
            self.grid,
            vit.embed.stride,
            self.prefix,
            ("mean of patches", "class token", "output tokens")[self.output_tokens],
            at=self.at,
            between_grid=heads.coarsen_grid(self.grid, self.max_cells)[0] if "between" in self.results else None,
            frequencies=to_numpy(tokens.grid_frequencies(self.grid)) if "spectrum" in self.results else None,
            **self.results,
        )

    def to_grid(self, patches: Tensor) -> np.ndarray:
        """Return values of patches in the shape of the grid, [..., N] to [..., h, w]."""
        return to_numpy(patches.unflatten(-1, self.grid))

    def trace_embedding(self) -> None:
        """Add the patches after the projection and the position embedding."""
        if "embedded" in self.views:
            self.results["embedded"] = to_numpy(self.vit.embed(self.image)[0].unflatten(0, self.grid))
        table = get_added_positions(self.vit, self.grid) if "positions" in self.views else None
        if table is not None:
            self.results["positions"] = to_numpy(table.unflatten(0, self.grid))

    def trace_tokens(self, states: list[Tensor]) -> None:
        """Add the token maps of all layers."""
        patches = [z[0, self.prefix :] for z in states]
        maps: dict[str, list[np.ndarray]] = {}
        if "colours" in self.views:
            maps["colours"] = [to_numpy(tokens.token_colours(z).unflatten(0, self.grid)) for z in patches]
        if "similar" in self.views and self.patch_index is not None:
            maps["similar"] = [self.to_grid(tokens.token_similarity(z, self.patch_index)) for z in patches]
        if "norms" in self.views:
            maps["norms"] = [self.to_grid(tokens.token_norms(z)) for z in patches]
            maps["prefix_norms"] = [to_numpy(tokens.token_norms(z[0, : self.prefix])) for z in states]
        if "spectrum" in self.views:
            maps["spectrum"] = [to_numpy(tokens.token_spectrum(z, self.grid)) for z in patches]
        self.results |= {name: np.stack(layers) for name, layers in maps.items()}

    def trace_logits(self, z: Tensor) -> Tensor | None:
        """Add the logits; if relevance is requested, return the gradient of the target's logit by z_L."""
        if self.vit.config.classes is None:
            return None
        explain = "relevance" in self.views
        with torch.set_grad_enabled(explain):
            z = z.detach().requires_grad_(explain)
            logits = self.vit.head(self.vit.pool(z))[0]  # [K]
            self.results["logits"] = to_numpy(logits)
            if not explain:
                return None
            target = int(logits.argmax()) if self.target is None else self.target
            self.results["target"] = target
            return torch.autograd.grad(logits[target], z)[0]

    def reader_weights(self) -> Tensor:
        """Return the weights of the queries that are read: the output tokens', or the mean of the patches, [T]."""
        row = torch.zeros(self.prefix + self.patches, device=self.image.device)
        if self.output_tokens:
            row[: self.output_tokens] = 1 / self.output_tokens
        else:
            row[self.prefix :] = 1 / self.patches
        return row

    def trace_layer(self, layer: TracedLayer, rollout: Rollout, relevance: Relevance) -> dict[str, np.ndarray]:
        """Return the views of one layer, and update rollout and relevance."""
        count, device = layer.heads.q.shape[0], layer.heads.q.device
        size = self.prefix + self.patches
        statistics = {}
        if "distance" in self.views:
            statistics["distance"] = heads.MeanDistance(count, self.grid, self.vit.embed.stride, self.prefix, device)
        if "entropy" in self.views:
            statistics["entropy"] = heads.MeanEntropy(count, device)
        if "alike" in self.views:
            statistics["alike"] = heads.HeadSimilarity(count, size, device)
        if "between" in self.views:
            statistics["between"] = heads.CellAttention(count, self.grid, self.prefix, self.max_cells, device)
        reader, read = self.reader_weights(), torch.zeros(count, size, device=device)
        for rows, attention, gradient in layer.iter_rows():
            for statistic in statistics.values():
                statistic.update(rows, attention)
            read += torch.einsum("r,hrt->ht", reader[rows], attention)
            rollout.update(rows, attention)
            if gradient is not None:
                relevance.update(rows, attention, gradient)
        rollout.next_layer()
        relevance.next_layer()
        results = {name: to_numpy(statistic.compute()) for name, statistic in statistics.items()}
        if "between" in results:
            results["between"] = results["between"].astype(np.float16)
        if "attention" in self.views:
            results["attention"] = self.to_grid(read[:, self.prefix :])
            if self.patch_index is not None:
                row = layer.heads.attention([self.prefix + self.patch_index])[:, 0]
                results["attention_at"] = self.to_grid(row[:, self.prefix :])
        return results

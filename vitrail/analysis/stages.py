"""Trace of one image through a model whose layers have grids of their own: attention in windows, token maps of every layer.

One forward pass with the fused kernel; the attention of each layer is computed beside it and reduced before the next one.

L layers, H heads of a layer, h×w cells of its queries, a×b of its keys, n windows of Nq queries and Nk keys, K classes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.analysis import tokens
from vitrail.analysis.heads import patch_centres, row_entropies
from vitrail.analysis.record import disable_compile, evaluation_mode, find_model, find_unsharded_model, watch_windows
from vitrail.analysis.results import AttentionDistances, PositionMaps
from vitrail.analysis.tokens import to_numpy
from vitrail.models.base import Model, Unsupported
from vitrail.nn.recording import AttentionLayer, WindowTokens
from vitrail.nn.shape import Grid

MAX_WEIGHTS = 8_000_000  # attention weights of one image that are kept


@dataclass(frozen=True)
class LayerTrace:
    """Arrays of one layer. A window number that two cells share means that they attend to each other."""

    grid: Grid  # h, w: queries
    stride: int  # pixels along the side of a cell
    key_grid: Grid  # a, b
    key_stride: int
    windows: np.ndarray  # [h, w] int32: the window of each query
    key_windows: np.ndarray  # [a, b] int32: that of each key
    attention: np.ndarray | None  # [H, n, Nq, Nk] float16; of large images [1, n, Nq, Nk], the mean over heads, or None
    query_cells: np.ndarray  # [n, Nq] int32: cells of the queries in reading order, -1 for padding
    key_cells: np.ndarray  # [n, Nk] int32
    received: np.ndarray  # [H, a, b]: sum of the attention to a key, scaled: 1 if it receives as much as the mean key
    at: tuple[int, int] | None  # row and column of the selected query
    attention_at: np.ndarray | None  # [H, a, b]: of the selected query; NaN outside its window
    distance: np.ndarray  # [H]: mean attention distance in pixels
    entropy: np.ndarray  # [H]: mean entropy of attention in nats


@dataclass(frozen=True)
class StagedTrace:
    """Arrays of one image in a model whose layers have grids of their own. Views that were not requested are None."""

    size: tuple[int, int]  # of the image in pixels
    pixel: tuple[int, int] | None = None  # x and y of the selected query
    logits: np.ndarray | None = None  # [K]
    layers: tuple[LayerTrace, ...] = ()
    strides: tuple[int, ...] = ()  # pixels per cell of the token maps, L + 1; 0 is the embedding
    colours: tuple[np.ndarray, ...] | None = None  # L + 1 of [h, w, 3] in 0…1: three principal components of the tokens
    similar: tuple[np.ndarray, ...] | None = None  # L + 1 of [h, w]: cosine similarity with the selected token
    norms: tuple[np.ndarray, ...] | None = None  # L + 1 of [h, w]
    embedded: np.ndarray | None = None  # [h, w, D]: patches after the projection

    @property
    def has_windows(self) -> bool:
        """Return whether attention is limited to windows in some layer."""
        return any(layer.windows.max() > 0 for layer in self.layers)


Keep = Literal["heads", "mean", "none"]
STAGED_VIEWS = ("attention", "colours", "similar", "norms", "embedded")


def find_cell(pixel: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return row and column of the cell that covers a pixel (x, y)."""
    return pixel[1] // stride, pixel[0] // stride


def trace_stages(
    model: nn.Module,
    image: Tensor,
    *,
    at: tuple[int, int] | None = None,
    views: Iterable[str] = STAGED_VIEWS,
    max_weights: int = MAX_WEIGHTS,
) -> StagedTrace:
    """Trace one normalised image, [1, C, H, W], through a model with windows or stages.

    `at` is a pixel (x, y) of the image: the selected query of each layer is the cell that covers it, because grids differ
    between stages. `views` are names of STAGED_VIEWS (default: all). If all layers have more than `max_weights` attention
    weights, only their mean over heads is kept, and not even that if it has more.
    """
    found, names = require_images(find_unsharded_model(model)), frozenset(views)
    if unknown := sorted(names.difference(STAGED_VIEWS)):
        raise ValueError(f"unknown view {unknown[0]!r}: use {', '.join(STAGED_VIEWS)}")
    if len(image) != 1:
        raise ValueError(f"image must be one image, [1, C, H, W], got a batch of {len(image)}")
    if not image.isfinite().all():
        raise ValueError("the image has values that are not finite")
    height, width = image.shape[-2:]
    if at is not None and not (0 <= at[0] < width and 0 <= at[1] < height):
        raise ValueError(f"pixel must be 0,0 to {width - 1},{height - 1}, got {at[0]},{at[1]}")
    layers = found.attention_layers((height, width))
    pairs = [layer.queries.cells.numel() * layer.keys.cells.shape[1] for layer in layers]
    is_every_head = sum(n * layer.heads for n, layer in zip(pairs, layers, strict=True)) <= max_weights
    keep: Keep = "heads" if is_every_head else "mean" if sum(pairs) <= max_weights else "none"
    kept: dict[int, LayerTrace] = {}

    def trace_layer(number: int, attention: Tensor) -> None:
        kept[number] = reduce_layer(layers[number - 1], attention[0], at, keep)

    with evaluation_mode(model), torch.no_grad(), disable_compile():
        with watch_windows(layers, trace_layer, None if "attention" in names else []):
            output = found(image)[0]
        maps = found.feature_maps(image, range(found.config.depth + 1))
        for number, z in enumerate(maps):
            if not z.isfinite().all():
                where = f"after layer {number}" if number else "before the first layer"
                raise ValueError(f"the tokens of this model are not finite {where}")
        strides = (layers[0].queries.stride, *(layer.queries.stride for layer in layers))
        return StagedTrace(
            (height, width),
            at,
            None if found.config.classes is None else to_numpy(output),
            tuple(kept[number] for number in sorted(kept)),
            strides,
            embedded=to_numpy(maps[0][0].permute(1, 2, 0)) if "embedded" in names else None,
            **trace_tokens([z[0] for z in maps], strides, at, names),
        )


def trace_tokens(
    maps: list[Tensor], strides: tuple[int, ...], at: tuple[int, int] | None, views: frozenset[str]
) -> dict[str, tuple[np.ndarray, ...]]:
    """Return the token maps of all layers, from feature maps [D, h, w]."""
    found: dict[str, list[np.ndarray]] = {}
    for z, stride in zip(maps, strides, strict=True):
        grid, flat = (z.shape[1], z.shape[2]), z.flatten(1).T  # [N, D]
        if "colours" in views:
            found.setdefault("colours", []).append(to_numpy(tokens.token_colours(flat).unflatten(0, grid)))
        if "norms" in views:
            found.setdefault("norms", []).append(to_numpy(tokens.token_norms(flat).unflatten(0, grid)))
        if "similar" in views and at is not None:
            row, column = find_cell(at, stride)
            similarity = tokens.token_similarity(flat, row * grid[1] + column)
            found.setdefault("similar", []).append(to_numpy(similarity.unflatten(0, grid)))
    return {name: tuple(arrays) for name, arrays in found.items()}


def number_windows(tokens: WindowTokens) -> Tensor:
    """Return the window of each cell of a grid, [h, w]: windows and their regions numbered together from 0."""
    windows = torch.arange(len(tokens.cells))[:, None] * (int(tokens.regions.max()) + 1) + tokens.regions
    found = torch.zeros(tokens.grid[0] * tokens.grid[1], dtype=torch.long)
    inside = tokens.cells >= 0
    found[tokens.cells[inside]] = windows[inside]
    return found.unique(return_inverse=True)[1].view(tokens.grid)


def scatter_keys(values: Tensor, keys: WindowTokens) -> Tensor:
    """Return values of the keys of all windows, [H, n, Nk], on the grid of the keys, [H, a, b]."""
    inside = keys.cells >= 0
    found = values.new_zeros(len(values), keys.grid[0] * keys.grid[1])
    found[:, keys.cells[inside].to(values.device)] = values[:, inside.to(values.device)]
    return found.view(len(values), *keys.grid)


def measure_distance(layer: AttentionLayer, attention: Tensor) -> Tensor:
    """Return the mean attention distance in pixels of each head, [H], of attention [H, n, Nq, Nk], as `heads.MeanDistance`."""
    queries, keys = layer.queries, layer.keys
    centres = [patch_centres(side.grid, side.stride, attention.device) for side in (queries, keys)]
    at_query, at_key = (
        c[side.cells.clamp_min(0).to(c.device)] for c, side in zip(centres, (queries, keys), strict=True)
    )
    distance = (at_query[:, :, None] - at_key[:, None]).square().sum(-1).sqrt()  # [n, Nq, Nk]
    weights = attention * (keys.cells >= 0).to(attention)[:, None]
    mean = (weights * distance).sum(-1) / weights.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return mean[:, (queries.cells >= 0).to(mean.device)].mean(-1)


def reduce_layer(
    layer: AttentionLayer, attention: Tensor, at: tuple[int, int] | None = None, keep: Keep = "heads"
) -> LayerTrace:
    """Return the arrays of one layer from the attention of one image, [n, H, Nq, Nk]."""
    attention = attention.transpose(0, 1)  # [H, n, Nq, Nk]
    queries, keys = layer.queries, layer.keys
    inside = (queries.cells >= 0).to(attention.device)
    windows, key_windows = number_windows(queries), number_windows(keys)
    received = scatter_keys((attention * inside[:, :, None]).sum(2), keys) * (key_windows.numel() / windows.numel())
    cell = selected = None
    if at is not None:
        cell = find_cell(at, queries.stride)
        window, query = (queries.cells == cell[0] * queries.grid[1] + cell[1]).nonzero()[0].tolist()
        only = torch.full_like(attention[:, :, 0], torch.nan)
        seen = (keys.regions[window] == queries.regions[window, query]).to(only.device)
        only[:, window, seen] = attention[:, window, query][:, seen]
        selected = scatter_keys(only, keys)
    weights = attention if keep == "heads" else attention.mean(0, keepdim=True)
    return LayerTrace(
        queries.grid,
        queries.stride,
        keys.grid,
        keys.stride,
        windows.int().numpy(),
        key_windows.int().numpy(),
        None if keep == "none" else to_numpy(weights).astype(np.float16),
        queries.cells.int().numpy(),
        keys.cells.int().numpy(),
        to_numpy(received),
        cell,
        None if selected is None else to_numpy(selected),
        to_numpy(measure_distance(layer, attention)),
        to_numpy(row_entropies(attention)[:, inside].mean(-1)),
    )


def stack_heads(rows: Iterable[np.ndarray]) -> np.ndarray:
    """Return a row of values per layer, [L, largest H]; NaN where a layer has fewer heads."""
    rows = list(rows)
    stacked = np.full((len(rows), max(map(len, rows))), np.nan, dtype=np.float32)
    for layer, values in enumerate(rows):
        stacked[layer, : len(values)] = values
    return stacked


def require_images(model: Model) -> Model:
    """Return the model; raise Unsupported for a model of clips."""
    if model.config.frames is not None:
        raise Unsupported("the analysis of images does not support models of clips: use trace_clip")
    return model


def extract_stage_positions(model: nn.Module) -> PositionMaps:
    """Return the learned bias of each layer by offset, [L, H, …]; NaN where a layer has fewer heads or a smaller window."""
    found = require_images(find_unsharded_model(model))
    layers = found.attention_layers(found.config.image_size)
    grid = max(layer.queries.grid for layer in layers)
    with torch.no_grad():
        tables = [to_numpy(layer.bias_table().flip(-2, -1)) for layer in layers if layer.bias_table is not None]
    if not tables:
        return PositionMaps("query", grid)
    shape = tuple(max(table.shape[axis] for table in tables) for axis in range(3))
    bias = np.full((len(tables), *shape), np.nan, dtype=np.float32)
    for layer, table in enumerate(tables):
        top, left = ((most - side) // 2 for most, side in zip(shape[1:], table.shape[1:], strict=True))
        bias[layer, : len(table), top : top + table.shape[1], left : left + table.shape[2]] = table
    return PositionMaps("bias", grid, bias=bias)


def measure_stage_distances(model: nn.Module, images: Iterable[Tensor]) -> AttentionDistances:
    """Return the mean attention distance over normalised batches [B, C, H, W]; NaN for heads that a layer lacks."""
    found, size, by_image = require_images(find_model(model)), (0, 0), list[list[np.ndarray]]()
    with evaluation_mode(model), torch.no_grad():
        for batch in images:
            size = (batch.shape[-2], batch.shape[-1])
            layers, values = found.attention_layers(size), list[list[np.ndarray]]()

            def measure(number: int, attention: Tensor, layers=layers, values=values) -> None:
                layer = layers[number - 1]
                values.append([to_numpy(measure_distance(layer, image.transpose(0, 1))) for image in attention])

            with watch_windows(layers, measure):
                model(batch)
            by_image += map(list, zip(*values, strict=True))
    if not by_image:
        raise ValueError("no images: attention distances need at least 1")
    stacked = np.stack([stack_heads(layers) for layers in by_image])
    spread = stacked.std(0, ddof=1) if len(stacked) > 1 else np.where(np.isnan(stacked[0]), np.nan, 0.0)
    return AttentionDistances(stacked.mean(0), spread.astype(np.float32), len(stacked), size)


def staged_arrays(trace: StagedTrace) -> dict[str, np.ndarray]:
    """Return the arrays of a trace by name; those of layers as "layer1.received", "layer1.colours", …, layer 0 the embedding."""
    found = {name: np.asarray(getattr(trace, name)) for name in ("size", "pixel", "logits", "strides", "embedded")}
    arrays = {name: value for name, value in found.items() if value.dtype != object}
    for number, layer in enumerate(trace.layers, start=1):
        values = {field.name: getattr(layer, field.name) for field in fields(layer)}
        arrays |= {f"layer{number}.{name}": np.asarray(value) for name, value in values.items() if value is not None}
    for name in ("colours", "similar", "norms"):
        for number, values in enumerate(getattr(trace, name) or ()):
            arrays[f"layer{number}.{name}"] = values
    return arrays

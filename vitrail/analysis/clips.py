"""Attention of a model of clips over time: what the class token, or the mean of all queries, attends to in each time step.

T frames, L layers, H heads of a layer, t time steps of h×w places, n windows.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.record import AttentionMaps, has_divided_attention, record_attention, resolve_layers
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Model
from vitrail.nn.shape import Grid

MapKind = Literal["attention", "space", "time"]  # joint or pooled attention; the two of divided attention


@dataclass(frozen=True)
class ClipMap:
    """Attention of one layer to the places of a clip."""

    layer: int  # from 1
    kind: MapKind
    values: np.ndarray  # float32 [H, t, h, w]

    @property
    def label(self) -> str:
        """Return the name of the layer and, of divided attention, the axis."""
        return f"layer {self.layer}" if self.kind == "attention" else f"layer {self.layer}, {self.kind}"

    @property
    def steps(self) -> np.ndarray:
        """Return the share of the attention to the places that each time step gets, mean over heads, float32 [t]."""
        sums = self.values.sum((2, 3)).mean(0)
        return sums / max(float(sums.sum()), float(np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class ClipTrace:
    """The central clip of a video with the attention of some layers."""

    frames: np.ndarray  # uint8 [t, C, H, W]: the frame in the middle of each time step
    numbers: tuple[int, ...]  # of these frames in the clip, from 1
    maps: tuple[ClipMap, ...]  # by layer; of divided attention time before space, as a layer computes them
    reader: str  # whose attention it is; of attention over time it is always that of the patches
    outputs: np.ndarray  # float32 [K]: logits, numbers or features of the clip

    @property
    def kinds(self) -> tuple[MapKind, ...]:
        """Return the kinds of maps of each layer."""
        return tuple(dict.fromkeys(each.kind for each in self.maps))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(each.layer for each in self.maps))

    def find_maps(self, kind: MapKind) -> list[ClipMap]:
        """Return the maps of one kind by layer."""
        return [each for each in self.maps if each.kind == kind]

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name: those of a layer as "layer1.attention", or "layer1.space" and "layer1.time"."""
        arrays = {f"layer{each.layer}.{each.kind}": each.values for each in self.maps}
        return arrays | {"layers": np.array(self.layers), "frames": self.frames, "outputs": self.outputs}


@torch.inference_mode()
def trace_clip(
    model: Model, preprocessing: Preprocessing, pixels: Tensor, layers: Sequence[int] | None = None
) -> ClipTrace:
    """Return the attention of these layers, default all, for a clip, uint8 [C, T, H, W]; raise Unsupported without any."""
    depth, size = model.config.depth, tuple(pixels.shape[1:])
    numbers = resolve_layers(depth, range(1, depth + 1) if layers is None else layers)
    has_class_token, prefix, grids = describe_tokens(model, size)

    def read(attention: Tensor) -> Tensor:  # [..., queries, P + keys] to [..., keys]
        rows = attention[..., 0, :] if has_class_token else attention[..., prefix:, :].mean(-2)
        return rows[..., prefix:]

    queries = 0 if has_class_token else None
    with ExitStack() as stack:
        if has_divided_attention(model):
            in_time = record_attention(model, numbers, reduce=lambda attention: attention.mean(-2), axis="time")
            in_space = record_attention(model, numbers, queries=queries, reduce=read, axis="space")
            recorded: dict[MapKind, AttentionMaps] = {
                "time": stack.enter_context(in_time),  # [B, h·w, H, t]
                "space": stack.enter_context(in_space),  # [B, t, H, h·w]
            }
        else:
            joint = record_attention(model, numbers, queries=queries, reduce=read)
            recorded = {"attention": stack.enter_context(joint)}  # [B, H, t·h·w], or pooled [B, 1, H, t·h·w]
        outputs = model(preprocessing.normalise(pixels[None].to(next(model.parameters()).device)))
    found = [
        ClipMap(number, kind, to_map(maps[number][0], kind, grids[number - 1]).numpy())
        for number in numbers
        for kind, maps in recorded.items()
    ]
    if not all(np.isfinite(each.values).all() for each in found) or not outputs.isfinite().all():
        raise ValueError("the attention or the outputs of this model are not finite")
    steps = max(each.values.shape[1] for each in found)
    shown = [(2 * step + 1) * size[0] // (2 * steps) for step in range(steps)]
    frames = pixels[:, shown].transpose(0, 1).numpy()
    reader = "class token" if has_class_token else "mean of patches"
    return ClipTrace(frames, tuple(n + 1 for n in shown), tuple(found), reader, outputs[0].float().cpu().numpy())


def to_map(recorded: Tensor, kind: MapKind, grid: Grid) -> Tensor:
    """Return recorded attention of a clip as [H, t, h, w]."""
    if kind == "time":
        return recorded.permute(1, 2, 0).unflatten(-1, grid[1:])
    if kind == "space":
        return recorded.transpose(0, 1).unflatten(-1, grid[1:])
    return recorded.reshape(-1, *grid)  # pooled attention is one window


def describe_tokens(model: Model, size: tuple[int, ...]) -> tuple[bool, int, list[Grid]]:
    """Return whether there is a class token, the number of prefix tokens, and the grid of each layer's keys."""
    if model.config.has_tokens:
        config = model.config.require_tokens("attention over time", clips=True)
        return config.prefix.outputs > 0, config.prefix.count, [config.grid_of(size)] * config.depth
    found = model.attention_layers(size)
    prefix = int((found[0].keys.cells < 0).sum())
    return prefix > 0, prefix, [layer.keys.grid for layer in found]

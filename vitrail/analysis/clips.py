"""Attention of a model of clips over time: what the class token, or the mean of all patches, attends to in each time step.

T frames, L layers, H heads, t time steps of h×w patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.record import record_attention, resolve_layers
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Model


@dataclass(frozen=True)
class ClipTrace:
    """The central clip of a video with the attention of some layers."""

    frames: np.ndarray  # uint8 [t, C, H, W]: the frame in the middle of each time step
    attention: np.ndarray  # float32 [L, H, t, h, w]
    layers: tuple[int, ...]  # from 1
    reader: str  # whose attention it is
    outputs: np.ndarray  # float32 [K]: logits, numbers or features of the clip

    @property
    def steps(self) -> np.ndarray:
        """Return the share of the patches' attention that each time step gets, mean over heads, float32 [L, t]."""
        sums = self.attention.sum((3, 4)).mean(1)
        return sums / np.maximum(sums.sum(1, keepdims=True), np.finfo(np.float32).tiny)


@torch.inference_mode()
def trace_clip(
    model: Model, preprocessing: Preprocessing, pixels: Tensor, layers: Sequence[int] | None = None
) -> ClipTrace:
    """Return the attention of these layers, default all, for a clip, uint8 [C, T, H, W]; raise Unsupported without one."""
    config = model.config.require_tokens("attention over time", clips=True)
    prefix, grid, depth = config.prefix, config.grid_of(tuple(pixels.shape[1:])), config.depth
    numbers = resolve_layers(depth, range(1, depth + 1) if layers is None else layers)
    has_class_token = prefix.outputs > 0

    def reduce(attention: Tensor) -> Tensor:
        rows = attention[..., 0, :] if has_class_token else attention[..., prefix.count :, :].mean(-2)
        return rows[..., prefix.count :].unflatten(-1, grid)

    device = next(model.parameters()).device
    queries = 0 if has_class_token else None
    with record_attention(model, numbers, queries=queries, reduce=reduce) as maps:
        outputs = model(preprocessing.normalise(pixels[None].to(device)))
    attention = np.stack([maps[layer][0].numpy() for layer in numbers])
    if not np.isfinite(attention).all() or not outputs.isfinite().all():
        raise ValueError("the attention or the outputs of this model are not finite")
    length = pixels.shape[1] // grid[0]
    frames = pixels[:, length // 2 :: length][:, : grid[0]].transpose(0, 1).numpy()
    reader = "class token" if has_class_token else "mean of patches"
    return ClipTrace(frames, attention, tuple(numbers), reader, outputs[0].float().cpu().numpy())

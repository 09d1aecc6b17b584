"""Attention maps of one image: all maps in a compact encoding for the page, or a single map.

L layers, H heads, h×w patches, n cells of a coarser grid.
"""

import math
import threading
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from vitrail.analysis.figures.image_view import to_rgb
from vitrail.analysis.heads import MAX_CELLS, coarsen_grid
from vitrail.analysis.page.data import encode_base64, encode_image, quantise_rows
from vitrail.analysis.results import ImageTrace
from vitrail.analysis.sounds import SoundAxes, draw_input, find_axes, flip_trace
from vitrail.analysis.trace import trace_image
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import TokenModel
from vitrail.serve.body import ImagePart
from vitrail.serve.decoding import Decode
from vitrail.serve.limits import RequestRefused
from vitrail.serve.models import ServedModel, top_predictions

MAX_ATTENTION_BYTES = 6_000_000  # of attention between patches in one response
MIN_CELLS = 16  # of the coarse grid, for any number of layers and heads
TOP_K = 5


@dataclass(frozen=True)
class MapRequest:
    """A single map: layer from 1 (None: last), head from 0 or mean, patch (None: class token or mean of patches)."""

    layer: int | None
    head: int | Literal["mean"]
    patch: tuple[int, int] | None = None


class AttentionViewer:
    """Computes attention maps, one image at a time."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.lock = threading.Lock()

    def __call__(self, served: ServedModel, part: ImagePart, map_request: MapRequest | None) -> dict[str, Any]:
        """Return the response for one image or sound, whose rows count from the top, the highest. Runs in a thread."""
        preprocessing = served.contract.preprocessing
        with self.lock:
            vit = require_vit(served)
            if map_request is not None:
                check_map_request(map_request, vit)
            pixels, _, (_, frames) = self.decode(part, preprocessing)
            if map_request is not None:
                return {"model": served.name, "map": attention_map(vit, pixels, preprocessing, map_request).tolist()}
            return {"model": served.name, **attention_data(served, vit, pixels, preprocessing, frames)}

    def draw_spectrogram(self, served: ServedModel, part: ImagePart) -> dict[str, Any]:
        """Return the spectrogram that a model of sounds takes. Runs in a thread."""
        preprocessing = served.contract.preprocessing
        if preprocessing.sound is None:
            raise RequestRefused(409, f"{served.name!r} takes {preprocessing.media}s: spectrograms are of sounds")
        with self.lock:
            pixels, _, (_, frames) = self.decode(part, preprocessing)
        axes = find_input_axes(preprocessing, frames, None)
        return {"model": served.name, **describe_spectrogram(pixels, axes)}


def require_vit(served: ServedModel) -> TokenModel:
    """Return the PyTorch model, which exists even if another runtime computes predictions; refuse if there is none."""
    if served.contract.media == "video":
        raise RequestRefused(409, f"{served.name!r} takes videos: attention maps are of images")
    if served.vit is None:
        message = f"{served.name!r} has no attention maps: serve a Vision Transformer checkpoint, not an exported file"
        raise RequestRefused(409, message)
    return served.vit


def check_map_request(map_request: MapRequest, vit: TokenModel) -> None:
    """Refuse a layer, head or patch that the model does not have."""
    size, (h, w) = vit.config.size, vit.config.shape.grid
    if map_request.layer is not None and not 1 <= map_request.layer <= size.depth:
        raise RequestRefused(404, f"layer must be 1 to {size.depth}, got {map_request.layer}")
    if map_request.head != "mean" and not 0 <= map_request.head < size.heads:
        raise RequestRefused(404, f"head must be 0 to {size.heads - 1} or mean, got {map_request.head}")
    if map_request.patch is not None and not (0 <= map_request.patch[0] < h and 0 <= map_request.patch[1] < w):
        row, column = map_request.patch
        raise RequestRefused(404, f"patch must be within rows 0 to {h - 1}, columns 0 to {w - 1}, got {row},{column}")


def normalise_pixels(pixels: np.ndarray, preprocessing: Preprocessing, vit: TokenModel) -> torch.Tensor:
    device = next(vit.parameters()).device
    return preprocessing.normalise(torch.from_numpy(pixels)[None].to(device))


def attention_map(
    vit: TokenModel, pixels: np.ndarray, preprocessing: Preprocessing, map_request: MapRequest
) -> np.ndarray:
    """Return one map, [h, w], of attention weights; with the prefix tokens' weights they sum to 1."""
    at, is_sound = map_request.patch, preprocessing.sound is not None
    if at is not None and is_sound:
        at = vit.config.shape.grid[0] - 1 - at[0], at[1]
    trace = trace_image(vit, normalise_pixels(pixels, preprocessing, vit), at=at, views=("attention",))
    trace = flip_trace(trace) if is_sound else trace
    maps = trace.attention if map_request.patch is None else trace.attention_at
    assert maps is not None
    layer = maps[-1 if map_request.layer is None else map_request.layer - 1]
    return layer.mean(0) if map_request.head == "mean" else layer[map_request.head]


def attention_data(
    served: ServedModel, vit: TokenModel, pixels: np.ndarray, preprocessing: Preprocessing, frames: int
) -> dict[str, Any]:
    """Return everything that the page draws for one image, or for one sound of so many frames."""
    layers, heads = vit.config.size.depth, vit.config.size.heads
    cells = max(MIN_CELLS, min(MAX_CELLS, math.isqrt(MAX_ATTENTION_BYTES // (layers * heads))))
    views = ("attention", "between", "rollout", *(("relevance",) if vit.config.classes else ()))
    trace = trace_image(vit, normalise_pixels(pixels, preprocessing, vit), max_cells=cells, views=views)
    picture = {"image": encode_image(to_rgb(pixels))} if preprocessing.sound is None else {}
    if preprocessing.sound is not None:
        trace = flip_trace(trace)
        picture = describe_spectrogram(pixels, find_input_axes(preprocessing, frames, vit.config))
        picture["lift"] = -trace.grid[0] % coarsen_grid(trace.grid, cells)[1]
    labels, several = served.contract.labels, served.contract.several
    ranked = trace.logits if served.has_classes else None
    predictions = [] if ranked is None else top_predictions(ranked, labels, several, TOP_K)
    return {
        "grid": list(trace.grid),
        "size": list(preprocessing.size),
        **picture,
        "answers": predictions,
        "layers": layers,
        "heads": heads,
        "reader": trace.reader,
        **encode_maps(trace, cells),
        "target": None if trace.target is None else (labels[trace.target] if labels else str(trace.target)),
    }


def encode_maps(trace: ImageTrace, cells: int) -> dict[str, Any]:
    """Return the maps as base64 bytes, each with the value of its largest byte as scale."""
    assert trace.attention is not None
    assert trace.between is not None
    assert trace.between_grid is not None
    attention, scale = quantise_rows(trace.attention.reshape(*trace.attention.shape[:2], -1))
    between, between_scale = quantise_rows(trace.between)
    maps: dict[str, Any] = {
        "attention": encode_base64(attention),
        "attention_scale": round_scale(scale),
        "between": encode_base64(between),
        "between_scale": encode_base64(between_scale),  # float32, [L, H, n]
        "between_grid": list(trace.between_grid),
        "between_side": coarsen_grid(trace.grid, cells)[1],  # patches along the side of a cell
    }
    for name in ("rollout", "relevance"):
        values = getattr(trace, name)
        if values is not None:
            codes, largest = quantise_rows(values.reshape(1, -1).clip(0))
            maps[name], maps[f"{name}_scale"] = encode_base64(codes), float(largest[0])
    return maps


def round_scale(scale: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in layer] for layer in scale]


def describe_spectrogram(pixels: np.ndarray, axes: SoundAxes) -> dict[str, Any]:
    """Return the image of a model's input as a data URL, high frequencies at the top, and its axes."""
    return {"image": encode_image(draw_input(pixels[0], axes)), "axes": axes.to_page()}


def find_input_axes(preprocessing: Preprocessing, frames: int, config: Any) -> SoundAxes:
    """Return the axes of the input of a sound of so many frames; `config` is that of a model with patches, or None."""
    if config is None:
        return find_axes(frames, preprocessing, preprocessing.size, 1)
    overlap = getattr(config.embed, "overlap", 0)
    return find_axes(frames, preprocessing, config.grid_of(preprocessing.size), config.embed.stride, overlap)

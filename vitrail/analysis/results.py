"""Results of the analysis of a model and of one image as NumPy arrays, float32 unless stated otherwise.

L layers, H heads, h×w patches of the model's grid, T tokens, D width.
"""

from dataclasses import dataclass, fields

import numpy as np

from vitrail.nn.shape import Grid


@dataclass(frozen=True)
class ImageTrace:
    """Arrays of one image in a model. Views that were not requested, or that the model does not have, are None."""

    grid: Grid  # h, w
    patch: int  # side of a patch in pixels
    prefix: int  # tokens before the patches
    reader: str  # query of `attention`: "class token", "output tokens" (AST), or "mean of patches" without them
    logits: np.ndarray | None = None  # [K]
    attention: np.ndarray | None = None  # [L, H, h, w]: of the reader to every patch; sums to at most 1
    at: tuple[int, int] | None = None  # row and column of the selected patch
    attention_at: np.ndarray | None = None  # [L, H, h, w]: of the selected patch to every patch
    between: np.ndarray | None = None  # [L, H, n, n] float16, n = a·b: all patches to all patches, on `between_grid`
    between_grid: Grid | None = None  # a, b: the grid itself, or a coarser one that limits the size of the page
    distance: np.ndarray | None = None  # [L, H]: mean attention distance in pixels
    entropy: np.ndarray | None = None  # [L, H]: entropy of attention in nats, the mean over tokens
    alike: np.ndarray | None = None  # [L, H, H]: 1 − Jensen-Shannon divergence (bits) of two heads
    rollout: np.ndarray | None = None  # [h, w]: attention rollout over all layers
    relevance: np.ndarray | None = None  # [h, w]: gradient-weighted relevance for `target`
    target: int | None = None  # class of `relevance`
    colours: np.ndarray | None = None  # [L+1, h, w, 3] in 0…1: three principal components of the patch tokens; 0 is z_0
    similar: np.ndarray | None = None  # [L+1, h, w]: cosine similarity of every patch token with the selected one
    norms: np.ndarray | None = None  # [L+1, h, w]: norm of every patch token
    prefix_norms: np.ndarray | None = None  # [L+1, prefix]
    spectrum: np.ndarray | None = None  # [L+1, F]: log amplitude of the token maps, relative to frequency 0
    frequencies: np.ndarray | None = None  # [F], 0 to 1, in units of pi per patch
    embedded: np.ndarray | None = None  # [h, w, D]: patches after the projection, before positions
    positions: np.ndarray | None = None  # [h, w, D]: position embedding, if it is added


@dataclass(frozen=True)
class PositionMaps:
    """Maps of the position embedding of a model."""

    kind: str  # "added", "bias", "rotary", "query" (a bias that depends on the image: no map) or "none"
    grid: Grid
    similarity: np.ndarray | None = None  # "added": [h, w, h, w], cosine similarity of each position with all others
    bias: np.ndarray | None = None  # "bias": [tables, H, 2h-1, 2w-1], by offset in rows and columns
    turn: np.ndarray | None = None  # "rotary": [2h-1, 2w-1], mean cosine of the rotation by offset


@dataclass(frozen=True)
class PrincipalFilters:
    """First principal components of the patch embedding filters."""

    tiles: np.ndarray  # [count, P, P, C]: each scaled to -1…1
    explained: np.ndarray  # [count]: fraction of the variance
    source: str  # "patch projection" or "first convolution"


@dataclass(frozen=True)
class AttentionDistances:
    """Mean attention distance over a set of images (figure 7, right)."""

    mean: np.ndarray  # [L, H] in pixels
    spread: np.ndarray  # [L, H]: standard deviation over images
    pictures: int
    size: tuple[int, int]  # height and width of the preprocessed images in pixels


@dataclass(frozen=True)
class ModelProfile:
    """Statistics of a model by layer over a set of images, each with its standard deviation over images."""

    distance: np.ndarray  # [L, H]: mean attention distance in pixels
    distance_spread: np.ndarray
    diversity: np.ndarray  # [L, H]: 1 − mean cosine similarity of a head's attention and that of the others
    diversity_spread: np.ndarray
    mutual: np.ndarray  # [L, H]: normalised mutual information of query and key
    mutual_spread: np.ndarray
    spectrum: np.ndarray  # [L+1, F]: log amplitude of the token maps, relative to frequency 0; layer 0 is z_0
    spectrum_spread: np.ndarray
    frequencies: np.ndarray  # [F], 0 to 1, in units of pi per patch
    everywhere: float  # distance of uniform attention in pixels
    grid: Grid
    size: tuple[int, int]  # height and width of the preprocessed images in pixels
    pictures: int


ModelView = AttentionDistances | PositionMaps | PrincipalFilters


def to_arrays(result: ImageTrace | ModelView | ModelProfile) -> dict[str, np.ndarray]:
    """Return every field that is not None by name; numbers, pairs and strings as small arrays."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: np.asarray(value) for name, value in values.items() if value is not None}


def space_evenly(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` evenly spaced indices below `count`, with the first and the last."""
    return sorted({round(k) for k in np.linspace(0, count - 1, min(count, max_count))})

"""What there is to see in a model and in one picture's way through it: arrays with names, for plots, pages and files.

L layers, H heads, h×w patches in the model's grid, T tokens, D width. All arrays are NumPy's, float32 unless they say otherwise.
"""

from dataclasses import dataclass

import numpy as np

from vitrail.nn.shape import Grid


@dataclass(frozen=True)
class Seen:
    """One picture's way through a model. What was not asked for, or what the model does not have, is None."""

    grid: Grid  # h, w
    patch: int  # pixels along a patch
    prefix: int  # tokens before the patches
    reader: str  # whose attention `attention` shows: "class token", or "mean of patches" in a model without one
    logits: np.ndarray | None = None  # [K]
    attention: np.ndarray | None = (
        None  # [L, H, h, w]: of the reader to every patch; softmax, so a row sums to at most 1
    )
    at: tuple[int, int] | None = None  # row and column of the chosen patch
    attention_at: np.ndarray | None = None  # [L, H, h, w]: of the chosen patch to every patch
    between: np.ndarray | None = None  # [L, H, n, n] float16, n = a·b: all patches to all patches, on `between_grid`
    between_grid: Grid | None = None  # a, b: the grid itself, or a coarser one where that would be too large a page
    distance: np.ndarray | None = None  # [L, H]: mean attention distance in pixels
    entropy: np.ndarray | None = None  # [L, H]: of attention, in nats, the mean over tokens
    alike: np.ndarray | None = (
        None  # [L, H, H]: how alike the attention of two heads is: 1 minus Jensen-Shannon in bits
    )
    rollout: np.ndarray | None = None  # [h, w]: attention rollout over all layers
    relevance: np.ndarray | None = None  # [h, w]: gradient-weighted relevance for `target`
    target: int | None = None  # the class that `relevance` explains
    colours: np.ndarray | None = None  # [L+1, h, w, 3] in 0…1: three principal components of the patch tokens; 0 is z_0
    similar: np.ndarray | None = None  # [L+1, h, w]: cosine of every patch token with the chosen one
    norms: np.ndarray | None = None  # [L+1, h, w]: length of every patch token
    prefix_norms: np.ndarray | None = None  # [L+1, prefix]
    spectrum: np.ndarray | None = (
        None  # [L+1, F]: log amplitude of the token maps by frequency, less that of frequency 0
    )
    frequencies: np.ndarray | None = None  # [F], 0 to 1: in units of pi for a step of one patch
    embedded: np.ndarray | None = None  # [h, w, D]: patches after the projection, before positions
    positions: np.ndarray | None = None  # [h, w, D]: what is added to them, if it is


@dataclass(frozen=True)
class Positions:
    """How a model tells where a patch is."""

    kind: str  # "added", "bias", "rotary" or "none"
    grid: Grid
    similarity: np.ndarray | None = None  # [h, w, h, w]: cosine of each position with all others, where they are added
    bias: np.ndarray | None = None  # [tables, H, 2h-1, 2w-1]: by offset in rows and columns, where attention is biased
    turn: np.ndarray | None = None  # [2h-1, 2w-1]: mean cosine by offset, where queries and keys are turned


@dataclass(frozen=True)
class Filters:
    """The first principal components of the filters that make tokens from pixels."""

    tiles: np.ndarray  # [count, P, P, C]: each between -1 and 1 by its largest value
    explained: np.ndarray  # [count]: share of the filters' variance
    source: str  # which weights these are, in words: "patch projection", "first convolution"


@dataclass(frozen=True)
class Distances:
    """Mean attention distance over a set of pictures, figure 7 (right)."""

    mean: np.ndarray  # [L, H] in pixels
    spread: np.ndarray  # [L, H]: standard deviation over pictures
    pictures: int
    size: tuple[int, int]  # of the pictures as the model saw them, in pixels


@dataclass(frozen=True)
class Profile:
    """A model over a set of pictures, layer by layer: what two models are compared by, each with its deviation over pictures."""

    distance: np.ndarray  # [L, H]: mean attention distance in pixels
    distance_spread: np.ndarray
    diversity: np.ndarray  # [L, H]: 1 minus the mean cosine between a head's attention and that of the others
    diversity_spread: np.ndarray
    mutual: np.ndarray  # [L, H]: normalised mutual information of query and key
    mutual_spread: np.ndarray
    spectrum: np.ndarray  # [L+1, F]: log amplitude of the token maps by frequency, less that of frequency 0; 0 is z_0
    spectrum_spread: np.ndarray
    frequencies: np.ndarray  # [F], 0 to 1: in units of pi for a step of one patch
    everywhere: float  # the distance of attention that is the same everywhere, in pixels
    grid: Grid
    size: tuple[int, int]  # of the pictures as the model saw them, in pixels
    pictures: int

"""From an image to N patch tokens: the x_p E of equation 1.

B images, C channels, P pixels along a patch, N patches, D width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.nn.shape import Grid


class Embedding(nn.Module):
    """What every patch embedding is: it knows how many pixels a token covers, and gives one token for each patch."""

    stride: int
    channels: int

    def grid(self, image: Tensor) -> Grid:
        """Rows and columns of patches in this image, or an error that says which sizes would do."""
        if image.ndim != 4:
            raise ValueError(f"an image batch has the shape [B, C, H, W], got {list(image.shape)}")
        _, channels, height, width = image.shape
        if channels != self.channels:
            raise ValueError(f"the image has {channels} channels and the model takes {self.channels}")
        return divide((height, width), self.stride)


def divide(size: tuple[int, int], stride: int) -> Grid:
    """The grid of patches of an image, which must hold a whole number of them."""
    for side in size:
        if side < 1 or side % stride:
            below, above = side // stride * stride, max(1, side // stride + 1) * stride
            remedy = f"{below} or {above}" if below > 0 else f"{above}"
            raise ValueError(
                f"image size {size[0]}×{size[1]} is not divisible by the patch size {stride}: use {remedy} for {side}"
            )
    return size[0] // stride, size[1] // stride


def choose(tokens: Tensor, keep: Tensor | None) -> Tensor:
    """The tokens that `keep`, [B, n], names in each image; all where it is None."""
    if keep is None:
        return tokens
    b, n, _ = tokens.shape
    rows = keep + torch.arange(0, b * n, n, device=keep.device).unsqueeze(
        1
    )  # whole rows: ten times quicker than gather
    return tokens.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, -1))


def patchify(image: Tensor, patch: int) -> Tensor:
    """x_p: the N patches in reading order, each flattened channel by channel."""
    b, c, height, width = image.shape
    h, w = height // patch, width // patch
    x_p = image.view(b, c, h, patch, w, patch).permute(0, 2, 4, 1, 3, 5)  # [B, h, w, C, P, P]
    return x_p.reshape(b, h * w, c * patch * patch)  # [B, N, C·P²]


class PatchEmbedding(Embedding):
    """The paper's patches: each one flattened and projected by the matrix E, which equals a convolution of stride P."""

    def __init__(self, patch: int, channels: int, width: int, normed: bool, bias: bool) -> None:
        super().__init__()
        self.stride, self.channels = patch, channels
        values = channels * patch * patch
        self.norm_in = nn.LayerNorm(values) if normed else nn.Identity()
        self.projection = nn.Linear(values, width, bias=bias)  # E
        self.norm_out = nn.LayerNorm(width) if normed else nn.Identity()

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        x_p = choose(patchify(image, self.stride), keep)  # [B, N, C·P²]
        return self.norm_out(self.projection(self.norm_in(x_p)))  # [B, N, D]


class ConvStemEmbedding(Embedding):
    """Convolutions of stride 2, each doubling the channels, then one of 1×1 ("Early Convolutions Help Transformers See
    Better", Xiao et al. 2021)."""

    def __init__(self, patch: int, channels: int, width: int) -> None:
        super().__init__()
        self.stride, self.channels = patch, channels
        steps = patch.bit_length() - 1
        layers: list[nn.Module] = []
        for step in reversed(range(steps)):
            out = width // 2**step
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, width, 1))

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        first, *rest = self.layers
        x = first(image).contiguous(memory_format=torch.channels_last)  # quicker on a CPU
        for layer in rest:
            x = layer(x)
        return choose(x.flatten(2).transpose(1, 2), keep)  # [B, N, D]


@dataclass(frozen=True)
class Patches:
    """Linear patches of `patch`² pixels; `normed` puts a LayerNorm before and after, as vit-pytorch does, and CLIP's have
    no bias."""

    patch: int = 16
    normed: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        if self.patch < 1:
            raise ValueError(f"patch size {self.patch}: it must be at least 1 pixel")

    @property
    def stride(self) -> int:
        return self.patch

    def build(self, channels: int, width: int) -> Embedding:
        return PatchEmbedding(self.patch, channels, width, self.normed, self.bias)


@dataclass(frozen=True)
class ConvStem:
    """A stack of stride-2 convolutions in place of the linear patches."""

    patch: int = 16

    def __post_init__(self) -> None:
        if self.patch < 2 or self.patch & (self.patch - 1):
            near = 2 ** max(1, round(math.log2(max(self.patch, 2))))
            raise ValueError(
                f"a convolutional stem halves the image again and again, so its patch size is a power of two: "
                f"use {near} instead of {self.patch}"
            )

    @property
    def stride(self) -> int:
        return self.patch

    def build(self, channels: int, width: int) -> Embedding:
        narrowest = self.patch // 2
        if width % narrowest:
            raise ValueError(
                f"a convolutional stem for patches of {self.patch} needs a width divisible by {narrowest}, got {width}: "
                f"use {max(1, round(width / narrowest)) * narrowest}"
            )
        return ConvStemEmbedding(self.patch, channels, width)

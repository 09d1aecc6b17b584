"""Patch embeddings and prefix tokens: x_p E and x_class of equation 1.

B images, C channels, P pixels along a patch, N patches, D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.linear import LinearLayer
from vitrail.nn.shape import Grid


class Embedding(nn.Module):
    """The interface of a patch embedding: one token per cell of the image's grid."""

    stride: int  # pixels from one patch to the next
    channels: int
    axes: ClassVar[str] = "H, W"  # of an input, after batch and channels

    def __init__(self, slot: "PatchSlot", channels: int) -> None:
        super().__init__()
        self.slot, self.stride, self.channels = slot, slot.stride, channels

    def grid(self, images: Tensor) -> Grid:
        """Return the patches along each axis of these images; raise ValueError for an unsupported shape."""
        batch, kind = ("an image batch", "images") if self.axes == "H, W" else ("a batch of clips", "clips")
        if images.ndim != 3 + self.axes.count(","):
            raise ValueError(f"{batch} must have the shape [B, C, {self.axes}], got {list(images.shape)}")
        _, channels, *size = images.shape
        if channels != self.channels:
            raise ValueError(f"the model takes {self.channels} channels, got {kind} of {channels}")
        return self.slot.grid_of(tuple(size))

    def cut_patches(self, images: Tensor) -> Tensor:
        """Return the values of every patch, flattened channel by channel: [B, N, values]."""
        return patchify(images, self.stride)


class PatchSlot(Protocol):
    """The interface of the slots of patch embeddings."""

    @property
    def stride(self) -> int: ...

    def grid_of(self, size: tuple[int, ...]) -> Grid: ...


def compute_grid(size: tuple[int, ...], stride: int, overlap: int = 0) -> Grid:
    """Return the grid of patches of an image; raise ValueError unless whole patches cover it.

    Overlapping patches are those of a convolution: pixels beyond the last whole patch are not covered.
    """
    sides, patch = "×".join(map(str, size)), stride + overlap
    for side in size:
        if overlap and side < patch:
            raise ValueError(
                f"image size {sides} is smaller than the patch size {patch}: use at least {patch} for {side}"
            )
        if not overlap and (side < 1 or side % patch):
            below, above = side // patch * patch, (side // patch + 1) * patch
            remedy = f"{below} or {above}" if below > 0 else f"{patch}"
            raise ValueError(f"image size {sides} is not divisible by the patch size {patch}: use {remedy} for {side}")
    return tuple((side - overlap) // stride for side in size)


def select_tokens(tokens: Tensor, keep: Tensor | None) -> Tensor:
    """Return the tokens that `keep`, [B, n], selects in each image; all tokens if it is None."""
    if keep is None:
        return tokens
    b, n, _ = tokens.shape
    # index_select of whole rows is ten times faster than gather
    rows = keep + torch.arange(0, b * n, n, device=keep.device).unsqueeze(1)
    return tokens.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, -1))


def patchify(image: Tensor, patch: int, stride: int | None = None) -> Tensor:
    """Return x_p: N patches in reading order, each flattened channel by channel. They overlap if `stride` < `patch`."""
    if stride not in (None, patch):
        return F.unfold(image, patch, stride=stride).transpose(1, 2)
    b, c, height, width = image.shape
    h, w = height // patch, width // patch
    x_p = image.view(b, c, h, patch, w, patch).permute(0, 2, 4, 1, 3, 5)  # [B, h, w, C, P, P]
    return x_p.reshape(b, h * w, c * patch * patch)  # [B, N, C·P²]


class PatchEmbedding(Embedding):
    """The paper's linear patches: each is flattened and projected by the matrix E, as a convolution of stride P would."""

    def __init__(self, slot: "Patches", channels: int, width: int) -> None:
        super().__init__(slot, channels)
        self.patch = slot.patch
        values = channels * slot.patch**2
        self.norm_in = nn.LayerNorm(values) if slot.normed else nn.Identity()
        self.projection = LinearLayer(values, width, bias=slot.bias)  # E
        self.norm_out = nn.LayerNorm(width) if slot.normed else nn.Identity()

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        x_p = select_tokens(patchify(image, self.patch, self.stride), keep)  # [B, N, C·P²]
        return self.norm_out(self.projection(self.norm_in(x_p)))  # [B, N, D]


def tubeletify(clip: Tensor, frames: int, patch: int) -> Tensor:
    """Return x_p of clips [B, C, T, H, W]: tubelets of `frames`×P×P values in the order of time, row and column."""
    steps = clip.unflatten(2, (-1, frames)).unflatten(4, (-1, patch)).unflatten(6, (-1, patch))
    return steps.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)  # [B, t, h, w, C, F, P, P] to [B, N, C·F·P²]


class TubeletEmbedding(Embedding):
    """Linear tubelets, patches over several frames: a convolution in three dimensions whose stride is its kernel."""

    axes: ClassVar[str] = "T, H, W"

    def __init__(self, slot: "Tubelets", channels: int, width: int) -> None:
        super().__init__(slot, channels)
        self.frames, self.patch = slot.frames, slot.patch
        self.projection = LinearLayer(channels * slot.frames * slot.patch**2, width, bias=slot.bias)

    def forward(self, clip: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.projection(select_tokens(self.cut_patches(clip), keep))  # [B, N, D]

    def cut_patches(self, images: Tensor) -> Tensor:
        return tubeletify(images, self.frames, self.patch)


class ConvStemEmbedding(Embedding):
    """Convolutions of stride 2, each doubling the channels, then a 1×1 convolution (Xiao et al. 2021, "Early
    Convolutions Help Transformers See Better")."""

    def __init__(self, slot: "ConvStem", channels: int, width: int) -> None:
        super().__init__(slot, channels)
        steps = slot.patch.bit_length() - 1
        layers: list[nn.Module] = []
        for step in reversed(range(steps)):
            out = width // 2**step
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, width, 1))

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        first, *rest = self.layers
        x = first(image).contiguous(memory_format=torch.channels_last)  # faster on a CPU
        for layer in rest:
            x = layer(x)
        return select_tokens(x.flatten(2).transpose(1, 2), keep)  # [B, N, D]


class ConvPoolEmbedding(Embedding):
    """3×3 convolutions and max pooling, as the tokens of CCT ("Escaping the Big Data Paradigm", Hassani et al. 2021), with
    several convolutions at each resolution below the image's; then a 1×1 convolution."""

    def __init__(self, slot: "ConvPool", channels: int, width: int) -> None:
        super().__init__(slot, channels)
        layers: list[nn.Module] = []
        steps = slot.patch.bit_length() - 1
        for step in range(steps):
            out = width // 2 ** (steps - 1 - step)
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.MaxPool2d(2), *norm_and_activate(out)]
            for _ in range(slot.convs - 1 if step else 0):
                layers += [nn.Conv2d(out, out, 3, padding=1, bias=False), *norm_and_activate(out)]
            channels = out
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, width, 1))

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.layers(image.contiguous(memory_format=torch.channels_last))  # faster on a CPU
        return select_tokens(x.flatten(2).transpose(1, 2), keep)  # [B, N, D]


def norm_and_activate(channels: int) -> tuple[nn.Module, nn.Module]:
    """Return the layers after a convolution."""
    return nn.BatchNorm2d(channels), nn.GELU()


@dataclass(frozen=True)
class Patches:
    """Linear patches of `patch`² pixels. `normed` adds a LayerNorm before and after (vit-pytorch); CLIP has no bias.

    With an `overlap`, the step from patch to patch is shorter (AST), and pixels after the last whole patch are not read.
    """

    patch: int = 16
    normed: bool = False
    bias: bool = True
    overlap: int = field(default=0, metadata={"omit_default": True})  # pixels that neighbouring patches share
    input_weight: ClassVar[str] = "projection.weight"

    def __post_init__(self) -> None:
        if self.patch < 1:
            raise ValueError(f"patch size must be at least 1 pixel, got {self.patch}")
        if not 0 <= self.overlap < self.patch:
            raise ValueError(f"overlap must be at least 0 and below the patch size {self.patch}, got {self.overlap}")

    @property
    def stride(self) -> int:
        return self.patch - self.overlap

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return compute_grid(size, self.stride, self.overlap)

    def build(self, channels: int, width: int) -> Embedding:
        return PatchEmbedding(self, channels, width)


@dataclass(frozen=True)
class Tubelets:
    """Linear tubelets of `frames` frames and `patch`² pixels, for models of clips (ViViT, VideoMAE; 1 frame: TimeSformer)."""

    frames: int = 2
    patch: int = 16
    bias: bool = True
    input_weight: ClassVar[str] = "projection.weight"

    def __post_init__(self) -> None:
        if self.patch < 1:
            raise ValueError(f"patch size must be at least 1 pixel, got {self.patch}")
        if self.frames < 1:
            raise ValueError(f"a tubelet must have at least 1 frame, got {self.frames}")

    @property
    def stride(self) -> int:
        return self.patch

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        frames, *sides = size
        if frames < self.frames or frames % self.frames:
            steps = dict.fromkeys(max(1, frames // self.frames + more) for more in (0, 1))
            remedy = " or ".join(str(step * self.frames) for step in steps)
            raise ValueError(f"{frames} frames are not divisible into tubelets of {self.frames}: use {remedy}")
        return (frames // self.frames, *compute_grid(tuple(sides), self.patch))

    def build(self, channels: int, width: int) -> Embedding:
        return TubeletEmbedding(self, channels, width)


@dataclass(frozen=True)
class ConvStem:
    """A stack of stride-2 convolutions in place of the linear patches."""

    patch: int = 16
    input_weight: ClassVar[str] = "layers.0.weight"
    name: ClassVar[str] = "conv-stem"
    module: ClassVar[Callable[..., Embedding]] = ConvStemEmbedding

    def __post_init__(self) -> None:
        if self.patch < 2 or self.patch & (self.patch - 1):
            near = 2 ** max(1, round(math.log2(max(self.patch, 2))))
            raise ValueError(f"the patch size of a {self.name} must be a power of two, got {self.patch}: use {near}")

    @property
    def stride(self) -> int:
        return self.patch

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return compute_grid(size, self.patch)

    def build(self, channels: int, width: int) -> Embedding:
        narrowest = self.patch // 2
        if width % narrowest:
            near = max(1, round(width / narrowest)) * narrowest
            stem = f"{self.name} with patch {self.patch}"
            raise ValueError(f"{stem} needs a width divisible by {narrowest}, got {width}: use {near}")
        return self.module(self, channels, width)


@dataclass(frozen=True)
class ConvPool(ConvStem):
    """Convolutions and max pooling in place of the linear patches: `convs` convolutions at each resolution, one at the
    image's own. For small images and short training: more computation per token, better features from few epochs."""

    convs: int = 2
    name: ClassVar[str] = "conv-pool"
    module: ClassVar[Callable[..., Embedding]] = ConvPoolEmbedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convs < 1:
            raise ValueError(f"a conv-pool needs at least 1 convolution per resolution, got {self.convs}")


class PrefixTokens(nn.Module):
    """Learned tokens, the same for every image: those that the pooling reads, then registers."""

    def __init__(self, outputs: int, registers: int, width: int) -> None:
        super().__init__()
        self.outputs = nn.Parameter(torch.empty(1, outputs, width)) if outputs else None
        self.registers = nn.Parameter(torch.empty(1, registers, width)) if registers else None

    def prepend_to(self, x: Tensor) -> Tensor:
        """Return the sequence [prefix; x], [B, T, D]."""
        parts = [part.expand(x.shape[0], -1, -1) for part in (self.outputs, self.registers) if part is not None]
        return torch.cat((*parts, x), 1) if parts else x


@dataclass(frozen=True)
class Prefix:
    """The number of tokens before the patches."""

    outputs: int = 1  # 1: class token; 2: class token and DeiT's distillation token
    registers: int = 0  # "Vision Transformers Need Registers": tokens that the pooling ignores

    def __post_init__(self) -> None:
        if self.outputs not in (0, 1, 2):
            raise ValueError(f"output tokens must be 0, 1 (class) or 2 (class, distillation), got {self.outputs}")
        if self.registers < 0:
            raise ValueError(f"registers must be at least 0, got {self.registers}")

    @property
    def count(self) -> int:
        return self.outputs + self.registers

    def build(self, width: int) -> PrefixTokens:
        return PrefixTokens(self.outputs, self.registers, width)

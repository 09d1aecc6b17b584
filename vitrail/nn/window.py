"""Attention in windows, the layers of Swin (Liu et al. 2021) and of Swin v2 (Liu et al. 2022).

The tokens stand in a grid that is cut into windows; attention is computed inside each. Every second layer shifts the
windows by half their side, so that information passes between them.

B images, a grid of h×w tokens, n windows of M×M tokens, N = M², D width, H heads, d = D/H.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.attention import dot_product_attention
from vitrail.nn.block import ResidualBranch
from vitrail.nn.linear import LinearLayer, linear
from vitrail.nn.mlp import MLP
from vitrail.nn.position import compute_log_offsets
from vitrail.nn.recording import WindowTokens
from vitrail.nn.shape import Grid

MASKED = -100.0  # added to q·k of tokens that are neighbours only because the grid was rolled
MAX_LOG_SCALE = math.log(100.0)  # of the scale of Swin v2's cosine attention
BIAS_MLP_WIDTH = 512


@dataclass(frozen=True)
class WindowShape:
    """The sizes of one layer with windows."""

    width: int
    heads: int
    window: int  # M
    pretrained_window: int  # of the model that Swin v2's bias was trained with
    mlp: int
    eps: float

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.width}")
        if self.window < 1:
            raise ValueError(f"the window must be at least 1 token wide, got {self.window}")


ShiftedSides = Literal["side", "image", "configured"]


@dataclass(frozen=True)
class ShiftRule:
    """Rule for shifting windows on grids that they do not fill, where projects differ.

    A side that one window covers is not shifted. `side`: each side of the actual image is tested (torchvision). `image`: if
    one side is covered, neither is shifted (Microsoft, transformers). `configured`: each side of the configured image size
    is tested (timm; transformers for Swin v2). With `pad_first=False` a grid is padded after the shift (timm).
    """

    sides: ShiftedSides = "image"
    pad_first: bool = True

    def __post_init__(self) -> None:
        if self.sides not in get_args(ShiftedSides):
            raise ValueError(f"sides must be {', '.join(get_args(ShiftedSides))}, got {self.sides!r}")

    def __str__(self) -> str:
        return f"by {self.sides}, padded {'before' if self.pad_first else 'after'} the shift"

    def choose_shift(self, window: int, grid: Grid, configured: Grid) -> Grid:
        """Return by how many tokens the windows of a shifted layer move along each side of the grid."""
        covered = [side <= window for side in (configured if self.sides == "configured" else grid)]
        if self.sides == "image":
            covered = [any(covered)] * len(covered)
        return tuple(0 if full else window // 2 for full in covered)


# --- the grid in windows ---


def pad_grid(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """Return a grid [B, h, w, D] with columns and rows of zeros at its end; without any, the grid itself, not a copy."""
    return F.pad(x, (0, 0, 0, padding[0], 0, padding[1])) if any(padding) else x


def partition_windows(x: Tensor, window: int) -> Tensor:
    """Cut a grid [B, h, w, D], whose sides are multiples of the window, into windows [B, n, N, D]."""
    b, h, w, d = x.shape
    x = x.view(b, h // window, window, w // window, window, d)
    return x.transpose(2, 3).reshape(b, -1, window * window, d)


def join_windows(windows: Tensor, grid: Grid, window: int) -> Tensor:
    """Return the grid [B, h, w, D] of windows [B, n, N, D]."""
    h, w = grid
    b, d = windows.shape[0], windows.shape[-1]
    x = windows.view(b, h // window, w // window, window, window, d)
    return x.transpose(2, 3).reshape(b, h, w, d)


def compute_offset_index(window: int, device: torch.device) -> Tensor:
    """Return the row of each query-key offset in a table of (2M - 1)² offsets, in reading order: [N, N]."""
    token = torch.arange(window * window, device=device)
    y, x = token // window, token % window
    dy = y[:, None] - y[None, :] + window - 1
    dx = x[:, None] - x[None, :] + window - 1
    return dy * (2 * window - 1) + dx


def compute_regions(grid: Grid, window: int, shift: Grid, device: torch.device) -> Tensor:
    """Return the region of each token in the windows of a rolled grid, [n, N]: tokens of two regions are not neighbours.

    Rolling brings the first rows and columns beside the last ones; they share a window.
    """
    regions = []
    for side, moved in zip(grid, shift, strict=True):
        index = torch.arange(side, device=device)
        regions.append((index >= side - window).int() + (index >= side - moved).int() if moved else index * 0)
    region = 3 * regions[0][:, None] + regions[1][None, :]  # [h, w]
    return partition_windows(region[None, :, :, None], window)[0, :, :, 0]


def compute_shift_mask(grid: Grid, window: int, shift: Grid, like: Tensor) -> Tensor:
    """Return what is added to q·k in the windows of a rolled grid, [n, N, N]: 0 within a region, MASKED between two."""
    region = compute_regions(grid, window, shift, like.device)
    return (region[:, :, None] != region[:, None, :]).to(like.dtype) * MASKED


# --- attention ---


class WindowAttention(nn.Module):
    """Multi-head self-attention inside windows, with a learned bias per head and offset (Swin, equation 4)."""

    def __init__(self, shape: WindowShape, dropout: float) -> None:
        super().__init__()
        self.heads, self.window, self.dropout = shape.heads, shape.window, dropout
        self.qkv = LinearLayer(shape.width, 3 * shape.width)
        self.offsets = nn.Parameter(torch.empty((2 * shape.window - 1) ** 2, shape.heads))
        self.out = LinearLayer(shape.width, shape.width)

    def compute_table(self) -> Tensor:
        """Return the bias of every offset, query minus key, [H, 2M - 1, 2M - 1]."""
        return self.offsets.T.unflatten(1, (2 * self.window - 1, -1))

    def compute_bias(self) -> Tensor:
        """Return the bias of every pair of tokens of a window, [H, N, N]."""
        return self.offsets[compute_offset_index(self.window, self.offsets.device)].permute(2, 0, 1)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values per head, [B, n, H, N, d] each; queries are scaled."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(2, 3) for part in qkv.chunk(3, -1))
        return q * q.shape[-1] ** -0.5, k, v

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values in one tensor, [B, n, N, 3·D]."""
        return self.qkv(x)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention of the tokens of each window [B, n, N, D] to each other; `mask`, [n, N, N], is added."""
        q, k, v = self.split_heads(self.project(x))
        bias = self.compute_bias()
        dropout = self.dropout if self.training else 0.0
        if x.device.type == "cpu" and torch.is_grad_enabled() and bias.requires_grad:
            # No fused kernel of the CPU gives the gradient of a bias: this is the same computation as PyTorch's fallback.
            scores = q @ k.transpose(-2, -1)  # [B, n, H, N, N]
            scores += (bias if mask is None else bias + mask[:, None]).to(q.dtype)
            y = F.dropout(scores.softmax(-1), dropout, training=dropout > 0) @ v
        else:
            fold = (0, 1)  # windows beside images: [B·n, H, N, d]
            if mask is not None:
                bias = (bias + mask[:, None]).flatten(0, 1)  # [n·H, N, N]
                fold = (1, 2)  # windows beside heads: [B, n·H, N, d]
            q, k, v = (part.flatten(*fold) for part in (q, k, v))
            bias = bias[None].to(q.dtype)  # with three dimensions PyTorch would not use its fused kernel
            y = dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return self.out(y.reshape(*x.shape[:2], self.heads, x.shape[2], -1).transpose(2, 3).flatten(3))

    def compute_attention(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights for inputs of `forward` in float32, [B, n, H, N, N]; the fused kernel stores none."""
        q, k, _v = self.split_heads(self.project(x))
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.float().transpose(-2, -1) + self.compute_bias().float()
            return (scores if mask is None else scores + mask[:, None].float()).softmax(-1)


class CosineWindowAttention(WindowAttention):
    """Swin v2's attention: the cosine of q and k with a learned scale, and a bias computed from the offset by an MLP."""

    def __init__(self, shape: WindowShape, dropout: float) -> None:
        nn.Module.__init__(self)
        self.heads, self.window, self.dropout = shape.heads, shape.window, dropout
        self.pretrained_window = shape.pretrained_window
        self.qkv = LinearLayer(shape.width, 3 * shape.width, bias=False)
        self.q_bias = nn.Parameter(torch.empty(shape.width))  # keys have none
        self.v_bias = nn.Parameter(torch.empty(shape.width))
        self.log_scale = nn.Parameter(torch.empty(shape.heads))
        self.bias_mlp = nn.Sequential(
            LinearLayer(2, BIAS_MLP_WIDTH), nn.ReLU(), LinearLayer(BIAS_MLP_WIDTH, shape.heads, bias=False)
        )
        self.out = LinearLayer(shape.width, shape.width)

    def project(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        return linear(x, self.qkv.weight, bias)

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(2, 3) for part in qkv.chunk(3, -1))
        scale = self.log_scale.clamp(max=MAX_LOG_SCALE).exp()[:, None, None]
        return (F.normalize(q, dim=-1) * scale).to(v.dtype), F.normalize(k, dim=-1).to(v.dtype), v

    def compute_offsets(self) -> Tensor:
        """Return MLP(offset) with the offsets on a logarithmic scale (Swin v2, equation 4), [(2M - 1)², H]."""
        offsets = compute_log_offsets((self.window,) * 2, (self.pretrained_window,) * 2, self.q_bias.device)
        return self.bias_mlp(offsets.to(self.q_bias.dtype))

    def compute_table(self) -> Tensor:
        return 16 * self.compute_offsets().T.unflatten(1, (2 * self.window - 1, -1)).sigmoid()

    def compute_bias(self) -> Tensor:
        """Return 16 σ(MLP(offset)), [H, N, N]."""
        index = compute_offset_index(self.window, self.q_bias.device)
        return 16 * self.compute_offsets()[index].permute(2, 0, 1).sigmoid()


# --- layers ---


class WindowBlock(nn.Module):
    """One layer of Swin: equations 2 and 3 of the ViT with attention in windows."""

    attention: ClassVar[type[WindowAttention]] = WindowAttention

    def __init__(
        self, shape: WindowShape, is_shifted: bool, dropout: float, attention_dropout: float, stochastic_depth: float
    ) -> None:
        super().__init__()
        self.window, self.is_shifted = shape.window, is_shifted
        self.norm1 = nn.LayerNorm(shape.width, eps=shape.eps)
        self.msa = self.attention(shape, attention_dropout)
        self.branch1 = ResidualBranch(shape.width, dropout, None, stochastic_depth)
        self.norm2 = nn.LayerNorm(shape.width, eps=shape.eps)
        self.mlp = MLP(shape.width, shape.mlp, nn.GELU(), dropout)
        self.branch2 = ResidualBranch(shape.width, dropout, None, stochastic_depth)

    def cut_grid(self, x: Tensor, shift: Grid, pad_first: bool) -> tuple[Tensor, Grid]:
        """Return a grid [B, h, w, D], padded with zeros to whole windows, as windows [B, n, N, D], and the padded grid."""
        height, width = x.shape[1:3]
        padding = (-width % self.window, -height % self.window)
        x = pad_grid(x, padding) if pad_first else x
        x = x.roll((-shift[0], -shift[1]), (1, 2)) if any(shift) else x
        x = x if pad_first else pad_grid(x, padding)
        return partition_windows(x, self.window), (x.shape[1], x.shape[2])

    def dot_product_attention(self, x: Tensor, shift: Grid, pad_first: bool) -> Tensor:
        """Return the attention in windows of a grid [B, h, w, D]."""
        (height, width), m = x.shape[1:3], self.window
        shift = shift if self.is_shifted else (0, 0)
        windows, grid = self.cut_grid(x, shift, pad_first)
        mask = compute_shift_mask(grid, m, shift, x) if any(shift) else None
        x = join_windows(self.msa(windows, mask), grid, m)
        x = x if pad_first else x[:, :height, :width]
        x = x.roll(shift, (1, 2)) if any(shift) else x
        return x[:, :height, :width]

    def locate_tokens(self, grid: Grid, stride: int, shift: Grid, pad_first: bool) -> WindowTokens:
        """Return where the tokens of each window stand on a grid whose cells are `stride` pixels wide."""
        shift = shift if self.is_shifted else (0, 0)
        numbers = torch.arange(1, math.prod(grid) + 1).view(1, *grid, 1)
        windows, padded = self.cut_grid(numbers, shift, pad_first)
        regions = compute_regions(padded, self.window, shift, numbers.device)
        return WindowTokens(grid, stride, windows[0, :, :, 0] - 1, regions)

    def forward(self, x: Tensor, shift: Grid = (0, 0), pad_first: bool = True) -> Tensor:  # [B, h, w, D]
        x = x + self.branch1(self.dot_product_attention(self.norm1(x), shift, pad_first))
        return x + self.branch2(self.mlp(self.norm2(x)))


class CosineWindowBlock(WindowBlock):
    """One layer of Swin v2: the norm stands at the end of each branch."""

    attention: ClassVar[type[WindowAttention]] = CosineWindowAttention

    def forward(self, x: Tensor, shift: Grid = (0, 0), pad_first: bool = True) -> Tensor:
        x = x + self.branch1(self.norm1(self.dot_product_attention(x, shift, pad_first)))
        return x + self.branch2(self.norm2(self.mlp(x)))


class PatchMerging(nn.Module):
    """Between two stages: 2×2 neighbouring tokens of width D become one of width 2D."""

    def __init__(self, width: int, eps: float, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm = nn.LayerNorm((4 if norm_first else 2) * width, eps=eps)
        self.reduction = LinearLayer(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the grid [B, h/2, w/2, 2·D] of a grid [B, h, w, D]; odd sides are padded with zeros."""
        x = pad_grid(x, (x.shape[2] % 2, x.shape[1] % 2))
        b, h, w, d = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 4, 2, 5).flatten(3)  # columns before rows
        return self.reduction(self.norm(x)) if self.norm_first else self.norm(self.reduction(x))


@dataclass(frozen=True)
class SwinV1:
    """Layers of Swin: a table of biases, the norm before attention and MLP."""

    module: ClassVar[type[WindowBlock]] = WindowBlock
    norm_first: ClassVar[bool] = True  # of patch merging


@dataclass(frozen=True)
class SwinV2:
    """Layers of Swin v2: cosine attention, computed biases, the norm after attention and MLP.

    `pretrained_windows` are those of the stages of the model that the biases were trained with; None: those of this model.
    """

    pretrained_windows: tuple[int, ...] | None = None
    module: ClassVar[type[WindowBlock]] = CosineWindowBlock
    norm_first: ClassVar[bool] = False


WindowSlot = SwinV1 | SwinV2

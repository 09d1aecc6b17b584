"""Token merging: similar tokens become one between the layers (Bolya et al. 2023, "Token Merging: Your ViT But Faster").

In a layer, between attention and MLP, r patches are merged into others: patches are assigned alternately to two sets, each
patch of the first set finds the one of the second with the most similar key, and the r closest pairs become one token each,
the mean of their patches. Later layers attend to a token as if all of its patches were still there. No training is needed.

The paper merges in every layer. Here the first quarter of the layers merges nothing: their keys encode positions more than
content, and the same number of tokens merged later changes about half as many predictions (docs/merging.md).

B images, T tokens (P prefix tokens, then N that represent one or more patches), D width, H heads, d = D/H, L layers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import TokenConfig, TokenModel, Unsupported
from vitrail.nn.attention import MSA, dot_product_attention
from vitrail.nn.block import (
    EncoderBlock,
    ParallelBlock,
    PostNormBlock,
    PreNormBlock,
    ResPostNormBlock,
    take_first_tokens,
)
from vitrail.nn.shape import Grid


class Merged(nn.Module):
    """A ViT whose layers merge tokens, returned by `merge_model`; the weights are the ViT's own."""

    def __init__(self, vit: TokenModel, r: int, after: int) -> None:
        super().__init__()
        self.vit, self.r, self.after = vit, r, after  # the first `after` layers merge nothing
        self.train(vit.training)

    @property
    def config(self) -> TokenConfig:
        return self.vit.config

    def forward(self, image: Tensor) -> Tensor:
        return self.vit.head(self.pool_tokens(image))

    def features(self, image: Tensor) -> Tensor:
        """Return the features that the model without classes would give: [B, F], or [B, 2, D] if distilled."""
        y = self.pool_tokens(image)
        return self.vit.head(y) if self.config.classes is None else self.vit.apply_pre_logits(y)

    def pool_tokens(self, image: Tensor) -> Tensor:
        """Compute equations 1 to 4 with merging."""
        vit, z, size = self.vit, self.vit.tokens(image), None
        for layer, block in enumerate(vit.blocks, start=1):
            n_outputs = vit.pool.n_inputs if layer == len(vit.blocks) else None
            patches = z.shape[1] - vit.config.prefix.count
            # a layer that computes the first tokens only has nothing to merge
            r = 0 if layer <= self.after or n_outputs is not None else count_merges(patches, self.r)
            z, size = self.run_layer(block, z, size, r, n_outputs)
        return vit.pool(z) if size is None or vit.pool.n_inputs is not None else vit.pool(z, size)

    def run_layer(
        self, block: nn.Module, z: Tensor, size: Tensor | None, r: int, n_outputs: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute equations 2 and 3 and merge r tokens between them. `size`, [B, N]: the patches per token."""
        assert isinstance(block, EncoderBlock)
        first = take_first_tokens(z, n_outputs)
        match block:
            case PreNormBlock():
                y, k = attend(block.msa, block.norm1(z), size, n_outputs)
                z, size = self.shorten(first + block.branch1(y), size, k, r)
                return z + block.branch2(block.mlp(block.norm2(z))), size
            case PostNormBlock():
                y, k = attend(block.msa, z, size, n_outputs)
                z, size = self.shorten(block.norm1(first + block.branch1(y)), size, k, r)
                return block.norm2(z + block.branch2(block.mlp(z))), size
            case ResPostNormBlock():
                y, k = attend(block.msa, z, size, n_outputs)
                z, size = self.shorten(first + block.branch1(block.norm1(y)), size, k, r)
                return z + block.branch2(block.norm2(block.mlp(z))), size
            case ParallelBlock():  # attention and MLP are parallel: merging follows both
                x = block.norm1(z)
                y, k = attend(block.msa, x, size, n_outputs)
                mixed = block.branch1(y) + block.branch2(block.mlp(take_first_tokens(x, n_outputs)))
                return self.shorten(first + mixed, size, k, r)
            case _:
                raise AssertionError(f"unknown block {type(block).__name__}")

    def shorten(self, z: Tensor, size: Tensor | None, k: Tensor, r: int) -> tuple[Tensor, Tensor | None]:
        """Return z with r tokens merged, and the number of patches per token."""
        return merge(z, size, k.mean(1), self.config.prefix.count, r) if r else (z, size)

    def tokens_per_layer(self, grid: Grid | None = None) -> tuple[int, ...]:
        """Return the number of input tokens of each layer, for images of this grid."""
        return tokens_per_layer(self.config, self.r, grid, self.after)

    def extra_repr(self) -> str:
        return f"r={self.r}, after={self.after}"


def merge_model(vit: TokenModel, r: int, after: int | None = None) -> Merged:
    """Return the ViT with r tokens merged in each layer (at most half); raise ValueError if layers need positions.

    The first `after` layers merge nothing (default: a quarter of the layers; the paper uses 0).
    """
    if r < 0:
        raise ValueError(f"tokens to merge per layer must be at least 0, got {r}")
    if vit.config.block.is_divided:
        raise Unsupported("token merging does not support divided attention, which needs every patch: use block='pre'")
    layers = vit.position.layer_positions(vit.config.shape.grid, None)
    if any(part is not None for layer in layers for part in layer):
        name = vit.config.position
        raise ValueError(f"token merging does not support {name}: it needs positions added at the stem only")
    return Merged(vit, r, count_unmerged_layers(vit.config) if after is None else after)


def count_unmerged_layers(config: TokenConfig) -> int:
    """Return the number of first layers that merge nothing: a quarter."""
    return config.size.depth // 4


def tokens_per_layer(
    config: TokenConfig, r: int, grid: Grid | None = None, after: int | None = None
) -> tuple[int, ...]:
    """Return the number of input tokens of each layer when r are merged in each; no weights are needed."""
    prefix, patches, counts = config.prefix.count, math.prod(grid or config.shape.grid), []
    after = count_unmerged_layers(config) if after is None else after
    for layer in range(1, config.size.depth + 1):
        counts.append(prefix + patches)
        patches -= count_merges(patches, r) if layer > after else 0
    return tuple(counts)


def format_token_counts(tokens: tuple[int, ...]) -> str:
    """Return the tokens per layer as a line of text."""
    share = sum(tokens) / (len(tokens) * tokens[0])
    return f"input tokens per layer with merging: {' '.join(map(str, tokens))} ({100 * share:.0f} % of all)"


def count_merges(patches: int, r: int) -> int:
    """Return the number of tokens that a layer merges: r, at most half of the patches."""
    return min(r, patches // 2)


def attend(msa: MSA, x: Tensor, size: Tensor | None, n_outputs: int | None) -> tuple[Tensor, Tensor]:
    """Return MSA with each token weighted by its number of patches, and the keys, [B, H, T, d]."""
    q, k, v = msa.split_heads(msa.qkv(x))  # each [B, H, T, d]
    bias = None
    if size is not None:  # softmax(q kᵀ / √d + log size) v
        bias = F.pad(size.log(), (x.shape[1] - size.shape[1], 0))[:, None, None]  # [B, 1, 1, T]; 0 for the prefix
    dropout = msa.dropout if msa.training else 0.0
    y = dot_product_attention(q[:, :, :n_outputs], k, v, attn_mask=bias, dropout_p=dropout)
    return msa.out(msa.norm(y.transpose(1, 2).flatten(2))), k


def merge(z: Tensor, size: Tensor | None, keys: Tensor, prefix: int, r: int) -> tuple[Tensor, Tensor]:
    """Merge r patches of z [B, T, D] into the most similar ones (bipartite soft matching): [B, T - r, D], [B, N - r].

    `keys`, [B, T, d], are the mean over heads. A small assignment matrix replaces scattering: every runtime supports it.
    """
    b, tokens, width = z.shape
    even = prefix % 2  # the first set: tokens at even indices, counted from the first token
    keys = F.normalize(keys[:, prefix:], dim=-1)
    similarity, partner = (keys[:, even::2] @ keys[:, 1 - even :: 2].transpose(1, 2)).max(-1)  # [B, N/2] both
    order = similarity.argsort(-1, descending=True)
    order = torch.cat((order[:, :r], order[:, r:].sort(-1).values), 1)  # r merged tokens, then the others in order

    if size is None:
        size = z.new_ones(b, tokens - prefix)
    first, second = size[:, even::2].gather(1, order), size[:, 1 - even :: 2]  # patches per token of both sets
    indices = torch.arange(second.shape[1], device=z.device)
    joins = (indices[:, None] == partner.gather(1, order[:, :r])[:, None]).to(z.dtype)  # [B, N/2, r]
    joins = joins * first[:, None, :r]  # weighted by the patches of each merged token
    weight = second + joins.sum(-1)

    # index_select of whole rows over all images is faster than gather
    start = torch.arange(b, device=z.device)[:, None] * tokens + (prefix + even)
    rows = z.flatten(0, 1).index_select(0, (start + 2 * order).flatten()).view(b, -1, width)
    others = z[:, prefix + 1 - even :: 2] * second[..., None]
    merged = torch.baddbmm(others, joins, rows[:, :r]) / weight[..., None]
    return torch.cat((z[:, :prefix], rows[:, r:], merged), 1), torch.cat((first[:, r:], weight), 1)

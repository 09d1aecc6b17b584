"""Tokens that are alike become one on their way through the layers ("Token Merging: Your ViT But Faster", Bolya et al. 2023).

In a layer, between attention and MLP, r patches are merged into others: patches are dealt alternately to two sets, each of
the first looks for the one of the second whose key is most like its own, and the r closest pairs become one token each, the
mean of the patches that it stands for. Later layers attend to a token as if all of its patches were still there. Nothing is
trained for it.

The paper merges in every layer. Here the first quarter of them is left alone: their keys tell more of places than of what is
seen, and the same number of tokens, merged later and more at once, costs about half as much of the answers (docs/merging.md).

B images, T tokens (P before the patches, then N that are patches or several of them), D width, H heads, d = D/H, L layers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.vit import ViT, ViTConfig
from vitrail.nn.attention import MSA
from vitrail.nn.block import EncoderBlock, ParallelBlock, PostNormBlock, PreNormBlock, first
from vitrail.nn.head import TanhHead
from vitrail.nn.position import Relative, Rotary2D
from vitrail.nn.shape import Grid


class Merged(nn.Module):
    """A ViT in whose layers tokens are merged. Made by `merged`; the weights are the ViT's own."""

    def __init__(self, vit: ViT, r: int, after: int) -> None:
        super().__init__()
        self.vit, self.r, self.after = vit, r, after  # the first `after` layers merge nothing
        self.train(vit.training)

    @property
    def config(self) -> ViTConfig:
        return self.vit.config

    def forward(self, image: Tensor) -> Tensor:
        return self.vit.head(self.pooled(image))

    def features(self, image: Tensor) -> Tensor:
        """What comes to the head, as the same model without classes would give it: [B, F], or [B, 2, D] if distilled."""
        y, head = self.pooled(image), self.vit.head
        if self.config.classes is None:
            return head(y)
        return torch.tanh(head.pre_logits(y)) if isinstance(head, TanhHead) else y

    def pooled(self, image: Tensor) -> Tensor:
        """Equations 1 to 4 with merging."""
        vit, z, size = self.vit, self.vit.tokens(image), None
        for layer, block in enumerate(vit.blocks, start=1):
            read = vit.pool.reads if layer == len(vit.blocks) else None
            # Where only the first tokens are computed, there is nothing to merge.
            r = 0 if layer <= self.after or read is not None else merges(z.shape[1] - vit.config.prefix.count, self.r)
            z, size = self.layer(block, z, size, r, read)
        if size is None or vit.pool.reads is not None:
            return vit.pool(z)
        return vit.pool(z, size)

    def layer(
        self, block: nn.Module, z: Tensor, size: Tensor | None, r: int, read: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Equations 2 and 3, and between them r tokens go. `size`, [B, N]: how many patches each token stands for."""
        assert isinstance(block, EncoderBlock)
        match block:
            case PreNormBlock():
                y, k = attention(block.msa, block.norm1(z), size, read)
                z, size = self.shorter(first(z, read) + block.branch1(y), size, k, r)
                return z + block.branch2(block.mlp(block.norm2(z))), size
            case PostNormBlock():
                y, k = attention(block.msa, z, size, read)
                z, size = self.shorter(block.norm1(first(z, read) + block.branch1(y)), size, k, r)
                return block.norm2(z + block.branch2(block.mlp(z))), size
            case ParallelBlock():  # nothing is between attention and MLP: merging comes after both
                x = block.norm1(z)
                y, k = attention(block.msa, x, size, read)
                mixed = block.branch1(y) + block.branch2(block.mlp(first(x, read)))
                return self.shorter(first(z, read) + mixed, size, k, r)
            case _:
                raise AssertionError(f"a layer of another order: {type(block).__name__}")

    def shorter(self, z: Tensor, size: Tensor | None, k: Tensor, r: int) -> tuple[Tensor, Tensor | None]:
        """z with r tokens fewer, and how many patches each of them stands for."""
        return merge(z, size, k.mean(1), self.config.prefix.count, r) if r else (z, size)

    def tokens_per_layer(self, grid: Grid | None = None) -> tuple[int, ...]:
        """How many tokens come into each layer, for pictures of this grid of patches."""
        return tokens_per_layer(self.config, self.r, grid, self.after)

    def extra_repr(self) -> str:
        return f"r={self.r}, after={self.after}"


def merged(vit: ViT, r: int, after: int | None = None) -> Merged:
    """This ViT with r tokens fewer after each layer, or half of them where r is more; refused where a layer needs places.

    The first `after` layers merge nothing: a quarter of them unless given; 0 is the paper's.
    """
    if not isinstance(vit, ViT):
        raise ValueError(
            f"tokens are merged in Vision Transformers, and this is a {type(vit).__name__}: leave merging out"
        )
    if r < 0:
        raise ValueError(f"{r} tokens to merge in each layer: 0 or more")
    position = vit.config.position
    if isinstance(position, (Relative, Rotary2D)) or getattr(position, "at", "stem") != "stem":
        raise ValueError(
            f"tokens cannot be merged with {position}: it tells every layer where each token is, and a merged one is in "
            "several places. Merging needs positions that are added once, at the stem"
        )
    return Merged(vit, r, spared(vit.config) if after is None else after)


def spared(config: ViTConfig) -> int:
    """How many layers merge nothing: the first quarter."""
    return config.size.depth // 4


def tokens_per_layer(config: ViTConfig, r: int, grid: Grid | None = None, after: int | None = None) -> tuple[int, ...]:
    """How many tokens come into each layer of such a model, where r are merged in each; before any weight exists."""
    h, w = grid or config.shape.grid
    prefix, patches, found = config.prefix.count, h * w, []
    after = spared(config) if after is None else after
    for layer in range(1, config.size.depth + 1):
        found.append(prefix + patches)
        patches -= merges(patches, r) if layer > after else 0
    return tuple(found)


def in_words(tokens: tuple[int, ...]) -> str:
    """Tokens per layer in a line."""
    share = sum(tokens) / (len(tokens) * tokens[0])
    return f"tokens that come into the layers, merged: {' '.join(map(str, tokens))} ({100 * share:.0f} % of all)"


def merges(patches: int, r: int) -> int:
    """How many of so many tokens a layer merges: r, but at most half of them, since each is merged into another."""
    return min(r, patches // 2)


def attention(msa: MSA, x: Tensor, size: Tensor | None, read: int | None) -> tuple[Tensor, Tensor]:
    """MSA, in which a token counts as often as it stands for patches; and the keys, [B, H, T, d]."""
    q, k, v = msa.split(msa.qkv(x))  # each [B, H, T, d]
    bias = None
    if size is not None:  # softmax(q kᵀ / √d + log size) v
        bias = F.pad(size.log(), (x.shape[1] - size.shape[1], 0))[:, None, None]  # [B, 1, 1, T]; 0 for the prefix
    dropout = msa.dropout if msa.training else 0.0
    y = F.scaled_dot_product_attention(q[:, :, :read], k, v, attn_mask=bias, dropout_p=dropout)
    return msa.out(y.transpose(1, 2).flatten(2)), k


def merge(z: Tensor, size: Tensor | None, keys: Tensor, prefix: int, r: int) -> tuple[Tensor, Tensor]:
    """Bipartite soft matching: r patches of z [B, T, D] merged into those most like them; [B, T - r, D] and [B, N - r].

    `keys`, [B, T, d], are the mean over the heads. Written with a small matrix of who goes where, in place of scattering: every
    runtime has that.
    """
    b, tokens, width = z.shape
    even = prefix % 2  # the first set: tokens in even places, as counted from the very first
    keys = F.normalize(keys[:, prefix:], dim=-1)
    alike, partner = (keys[:, even::2] @ keys[:, 1 - even :: 2].transpose(1, 2)).max(-1)  # [B, N/2] both
    order = alike.argsort(-1, descending=True)
    order = torch.cat((order[:, :r], order[:, r:].sort(-1).values), 1)  # r that go, then those that stay, as they stood

    if size is None:
        size = z.new_ones(b, tokens - prefix)
    mine, theirs = size[:, even::2].gather(1, order), size[:, 1 - even :: 2]
    places = torch.arange(theirs.shape[1], device=z.device)
    joins = (places[:, None] == partner.gather(1, order[:, :r])[:, None]).to(z.dtype)  # [B, N/2, r]
    joins = joins * mine[:, None, :r]  # weighted by the patches that each brings
    weight = theirs + joins.sum(-1)

    # Whole rows of all images at once: quicker than gather.
    start = torch.arange(b, device=z.device)[:, None] * tokens + (prefix + even)
    rows = z.flatten(0, 1).index_select(0, (start + 2 * order).flatten()).view(b, -1, width)
    others = z[:, prefix + 1 - even :: 2] * theirs[..., None]
    together = torch.baddbmm(others, joins, rows[:, :r]) / weight[..., None]
    return torch.cat((z[:, :prefix], rows[:, r:], together), 1), torch.cat((mine[:, r:], weight), 1)

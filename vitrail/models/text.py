"""The text tower of models like CLIP, tokens of a text to one vector, and the logits of pairs of images and texts.

It is the encoder of a Vision Transformer with other ends: tokens are looked up in a table instead of projected from patches,
and in CLIP each token attends to those before it only.

B texts or images, N texts, T tokens, D width, F features.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitrail.models.sizes import Size
from vitrail.nn.block import BlockSlot, EncoderBlock, PreNorm, RecomputeModule, run_block
from vitrail.nn.linear import LinearLayer
from vitrail.nn.position import NO_POSITION, LayerPosition
from vitrail.nn.shape import EncoderShape


@dataclass(frozen=True)
class EndOfText:
    """Pooling by the token that ends the text (CLIP): the first with the id `token`, or with the highest id if it is None."""

    token: int | None = None

    def find(self, tokens: Tensor) -> Tensor:
        """Return the position of the pooled token of each text, [B]."""
        return (tokens if self.token is None else (tokens == self.token).int()).argmax(1)


@dataclass(frozen=True)
class LastToken:
    """Pooling by the last token, which may be padding (SigLIP)."""

    def find(self, tokens: Tensor) -> Tensor:
        """Return the position of the pooled token of each text, [B]."""
        return torch.full((tokens.shape[0],), tokens.shape[1] - 1, device=tokens.device)


TextPool = EndOfText | LastToken


@dataclass(frozen=True)
class TextConfig:
    """A text tower as a value. The defaults are CLIP's."""

    EVERY_FIELD_WRITTEN: ClassVar[bool] = True

    size: Size
    features: int | None  # width of the projection; None: no projection
    vocabulary: int = 49_408
    context: int = 77  # tokens of a text, at most
    block: BlockSlot = PreNorm()
    pool: TextPool = EndOfText()
    causal: bool = True  # whether a token attends to those before it only
    projection_bias: bool = False
    eps: float = 1e-5  # of every LayerNorm

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "features"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of a text tower must be at least 1, got {value}")
        _ = self.shape

    @property
    def shape(self) -> EncoderShape:
        """Return the sizes that all parts share; raise ValueError if they do not fit together."""
        size = self.size
        return EncoderShape(size.width, size.depth, size.heads, (self.context,), size.mlp, eps=self.eps, head=size.head)

    def describe(self) -> str:
        """Return the sizes and what distinguishes the tower."""
        size, reads = self.size, "causal" if self.causal else "no causal mask"
        sizes = f"width {size.width}, depth {size.depth}, {size.heads} heads, MLP {size.mlp}"
        return f"{sizes}; {self.vocabulary:,} tokens, context {self.context}, {reads}, {self.pool}"


class TextEncoder(RecomputeModule):
    """Tokens [B, T] to features [B, F]: embedding, encoder, pooling, projection."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        shape, width = config.shape, config.size.width
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, width)
        self.position = nn.Parameter(torch.empty(config.context, width))
        self.blocks = nn.ModuleList(config.block.module(shape, config.block, 0.0, 0.0) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(width, eps=config.eps) if config.block.final_norm else nn.Identity()
        self.head = (
            nn.Identity()
            if config.features is None
            else LinearLayer(width, config.features, bias=config.projection_bias)
        )

    @property
    def feature_dim(self) -> int:
        """Return F, the number of values per text."""
        return self.config.size.width if self.config.features is None else self.config.features

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the features of texts, [B, F]."""
        if tokens.ndim != 2 or not 0 < tokens.shape[1] <= self.config.context:
            got = f"got {list(tokens.shape)}"
            raise ValueError(f"texts must be token ids [B, T] with T at most {self.config.context}, {got}: cut them")
        try:
            z = self.embed(tokens) + self.position[: tokens.shape[1]]
        except IndexError:
            ids = f"0 to {self.config.vocabulary - 1:,}, got {int(tokens.min())} to {int(tokens.max()):,}"
            raise ValueError(f"token ids must be {ids}: use the tokeniser of this model") from None
        position = LayerPosition(bias=causal_mask(z)) if self.config.causal else NO_POSITION
        for block in self.blocks:
            z = run_block(block, self.activation_checkpointing, z, position)  # eq. 2, 3
        y = z[torch.arange(z.shape[0], device=z.device), self.config.pool.find(tokens)]  # [B, D]
        return self.head(self.norm(y))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as CLIP: deviations that fall with the width, and with the depth where a residual is added."""
        width, depth = self.config.size.width, self.config.size.depth
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position, std=0.01)
        for block in self.blocks:
            assert isinstance(block, EncoderBlock)
            nn.init.normal_(block.msa.qkv.weight, std=width**-0.5)
            nn.init.normal_(block.msa.out.weight, std=width**-0.5 / math.sqrt(2 * depth))
            for name, std in (("fc1", (2 * width) ** -0.5), ("fc2", width**-0.5 / math.sqrt(2 * depth))):
                nn.init.normal_(getattr(block.mlp, name).weight, std=std)
                nn.init.zeros_(getattr(block.mlp, name).bias)
        if isinstance(self.head, nn.Linear):
            nn.init.normal_(self.head.weight, std=width**-0.5)


def causal_mask(z: Tensor) -> Tensor:
    """Return the attention bias that hides later tokens from each token of z, [1, 1, T, T]: -∞ above the diagonal."""
    length = z.shape[1]
    return torch.full((length, length), -math.inf, dtype=z.dtype, device=z.device).triu(1)[None, None]


class PairLogits(nn.Module):
    """Products of unit vectors of images and texts times a learned scale, plus a learned bias for the sigmoid loss."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))  # its logarithm
        self.bias = nn.Parameter(torch.empty(())) if has_bias else None

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the logits of images [B, F] with texts [N, F]: [B, N]."""
        logits = self.scale.exp() * images @ texts.T
        return logits if self.bias is None else logits + self.bias

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with CLIP's temperature of 0.07, or with SigLIP's of 0.1 and its bias of -10."""
        self.scale.fill_(math.log(1 / 0.07) if self.bias is None else math.log(10))
        if self.bias is not None:
            self.bias.fill_(-10)

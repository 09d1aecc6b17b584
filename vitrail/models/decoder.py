"""The decoder of a masked autoencoder (He et al. 2022): from the tokens of visible patches to the pixels of hidden ones.

B images, T tokens of the encoder (n visible patches, and what stands before them), N patches, D and W the widths of encoder and
decoder, C·P² values of a patch.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.init import initialise, made
from vitrail.models.vit import ViT, ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.position import NOWHERE, Added, SinCos2D
from vitrail.nn.shape import Shape


@dataclass(frozen=True)
class Decoder:
    """How large a decoder is. He et al. take 8 layers of width 512 with 16 heads; a lighter one is the default, because
    on small machines most of the time would go to it."""

    depth: int = 4
    width: int | None = None  # None: half of the encoder's, in steps of 32
    heads: int | None = None  # None: as many as have 32 values each, as published
    mlp: int | None = None  # None: four times the width

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "mlp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"the decoder's {name} is {value}: it must be at least 1")

    def sized(self, config: ViTConfig) -> "Decoder":
        """The same with every number filled in for an encoder; an error where they do not fit together."""
        half = config.size.width // 2
        width = self.width or (half // 32 * 32 if half >= 32 else max(4, half // 4 * 4))
        heads = self.heads or (width // 32 if width % 32 == 0 else 1)
        if width % 4:
            raise ValueError(
                f"the decoder's width is {width}: its positions need one divisible by 4, use {max(4, round(width / 4) * 4)}"
            )
        if width % heads:
            raise ValueError(f"the decoder's {heads} heads do not divide its width {width}: use 1, 2 or 4 of them")
        return replace(self, width=width, heads=heads, mlp=self.mlp or 4 * width)


class PixelDecoder(nn.Module):
    """A few plain layers, with fixed positions of their own and one learned token in the place of every hidden patch."""

    def __init__(self, config: ViTConfig, spec: Decoder) -> None:
        super().__init__()
        self.spec = spec = spec.sized(config)
        assert spec.width is not None
        assert spec.heads is not None
        assert spec.mlp is not None
        self.prefix, self.grid = config.prefix.count, config.shape.grid
        self.shape = Shape(spec.width, spec.depth, spec.heads, self.grid, spec.mlp, self.prefix, eps=config.eps)
        block = PreNorm(
            mlp=config.block.mlp, qkv_bias=config.block.qkv_bias
        )  # as the encoder's, without later additions
        self.embed = nn.Linear(config.size.width, spec.width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, spec.width))
        table = torch.empty(1, self.prefix + self.shape.patches, spec.width)
        self.position = nn.Parameter(table, requires_grad=False)  # not learned; zero for what stands before the patches
        self.blocks = nn.ModuleList(block.module(self.shape, block, 0.0, 0.0) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width, eps=config.eps)
        self.pred = nn.Linear(spec.width, config.channels * config.embed.stride**2)

    def forward(self, latent: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
        """The values of the hidden patches, [B, N-n, C·P²], from the encoder's normalised tokens [B, T, D].

        `visible`, [B, n], says which patches the tokens are of, `hidden` which ones are wanted. The wanted ones go first, so
        that the last layer computes nothing else; attention has no order, and positions go with their tokens.
        """
        count, p = hidden.shape[1], self.prefix
        known = self.embed(latent)  # [B, T, W]
        tokens = torch.cat((self.mask_token.expand(*hidden.shape, -1).to(known.dtype), known[:, p:]), 1)
        tokens = tokens + F.embedding(torch.cat((hidden, visible), 1), self.position[0, p:])  # [B, N, W]
        z = torch.cat((tokens, known[:, :p] + self.position[:, :p]), 1) if p else tokens
        for layer, block in enumerate(self.blocks, start=1):
            z = block(z, NOWHERE, count if layer == len(self.blocks) else None)
        return self.pred(self.norm(z))


def painted(model: ViT, decoder: PixelDecoder, images: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
    """What encoder and decoder together tell of the hidden patches, [B, N-n, C·P²]; only visible ones are encoded."""
    grid = model.embed.grid(images)
    assert grid == decoder.grid, f"a decoder for {decoder.grid} patches, pictures of {grid}"
    z = model.encode(model.tokens(images, visible), grid, visible)
    return decoder(model.pool.norm(z), visible, hidden)


def build_decoder(config: ViTConfig, spec: Decoder) -> PixelDecoder:
    """A decoder with fresh weights."""
    return made(lambda: PixelDecoder(config, spec), begin)


@torch.no_grad()
def begin(decoder: PixelDecoder) -> None:
    """Weights as published: every matrix Xavier uniform, the mask token N(0, 0.02²), positions sines and cosines."""
    initialise(decoder, "vit")
    nn.init.normal_(decoder.mask_token, std=0.02)
    table = SinCos2D(end=False).build(decoder.shape)
    assert isinstance(table, Added)
    decoder.position.copy_(table.rows(0, decoder.grid, None))

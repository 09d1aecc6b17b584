"""The decoder of a masked autoencoder (He et al. 2022): from the tokens of visible patches to the pixels of hidden ones.

B images, T tokens of the encoder (prefix tokens and n visible patches), N patches, D and W the widths of encoder and
decoder, C·P² values of a patch. Of clips, a patch is a tubelet, and the decoder is that of VideoMAE (Tong et al. 2022).
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import TokenConfig, TokenModel
from vitrail.models.init import build_and_fill, initialise
from vitrail.nn.block import PreNorm
from vitrail.nn.linear import LinearLayer
from vitrail.nn.position import NO_POSITION, AddedPositionEmbedding, SinCos2D, Sinusoid1D
from vitrail.nn.shape import EncoderShape


@dataclass(frozen=True)
class Decoder:
    """The size of a decoder. He et al. use 8 layers of width 512 with 16 heads; the default is lighter, because on small
    machines the decoder would take most of the time."""

    depth: int = 4
    width: int | None = None  # None: half of the encoder's, a multiple of 32
    heads: int | None = None  # None: heads of 32 values, as published
    mlp: int | None = None  # None: four times the width
    # of its last norm, which transformers' VideoMAE has apart from that of the others; None: the encoder's
    norm_eps: float | None = field(default=None, metadata={"omit_default": True})

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "mlp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"decoder {name} must be at least 1, got {value}")

    def fill_sizes(self, config: TokenConfig) -> "Decoder":
        """Return the decoder with every size filled in for an encoder; raise ValueError if they do not fit together."""
        half = config.size.width // 2
        width = self.width or (half // 32 * 32 if half >= 32 else max(4, half // 4 * 4))
        heads = self.heads or (width // 32 if width % 32 == 0 else 1)
        if width % 4:
            raise ValueError(f"decoder width must be divisible by 4, got {width}: use {max(4, round(width / 4) * 4)}")
        if width % heads:
            raise ValueError(f"{heads} decoder heads do not divide the decoder width {width}: use 1, 2 or 4 heads")
        return replace(self, width=width, heads=heads, mlp=self.mlp or 4 * width)


class PixelDecoder(nn.Module):
    """A few plain layers with fixed positions and one learned token for every hidden patch.

    Of clips, it has the biases of VideoMAE's: none where its tokens enter, and in its layers those of the encoder.
    """

    def __init__(self, config: TokenConfig, spec: Decoder) -> None:
        super().__init__()
        self.spec = spec = spec.fill_sizes(config)
        assert spec.width is not None and spec.heads is not None and spec.mlp is not None  # noqa: PT018
        self.prefix, self.grid = config.prefix.count, config.shape.grid
        self.shape = EncoderShape(spec.width, spec.depth, spec.heads, self.grid, spec.mlp, self.prefix, eps=config.eps)
        of_clips = config.frames is not None
        block = make_decoder_block(config)
        self.embed = LinearLayer(config.size.width, spec.width, bias=not of_clips)
        self.slot = Sinusoid1D() if of_clips else SinCos2D(end=False)  # of its positions
        self.mask_token = nn.Parameter(torch.empty(1, 1, spec.width))
        table = torch.empty(1, self.prefix + self.shape.patches, spec.width)
        self.position = nn.Parameter(table, requires_grad=False)  # not learned; zero for the prefix tokens
        self.blocks = nn.ModuleList(block.module(self.shape, block, 0.0, 0.0) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width, eps=config.eps if spec.norm_eps is None else spec.norm_eps)
        self.pred = LinearLayer(spec.width, count_patch_values(config))

    def forward(self, latent: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
        """Return the values of the hidden patches, [B, N-n, C·P²], from the encoder's normalised tokens [B, T, D].

        `visible`, [B, n], are the indices of the tokens' patches, `hidden` those to predict. Hidden patches come first, so
        that the last layer computes only them; attention has no order, and each position stays with its token.
        """
        count, p = hidden.shape[1], self.prefix
        known = self.embed(latent)  # [B, T, W]
        tokens = torch.cat((self.mask_token.expand(*hidden.shape, -1).to(known.dtype), known[:, p:]), 1)
        tokens = tokens + F.embedding(torch.cat((hidden, visible), 1), self.position[0, p:])  # [B, N, W]
        z = torch.cat((tokens, known[:, :p] + self.position[:, :p]), 1) if p else tokens
        for layer, block in enumerate(self.blocks, start=1):
            z = block(z, NO_POSITION, count if layer == len(self.blocks) else None)
        return self.pred(self.norm(z))


def make_decoder_block(config: TokenConfig) -> PreNorm:
    """Return the slot of a decoder's layers: the encoder's, without later additions."""
    key_bias = config.frames is None or config.block.key_bias
    return PreNorm(mlp=config.block.mlp, qkv_bias=config.block.qkv_bias, key_bias=key_bias)


def count_patch_values(config: TokenConfig) -> int:
    """Return the number of values of a patch, C·P², or of a tubelet, C·F·P²."""
    return config.channels * config.embed.stride**2 * getattr(config.embed, "frames", 1)


def reconstruct_patches(
    model: TokenModel, decoder: PixelDecoder, images: Tensor, visible: Tensor, hidden: Tensor
) -> Tensor:
    """Return the values of the hidden patches that encoder and decoder predict from the visible ones, [B, N-n, C·P²]."""
    grid = model.embed.grid(images)
    assert grid == decoder.grid, f"decoder for {decoder.grid} patches, images of {grid}"
    z = model.encode(model.tokens(images, visible), grid, visible)
    return decoder(model.pool.norm(z), visible, hidden)


def build_decoder(config: TokenConfig, spec: Decoder) -> PixelDecoder:
    """Return a decoder with fresh weights."""
    return build_and_fill(lambda: PixelDecoder(config, spec), initialise_decoder)


@torch.no_grad()
def initialise_decoder(decoder: PixelDecoder) -> None:
    """Fill the weights as published: matrices Xavier uniform, mask token N(0, 0.02²), positions sines and cosines."""
    initialise(decoder, "vit")
    nn.init.normal_(decoder.mask_token, std=0.02)
    decoder.position.copy_(compute_decoder_positions(decoder))


def compute_decoder_positions(decoder: PixelDecoder) -> Tensor:
    """Return the sines and cosines of a decoder's positions, zero for prefix tokens, [1, T, W]."""
    table = decoder.slot.build(replace(decoder.shape, outputs=0, registers=0))
    assert isinstance(table, AddedPositionEmbedding)
    return F.pad(table.gather_rows(0, decoder.grid, None), (0, 0, decoder.prefix, 0))

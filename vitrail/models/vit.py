"""The Vision Transformer of "An Image is Worth 16x16 Words", equations 1 to 4.

B images, C channels, T tokens (N patches in a grid of h×w, and what stands before them), D width, L layers, K classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.models.hybrid import Hybrid
from vitrail.models.init import SCHEMES, initialise, made
from vitrail.models.model import Model
from vitrail.models.sizes import Size
from vitrail.nn.block import BlockSlot, PreNorm
from vitrail.nn.embed import ConvStem, Patches, divide
from vitrail.nn.head import HeadSlot, Linear
from vitrail.nn.pool import ClassToken, PoolSlot
from vitrail.nn.position import Learned1D, PositionSlot
from vitrail.nn.prefix import Prefix
from vitrail.nn.recompute import run
from vitrail.nn.shape import Grid, Shape

EmbedSlot = Patches | ConvStem | Hybrid


@dataclass(frozen=True)
class ViTConfig:
    """A model as a value: its size, and what stands in each slot. The defaults are the paper's."""

    size: Size
    embed: EmbedSlot = Patches(16)
    position: PositionSlot = Learned1D()
    prefix: Prefix = Prefix()
    block: BlockSlot = PreNorm()
    pool: PoolSlot = ClassToken()
    head: HeadSlot = Linear()
    classes: int | None = 1000  # None for a model that ends in features
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    dropout: float = 0.0
    stochastic_depth: float = 0.0  # of the last layer; rises linearly from 0 at the first
    eps: float = 1e-6  # of every LayerNorm
    token_norm: bool = False  # a LayerNorm on z_0 too, as in CLIP
    init: str = "vit"

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes < 1:
            raise ValueError(f"{self.classes} classes: give at least 1, or None for a model that ends in features")
        if self.channels < 1:
            raise ValueError(f"{self.channels} channels: an image has at least 1")
        for name in ("dropout", "stochastic_depth"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: a rate is at least 0 and below 1")
        if self.pool.needs > self.prefix.outputs:
            raise ValueError("this pooling reads the class token and there is none: use prefix='class', or pool='mean'")
        if self.init not in SCHEMES:
            raise ValueError(f"unknown initialisation {self.init!r}: use {' or '.join(SCHEMES)}")
        _ = self.shape

    @property
    def shape(self) -> Shape:
        """What the parts have to agree on; an error where they cannot."""
        grid = divide(self.image_size, self.embed.stride)
        size, prefix = self.size, self.prefix
        return Shape(
            size.width, size.depth, size.heads, grid, size.mlp, prefix.outputs, prefix.registers, self.eps, size.head
        )


class ViT(Model):
    """Image to logits: patches, tokens, encoder, pooling, head."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        shape, depth = config.shape, config.size.depth
        self.config = config
        self.embed = config.embed.build(config.channels, shape.width)
        self.prefix = config.prefix.build(shape.width)
        self.position = config.position.build(shape)
        self.dropout = nn.Dropout(config.dropout)
        self.token_norm = nn.LayerNorm(shape.width, eps=config.eps) if config.token_norm else nn.Identity()
        rates = [config.stochastic_depth * layer / max(1, depth - 1) for layer in range(depth)]
        self.blocks = nn.ModuleList(config.block.module(shape, config.block, config.dropout, rate) for rate in rates)
        norm = nn.LayerNorm(shape.width, eps=config.eps) if config.block.final_norm else nn.Identity()
        self.pool = config.pool.build(shape, norm)
        self.head = config.head.build(self.pool.features, config.classes, self.pool.vectors)

    def tokens(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        """z_0 of equation 1, [B, T, D].

        `keep`, [B, n], selects patches for each image: masked autoencoders and patch dropout need no more.
        """
        grid = self.embed.grid(image)
        z = self.prefix.before(self.embed(image, keep))  # [x_class; x_p E]
        e_pos = self.position.stem(grid, keep)
        return self.token_norm(self.dropout(z if e_pos is None else z + e_pos))  # eq. 1

    def encode(
        self, z: Tensor, grid: Grid | None = None, keep: Tensor | None = None, read: int | None = None
    ) -> Tensor:
        """z_L of equations 2 and 3: [B, T, D], or [B, read, D] where only the first tokens are wanted.

        Positions inside the layers (relative, rotary, at every layer) must know where the tokens come from: `grid` is
        that of the configured image size unless given, `keep` as for `tokens`.
        """
        for z_l in self.states(z, grid, keep, read):
            z = z_l
        return z

    def states(
        self, z: Tensor, grid: Grid | None = None, keep: Tensor | None = None, read: int | None = None
    ) -> Iterator[Tensor]:
        """z_1 to z_L, one after the other. Only the last layer is spared the tokens that are not read."""
        places = self.position.layers(grid or self.config.shape.grid, keep)
        for layer, (block, place) in enumerate(zip(self.blocks, places, strict=True), start=1):
            z = place.enter(z)
            z = run(block, self.recompute, z, place, read if layer == len(self.blocks) else None)  # eq. 2, 3
            yield z

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        z = self.encode(self.tokens(image, keep), self.embed.grid(image), keep, read=self.pool.reads)
        return self.head(self.pool(z))  # eq. 4, then K logits

    def features(self, image: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """The tokens z_l after these layers, [B, T, D] each: 0 is the embedding, L or -1 the last, before its norm."""
        depth, grid = len(self.blocks), self.embed.grid(image)
        wanted = [layer + depth + 1 if layer < 0 else layer for layer in layers]
        for given, layer in zip(layers, wanted, strict=True):
            if not 0 <= layer <= depth:
                raise ValueError(f"layer {given} of {depth}: use 0 (the embedding) to {depth}, or -1 for the last")
        z = self.tokens(image)
        found = {0: z, **dict(zip(range(1, max(wanted, default=0) + 1), self.states(z, grid), strict=False))}
        return [found[layer] for layer in wanted]

    def grids(self, image: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """The patch tokens after these layers as maps, [B, D, h, w] each: the model as a backbone."""
        grid, prefix = self.embed.grid(image), self.config.prefix.count
        return [z[:, prefix:].transpose(1, 2).unflatten(2, grid) for z in self.features(image, layers)]


def build_vit(config: ViTConfig) -> ViT:
    """A model with fresh weights."""
    return made(lambda: ViT(config), lambda model: initialise(model, config.init))

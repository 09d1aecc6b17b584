"""The Vision Transformer of "An Image is Worth 16x16 Words", equations 1 to 4.

B images, C channels, T tokens (N patches in a grid of h×w, after the prefix tokens), D width, L layers, K classes. Of clips,
the patches are tubelets in a grid of t×h×w.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn

from vitrail.models.base import ForwardStage, Layer, Model, TokenModel, Unsupported
from vitrail.models.tracing import ConstantPositions, fold_convolutions, resample_in_graph
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import run_block
from vitrail.nn.head import HiddenHead, Projection
from vitrail.nn.shape import Grid


class ViT(TokenModel):
    """Image to logits: patches, tokens, encoder, pooling, head."""

    STEM: ClassVar[tuple[str, ...]] = ("embed.", "prefix.", "position.", "token_norm.")
    NO_WEIGHT_DECAY: ClassVar[tuple[str, ...]] = ("position.", "prefix.")

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
        self.head = config.head.build(self.pool.feature_dim, config.classes, self.pool.n_vectors, config.eps)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        return self.head(self.pool_tokens(images, keep))  # eq. 1 to 4, then K logits

    def tokens(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return z_0 of equation 1, [B, T, D].

        `keep`, [B, n], selects patches for each image, for masked autoencoders and patch dropout.
        """
        grid = self.embed.grid(images)  # raises for an unsupported shape
        return self.add_positions(self.embed(images, keep), grid, keep)

    def add_positions(self, x: Tensor, grid: Grid, keep: Tensor | None = None) -> Tensor:
        """Return [x_class; x_p E] + E_pos of patches x, [B, n, D]."""
        z = self.prefix.prepend_to(x)
        e_pos = self.position.stem_embedding(grid, keep)
        return self.token_norm(self.dropout(z if e_pos is None else z + e_pos))  # eq. 1

    def layer_outputs(
        self, z: Tensor, grid: Grid | None = None, keep: Tensor | None = None, n_outputs: int | None = None
    ) -> Iterator[Tensor]:
        """Yield z_1 to z_L. The last layer computes the first `n_outputs` tokens only.

        Positions inside the layers (relative, rotary, at every layer) depend on the grid: `grid` defaults to that of the
        configured image size; `keep` is the one given to `tokens`.
        """
        grid = grid or self.config.shape.grid
        positions = self.position.layer_positions(grid, keep)
        if self.config.block.is_divided:
            if keep is not None:
                raise Unsupported("divided attention needs every patch, and keep leaves some out: use block='pre'")
            positions = (position._replace(grid=grid) for position in positions)
        for layer, (block, position) in enumerate(zip(self.blocks, positions, strict=True), start=1):
            z, last = position.add_to(z), layer == len(self.blocks)
            z = run_block(block, self.activation_checkpointing, z, position, n_outputs if last else None)  # eq. 2, 3
            yield z

    def forward_features(self, images: Tensor) -> Tensor:
        """Return z_L, [B, T, D], before the norm of equation 4."""
        return self.encode(self.tokens(images), self.embed.grid(images))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool z_L (equation 4), then apply the head; a distilled model pools to two vectors."""
        y = self.pool(features)
        return self.apply_pre_logits(y) if pre_logits else self.head(y)

    def apply_pre_logits(self, y: Tensor) -> Tensor:
        """Return the input of the classifier: y after the head's own layer or the projection, if there is one."""
        if isinstance(self.head, HiddenHead):
            return self.head.compute_features(y)
        return self.head(y) if isinstance(self.config.head, Projection) else y

    def classify(self, features: Tensor) -> Tensor:
        return self.head.linear(features) if isinstance(self.head, HiddenHead) else self.head(features)

    def classify_embedded(self, features: Tensor) -> Tensor:
        count = self.pool.n_vectors
        return self.classify(features if count == 1 else features.unflatten(1, (count, -1)))

    def compute_pre_logits(self, images: Tensor) -> Tensor:
        return self.apply_pre_logits(self.pool_tokens(images))

    def dense_logits(self, images: Tensor) -> Tensor:
        """Return logits for every patch, [B, h, w, K] or [B, t, h, w, K]: each is pooled as if it were the whole image."""
        prefix, patches = self.config.prefix.count, self.forward_features(images)[:, self.config.prefix.count :]
        single_patch = patches.reshape(-1, 1, patches.shape[-1]).expand(-1, prefix + 1, -1)  # the patch as all tokens
        return self.head(self.pool(single_patch)).unflatten(0, (len(images), *self.embed.grid(images)))

    def feature_maps(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """Return the patch tokens after these layers as maps, [B, D, h, w] each, or [B, D, t, h, w]."""
        grid, prefix = self.embed.grid(images), self.config.prefix.count
        return [z[:, prefix:].transpose(1, 2).unflatten(2, grid) for z in self.hidden_states(images, layers)]

    @property
    def final_norm(self) -> nn.Module:
        return self.pool.norm

    @property
    def feature_dim(self) -> int:
        if isinstance(self.head, HiddenHead):
            return self.head.hidden
        if isinstance(self.config.head, Projection):
            return self.config.head.width
        return self.pool.n_vectors * self.pool.feature_dim

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        """Run the model equation by equation."""
        grid = self.embed.grid(images)
        yield ForwardStage("image" if self.config.frames is None else "clip", images)
        x = self.embed(images)
        yield ForwardStage("patches x_p E", x, (self.embed,))
        z = self.add_positions(x, grid)
        yield ForwardStage("tokens z_0 (eq. 1)", z, (self.prefix, self.position, self.token_norm))
        outputs = self.layer_outputs(z, grid, n_outputs=None if every_token else self.pool.n_inputs)
        for layer, (block, z_l) in enumerate(zip(self.blocks, outputs, strict=True), start=1):
            yield ForwardStage(f"layer {layer} (eq. 2, 3)", z_l, (block,))
            z = z_l
        y = self.pool(z)
        yield ForwardStage("pooling y (eq. 4)", y, (self.pool,))
        yield ForwardStage("head" if self.config.classes is not None else "features", self.head(y), (self.head,))

    def layers(self) -> list[Layer]:
        return [Layer(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]

    def lora_modules(self) -> list[nn.Linear]:
        return [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]

    def inflate(self, frames: int, tubelet: int = 2, mode: str = "mean", attention: str | None = None) -> Model:
        from vitrail.models.inflate import inflate

        return inflate(self, frames, tubelet, mode, attention)

    def take_spectrograms(self, image_size: tuple[int, int] = (128, 1024), overlap: int | None = None) -> Model:
        from vitrail.models.spectrograms import take_spectrograms

        return take_spectrograms(self, image_size, overlap)

    def merge_tokens(self, r: int) -> nn.Module:
        from vitrail.models.token_merging import merge_model

        return merge_model(self, r)

    def for_tracing(self, any_size: bool = False) -> "ViT":
        model = super().for_tracing(any_size)
        if any_size:
            model.position = resample_in_graph(model.position)
        return model

    def with_constants(self, any_size: bool = False, size: tuple[int, ...] | None = None) -> "ViT":
        model = fold_convolutions(self.for_tracing(any_size))
        if not any_size:
            model.position = ConstantPositions(model.position, self.config.grid_of(size or self.config.input_size))
        return model

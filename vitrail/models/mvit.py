"""Multiscale Vision Transformers (Fan et al. 2021; v2, Li et al. 2021): pooled attention, and stages of growing width.

Each stage halves the grid by pooling the queries of its first layer. All stages attend globally, to keys and values on a
coarse grid, and give feature maps of four scales, as dense tasks need. Images have a grid of h×w, clips of t×h×w: a configuration
with `frames` builds a model of clips [B, C, frames, H, W].

B images, C channels, T tokens: P prefix tokens and a grid, D width, K classes.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from vitrail.models.base import refuse
from vitrail.models.mvit_config import MViTConfig
from vitrail.models.staged import StagedModel
from vitrail.nn.block import run_block
from vitrail.nn.embed import PrefixTokens
from vitrail.nn.linear import LinearLayer
from vitrail.nn.multiscale import (
    CONVOLUTIONS,
    MultiscaleBlock,
    SeparatePositions,
    locate_tokens,
    to_maps,
    to_tokens,
)
from vitrail.nn.recording import AttentionLayer


class MViT(StagedModel):
    """A Multiscale Vision Transformer: image or clip to logits, or to features without classes."""

    STEM: ClassVar[tuple[str, ...]] = ("embed.", "prefix.", "position.")
    NO_WEIGHT_DECAY: ClassVar[tuple[str, ...]] = ("prefix.", "position.")

    if TYPE_CHECKING:
        config: MViTConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: MViTConfig) -> None:
        super().__init__()
        self.config = config  # pyright: ignore[reportIncompatibleVariableOverride]
        kernel, last = config.patch_kernel, config.width * 2 ** (config.n_stages - 1)
        padding = tuple(side // 2 for side in kernel)
        convolution: Any = CONVOLUTIONS[len(kernel)]
        self.embed = convolution(config.channels, config.width, kernel, config.patch_stride, padding)
        self.prefix = PrefixTokens(config.prefix, 0, config.width)
        if config.positions == "absolute":
            grid = config.stage_grid(-1, config.input_size)
            self.position = SeparatePositions(grid, config.width, config.prefix)
        else:
            self.position = None
        self.dropout = nn.Dropout(config.dropout)
        rates = [config.stochastic_depth * layer / max(1, config.depth - 1) for layer in range(config.depth)]
        self.blocks = nn.ModuleList(
            MultiscaleBlock(config.layer_shape(layer), config.dropout, config.attention_dropout, rate)
            for layer, rate in enumerate(rates)
        )
        self.norm = nn.LayerNorm(last, eps=config.eps)
        self.head = nn.Identity() if config.classes is None else LinearLayer(last, config.classes)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Return the embedded patches, [B, T, D]: overlapping ones, after the class token if there is one."""
        config, size = self.config, tuple(images.shape[2:])
        if len(size) != len(config.input_size) or images.shape[1] != config.channels:
            sides = "H, W" if config.frames is None else "T, H, W"
            raise ValueError(f"the model takes [B, {config.channels}, {sides}], got {list(images.shape)}")
        config.check_size(size)
        x = self.prefix.prepend_to(to_tokens(self.embed(images)))
        return self.dropout(x if self.position is None else self.position(x, config.stage_grid(-1, size)))

    def layer_outputs(self, x: Tensor, size: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the tokens after each layer, [B, T, D], from the embedded patches of images of this size."""
        for block, grid in zip(self.blocks, self.config.input_grids(size), strict=True):
            x = run_block(block, self.activation_checkpointing, x, grid)
            yield x

    def to_feature_map(self, x: Tensor, layer: int, size: tuple[int, ...]) -> Tensor:
        """Return the tokens after a layer, 0 for the embedding, as a map [B, D, *grid], without the class token.

        With `expand="mlp"` the last layer of a stage already has the width of the next one.
        """
        grids = [*self.config.input_grids(size), self.config.grid_of(size)]
        return to_maps(x[:, self.config.prefix :], grids[layer])

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = self.norm(features[:, 0]) if self.config.class_token else self.norm(features).mean(1)
        return y if pre_logits else self.head(y)

    def dense_logits(self, images: Tensor) -> Tensor:
        size = tuple(images.shape[2:])
        patches = self.norm(self.forward_features(images)[:, self.config.prefix :])
        return self.head(patches).unflatten(1, self.config.grid_of(size))

    def attention_layers(self, size: tuple[int, ...]) -> list[AttentionLayer]:
        config, found = self.config, list[AttentionLayer]()
        if any(len(set(stride[-2:])) > 1 for stride in (config.patch_stride, config.kv_stride, *config.q_strides)):
            raise refuse(config, "recording attention on cells that are not square", "use equal strides")
        stride = config.patch_stride[-1]
        for number, block in enumerate(self.blocks):
            assert isinstance(block, MultiscaleBlock)
            shape = config.layer_shape(number, size)
            key_stride = stride * shape.kv_stride[-1]
            stride *= shape.q_stride[-1]
            queries = locate_tokens(shape.q_grid, stride, config.prefix)
            keys = locate_tokens(shape.kv_grid, key_stride, config.prefix)
            found.append(AttentionLayer(block.msa, block.msa.compute_attention, shape.heads, queries, keys))
        return found

    def decays(self, name: str, parameter: Tensor) -> bool:
        return super().decays(name, parameter) and ".msa.offsets." not in name

    def lora_modules(self) -> list[nn.Linear]:
        return [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]

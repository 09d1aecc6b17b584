"""Multiscale Vision Transformers (Fan et al. 2021; v2, Li et al. 2021): pooled attention, and stages of growing width.

Each stage halves the grid by pooling the queries of its first layer. All stages attend globally, to keys and values on a
coarse grid, and give feature maps of four scales, as dense tasks need.

B images, C channels, T tokens: P prefix tokens and a grid of h×w, D width, K classes.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from vitrail.models.base import (
    ForwardStage,
    Layer,
    Model,
    ModelConfig,
    State,
    Unsupported,
    check_common,
    image_sides,
    refuse,
)
from vitrail.models.sizes import closest
from vitrail.nn.block import run_block
from vitrail.nn.embed import PrefixTokens
from vitrail.nn.multiscale import (
    CONVOLUTIONS,
    OFFSET_RESAMPLING,
    MultiscaleBlock,
    PooledShape,
    ResidualPooling,
    pool_grid,
    to_maps,
    to_tokens,
)
from vitrail.nn.recording import AttentionLayer, WindowTokens
from vitrail.nn.resampling import Resampling, resample_rows
from vitrail.nn.shape import Grid

MVIT_NAME = re.compile(r"MViTv2-(?P<size>[A-Z])(?P<cls>-cls)?")
# Width of the first stage, layers and heads of each stage.
MVIT_SIZES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "T": (96, (1, 2, 5, 2), (1, 2, 4, 8)),
    "S": (96, (1, 2, 11, 2), (1, 2, 4, 8)),
    "B": (96, (2, 3, 16, 3), (1, 2, 4, 8)),
    "L": (144, (2, 6, 36, 4), (2, 4, 8, 16)),
    "H": (192, (4, 8, 60, 8), (3, 6, 12, 24)),
}
Expansion = Literal["attention", "mlp"]


@dataclass(frozen=True)
class MViTConfig(ModelConfig):
    """A Multiscale Vision Transformer as a value. Each stage has twice the width of the one before.

    The width grows in the attention of a stage's first layer, or in the MLP of the last layer before the stage. Kernels and
    strides have a number per axis of the grid. `kv_stride` is that of the first stage; later ones divide it by the strides
    of the queries so far, so that all stages attend to a grid of the same size.
    """

    family: ClassVar[str] = "mvit"
    title: ClassVar[str] = "Multiscale Vision Transformers"

    width: int = 96  # of the first stage
    depths: tuple[int, ...] = (1, 2, 5, 2)
    heads: tuple[int, ...] = (1, 2, 4, 8)
    expand: Expansion = "attention"
    class_token: bool = False
    patch_kernel: tuple[int, ...] = (7, 7)
    patch_stride: tuple[int, ...] = (4, 4)
    pool_kernel: tuple[int, ...] = (3, 3)
    q_strides: tuple[tuple[int, ...], ...] = ((1, 1), (2, 2), (2, 2), (2, 2))  # of each stage's first layer
    kv_stride: tuple[int, ...] = (4, 4)
    residual_pooling: ResidualPooling = "all"  # tokens whose pooled query is added to the output of attention
    mlp_ratio: float = 4.0
    classes: int | None = 1000
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # of the last layer; increases linearly from 0 at the first
    eps: float = 1e-6
    init: str = "deit"

    def __post_init__(self) -> None:
        check_common(self)
        stages = {"depths": self.depths, "heads": self.heads, "q_strides": self.q_strides}
        if len({len(values) for values in stages.values()}) > 1 or not self.depths:
            lengths = ", ".join(f"{len(values)} {name}" for name, values in stages.items())
            raise ValueError(f"every stage needs a depth, heads and a stride of the queries, got {lengths}")
        axes, names = len(self.image_size), ("patch_kernel", "patch_stride", "pool_kernel", "kv_stride")
        sides = [*((name, getattr(self, name)) for name in names), *(("q_strides", q) for q in self.q_strides)]
        for name, values in sides:
            if len(values) != axes:
                raise ValueError(f"{name} needs a number for each of {axes} axes, got {values}")
        for name, values in (("width", (self.width,)), ("depths", self.depths), ("heads", self.heads), *sides):
            if min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(values)}")
        for name in ("patch_kernel", "pool_kernel"):
            if any(side % 2 == 0 for side in getattr(self, name)):
                raise ValueError(f"{name} must be odd, got {getattr(self, name)}")
        if any(step > 1 and step % 2 for stride in self.q_strides for step in stride):
            raise ValueError(f"q_strides must be 1 or even, got {self.q_strides}")
        for name, kind in (("expand", Expansion), ("residual_pooling", ResidualPooling)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be {' or '.join(get_args(kind))}, got {getattr(self, name)!r}")
        for name in ("dropout", "attention_dropout", "stochastic_depth"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        self.check_size(self.image_size)
        for layer in range(self.depth):
            _ = self.layer_shape(layer)

    def check_size(self, size: tuple[int, ...]) -> None:
        """Raise ValueError for images that are smaller than one cell of the last stage."""
        least = self.total_stride
        if any(side < step for side, step in zip(size, least, strict=True)):
            sides, wanted = "×".join(map(str, size)), "×".join(map(str, least))
            raise ValueError(f"images of {sides} are too small for {self.n_stages} stages: use at least {wanted}")

    @property
    def n_stages(self) -> int:
        return len(self.depths)

    @property
    def depth(self) -> int:
        return sum(self.depths)

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """Return the number of the last layer of each stage."""
        return tuple(accumulate(self.depths))

    @property
    def total_stride(self) -> Grid:
        """Return the pixels per cell of the last grid along each axis."""
        return tuple(map(math.prod, zip(self.patch_stride, *self.q_strides, strict=True)))

    @property
    def stride(self) -> int:
        return max(self.total_stride)

    @property
    def size_rule(self) -> tuple[int, int]:
        return 1, self.stride

    @property
    def prefix(self) -> int:
        """Return the number of tokens before the grid."""
        return int(self.class_token)

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return self.stage_grid(self.n_stages - 1, size)

    def stage_grid(self, stage: int, size: tuple[int, ...]) -> Grid:
        """Return the grid of a stage, counted from 0, for images of this size; -1 is the embedding. Odd sides round up."""
        grid = pool_grid(size, self.patch_stride)
        for stride in self.q_strides[: stage + 1]:
            grid = pool_grid(grid, stride)
        return grid

    def input_grids(self, size: tuple[int, ...]) -> list[Grid]:
        """Return the grid before each layer for images of this size."""
        grids = (
            [self.stage_grid(s - 1, size)] + [self.stage_grid(s, size)] * (d - 1) for s, d in enumerate(self.depths)
        )
        return [grid for stage in grids for grid in stage]

    def kv_strides(self) -> list[Grid]:
        """Return the stride of keys and values in each stage."""
        strides, stride = [], self.kv_stride
        for divisor in self.q_strides:
            stride = tuple(max(step // by, 1) for step, by in zip(stride, divisor, strict=True))
            strides.append(stride)
        return strides

    def layer_shape(self, layer: int, size: tuple[int, ...] | None = None) -> PooledShape:
        """Return the sizes of a layer, counted from 0, for images of this size (default: the configured one)."""
        ends = self.stage_ends
        stage = next(stage for stage, end in enumerate(ends) if layer < end)
        is_first, is_last = layer == ends[stage] - self.depths[stage], layer == ends[stage] - 1
        width = self.width * 2**stage
        grows_before = self.expand == "attention" and is_first and stage > 0
        grows_after = self.expand == "mlp" and is_last and stage < self.n_stages - 1
        return PooledShape(
            width=width // 2 if grows_before else width,
            attention_width=width,
            output_width=width * 2 if grows_after else width,
            heads=self.heads[stage],
            grid=self.input_grids(self.image_size if size is None else size)[layer],
            kernel=self.pool_kernel,
            q_stride=self.q_strides[stage] if is_first else (1,) * len(self.kv_stride),
            kv_stride=self.kv_strides()[stage],
            mlp=round(self.mlp_ratio * width),
            eps=self.eps,
            prefix=self.prefix,
            residual_pooling=self.residual_pooling,
        )

    def describe(self) -> str:
        known = (self.width, self.depths, self.heads)
        size = next((name for name, sizes in MVIT_SIZES.items() if sizes == known), None)
        if size is None:
            return f"MViTv2 of width {self.width}, {self.depths}"
        usual = self.expand == choose_expansion(size, self.class_token)
        return f"MViTv2-{size}{'-cls' * self.class_token}{'' if usual else f', expanded in the {self.expand}'}"

    def facts(self) -> dict[str, str]:
        last, strides = self.width * 2 ** (self.n_stages - 1), self.kv_strides()
        stages = zip(self.depths, self.heads, self.q_strides, strides, strict=True)
        text = "; ".join(
            f"{d} layers, {h} heads, queries ÷{format_sides(q)}, keys ÷{format_sides(k)}" for d, h, q, k in stages
        )
        return {
            "stages": text,
            "width": f"{self.width} to {last}, expanded in the {self.expand}",
            "patches": f"kernel {format_sides(self.patch_kernel)}, stride {format_sides(self.patch_stride)}",
            "prefix tokens": "class" if self.class_token else "none",
            "positions": "relative, along each axis",
            "resampling": OFFSET_RESAMPLING.describe(),
        }

    def check_any_size(self) -> None:
        raise Unsupported(f"dynamic_size= does not support {self.title}: their positions depend on the size, use size=")

    def matches_option(self, name: str, value: Any) -> bool:
        return self.eps == value if name == "eps" else super().matches_option(name, value)

    @property
    def resampling(self) -> Resampling:
        return OFFSET_RESAMPLING

    def resize_state(self, state: State, size: tuple[int, ...]) -> State:
        """Return these tensors with the tables of relative positions resampled for another image size."""
        state = dict(state)
        for layer in range(self.depth):
            for axis, rows in enumerate(self.layer_shape(layer, size).offsets):
                name = f"blocks.{layer}.msa.offsets.{axis}"
                state[name] = resample_rows(state[name], rows, OFFSET_RESAMPLING).contiguous()
        return state

    def input_weight(self) -> str:
        return "embed.weight"


def format_sides(sides: Grid) -> str:
    """Return sides as text, one number if they are equal."""
    return "×".join(map(str, sides if len(set(sides)) > 1 else sides[:1]))


def locate_pooled_tokens(grid: Grid, stride: int, prefix: int) -> WindowTokens:
    """Return the cells of tokens on a grid, one window, after prefix tokens without a cell."""
    cells = torch.cat((torch.full((prefix,), -1), torch.arange(math.prod(grid))))[None]
    return WindowTokens(grid, stride, cells, torch.zeros_like(cells))


class MViT(Model):
    """A Multiscale Vision Transformer: image to logits, or to features without classes."""

    STEM: ClassVar[tuple[str, ...]] = ("embed.", "prefix.")
    NO_WEIGHT_DECAY: ClassVar[tuple[str, ...]] = ("prefix.",)

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
        self.dropout = nn.Dropout(config.dropout)
        rates = [config.stochastic_depth * layer / max(1, config.depth - 1) for layer in range(config.depth)]
        self.blocks = nn.ModuleList(
            MultiscaleBlock(config.layer_shape(layer), config.dropout, config.attention_dropout, rate)
            for layer, rate in enumerate(rates)
        )
        self.norm = nn.LayerNorm(last, eps=config.eps)
        self.head = nn.Identity() if config.classes is None else nn.Linear(last, config.classes)

    def tokens_of(self, images: Tensor) -> Tensor:
        """Return the embedded patches, [B, T, D]: overlapping ones, after the class token if there is one."""
        config = self.config
        if images.ndim != 2 + len(config.image_size) or images.shape[1] != config.channels:
            raise ValueError(f"the model takes [B, {config.channels}, H, W], got {list(images.shape)}")
        config.check_size(tuple(images.shape[2:]))
        return self.dropout(self.prefix.prepend_to(to_tokens(self.embed(images))))

    def layer_outputs(self, x: Tensor, size: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the tokens after each layer, [B, T, D], from the embedded patches of images of this size."""
        for block, grid in zip(self.blocks, self.config.input_grids(size), strict=True):
            x = run_block(block, self.activation_checkpointing, x, grid)
            yield x

    def to_feature_map(self, x: Tensor, layer: int, size: tuple[int, ...]) -> Tensor:
        """Return the tokens after a layer, 0 for the embedding, as a map [B, D, h, w], without the class token."""
        grids = [*self.config.input_grids(size), self.config.grid_of(size)]
        return to_maps(x[:, self.config.prefix :], grids[layer])

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the last layer's tokens, [B, T, D], before their norm."""
        x = self.tokens_of(images)
        for tokens in self.layer_outputs(x, tuple(images.shape[2:])):
            x = tokens
        return x

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = self.norm(features[:, 0]) if self.config.class_token else self.norm(features).mean(1)
        return y if pre_logits else self.head(y)

    def dense_logits(self, images: Tensor) -> Tensor:
        size = tuple(images.shape[2:])
        patches = self.norm(self.forward_features(images)[:, self.config.prefix :])
        return self.head(patches).unflatten(1, self.config.grid_of(size))

    def feature_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Return the maps after these layers, [B, D, h, w] each; by default after the last layer of every stage.

        0 is the embedding, 1 to L the layers, -1 the last. With `expand="mlp"` the last layer of a stage already has the
        width of the next one.
        """
        wanted = self.resolve_layers(self.config.stage_ends if layers is None else layers, "the embedding")
        x, size = self.tokens_of(images), tuple(images.shape[2:])
        states = zip(range(1, max(wanted, default=0) + 1), self.layer_outputs(x, size), strict=False)
        tokens = {0: x, **dict(states)}
        return [self.to_feature_map(tokens[layer], layer, size) for layer in wanted]

    @property
    def feature_dim(self) -> int:
        return self.norm.normalized_shape[0]

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        """Run the model stage by stage."""
        yield ForwardStage("image", images)
        x = self.tokens_of(images)
        yield ForwardStage("patches", x, (self.embed, self.prefix))
        ends, first = self.config.stage_ends, 0
        for layer, tokens in enumerate(self.layer_outputs(x, tuple(images.shape[2:])), start=1):
            x = tokens
            if layer in ends:
                yield ForwardStage(f"stage {ends.index(layer) + 1}", x, tuple(self.blocks[first:layer]))
                first = layer
        y = self.forward_head(x, pre_logits=True)
        yield ForwardStage("pooling", y, (self.norm,))
        yield ForwardStage("head" if self.config.classes is not None else "features", self.head(y), (self.head,))

    def layers(self) -> list[Layer]:
        return [Layer(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]

    def attention_layers(self, size: tuple[int, ...]) -> list[AttentionLayer]:
        config, found = self.config, list[AttentionLayer]()
        if any(len(set(stride)) > 1 for stride in (config.patch_stride, config.kv_stride, *config.q_strides)):
            raise refuse(config, "recording attention on cells that are not square", "use equal strides")
        stride = config.patch_stride[0]
        for number, block in enumerate(self.blocks):
            assert isinstance(block, MultiscaleBlock)
            shape = config.layer_shape(number, size)
            key_stride = stride * shape.kv_stride[0]
            stride *= shape.q_stride[0]
            queries = locate_pooled_tokens(shape.q_grid, stride, config.prefix)
            keys = locate_pooled_tokens(shape.kv_grid, key_stride, config.prefix)
            found.append(AttentionLayer(block.msa, block.msa.compute_attention, shape.heads, queries, keys))
        return found

    def decays(self, name: str, parameter: Tensor) -> bool:
        return super().decays(name, parameter) and ".msa.offsets." not in name

    def lora_modules(self) -> list[nn.Linear]:
        return [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]


MVIT_OPTIONS = frozenset({field.name for field in fields(MViTConfig)} - {"init"})


def choose_expansion(size: str, class_token: bool) -> Expansion:
    """Return where the published model of this size expands its width: the large one without a class token in the MLP."""
    return "mlp" if size == "L" and not class_token else "attention"


def configure_mvit(
    name: str | None = None,
    *,
    width: int = 96,
    depths: tuple[int, ...] = (1, 2, 5, 2),
    heads: tuple[int, ...] = (1, 2, 4, 8),
    class_token: bool = False,
    q_strides: tuple[tuple[int, ...], ...] | None = None,
    image_size: int | tuple[int, ...] = 224,
    **options: Any,
) -> MViTConfig:
    """Return the configuration of an MViT from its name, "MViTv2-T", or "MViTv2-B-cls" with a class token, or its sizes.

    By default the first layer of every stage but the first halves the grid.
    """
    if name is not None:
        match = MVIT_NAME.fullmatch(name)
        if match is None or match["size"] not in MVIT_SIZES:
            known = closest(name, [f"MViTv2-{size}" for size in MVIT_SIZES])
            raise ValueError(f"unknown Multiscale Vision Transformer {name!r}: {known}")
        width, depths, heads = MVIT_SIZES[match["size"]]
        class_token = class_token or match["cls"] is not None
        options.setdefault("expand", choose_expansion(match["size"], class_token))
    if q_strides is None:
        q_strides = ((1, 1), *[(2, 2)] * (len(depths) - 1))
    return MViTConfig(
        width=width,
        depths=tuple(depths),
        heads=tuple(heads),
        class_token=class_token,
        q_strides=q_strides,
        image_size=image_sides(image_size),
        **options,
    )

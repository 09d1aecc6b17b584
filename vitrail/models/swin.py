"""Swin Transformers (Liu et al. 2021, v2 2022): attention in shifted windows, and stages of growing width.

The cost grows linearly with the pixels, and the four stages give feature maps of four scales, as dense tasks need.

B images, C channels, a grid of h×w tokens of width D, K classes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from vitrail.models.base import Unsupported, image_sides
from vitrail.models.sizes import closest
from vitrail.models.staged import StagedConfig, StagedModel
from vitrail.nn.block import run_block
from vitrail.nn.linear import LinearLayer
from vitrail.nn.recording import AttentionLayer
from vitrail.nn.shape import FeatureShape, Grid
from vitrail.nn.window import PatchMerging, ShiftRule, SwinV1, SwinV2, WindowBlock, WindowShape, WindowSlot

SWIN_NAME = re.compile(r"Swin(?P<version>V2)?-(?P<size>[A-Z])(?:/(?P<window>\d+))?")
# Width of the first stage, layers and heads of each stage.
SWIN_SIZES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "T": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "S": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "B": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "L": (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
WINDOWS = {SwinV1: 7, SwinV2: 8}  # default


@dataclass(frozen=True)
class SwinConfig(StagedConfig):
    """A Swin Transformer as a value. Each stage has half the grid and twice the width of the one before."""

    family: ClassVar[str] = "swin"
    title: ClassVar[str] = "Swin Transformers"

    width: int = 96  # of the first stage
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    windows: tuple[int, ...] = (7, 7, 7, 7)
    block: WindowSlot = SwinV1()
    shift: ShiftRule = ShiftRule()
    patch: int = 4
    mlp_ratio: float = 4.0
    classes: int | None = 1000
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # of the last layer; increases linearly from 0 at the first
    eps: float = 1e-5
    init: str = "deit"

    def __post_init__(self) -> None:
        stages = {"depths": self.depths, "heads": self.heads, "windows": self.windows}
        if isinstance(self.block, SwinV2) and self.block.pretrained_windows is not None:
            stages["pretrained_windows"] = self.block.pretrained_windows
        self.check_stages(stages, "a depth, heads and a window")
        for name, values in {"width": (self.width,), "patch": (self.patch,), **stages}.items():
            if min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(values)}")
        for side in self.image_size:
            if side % self.patch:
                near = max(1, round(side / self.patch)) * self.patch
                raise ValueError(f"image sides must be multiples of the patch {self.patch}, got {side}: use {near}")
        for stage in range(self.n_stages):
            _ = self.window_shape(stage)

    @property
    def stride(self) -> int:
        return self.patch * 2 ** (self.n_stages - 1)

    @property
    def size_rule(self) -> tuple[int, int]:
        return self.patch, 1

    def stage_grid(self, stage: int, size: tuple[int, ...]) -> Grid:
        """Return the grid of a stage, counted from 0, for images of this size; odd grids are padded before they are halved."""
        return tuple(-(-(side // self.patch) // 2**stage) for side in size)

    def window_shape(self, stage: int) -> WindowShape:
        """Return the sizes of the layers of a stage, counted from 0."""
        width, window = self.width * 2**stage, self.windows[stage]
        pretrained = getattr(self.block, "pretrained_windows", None)
        trained = window if pretrained is None else pretrained[stage]
        return WindowShape(width, self.heads[stage], window, trained, round(self.mlp_ratio * width), self.eps)

    def feature_shape(self, layer: int) -> FeatureShape:
        stage = self.find_stage(layer)
        return FeatureShape(self.width * 2**stage, self.patch * 2**stage)

    def describe(self) -> str:
        version = "V2" if isinstance(self.block, SwinV2) else ""
        known = (self.width, self.depths, self.heads)
        size = next((name for name, sizes in SWIN_SIZES.items() if sizes == known), None)
        return (
            f"Swin{version}-{size}/{self.windows[0]}" if size else f"Swin{version} of width {self.width}, {self.depths}"
        )

    def facts(self) -> dict[str, str]:
        sizes = zip(self.depths, self.heads, self.windows, strict=True)
        stages = "; ".join(f"{d} layers, {h} heads, windows of {w}×{w}" for d, h, w in sizes)
        return {
            "stages": stages,
            "width": f"{self.width} to {self.width * 2 ** (self.n_stages - 1)}, patches of {self.patch}×{self.patch}",
            "layers": type(self.block).__name__,
            "shift": str(self.shift),
        }

    def check_any_size(self) -> None:
        raise Unsupported(
            "dynamic_size= does not support Swin Transformers: their windows depend on the size, use size="
        )

    def matches_option(self, name: str, value: Any) -> bool:
        known = {"eps": self.eps, "window": self.windows[0]}
        return known[name] == value if name in known else super().matches_option(name, value)

    def input_weight(self) -> str:
        return "embed.weight"


class Swin(StagedModel):
    """A Swin Transformer: image to logits, or to features without classes."""

    STEM: ClassVar[tuple[str, ...]] = ("embed.", "embed_norm.")

    if TYPE_CHECKING:
        config: SwinConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config  # pyright: ignore[reportIncompatibleVariableOverride]
        self.embed = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.embed_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.dropout = nn.Dropout(config.dropout)
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(config.depths):
            for layer in range(depth):
                rate = config.stochastic_depth * len(blocks) / max(1, config.depth - 1)
                blocks.append(
                    config.block.module(
                        config.window_shape(stage),
                        is_shifted=layer % 2 == 1,
                        dropout=config.dropout,
                        attention_dropout=config.attention_dropout,
                        stochastic_depth=rate,
                    )
                )
        self.blocks = nn.ModuleList(blocks)
        widths = [config.width * 2**stage for stage in range(config.n_stages)]
        self.merges = nn.ModuleList(PatchMerging(w, config.eps, config.block.norm_first) for w in widths[:-1])
        self.norm = nn.LayerNorm(widths[-1], eps=config.eps)
        self.head = nn.Identity() if config.classes is None else LinearLayer(widths[-1], config.classes)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Return the tokens of the patches, [B, h, w, D]."""
        config = self.config
        if images.ndim != 4 or images.shape[1] != config.channels:
            raise ValueError(f"the model takes [B, {config.channels}, H, W], got {list(images.shape)}")
        if any(side % config.patch or not side for side in images.shape[2:]):
            size = "×".join(map(str, images.shape[2:]))
            raise ValueError(f"image sides must be multiples of the patch {config.patch}, got {size}")
        return self.dropout(self.embed_norm(self.embed(images).permute(0, 2, 3, 1)))

    def choose_shift(self, stage: int, grid: Grid) -> Grid:
        """Return by how many tokens the shifted layers of a stage move their windows along each side of its grid."""
        config = self.config
        configured = tuple(side // (config.patch * 2**stage) for side in config.image_size)
        return config.shift.choose_shift(config.windows[stage], grid, configured)

    def layer_outputs(self, x: Tensor, size: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield the grid after each layer, [B, h, w, D], from the embedded patches."""
        config, layer = self.config, 0
        for stage, depth in enumerate(config.depths):
            if stage:
                x = self.merges[stage - 1](x)
            shift = self.choose_shift(stage, tuple(x.shape[1:3]))
            for block in self.blocks[layer : layer + depth]:
                x = run_block(block, self.activation_checkpointing, x, shift, config.shift.pad_first)
                yield x
            layer += depth

    def to_feature_map(self, x: Tensor, layer: int, size: tuple[int, ...]) -> Tensor:
        return x.permute(0, 3, 1, 2)

    def to_features(self, x: Tensor) -> Tensor:
        """Return the last feature map, [B, D, h, w], before its norm."""
        return x.permute(0, 3, 1, 2)

    def stage_modules(self, stage: int) -> tuple[nn.Module, ...]:
        merge = (self.merges[stage - 1],) if stage > 0 else ()
        return (*merge, *super().stage_modules(stage))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = self.norm(features.permute(0, 2, 3, 1)).mean((1, 2))
        return y if pre_logits else self.head(y)

    def dense_logits(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.forward_features(images).permute(0, 2, 3, 1)))

    def attention_layers(self, size: tuple[int, ...]) -> list[AttentionLayer]:
        config, found = self.config, list[AttentionLayer]()
        for stage, depth in enumerate(config.depths):
            grid, stride = config.stage_grid(stage, size), config.patch * 2**stage
            shift = self.choose_shift(stage, grid)
            for block in self.blocks[len(found) : len(found) + depth]:
                assert isinstance(block, WindowBlock)
                msa, tokens = block.msa, block.locate_tokens(grid, stride, shift, config.shift.pad_first)
                found.append(AttentionLayer(msa, msa.compute_attention, msa.heads, tokens, tokens, msa.compute_table))
        return found

    def layer_index(self, parameter: str) -> int:
        if parameter.startswith("merges."):  # a merging belongs to the last layer before it
            return self.config.stage_ends[int(parameter.split(".")[1])]
        return super().layer_index(parameter)

    def decays(self, name: str, parameter: Tensor) -> bool:
        return super().decays(name, parameter) and not name.endswith("msa.offsets") and ".msa.bias_mlp." not in name

    def lora_modules(self) -> list[nn.Linear]:
        mlps = [block.msa.bias_mlp for block in self.blocks if hasattr(block.msa, "bias_mlp")]  # type: ignore[union-attr]
        small = {module for mlp in mlps for module in mlp.modules()}  # type: ignore[union-attr]
        return [module for module in self.blocks.modules() if isinstance(module, nn.Linear) and module not in small]


SWIN_OPTIONS = frozenset(
    {field.name for field in fields(SwinConfig)} - {"windows", "block", "init"} | {"window", "version"}
)


def fit_windows(window: int, size: tuple[int, ...], patch: int, n_stages: int) -> tuple[int, ...]:
    """Return the window of each stage: as given, or as large as the grid of the stage where that is smaller."""
    grids = (min(side // (patch * 2**stage) for side in size) for stage in range(n_stages))
    return tuple(max(1, min(window, grid)) for grid in grids)


def configure_swin(
    name: str | None = None,
    *,
    version: int = 1,
    width: int = 96,
    depths: tuple[int, ...] = (2, 2, 6, 2),
    heads: tuple[int, ...] = (3, 6, 12, 24),
    window: int | None = None,
    image_size: int | tuple[int, ...] | None = None,
    patch: int = 4,
    **options: Any,
) -> SwinConfig:
    """Return the configuration of a Swin Transformer from its name, "Swin-T" or "SwinV2-B/16", or from its sizes.

    The number after the slash is the window. By default, images have 32 × window pixels per side (Swin v2: 256). In a stage
    whose grid is smaller than the window, the window is as large as the grid.
    """
    if name is not None:
        match = SWIN_NAME.fullmatch(name)
        if match is None or match["size"] not in SWIN_SIZES:
            raise ValueError(
                f"unknown Swin Transformer {name!r}: {closest(name, [f'Swin-{size}' for size in SWIN_SIZES])}"
            )
        version = 2 if match["version"] else 1
        window = int(match["window"]) if match["window"] else window
        width, depths, heads = SWIN_SIZES[match["size"]]
    if version not in (1, 2):
        raise ValueError(f"version must be 1 or 2, got {version}")
    block: WindowSlot = SwinV1() if version == 1 else SwinV2()
    window = WINDOWS[type(block)] if window is None else window
    if image_size is None:
        image_size = 32 * window if version == 1 else 256
    size = image_sides(image_size)
    windows = fit_windows(window, size, patch, len(depths))
    return SwinConfig(
        width=width,
        depths=tuple(depths),
        heads=tuple(heads),
        windows=windows,
        block=block,
        patch=patch,
        image_size=size,
        **options,
    )

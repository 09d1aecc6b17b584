"""Configuration of Multiscale Vision Transformers: published sizes, strides and widths of every layer."""

import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

from vitrail.models.base import State, Unsupported, image_sides, refuse
from vitrail.models.sizes import closest
from vitrail.models.staged import StagedConfig
from vitrail.nn.multiscale import (
    OFFSET_RESAMPLING,
    PooledShape,
    Positions,
    QueryPooling,
    ResidualPooling,
    pool_grid,
    resample_cells,
)
from vitrail.nn.resampling import Resampling, resample_rows
from vitrail.nn.shape import FeatureShape, Grid

MVIT_NAME = re.compile(r"MViTv(?P<version>[12])-(?P<size>[A-Z])(?P<cls>-cls)?")
# Width of the first stage, layers and heads of each stage.
MVIT_SIZES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "T": (96, (1, 2, 5, 2), (1, 2, 4, 8)),
    "S": (96, (1, 2, 11, 2), (1, 2, 4, 8)),
    "B": (96, (2, 3, 16, 3), (1, 2, 4, 8)),
    "L": (144, (2, 6, 36, 4), (2, 4, 8, 16)),
    "H": (192, (4, 8, 60, 8), (3, 6, 12, 24)),
}
MVIT_V1_SIZES = {"B": MVIT_SIZES["S"]}
# Where published models differ from the defaults of MViTConfig: those of version 1, and those of clips of both versions.
MVIT_V1: dict[str, Any] = {
    "expand": "mlp",
    "positions": "absolute",
    "q_pooling": "strided",
    "residual_pooling": "none",
}
CLIPS: dict[str, Any] = {
    "class_token": True,
    "patch_kernel": (3, 7, 7),
    "patch_stride": (2, 4, 4),
    "pool_kernel": (3, 3, 3),
    "kv_stride": (1, 8, 8),
    "residual_pooling": "patches",
    "classes": 400,  # of Kinetics-400
}
Expansion = Literal["attention", "mlp"]


@dataclass(frozen=True)
class MViTConfig(StagedConfig):
    """A Multiscale Vision Transformer as a value. Each stage has twice the width of the one before.

    The width grows in the attention of a stage's first layer, or in the MLP of the last layer before the stage. Kernels and
    strides have a number per axis of the grid: two for images, three for clips, time first. `kv_stride` is that of the first
    stage; later ones divide it by the strides of the queries so far, so that all stages attend to a grid of the same size.
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
    frames: int | None = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, metadata={"omit_default": True}
    )
    # v1: tables of space and of time that are added to the tokens
    positions: Positions = field(default="relative", metadata={"omit_default": True})
    # v1: the convolution of the queries is left out where it has no stride
    q_pooling: QueryPooling = field(default="all", metadata={"omit_default": True})

    def __post_init__(self) -> None:
        stages = {"depths": self.depths, "heads": self.heads, "q_strides": self.q_strides}
        self.check_stages(stages, "a depth, heads and a stride of the queries")
        axes, names = len(self.input_size), ("patch_kernel", "patch_stride", "pool_kernel", "kv_stride")
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
        choices = {
            "expand": Expansion,
            "residual_pooling": ResidualPooling,
            "positions": Positions,
            "q_pooling": QueryPooling,
        }
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be {' or '.join(get_args(kind))}, got {getattr(self, name)!r}")
        self.check_size(self.input_size)
        for layer in range(self.depth):
            _ = self.layer_shape(layer)

    def check_size(self, size: tuple[int, ...]) -> None:
        """Raise ValueError for images or clips that are smaller than one cell of the last stage."""
        least = self.total_stride
        if any(side < step for side, step in zip(size, least, strict=True)):
            sides, wanted = "×".join(map(str, size)), "×".join(map(str, least))
            inputs = "images" if self.frames is None else "clips"
            raise ValueError(f"{inputs} of {sides} are too small for {self.n_stages} stages: use at least {wanted}")

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
            grid=self.input_grids(self.input_size if size is None else size)[layer],
            kernel=self.pool_kernel,
            q_stride=self.q_strides[stage] if is_first else (1,) * len(self.kv_stride),
            kv_stride=self.kv_strides()[stage],
            mlp=round(self.mlp_ratio * width),
            eps=self.eps,
            prefix=self.prefix,
            residual_pooling=self.residual_pooling,
            q_pooling=self.q_pooling,
            positions=self.positions,
        )

    def feature_shape(self, layer: int) -> FeatureShape:
        if layer == 0:
            return FeatureShape(self.width, max(self.patch_stride))
        strides = zip(self.patch_stride, *self.q_strides[: self.find_stage(layer) + 1], strict=True)
        return FeatureShape(self.layer_shape(layer - 1).output_width, max(map(math.prod, strides)))

    def describe(self) -> str:
        known, is_v1 = (self.width, self.depths, self.heads), self.positions == "absolute"
        size = next((name for name, sizes in (MVIT_V1_SIZES if is_v1 else MVIT_SIZES).items() if sizes == known), None)
        name = f"MViTv{1 if is_v1 else 2}"
        words = [f"{name} of width {self.width}, {self.depths}" if size is None else f"{name}-{size}"]
        if self.frames is not None:
            words.append(f"{self.frames} frames")
        elif size is not None:
            words[0] += "-cls" * self.class_token
        if size is not None and self.expand != ("mlp" if is_v1 else choose_expansion(size, self.class_token)):
            words.append(f"expanded in the {self.expand}")
        return ", ".join(words)

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
            "positions": {
                "relative": "relative, along each axis",
                "absolute": "learned, of a frame's cells" + " and of time" * (self.frames is not None),
            }[self.positions],
            "resampling": OFFSET_RESAMPLING.describe(),
        }

    def check_any_size(self) -> None:
        raise Unsupported(f"dynamic_size= does not support {self.title}: their positions depend on the size, use size=")

    def with_frames(self, frames: int) -> Self:
        """Return the configuration for clips of another number of frames."""
        if self.frames is None:
            raise refuse(self, "frames=", "build a model of clips, such as MViTv2-S with frames=16")
        return replace(self, frames=frames)

    def matches_option(self, name: str, value: Any) -> bool:
        return (name, value) in (("eps", self.eps), ("frames", self.frames)) or super().matches_option(name, value)

    @property
    def resampling(self) -> Resampling:
        return OFFSET_RESAMPLING

    def resize_state(self, state: State, size: tuple[int, ...]) -> State:
        """Return these tensors with the tables of positions resampled for another size of images or clips."""
        state = dict(state)
        if self.positions == "absolute":
            *frames, rows, columns = self.stage_grid(-1, size)
            state["position.space"] = resample_cells(state["position.space"], (rows, columns)).contiguous()
            for count in frames:
                state["position.time"] = resample_rows(state["position.time"], count, OFFSET_RESAMPLING).contiguous()
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
    q_strides: tuple[tuple[int, ...], ...] | None = None,
    frames: int | None = None,
    image_size: int | tuple[int, ...] = 224,
    **options: Any,
) -> MViTConfig:
    """Return the configuration of an MViT from its name, "MViTv2-T", or "MViTv2-B-cls" with a class token, or its sizes.

    With `frames` it takes clips and has the published strides, kernels and classes of models for video: "MViTv1-B",
    "MViTv2-S". By default the first layer of every stage but the first halves the grid along height and width.
    """
    usual = {} if frames is None else dict(CLIPS)
    if name is not None:
        match = MVIT_NAME.fullmatch(name)
        is_v1 = match is not None and match["version"] == "1"
        sizes = MVIT_V1_SIZES if is_v1 else MVIT_SIZES
        if match is None or match["size"] not in sizes or (is_v1 and match["cls"]):
            known = [*(f"MViTv2-{size}" for size in MVIT_SIZES), *(f"MViTv1-{size}" for size in MVIT_V1_SIZES)]
            raise ValueError(f"unknown Multiscale Vision Transformer {name!r}: {closest(name, known)}")
        if is_v1 and frames is None:
            raise ValueError(f"{name} takes clips: give their number of frames, frames=16")
        width, depths, heads = sizes[match["size"]]
        if match["cls"] is not None:
            options["class_token"] = True
        has_class_token = options.get("class_token", usual.get("class_token", False))
        usual |= MVIT_V1 if is_v1 else {"expand": choose_expansion(match["size"], has_class_token)}
    if q_strides is None:
        axes = 2 if frames is None else 3
        q_strides = ((1,) * axes, *[(1, 2, 2)[-axes:]] * (len(depths) - 1))
    return MViTConfig(
        width=width,
        depths=tuple(depths),
        heads=tuple(heads),
        q_strides=q_strides,
        frames=frames,
        image_size=image_sides(image_size),
        **usual | options,
    )

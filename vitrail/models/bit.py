"""BiT ResNets (Kolesnikov et al. 2020): the baseline of the paper's comparisons, and the trunk of its hybrids.

ResNets with GroupNorm in place of BatchNorm and with standardised convolution weights.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import ForwardStage, Layer, Model, ModelConfig, check_common, image_sides
from vitrail.models.sizes import RESNETS, closest
from vitrail.models.tracing import fold_convolutions
from vitrail.nn.block import run_block
from vitrail.nn.linear import LinearLayer
from vitrail.nn.resnet import PreActBottleneck, StdConv, build_stages, group_norm
from vitrail.nn.shape import FeatureShape, Grid

BIT_NAME = re.compile(r"(?:BiT-)?R(?P<resnet>\d+)x(?P<factor>\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class BiTConfig(ModelConfig):
    """A ResNet by its stages and a factor on its width. The root "small" is one 3×3 convolution, for images of 32²."""

    family: ClassVar[str] = "bit"
    title: ClassVar[str] = "BiT ResNets"
    init: ClassVar[str] = "vit"  # pyright: ignore[reportIncompatibleVariableOverride]

    stages: tuple[int, ...] = (3, 4, 6, 3)
    factor: float = 1.0
    channels: int = 3
    classes: int | None = 1000
    image_size: tuple[int, int] = (224, 224)
    root: Literal["large", "small"] = "large"

    def __post_init__(self) -> None:
        check_common(self)
        if not self.stages or min(self.stages) < 1:
            raise ValueError(f"stages must be at least one, each of at least one block, got {self.stages}")
        if self.factor <= 0 or (64 * self.factor) % 16:
            near = max(1, round(4 * self.factor)) / 4
            raise ValueError(f"the width factor must be a multiple of 0.25, got {self.factor:g}: use {near:g}")

    @property
    def depth(self) -> int:
        return sum(self.stages)

    @property
    def stride(self) -> int:
        return (4 if self.root == "large" else 1) * 2 ** (len(self.stages) - 1)

    @property
    def size_rule(self) -> tuple[int, int]:
        return 1, self.stride + 1

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return tuple(-(-side // self.stride) for side in size)

    @property
    def pyramid_layers(self) -> tuple[int, ...]:
        return tuple(accumulate(self.stages))

    def feature_shape(self, layer: int) -> FeatureShape:
        root = 4 if self.root == "large" else 1
        if layer == 0:
            return FeatureShape(round(64 * self.factor), root)
        stage = next(stage for stage, end in enumerate(self.pyramid_layers) if layer <= end)
        return FeatureShape(round(256 * 2**stage * self.factor), root * 2**stage)

    def describe(self) -> str:
        depth = next((number for number, stages in RESNETS.items() if stages == self.stages), None)
        return f"BiT R{depth}x{self.factor:g}" if depth else f"BiT {self.stages}, width ×{self.factor:g}"

    def input_weight(self) -> str:
        return "root.weight"


class BiT(Model):
    """A BiT ResNet: image to logits, or to features without classes."""

    STEM: ClassVar[tuple[str, ...]] = ("root.",)

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        root = round(64 * config.factor)
        kernel, stride = (7, 2) if config.root == "large" else (3, 1)
        self.root = StdConv(config.channels, root, kernel, stride)
        self.stages, channels = build_stages(PreActBottleneck, config.stages, root, config.factor)
        self.norm = group_norm(channels)
        self.head = nn.Identity() if config.classes is None else LinearLayer(channels, config.classes)
        self.width, self.has_large_root = channels, config.root == "large"
        self.pad_with_zeros = pad_with_zeros

    def embed_root(self, images: Tensor) -> Tensor:
        """Return what the first convolution and its pooling give."""
        if images.ndim != 4 or images.shape[1] != self.config.channels:
            raise ValueError(f"the model takes [B, {self.config.channels}, H, W], got {list(images.shape)}")
        x = self.root(images)
        # the pooling is padded with zeros, as BiT was trained
        return F.max_pool2d(self.pad_with_zeros(x), 3, 2) if self.has_large_root else x

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the feature map of the last stage, [B, width, h, w], before its norm."""
        return self.stages(self.embed_root(images))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = self.normalise_map(features).mean((2, 3))
        return y if pre_logits else self.head(y)

    def dense_logits(self, images: Tensor) -> Tensor:
        return self.head(self.normalise_map(self.forward_features(images)).permute(0, 2, 3, 1))

    def feature_maps(self, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """Return the maps after these layers, [B, C, h, w] each: 0 is the root, 1 to L the blocks, -1 the last."""
        wanted, x = self.resolve_layers(layers, "the root"), self.embed_root(images)
        maps = {0: x}
        for index, layer in enumerate(self.layers(), start=1):
            x = maps[index] = run_block(layer.module, self.activation_checkpointing, x)
        return [maps[layer] for layer in wanted]

    @property
    def final_norm(self) -> nn.Module:
        return self.norm

    def normalise_map(self, features: Tensor) -> Tensor:
        return F.relu(self.norm(features))

    @property
    def feature_dim(self) -> int:
        return self.width

    def run_stages(self, images: Tensor, every_token: bool = False) -> Iterator[ForwardStage]:
        """Run the model stage by stage."""
        yield ForwardStage("image", images)
        x = self.embed_root(images)
        yield ForwardStage("root", x, (self.root,))
        for index, stage in enumerate(self.stages, start=1):
            x = stage(x)
            yield ForwardStage(f"stage {index}", x, (stage,))
        y = self.forward_head(x, pre_logits=True)
        yield ForwardStage("pooling", y, (self.norm,))
        yield ForwardStage("head" if self.config.classes is not None else "features", self.head(y), (self.head,))

    def layers(self) -> list[Layer]:
        return [
            Layer(f"stages.{stage}.{index}", block)
            for stage, blocks in enumerate(self.stages)
            for index, block in enumerate(cast(nn.Sequential, blocks))
        ]

    def for_tracing(self, any_size: bool = False) -> "BiT":
        model = super().for_tracing(any_size)
        model.pad_with_zeros = concatenate_zeros
        return model

    def with_constants(self, any_size: bool = False, size: tuple[int, ...] | None = None) -> "BiT":
        return fold_convolutions(self.for_tracing(any_size))


def pad_with_zeros(x: Tensor) -> Tensor:
    """Return a map with one row or column of zeros on each side."""
    return F.pad(x, (1, 1, 1, 1))


def concatenate_zeros(x: Tensor) -> Tensor:
    """Return the same as `pad_with_zeros` without a padding operator.

    ONNX Runtime (1.31) merges a padding with zeros into the pooling that follows, where the border then never is the maximum.
    """
    row = torch.zeros_like(x[:, :, :1])
    x = torch.cat((row, x, row), 2)
    column = torch.zeros_like(x[:, :, :, :1])
    return torch.cat((column, x, column), 3)


def configure_bit(
    name: str | None = None,
    *,
    stages: tuple[int, ...] | None = None,
    factor: float = 1.0,
    classes: int | None = 1000,
    image_size: int | tuple[int, ...] = 224,
    channels: int = 3,
    root: str = "large",
) -> BiTConfig:
    """Return the configuration of a BiT ResNet from its name, "R50x1" or "R152x4", or from its stages and width factor.

    Factors below 1 make small ones, and `root="small"` suits images of 32².
    """
    if name is not None:
        match = BIT_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"unknown ResNet {name!r}: use a depth and a width factor, like 'R50x1'")
        if int(match["resnet"]) not in RESNETS:
            raise ValueError(f"unknown ResNet depth in {name!r}: use R{', R'.join(map(str, RESNETS))}")
        stages, factor = RESNETS[int(match["resnet"])], float(match["factor"])
    if root not in ("large", "small"):
        raise ValueError(f"unknown root {root!r}: {closest(root, ['large', 'small'])}")
    return BiTConfig(
        stages=RESNETS[50] if stages is None else stages,
        factor=factor,
        channels=channels,
        classes=classes,
        image_size=image_sides(image_size),
        root=cast(Any, root),
    )

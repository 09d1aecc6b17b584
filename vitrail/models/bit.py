"""BiT ResNets (Kolesnikov et al. 2020): the baseline of every comparison in the paper, and the trunk of its hybrids.

ResNets with GroupNorm in place of BatchNorm and with standardised convolution weights.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.init import initialise, made
from vitrail.models.model import Model
from vitrail.nn.recompute import Stack


class StdConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 for each output channel.

    `same` pads as TensorFlow does, more at the right and the bottom: the hybrids were trained so. BiT pads evenly.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, same: bool = False) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=0 if same else (kernel - 1) // 2, bias=False)
        self.same = same

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8).reshape_as(self.weight)
        x = pad_same(input, self.kernel_size[0], self.stride[0], 0.0) if self.same else input
        return F.conv2d(x, weight, None, self.stride, self.padding)


def pad_same(x: Tensor, kernel: int, stride: int, value: float) -> Tensor:
    """Pads so that a window with this stride gives ceil(size / stride) values, the odd one to the right and below."""
    vertical, horizontal = (max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:])
    if vertical == 0 and horizontal == 0:
        return x
    left, top = horizontal // 2, vertical // 2
    return F.pad(x, (left, horizontal - left, top, vertical - top), value=value)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels)


class PreActBottleneck(nn.Module):
    """BiT's block: norm and ReLU before each convolution, the sum left as it is."""

    def __init__(self, inputs: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        middle = outputs // 4
        self.norm1 = group_norm(inputs)
        self.conv1 = StdConv(inputs, middle, 1)
        self.norm2 = group_norm(middle)
        self.conv2 = StdConv(middle, middle, 3, stride)
        self.norm3 = group_norm(middle)
        self.conv3 = StdConv(middle, outputs, 1)
        self.shortcut = StdConv(inputs, outputs, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.norm2(y)))
        return shortcut + self.conv3(F.relu(self.norm3(y)))


class Bottleneck(nn.Module):
    """The hybrids' block: norm after each convolution, ReLU after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        middle = outputs // 4
        self.conv1 = StdConv(inputs, middle, 1, same=True)
        self.norm1 = group_norm(middle)
        self.conv2 = StdConv(middle, middle, 3, stride, same=True)
        self.norm2 = group_norm(middle)
        self.conv3 = StdConv(middle, outputs, 1, same=True)
        self.norm3 = group_norm(outputs)
        self.shortcut = StdConv(inputs, outputs, 1, stride, same=True) if project else None
        self.shortcut_norm = group_norm(outputs) if project else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.shortcut is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_norm(self.shortcut(x))
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(shortcut + self.norm3(self.conv3(y)))


def stages(block: type[nn.Module], depths: tuple[int, ...], inputs: int, factor: float) -> tuple[nn.Sequential, int]:
    """The ResNet's stages, each but the first halving the grid, and the channels that come out."""
    made_stages = []
    for index, depth in enumerate(depths):
        outputs = round(256 * 2**index * factor)
        blocks = []
        for position in range(depth):
            stride = 2 if index and position == 0 else 1
            blocks.append(block(inputs, outputs, stride, project=position == 0))
            inputs = outputs
        made_stages.append(Stack(*blocks))
    return nn.Sequential(*made_stages), inputs


class RootedTrunk(nn.Module):
    """The hybrids' ResNet: 7×7 root, norm, ReLU, max-pooling, then stages, with TensorFlow's padding throughout."""

    def __init__(self, depths: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.root = StdConv(channels, 64, 7, stride=2, same=True)
        self.norm = group_norm(64)
        self.stages, self.channels = stages(Bottleneck, depths, 64, 1.0)
        self.stride = 4 * 2 ** max(0, len(depths) - 1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(image)))
        x = F.max_pool2d(pad_same(x, 3, 2, -math.inf), 3, 2)
        return self.stages(x)  # [B, channels, H / stride, W / stride]


@dataclass(frozen=True)
class BiTConfig:
    """A ResNet by its stages and a factor on its width. The root "small" is one 3×3 convolution, for images of 32²."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    factor: float = 1.0
    channels: int = 3
    classes: int | None = 1000
    image_size: tuple[int, int] = (224, 224)
    root: Literal["large", "small"] = "large"

    def __post_init__(self) -> None:
        if self.classes is not None and self.classes < 1:
            raise ValueError(f"{self.classes} classes: give at least 1, or None for a model that ends in features")
        if self.channels < 1:
            raise ValueError(f"{self.channels} channels: an image has at least 1")
        if not self.stages or min(self.stages) < 1:
            raise ValueError(f"stages {self.stages}: give at least one, each of at least one block")
        if self.factor <= 0 or (64 * self.factor) % 16:
            near = max(1, round(4 * self.factor)) / 4
            raise ValueError(f"width factor {self.factor:g}: it must be a multiple of 0.25, {near:g} is the nearest")
        if min(self.image_size) < 1:
            raise ValueError(
                f"image size {self.image_size[0]}×{self.image_size[1]}: both sides must be at least 1 pixel"
            )


class BiT(Model):
    """A BiT ResNet: image to logits, or to features without classes."""

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        root = round(64 * config.factor)
        kernel, stride = (7, 2) if config.root == "large" else (3, 1)
        self.root = StdConv(config.channels, root, kernel, stride)
        self.stages, channels = stages(PreActBottleneck, config.stages, root, config.factor)
        self.norm = group_norm(channels)
        self.head = nn.Identity() if config.classes is None else nn.Linear(channels, config.classes)
        self.features_width = channels

    def rooted(self, image: Tensor) -> Tensor:
        """The first convolution and its pooling."""
        x = self.root(image)
        # the pooling is padded with zeros, as BiT was trained
        return F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2) if self.config.root == "large" else x

    def pooled(self, x: Tensor) -> Tensor:
        """The mean of the normalised feature map, [B, features]."""
        return F.relu(self.norm(x)).mean((2, 3))

    def grids(self, image: Tensor) -> Tensor:
        """The feature map of the last stage, [B, features, h, w], before its norm."""
        if image.ndim != 4 or image.shape[1] != self.config.channels:
            raise ValueError(f"the model takes [B, {self.config.channels}, H, W], got {list(image.shape)}")
        return self.stages(self.rooted(image))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.pooled(self.grids(image)))


def build_bit(config: BiTConfig) -> BiT:
    """A BiT with fresh weights."""
    return made(lambda: BiT(config), lambda model: initialise(model, "vit"))

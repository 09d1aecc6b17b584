"""BiT ResNet parts (Kolesnikov et al. 2020): standardised convolutions, bottleneck blocks, and the hybrids' trunk."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.block import RecomputeSequential


class StdConv(nn.Conv2d):
    """A convolution whose weights are standardised to mean 0 and variance 1 per output channel.

    `same` pads as TensorFlow does, more on the right and at the bottom, as for the hybrids. BiT pads evenly.
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
    """Pad so that a window of this stride gives ceil(size / stride) values; odd padding goes right and below."""
    vertical, horizontal = (max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:])
    if vertical == 0 and horizontal == 0:
        return x
    left, top = horizontal // 2, vertical // 2
    return F.pad(x, (left, horizontal - left, top, vertical - top), value=value)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels)


class PreActBottleneck(nn.Module):
    """BiT's block: norm and ReLU before each convolution, no activation after the sum."""

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


def build_stages(
    block: type[nn.Module], depths: tuple[int, ...], inputs: int, factor: float
) -> tuple[nn.Sequential, int]:
    """Return the ResNet's stages, each but the first halving the grid, and their output channels."""
    stages = []
    for index, depth in enumerate(depths):
        outputs = round(256 * 2**index * factor)
        blocks = []
        for position in range(depth):
            stride = 2 if index and position == 0 else 1
            blocks.append(block(inputs, outputs, stride, project=position == 0))
            inputs = outputs
        stages.append(RecomputeSequential(*blocks))
    return nn.Sequential(*stages), inputs


class RootedTrunk(nn.Module):
    """The hybrids' ResNet: 7×7 root, norm, ReLU, max pooling, then stages, all with TensorFlow's padding."""

    def __init__(self, depths: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.root = StdConv(channels, 64, 7, stride=2, same=True)
        self.norm = group_norm(64)
        self.stages, self.channels = build_stages(Bottleneck, depths, 64, 1.0)
        self.stride = 4 * 2 ** max(0, len(depths) - 1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.norm(self.root(image)))
        x = F.max_pool2d(pad_same(x, 3, 2, -math.inf), 3, 2)
        return self.stages(x)  # [B, channels, H / stride, W / stride]

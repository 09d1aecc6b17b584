"""BatchNorm over the images of all processes, so that several processes train as one does.

PyTorch's own, `nn.SyncBatchNorm`, refuses tensors on a CPU. Models keep PyTorch's plain BatchNorm, and know one process:
`Team.wrap` replaces it for the training.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes. Its gradient is summed too: each process has a part of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradient.clone()
        dist.all_reduce(total)
        return total


# A collective inside a compiled graph would have no gradient, so compiled code calls this one outside.
sum_over_processes = cast(Callable[[Tensor], Tensor], torch.compiler.disable(SumOverProcesses.apply))


class SynchronisedBatchNorm(_BatchNorm):
    """BatchNorm of one to three dimensions whose batch statistics are those of all processes; for evaluation the plain one.

    Processes may have different numbers of images and pixels. Their running statistics stay equal.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept the input of the module that this one replaces."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        x, dims = input.float(), [0, *range(2, input.ndim)]
        shape = [1, -1, *[1] * (input.ndim - 2)]
        own_mean = x.mean(dims)  # [C], of this process
        centred = x - own_mean.view(shape)
        # The sums are float64, where the squares of a mean that is large beside the deviation leave enough digits.
        mean, square = own_mean.double(), centred.square().mean(dims).double() + own_mean.double().square()
        sums = sum_over_processes(torch.cat((mean.new_ones(1), mean, square)) * (input.numel() // len(mean)))
        count, mean, square = sums[:1], *(sums[1:] / sums[:1]).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        self.update_statistics(mean.detach(), (variance * count / (count - 1)).detach())
        scale = (variance + self.eps).rsqrt()
        shift = (own_mean - mean) * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        return (centred * scale.float().view(shape) + shift.float().view(shape)).to(input.dtype)

    @torch.no_grad()
    def update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of a batch, whose variance is the unbiased estimate."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        self.running_mean.copy_(torch.lerp(self.running_mean.double(), mean, share))
        self.running_var.copy_(torch.lerp(self.running_var.double(), variance, share))


def synchronise_batch_norm(module: nn.Module) -> None:
    """Turn every BatchNorm inside a module into one that is synchronised; parameters and buffers stay as they are."""
    for child in module.modules():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            child.__class__ = SynchronisedBatchNorm

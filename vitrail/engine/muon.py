"""Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal before it is applied.

m matrices of one shape, r×c each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that drives singular values towards 1


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """Newton–Schulz iterations on [m, r, c]: the same directions, with singular values near 1.

    In bfloat16 on a GPU, as published; in float32 on a CPU, where bfloat16 is many times slower.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    x = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    return x.to(matrices.dtype)


class Muon(Optimizer):
    """For matrices alone, and filters, which are matrices of outputs by everything else. Queries, keys and values stand in one
    tensor and are three matrices: `parts` says so.

    The update is scaled by √max(1, r/c), so that its size does not depend on the shape. Matrices of one shape are iterated
    together.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, weight_decay: float, steps: int = 5
    ):
        super().__init__(
            groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps, "parts": 1}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])  # Nesterov's
                full = update.full_tensor() if isinstance(update, DTensor) else update
                alike[full.shape].append((parameter, full))
            for shape, members in alike.items():
                rows, columns = shape[0] // group["parts"], shape[1:].numel()
                stacked = torch.stack([update for _, update in members]).view(-1, rows, columns)
                size = max(1.0, rows / columns) ** 0.5
                made = orthogonal(stacked, group["steps"]).mul_(size).view(len(members), *shape)
                for (parameter, _), update in zip(members, made, strict=True):
                    if isinstance(parameter, DTensor):
                        update = distribute_tensor(update, parameter.device_mesh, parameter.placements)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

"""Optimisers that PyTorch lacks: LAMB, and Muon (Jordan et al. 2024), which orthogonalises the momentum of matrices.

m matrices of one shape, r×c each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class Lamb(Optimizer):
    """LAMB. The trust ratio is 1 for tensors without weight decay, as in the published code."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                count = state["step"].item()
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
                update = state["exp_avg"] / (1 - beta1**count) / root
                if decay:
                    update = update + decay * parameter
                    size, length = parameter.norm(), update.norm()
                    update = update * torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
                parameter.sub_(group["lr"] * update)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic that drives singular values towards 1


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices [m, r, c] with the same singular vectors and singular values near 1, by Newton–Schulz iterations.

    bfloat16 on a GPU, as published; float32 on a CPU, where bfloat16 is many times slower.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    x = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    return x.to(matrices.dtype)


class Muon(Optimizer):
    """Muon for matrices, and filters as matrices of outputs by inputs. A tensor of queries, keys and values has 3 `parts`.

    The update is scaled by √max(1, r/c), so that its size does not depend on the shape. Matrices of one shape are computed
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
                made = orthogonalise(stacked, group["steps"]).mul_(size).view(len(members), *shape)
                for (parameter, _), update in zip(members, made, strict=True):
                    if isinstance(parameter, DTensor):
                        update = distribute_tensor(update, parameter.device_mesh, parameter.placements)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

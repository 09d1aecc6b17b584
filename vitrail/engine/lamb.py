"""LAMB (You et al. 2020): Adam's step, sized for each tensor by the tensor's own norm. DeiT III trains with it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lamb(Optimizer):
    """Layer-wise adaptive moments. The trust ratio is 1 for tensors without weight decay, as in the published code."""

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

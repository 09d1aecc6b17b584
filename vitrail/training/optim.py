"""Settings of the optimisers, the rules of weight decay and learning rate for each parameter, and what PyTorch lacks: LAMB
and Muon (Jordan et al. 2024), which orthogonalises the momentum of matrices.

All of them leave out a step where `found_inf`, a number on the device, is 1: PyTorch's fused AdamW by itself, the others below.
So the host need not know whether the gradients are finite.

m matrices of one shape, r×c each.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from vitrail.models.base import Model
from vitrail.utils.json import check_fields

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic that drives singular values towards 1


@dataclass(frozen=True)
class ParameterRule:
    """Weight decay, learning rate scale and kind of one parameter."""

    decay: bool  # whether weight decay applies
    scale: float  # of the learning rate: layer-wise decay
    matrix: bool = False  # a matrix inside the model, for Muon
    parts: int = 1  # stacked matrices: queries, keys and values


ParameterRules = dict[str, ParameterRule]


@dataclass(frozen=True)
class Optim:
    """Settings of all optimisers. `layer_decay` multiplies the learning rate once for each layer further from the head.

    `head_scale` multiplies that of the head, which is new where a trained model gets other classes.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float | None = 1.0  # maximum global norm of the gradient; None for no clipping
    layer_decay: float = 1.0
    decay_end: float | None = None  # weight decay at the end of the run, on a cosine; None for constant
    head_scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "> 0", "lr", "head_scale")
        check_fields(self, ">= 0", "weight_decay", "decay_end")
        check_fields(self, "> 0 and <= 1", "layer_decay")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be > 0, or none, got {self.clip}")

    def decay_at(self, step: int, steps: int) -> float:
        """Return the weight decay at step `step`, from 0."""
        if self.decay_end is None:
            return self.weight_decay
        return self.decay_end + (self.weight_decay - self.decay_end) * (1 + math.cos(math.pi * step / steps)) / 2

    def build(self, loss_module: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        """Return the optimisers that together train every parameter of the loss module that is not frozen."""
        raise NotImplementedError

    def parameter_groups(
        self, loss_module: nn.Module, rules: ParameterRules, wanted: Callable[[ParameterRule], bool] = lambda rule: True
    ) -> list[Any]:
        """Return PyTorch parameter groups, one for each rule, with the scale of their learning rate."""
        gathered: dict[ParameterRule, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in loss_module.named_parameters():
            if parameter.requires_grad and wanted(rules[name]):
                gathered[rules[name]].append(parameter)
        return [
            {
                "params": parameters,
                "lr": self.lr * rule.scale,
                "scale": rule.scale,
                "weight_decay": self.weight_decay if rule.decay else 0.0,
                "decays": rule.decay,
                "parts": rule.parts,
            }
            for rule, parameters in gathered.items()
        ]


@dataclass(frozen=True)
class AdamW(Optim):
    """Adam with decoupled weight decay, which is what the paper's "Adam" is."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def build(self, loss_module: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        groups = self.parameter_groups(loss_module, rules)
        return [torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)]


@dataclass(frozen=True)
class SGD(Optim):
    """SGD with momentum, the paper's choice for fine-tuning."""

    momentum: float = 0.9

    def build(self, loss_module: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        return [SGDOptimizer(self.parameter_groups(loss_module, rules), self.lr, self.momentum, self.weight_decay)]


@dataclass(frozen=True)
class Lamb(Optim):
    """Layer-wise adaptive moments, for large batches."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def build(self, loss_module: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        return [
            LambOptimizer(self.parameter_groups(loss_module, rules), self.lr, self.betas, self.eps, self.weight_decay)
        ]


@dataclass(frozen=True)
class Muon(Optim):
    """Muon at `matrix_lr` for matrices and filters inside the model, AdamW at `lr` for everything else."""

    matrix_lr: float = 0.02
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def build(self, loss_module: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        matrices = self.parameter_groups(loss_module, rules, lambda rule: rule.matrix)
        for group in matrices:
            group["scale"] *= self.matrix_lr / self.lr
            group["lr"] = self.lr * group["scale"]
        others = self.parameter_groups(loss_module, rules, lambda rule: not rule.matrix)
        made: list[Optimizer] = []
        if matrices:
            made.append(MuonOptimizer(matrices, self.lr, self.momentum, self.weight_decay))
        if others:
            made.append(torch.optim.AdamW(others, lr=self.lr, betas=self.betas, eps=self.eps, fused=True))
        return made


OptimizerSlot = AdamW | SGD | Lamb | Muon


def set_lr(optimizers: list[Optimizer], lr: float) -> None:
    """Set the learning rate of a step, times the scale of each group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]


def set_weight_decay(optimizers: list[Optimizer], decay: float) -> None:
    """Set the weight decay of a step in the groups that have one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = decay if group["decays"] else 0.0


def parameter_rules(loss_module: nn.Module, layer_decay: float, head_scale: float = 1.0) -> ParameterRules:
    """Return the rule of each parameter. Modules of the loss module besides `loss_module.model` get the full learning rate."""
    model = loss_module.model
    assert isinstance(model, Model)
    top = model.config.depth + 1
    rules: ParameterRules = {}
    for name, parameter in loss_module.named_parameters():
        inside = name.removeprefix("model.") if name.startswith("model.") else None
        plain = (inside or name).replace("parametrizations.weight.original", "weight")
        distance = 0 if inside is None else top - model.layer_index(inside)
        decay = model.decays(plain, parameter)
        head = inside is not None and inside.startswith("head.")
        # A filter of a few values (the first of a stem on grey images) is not treated as a matrix.
        matrix = decay and inside is not None and not head and parameter[0].numel() > 9
        rules[name] = ParameterRule(
            decay=decay,
            scale=layer_decay**distance * (head_scale if head else 1.0),
            matrix=matrix,
            parts=3 if matrix and plain.endswith("msa.qkv.weight") else 1,
        )
    return rules


def skip_if(optimizers: list[Optimizer], skip: Tensor) -> None:
    """Let the next step of the optimisers change nothing where `skip`, a truth value on the device, is true."""
    for optimizer in optimizers:
        optimizer.found_inf, optimizer.grad_scale = skip.float(), None  # type: ignore[attr-defined] (PyTorch's names)


class SkippingOptimizer(Optimizer):
    """Base of the optimisers here, whose step changes nothing where `found_inf` is 1."""

    found_inf: Tensor | None = None

    def kept_gradient(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient and 1 for a step that is made, zeros and 0 for one that is skipped."""
        gradient = parameter.grad
        assert gradient is not None
        if self.found_inf is None:
            return gradient, torch.ones((), device=gradient.device)
        keep = 1 - self.found_inf
        return torch.where(keep > 0, gradient, torch.zeros((), device=keep.device, dtype=gradient.dtype)), keep


class SGDOptimizer(SkippingOptimizer):
    """SGD with momentum, as PyTorch computes it."""

    def __init__(self, groups: Iterable[Any], lr: float, momentum: float, weight_decay: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, keep = self.kept_gradient(parameter)
                if group["weight_decay"]:
                    gradient = torch.addcmul(gradient, parameter, group["weight_decay"] * keep)
                if group["momentum"]:
                    state = self.state[parameter]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    momentum = torch.where(keep > 0, group["momentum"], 1.0)
                    gradient = state["momentum_buffer"].mul_(momentum).add_(gradient)
                parameter.addcmul_(gradient, keep, value=-group["lr"])


class LambOptimizer(SkippingOptimizer):
    """LAMB. The trust ratio is 1 for tensors without weight decay, as in the published code."""

    def __init__(self, groups: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
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
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                gradient, keep = self.kept_gradient(parameter)
                state["step"] += keep
                count = state["step"].clamp(min=1)
                state["exp_avg"].lerp_(gradient, (1 - beta1) * keep)
                state["exp_avg_sq"].mul_(torch.where(keep > 0, beta2, 1.0))
                state["exp_avg_sq"].addcmul_(gradient, gradient, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
                update = state["exp_avg"] / (1 - beta1**count) / root
                if decay:
                    update = update + decay * parameter
                    size, length = parameter.norm(), update.norm()
                    update = update * torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
                parameter.addcmul_(update, keep, value=-group["lr"])


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


class MuonOptimizer(SkippingOptimizer):
    """Muon for matrices, and filters as matrices of outputs by inputs. A tensor of queries, keys and values has 3 `parts`.

    The update is scaled by √max(1, r/c), so that its size does not depend on the shape. Matrices of one shape are computed
    together.
    """

    def __init__(self, groups: Iterable[Any], lr: float, momentum: float, weight_decay: float, steps: int = 5):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps, "parts": 1}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                gradient, keep = self.kept_gradient(parameter)
                buffer.lerp_(gradient, (1 - group["momentum"]) * keep)
                update = gradient.lerp(buffer, group["momentum"])  # Nesterov's
                full = update.full_tensor() if isinstance(update, DTensor) else update
                alike[full.shape].append((parameter, full, keep))
            for shape, members in alike.items():
                rows, columns = shape[0] // group["parts"], shape[1:].numel()
                stacked = torch.stack([update for _, update, _ in members]).view(-1, rows, columns)
                size = max(1.0, rows / columns) ** 0.5
                made = orthogonalise(stacked, group["steps"]).mul_(size).view(len(members), *shape)
                for (parameter, _, keep), update in zip(members, made, strict=True):
                    if isinstance(parameter, DTensor):
                        update = distribute_tensor(update, parameter.device_mesh, parameter.placements)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"] * keep).addcmul_(
                        update, keep, value=-group["lr"]
                    )

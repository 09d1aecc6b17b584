"""Settings of the optimisers, and the rules of weight decay and learning rate for each parameter."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vitrail.models.base import Model
from vitrail.training.optimisers import Lamb as LambOptimizer
from vitrail.training.optimisers import Muon as MuonOptimizer


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
    """Settings of all optimisers. `layer_decay` multiplies the learning rate once for each layer further from the head."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float | None = 1.0  # maximum global norm of the gradient; None for no clipping
    layer_decay: float = 1.0
    decay_end: float | None = None  # weight decay at the end of the run, on a cosine; None for constant

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr must be > 0, got {self.lr}")
        for decay in (self.weight_decay, self.decay_end):
            if decay is not None and not 0 <= decay < float("inf"):
                raise ValueError(f"weight decay must be >= 0, got {decay}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be > 0, or none, got {self.clip}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be > 0 and <= 1, got {self.layer_decay}")

    def decay_at(self, step: int, steps: int) -> float:
        """Return the weight decay at step `step`, from 0."""
        if self.decay_end is None:
            return self.weight_decay
        return self.decay_end + (self.weight_decay - self.decay_end) * (1 + math.cos(math.pi * step / steps)) / 2

    def build(self, task: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        """Return the optimisers that together train every parameter of the task that is not frozen."""
        raise NotImplementedError

    def parameter_groups(
        self, task: nn.Module, rules: ParameterRules, wanted: Callable[[ParameterRule], bool] = lambda rule: True
    ) -> list[Any]:
        """Return PyTorch parameter groups, one for each rule, with the scale of their learning rate."""
        gathered: dict[ParameterRule, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in task.named_parameters():
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

    def build(self, task: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        return [
            torch.optim.AdamW(
                self.parameter_groups(task, rules), lr=self.lr, betas=self.betas, eps=self.eps, fused=True
            )
        ]


@dataclass(frozen=True)
class SGD(Optim):
    """SGD with momentum, the paper's choice for fine-tuning."""

    momentum: float = 0.9

    def build(self, task: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        return [torch.optim.SGD(self.parameter_groups(task, rules), lr=self.lr, momentum=self.momentum, foreach=True)]


@dataclass(frozen=True)
class Lamb(Optim):
    """Layer-wise adaptive moments, for large batches."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def build(self, task: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        return [LambOptimizer(self.parameter_groups(task, rules), self.lr, self.betas, self.eps, self.weight_decay)]


@dataclass(frozen=True)
class Muon(Optim):
    """Muon at `matrix_lr` for matrices and filters inside the model, AdamW at `lr` for everything else."""

    matrix_lr: float = 0.02
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def build(self, task: nn.Module, rules: ParameterRules) -> list[Optimizer]:
        matrices = self.parameter_groups(task, rules, lambda rule: rule.matrix)
        for group in matrices:
            group["scale"] *= self.matrix_lr / self.lr
            group["lr"] = self.lr * group["scale"]
        others = self.parameter_groups(task, rules, lambda rule: not rule.matrix)
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


def parameter_rules(task: nn.Module, layer_decay: float) -> ParameterRules:
    """Return the rule of each parameter. Modules of the task besides `task.model` get the full learning rate."""
    model = task.model
    assert isinstance(model, Model)
    top = model.config.depth + 1
    rules: ParameterRules = {}
    for name, parameter in task.named_parameters():
        inside = name.removeprefix("model.") if name.startswith("model.") else None
        plain = (inside or name).replace("parametrizations.weight.original", "weight")
        distance = 0 if inside is None else top - model.layer_index(inside)
        decay = model.decays(plain, parameter)
        # A filter of a few values (the first of a stem on grey images) is not treated as a matrix.
        matrix = decay and inside is not None and not inside.startswith("head.") and parameter[0].numel() > 9
        rules[name] = ParameterRule(
            decay=decay,
            scale=layer_decay**distance,
            matrix=matrix,
            parts=3 if matrix and plain.endswith("msa.qkv.weight") else 1,
        )
    return rules

"""Optimisers as values, and which parameter is trained at which rate."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vitrail.engine.lamb import Lamb as LambOptimizer
from vitrail.engine.muon import Muon as MuonOptimizer


@dataclass(frozen=True)
class Rule:
    """What an optimiser is to know of one parameter."""

    decay: bool  # whether weight decay is meant for it
    scale: float  # of the learning rate: layer-wise decay
    matrix: bool = False  # a matrix inside the model, for Muon
    parts: int = 1  # matrices that stand in it one under the other: queries, keys and values


Rules = dict[str, Rule]


@dataclass(frozen=True)
class Optim:
    """What all optimisers share. `layer_decay` multiplies the rate once for each layer further from the head."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float | None = 1.0  # of the gradient's global norm; None for none
    layer_decay: float = 1.0
    decay_end: float | None = None  # the weight decay at the end of the run, on a cosine; None for the same all along

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"a learning rate of {self.lr}: it is above 0")
        for decay in (self.weight_decay, self.decay_end):
            if decay is not None and not 0 <= decay < float("inf"):
                raise ValueError(f"a weight decay of {decay}: it is at least 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"gradients clipped to {self.clip}: give a norm above 0, or none")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"a layer decay of {self.layer_decay}: it is above 0 and at most 1")

    def decay_at(self, step: int, steps: int) -> float:
        """The weight decay at step `step`, from 0."""
        if self.decay_end is None:
            return self.weight_decay
        return self.decay_end + (self.weight_decay - self.decay_end) * (1 + math.cos(math.pi * step / steps)) / 2

    def build(self, task: nn.Module, rules: Rules) -> list[Optimizer]:
        """The optimisers that together train every parameter of the task that is not frozen."""
        raise AssertionError("an optimiser says how it is built")

    def groups(self, task: nn.Module, rules: Rules, wanted: Callable[[Rule], bool] = lambda rule: True) -> list[Any]:
        """Parameters by rule, in PyTorch's form; each group remembers the scale of its rate."""
        gathered: dict[Rule, list[nn.Parameter]] = defaultdict(list)
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

    def build(self, task: nn.Module, rules: Rules) -> list[Optimizer]:
        return [torch.optim.AdamW(self.groups(task, rules), lr=self.lr, betas=self.betas, eps=self.eps, fused=True)]


@dataclass(frozen=True)
class SGD(Optim):
    """Gradient descent with momentum, the paper's choice for fine-tuning."""

    momentum: float = 0.9

    def build(self, task: nn.Module, rules: Rules) -> list[Optimizer]:
        return [torch.optim.SGD(self.groups(task, rules), lr=self.lr, momentum=self.momentum, foreach=True)]


@dataclass(frozen=True)
class Lamb(Optim):
    """Layer-wise adaptive moments, for large batches."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def build(self, task: nn.Module, rules: Rules) -> list[Optimizer]:
        return [LambOptimizer(self.groups(task, rules), self.lr, self.betas, self.eps, self.weight_decay)]


@dataclass(frozen=True)
class Muon(Optim):
    """Orthogonalised momentum for the matrices and filters inside the model, AdamW at the rate `lr` for everything else."""

    matrix_lr: float = 0.02
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def build(self, task: nn.Module, rules: Rules) -> list[Optimizer]:
        matrices = self.groups(task, rules, lambda rule: rule.matrix)
        for group in matrices:
            group["scale"] *= self.matrix_lr / self.lr
            group["lr"] = self.lr * group["scale"]
        others = self.groups(task, rules, lambda rule: not rule.matrix)
        made: list[Optimizer] = []
        if matrices:
            made.append(MuonOptimizer(matrices, self.lr, self.momentum, self.weight_decay))
        if others:
            made.append(torch.optim.AdamW(others, lr=self.lr, betas=self.betas, eps=self.eps, fused=True))
        return made


OptimizerSlot = AdamW | SGD | Lamb | Muon


def set_rate(optimizers: list[Optimizer], rate: float) -> None:
    """The step's learning rate, for each group with its own scale."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]


def set_decay(optimizers: list[Optimizer], decay: float) -> None:
    """The step's weight decay, for the groups that it is meant for."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = decay if group["decays"] else 0.0

"""Regression: one or several numbers per image.

The loss is of targets in units of their standard deviation, so that one recipe fits metres and millimetres. Predictions are in
the targets' own units: the scaling is multiplied into the last layer of the model file, as a temperature is.

B images, M targets: the "classes" of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.dataset import TargetKind
from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, is_classifier
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective
from vitrail.utils.json import Finite, check_fields


@dataclass(frozen=True)
class Regression(Objective):
    """The error of numbers: squared, absolute, or Huber's, which is squared up to `delta` standard deviations."""

    label_use: ClassVar[Literal["required", "optional", "none"]] = "required"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("numbers",)
    rewrites_head: ClassVar[bool] = True

    loss: Literal["mse", "l1", "huber"] = "mse"
    delta: float = 1.0  # huber only
    mean: tuple[Finite, ...] = ()  # of the training targets, [M]; empty: targets are not standardised
    std: tuple[Finite, ...] = ()

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "l1", "huber"):
            raise ValueError(f"unknown loss {self.loss!r}: use mse, l1 or huber")
        check_fields(self, "> 0", "delta")
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}: give one of each per target")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std must be > 0 for every target, got {min(self.std)}: leave out constant targets")

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        if self.mean and len(self.mean) != model.config.classes:
            raise ValueError(
                f"mean and std are of {len(self.mean)} targets, the model has {model.config.classes} outputs"
            )

    def fit_targets(self, mean: Sequence[float], std: Sequence[float]) -> "Regression":
        return replace(self, mean=tuple(mean), std=tuple(std))

    def adopt_head(self, model: Model) -> None:
        """Let the outputs be in units of the standard deviation, as this objective trains them."""
        if self.mean:
            pairs = list(zip(self.mean, self.std, strict=True))
            unscale_outputs(model, [-mean / std for mean, std in pairs], [1 / std for _, std in pairs])

    def build(self, model: Model) -> "RegressionLoss":
        """Return the loss module."""
        self.check_model(model)
        return RegressionLoss(model, self)

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        return self.build(model)


class RegressionLoss(LossModule):
    """A model whose outputs are standardised numbers, with its loss."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, spec: Regression) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.register_buffer("mean", torch.tensor(spec.mean or 0.0, dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std or 1.0, dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss` of targets, float [B, M] in their own units; without targets, predictions in them as `logits`."""
        outputs = self.model(images).float()
        if targets is None:
            return {"logits": outputs * self.std + self.mean}
        if outputs.shape != targets.shape:
            raise ValueError(f"targets are {list(targets.shape)}, but the model's outputs {list(outputs.shape)}")
        return {"loss": self.number_loss(outputs, (targets.float() - self.mean) / self.std)}

    def number_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of standardised numbers, both [B, M]."""
        if self.spec.loss == "huber":
            return F.huber_loss(outputs, targets, delta=self.spec.delta)
        return F.mse_loss(outputs, targets) if self.spec.loss == "mse" else F.l1_loss(outputs, targets)

    def export_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return unscale_weights(weights, self.spec.mean, self.spec.std) if self.spec.mean else weights


def unscale_weights(weights: dict[str, Tensor], mean: Sequence[float], std: Sequence[float]) -> dict[str, Tensor]:
    """Return a model's tensors with its outputs y replaced by y · std + mean, in the weights and biases of its last layer."""
    last = {name: tensor for name, tensor in weights.items() if is_classifier(name)}
    if not any(name.endswith("bias") for name in last):
        raise ValueError("the model's last layer has no bias to add the mean of the targets to: use head='linear'")
    return weights | {name: _unscale(name, tensor, mean, std) for name, tensor in last.items()}


def _unscale(name: str, tensor: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    if len(tensor) != len(std):
        raise ValueError(f"{name} has {len(tensor)} outputs, but there are {len(std)} targets")
    offset, factor = (torch.tensor(values, dtype=torch.float64, device=tensor.device) for values in (mean, std))
    scaled = tensor.double() * factor.view(-1, *[1] * (tensor.ndim - 1))
    return (scaled + offset if name.endswith("bias") else scaled).to(tensor.dtype)


def unscale_outputs(model: Model, mean: Sequence[float], std: Sequence[float]) -> None:
    """Change the last layer of a model so that its outputs y are y · std + mean, [M] each."""
    model.load_state_dict(unscale_weights(model.state_dict(), mean, std))

"""DINO: a student predicts the output of a teacher, the EMA of itself, for different crops of an image (Caron et al. 2021).

B images, V views of each (two large ones first), F features of the model, K outputs of the head.
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, TokenConfig, TokenModel
from vitrail.nn.head import Linear
from vitrail.nn.linear import LinearLayer, linear
from vitrail.nn.pool import ClassToken, Mean
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective
from vitrail.reports.run import MethodText
from vitrail.utils.averages import move_averages
from vitrail.utils.json import check_fields

MIN_BATCH = 8  # images: the centre is a mean over the batch


@dataclass(frozen=True)
class DINO(Objective):
    """Settings of the heads, the temperatures and the teacher's EMA. `warmup` and `frozen` are fractions of the run's steps.

    The defaults suit small images and one machine. Published for ImageNet: `out` 65536, `hidden` 2048, `bottleneck` 256. Centring
    subtracts the mean output and a low temperature sharpens each output; together they prevent a constant output, either
    alone collapses.

    Features of an untrained network differ little between images. Long runs leave that state; in short ones all outputs stay
    alike. `standardise` subtracts the mean of the features and divides by their deviation, so outputs differ from the start.
    """

    method: ClassVar[str | None] = "dino"
    report: ClassVar[MethodText] = MethodText(
        "DINO",
        "Cross-entropy of student and teacher. The teacher changes too, so it may rise for a while; a fall to almost 0 means "
        "that every image gets the same output.",
    )
    keeps: ClassVar[str] = "teacher"
    uses_views: ClassVar[bool] = True
    signals_follow_step: ClassVar[bool] = True  # the teacher's temperature does

    out: int = 4096  # K, prototypes
    hidden: int = 512
    bottleneck: int = 128
    student_temperature: float = 0.1
    teacher_temperature_start: float = 0.04
    teacher_temperature: float = 0.07
    warmup: float = 0.1  # in which the teacher's temperature rises
    centre: float | None = 0.9  # momentum of the centre; None for no centring
    momentum: float = 0.996  # of the teacher, at first; on a cosine to 1 at the end
    frozen: float = 0.01  # in which the head's last layer is not trained
    standardise: float | None = None  # momentum of the features' mean and deviation; None for neither, as published

    def __post_init__(self) -> None:
        check_fields(self, ">= 2", "out")
        check_fields(self, ">= 1", "hidden", "bottleneck")
        check_fields(self, "> 0", "student_temperature", "teacher_temperature_start", "teacher_temperature")
        check_fields(self, ">= 0 and <= 1", "momentum", "warmup", "frozen")
        check_fields(self, ">= 0 and < 1, or none", "centre", "standardise")

    def check(self, config: TokenConfig, batch: int) -> None:
        if batch < MIN_BATCH:
            raise ValueError(f"DINO's centre is a mean over the batch: use a batch of {MIN_BATCH} or more, got {batch}")
        if config.classes is not None:
            raise ValueError(
                f"DINO needs a model without classes, got {config.classes} classes: set model.classes=none"
            )
        if config.prefix.outputs > 1:
            raise ValueError("DINO uses one vector per image: use a model without a distillation token")
        if not isinstance(config.head, Linear):
            raise ValueError(f"DINO adds its own head to the model's features, got {config.head}: use head='linear'")
        normed = isinstance(config.pool, ClassToken | Mean) and config.block.final_norm
        if self.standardise is not None and not normed:
            raise ValueError("standardise needs a final LayerNorm after a class token or mean: set standardise=none")

    def build(self, model: TokenModel, steps: int, group: dist.ProcessGroup | None = None) -> "SelfDistillation":
        """Return the loss module, with `model` as the student. The centre is a mean over the processes of `group`."""
        return SelfDistillation(model, self, steps, group)

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        return self.build(model.require_tokens("DINO"), inputs.steps, inputs.group)

    def momentum_at(self, step: int, steps: int) -> float:
        """Return the teacher's momentum at step `step`, from 0."""
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2

    def temperature_at(self, step: int, steps: int) -> float:
        """Return the teacher's temperature at step `step`."""
        start, end = self.teacher_temperature_start, self.teacher_temperature
        done = min(1.0, step / (self.warmup * steps)) if self.warmup else 1.0
        return start + (end - start) * done

    def frozen_at(self, step: int, steps: int) -> bool:
        """Return whether the head's last layer is frozen at step `step`."""
        return step < self.frozen * steps


class Prototypes(nn.Module):
    """The last layer: cosine of a unit vector with each of K directions."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, y: Tensor, frozen: bool = False) -> Tensor:
        if not frozen:
            return linear(y, F.normalize(self.weight, dim=1))
        logits = linear(y, F.normalize(self.weight.detach(), dim=1))
        return logits + 0 * self.weight[0, 0]  # a gradient of zeros: DDP expects one of every parameter


class ProjectionHead(nn.Module):
    """The head: three layers with GELU to a bottleneck, L2 normalisation, prototypes."""

    def __init__(self, features: int, spec: DINO) -> None:
        super().__init__()
        widths = (features, spec.hidden, spec.hidden, spec.bottleneck)
        layers = [LinearLayer(a, b) for a, b in pairwise(widths)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.layers, self.prototypes = nn.ModuleList(layers), Prototypes(spec.bottleneck, spec.out)

    def forward(self, y: Tensor, temperature: float = 1.0, frozen: bool = False) -> Tensor:
        """Return logits; the division by the temperature is done in the bottleneck, which is smaller."""
        first, second, third = self.layers
        y = third(F.gelu(second(F.gelu(first(y)))))
        return self.prototypes(F.normalize(y.float(), dim=-1) / temperature, frozen).float()


class SelfDistillation(LossModule):
    """Student and teacher with their heads, the centre of the teacher's logits, and the moments of its features.

    A step uses the centre of the steps before. Its own logits are summed over its parts and over the processes and enter the
    centre afterwards, so neither parts nor processes change the result. The same holds for the moments of the features.
    """

    centre: Tensor
    moments: Tensor
    logit_sum: Tensor
    moment_sum: Tensor
    sample_count: Tensor

    def __init__(self, model: TokenModel, spec: DINO, steps: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.spec, self.steps, self.group = spec, steps, group
        self.model, self.head = model, ProjectionHead(model.pool.feature_dim, spec)
        self.teacher, self.teacher_head = copy.deepcopy(self.model), copy.deepcopy(self.head)
        for parameter in (*self.teacher.parameters(), *self.teacher_head.parameters()):
            parameter.requires_grad = False
        self.register_buffer("centre", torch.zeros(spec.out))
        self.register_buffer("moments", torch.tensor([[0.0], [1.0]]).repeat(1, model.pool.feature_dim))
        # Zero between steps, so not in checkpoints. Buffers, so that they move to the device and the training loop
        # restores them when it skips a step.
        self.register_buffer("logit_sum", torch.zeros(spec.out), persistent=False)
        self.register_buffer("moment_sum", torch.zeros_like(self.moments), persistent=False)
        self.register_buffer("sample_count", torch.zeros(()), persistent=False)
        self.train()

    def train(self, mode: bool = True) -> "SelfDistillation":
        """Set the mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    def forward(self, images: tuple[Tensor, Tensor], targets: Tensor | None, draw: StepRandom) -> Losses:
        """Return the `loss` of large [B, 2, C, H, W] and small [B, V - 2, C, h, w] crops."""
        y, logits = self.teacher_logits(images[0])
        if self.training:
            self.logit_sum += logits.sum((0, 1))
            self.moment_sum += torch.stack([y, y.square()]).sum((1, 2))
            self.sample_count += y.shape[0] * y.shape[1]
        targets = self.teacher_distributions(logits, draw.step)
        return {"loss": view_cross_entropy(targets, self.student_logits(images, draw.step))}

    @torch.no_grad()
    def teacher_logits(self, large: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's features of the large crops [B, 2, F], and its logits before centring, [B, 2, K]."""
        y = self.teacher(large.flatten(0, 1)).float().unflatten(0, large.shape[:2])
        return y, self.teacher_head(self.standardise_features(y))

    def standardise_features(self, y: Tensor) -> Tensor:
        """Return features as the heads get them: unchanged, or standardised with the moments of the teacher's."""
        if self.spec.standardise is None:
            return y
        mean, deviation = self.feature_mean_and_std()
        return (y - mean) / deviation

    def export_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold the standardisation into the last LayerNorm, so that the model file returns standardised features."""
        if self.spec.standardise is None:
            return weights
        mean, deviation = (moment.cpu() for moment in self.feature_mean_and_std())
        scale, shift = weights["pool.norm.weight"] / deviation, (weights["pool.norm.bias"] - mean) / deviation
        return weights | {"pool.norm.weight": scale, "pool.norm.bias": shift}

    def feature_mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the teacher's features, [F] each."""
        mean, square = self.moments
        return mean, (square - mean.square()).clamp(min=1e-6).sqrt()

    def teacher_distributions(self, logits: Tensor, step: int) -> Tensor:
        """Return the teacher's logits as distributions, centred and sharpened, [B, 2, K]."""
        return ((logits - self.centre) / self.spec.temperature_at(step, self.steps)).softmax(-1)

    def student_logits(self, images: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Return the student's logits of all crops over its temperature, [B, V, K]: one encoder call for each size."""
        features = [self.model(crops.flatten(0, 1)).unflatten(0, crops.shape[:2]) for crops in images if crops.shape[1]]
        y = self.standardise_features(torch.cat(features, 1))
        return self.head(y, self.spec.student_temperature, self.spec.frozen_at(step, self.steps))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update the teacher, the centre and the moments."""
        momentum = self.spec.momentum_at(step, self.steps)
        for teacher, student in ((self.teacher, self.model), (self.teacher_head, self.head)):
            buffers = zip(teacher.buffers(), student.buffers(), strict=True)  # running statistics
            averaged = [(old, new) for old, new in buffers if old.is_floating_point() and old.numel()]
            parameters = zip(teacher.parameters(), student.parameters(), strict=True)
            old, new = zip(*parameters, *averaged, strict=True)
            move_averages(old, new, 1 - momentum)
        sums = (self.logit_sum, self.moment_sum, self.sample_count)
        if self.group is not None:
            for total in sums:
                dist.all_reduce(total, group=self.group)
        nonempty = self.sample_count > 0  # a step without samples changes nothing
        if self.spec.centre is not None:
            self.centre.lerp_(self.logit_sum / self.sample_count.clamp(min=1), (1 - self.spec.centre) * nonempty)
        if self.spec.standardise is not None:
            share = 1 - self.spec.standardise if step else 1.0  # the first step replaces the initial moments
            self.moments.lerp_(self.moment_sum / self.sample_count.clamp(min=1), share * nonempty)
        for total in sums:
            total.zero_()

    @torch.no_grad()
    def signals(self, images: Any, draw: StepRandom, memo: dict[str, Tensor] | None = None) -> Losses:
        """Return the `loss`, the mean entropy of the teacher's outputs, and the entropy of its mean output.

        Both entropies are divided by the largest, log K. Collapse is a diversity near 0, or an entropy near 1.
        """
        large, small = images
        targets = self.teacher_distributions(self.teacher_logits(large)[1], draw.step)
        most = math.log(self.spec.out)
        return {
            "loss": view_cross_entropy(targets, self.student_logits((large, small), draw.step)),
            "teacher_entropy": entropy(targets).mean() / most,
            "teacher_diversity": entropy(targets.mean((0, 1))) / most,
        }


def view_cross_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of teacher's distributions [B, 2, K] and student's logits [B, V, K], over different views.

    As targets sum to 1, -Σ q log softmax(s) is logsumexp(s) - q·s, which needs no log-softmax of every view in memory.
    """
    with torch.autocast(logits.device.type, enabled=False):  # in half precision they would not sum to 1
        crossed = logits.logsumexp(-1)[:, None] - targets @ logits.transpose(1, 2)  # [B, 2, V]
    b, large, views = crossed.shape
    return (crossed.sum() - crossed.diagonal(dim1=1, dim2=2).sum()) / (b * large * (views - 1))


def entropy(q: Tensor) -> Tensor:
    """Return the entropy of distributions [..., K] in nats."""
    return torch.special.entr(q).sum(-1)

"""DINO: a student agrees with a teacher, its own past, on what different crops of a picture show (Caron et al. 2021).

B pictures, V views of each (two large ones first), F features of the model, K outputs of the head.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.views import Views
from vitrail.models.vit import ViT, ViTConfig
from vitrail.nn.head import Linear
from vitrail.nn.pool import ClassToken, Mean
from vitrail.objectives.draw import Draw
from vitrail.objectives.task import Task

LARGE = 2  # views that the teacher sees
FEWEST = 8  # pictures in a batch: the centre is their mean


@dataclass(frozen=True)
class DINO:
    """What the student is asked for, and how the teacher follows it. Shares are of the run's steps.

    The defaults suit small pictures and one machine. Published for ImageNet: `out` 65536, `hidden` 2048, `bottleneck` 256.
    Two forces keep the teacher from giving one answer to everything: centring takes away what all answers have in common,
    and a low temperature makes each of them sharp. Either alone collapses.

    Features of a fresh network differ little from picture to picture. Long runs find their way out of that; in short ones all
    answers stay alike. `standardise` takes from the features, too, what all pictures have in common, and brings what remains to
    one size, so that answers differ from the beginning.
    """

    keeps: ClassVar[str] = "teacher"

    out: int = 4096  # K, the prototypes that views are sorted among
    hidden: int = 512
    bottleneck: int = 128
    student_temperature: float = 0.1
    teacher_temperature_start: float = 0.04
    teacher_temperature: float = 0.07
    warmup: float = 0.1  # share in which the teacher's temperature rises from one to the other
    centre: float | None = 0.9  # what the centre keeps of itself in a step; None for no centring
    momentum: float = 0.996  # what the teacher keeps of itself in a step, at first; on a cosine to 1 at the end
    frozen: float = 0.01  # share in which the head's last layer does not learn
    standardise: float | None = (
        None  # what the features' mean and deviation keep of themselves; None for neither, as published
    )

    def __post_init__(self) -> None:
        for name in ("out", "hidden", "bottleneck"):
            if getattr(self, name) < (2 if name == "out" else 1):
                raise ValueError(f"DINO's {name} is {getattr(self, name)}: use {2 if name == 'out' else 1} or more")
        for name in ("student_temperature", "teacher_temperature_start", "teacher_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"DINO's {name} is {getattr(self, name)}: a temperature is above 0")
        for name in ("momentum", "warmup", "frozen"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"DINO's {name} is {getattr(self, name)}: use a number from 0 to 1")
        for name in ("centre", "standardise"):
            kept = getattr(self, name)
            if kept is not None and not 0 <= kept < 1:
                raise ValueError(f"DINO's {name} keeps {kept} of itself: use at least 0 and below 1, or none")

    def check(self, config: ViTConfig, batch: int, views: Views | None = None) -> None:
        """Refuses what cannot work, before anything is computed. `batch` counts the pictures of all processes."""
        if batch < FEWEST:
            raise ValueError(f"DINO with a batch of {batch}: its centre is a mean over the batch, use {FEWEST} or more")
        if config.classes is not None:
            raise ValueError(
                f"DINO needs a model that ends in features, not in {config.classes} classes: set classes=None"
            )
        if config.prefix.outputs > 1:
            raise ValueError("DINO looks at one vector of a picture: use a model without a distillation token")
        if not isinstance(config.head, Linear):
            raise ValueError(
                f"DINO puts its own head behind the model's features, not {config.head}: use head='linear'"
            )
        if self.standardise is not None and not (
            isinstance(config.pool, ClassToken | Mean) and config.block.final_norm
        ):
            raise ValueError(
                "DINO standardises what a last LayerNorm gives of one token or of their mean: use pool='class' or 'mean', "
                "or set objective.standardise=none"
            )
        if views is not None:
            views.check(config.image_size, config.embed.stride)

    def build(self, model: ViT, steps: int, group: dist.ProcessGroup | None = None) -> "SelfDistillation":
        """The model as student, with its teacher and both heads. The centre is a mean over the processes of `group`."""
        return SelfDistillation(model, self, steps, group)

    def momentum_at(self, step: int, steps: int) -> float:
        """What the teacher keeps of itself at step `step`, from 0."""
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2

    def temperature_at(self, step: int, steps: int) -> float:
        """The teacher's temperature at step `step`."""
        start, end = self.teacher_temperature_start, self.teacher_temperature
        done = min(1.0, step / (self.warmup * steps)) if self.warmup else 1.0
        return start + (end - start) * done

    def frozen_at(self, step: int, steps: int) -> bool:
        """Whether the head's last layer stays as it is."""
        return step < self.frozen * steps


class Prototypes(nn.Module):
    """The last layer: how much a vector of length 1 points to each of K directions. They have no trained length."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, y: Tensor, frozen: bool = False) -> Tensor:
        if not frozen:
            return F.linear(y, F.normalize(self.weight, dim=1))
        answers = F.linear(y, F.normalize(self.weight.detach(), dim=1))
        return answers + 0 * self.weight[0, 0]  # a gradient of zeros: several processes expect one of every parameter


class ProjectionHead(nn.Module):
    """The head: three layers with GELU to a narrow vector, its length set to 1, and the prototypes."""

    def __init__(self, features: int, spec: DINO) -> None:
        super().__init__()
        widths = (features, spec.hidden, spec.hidden, spec.bottleneck)
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.layers, self.prototypes = nn.ModuleList(layers), Prototypes(spec.bottleneck, spec.out)

    def forward(self, y: Tensor, temperature: float = 1.0, frozen: bool = False) -> Tensor:
        """Logits, divided by the temperature while they are still a narrow vector."""
        first, second, third = self.layers
        y = third(F.gelu(second(F.gelu(first(y)))))
        return self.prototypes(F.normalize(y.float(), dim=-1) / temperature, frozen).float()


class SelfDistillation(Task):
    """Student and teacher with their heads, the centre of the teacher's answers, and the moments of its features.

    All parts of a batch are centred by what the steps before have seen. What this step sees is summed up over its parts, and
    over the processes, and enters the centre after it: so neither parts nor processes change what is computed. The same holds
    for the mean and the mean square of the features.
    """

    centre: Tensor
    moments: Tensor
    summed: Tensor
    summed_moments: Tensor
    counted: Tensor

    def __init__(self, model: ViT, spec: DINO, steps: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.spec, self.steps, self.group = spec, steps, group
        self.model, self.head = model, ProjectionHead(model.pool.features, spec)
        self.teacher, self.teacher_head = copy.deepcopy(self.model), copy.deepcopy(self.head)
        for parameter in (*self.teacher.parameters(), *self.teacher_head.parameters()):
            parameter.requires_grad = False
        self.register_buffer("centre", torch.zeros(spec.out))
        self.register_buffer("moments", torch.tensor([[0.0], [1.0]]).repeat(1, model.pool.features))
        # Empty between steps, so a checkpoint needs none. As buffers they go to the device, and what a step that is
        # skipped put into them is taken back by the loop.
        self.register_buffer("summed", torch.zeros(spec.out), persistent=False)
        self.register_buffer("summed_moments", torch.zeros_like(self.moments), persistent=False)
        self.register_buffer("counted", torch.zeros(()), persistent=False)
        self.train()

    def train(self, mode: bool = True) -> "SelfDistillation":
        """The teacher drops nothing: it is always as in evaluation."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    def forward(self, images: tuple[Tensor, Tensor], targets: Tensor | None, draw: Draw) -> dict[str, Tensor]:
        """The `loss` of large [B, 2, C, H, W] and small [B, V - 2, C, h, w] crops."""
        y, said = self.said(images[0])
        if self.training:
            self.summed += said.sum((0, 1))
            self.summed_moments += torch.stack([y, y.square()]).sum((1, 2))
            self.counted += y.shape[0] * y.shape[1]
        return {"loss": agreement(self.distributions(said, draw.step), self.answers(images, draw.step))}

    @torch.no_grad()
    def said(self, large: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's features of the large crops [B, 2, F], and what it says of them, before centring, [B, 2, K]."""
        y = self.teacher(large.flatten(0, 1)).float().unflatten(0, large.shape[:2])
        return y, self.teacher_head(self.standard(y))

    def standard(self, y: Tensor) -> Tensor:
        """Features as the heads see them: as they are, or standardised by what the teacher's features were."""
        if self.spec.standardise is None:
            return y
        mean, deviation = self.mean_and_deviation()
        return (y - mean) / deviation

    def written(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The last LayerNorm's scale and shift take over what the heads were shown: the file gives standardised features."""
        if self.spec.standardise is None:
            return weights
        mean, deviation = (each.cpu() for each in self.mean_and_deviation())
        scale, shift = weights["pool.norm.weight"] / deviation, (weights["pool.norm.bias"] - mean) / deviation
        return weights | {"pool.norm.weight": scale, "pool.norm.bias": shift}

    def mean_and_deviation(self) -> tuple[Tensor, Tensor]:
        mean, square = self.moments
        return mean, (square - mean.square()).clamp(min=1e-6).sqrt()

    def distributions(self, said: Tensor, step: int) -> Tensor:
        """The teacher's answers as distributions, centred and sharpened, [B, 2, K]."""
        return ((said - self.centre) / self.spec.temperature_at(step, self.steps)).softmax(-1)

    def answers(self, images: tuple[Tensor, Tensor], step: int) -> Tensor:
        """The student's logits for all crops, at its temperature, [B, V, K]: one call of the encoder for each size."""
        seen = [self.model(crops.flatten(0, 1)).unflatten(0, crops.shape[:2]) for crops in images if crops.shape[1]]
        return self.head(
            self.standard(torch.cat(seen, 1)), self.spec.student_temperature, self.spec.frozen_at(step, self.steps)
        )

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """The teacher moves towards the student, and centre and moments to what the teacher said and saw in this step."""
        keep = self.spec.momentum_at(step, self.steps)
        for old, new in self.followed():
            old.lerp_(new.to(old.dtype), 1 - keep)
        sums = (self.summed, self.summed_moments, self.counted)
        if self.group is not None:
            for each in sums:
                dist.all_reduce(each, group=self.group)
        seen = self.counted > 0  # a step that saw nothing leaves both alone
        if self.spec.centre is not None:
            self.centre.lerp_(self.summed / self.counted.clamp(min=1), (1 - self.spec.centre) * seen)
        if self.spec.standardise is not None:
            share = 1 - self.spec.standardise if step else 1.0  # before the first step there is nothing worth keeping
            self.moments.lerp_(self.summed_moments / self.counted.clamp(min=1), share * seen)
        for each in sums:
            each.zero_()

    def followed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What of the teacher follows what of the student: weights, and the running statistics taken with them."""
        for teacher, student in ((self.teacher, self.model), (self.teacher_head, self.head)):
            yield from zip(teacher.parameters(), student.parameters(), strict=True)
            for old, new in zip(teacher.buffers(), student.buffers(), strict=True):
                if old.is_floating_point() and old.numel():
                    yield old, new

    @torch.no_grad()
    def signals(self, images: Tensor | tuple[Tensor, ...], draw: Draw) -> dict[str, Tensor]:
        """The `loss`, how undecided the teacher is about a picture, and how differently it answers different ones.

        Both entropies are in shares of the largest, log K. Collapse is a diversity near 0, or an entropy near 1.
        """
        large, small = images
        targets = self.distributions(self.said(large)[1], draw.step)
        most = math.log(self.spec.out)
        return {
            "loss": agreement(targets, self.answers((large, small), draw.step)),
            "teacher_entropy": entropy(targets).mean() / most,
            "teacher_diversity": entropy(targets.mean((0, 1))) / most,
        }


def agreement(targets: Tensor, logits: Tensor) -> Tensor:
    """The mean cross-entropy between the teacher's distributions [B, 2, K] and the student's logits [B, V, K], over all
    pairs of different views.

    As targets sum to 1, -Σ q log softmax(s) is logsumexp(s) - q·s, which needs no log-softmax of every view in memory.
    """
    with torch.autocast(logits.device.type, enabled=False):  # in half precision they would not sum to 1
        crossed = logits.logsumexp(-1)[:, None] - targets @ logits.transpose(1, 2)  # [B, 2, V]
    return (crossed.sum() - crossed.diagonal(dim1=1, dim2=2).sum()) / (
        crossed.shape[0] * crossed.shape[1] * (crossed.shape[2] - 1)
    )


def entropy(q: Tensor) -> Tensor:
    """Of distributions [..., K], in nats."""
    return torch.special.entr(q).sum(-1)

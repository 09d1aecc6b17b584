"""Contrastive losses of images and their texts: CLIP's softmax (Radford et al. 2021) and SigLIP's sigmoid (Zhai et al. 2023).

Every image is compared with every text of the global batch: with several processes, the features of all are gathered, and
gradients flow back through the gathering. The mean of the losses of the processes is then the loss of the global batch.

B images of this process, N texts of all processes, F features, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from vitrail.data.dataset import TargetKind
from vitrail.data.rng import StepRandom
from vitrail.models.base import Model
from vitrail.models.two_towers import TwoTowers
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective


class GatherRows(torch.autograd.Function):
    """Rows of all processes, by rank; the gradient of this process's rows is summed over all processes."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.count = group, len(rows)
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        start = ctx.group.rank() * ctx.count
        return total[start : start + ctx.count], None


def softmax_loss(logits: Callable[[Tensor, Tensor], Tensor], images: Tensor, texts: Tensor, own: Tensor) -> Tensor:
    """Return CLIP's loss of the images and texts `own` of this process among those of all, as unit vectors [N, F]."""
    by_image = F.cross_entropy(logits(images[own], texts).float(), own)
    by_text = F.cross_entropy(logits(images, texts[own]).float().T, own)
    return (by_image + by_text) / 2


def sigmoid_loss(logits: Callable[[Tensor, Tensor], Tensor], images: Tensor, texts: Tensor, own: Tensor) -> Tensor:
    """Return SigLIP's loss of the images `own` of this process with the texts of all, as unit vectors [N, F]."""
    z = logits(images[own], texts).float()
    match = 2 * (own[:, None] == torch.arange(len(texts), device=z.device)).float() - 1  # 1 for pairs, else -1
    return -F.logsigmoid(match * z).sum() / len(own)


def supervised_loss(logits: Callable[[Tensor, Tensor], Tensor], features: Tensor, labels: Tensor) -> Tensor:
    """Return the supervised contrastive loss of unit vectors [N, F], of one or several modalities (Khosla et al. 2020).

    Each sample is compared with all others. Those of its label share the target of the softmax equally, and samples alone with
    their label do not count. With two samples of each label this is SimCLR's loss.
    """
    others = ~torch.eye(len(features), dtype=torch.bool, device=features.device)
    matches = (labels[:, None] == labels)[others].view(len(features), -1)
    counted = matches.any(1)
    if not bool(counted.any()):
        raise ValueError("no two samples have the same label: give larger batches")
    z = logits(features, features)[others].view(len(features), -1)
    targets = matches[counted].float()
    return F.cross_entropy(z[counted].float(), targets / targets.sum(1, keepdim=True))


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


@dataclass(frozen=True)
class Contrastive(Objective):
    """Images and texts of a pair close, others apart: among all texts (softmax), or pair by pair (sigmoid)."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    max_scale: float = 100.0  # of the logits: the learned scale is cut to it after each step, as CLIP's is

    label_use: ClassVar[Literal["required", "optional", "none"]] = "required"  # a text is the target of its image
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("captions",)
    learns_classes: ClassVar[bool] = False
    can_shard: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"unknown loss {self.loss!r}: use {' or '.join(LOSSES)}")
        if not 1 <= self.max_scale < float("inf"):
            raise ValueError(f"max_scale must be at least 1 and finite, got {self.max_scale}")

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        towers = model.require_towers("a contrastive loss")
        if self.loss == "sigmoid" and not towers.config.logit_bias:
            raise ValueError("the sigmoid loss needs a bias of the logits: use logit_bias=True, or the softmax loss")

    def build(self, model: Model, group: ProcessGroup | None = None) -> "ContrastiveLoss":
        """Return the loss module; `group` has the processes of the global batch, None for one process."""
        self.check_model(model)
        return ContrastiveLoss(model.require_towers("a contrastive loss"), self, group)

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        return self.build(model, inputs.group)


class ContrastiveLoss(LossModule):
    """Two towers with their loss. Every process has the same number of pairs."""

    def __init__(self, model: TwoTowers, spec: Contrastive, group: ProcessGroup | None) -> None:
        super().__init__()
        self.model, self.spec, self.group = model, spec, group

    @property
    def towers(self) -> TwoTowers:
        """Return the model as one with a text tower."""
        return self.model.require_towers("a contrastive loss")

    def train(self, mode: bool = True) -> "ContrastiveLoss":
        """Change to training; an image tower that is not trained computes as in evaluation, without dropout."""
        super().train(mode)
        if self.has_locked_images:
            self.towers.image.eval()
        return self

    @property
    def has_locked_images(self) -> bool:
        """Return True if no parameter of the image tower is trained (LiT)."""
        return not any(parameter.requires_grad for parameter in self.towers.image.parameters())

    def forward(self, images: Tensor, tokens: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss` of images [B, C, H, W] and the tokens of their texts [B, T]; without texts, features as `logits`."""
        if tokens is None:
            return {"logits": self.model(images)}
        if len(images) != len(tokens):
            raise ValueError(f"every image has one text, got {len(images)} images and {len(tokens)} texts")
        model = self.towers
        y, t = model.encode_images(images), model.encode_texts(tokens)
        own = torch.arange(len(y), device=y.device)
        if self.group is not None:
            own = own + self.group.rank() * len(y)
            y, t = GatherRows.apply(y, self.group), GatherRows.apply(t, self.group)
        return {"loss": LOSSES[self.spec.loss](model.logits, y, t, own)}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Cut the scale of the logits to its maximum."""
        self.towers.logits.scale.clamp_(max=math.log(self.spec.max_scale))

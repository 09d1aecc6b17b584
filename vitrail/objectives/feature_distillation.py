"""Distillation of features, for teachers of other classes and for data without labels.

The student's pooled vector goes through a linear layer to the teacher's width; the loss is 1 - cosine, the distance of
AM-RADIO (Ranzinger et al. 2024) for vectors of whole images. The layer is not part of the model file.

B images, K classes, F values of the teacher's vector.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, TokenConfig
from vitrail.nn.head import DistilledHead, Linear
from vitrail.nn.linear import LinearLayer
from vitrail.nn.pool import ClassToken
from vitrail.objectives.base import Losses, LossInputs, TeacherOutput, require_draw
from vitrail.objectives.distillation import TeacherLoss, TeacherObjective, split_targets
from vitrail.objectives.teacher import Teacher
from vitrail.reports.run import MethodText
from vitrail.utils.json import check_fields


@dataclass(frozen=True)
class FeatureDistillation(TeacherObjective):
    """The distance to a teacher's features, with weight 1, and `labels` times the loss of the labels.

    With a model that ends in features there are no labels to learn: targets are ignored, and it is a pretraining method.
    """

    method: ClassVar[str | None] = "features"
    report: ClassVar[MethodText] = MethodText(
        "feature distillation",
        "Cosine distance to the teacher’s features: 0 is the same direction, 1 is orthogonal. It falls quickly to what the "
        "teacher’s features have in common; the rest separates images. With cached teacher outputs, the training targets are "
        "those of whole images, the validation targets those of the crops.",
    )
    label_use: ClassVar[Literal["required", "optional", "none"]] = "optional"
    teacher_output: ClassVar[TeacherOutput | None] = "features"
    unlabelled_score: ClassVar[str] = "cosine"

    labels: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ">= 0", "labels, the weight of their loss")

    def check(self, config: TokenConfig, batch: int) -> None:
        if not isinstance(config.head, Linear):
            name = type(config.head).__name__
            raise ValueError(f"features are read before the head, {name} would not be trained: set model.head=Linear")
        if isinstance(config.pool, ClassToken) and config.prefix.outputs > 1:
            raise ValueError("only one of class and distillation token would be trained: set model.pool=Mean")

    def check_student(self, model: Model, teacher: Teacher) -> None:
        if not self.labels and model.config.classes is not None:
            raise ValueError("labels=0 leaves the head untrained: set objective.labels above 0")


class FeatureDistiller(TeacherLoss):
    """A student that learns a teacher's features, and labels where its model has classes."""

    spec: FeatureDistillation

    def __init__(self, model: Model, spec: FeatureDistillation, inputs: LossInputs) -> None:
        super().__init__(model, spec, inputs)
        width = model.feature_dim // (2 if isinstance(model.head, DistilledHead) else 1)
        self.projection = LinearLayer(width, self.teacher.width)
        # A seed of its own: the same on every process, whatever was drawn before.
        nn.init.normal_(self.projection.weight, std=width**-0.5, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.projection.bias)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss`; without targets and a random generator, the `logits`."""
        if targets is None and draw is None:
            return {"logits": self.model(images)}
        draw = require_draw(draw)
        classes = self.model.config.classes
        labels, features = None if classes is None else targets, None
        if self.cached:
            assert targets is not None
            labels, features = split_targets(targets, self.teacher.width, classes)
            features = F.normalize(features.float(), dim=1)
        label_targets = torch.zeros(len(images), 0, device=images.device)  # [B, 0] without labels
        if labels is not None:
            label_targets = self.encode_targets(labels)
        images, label_targets, features = self.mix_targets(images, label_targets, features, draw)
        features = self.teacher_features(images) if features is None else features
        y, logits = self.forward_student(images, self.draw_kept_patches(images, draw))
        loss = self.cosine_distance(y, features).mean()
        if labels is not None:
            loss = loss + self.spec.labels * self.label_loss(logits, label_targets, multi_label=labels.ndim == 2)
        return {"loss": loss}

    def forward_student(self, images: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the student's vector [B, D], of two tokens the distillation token's, and its logits."""
        model, full, purpose = self.model, keep is None, "patch dropout"
        y = (
            model.compute_pre_logits(images)
            if full
            else model.require_tokens(purpose, clips=True).pool_tokens(images, keep)
        )
        return (y if y.ndim == 2 else y[:, 1]), model.classify(y)

    def cosine_distance(self, y: Tensor, features: Tensor) -> Tensor:
        """Return 1 - cosine of projected and teacher's features, [B]."""
        return 1 - F.cosine_similarity(self.projection(y).float(), features.float(), dim=1)

    def teacher_features(self, images: Tensor) -> Tensor:
        """Return the teacher's features of the student's images, [B, F]."""
        return self.teacher.features(images, self.preprocessing.mean, self.preprocessing.std)

    @torch.no_grad()
    def signals(self, images: Any, draw: StepRandom, memo: dict[str, Tensor] | None = None) -> Losses:
        """Return the distance to the teacher's features and the cosine. The teacher's features are kept in `memo`."""
        memo = {} if memo is None else memo
        if "features" not in memo:
            memo["features"] = self.teacher_features(images)
        distance = self.cosine_distance(self.forward_student(images)[0], memo["features"]).mean()
        return {"loss": distance, "cosine": 1 - distance}


FeatureDistillation.loss_class = FeatureDistiller

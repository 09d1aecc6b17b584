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

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, TokenConfig
from vitrail.nn.head import DistilledHead, Linear
from vitrail.nn.pool import ClassToken
from vitrail.objectives.base import Task, TaskInputs, TeacherOutput
from vitrail.objectives.classification import Classification, Classifier, mix_pairs
from vitrail.objectives.distillation import split_targets
from vitrail.objectives.teacher import Teacher


@dataclass(frozen=True)
class FeatureDistillation(Classification):
    """The distance to a teacher's features, with weight 1, and `labels` times the loss of the labels.

    With a model that ends in features there are no labels to learn: targets are ignored, and it is a pretraining method.
    """

    method: ClassVar[str | None] = "features"
    label_use: ClassVar[Literal["required", "optional", "none"]] = "optional"
    teacher_output: ClassVar[TeacherOutput | None] = "features"
    unlabelled_score: ClassVar[str] = "cosine"

    labels: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.labels < float("inf"):
            raise ValueError(f"labels, the weight of their loss, must be >= 0, got {self.labels}")

    def check(self, config: TokenConfig, batch: int) -> None:
        if not isinstance(config.head, Linear):
            name = type(config.head).__name__
            raise ValueError(
                f"features are read before the head, so {name} would not be trained: set model.head=Linear"
            )
        if isinstance(config.pool, ClassToken) and config.prefix.outputs > 1:
            raise ValueError("only one of class and distillation token would be trained: set model.pool=Mean")

    def build(
        self,
        model: Model,
        weights: Tensor | None = None,
        teacher: Teacher | None = None,
        preprocessing: Preprocessing | None = None,
        cached: bool = False,
    ) -> "FeatureDistiller":
        """Return the task. Arguments are those of `Distillation.build`."""
        super().build(model, weights)
        if teacher is None or preprocessing is None:
            raise ValueError("feature distillation needs a teacher: give --teacher MODEL")
        if not self.labels and model.config.classes is not None:
            raise ValueError("labels=0 leaves the head untrained: set objective.labels above 0")
        return FeatureDistiller(model, self, weights, teacher, preprocessing, cached)

    def build_task(self, model: Model, inputs: TaskInputs) -> Task:
        return self.build(model, inputs.class_weights, inputs.teacher, inputs.preprocessing, inputs.cached)


class FeatureDistiller(Classifier):
    """A student that learns a teacher's features, and labels where its model has classes."""

    spec: FeatureDistillation

    def __init__(
        self,
        model: Model,
        spec: FeatureDistillation,
        weights: Tensor | None,
        teacher: Teacher,
        preprocessing: Preprocessing,
        cached: bool,
    ) -> None:
        super().__init__(model, spec, weights)
        self.teacher, self.preprocessing, self.cached = teacher, preprocessing, cached
        width = model.feature_dim // (2 if isinstance(model.head, DistilledHead) else 1)
        self.projection = nn.Linear(width, teacher.width)
        # A seed of its own: the same on every process, whatever was drawn before.
        nn.init.normal_(self.projection.weight, std=width**-0.5, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.projection.bias)

    def forward(
        self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None
    ) -> dict[str, Tensor]:
        """Return the `loss`; without a random generator, the `logits`."""
        if draw is None:
            return {"logits": self.model(images)}
        labels, features = self.split_cached_targets(targets)
        spec, multi_label = self.spec, labels is not None and labels.ndim == 2
        label_targets = torch.zeros(len(images), 0, device=images.device)  # [B, 0] without labels
        if labels is not None:
            label_targets = self.soft_targets(labels)
        if features is None:
            images, label_targets = mix_pairs(images, label_targets, spec.mixup, spec.cutmix, draw)
            features = self.teacher_features(images)
        else:
            both = torch.cat((label_targets, F.normalize(features.float(), dim=1)), 1)
            images, both = mix_pairs(images, both, spec.mixup, spec.cutmix, draw)
            label_targets, features = both[:, : label_targets.shape[1]], both[:, label_targets.shape[1] :]
        y, logits = self.forward_student(images, self.draw_kept_patches(images, draw))
        loss = self.cosine_distance(y, features).mean()
        if labels is not None:
            loss = loss + spec.labels * self.label_loss(logits, label_targets, multi_label)
        return {"loss": loss}

    def split_cached_targets(self, targets: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the labels, where the model has classes, and the teacher's features, where they are cached."""
        classes = self.model.config.classes
        if not self.cached:
            return (None if classes is None else targets), None
        assert targets is not None
        return split_targets(targets, self.teacher.width, classes)

    def forward_student(self, images: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the student's vector [B, D], of two tokens the distillation token's, and its logits."""
        model, whole = self.model, keep is None
        y = model.compute_pre_logits(images) if whole else model.tokens_for("patch dropout").pool_tokens(images, keep)
        return (y if y.ndim == 2 else y[:, 1]), model.classify(y)

    def cosine_distance(self, y: Tensor, features: Tensor) -> Tensor:
        """Return 1 - cosine of projected and teacher's features, [B]."""
        return 1 - F.cosine_similarity(self.projection(y).float(), features.float(), dim=1)

    def teacher_features(self, images: Tensor) -> Tensor:
        """Return the teacher's features of the student's images, [B, F]."""
        return self.teacher.features(images, self.preprocessing.mean, self.preprocessing.std)

    @torch.no_grad()
    def signals(self, images: Any, draw: StepRandom, memo: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the distance to the teacher's features and the cosine. The teacher's features are kept in `memo`."""
        memo = {} if memo is None else memo
        if "features" not in memo:
            memo["features"] = self.teacher_features(images)
        distance = self.cosine_distance(self.forward_student(images)[0], memo["features"]).mean()
        return {"loss": distance, "cosine": 1 - distance}

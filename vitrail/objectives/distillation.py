"""The base of objectives with a teacher, and distillation of logits (DeiT, Touvron et al. 2021).

A student with a distillation token has one head for the labels and one for the teacher; its output is their mean. Any other
student learns both with its one head.

B images, K classes, W values of the teacher.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import StepRandom
from vitrail.models.base import Model
from vitrail.nn.head import DistilledHead
from vitrail.objectives.base import Losses, LossInputs, LossModule, TeacherOutput, require_draw
from vitrail.objectives.classification import Classification, ClassificationLoss, encode_one_hot, mix_pairs
from vitrail.objectives.teacher import Teacher
from vitrail.utils.json import check_fields


def join_targets(labels: np.ndarray | None, outputs: np.ndarray) -> np.ndarray:
    """Return labels and cached teacher outputs [n, W] side by side.

    [n, 1 + W] for labels that are indices [n], [n, K + W] for multi-label targets [n, K], [n, W] without labels.
    """
    if labels is None:
        return outputs.astype(np.float32)
    columns = labels[:, None] if labels.ndim == 1 else labels
    return np.concatenate((columns.astype(np.float32), outputs.astype(np.float32)), 1)


def split_targets(targets: Tensor, width: int, classes: int | None) -> tuple[Tensor | None, Tensor]:
    """Return the labels, [B] or [B, K] or None, and the teacher's outputs, [B, W], that `join_targets` joined."""
    labels, outputs = targets[:, : targets.shape[1] - width], targets[:, targets.shape[1] - width :]
    if not labels.shape[1] or classes is None:
        return None, outputs
    # A single label is one of at least two classes, so one column with one class is a multi-label target.
    single = labels.shape[1] == 1 and classes > 1
    return (labels[:, 0].long() if single else labels), outputs


@dataclass(frozen=True)
class TeacherObjective(Classification):
    """Base of the objectives that learn labels and the outputs of a teacher."""

    ABSTRACT: ClassVar[bool] = True
    loss_class: ClassVar[type["TeacherLoss"]]  # set below the loss module, which needs the settings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None:
            raise ValueError(
                f"{type(self).__name__} does not support objective.tokens: use patch_dropout, or tokens=none"
            )

    def check_student(self, model: Model, teacher: Teacher) -> None:
        """Raise ValueError for a student that cannot learn from this teacher."""

    def build(
        self,
        model: Model,
        weights: Tensor | None = None,
        teacher: Teacher | None = None,
        preprocessing: Preprocessing | None = None,
        cached: bool = False,
    ) -> "TeacherLoss":
        """Return the loss module. `weights` apply to the loss of the labels; `preprocessing` is the student's.

        With `cached`, targets hold the teacher's outputs (logits and features: see `join_targets`; score maps: from a loader
        that has them) and the teacher is not run.
        """
        super().build(model, weights)  # its checks
        if teacher is None or preprocessing is None:
            raise ValueError(f"{type(self).__name__} needs a teacher: give teacher=MODEL")
        self.check_student(model, teacher)
        return self.loss_class(model, self, LossInputs(0, preprocessing, weights, teacher, cached))

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        return self.build(model, inputs.class_weights, inputs.teacher, inputs.preprocessing, inputs.cached)


class TeacherLoss(ClassificationLoss):
    """A student that learns labels and the outputs of a teacher. The teacher is in no state, gradient or shard."""

    def __init__(self, model: Model, spec: TeacherObjective, inputs: LossInputs) -> None:
        super().__init__(model, spec, inputs.class_weights)
        assert inputs.teacher is not None
        self.teacher, self.preprocessing, self.cached = inputs.teacher, inputs.preprocessing, inputs.cached

    def mix_targets(
        self, images: Tensor, labels: Tensor, outputs: Tensor | None, draw: StepRandom
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return images, soft labels [B, K] and the teacher's cached outputs [B, W], all mixed alike."""
        both = labels if outputs is None else torch.cat((labels, outputs), 1)
        images, both = mix_pairs(images, both, self.spec.mixup, self.spec.cutmix, draw)
        classes = labels.shape[1]
        return images, both[:, :classes], None if outputs is None else both[:, classes:]


@dataclass(frozen=True)
class Distillation(TeacherObjective):
    """The loss of the labels and that of a teacher's logits.

    `hard` takes the teacher's top class as a label. `soft` is the divergence of the distributions at a temperature T, times T²,
    which keeps the size of the gradients. The authors' code divides that sum by the number of values, B·K, their equation
    by the number of images: `per`.
    """

    teacher_output: ClassVar[TeacherOutput | None] = "logits"
    own_fields: ClassVar[tuple[str, ...]] = ("kind",)

    kind: Literal["hard", "soft"] = "hard"
    alpha: float = 0.5  # the teacher's share of the loss
    temperature: float = 3.0  # soft only
    per: Literal["value", "picture"] = "value"  # soft only

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ("hard", "soft"):
            raise ValueError(f"unknown kind of distillation {self.kind!r}: use hard or soft")
        if self.per not in ("value", "picture"):
            raise ValueError(f"objective.per, the divisor of the soft loss, must be value or picture, got {self.per!r}")
        check_fields(self, "> 0 and <= 1", "alpha, the teacher's share of the loss")
        check_fields(self, "> 0", "temperature")

    def check_student(self, model: Model, teacher: Teacher) -> None:
        if teacher.classes != model.config.classes:
            raise ValueError(f"the teacher has {teacher.classes} classes and the student {model.config.classes}")
        if self.alpha == 1 and isinstance(model.head, DistilledHead):
            remedy = "set objective.alpha below 1, or model.prefix.outputs=1 for one head"
            raise ValueError(f"alpha=1 leaves the label head untrained: {remedy}")


class Distiller(TeacherLoss):
    """A student that learns labels and a teacher's logits."""

    spec: Distillation

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss`. The teacher sees mixed images; cached logits are mixed like labels."""
        if targets is None:
            return {"logits": self.model(images)}
        draw = require_draw(draw)
        alpha, classes = self.spec.alpha, self.model.config.classes
        assert classes is not None
        labels, logits = split_targets(targets, classes, classes) if self.cached else (targets, None)
        assert labels is not None
        from_cache = None if logits is None else self.teacher_targets(logits)
        images, label_targets, teacher_targets = self.mix_targets(images, self.encode_targets(labels), from_cache, draw)
        if teacher_targets is None:
            logits = self.teacher.logits(images, self.preprocessing.mean, self.preprocessing.std)
            teacher_targets = self.teacher_targets(logits.float())
        by_label, by_teacher = self.student_logits(images, draw)
        label_loss = self.label_loss(by_label, label_targets, multi_label=labels.ndim == 2)
        teacher_loss = self.teacher_losses(by_teacher.float(), teacher_targets).mean()
        return {"loss": (1 - alpha) * label_loss + alpha * teacher_loss}

    def student_logits(self, images: Tensor, draw: StepRandom) -> tuple[Tensor, Tensor]:
        """Return the logits of the label head and of the teacher head, [B, K] each; the same ones for a student with one head."""
        model, keep = self.model, self.draw_kept_patches(images, draw)
        if not isinstance(model.head, DistilledHead):
            logits = model(images) if keep is None else model(images, keep)
            return logits, logits
        return model.head.forward_heads(
            model.require_tokens("a distillation token", clips=True).pool_tokens(images, keep)
        )

    def teacher_targets(self, logits: Tensor) -> Tensor:
        """Return the teacher's logits as targets, [B, K]: a distribution, or with sigmoids a probability of each class."""
        if self.spec.loss == "sigmoid":
            return (logits > 0).float() if self.spec.kind == "hard" else (logits / self.spec.temperature).sigmoid()
        if self.spec.kind == "hard":
            return encode_one_hot(logits.argmax(1), logits.shape[1])
        return (logits / self.spec.temperature).softmax(1)

    def teacher_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the student's logits against the teacher's targets for each image, [B]."""
        spec = self.spec
        t = spec.temperature if spec.kind == "soft" else 1.0
        if spec.loss == "sigmoid":
            cross = F.binary_cross_entropy_with_logits(logits / t, targets, reduction="none").sum(1)
            entropy = -(torch.xlogy(targets, targets) + torch.xlogy(1 - targets, 1 - targets)).sum(1)
        else:
            cross = -(targets * (logits / t).log_softmax(1)).sum(1)
            entropy = -torch.xlogy(targets, targets).sum(1)
        if spec.kind == "hard":
            return cross
        return (cross - entropy) * t**2 / (logits.shape[1] if spec.per == "value" else 1)


Distillation.loss_class = Distiller

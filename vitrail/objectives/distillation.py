"""Learning labels and a teacher's answers at once (Touvron et al. 2021, "Training data-efficient image transformers").

A student with a distillation token has a head for each: one learns from the labels, the other from the teacher, and their mean
is its answer. Any other student learns both with the one head that it has.

B pictures, K classes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.nn.head import DistilledHead
from vitrail.objectives.classification import Classification, Classifier
from vitrail.objectives.draw import Draw
from vitrail.objectives.mixing import mix
from vitrail.objectives.teacher import Teacher
from vitrail.objectives.told import apart


@dataclass(frozen=True)
class Distillation(Classification):
    """What is asked of the answers, by the labels and by a teacher.

    `hard` takes the teacher's surest class for a label; `soft` brings the student's distribution close to the teacher's, both
    at a temperature, and multiplies by its square so that gradients stay as large. The authors' code divides that sum by
    the number of values, B·K; their equation has one divergence for each picture. `per` says which.
    """

    kind: Literal["hard", "soft"] = "hard"
    alpha: float = 0.5  # the teacher's share of the loss
    temperature: float = 3.0  # soft only
    per: Literal["value", "picture"] = "value"  # soft only

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ("hard", "soft"):
            raise ValueError(f"unknown kind of distillation {self.kind!r}: use hard or soft")
        if self.per not in ("value", "picture"):
            raise ValueError(f"a divergence per {self.per!r}: use value or picture")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}: the teacher's share of the loss is above 0 and at most 1")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"a temperature of {self.temperature}: it is above 0")

    def build(
        self,
        model: ViT | BiT,
        weights: Tensor | None = None,
        teacher: Teacher | None = None,
        preprocessing: Preprocessing | None = None,
        cached: bool = False,
    ) -> "Distiller":
        """The student with its objective.

        `weights` count classes that are rare in the labels' share of the loss. `preprocessing` is the student's. `cached`:
        the teacher's logits come with the targets (see told.py), and nobody asks it.
        """
        super().build(model, weights)  # what it refuses
        if teacher is None or preprocessing is None:
            raise ValueError("distillation learns from a teacher: give --teacher MODEL")
        if teacher.classes != model.config.classes:
            raise ValueError(f"the teacher has {teacher.classes} classes and the student {model.config.classes}")
        if self.alpha == 1 and isinstance(model.head, DistilledHead):
            raise ValueError(
                "alpha is 1, so the head for the labels would learn nothing, and half of every answer is its: "
                "set objective.alpha below 1, or model.prefix.outputs=1 for a student with one head"
            )
        return Distiller(model, self, weights, teacher, preprocessing, cached)


class Distiller(Classifier):
    """A student between its labels and its teacher."""

    spec: Distillation

    def __init__(
        self,
        model: ViT | BiT,
        spec: Distillation,
        weights: Tensor | None,
        teacher: Teacher,
        preprocessing: Preprocessing,
        cached: bool,
    ) -> None:
        super().__init__(model, spec, weights)
        self.teacher, self.preprocessing, self.cached = teacher, preprocessing, cached

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: Draw | None = None) -> dict[str, Tensor]:
        """The `loss`. A teacher that is asked sees the mixed pictures; one that was asked before has its answers mixed."""
        if targets is None or draw is None:
            return {"logits": self.model(images)}
        spec, classes = self.spec, self.model.config.classes
        assert classes is not None
        labels, said = apart(targets, classes, classes) if self.cached else (targets, None)
        assert labels is not None
        several = labels.ndim == 2
        wanted = labels.float() if several else F.one_hot(labels, classes).float()
        if said is None:
            images, wanted = mix(images, wanted, spec.mixup, spec.cutmix, draw)
            taught = self.wish(self.teacher.logits(images, self.preprocessing.mean, self.preprocessing.std).float())
        else:
            both = torch.cat((wanted, self.wish(said)), 1)
            images, both = mix(images, both, spec.mixup, spec.cutmix, draw)
            wanted, taught = both.chunk(2, 1)
        by_label, by_teacher = self.answers(images, draw)
        losses = self.losses(by_label.float(), wanted, several)  # [B]
        if self.weights is not None and not several:
            losses = losses * (wanted * self.weights).sum(1)
        return {"loss": (1 - spec.alpha) * losses.mean() + spec.alpha * self.lesson(by_teacher.float(), taught).mean()}

    def answers(self, images: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """What the head for labels and the head for the teacher say, [B, K] each; twice the same of a student with one."""
        model = self.model
        keep = self.kept(images, draw) if self.spec.patch_dropout else None
        if not isinstance(model.head, DistilledHead):
            found = model(images) if keep is None else model(images, keep)
            return found, found
        assert isinstance(model, ViT)
        z = model.encode(model.tokens(images, keep), model.embed.grid(images), keep, read=model.pool.reads)
        return model.head.both(model.pool(z))

    def wish(self, logits: Tensor) -> Tensor:
        """The teacher's answers as something to aim at, [B, K]: a distribution, or for sigmoids a chance of each class."""
        if self.spec.loss == "sigmoid":
            return (logits > 0).float() if self.spec.kind == "hard" else (logits / self.spec.temperature).sigmoid()
        if self.spec.kind == "hard":
            return F.one_hot(logits.argmax(1), logits.shape[1]).float()
        return (logits / self.spec.temperature).softmax(1)

    def lesson(self, answers: Tensor, taught: Tensor) -> Tensor:
        """How far the student's answers are from the teacher's, for each picture, [B]."""
        spec = self.spec
        t = spec.temperature if spec.kind == "soft" else 1.0
        if spec.loss == "sigmoid":
            found = F.binary_cross_entropy_with_logits(answers / t, taught, reduction="none").sum(1)
            least = -(torch.xlogy(taught, taught) + torch.xlogy(1 - taught, 1 - taught)).sum(1)
        else:
            found = -(taught * (answers / t).log_softmax(1)).sum(1)
            least = -torch.xlogy(taught, taught).sum(1)
        if spec.kind == "hard":
            return found
        return (found - least) * t**2 / (answers.shape[1] if spec.per == "value" else 1)

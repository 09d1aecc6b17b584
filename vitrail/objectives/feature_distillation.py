"""Learning a teacher's features, where its classes are others or there are no labels.

The student's pooled vector goes through a linear layer to the teacher's width, and the cosine between the two is to be 1: the
distance by which Ranzinger et al. 2024 ("AM-RADIO") match the vectors that stand for a whole picture. The layer is for
training alone. B pictures, K classes, F values of the teacher's vector.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT, ViTConfig
from vitrail.nn.head import Linear
from vitrail.nn.pool import ClassToken
from vitrail.objectives.classification import Classification, Classifier
from vitrail.objectives.draw import Draw
from vitrail.objectives.mixing import mix
from vitrail.objectives.teacher import Teacher
from vitrail.objectives.told import apart


@dataclass(frozen=True)
class FeatureDistillation(Classification):
    """How much the labels count beside the teacher's features, whose share is 1; the rest is asked as without a teacher.

    A model that ends in features has no labels to learn: targets are ignored, and it learns from pictures alone.
    """

    labels: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.labels < float("inf"):
            raise ValueError(f"labels count {self.labels}: it is at least 0")

    def check(self, config: ViTConfig, batch: int) -> None:
        """An error in one line for a student that cannot learn features alone."""
        if not isinstance(config.head, Linear):
            raise ValueError(
                f"features are learnt by what comes to the head, so a {type(config.head).__name__} behind it would learn "
                "nothing: set model.head=Linear"
            )
        if isinstance(config.pool, ClassToken) and config.prefix.outputs > 1:
            raise ValueError(
                "of a class and a distillation token only one would learn the teacher's features: set model.pool=Mean"
            )

    def build(
        self,
        model: ViT | BiT,
        weights: Tensor | None = None,
        teacher: Teacher | None = None,
        preprocessing: Preprocessing | None = None,
        cached: bool = False,
    ) -> "FeatureDistiller":
        """The student, the layer to the teacher's features, and the objective. Arguments as for distillation."""
        super().build(model, weights)
        if teacher is None or preprocessing is None:
            raise ValueError("feature distillation learns from a teacher: give --teacher MODEL")
        if not self.labels and model.config.classes is not None:
            raise ValueError("labels count 0, so the head would learn nothing: set objective.labels above 0")
        return FeatureDistiller(model, self, weights, teacher, preprocessing, cached)


class FeatureDistiller(Classifier):
    """A student on its way to its teacher's features."""

    spec: FeatureDistillation

    def __init__(
        self,
        model: ViT | BiT,
        spec: FeatureDistillation,
        weights: Tensor | None,
        teacher: Teacher,
        preprocessing: Preprocessing,
        cached: bool,
    ) -> None:
        super().__init__(model, spec, weights)
        self.teacher, self.preprocessing, self.cached = teacher, preprocessing, cached
        width = model.pool.features if isinstance(model, ViT) else model.features_width
        self.projection = nn.Linear(width, teacher.width)
        # From a seed of its own: the same on every process, whatever else was drawn before.
        nn.init.normal_(self.projection.weight, std=width**-0.5, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.projection.bias)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: Draw | None = None) -> dict[str, Tensor]:
        """The `loss`; without targets and chance, the `logits`."""
        if draw is None:
            return {"logits": self.model(images)}
        labels, said = self.given(targets)
        spec, classes = self.spec, self.model.config.classes
        several = labels is not None and labels.ndim == 2
        wanted = torch.zeros(len(images), 0, device=images.device)  # [B, 0] without labels
        if labels is not None and classes is not None:
            wanted = labels.float() if several else F.one_hot(labels, classes).float()
        if said is None:
            images, wanted = mix(images, wanted, spec.mixup, spec.cutmix, draw)
            said = self.asked(images)
        else:
            both = torch.cat((wanted, F.normalize(said.float(), dim=1)), 1)
            images, both = mix(images, both, spec.mixup, spec.cutmix, draw)
            wanted, said = both[:, : wanted.shape[1]], both[:, wanted.shape[1] :]
        y, logits = self.seen(images, self.kept(images, draw) if spec.patch_dropout else None)
        loss = self.distance(y, said).mean()
        if labels is not None:
            losses = self.losses(logits.float(), wanted, several)
            if self.weights is not None and not several:
                losses = losses * (wanted * self.weights).sum(1)
            loss = loss + spec.labels * losses.mean()
        return {"loss": loss}

    def given(self, targets: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Labels, where the model has classes; and the teacher's features, where it was asked before."""
        classes = self.model.config.classes
        if not self.cached:
            return (None if classes is None else targets), None
        assert targets is not None
        return apart(targets, self.teacher.width, classes)

    def seen(self, images: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The student's vector [B, D], and what its head makes of it. Of two tokens, the one for the teacher."""
        model = self.model
        if isinstance(model, BiT):
            y = model.pooled(model.grids(images))
            return y, model.head(y)
        z = model.encode(model.tokens(images, keep), model.embed.grid(images), keep, read=model.pool.reads)
        y = model.pool(z)
        return (y if y.ndim == 2 else y[:, 1]), model.head(y)

    def distance(self, y: Tensor, said: Tensor) -> Tensor:
        """1 - cosine, [B]."""
        return 1 - F.cosine_similarity(self.projection(y).float(), said.float(), dim=1)

    def asked(self, images: Tensor) -> Tensor:
        """What the teacher makes of the student's pictures, [B, F]."""
        return self.teacher.features(images, self.preprocessing.mean, self.preprocessing.std)

    @torch.no_grad()
    def signals(self, images: Tensor | tuple[Tensor, ...], draw: Draw, said: Tensor | None = None) -> dict[str, Tensor]:
        """How far the student's features are from the teacher's, on pictures that are not trained on; `said` if it is known."""
        assert isinstance(images, Tensor)
        far = self.distance(self.seen(images)[0], self.asked(images) if said is None else said).mean()
        return {"loss": far, "cosine": 1 - far}

"""Token labelling: every patch learns what a teacher sees there (Jiang et al. 2021, "All Tokens Matter").

Beside the label of the picture, a student's patch tokens are asked for the teacher's answer at their place. They have a linear
head of their own, as in the authors' code: it is a part of the task, not of the model, and is not there after training.

B pictures, N patches, D width, K classes.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.maps import MapShape
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.bit import BiT, BiTConfig
from vitrail.models.vit import ViT, ViTConfig
from vitrail.objectives.classification import Classification, Classifier
from vitrail.objectives.draw import Draw
from vitrail.objectives.mix_token import blended, boxes, exchanged, mixed_tokens
from vitrail.objectives.score_map import aligned, best, map_shape, whole
from vitrail.objectives.teacher import Teacher


@dataclass(frozen=True)
class TokenLabelling(Classification):
    """The loss is that of the picture's label, and `beta` times the mean over the patches of that of theirs.

    `mix_token` takes the place of mixup and CutMix, which would blend or cut what has one label.
    """

    beta: float = 0.5
    top: int = 5  # classes that are kept of each cell of the teacher's map
    mix_token: float = 1.0  # alpha; 0 for none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss != "softmax":
            raise ValueError(
                "token labels are for pictures with one label each: use objective.loss=softmax, or --distil soft"
            )
        for name in ("mixup", "cutmix", "patch_dropout"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} {getattr(self, name)} beside token labels: set it to 0; mix_token mixes patches"
                )
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"beta is {self.beta}: the weight of the token labels is above 0")
        if self.top < 1:
            raise ValueError(f"the best {self.top} classes of each cell: keep 1 at least")
        if not 0 <= self.mix_token < float("inf"):
            raise ValueError(f"mix_token is {self.mix_token}: it is at least 0")

    @property
    def pairs(self) -> bool:
        return bool(self.mix_token)

    def build(
        self,
        model: ViT | BiT,
        weights: Tensor | None = None,
        teacher: Teacher | None = None,
        preprocessing: Preprocessing | None = None,
        cached: bool = False,
    ) -> "TokenLabeller":
        """The student with its objective.

        `preprocessing` is the student's. `cached`: targets come from a loader with the teacher's maps of whole pictures, and
        nobody asks it; otherwise it looks at the very samples that the student sees.
        """
        if teacher is None or preprocessing is None:
            raise ValueError("token labels are a teacher's: give --teacher MODEL")
        shape = map_shape(teacher, self.top)
        self.check(model.config, shape)
        assert isinstance(model, ViT)
        return TokenLabeller(model, self, weights, shape, None if cached else teacher, preprocessing)

    def check(self, student: ViTConfig | BiTConfig, shape: MapShape) -> None:
        """Refuses what cannot work, before training starts."""
        if not isinstance(student, ViTConfig):
            raise ValueError("a ResNet has no patch tokens to label: use a ViT as the student, or --distil soft")
        if student.classes != shape.classes:
            raise ValueError(
                f"score maps of {shape.classes} classes for a student of {student.classes}: "
                "use a teacher that was trained on these classes"
            )


class TokenLabeller(Classifier):
    """A student with the label of each picture and the teacher's for each of its patches."""

    spec: TokenLabelling
    model: ViT

    def __init__(
        self,
        model: ViT,
        spec: TokenLabelling,
        weights: Tensor | None,
        shape: MapShape,
        teacher: Teacher | None,
        preprocessing: Preprocessing,
    ) -> None:
        super().__init__(model, spec, weights)
        self.shape, self.teacher, self.preprocessing = shape, teacher, preprocessing
        self.head = nn.Linear(model.config.size.width, shape.classes)
        nn.init.zeros_(self.head.weight)  # as a classifier's begins in the paper, and without chance
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: Draw | None = None) -> dict[str, Tensor]:
        """The `loss`, and the part of it that is the patches' as `tokens`; without targets, the `logits`.

        Targets are indices [B], or with cached maps [B, 1 + …]: the label, the place, the map.
        """
        model, spec = self.model, self.spec
        if targets is None or draw is None:
            return {"logits": model(images)}
        grid = model.embed.grid(images)
        labels, dense = self.apart(images, targets)  # [B], [B, N, K]
        wanted = F.one_hot(labels, self.shape.classes).float()
        if spec.mix_token:
            box = boxes(grid, spec.mix_token, draw)
            z_0 = mixed_tokens(model, images, box)
            wanted, dense = blended(wanted, box), exchanged(dense, box)
        else:
            z_0 = model.tokens(images)
        z = model.encode(z_0, grid)  # every token is read
        losses = self.losses(model.head(model.pool(z)).float(), wanted, several=False)  # [B]
        if self.weights is not None:
            losses = losses * (wanted * self.weights).sum(1)
        patches = self.head(model.pool.norm(z)[:, model.config.prefix.count :]).float()  # [B, N, K]
        tokens = -(dense * patches.log_softmax(2)).sum(2).mean()
        return {"loss": losses.mean() + spec.beta * tokens, "tokens": tokens.detach()}

    def apart(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The label of each picture, [B], and of each of its patches, [B, N, K]."""
        shape, grid = self.shape, self.model.embed.grid(images)
        if self.teacher is None:
            if targets.ndim != 2 or targets.shape[1] != 1 + shape.columns:
                raise ValueError(
                    f"targets of {list(targets.shape[1:])} and not {1 + shape.columns} columns: "
                    f"the loader's maps are not of {shape.grid[0]}×{shape.grid[1]} cells with the best {shape.top} classes"
                )
            labels = targets[:, 0].long()
            places, classes, scores = shape.apart(targets[:, 1:])
        else:
            labels, places = targets, whole(len(images), images.device)
            answers = self.teacher.maps(images, self.preprocessing.mean, self.preprocessing.std)
            classes, scores = best(answers, shape.top)
        return labels, aligned(classes, scores, places, grid, shape.classes)

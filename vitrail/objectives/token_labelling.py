"""Token labelling: every patch token learns a teacher's label at its position ("All Tokens Matter", Jiang et al. 2021).

Patch tokens have a linear head of their own, as in the authors' code. It belongs to the loss module, not to the model file.

B images, N patches, D width, K classes.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, ModelConfig, TokenModel
from vitrail.nn.linear import LinearLayer
from vitrail.nn.shape import Grid
from vitrail.objectives.base import Losses, LossInputs, TeacherOutput, require_draw
from vitrail.objectives.classification import cut_boxes, pair_indices
from vitrail.objectives.distillation import TeacherLoss, TeacherObjective
from vitrail.objectives.teacher import Teacher, align_labels, identity_transforms, map_shape, top_scores
from vitrail.utils.json import check_fields

BOX_AREA_STREAM, BOX_CENTRE_STREAM = 32, 33  # random streams


def draw_boxes(grid: Grid, alpha: float, draw: StepRandom) -> Tensor:
    """Return the patches that each image takes from its partner, bool [B, N]: a box, the same for both of a pair.

    Its area is 1 minus a draw from Beta(alpha, alpha), around a random point.
    """
    first_of_pair, _ = pair_indices(draw.count, draw.device)
    lam, centre = draw.beta(alpha, BOX_AREA_STREAM)[first_of_pair], draw.uniform(2, BOX_CENTRE_STREAM)[first_of_pair]
    box = cut_boxes(lam, centre, grid).flatten(1)
    if draw.count % 2:
        box[-1] = False  # it has no partner
    return box


def swap_patches(values: Tensor, box: Tensor) -> Tensor:
    """Return values of patches, [B, N, …], with the partner's inside the box."""
    return torch.where(box[..., None], values[pair_indices(len(values), values.device)[1]], values)


def blend_labels(labels: Tensor, box: Tensor) -> Tensor:
    """Return labels of images, [B, K], mixed by the area of each image."""
    share = box.float().mean(1, keepdim=True)  # of the partner
    return labels * (1 - share) + labels[pair_indices(len(labels), labels.device)[1]] * share


def embed_mixed(model: TokenModel, images: Tensor, box: Tensor) -> Tensor:
    """Return z_0 of equation 1 with the patches in the box swapped after their embedding, [B, T, D]."""
    return model.add_positions(swap_patches(model.embed(images), box), model.embed.grid(images))


@dataclass(frozen=True)
class TokenLabelling(TeacherObjective):
    """The loss of the image's label, plus `beta` times the mean over the patches of the loss of their labels.

    `mix_token` replaces mixup and CutMix, which would mix patches that have one label.
    """

    teacher_output: ClassVar[TeacherOutput | None] = "maps"
    own_fields: ClassVar[tuple[str, ...]] = ("mixup", "cutmix", "patch_dropout")

    beta: float = 0.5
    top: int = 5  # classes kept of each cell of the teacher's map
    mix_token: float = 1.0  # alpha; 0 for none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss != "softmax":
            raise ValueError("token labelling needs one label per image: use objective.loss=softmax, or distil='soft'")
        for name in self.own_fields:
            if getattr(self, name):
                raise ValueError(f"{name} must be 0 with token labelling, got {getattr(self, name)}: use mix_token")
        check_fields(self, "> 0", "beta, the weight of the token labels")
        check_fields(self, ">= 1", "top, the classes kept of each cell")
        check_fields(self, ">= 0", "mix_token")

    @property
    def mixes_pairs(self) -> bool:
        return bool(self.mix_token)

    @property
    def map_classes(self) -> int:
        return self.top

    def check_teacher(self, config: ModelConfig, teacher: Teacher, multi_label: bool) -> None:
        if multi_label:
            raise ValueError("token labelling needs one label per image: use distil='soft'")
        classes = map_shape(teacher, self.top).classes
        config.require_tokens("token labelling")
        if config.classes != classes:
            raise ValueError(f"the teacher has {classes} classes and the student {config.classes}")

    def check_student(self, model: Model, teacher: Teacher) -> None:
        self.check_teacher(model.config, teacher, multi_label=False)


class TokenLabeller(TeacherLoss):
    """A student that learns the label of each image and the teacher's label of each patch."""

    spec: TokenLabelling
    model: TokenModel

    def __init__(self, model: TokenModel, spec: TokenLabelling, inputs: LossInputs) -> None:
        super().__init__(model, spec, inputs)
        self.shape = shape = map_shape(self.teacher, spec.top)
        self.head = LinearLayer(model.config.size.width, shape.classes)
        nn.init.zeros_(self.head.weight)  # like the classifier in the paper, and without random numbers
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss` and the loss of the patches as `tokens`; without targets, the `logits`.

        Targets are indices [B], or with cached maps [B, 1 + …]: the label, the transform, the map.
        """
        model, spec = self.model, self.spec
        if targets is None:
            return {"logits": model(images)}
        draw = require_draw(draw)
        grid = model.embed.grid(images)
        labels, patch_labels = self.split_targets(images, targets)  # [B], [B, N, K]
        image_targets = self.encode_targets(labels)
        if spec.mix_token:
            box = draw_boxes(grid, spec.mix_token, draw)
            z_0 = embed_mixed(model, images, box)
            image_targets, patch_labels = blend_labels(image_targets, box), swap_patches(patch_labels, box)
        else:
            z_0 = model.tokens(images)
        z = model.encode(z_0, grid)  # all tokens are used
        loss = self.label_loss(model.head(model.pool(z)), image_targets, multi_label=False)
        logits = self.head(model.pool.norm(z)[:, model.config.prefix.count :]).float()  # [B, N, K]
        tokens = -(patch_labels * logits.log_softmax(2)).sum(2).mean()
        return {"loss": loss + spec.beta * tokens, "tokens": tokens.detach()}

    def split_targets(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the label of each image, [B], and of each of its patches, [B, N, K]."""
        shape, grid = self.shape, self.model.embed.grid(images)
        if self.cached:
            if targets.ndim != 2 or targets.shape[1] != 1 + shape.n_columns:
                columns, (h, w) = list(targets.shape[1:]), shape.grid
                expected = f"{1 + shape.n_columns}: label and map of {h}×{w} cells with {shape.top} classes"
                raise ValueError(f"targets have columns {columns}, expected {expected}")
            labels = targets[:, 0].long()
            transforms, classes, scores = shape.split_columns(targets[:, 1:])
        else:
            labels, transforms = targets, identity_transforms(len(images), images.device)
            logits = self.teacher.dense_logits(images, self.preprocessing.mean, self.preprocessing.std)
            classes, scores = top_scores(logits, shape.top)
        return labels, align_labels(classes, scores, transforms, grid, shape.classes)


TokenLabelling.loss_class = TokenLabeller

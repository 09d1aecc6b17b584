"""Learning labels: one for each picture, or several.

B pictures, K classes, N patches.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.objectives.draw import Draw
from vitrail.objectives.mixing import mix
from vitrail.objectives.task import Task

KEEP = 4  # stream of chance


@dataclass(frozen=True)
class Classification:
    """What is asked of the model's answers, and what is done to the batch first.

    `softmax` is for one label a picture. `sigmoid` asks about each class by itself: for several labels, and as DeiT III
    trains single ones. Its loss is summed over the classes.
    """

    keeps: ClassVar[str] = "model"  # what of the task is the model in the end
    loss: Literal["softmax", "sigmoid"] = "softmax"
    smoothing: float = 0.0  # of the labels, softmax only
    mixup: float = 0.0  # alpha; 0 for none
    cutmix: float = 0.0
    patch_dropout: float = 0.0  # patches that a training step leaves out, for speed: Liu et al. 2023, "PatchDropout"

    def __post_init__(self) -> None:
        if self.loss not in ("softmax", "sigmoid"):
            raise ValueError(f"unknown loss {self.loss!r}: use softmax or sigmoid")
        for name in ("smoothing", "patch_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it is at least 0 and below 1")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}: it is at least 0")

    @property
    def pairs(self) -> bool:
        """Whether neighbours in a batch are mixed, so that they must not be in different processes."""
        return bool(self.mixup or self.cutmix)

    def build(self, model: ViT | BiT, weights: Tensor | None = None) -> "Classifier":
        """The model with its objective, ready for a training loop.

        `weights`, [K], are for classes that are rare: of a picture with that label, or, where pictures have several, of the
        answer to that label where it is there.
        """
        if self.patch_dropout and not isinstance(model, ViT):
            raise ValueError("a ResNet has no patches to leave out: set objective.patch_dropout=0")
        return Classifier(model, self, weights)


class Classifier(Task):
    """A model and what it is trained for: pictures and targets in, the loss out."""

    weights: Tensor | None

    def __init__(self, model: ViT | BiT, spec: Classification, weights: Tensor | None) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: Draw | None = None) -> dict[str, Tensor]:
        """The `loss`; targets are indices [B], or 0 and 1 for each class [B, K]. Without targets, the `logits`."""
        if targets is None or draw is None:
            return {"logits": self.model(images)}
        spec, several = self.spec, targets.ndim == 2
        classes = self.model.config.classes
        assert classes is not None
        wanted = targets.float() if several else F.one_hot(targets, classes).float()
        images, wanted = mix(images, wanted, spec.mixup, spec.cutmix, draw)
        keep = self.kept(images, draw) if spec.patch_dropout else None
        answers = self.model(images) if keep is None else self.model(images, keep)
        losses = self.losses(answers.float(), wanted, several)  # [B]
        if self.weights is not None and not several:
            losses = losses * (wanted * self.weights).sum(1)
        return {"loss": losses.mean()}

    def losses(self, answers: Tensor, wanted: Tensor, several: bool) -> Tensor:
        """One loss for each picture."""
        if self.spec.loss == "sigmoid":
            present = self.weights if several else None
            each = F.binary_cross_entropy_with_logits(answers, wanted, reduction="none", pos_weight=present)
            return each.sum(1)
        if self.spec.smoothing:
            wanted = wanted * (1 - self.spec.smoothing) + self.spec.smoothing / wanted.shape[1]
        return -(wanted * answers.log_softmax(1)).sum(1)

    def kept(self, images: Tensor, draw: Draw) -> Tensor:
        """Patches of each picture that this step looks at, in their order, [B, n]."""
        assert isinstance(self.model, ViT)
        h, w = self.model.embed.grid(images)
        count = max(1, round(h * w * (1 - self.spec.patch_dropout)))
        return draw.uniform(h * w, KEEP).argsort(1)[:, :count].sort(1).values

"""Segmentation: a class for every pixel.

B images, K classes, H×W pixels. Every term is averaged over the pixels or classes of an image, then over images. So each image
counts the same however many of its pixels are ignored, and the mean over the shares of several processes is that of the batch.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.dataset import IGNORED, TargetKind
from vitrail.data.rng import StepRandom
from vitrail.models.base import Model
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective
from vitrail.utils.json import check_fields

MIN_ERROR = 1e-6  # of 1 - p in the focal loss: its power below 1 has an infinite slope at 0


@dataclass(frozen=True)
class Segmentation(Objective):
    """A sum of losses over the pixels that are not ignored; each field of a loss is its weight, 0 for none."""

    label_use: ClassVar[Literal["required", "optional", "none"]] = "required"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("masks",)
    output_kind: ClassVar[str] = "masks"

    cross_entropy: float = 1.0
    dice: float = 0.0  # 1 - Dice of the probabilities (Milletari et al. 2016)
    focal: float = 0.0  # cross-entropy times (1 - p)^gamma (Lin et al. 2017)
    gamma: float = 2.0  # of the focal loss
    smoothing: float = 0.0  # of the labels, in the cross-entropy

    def __post_init__(self) -> None:
        check_fields(self, ">= 0", "cross_entropy", "dice", "focal", "gamma")
        check_fields(self, ">= 0 and < 1", "smoothing")
        if not (self.cross_entropy or self.dice or self.focal):
            raise ValueError("cross_entropy, dice and focal are all 0: set one of them above 0")

    def build(self, model: Model, weights: Tensor | None = None) -> "SegmentationLoss":
        """Return the loss module. `weights`, [K], multiply the cross-entropy and the focal loss of the pixels of each class."""
        self.check_model(model)
        return SegmentationLoss(model, self, weights)

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        return self.build(model, inputs.class_weights)


class SegmentationLoss(LossModule):
    """A model of masks with its loss."""

    weights: Tensor | None

    def __init__(self, model: Model, spec: Segmentation, weights: Tensor | None) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss` of masks, uint8 [B, H, W] with IGNORED; without targets, the `logits` [B, K, H, W]."""
        logits = self.model(images)
        return {"logits": logits} if targets is None else {"loss": self.mask_loss(logits, targets)}

    def mask_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted sum of the losses. Logits of another size are resized to that of the masks."""
        spec, targets = self.spec, targets.long()
        if logits.shape[-2:] != targets.shape[-2:]:
            logits = F.interpolate(logits, size=targets.shape[-2:], mode="bilinear", align_corners=False)
        log_p = logits.float().log_softmax(1)
        losses = []
        if spec.cross_entropy or spec.focal:
            error = F.nll_loss(log_p, targets, ignore_index=IGNORED, reduction="none")  # [B, H, W]: -log p of the class
            if spec.cross_entropy:
                losses.append(spec.cross_entropy * self.cross_entropy_loss(log_p, error, targets))
            if spec.focal:
                pixels = focal_loss(error, spec.gamma) * self.pixel_weights(targets)
                losses.append(spec.focal * mean_of_pixels(pixels, targets))
        if spec.dice:
            losses.append(spec.dice * dice_loss(log_p.exp(), targets))
        return torch.stack(losses).sum()

    def cross_entropy_loss(self, log_p: Tensor, error: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy with class weights and label smoothing, each as in `torch.nn.functional`."""
        pixels, smoothing = error * self.pixel_weights(targets), self.spec.smoothing
        if smoothing:
            uniform = log_p if self.weights is None else log_p * self.weights[:, None, None]
            pixels = (1 - smoothing) * pixels - smoothing * uniform.mean(1)
        return mean_of_pixels(pixels, targets)

    def pixel_weights(self, targets: Tensor) -> Tensor | float:
        """Return the class weight of every pixel, [B, H, W]; that of ignored pixels is not used."""
        return 1.0 if self.weights is None else self.weights[targets.clamp(max=len(self.weights) - 1)]


def mean_of_pixels(values: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of [B, H, W] over the pixels of an image that are not ignored, then over images.

    An image that is ignored as a whole has the mean 0, and gradients of 0.
    """
    counted = targets != IGNORED
    return ((values * counted).sum((1, 2)) / counted.sum((1, 2)).clamp(min=1)).mean()


def focal_loss(error: Tensor, gamma: float) -> Tensor:
    """Return (1 - p)^gamma · -log p of pixels whose cross-entropy is `error` (Lin et al. 2017, equation 4)."""
    return (-torch.expm1(-error)).clamp(min=MIN_ERROR) ** gamma * error


def dice_loss(p: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - Dice of probabilities [B, K, H, W], the mean over the classes that an image has, then over images.

    Dice of a class is 2 Σ p t / (Σ p + Σ t), over the pixels of an image that are not ignored.
    """
    is_class = targets[:, None] == torch.arange(p.shape[1], device=p.device)[:, None, None]  # [B, K, H, W]
    shared = torch.where(is_class, p, 0).sum((2, 3))  # [B, K]
    predicted, true = (p * (targets != IGNORED)[:, None]).sum((2, 3)), is_class.sum((2, 3))
    present = true > 0
    losses = (1 - 2 * shared / (predicted + true).clamp(min=1)) * present
    return (losses.sum(1) / present.sum(1).clamp(min=1)).mean()

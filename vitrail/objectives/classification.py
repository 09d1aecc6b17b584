"""Classification with one label per image, or several.

B images, K classes, N patches.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, Unsupported
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective, require_draw
from vitrail.objectives.fewer_tokens import TokenMerging, TokenSlot, draw_patches
from vitrail.utils.json import check_fields

MIX_KIND_STREAM, MIX_RATIO_STREAM, BOX_CENTRE_STREAM = 1, 2, 3  # random streams


def mix_pairs(images: Tensor, targets: Tensor, mixup: float, cutmix: float, draw: StepRandom) -> tuple[Tensor, Tensor]:
    """Return images [B, C, H, W] or clips [B, C, T, H, W] and soft targets [B, K], each mixed with its neighbour in the batch.

    With both alphas above 0, each pair gets mixup or CutMix with equal probability. A last image without a partner is unchanged.
    A clip has the same box of CutMix in all frames.
    """
    if not mixup and not cutmix:
        return images, targets
    b, (height, width) = len(images), images.shape[-2:]
    first_of_pair, partner = pair_indices(b, images.device)
    use_cutmix = draw.uniform(1, MIX_KIND_STREAM)[first_of_pair, 0] < (0.5 if mixup and cutmix else float(cutmix > 0))
    lam = torch.ones(b, device=images.device)  # λ, the weight of the image itself
    for alpha, chosen in ((mixup, ~use_cutmix), (cutmix, use_cutmix)):
        if alpha:
            lam = torch.where(chosen, draw.beta(alpha, MIX_RATIO_STREAM)[first_of_pair], lam)

    centre = draw.uniform(2, BOX_CENTRE_STREAM)[first_of_pair]
    box = cut_boxes(lam, centre, (height, width)) & use_cutmix[:, None, None]  # [B, H, W]
    lam = torch.where(use_cutmix, 1 - box.float().mean((1, 2)), lam)

    weight = lam[:, None, None]
    if cutmix:
        weight = torch.where(use_cutmix[:, None, None], 1 - box.float(), weight)
    weight = weight.view(b, *[1] * (images.ndim - 3), *weight.shape[1:])
    images = images * weight + images[partner] * (1 - weight)
    return images, targets * lam[:, None] + targets[partner] * (1 - lam[:, None])


def encode_one_hot(indices: Tensor, classes: int) -> Tensor:
    """Return indices [B] as one-hot vectors, float [B, K]. Unlike PyTorch's function it reads no value back to the host."""
    return (indices[:, None] == torch.arange(classes, device=indices.device)).float()


def pair_indices(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first of each image's pair, whose random numbers both use, and its partner: itself for an unpaired last one."""
    index = torch.arange(count, device=device)
    return index // 2 * 2, (index ^ 1).clamp(max=count - 1)


def cut_boxes(lam: Tensor, centre: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return boxes of (1 - lam) [B] of an image around points [B, 2], clipped at the border as in CutMix, bool [B, h, w]."""
    half_side = (1 - lam[:, None]).sqrt() / 2
    y, x = ((torch.arange(n, device=lam.device) + 0.5) / n for n in grid)
    rows, columns = (y - centre[:, :1]).abs() < half_side, (x - centre[:, 1:]).abs() < half_side  # [B, h], [B, w]
    return rows[:, :, None] & columns[:, None, :]


@dataclass(frozen=True)
class Classification(Objective):
    """Cross-entropy with the labels, and the mixing of the batch before it.

    `softmax` is for one label per image. `sigmoid` is a binary cross-entropy for each class, summed over the classes: for
    several labels, and as DeiT III trains single ones.
    """

    label_use: ClassVar[Literal["required", "optional", "none"]] = "required"

    loss: Literal["softmax", "sigmoid"] = "softmax"
    smoothing: float = 0.0  # of the labels, softmax only
    mixup: float = 0.0  # alpha; 0 for none
    cutmix: float = 0.0  # alpha; 0 for none
    patch_dropout: float = 0.0  # fraction of patches left out of a training step (PatchDropout, Liu et al. 2023)
    tokens: TokenSlot | None = None  # fewer tokens in a part of the run

    def __post_init__(self) -> None:
        if self.loss not in ("softmax", "sigmoid"):
            raise ValueError(f"unknown loss {self.loss!r}: use softmax or sigmoid")
        check_fields(self, ">= 0 and < 1", "smoothing", "patch_dropout")
        check_fields(self, ">= 0", "mixup", "cutmix")
        if self.tokens is not None and self.patch_dropout:
            raise ValueError(
                "objective.tokens and patch_dropout both shorten a step: set patch_dropout=0, or tokens=none"
            )

    @property
    def mixes_pairs(self) -> bool:
        return bool(self.mixup or self.cutmix)

    @property
    def kept_patches(self) -> float:
        return 1 - self.patch_dropout if self.tokens is None else self.tokens.kept

    @property
    def calls_parts_of_layers(self) -> bool:
        return isinstance(self.tokens, TokenMerging)

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        if self.patch_dropout:
            model.require_tokens("objective.patch_dropout", clips=True)
            if not model.config.can_drop_patches:
                raise Unsupported("divided attention needs every patch: set objective.patch_dropout=0")
        if self.tokens is not None:
            self.tokens.check(model)

    def build(self, model: Model, weights: Tensor | None = None) -> "ClassificationLoss":
        """Return the loss module. `weights`, [K], multiply the loss of rare classes; of several labels, of positives."""
        self.check_model(model)
        return ClassificationLoss(model, self, weights)

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        loss_module = self.build(model, inputs.class_weights)
        loss_module.steps = inputs.steps
        return loss_module


class ClassificationLoss(LossModule):
    """A model with its classification loss."""

    weights: Tensor | None

    def __init__(self, model: Model, spec: Classification, weights: Tensor | None) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.steps = 1  # of the run, for `spec.tokens`
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss`; targets are indices [B], or 0 and 1 for each class [B, K]. Without targets, the `logits`."""
        if targets is None:
            return {"logits": self.model(images)}
        draw = require_draw(draw)
        spec, multi_label = self.spec, targets.ndim == 2
        images, targets = mix_pairs(images, self.encode_targets(targets), spec.mixup, spec.cutmix, draw)
        if spec.tokens is not None:
            logits = spec.tokens.compute_logits(self.model.require_tokens("fewer tokens"), images, draw, self.steps)
        else:
            keep = self.draw_kept_patches(images, draw)
            logits = self.model(images) if keep is None else self.model(images, keep)
        return {"loss": self.label_loss(logits, targets, multi_label)}

    def encode_targets(self, targets: Tensor) -> Tensor:
        """Return labels, [B] or [B, K], as one-hot or multi-hot vectors, float [B, K]."""
        classes = self.model.config.classes
        assert classes is not None
        return targets.float() if targets.ndim == 2 else encode_one_hot(targets, classes)

    def label_loss(self, logits: Tensor, targets: Tensor, multi_label: bool) -> Tensor:
        """Return the mean loss of logits and soft targets, both [B, K], with the class weights."""
        logits, smoothing = logits.float(), self.spec.smoothing
        if self.spec.loss == "sigmoid":
            positive = self.weights if multi_label else None
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none", pos_weight=positive).sum(1)
        else:
            smooth = targets * (1 - smoothing) + smoothing / targets.shape[1] if smoothing else targets
            losses = -(smooth * logits.log_softmax(1)).sum(1)  # [B]
        if self.weights is not None and not multi_label:
            losses = losses * (targets * self.weights).sum(1)
        return losses.mean()

    def draw_kept_patches(self, images: Tensor, draw: StepRandom) -> Tensor | None:
        """Return the patches of each image that this step computes, in order, [B, n]; None for all."""
        if not self.spec.patch_dropout:
            return None
        return draw_patches(
            self.model.require_tokens("patch dropout", clips=True), images, self.spec.patch_dropout, draw
        )

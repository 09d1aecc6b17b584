"""The loss of segmentation by queries (DETR, Mask2Former, EoMT): queries are matched to the masks of an image, one to one.

The matching minimises the sum of the costs of class, mask and Dice; a matched query trains towards its mask and class, the
others towards "no object". Masks are compared at random points, most of them where the prediction is uncertain (PointRend);
ignored pixels do not count.
The predictions before each of the last blocks and after the last one have the same loss.

B images, Q queries, K classes, M masks of an image, N matched masks of a batch, P points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitrail.data.dataset import IGNORED, TargetKind
from vitrail.data.rng import StepRandom
from vitrail.models.base import Model
from vitrail.models.eomt import QueryLogits
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective, require_draw
from vitrail.utils.json import check_fields

POINT_STREAM, MASKED_STREAM = 12, 13  # random streams
ANNEALING_POWER = 0.9
SMALLEST_WEIGHT = 1e-4  # of a point: a smaller one is a rounding error


class MaskTargets(NamedTuple):
    """The masks of one image."""

    masks: Tensor  # bool [M, H, W]
    classes: Tensor  # int64 [M]
    ignored: Tensor  # bool [H, W]


class Points(NamedTuple):
    """Random points of each image in coordinates from 0 to 1, x first."""

    matching: Tensor  # [B, P, 2]
    candidates: Tensor  # [B, C, 2]: of these the most uncertain ones count
    others: Tensor  # [B, R, 2]: these count too


@dataclass(frozen=True)
class MaskMatching(Objective):
    """Weights of the terms of the cost and of the loss, and the points at which masks are compared. Defaults are EoMT's."""

    label_use: ClassVar[Literal["required", "optional", "none"]] = "required"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("masks",)
    output_kind: ClassVar[str] = "masks"

    class_weight: float = 2.0
    mask_weight: float = 5.0  # of the binary cross-entropy
    dice_weight: float = 5.0
    no_object: float = 0.1  # weight of "no object" in the cross-entropy of classes
    points: int = 12544
    oversampling: float = 3.0  # candidates per point
    uncertain: float = 0.75  # part of the points that are the most uncertain candidates

    def __post_init__(self) -> None:
        check_fields(self, ">= 0", "class_weight", "mask_weight", "dice_weight")
        check_fields(self, "> 0", "no_object")
        check_fields(self, ">= 0 and <= 1", "uncertain")
        check_fields(self, ">= 1", "points", "oversampling")

    def check_model(self, model: Model) -> None:
        model.require_queries("the objective MaskMatching")

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        self.check_model(model)
        return MaskMatchingLoss(model, self, inputs.steps)

    @property
    def n_uncertain(self) -> int:
        return int(self.uncertain * self.points)

    @property
    def n_candidates(self) -> int:
        return int(self.points * self.oversampling)


class MaskMatchingLoss(LossModule):
    """A model with queries and the loss of its predictions, summed over its layers.

    The masks of the whole batch divide the loss, not those of a process or a micro-batch: each mask counts the same.
    """

    def __init__(self, model: Model, spec: MaskMatching, steps: int) -> None:
        super().__init__()
        self.model, self.spec, self.steps = model, spec, steps
        self.batch_counts: Tensor | None = None  # of the current batch, as `count_masks`

    def count_batch(self, targets: Tensor, total: Callable[[Tensor], Tensor]) -> None:
        queries = len(self.model.require_queries("the objective MaskMatching").queries)
        self.batch_counts = total(count_masks(targets, queries))

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss` of masks, uint8 [B, H, W] with IGNORED; without targets, the `logits` [B, K, H, W]."""
        if targets is None:
            return {"logits": self.model(images)}
        draw, decoder = require_draw(draw), self.model.require_queries("the objective MaskMatching")
        probability = compute_mask_probability(draw.step / self.steps, decoder.n_blocks)
        numbers = draw.uniform(decoder.n_blocks * len(decoder.queries), MASKED_STREAM).unflatten(
            1, (decoder.n_blocks, -1)
        )
        masked = numbers < torch.tensor(probability, device=numbers.device)[:, None]
        predictions, wanted = self.model.predict_queries(images, masked), split_masks(targets)
        if self.batch_counts is None:
            counts = count_masks(targets, len(decoder.queries))
        else:
            counts = self.batch_counts * (draw.count / draw.total)  # the part of these images
        points = draw_points(self.spec, draw, len(predictions))
        losses = [matching_loss(self.spec, *parts, wanted, counts) for parts in zip(predictions, points, strict=True)]
        return {"loss": torch.stack(losses).sum()}


def compute_mask_probability(progress: float, blocks: int) -> list[float]:
    """Return the part of the queries whose attention is masked in each block after a fraction of the training.

    Of n blocks, counted from 0, number i unmasks its queries between i + 1 and i + 2 of n + 2 parts of the training, with the
    power 0.9 of the part that is left (EoMT).
    """
    left = (1 - (progress * (blocks + 2) - (block + 1)) for block in range(blocks))
    return [min(1.0, max(0.0, part)) ** ANNEALING_POWER for part in left]


def split_masks(targets: Tensor) -> list[MaskTargets]:
    """Return a mask for each class of each image, from classes of pixels, uint8 [B, H, W]; IGNORED has none."""
    found = []
    for image in targets:
        classes = image.unique()
        classes = classes[classes != IGNORED]
        found.append(MaskTargets(image == classes[:, None, None], classes.long(), image == IGNORED))
    return found


def count_masks(targets: Tensor, queries: int) -> Tensor:
    """Return the masks of a batch, uint8 [B, H, W], and those that get one of the queries, as [2]."""
    found = torch.zeros(len(targets), IGNORED + 1, device=targets.device)
    masks = found.scatter_(1, targets.flatten(1).long(), 1.0)[:, :IGNORED].sum(1)  # classes of each image
    return torch.stack((masks.sum(), masks.clamp(max=queries).sum()))


def draw_points(spec: MaskMatching, draw: StepRandom, n: int) -> list[Points]:
    """Return random points for each of n predictions."""
    counts = spec.points, spec.n_candidates, spec.points - spec.n_uncertain
    numbers = draw.uniform(2 * n * sum(counts), POINT_STREAM).unflatten(1, (n, -1, 2))  # [B, n, points, 2]
    return [Points(*numbers[:, index].split(counts, 1)) for index in range(n)]


def sample_points(maps: Tensor, points: Tensor, padding: Literal["zeros", "border"] = "zeros") -> Tensor:
    """Return the values of maps [N, h, w] at points [N, P, 2], bilinear: [N, P]."""
    grid = 2 * points[:, :, None].to(maps.dtype) - 1
    return F.grid_sample(maps[:, None], grid, padding_mode=padding, align_corners=False)[:, 0, :, 0]


def sample_weights(ignored: Tensor, points: Tensor) -> Tensor:
    """Return the weights of points [N, P, 2], 0 where the pixels around are ignored, bool [H, W]: [N, P]."""
    maps = ignored.to(points.dtype).expand(len(points), -1, -1)
    return F.threshold(1 - sample_points(maps, points, "border"), SMALLEST_WEIGHT, 0.0)


def sample_wanted(masks: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    """Return the values of masks [N, H, W] at points [N, P, 2] of these weights [N, P], without the ignored pixels: [N, P]."""
    return (sample_points(masks, points) / weights.clamp(min=SMALLEST_WEIGHT)).clamp(max=1)


@torch.no_grad()
def match_queries(
    spec: MaskMatching, masks: Tensor, classes: Tensor, wanted: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the matched queries and masks of one image, in the order of the queries, by the Hungarian method.

    `masks`, logits [Q, P], and `wanted`, [M, P], are values at points of `weights` [P]; `classes` are logits [Q, K + 1],
    `labels` are [M].
    """
    inside, outside = weights * F.softplus(-masks), weights * F.softplus(masks)  # cross-entropy towards 1, towards 0
    entropy = (inside @ wanted.T + outside @ (1 - wanted).T) / weights.sum().clamp(min=SMALLEST_WEIGHT)  # [Q, M]
    p = weights * masks.sigmoid()
    dice = 1 - (2 * p @ wanted.T + 1) / (p.sum(1)[:, None] + (weights * wanted).sum(1) + 1)
    costs = spec.mask_weight * entropy + spec.dice_weight * dice
    costs = costs - spec.class_weight * classes.softmax(-1)[:, labels]
    large = torch.finfo(costs.dtype).max
    costs = costs.nan_to_num(large, large, large)  # such pairs are matched last
    rows, columns = linear_sum_assignment(costs.cpu().numpy())
    return torch.as_tensor(rows, device=masks.device), torch.as_tensor(columns, device=masks.device)


@torch.no_grad()
def choose_points(spec: MaskMatching, masks: Tensor, candidates: Tensor, others: Tensor, ignored: Tensor) -> Tensor:
    """Return for each mask, logits [N, h, w], the candidates nearest to 0, and the other points: [N, P, 2].

    Candidates at ignored pixels, bool [H, W], are chosen last.
    """
    uncertainty = -sample_points(masks, candidates).abs()
    uncertainty = uncertainty.masked_fill(sample_weights(ignored, candidates) == 0, -torch.inf)
    best = uncertainty.topk(spec.n_uncertain, 1).indices
    return torch.cat((candidates.gather(1, best[..., None].expand(-1, -1, 2)), others), 1)


def matching_loss(
    spec: MaskMatching, predicted: QueryLogits, points: Points, targets: Sequence[MaskTargets], counts: Tensor
) -> Tensor:
    """Return the loss of one prediction: the classes of all queries, and the masks of the matched ones.

    `counts`, [2], are the masks and the matched ones of the batch, by which the terms are divided, as `count_masks`.
    """
    all_masks, classes = predicted.masks.float(), predicted.classes.float()
    labels = torch.full(classes.shape[:2], classes.shape[2] - 1, device=classes.device)  # "no object"
    logits, values, shares = [], [], []  # of the matched masks at their points
    for image, (wanted, label, ignored) in enumerate(targets):
        masks, wanted = all_masks[image], wanted.to(all_masks.dtype)
        where = points.matching[image].expand(len(masks), -1, -1)
        share = sample_weights(ignored, where[:1])  # [1, P]
        aims = sample_wanted(wanted, where[:1].expand(len(wanted), -1, -1), share)
        sampled = sample_points(masks.detach(), where)
        queries, found = match_queries(spec, sampled, classes[image], aims, label, share[0])
        labels[image, queries] = label[found]
        chosen, n = masks[queries], len(queries)
        candidates, others = (part[image].expand(n, -1, -1) for part in (points.candidates, points.others))
        where = choose_points(spec, chosen.detach(), candidates, others, ignored)
        logits.append(sample_points(chosen, where))
        shares.append(sample_weights(ignored, where))
        values.append(sample_wanted(wanted[found], where, shares[-1]))
    x, y, w = torch.cat(logits), torch.cat(values), torch.cat(shares)  # [N, P]
    n_masks, matched = counts[0].clamp(min=torch.finfo(counts.dtype).tiny), counts[1]  # without masks the terms are 0
    entropy = F.binary_cross_entropy_with_logits(x, y, w, reduction="none").sum(1) / w.sum(1).clamp(min=SMALLEST_WEIGHT)
    entropy, p = entropy.sum() / n_masks, w * x.sigmoid()
    dice = (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + (w * y).sum(1) + 1)).sum() / n_masks
    weights = classes.new_ones(classes.shape[2])
    weights[-1] = spec.no_object
    total = matched + spec.no_object * (labels.numel() - matched)  # the weights of all queries
    label_loss = F.cross_entropy(classes.flatten(0, 1), labels.flatten(), weights, reduction="sum") / total
    return spec.class_weight * label_loss + spec.mask_weight * entropy + spec.dice_weight * dice

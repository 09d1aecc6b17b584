"""Losses of masks: PyTorch's where the definitions coincide, ignored pixels, and shares of a batch."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from tests.objectives.made import draw
from vitrail.data.dataset import IGNORED
from vitrail.models.base import Model
from vitrail.objectives.classification import Classification
from vitrail.objectives.registry import OBJECTIVES, ObjectiveSlot
from vitrail.objectives.segmentation import Segmentation, SegmentationLoss, dice_loss
from vitrail.utils.json import to_json, value_from_json

K = 4
EVERY_TERM = Segmentation(cross_entropy=1.0, dice=0.5, focal=2.0, smoothing=0.1)


class TinyMasks(Model):
    """A convolution to K channels at every `stride`-th pixel."""

    config = SimpleNamespace(output_kind="masks", title="tiny models of masks", classes=K)

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Conv2d(3, K, 3, stride=stride, padding=1)

    def forward_features(self, images: Tensor) -> Tensor:
        return images

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return features if pre_logits else self.head(features)

    @property
    def feature_dim(self) -> int:
        return 3

    def layers(self) -> list:
        return []


def task(spec: Segmentation | None = None, weights: Tensor | None = None, stride: int = 1) -> SegmentationLoss:
    return (spec or Segmentation()).build(TinyMasks(stride), weights)


def batch(count: int = 4, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    """Images, and masks in which each image has another number of ignored pixels, of the given share on average."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 12, 10, generator=generator)
    targets = torch.randint(K, (count, 12, 10), generator=generator, dtype=torch.uint8)
    share = ignored * torch.linspace(0.5, 1.5, count)[:, None, None]
    return images, targets.masked_fill(torch.rand(count, 12, 10, generator=generator) < share, IGNORED)


def test_cross_entropy_is_pytorchs_without_ignored_pixels() -> None:
    images, targets = batch()
    for smoothing in (0.0, 0.1):
        made = task(Segmentation(smoothing=smoothing))
        expected = F.cross_entropy(made.model(images), targets.long(), label_smoothing=smoothing)
        torch.testing.assert_close(made(images, targets, draw())["loss"], expected)


def test_ignored_pixels_are_left_out_of_the_mean_of_their_image() -> None:
    made, (images, targets) = task(), batch(ignored=0.4)
    each = [
        F.cross_entropy(made.model(images[i : i + 1]), targets[i : i + 1].long(), ignore_index=IGNORED)
        for i in range(len(images))
    ]
    torch.testing.assert_close(made(images, targets)["loss"], torch.stack(each).mean())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_are_pytorchs_of_each_pixel(smoothing: float) -> None:
    weights, (images, targets) = torch.tensor([0.5, 1.0, 2.0, 4.0]), batch(ignored=0.3)
    made = task(Segmentation(smoothing=smoothing), weights)
    options = {"weight": weights, "ignore_index": IGNORED, "label_smoothing": smoothing, "reduction": "none"}
    pixels = F.cross_entropy(made.model(images), targets.long(), **options)
    expected = (pixels.sum((1, 2)) / (targets != IGNORED).sum((1, 2))).mean()
    torch.testing.assert_close(made(images, targets)["loss"], expected)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_is_that_of_the_paper(gamma: float) -> None:
    made, (images, targets) = task(Segmentation(cross_entropy=0, focal=1, gamma=gamma)), batch()
    p = made.model(images).softmax(1).gather(1, targets.long()[:, None])
    torch.testing.assert_close(made(images, targets)["loss"], (-((1 - p) ** gamma) * p.log()).mean())


def test_dice_loss_is_the_mean_over_the_classes_of_each_image() -> None:
    made, (images, targets) = task(Segmentation(cross_entropy=0, dice=1)), batch(ignored=0.3)
    targets[0][targets[0] == 2] = 1  # no pixel of class 2
    expected = []
    for p, mask in zip(made.model(images).softmax(1), targets, strict=True):
        valid, losses = mask != IGNORED, []
        for k in mask[valid].unique().tolist():
            shared, sizes = p[k][mask == k].sum(), p[k][valid].sum() + (mask == k).sum()
            losses.append(1 - 2 * shared / sizes)
        expected.append(torch.stack(losses).mean())
    torch.testing.assert_close(made(images, targets)["loss"], torch.stack(expected).mean())


def test_dice_loss_of_a_perfect_prediction_is_zero() -> None:
    _, targets = batch()
    p = F.one_hot(targets.long(), K).permute(0, 3, 1, 2).float()
    assert dice_loss(p, targets.long()) == 0


def test_terms_are_added_by_their_weights() -> None:
    images, targets = batch(ignored=0.3)
    single = [
        Segmentation(smoothing=0.1),
        Segmentation(cross_entropy=0, dice=1),
        Segmentation(cross_entropy=0, focal=1),
    ]
    terms = [task(spec)(images, targets)["loss"] for spec in single]
    torch.testing.assert_close(task(EVERY_TERM)(images, targets)["loss"], terms[0] + 0.5 * terms[1] + 2 * terms[2])


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_batch_of_ignored_pixels_has_no_loss_and_no_gradient(gamma: float) -> None:
    made, (images, targets) = task(Segmentation(dice=1, focal=1, gamma=gamma, smoothing=0.1), torch.ones(K)), batch()
    loss = made(images, torch.full_like(targets, IGNORED))["loss"]
    loss.backward()
    assert loss == 0
    assert all(torch.count_nonzero(parameter.grad) == 0 for parameter in made.parameters())


def test_gradients_are_finite_where_some_pixels_are_ignored_or_certain() -> None:
    made, (images, targets) = task(Segmentation(dice=1, focal=1, gamma=0.5)), batch(ignored=0.5)
    made.model.head.weight.data *= 1000  # probabilities of exactly 0 and 1
    made(images, targets)["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


def test_the_mean_over_equal_shares_of_a_batch_is_that_of_the_batch() -> None:
    images, targets = batch(ignored=0.6)
    targets[1] = IGNORED
    whole, shares = task(EVERY_TERM), task(EVERY_TERM)
    loss = whole(images, targets)["loss"]
    loss.backward()
    halves = torch.stack([shares(images[part], targets[part])["loss"] for part in (slice(0, 2), slice(2, 4))])
    halves.mean().backward()
    torch.testing.assert_close(halves.mean(), loss)
    for one, two in zip(whole.parameters(), shares.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_logits_of_another_size_are_resized_to_that_of_the_masks() -> None:
    made, (images, targets) = task(stride=2), batch()
    logits = F.interpolate(made.model(images), size=(12, 10), mode="bilinear")
    torch.testing.assert_close(made(images, targets)["loss"], F.cross_entropy(logits, targets.long()))


def test_the_loss_reads_nothing_back_to_the_host() -> None:
    """Tensors of the meta device have no values, so reading one is an error."""
    made, (images, targets) = task(EVERY_TERM, torch.ones(K), stride=2).to("meta"), batch(ignored=0.3)
    loss = made(images.to("meta"), targets.to("meta"))["loss"]
    loss.backward()
    assert loss.shape == ()


def test_the_loss_is_computed_in_float32_under_autocast() -> None:
    made, (images, targets) = task(EVERY_TERM), batch(ignored=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made(images, targets)["loss"]
        expected = made.mask_loss(made.model(images).float(), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_logits_without_targets() -> None:
    made, (images, _) = task(), batch()
    torch.testing.assert_close(made(images)["logits"], made.model(images))


def test_objective_is_registered_and_stored_as_json() -> None:
    assert OBJECTIVES["Segmentation"] is Segmentation
    stored = json.loads(json.dumps(to_json(EVERY_TERM)))
    assert value_from_json(stored, ObjectiveSlot, "objective") == EVERY_TERM


def test_models_of_the_other_kind_are_refused() -> None:
    classifier = vitrail.build(None, patch=8, width=32, depth=1, heads=2, classes=3, image_size=16)
    with pytest.raises(ValueError, match="Segmentation does not support Vision Transformers: use a segmentation model"):
        Segmentation().build(classifier)
    with pytest.raises(
        ValueError, match="Classification does not support tiny models of masks: use the objective Segm"
    ):
        Classification().build(TinyMasks())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cross_entropy": 0.0}, "cross_entropy, dice and focal are all 0"),
        ({"dice": -1.0}, "dice must be >= 0, got -1.0"),
        ({"gamma": float("nan")}, "gamma must be >= 0"),
        ({"smoothing": 1.0}, "smoothing must be >= 0 and < 1"),
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segmentation(**wrong)

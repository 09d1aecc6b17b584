"""Losses, mixing and patch dropout: what is learnt, whoever computes which part."""

import pytest
import torch
import torch.nn.functional as F

from tests.training.made import batch, draw, task
from vitrail.objectives.classification import Classification, mix_pairs


def test_softmax_loss_is_pytorchs_with_smoothing() -> None:
    made = task(Classification(smoothing=0.1))
    images, targets = batch()
    expected = F.cross_entropy(made.model(images), targets, label_smoothing=0.1)
    torch.testing.assert_close(made(images, targets, draw())["loss"], expected)


def test_weighted_loss_counts_rare_classes_more() -> None:
    made = task()
    images, targets = batch()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    weighted = Classification().build(made.model, weights)
    expected = F.cross_entropy(made.model(images), targets, weight=weights, reduction="none").mean()
    torch.testing.assert_close(weighted(images, targets, draw())["loss"], expected)


def test_weights_of_several_labels_count_where_the_label_is() -> None:
    made = task(Classification(loss="sigmoid"))
    images, _ = batch()
    several, weights = (torch.rand(8, 5) > 0.5).float(), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    weighted = Classification(loss="sigmoid").build(made.model, weights)
    expected = F.binary_cross_entropy_with_logits(made.model(images), several, reduction="none", pos_weight=weights)
    torch.testing.assert_close(weighted(images, several, draw())["loss"], expected.sum(1).mean())


def test_weights_of_single_labels_apply_to_the_whole_image() -> None:
    made = task(Classification(loss="sigmoid"))
    images, targets = batch()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    weighted = Classification(loss="sigmoid").build(made.model, weights)
    each = F.binary_cross_entropy_with_logits(made.model(images), F.one_hot(targets, 5).float(), reduction="none").sum(
        1
    )
    torch.testing.assert_close(weighted(images, targets, draw())["loss"], (each * weights[targets]).mean())


def test_sigmoid_loss_is_pytorchs_summed_over_classes() -> None:
    made = task(Classification(loss="sigmoid"))
    images, _ = batch()
    several = (torch.rand(8, 5) > 0.5).float()
    expected = F.binary_cross_entropy_with_logits(made.model(images), several, reduction="none").sum(1).mean()
    torch.testing.assert_close(made(images, several, draw())["loss"], expected)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixed_targets_match_the_mixed_pixels(mixup: float, cutmix: float) -> None:
    """Pictures that are all of one value, their own number: the mean of a mixed one tells how much of whom is in it."""
    b = 16
    images = torch.arange(b).float().view(b, 1, 1, 1).expand(b, 1, 32, 32).clone()
    mixed, targets = mix_pairs(images, torch.eye(b), mixup, cutmix, draw(b))
    numbers = torch.arange(b).float()
    torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ numbers, rtol=0, atol=1e-4)
    torch.testing.assert_close(targets.sum(1), torch.ones(b))
    for row in range(b):
        assert set(torch.nonzero(targets[row]).flatten().tolist()) <= {row, row ^ 1}
    assert (targets.diagonal() < 1).any()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_all_frames_of_a_clip_are_mixed_alike(mixup: float, cutmix: float) -> None:
    """Each frame is mixed as an image with the same random numbers: by one ratio, or in one box."""
    b = 8
    clips = torch.randn(b, 3, 4, 16, 16)
    mixed, targets = mix_pairs(clips, torch.eye(b), mixup, cutmix, draw(b))
    for frame in range(4):
        image, image_targets = mix_pairs(clips[:, :, frame], torch.eye(b), mixup, cutmix, draw(b))
        torch.testing.assert_close(mixed[:, :, frame], image)
        torch.testing.assert_close(targets, image_targets)


def test_last_image_without_a_partner_is_unchanged() -> None:
    images = torch.randn(5, 1, 8, 8)
    mixed, targets = mix_pairs(images, torch.eye(5), 0.8, 1.0, draw(5))
    torch.testing.assert_close(mixed[4], images[4])
    torch.testing.assert_close(targets[4], torch.eye(5)[4])


def test_parts_of_a_batch_mix_and_drop_as_the_whole_does() -> None:
    spec = Classification(mixup=0.8, cutmix=1.0, patch_dropout=0.5)
    made = task(spec).eval()
    images, targets = batch()
    whole = made(images, targets, draw(8))["loss"]
    halves = [made(images[a : a + 4], targets[a : a + 4], draw(4, first=a, total=8))["loss"] for a in (0, 4)]
    torch.testing.assert_close(torch.stack(halves).mean(), whole)


def test_patch_dropout_keeps_other_patches_each_step() -> None:
    made = task(Classification(patch_dropout=0.75))
    images, _ = batch()
    first, second = made.draw_kept_patches(images, draw(step=0)), made.draw_kept_patches(images, draw(step=1))
    assert first.shape == (8, 4)
    assert (first.diff(dim=1) > 0).all()
    assert not torch.equal(first, second)


def test_patch_dropout_is_for_training_alone() -> None:
    made = task(Classification(patch_dropout=0.5)).eval()
    images, _ = batch()
    torch.testing.assert_close(made(images)["logits"], made.model(images))


def test_resnets_have_no_patches_to_drop() -> None:
    import vitrail

    model = vitrail.build("R14x0.25", classes=5, image_size=32, root="small")
    with pytest.raises(ValueError, match="patch_dropout does not support BiT ResNets"):
        Classification(patch_dropout=0.5).build(model)


@pytest.mark.parametrize("wrong", [{"loss": "hinge"}, {"smoothing": 1.0}, {"mixup": -1.0}, {"patch_dropout": 1.0}])
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Classification(**wrong)


def test_a_loss_without_random_numbers_is_refused() -> None:
    made, (images, targets) = task(), batch()
    assert set(made(images)) == {"logits"}
    with pytest.raises(ValueError, match="the loss needs draw"):
        made(images, targets)

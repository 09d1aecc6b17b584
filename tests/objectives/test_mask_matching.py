"""The matching loss of segmentation by queries."""

import pytest
import torch

import vitrail
from vitrail.data.dataset import IGNORED
from vitrail.data.rng import StepRandom
from vitrail.models.base import Unsupported
from vitrail.models.eomt import EoMT, QueryLogits
from vitrail.models.registry import build_segmenter
from vitrail.objectives.base import LossInputs
from vitrail.objectives.mask_matching import (
    MaskMatching,
    MaskTargets,
    Points,
    choose_points,
    compute_mask_probability,
    count_masks,
    match_queries,
    matching_loss,
    sample_wanted,
    sample_weights,
    split_masks,
)

VIT = {"patch": 8, "width": 32, "depth": 3, "heads": 2, "image_size": 32}
SPEC = MaskMatching(points=40)
CPU = torch.device("cpu")


def build_loss(steps=10):
    torch.manual_seed(0)
    model = build_segmenter(decoder=EoMT(queries=4, blocks=2, upscales=1), classes=3, **VIT)
    return SPEC.build_loss(model, LossInputs(steps, vitrail.Preprocessing()))


def draw_batch(n=4):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 3, (n, 2, 2), generator=generator, dtype=torch.uint8)
    targets = targets.repeat_interleave(16, 1).repeat_interleave(16, 2)
    images = torch.randn(n, 3, 32, 32, generator=generator) * 0.1 + targets[:, None]
    return images, targets


def test_masks_of_the_classes_of_an_image():
    target = torch.tensor([[[0, 2], [2, IGNORED]], [[IGNORED] * 2] * 2], dtype=torch.uint8)
    some, none = split_masks(target)
    assert some.classes.tolist() == [0, 2]
    assert some.masks.tolist() == [[[True, False], [False, False]], [[False, True], [True, False]]]
    assert some.ignored.tolist() == [[False, False], [False, True]]
    assert none.masks.shape == (0, 2, 2)


def test_queries_are_matched_to_their_masks():
    wanted = torch.eye(3, 40)
    masks = (wanted[[2, 0, 1]] - 0.5) * 20
    classes = torch.zeros(3, 4)
    queries, found = match_queries(SPEC, masks, classes, wanted, torch.tensor([0, 1, 2]), torch.ones(40))
    assert queries.tolist() == [0, 1, 2]
    assert found.tolist() == [2, 0, 1]
    masks[0] = torch.nan  # not an error: it takes what is left
    assert match_queries(SPEC, masks, classes, wanted, torch.tensor([0, 1, 2]), torch.ones(40))[1].tolist() == [2, 0, 1]


def test_uncertain_candidates_are_chosen():
    columns = torch.linspace(-4, 4, 16).expand(1, 16, 16)  # 0 in the middle of the width
    candidates = torch.rand(1, 120, 2, generator=torch.Generator().manual_seed(0))
    chosen = choose_points(SPEC, columns, candidates, torch.zeros(1, 10, 2), torch.zeros(16, 16, dtype=torch.bool))
    assert chosen.shape == (1, 40, 2)
    near = (chosen[0, :30, 0] - 0.5).abs().max()
    assert near <= (candidates[0, :, 0] - 0.5).abs().sort().values[29] + 1e-6
    assert not chosen[0, 30:].any()


def test_a_perfect_prediction_has_almost_no_loss():
    _, targets = draw_batch(2)
    wanted = split_masks(targets)
    masks, classes = torch.full((2, 4, 32, 32), -20.0), torch.zeros(2, 4, 4)
    classes[:, :, -1] = 20.0
    for image, (found, labels, _) in enumerate(wanted):
        masks[image, : len(found)] = (found.float() - 0.5) * 40
        classes[image, torch.arange(len(labels)), labels] = 40.0
    centres = torch.cartesian_prod(*[torch.tensor([0.25, 0.75])] * 2).expand(2, -1, -1)  # of the four squares
    points, spec = Points(centres, centres, centres), MaskMatching(points=4, uncertain=0.0)
    counts = torch.full((2,), float(sum(len(found.classes) for found in wanted)))
    assert matching_loss(spec, QueryLogits(masks, classes), points, wanted, counts) < 0.01
    assert matching_loss(spec, QueryLogits(-masks, classes), points, wanted, counts) > 10


def test_ignored_pixels_change_no_matching_and_no_gradient():
    generator = torch.Generator().manual_seed(0)
    targets = torch.zeros(1, 16, 16, dtype=torch.uint8)
    targets[:, :, 4:8], targets[:, :, 8:] = 1, IGNORED
    wanted, counts = split_masks(targets), torch.tensor([2.0, 2.0])
    masks, classes = torch.randn(1, 4, 16, 16, generator=generator), torch.randn(1, 4, 4, generator=generator)
    points = Points(*(torch.rand(1, n, 2, generator=generator) for n in (40, 120, 10)))
    masks.requires_grad_()
    loss = matching_loss(SPEC, QueryLogits(masks, classes), points, wanted, counts)
    (gradient,) = torch.autograd.grad(loss, masks)
    # A point between the two halves is of both: the logits next to the counted half count, those behind do not.
    assert not gradient[..., 9:].any()
    assert gradient[..., :8].any()

    inside, outside = (masks.detach().index_fill(3, torch.arange(9, 16), value) for value in (50.0, -50.0))
    losses = [matching_loss(SPEC, QueryLogits(part, classes), points, wanted, counts) for part in (inside, outside)]
    torch.testing.assert_close(*losses)
    counted = [MaskTargets(part.masks, part.classes, torch.zeros_like(part.ignored)) for part in wanted]
    losses = [matching_loss(SPEC, QueryLogits(part, classes), points, counted, counts) for part in (inside, outside)]
    assert losses[0] > 2 * losses[1]


def test_values_between_ignored_pixels_are_those_of_the_others():
    ignored = torch.tensor([[False, True]])
    between = torch.tensor([[[0.5, 0.5]]])  # as near to the one as to the other
    weights = sample_weights(ignored, between)
    assert weights.item() == 0.5
    assert sample_wanted(torch.tensor([[[1.0, 0.0]]]), between, weights).item() == 1.0


def test_masking_ends_block_by_block():
    assert compute_mask_probability(0.0, 2) == [1.0, 1.0]
    assert compute_mask_probability(0.25, 2) == [1.0, 1.0]
    assert compute_mask_probability(0.375, 2) == [pytest.approx(0.5**0.9), 1.0]
    assert compute_mask_probability(0.5, 2) == [0.0, 1.0]
    assert compute_mask_probability(0.75, 2) == [0.0, 0.0]
    assert compute_mask_probability(1.0, 2) == [0.0, 0.0]


def test_the_loss_is_a_function_of_the_step_and_trains_every_parameter():
    task, (images, targets) = build_loss().train(), draw_batch()
    losses = [task(images, targets, StepRandom(0, step, 0, 4, 4, CPU))["loss"] for step in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]
    losses[0].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in task.parameters())


def test_logits_are_of_every_pixel():
    task, (images, _) = build_loss().eval(), draw_batch()
    logits = task(images)["logits"]
    assert logits.shape == (4, 3, 32, 32)
    torch.testing.assert_close(logits.softmax(1).sum(1), torch.ones(4, 32, 32))


def test_images_without_masks_train_no_object():
    task = build_loss().train()
    images, targets = draw_batch()
    targets.fill_(IGNORED)
    loss = task(images, targets, StepRandom(0, 3, 0, 4, 4, CPU))["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    assert task.model.head.classifier.weight.grad.any()


@pytest.mark.parametrize("first", [1, IGNORED])
def test_parts_of_a_batch_have_its_loss_if_masks_of_the_whole_are_counted(first):
    """Micro-batches and processes: the loss is their mean, weighted by images; a part may have no masks."""
    task, (images, targets) = build_loss(), draw_batch()
    targets[:1] = first  # one mask or none in the first image, three in each of the others
    targets[1:, 0], targets[1:, 1], targets[1:, 2:] = 0, 1, 2
    whole = task(images, targets, StepRandom(0, 3, 0, 4, 4, CPU))["loss"]

    def compute_mean():
        parts = [
            task(images[a:b], targets[a:b], StepRandom(0, 3, a, b - a, 4, CPU))["loss"] * (b - a) / 4
            for a, b in ((0, 1), (1, 4))
        ]
        return torch.stack(parts).sum()

    assert not torch.isclose(compute_mean(), whole)
    others = count_masks(targets[1:], 4)
    task.count_batch(targets[:1], lambda counts: counts + others)  # of two processes
    torch.testing.assert_close(compute_mean(), whole)


def test_masks_are_counted():
    targets = torch.tensor([[[0, 2], [2, IGNORED]], [[0, 1], [2, 3]], [[IGNORED] * 2] * 2], dtype=torch.uint8)
    assert count_masks(targets, 3).tolist() == [6, 5]


def test_other_models_and_settings_are_refused():
    with pytest.raises(Unsupported, match="needs queries: use decoder='eomt', got LinearDecoder"):
        SPEC.check_model(build_segmenter(classes=3, **VIT))
    for settings in ({"points": 0}, {"uncertain": 1.5}, {"mask_weight": -1.0}, {"no_object": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            MaskMatching(**settings)

"""Token labels: where they come from, what they cost, and how they move with their tokens."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.training.made import draw
from vitrail.data.cache import MapShape
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.vit import ViT
from vitrail.objectives.teacher import Teacher, align_labels, identity_transforms, map_shape, top_scores
from vitrail.objectives.token_labelling import (
    TokenLabeller,
    TokenLabelling,
    blend_labels,
    draw_boxes,
    embed_mixed,
    swap_patches,
)

CPU = torch.device("cpu")
STUDENT = Preprocessing((16, 16), (16, 16), mean=(0.5,), std=(0.5,))
WHOLE, MIRRORED = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), ((-1.0, 0.0, 1.0), (0.0, 1.0, 0.0))


def small(**slots: object) -> ViT:
    """A model whose heads are not zero."""
    given: dict[str, object] = {"patch": 4, "width": 16, "depth": 2, "heads": 2, "classes": 5, "image_size": 16}
    model = vitrail.build(None, **(given | {"channels": 1} | slots))
    assert isinstance(model, ViT)
    assert isinstance(model.head, torch.nn.Linear)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


def teacher(**slots: object) -> Teacher:
    model = small(**({"width": 24, "heads": 3} | slots))
    return Teacher(model, Preprocessing(model.config.image_size, model.config.image_size, mean=(0.4,), std=(0.3,)))


def a_map(b: int, h: int, w: int, top: int = 3, count: int = 5) -> tuple[Tensor, Tensor]:
    return top_scores(3 * torch.randn(b, h, w, count), top)


def dense(classes: Tensor, scores: Tensor, count: int = 5) -> np.ndarray:
    """A map written out, [B, h, w, K]."""
    found = np.zeros((*classes.shape[:3], count))
    for place in np.ndindex(*classes.shape):
        found[(*place[:3], int(classes[place]))] += float(scores[place])
    return found


def by_hand(full: np.ndarray, place: np.ndarray, grid: tuple[int, int], points: tuple[int, int]) -> np.ndarray:
    """One picture's labels, [h, w, K], by loops: the mean of the points of each patch, each between four cells."""
    (h, w, _), out = full.shape, np.zeros((*grid, full.shape[2]))
    for row, column in np.ndindex(*grid):
        for i, j in np.ndindex(*points):
            y, x = (row + (i + 0.5) / points[0]) / grid[0], (column + (j + 0.5) / points[1]) / grid[1]
            across, down = place @ np.array([x, y, 1.0])
            v, u = np.clip(down * h - 0.5, 0, h - 1), np.clip(across * w - 0.5, 0, w - 1)
            for r, c in ((r, c) for r in range(h) for c in range(w)):
                out[row, column] += full[r, c] * max(0.0, 1 - abs(v - r)) * max(0.0, 1 - abs(u - c)) / np.prod(points)
    return out


# Alignment


def test_whole_image_gives_the_map_itself() -> None:
    classes, scores = a_map(2, 4, 6)
    found = align_labels(classes, scores, identity_transforms(2, CPU), (4, 6), 5)
    np.testing.assert_allclose(found.view(2, 4, 6, 5).numpy(), dense(classes, scores), rtol=0, atol=1e-6)


def test_a_flipped_sample_has_the_mirrored_map() -> None:
    classes, scores = a_map(2, 4, 6)
    places = torch.tensor([MIRRORED, WHOLE])
    found = align_labels(classes, scores, places, (4, 6), 5).view(2, 4, 6, 5).numpy()
    expected = dense(classes, scores)
    np.testing.assert_allclose(found[0], expected[0][:, ::-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-6)


def test_a_crop_along_cells_is_cut_from_the_map() -> None:
    classes, scores = a_map(1, 8, 8)
    place = torch.tensor([[(4 / 8, 0.0, 1 / 8), (0.0, 4 / 8, 2 / 8)]])  # rows 2 to 5, columns 1 to 4
    cut = dense(classes, scores)[0, 2:6, 1:5]
    # Two points along a patch's side, for the map is finer than the patches: a cell at most away from the middle of one.
    found = align_labels(classes, scores, place, (4, 4), 5).view(4, 4, 5).numpy()
    expected = by_hand(dense(classes, scores)[0], place[0].numpy(), (4, 4), (2, 2))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    coarse = (
        align_labels(classes[:, 2:6, 1:5], scores[:, 2:6, 1:5], identity_transforms(1, CPU), (4, 4), 5)
        .view(4, 4, 5)
        .numpy()
    )
    np.testing.assert_allclose(coarse, cut, rtol=0, atol=1e-6)


def test_a_finer_map_is_averaged_over_each_patch() -> None:
    classes, scores = a_map(1, 8, 12)
    found = align_labels(classes, scores, identity_transforms(1, CPU), (4, 4), 5).view(4, 4, 5).numpy()
    expected = dense(classes, scores)[0].reshape(4, 2, 4, 3, 5).mean((1, 3))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("cells", "grid"), [((7, 7), (4, 4)), ((3, 5), (4, 4)), ((1, 1), (2, 3)), ((4, 4), (6, 6))])
def test_any_region_equals_explicit_loops(cells: tuple[int, int], grid: tuple[int, int]) -> None:
    classes, scores = a_map(3, *cells)
    places = torch.tensor([WHOLE] * 3) + 0.4 * torch.randn(3, 2, 3)  # turned, sheared, and partly outside
    found = align_labels(classes, scores, places, grid, 5).view(3, *grid, 5).numpy()
    points = (-(-cells[0] // grid[0]), -(-cells[1] // grid[1]))
    for row in range(3):
        expected = by_hand(dense(classes, scores)[row], places[row].double().numpy(), grid, points)
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=1e-5)


def test_labels_are_distributions_though_scores_are_kept_in_half_precision() -> None:
    classes, scores = a_map(2, 5, 5)
    found = align_labels(classes, scores.half(), torch.tensor([WHOLE, MIRRORED]) * 0.7, (4, 4), 5)
    torch.testing.assert_close(found.sum(2), torch.ones(2, 16))


def test_top_scores_do_not_depend_on_an_offset_of_the_logits() -> None:
    logits = torch.randn(1, 2, 2, 5)
    for shift in (-40.0, 0.0, 40.0):
        classes, scores = top_scores(logits + shift, 3)
        expected = logits.softmax(-1).sort(-1, descending=True)
        assert torch.equal(classes, expected.indices[..., :3])
        torch.testing.assert_close(scores, expected.values[..., :3] / expected.values[..., :3].sum(-1, keepdim=True))


# MixToken


def test_tokens_are_swapped_and_keep_their_positions() -> None:
    model, images = small(), torch.randn(6, 1, 16, 16)
    box = draw_boxes((4, 4), 1.0, draw(6))
    assert box.any()
    assert not box.all()
    plain, mixed = model.tokens(images), embed_mixed(model, images, box)
    torch.testing.assert_close(mixed[:, 0], plain[:, 0])  # the class token is everybody's
    for i in range(6):
        for n in range(16):
            source = i ^ 1 if box[i, n] else i
            # The neighbour's patch with this place's position: exactly the neighbour's token.
            torch.testing.assert_close(mixed[i, 1 + n], plain[source, 1 + n])


def test_both_of_a_pair_have_one_box_and_a_single_last_one_has_none() -> None:
    box = draw_boxes((6, 8), 1.0, draw(7)).view(7, 6, 8)
    for i in (0, 2, 4):
        assert torch.equal(box[i], box[i + 1])
    assert not box[6].any()
    for each in box[:6]:
        rows, columns = each.any(1), each.any(0)
        assert torch.equal(each, rows[:, None] & columns[None, :])  # a rectangle
        for side in (rows, columns):
            held = side.nonzero().flatten()
            assert len(held) == 0 or len(held) == int(held[-1] - held[0]) + 1


def test_parts_of_a_batch_have_the_boxes_of_the_whole() -> None:
    together = draw_boxes((4, 4), 1.0, draw(8))
    apart = [draw_boxes((4, 4), 1.0, draw(4, first, 8)) for first in (0, 4)]
    assert torch.equal(together, torch.cat(apart))
    assert not torch.equal(together, draw_boxes((4, 4), 1.0, draw(8, step=1)))


def test_labels_are_mixed_by_area_and_token_labels_move() -> None:
    box = torch.zeros(2, 16, dtype=torch.bool)
    box[:, [0, 1, 4, 5]] = True
    torch.testing.assert_close(blend_labels(torch.eye(2), box), torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
    labels = torch.randn(2, 16, 5)
    moved = swap_patches(labels, box)
    for n in range(16):
        assert torch.equal(moved[0, n], labels[1 if n in (0, 1, 4, 5) else 0, n])


def test_boxes_cover_what_beta_draws() -> None:
    """Of Beta(1, 1) the box is half of the picture on average, less what is cut off at the border: CutMix's numbers."""
    share = draw_boxes((32, 32), 1.0, draw(2000)).float().mean(1)
    assert 0.25 < share.mean() < 0.35
    assert share.max() > 0.8


# The loss


def targets_of(shape: MapShape, labels: Tensor, places: Tensor, classes: Tensor, scores: Tensor) -> Tensor:
    parts = [labels[:, None].float(), places.flatten(1), classes.flatten(1).float(), scores.flatten(1).float()]
    found = torch.cat(parts, 1)
    assert found.shape[1] == 1 + shape.n_columns
    return found


def norm(z: np.ndarray, model: ViT) -> np.ndarray:
    layer = model.pool.norm
    assert isinstance(layer, torch.nn.LayerNorm)
    weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    z = z - z.mean(-1, keepdims=True)
    return z / np.sqrt((z**2).mean(-1, keepdims=True) + layer.eps) * weight + bias


def logs(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_loss_is_that_of_an_independent_version(pool: str) -> None:
    model = small(pool=pool, prefix="class" if pool == "class" else "none").double()
    made = TokenLabelling(beta=0.7, top=3, mix_token=0.0, smoothing=0.1).build(
        model, torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]), teacher(), STUDENT, cached=True
    )
    torch.nn.init.normal_(made.head.weight, std=0.3)
    torch.nn.init.normal_(made.head.bias, std=0.3)
    made = made.double()
    images, labels = torch.randn(3, 1, 16, 16).double(), torch.tensor([1, 4, 3])
    classes, scores = a_map(3, 4, 4)
    places = torch.tensor([WHOLE, MIRRORED, ((0.5, 0.0, 0.2), (0.0, 0.6, 0.1))])
    loss = made(images, targets_of(made.shape, labels, places, classes, scores), draw(3))["loss"]

    z = norm(model.hidden_states(images)[0].detach().numpy(), model)
    prefix = model.config.prefix.count
    pooled = z[:, 0] if pool == "class" else z[:, prefix:].mean(1)
    state = {name: tensor.numpy() for name, tensor in made.state_dict().items()}
    weight, bias = state["model.head.weight"], state["model.head.bias"]
    token_weight, token_bias = state["head.weight"], state["head.bias"]
    wanted = np.eye(5)[labels] * 0.9 + 0.1 / 5
    rare = np.array([2.0, 1.0, 0.5])
    of_pictures = (-(wanted * logs(pooled @ weight.T + bias)).sum(1) * rare).mean()
    full = dense(classes, scores)
    soft = np.stack([by_hand(full[i], places[i].double().numpy(), (4, 4), (1, 1)).reshape(16, 5) for i in range(3)])
    of_tokens = -(soft * logs(z[:, prefix:] @ token_weight.T + token_bias)).sum(2).mean()
    np.testing.assert_allclose(loss.item(), of_pictures + 0.7 * of_tokens, rtol=1e-5)


def test_mixed_loss_is_the_published_one_with_outputs_put_back() -> None:
    """The authors leave token labels where they are and put the tokens' answers back: the same number."""
    model, spec = small(), TokenLabelling(top=3)
    made = spec.build(model, None, teacher(), STUDENT, cached=True)
    torch.nn.init.normal_(made.head.weight, std=0.3)
    images, labels = torch.randn(4, 1, 16, 16), torch.tensor([0, 1, 2, 3])
    classes, scores = a_map(4, 4, 4)
    loss = made(images, targets_of(made.shape, labels, identity_transforms(4, CPU), classes, scores), draw(4))["loss"]

    box = draw_boxes((4, 4), 1.0, draw(4))
    z = model.pool.norm(model.encode(embed_mixed(model, images, box)))
    back = swap_patches(made.head(z[:, 1:]), box)
    soft = align_labels(classes, scores, identity_transforms(4, CPU), (4, 4), 5)
    of_tokens = -(soft * back.log_softmax(2)).sum(2).mean()
    share = 1 - box.float().mean(1)
    answers = model.head(z[:, 0])
    own = F.cross_entropy(answers, labels, reduction="none")
    theirs = F.cross_entropy(answers, labels.flip(0).view(2, 2).flip(0).flatten(), reduction="none")
    expected = (share * own + (1 - share) * theirs).mean() + 0.5 * of_tokens
    torch.testing.assert_close(loss, expected)


def test_online_teacher_labels_the_students_samples() -> None:
    master, model = teacher(), small()
    made = TokenLabelling(top=5, mix_token=0.0).build(model, None, master, STUDENT)
    images = torch.randn(2, 1, 16, 16).clamp(-1, 1)
    _, found = made.split_targets(images, torch.tensor([0, 1]))
    seen = ((images * 0.5 + 0.5) - 0.4) / 0.3
    expected = master.model.dense_logits(seen).softmax(-1).flatten(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    losses = made(images, torch.tensor([0, 1]), draw(2))
    losses["loss"].backward()
    assert all(p.grad is None for p in master.model.parameters())
    assert all(p.grad is not None for p in made.parameters())
    assert not any(name.startswith("teacher") for name in made.state_dict())


@pytest.mark.parametrize("stages", [(1, 1), (1, 1, 1)])
@pytest.mark.parametrize("root", ["large", "small"])
def test_resnet_maps_have_the_declared_shape(stages: tuple[int, ...], root: str) -> None:
    from vitrail.models.bit import BiTConfig
    from vitrail.models.registry import build_from

    model = build_from(BiTConfig(stages, 0.25, 1, 5, (36, 28), root))  # type: ignore[arg-type]
    master = Teacher(model, Preprocessing((36, 28), (36, 28), mean=(0.5,), std=(0.5,)))
    maps = master.dense_logits(torch.randn(1, 1, 16, 16), (0.5,), (0.5,))
    assert tuple(maps.shape[1:3]) == map_shape(master, 5).grid


def test_vit_maps_have_the_declared_shape() -> None:
    master = teacher(image_size=(24, 16))
    assert map_shape(master, 9) == MapShape((6, 4), 5, 5)
    assert tuple(master.dense_logits(torch.randn(1, 1, 16, 16), (0.5,), (0.5,)).shape) == (1, 6, 4, 5)


def test_parts_of_a_batch_have_the_loss_of_the_whole() -> None:
    made = TokenLabelling().build(small(), None, teacher(), STUDENT).eval()
    images, labels = torch.randn(8, 1, 16, 16), torch.arange(8) % 5
    together = made(images, labels, draw(8))["loss"]
    apart = [made(images[a : a + 4], labels[a : a + 4], draw(4, a, 8))["loss"] for a in (0, 4)]
    torch.testing.assert_close(together, (apart[0] + apart[1]) / 2)


def test_without_targets_the_logits_are_returned() -> None:
    made = TokenLabelling().build(small(), None, teacher(), STUDENT)
    images = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(made(images)["logits"], made.model(images))


@pytest.mark.parametrize("position", ["learned1d", "sincos2d", "rotary2d", "relative"])
def test_every_position_and_stem_can_be_trained(position: str) -> None:
    made: TokenLabeller = TokenLabelling().build(small(position=position, embed="conv-stem"), None, teacher(), STUDENT)
    loss = made(torch.randn(4, 1, 16, 16), torch.arange(4), draw(4))["loss"]
    loss.backward()
    assert loss.isfinite()


def test_token_loss_falls_in_training() -> None:
    torch.manual_seed(0)
    made = TokenLabelling().build(small(), None, teacher(), STUDENT)
    optimizer = torch.optim.AdamW(made.parameters(), 3e-3)
    images, labels = torch.randn(16, 1, 16, 16), torch.arange(16) % 5
    seen = []
    for step in range(40):
        losses = made(images, labels, draw(16, step=step))
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        seen.append(losses["tokens"].item())
    assert seen[0] == pytest.approx(np.log(5), abs=1e-4)  # its head begins at zero
    assert np.mean(seen[-5:]) < seen[0] - 0.05  # 0.15 lower where measured


# What cannot work


def test_invalid_students_and_teachers_are_refused() -> None:
    from vitrail.models.bit import BiTConfig
    from vitrail.models.registry import build_from

    spec = TokenLabelling()
    with pytest.raises(ValueError, match="token labelling does not support BiT ResNets"):
        spec.build(build_from(BiTConfig((1,), 0.25, 1, 5, (16, 16), "small")), None, teacher(), STUDENT)
    with pytest.raises(ValueError, match="the teacher has 7 classes and the student 5"):
        spec.build(small(), None, teacher(classes=7), STUDENT)
    with pytest.raises(ValueError, match="has no classifier"):
        spec.build(
            small(),
            None,
            Teacher(vitrail.build(None, patch=4, width=16, depth=1, heads=2, classes=None, image_size=16), STUDENT),
            STUDENT,
        )
    with pytest.raises(ValueError, match="give teacher=MODEL"):
        spec.build(small())


def test_targets_of_another_grid_are_refused() -> None:
    made = TokenLabelling(top=3).build(small(), None, teacher(), STUDENT, cached=True)
    classes, scores = a_map(2, 5, 5)
    other = targets_of(MapShape((5, 5), 3, 5), torch.tensor([0, 1]), identity_transforms(2, CPU), classes, scores)
    with pytest.raises(ValueError, match="map of 4×4 cells with 3 classes"):
        made(torch.randn(2, 1, 16, 16), other, draw(2))
    with pytest.raises(ValueError, match="map of 4×4 cells"):
        made(torch.randn(2, 1, 16, 16), torch.tensor([0, 1]), draw(2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top": 0}, "must be >= 1"),
        ({"beta": 0.0}, "must be > 0"),
        ({"mix_token": -1.0}, "must be >= 0"),
        ({"mixup": 0.8}, "use mix_token"),
        ({"cutmix": 1.0}, "use mix_token"),
        ({"loss": "sigmoid"}, "softmax"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenLabelling(**settings)  # type: ignore[arg-type]

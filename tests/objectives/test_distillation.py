"""Learning from a teacher's answers: DeiT's losses, what the teacher is shown, and that nobody trains it."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.objectives.taught import CLASSES, OURS, batch, draw, model, residual, teacher
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.vit import ViT
from vitrail.nn.head import DistilledHead, TanhHead
from vitrail.objectives.classification import mix_pairs
from vitrail.objectives.distillation import Distillation, Distiller, join_targets, split_targets
from vitrail.objectives.teacher import Teacher

ALL = 1 - 1e-9  # of the loss is the teacher's: no more is left of the labels than rounding takes away


def built(spec: Distillation, cached: bool = False, distilled: bool = True) -> Distiller:
    student = model(prefix="class+distillation") if distilled else model()
    return spec.build(student, None, teacher(), OURS, cached)


def heads(task: Distiller, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each head says, by the model's public parts."""
    assert isinstance(task.model, ViT)
    assert isinstance(task.model.head, DistilledHead)
    return task.model.head.forward_heads(task.model.pool(task.model.hidden_states(images)[0]))


def published(kind: str, label: torch.Tensor, distilled: torch.Tensor, said: torch.Tensor, alpha: float, t: float):
    """Formulated independently, after the description of DeiT's DistillationLoss, in NumPy; labels come in one-hot."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    def loss(labels: np.ndarray) -> float:
        ours, taught, theirs = (x.detach().double().numpy() for x in (label, distilled, said))
        base = -(labels * log_softmax(ours)).sum(1).mean()
        if kind == "hard":
            lesson = -log_softmax(taught)[np.arange(len(taught)), theirs.argmax(1)].mean()
        else:
            p, q = log_softmax(theirs / t), log_softmax(taught / t)
            lesson = (np.exp(p) * (p - q)).sum() * t * t / taught.size
        return float((1 - alpha) * base + alpha * lesson)

    return loss


@pytest.mark.parametrize(("alpha", "temperature"), [(0.5, 1.0), (0.1, 3.0), (0.9, 2.0)])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_the_loss_is_deits(kind: str, alpha: float, temperature: float) -> None:
    task = built(Distillation(kind=kind, alpha=alpha, temperature=temperature))  # pyright: ignore[reportArgumentType]
    images, labels = batch()
    label, distilled = heads(task, images)
    said = task.teacher.logits(images, OURS.mean, OURS.std)
    expected = published(kind, label, distilled, said, alpha, temperature)(np.eye(CLASSES)[labels.numpy()])
    found = task(images, labels, draw())["loss"]
    assert found.item() == pytest.approx(expected, rel=1e-5)

    # and by PyTorch's own functions
    if kind == "hard":
        lesson = F.cross_entropy(distilled, said.argmax(1))
    else:
        p, q = (said / temperature).log_softmax(1), (distilled / temperature).log_softmax(1)
        lesson = F.kl_div(q, p, reduction="sum", log_target=True) * temperature**2 / distilled.numel()
    torch.testing.assert_close(found, (1 - alpha) * F.cross_entropy(label, labels) + alpha * lesson)


def test_divergence_per_image_is_the_papers_equation() -> None:
    images, labels = batch()
    task = built(Distillation(kind="soft", alpha=ALL, per="picture"))
    said = task.teacher.logits(images, OURS.mean, OURS.std)
    q, p = (heads(task, images)[1] / 3).log_softmax(1), (said / 3).softmax(1)
    expected = 9 * F.kl_div(q, p, reduction="batchmean")
    torch.testing.assert_close(task(images, labels, draw())["loss"], expected)


def test_each_head_learns_from_its_own_source() -> None:
    images, labels = batch()
    found = []
    for given in (labels, labels.roll(1)):
        task = built(Distillation())
        task(images, given, draw())["loss"].backward()
        assert isinstance(task.model.head, DistilledHead)
        found.append((task.model.head.label.weight.grad, task.model.head.teacher.weight.grad))
    (label, taught), (other_label, other_taught) = found
    assert not torch.equal(label, other_label)
    assert torch.equal(taught, other_taught)
    assert taught.any()


def test_untrained_label_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"label head untrained: set objective\.alpha below 1"):
        built(Distillation(alpha=1.0))
    Distillation(alpha=1.0).build(model(), None, teacher(), OURS)  # one head learns from the teacher alone


@pytest.mark.parametrize("student", ["one token", "ResNet"])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_student_with_one_head_learns_both_with_it(student: str, kind: str) -> None:
    images, labels = batch()
    made = residual() if student == "ResNet" else model()
    task = Distillation(kind=kind, alpha=0.3).build(made, None, teacher(), OURS)  # pyright: ignore[reportArgumentType]
    answers = made(images)
    said = task.teacher.logits(images, OURS.mean, OURS.std)
    expected = published(kind, answers, answers, said, 0.3, 3.0)(np.eye(CLASSES)[labels.numpy()])
    assert task(images, labels, draw())["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_resnet_teacher() -> None:
    images, labels = batch()
    taught = Teacher(residual(), OURS)
    task = Distillation(alpha=1.0).build(model(), None, taught, OURS)
    expected = F.cross_entropy(task.model(images), taught.model(images).argmax(1))
    torch.testing.assert_close(task(images, labels, draw())["loss"], expected)


def test_online_teacher_sees_mixed_images() -> None:
    images, labels = batch()
    task = built(Distillation(mixup=0.8, cutmix=1.0, alpha=0.4))
    mixed, wanted = mix_pairs(images, F.one_hot(labels, CLASSES).float(), 0.8, 1.0, draw())
    label, distilled = heads(task, mixed)
    said = task.teacher.logits(mixed, OURS.mean, OURS.std)
    expected = published("hard", label, distilled, said, 0.4, 1.0)(wanted.double().numpy())
    assert task(images, labels, draw())["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_cached_logits_are_mixed_like_labels() -> None:
    images, labels = batch()
    spec = Distillation(kind="soft", mixup=0.8, alpha=ALL, temperature=2.0, per="picture")
    task = built(spec, cached=True)
    said = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(5))
    mixed, taught = mix_pairs(images, (said / 2).softmax(1), 0.8, 0.0, draw())
    expected = 4 * F.kl_div((heads(task, mixed)[1] / 2).log_softmax(1), taught, reduction="batchmean")
    targets = torch.from_numpy(join_targets(labels.numpy(), said.numpy()))
    torch.testing.assert_close(task(images, targets, draw())["loss"], expected)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("several", [False, True])
def test_cached_logits_give_the_online_loss(kind: str, several: bool) -> None:
    images, labels = batch()
    given = (torch.rand(8, CLASSES) > 0.5).float() if several else labels
    spec = Distillation(loss="sigmoid" if several else "softmax", kind=kind)  # pyright: ignore[reportArgumentType]
    asked, told = built(spec), built(spec, cached=True)
    said = asked.teacher.logits(images, OURS.mean, OURS.std)
    targets = torch.from_numpy(join_targets(given.numpy(), said.numpy()))
    torch.testing.assert_close(told(images, targets, draw())["loss"], asked(images, given, draw())["loss"])


def test_joined_targets_are_split_again() -> None:
    said = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for labels, classes in ((np.array([2, 0, 1, 2]), 3), (np.eye(4, 3, dtype=np.uint8), 3), (np.ones((4, 1)), 1)):
        found, back = split_targets(torch.from_numpy(join_targets(labels, said)), 3, classes)
        assert found is not None
        assert np.array_equal(found.numpy(), labels)
        assert np.array_equal(back.numpy(), said)
    nothing, back = split_targets(torch.from_numpy(join_targets(None, said)), 3, None)
    assert nothing is None
    assert np.array_equal(back.numpy(), said)


def test_sigmoids_follow_the_teacher_class_by_class() -> None:
    images, _ = batch()
    several = (torch.rand(8, CLASSES) > 0.5).float()
    task = built(Distillation(loss="sigmoid", kind="soft", alpha=ALL, temperature=2.0, per="picture"))
    said = task.teacher.logits(images, OURS.mean, OURS.std)
    p, q = (said / 2).sigmoid(), (heads(task, images)[1] / 2).sigmoid()
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(task(images, several, draw())["loss"], 4 * divergence.sum(1).mean(), rtol=1e-4, atol=0)


def test_halves_of_a_batch_have_the_loss_of_the_whole() -> None:
    images, labels = batch()
    task = built(Distillation(mixup=0.8, patch_dropout=0.5))
    whole = task(images, labels, draw())["loss"]
    halves = [task(images[a : a + 4], labels[a : a + 4], draw(4, a, 8))["loss"] for a in (0, 4)]
    torch.testing.assert_close(sum(halves) / 2, whole)


def test_the_teacher_is_frozen_and_in_no_state() -> None:
    images, labels = batch()
    task = built(Distillation()).train()
    before = {name: tensor.clone() for name, tensor in task.teacher.model.state_dict().items()}
    assert all(name.startswith("model.") for name in task.state_dict())
    assert not task.teacher.model.training
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    task(images, labels, draw())["loss"].backward()
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.teacher.model.state_dict().items())
    assert all(parameter.grad is None for parameter in task.teacher.model.parameters())
    mine = {id(parameter) for parameter in task.parameters()}
    assert not any(id(parameter) in mine for parameter in task.teacher.model.parameters())


@pytest.mark.parametrize("colours", [1, 3, 4])
def test_teacher_gets_images_of_its_own_preprocessing(colours: int) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8))
    pixels = np.asarray(noise.resize((16, 16), Image.Resampling.BILINEAR))  # smooth: at sharp edges Pillow cuts off
    theirs = Preprocessing((24, 24), (24, 24), mean=(0.5,) * colours, std=(0.25,) * colours)
    shown = Teacher(model(image_size=24, channels=colours), theirs).convert_images(
        OURS.normalise(torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]), OURS.mean, OURS.std
    )
    expected = theirs(Image.fromarray(pixels))[None]
    assert shown.shape == expected.shape
    assert (shown - expected).abs().max() < 2.5 / 255 / 0.25  # Pillow rounds to bytes, after each direction


def test_grey_images_are_repeated_for_a_colour_teacher() -> None:
    grey = Preprocessing((16, 16), (16, 16), mean=(0.3,), std=(0.2,))
    pixels = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8)
    shown = Teacher(model(), OURS).convert_images(grey.normalise(pixels), grey.mean, grey.std)
    torch.testing.assert_close(shown, OURS.normalise(pixels.expand(-1, 3, -1, -1)))


def test_matching_images_are_not_converted() -> None:
    images, _ = batch()
    assert Teacher(model(), OURS).convert_images(images, OURS.mean, OURS.std) is images


def test_logits_are_in_the_students_order() -> None:
    images, _ = batch()
    plain = teacher().logits(images, OURS.mean, OURS.std)
    turned = teacher(order=[4, 0, 1, 3, 2]).logits(images, OURS.mean, OURS.std)
    assert torch.equal(turned, plain[:, [4, 0, 1, 3, 2]])


@pytest.mark.parametrize("which", ["mean", "mean with registers", "ResNet"])
def test_mean_of_a_score_map_is_the_logits(which: str) -> None:
    images, _ = batch()
    more: dict[str, Any] = {"registers": 2} if "registers" in which else {}
    made = Teacher(residual() if which == "ResNet" else model(pool="mean", **more), OURS, [1, 0, 2, 3, 4])
    maps = made.dense_logits(images, OURS.mean, OURS.std)
    assert maps.shape[0] == 8
    assert maps.shape[-1] == CLASSES
    torch.testing.assert_close(maps.mean((1, 2)), made.logits(images, OURS.mean, OURS.std), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots", [{}, {"prefix": "class+distillation"}, {"pool": "map"}, {"pool": "class+mean"}])
def test_every_vision_transformer_has_a_score_map(slots: dict[str, Any]) -> None:
    images, _ = batch()
    maps = teacher(**slots).dense_logits(images, OURS.mean, OURS.std)
    assert maps.shape == (8, 6, 6, CLASSES)
    assert maps.std((1, 2)).min() > 0


@pytest.mark.parametrize("slots", [{}, {"prefix": "class+distillation"}, {"pool": "mean"}, {"head": "pre-logits"}])
def test_features_are_the_input_of_the_last_layer(slots: dict[str, Any]) -> None:
    images, _ = batch()
    made = Teacher(model(**slots), OURS)
    found = made.features(images, OURS.mean, OURS.std)
    head = made.model.head
    last = head.linear if isinstance(head, TanhHead) else head
    answered = last(found.unflatten(1, (2, -1)) if isinstance(head, DistilledHead) else found)
    assert found.shape == (8, made.width)
    torch.testing.assert_close(answered, made.logits(images, OURS.mean, OURS.std))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "gentle"}, "use hard or soft"),
        ({"alpha": 0.0}, "must be > 0 and <= 1"),
        ({"alpha": 1.5}, "must be > 0 and <= 1"),
        ({"temperature": 0.0}, "must be > 0"),
        ({"per": "class"}, "objective.per, the divisor of the soft loss, must be value or picture"),
        ({"mixup": -1.0}, "must be >= 0"),
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Distillation(**fields)


def test_a_teacher_is_needed_and_must_have_the_classes() -> None:
    with pytest.raises(ValueError, match="give teacher=MODEL"):
        Distillation().build(model())
    with pytest.raises(ValueError, match="5 classes and the student 4"):
        Distillation().build(model(classes=4), None, teacher(), OURS)
    with pytest.raises(ValueError, match="use distil='features'"):
        Teacher(model(classes=None), OURS).logits(batch()[0], OURS.mean, OURS.std)

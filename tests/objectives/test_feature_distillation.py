"""Learning from a teacher's features: where classes differ, where there are no labels, and that it is learnt."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.objectives.taught import CLASSES, OURS, batch, draw, model, residual, teacher
from vitrail.models.vit import ViT
from vitrail.objectives.classification import mix_pairs
from vitrail.objectives.distillation import join_targets
from vitrail.objectives.feature_distillation import FeatureDistillation, FeatureDistiller
from vitrail.objectives.teacher import Teacher


def built(spec: FeatureDistillation, cached: bool = False, **slots: Any) -> FeatureDistiller:
    """A student of five classes, or as the slots say, whose teacher knows nine others."""
    return spec.build(model(**slots), None, teacher(classes=9), OURS, cached)


def cosines(task: FeatureDistiller, y: torch.Tensor, said: torch.Tensor) -> np.ndarray:
    """Between projected vectors and the teacher's, in NumPy."""
    weight, bias = (p.detach().double().numpy() for p in (task.projection.weight, task.projection.bias))
    ours, theirs = y.detach().double().numpy() @ weight.T + bias, said.double().numpy()
    return (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)


def test_the_loss_is_one_minus_the_cosine_and_the_labels_share() -> None:
    images, labels = batch()
    task = built(FeatureDistillation(labels=0.7))
    assert isinstance(task.model, ViT)
    y = task.model.pool(task.model.hidden_states(images)[0])
    said = task.teacher.features(images, OURS.mean, OURS.std)
    expected = (1 - cosines(task, y, said)).mean() + 0.7 * F.cross_entropy(task.model(images), labels).item()
    assert task(images, labels, draw())["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("student", ["tokens", "ResNet", "mean"])
def test_without_classes_targets_are_ignored(student: str) -> None:
    images, labels = batch()
    made = residual() if student == "ResNet" else model(pool="mean" if student == "mean" else "class", classes=None)
    if student == "ResNet":
        made = model(3, "R50x0.25", root="small", classes=None)
    task = FeatureDistillation(labels=0).build(made, None, teacher(), OURS)
    y, said = made(images), task.teacher.features(images, OURS.mean, OURS.std)
    expected = (1 - cosines(task, y, said)).mean()
    for targets in (labels, torch.zeros(8, dtype=torch.long), None):
        assert task(images, targets, draw())["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert task.signals(images, draw())["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert not task.signals(images, draw())["loss"].requires_grad


@pytest.mark.parametrize("classes", [CLASSES, None])
def test_cached_features_give_the_online_loss(classes: int | None) -> None:
    images, labels = batch()
    spec = FeatureDistillation()
    asked, told = built(spec, classes=classes), built(spec, cached=True, classes=classes)
    said = asked.teacher.features(images, OURS.mean, OURS.std).numpy()
    targets = torch.from_numpy(join_targets(None if classes is None else labels.numpy(), said))
    torch.testing.assert_close(told(images, targets, draw())["loss"], asked(images, labels, draw())["loss"])


def test_cached_features_are_mixed_like_labels() -> None:
    images, _ = batch()
    task = built(FeatureDistillation(mixup=0.8), cached=True, classes=None)
    said = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
    mixed, taught = mix_pairs(images, F.normalize(said, dim=1), 0.8, 0.0, draw())
    expected = (1 - cosines(task, task.model(mixed), taught)).mean()
    found = task(images, torch.from_numpy(join_targets(None, said.numpy())), draw())["loss"]
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_two_tokens_learn_labels_and_features() -> None:
    images, labels = batch()
    both = teacher(prefix="class+distillation")
    assert both.width == 32
    student = model(prefix="class+distillation")
    assert isinstance(student, ViT)
    task = FeatureDistillation().build(student, None, both, OURS)
    y = student.pool(student.hidden_states(images)[0])[:, 1]
    expected = (1 - cosines(task, y, both.features(images, OURS.mean, OURS.std))).mean()
    expected += F.cross_entropy(student(images), labels).item()
    assert task(images, labels, draw())["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_only_student_and_projection_are_in_the_state() -> None:
    task = built(FeatureDistillation()).train()
    outside = {name for name in task.state_dict() if not name.startswith("model.")}
    assert outside == {"projection.weight", "projection.bias"}
    assert not task.teacher.model.training
    again = built(FeatureDistillation())
    assert torch.equal(task.projection.weight, again.projection.weight)


def test_student_approaches_its_teacher_on_held_out_images() -> None:
    """Without a label. Untrained it is far; a few steps on other pictures bring it nearer."""
    torch.manual_seed(0)
    source = Teacher(model(7), OURS)
    task = FeatureDistillation(labels=0).build(model(classes=None), None, source, OURS)
    colours = torch.rand(96, 3, 1, 1) * 4 - 2
    pictures = colours + 0.1 * torch.randn(96, 3, 16, 16)
    before = task.signals(pictures[64:], draw())["loss"]
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        task(pictures[:64], None, draw(64))["loss"].backward()
        optimizer.step()
    assert task.signals(pictures[64:], draw())["loss"] < 0.5 * before


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        FeatureDistillation(labels=-1)
    with pytest.raises(ValueError, match="leaves the head untrained"):
        FeatureDistillation(labels=0).build(model(), None, teacher(), OURS)
    with pytest.raises(ValueError, match="give teacher=MODEL"):
        FeatureDistillation().build(model())

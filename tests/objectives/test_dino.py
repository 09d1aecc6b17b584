"""DINO: the published loss, centre and momentum; the same by parts, by processes and by shards; collapse without its guards."""

import copy
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import erf

import vitrail
from tests.training.made import draw
from vitrail.data.transforms.pipeline import Views
from vitrail.metrics.collapse import HIGH_TEMPERATURE, NO_CENTRE, detect_collapse
from vitrail.metrics.signals import effective_rank, feature_spread
from vitrail.nn.embed import ConvStem
from vitrail.objectives.dino import DINO, SelfDistillation, view_cross_entropy
from vitrail.training.distributed import Parallel
from vitrail.training.optim import AdamW, parameter_rules
from vitrail.utils.json import to_json, value_from_json

SPEC = DINO(out=24, hidden=20, bottleneck=12, momentum=0.9, warmup=0.5, frozen=0.0)
SOME_FROZEN = replace(SPEC, frozen=0.1, standardise=0.9)  # the first step
STEPS = 10
Pair = tuple[torch.Tensor, torch.Tensor]


def made(spec: DINO = SPEC, steps: int = STEPS, **slots: object) -> SelfDistillation:
    torch.manual_seed(0)
    given: dict[str, object] = {"patch": 8, "width": 16, "depth": 2, "heads": 2, "classes": None, "image_size": 16}
    task = spec.build(vitrail.build(None, **(given | {"channels": 1} | slots)), steps)
    with torch.no_grad():  # else student and teacher would say the same
        for parameter in task.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        task.centre.normal_(std=0.2)
    return task


def crops(count: int = 8, small: int = 3) -> Pair:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, 1, 16, 16, generator=generator), torch.randn(
        count, small, 1, 8, 8, generator=generator
    )


def some(images: Pair, rows: slice) -> Pair:
    return images[0][rows], images[1][rows]


def step(task: SelfDistillation, optimizer: torch.optim.Optimizer, images: Pair, number: int) -> None:
    task(images, None, draw(len(images[0]), step=number))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    task.after_step(number)


# The published formulation in NumPy, from the paper's algorithm 1: nothing of the code under test but its weights.


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def head(features: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    x = features
    for layer in range(3):
        x = x @ weights[f"layers.{layer}.weight"].T + weights[f"layers.{layer}.bias"]
        if layer < 2:
            x = 0.5 * x * (1 + erf(x / math.sqrt(2)))
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    directions = weights["prototypes.weight"]
    return x @ (directions / np.linalg.norm(directions, axis=1, keepdims=True)).T


def published(task: SelfDistillation, images: Pair, temperature: float) -> tuple[float, np.ndarray]:
    """The loss, and the centre after the step."""
    with torch.no_grad():
        task.model.eval()
        student = [task.model(crop).double().numpy() for group in images for crop in group.unbind(1)]
        teacher = [task.teacher(crop).double().numpy() for crop in images[0].unbind(1)]
        task.model.train()
    weights, slow = ({n: t.double().numpy() for n, t in h.state_dict().items()} for h in (task.head, task.teacher_head))
    centre = task.centre.double().numpy()
    if task.spec.standardise is not None:  # not in the paper: features less their mean, in units of their deviation
        mean, square = task.moments.double().numpy()
        student, teacher = ([(y - mean) / np.sqrt(square - mean**2) for y in each] for each in (student, teacher))
    said = [head(each, slow) for each in teacher]
    total, pairs = 0.0, 0
    for i, target in enumerate(said):
        q = softmax((target - centre) / temperature)
        for j, features in enumerate(student):
            if i != j:
                total += -(q * np.log(softmax(head(features, weights) / 0.1))).sum(-1).mean()
                pairs += 1
    return total / pairs, 0.9 * centre + 0.1 * np.concatenate(said).mean(0)


@pytest.mark.parametrize("small", [3, 0])
def test_loss_and_centre_are_the_published_ones(small: int) -> None:
    task, images = made(), crops(small=small)
    for number, temperature in ((0, 0.04), (2, 0.04 + 0.03 * 2 / 5), (7, 0.07)):
        loss, centre = published(task, images, temperature)
        found = task(images, None, draw(step=number))["loss"]
        assert found.item() == pytest.approx(loss, rel=1e-5)
        assert task.signals(images, draw(step=number))["loss"].item() == pytest.approx(loss, rel=1e-5)
        task.after_step(number)
        torch.testing.assert_close(task.centre.double().numpy(), centre, rtol=1e-4, atol=1e-6)


def test_heads_get_features_standardised_by_earlier_steps() -> None:
    task, images = made(replace(SPEC, standardise=0.75)), crops()
    with torch.no_grad():
        y = task.teacher(images[0].flatten(0, 1))
    seen = torch.stack([y.mean(0), y.square().mean(0)])
    loss, _ = published(task, images, 0.04)  # by a mean of 0 and a deviation of 1, as nothing was seen
    assert task(images, None, draw())["loss"].item() == pytest.approx(loss, rel=1e-5)
    task.after_step(0)
    torch.testing.assert_close(task.moments, seen)
    loss, _ = published(task, images, 0.04 + 0.03 / 5)
    assert task(images, None, draw(step=1))["loss"].item() == pytest.approx(loss, rel=1e-5)
    before = task.moments.clone()
    with torch.no_grad():
        y = task.teacher(images[0].flatten(0, 1))
    task.after_step(1)
    torch.testing.assert_close(task.moments, 0.75 * before + 0.25 * torch.stack([y.mean(0), y.square().mean(0)]))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_exported_weights_give_standardised_features(pool: str) -> None:
    task, images = made(replace(SPEC, standardise=0.9), pool=pool), crops()
    task(images, None, draw())
    task.after_step(0)
    with torch.no_grad():
        wanted = task.standardise_features(task.teacher(images[0][:, 0]))
        plain = copy.deepcopy(task.teacher)
        plain.load_state_dict(task.export_weights(dict(task.teacher.state_dict())))
        torch.testing.assert_close(plain(images[0][:, 0]), wanted, rtol=1e-4, atol=1e-5)
    published = made()
    state = published.teacher.state_dict()
    assert published.export_weights(state) is state


def test_teacher_follows_by_the_momentum_of_the_step() -> None:
    task = made(embed=ConvStem(8))
    task(crops(), None, draw())
    for number in (0, 4, 9):
        keep = 1 - 0.1 * (math.cos(math.pi * number / STEPS) + 1) / 2
        pairs = [(task.teacher, task.model), (task.teacher_head, task.head)]
        tensors = [
            (o, n) for t, s in pairs for o, n in zip(t.state_dict().values(), s.state_dict().values(), strict=True)
        ]
        expected = [keep * o.double() + (1 - keep) * n.double() for o, n in tensors if o.is_floating_point()]
        task.after_step(number)
        found = [o for o, _ in tensors if o.is_floating_point()]
        assert any("running_mean" in name for name in task.teacher.state_dict())
        for tensor, right in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor.double(), right, rtol=1e-5, atol=1e-7)
    assert SPEC.momentum_at(STEPS, STEPS) == 1


def test_gradients_equal_those_of_log_softmax() -> None:
    q, logits = torch.randn(5, 2, 24).softmax(-1), (4 * torch.randn(5, 6, 24)).requires_grad_()
    pairs = [-(q[:, i] * logits[:, j].log_softmax(-1)).sum(-1).mean() for i in range(2) for j in range(6) if i != j]
    expected = torch.stack(pairs).mean()
    found = view_cross_entropy(q, logits)
    torch.testing.assert_close(found, expected)
    (right,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], right)


def test_teacher_is_frozen_and_in_evaluation_mode() -> None:
    task, images = made(dropout=0.5, stochastic_depth=0.5), crops()
    task.train()
    assert torch.equal(task.teacher_logits(images[0])[1], task.teacher_logits(images[0])[1])
    assert not torch.equal(task.student_logits(images, 0), task.student_logits(images, 0))
    task(images, None, draw())["loss"].backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in [*task.model.parameters(), *task.head.parameters()]
    )
    assert all(p.grad is None for p in [*task.teacher.parameters(), *task.teacher_head.parameters()])
    trained = {p for o in AdamW().build(task, parameter_rules(task, 1.0)) for g in o.param_groups for p in g["params"]}
    assert trained == {*task.model.parameters(), *task.head.parameters()}


def test_frozen_last_layer_has_zero_gradients() -> None:
    task, images = made(DINO(out=24, hidden=20, bottleneck=12, frozen=0.3)), crops()
    last = task.head.prototypes.weight
    losses = []
    for number in (0, 2, 3):
        task.zero_grad()
        loss = task(images, None, draw(step=number))["loss"]
        loss.backward()
        losses.append(loss.item())
        assert last.grad is not None
        assert bool(last.grad.any()) == (number == 3)
        first = task.head.layers[0].weight
        assert isinstance(first, torch.Tensor)
        assert first.grad is not None
        assert first.grad.any()
    task.zero_grad()
    directions = F.normalize(last.detach(), dim=1)
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.1, weight_decay=0.5)
    for number in range(3):
        step(task, optimizer, images, number)
    torch.testing.assert_close(F.normalize(last.detach(), dim=1), directions)  # decay takes of its length alone


def test_parts_of_a_batch_are_the_whole_batch() -> None:
    single, parts, images = made(SOME_FROZEN), made(SOME_FROZEN), crops()
    loss = single(images, None, draw())["loss"]
    halves = [
        parts(some(images, slice(a, b)), None, draw(b - a, first=a, total=8))["loss"] for a, b in ((0, 6), (6, 8))
    ]
    torch.testing.assert_close(0.75 * halves[0] + 0.25 * halves[1], loss)
    for task in (single, parts):
        task.after_step(0)
    torch.testing.assert_close(parts.centre, single.centre)
    torch.testing.assert_close(parts.moments, single.moments)
    assert not single.logit_sum.any()
    assert not single.moment_sum.any()
    assert not single.sample_count


def test_signals_change_nothing() -> None:
    task, images = made(SOME_FROZEN), crops()
    before = copy.deepcopy(task.state_dict())
    task.eval()
    task(images, None, draw())
    signals = task.signals(images, draw())
    task.train()
    task.signals(images, draw())
    task.after_step(0)  # the teacher moves; a centre that has seen no training stays
    assert torch.equal(task.centre, before["centre"])
    assert torch.equal(task.moments, before["moments"])
    assert set(signals) == {"loss", "teacher_entropy", "teacher_diversity"}
    assert all(0 <= signals[name] <= 1 for name in ("teacher_entropy", "teacher_diversity"))
    assert not any(value.requires_grad for value in signals.values())
    assert set(before) == set(task.state_dict())
    assert not any("_sum" in name or "sample_count" in name for name in before)


def test_signals_show_constant_and_uniform_outputs() -> None:
    task, images = made(), crops()
    task.centre.zero_()
    task.centre[5] = -100.0  # all pictures are of kind 5
    same = task.signals(images, draw())
    assert same["teacher_entropy"] < 0.01
    assert same["teacher_diversity"] < 0.01
    blunt = made(DINO(out=24, hidden=20, bottleneck=12, teacher_temperature_start=99.0, teacher_temperature=99.0))
    even = blunt.signals(images, draw())
    assert even["teacher_entropy"] > 0.99
    assert even["teacher_diversity"] > 0.99


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"centre": None}, NO_CENTRE),
        ({"teacher_temperature": 1.0, "teacher_temperature_start": 1.0}, HIGH_TEMPERATURE),
        ({}, None),
    ],
)
def test_it_collapses_without_centring_or_without_sharpening_and_not_with_both(wrong, cause) -> None:
    """Eight kinds of pictures. A teacher that collapsed gives all of them one answer: certain of it, or of none.

    The alarm hears what a run would tell it, and names the guard that is missing.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    kinds = torch.randn(8, 1, 1, 16, 16, generator=generator).repeat(2, 1, 1, 1, 1)
    watched = kinds + 0.3 * torch.randn(16, 2, 1, 16, 16, generator=generator)
    spec = DINO(**({"out": 24, "hidden": 32, "bottleneck": 16, "momentum": 0.95, "teacher_temperature": 0.04} | wrong))
    model = vitrail.build(None, patch=8, width=16, depth=2, heads=2, classes=None, image_size=16, channels=1)
    task = spec.build(model, 120)
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], lr=5e-4)
    history, alarms = [], []
    for number in range(121):
        if number % 10 == 0:
            seen = task.signals((watched, torch.zeros(16, 0, 1, 8, 8)), draw(16, step=min(number, 119)))
            with torch.no_grad():
                features = task.teacher(watched[:, 0]).numpy()
            record = {"step": number, "spread": feature_spread(features), "rank": effective_rank(features)}
            history.append(record | {name: float(value) for name, value in seen.items()})
            alarms.append(detect_collapse(history, "dino", lr=5e-4, objective=to_json(spec)))
        if number < 120:
            large = kinds + 0.3 * torch.randn(16, 2, 1, 16, 16, generator=generator)
            step(task, optimizer, (large, large[..., 4:12, 4:12]), number)
    found = task.signals((kinds.repeat(1, 2, 1, 1, 1), torch.zeros(16, 0, 1, 8, 8)), draw(16, step=119))
    told = found["teacher_diversity"] - found["teacher_entropy"]  # what the teacher's answer tells of the picture
    assert told > 0.05 if cause is None else told < 0.01, found  # measured: 0.17, and 0.00001 at most
    assert {alarm.cause for alarm in alarms if alarm} == ({cause} if cause else set())


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Where two processes have left what each came to, by DDP and by FSDP2."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, __file__, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    for process in both:
        _, complaint = process.communicate(timeout=300)
        assert process.returncode == 0, complaint
    return folder


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_have_one_centre_and_one_teacher(parallel: str, two: Path) -> None:
    """Two processes with halves of a batch do what one does with all of it, also where every weight is in two places."""
    task, images = made(SOME_FROZEN), crops()
    optimizer = torch.optim.SGD([p for p in task.parameters() if p.requires_grad], lr=0.1)
    for number in range(3):
        step(task, optimizer, images, number)
    found = [torch.load(two / f"{parallel}-{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(found[0]["centre"], found[1]["centre"])
    for name, tensor in task.state_dict().items():
        torch.testing.assert_close(
            found[0][name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    signals = task.signals(images, draw(step=3))
    torch.testing.assert_close(found[0]["entropy"], signals["teacher_entropy"], rtol=1e-4, atol=1e-6)


def one_of_two(folder: Path, rank: int) -> None:
    """One of the processes of the test above."""
    import torch.distributed as dist

    from vitrail.__main__ import exit_process
    from vitrail.training.distributed import Team, full_tensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for parallel in get_args(Parallel):
        start, images = made(SOME_FROZEN), crops()
        task = SOME_FROZEN.build(start.model, STEPS, dist.group.WORLD)
        task.load_state_dict(start.state_dict())
        team = Team(rank, 2, torch.device("cpu"), parallel)
        wrapped = team.wrap(task)
        optimizer = torch.optim.SGD([p for p in task.parameters() if p.requires_grad], lr=0.1)
        mine = some(images, slice(4 * rank, 4 * rank + 4))
        for number in range(3):
            wrapped(mine, None, draw(4, first=4 * rank, total=8, step=number))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            task.after_step(number)
        with team.unsharded(task):
            entropy = task.signals(images, draw(step=3))["teacher_entropy"]
        state = {name: full_tensor(tensor.detach()).clone() for name, tensor in task.state_dict().items()}
        torch.save(state | {"entropy": entropy}, folder / f"{parallel}-{rank}.pt")
    dist.destroy_process_group()
    exit_process(0)  # a plain shutdown may abort inside C++


def test_schedules_are_functions_of_the_step() -> None:
    spec = DINO(teacher_temperature_start=0.02, teacher_temperature=0.06, warmup=0.2, frozen=0.1, momentum=0.99)
    assert [spec.temperature_at(n, 100) for n in (0, 10, 20, 90)] == pytest.approx([0.02, 0.04, 0.06, 0.06])
    assert [spec.momentum_at(n, 100) for n in (0, 50, 100)] == pytest.approx([0.99, 0.995, 1.0])
    assert [spec.frozen_at(n, 100) for n in (0, 9, 10)] == [True, True, False]
    assert DINO(warmup=0.0).temperature_at(0, 100) == 0.07
    assert not DINO(frozen=0.0).frozen_at(0, 100)
    assert value_from_json(to_json(spec), DINO, "objective") == spec


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"student_temperature": 0.0}, "temperature.* must be > 0"),
        ({"teacher_temperature": -0.1}, "temperature.* must be > 0"),
        ({"teacher_temperature_start": math.nan}, "temperature.* must be > 0"),
        ({"momentum": 1.2}, "momentum must be >= 0 and <= 1, got 1.2"),
        ({"frozen": -0.5}, "frozen must be >= 0 and <= 1, got -0.5"),
        ({"centre": 1.0}, "centre must be >= 0 and < 1, or none"),
        ({"standardise": 1.5}, "standardise must be >= 0 and < 1"),
        ({"out": 1}, "out must be >= 2, got 1"),
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DINO(**wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("slots", "batch", "views", "words"),
    [
        ({}, 7, None, "got 7"),
        ({"classes": 10}, 8, None, "10 classes"),
        ({"prefix": "class+distillation"}, 8, None, "distillation token"),
        ({"head": "pre-logits"}, 8, None, "head='linear'"),
        ({"patch": 128, "image_size": 256}, 8, Views(), "smaller than a 128×128 patch"),
        ({"patch": 28}, 8, Views(), "use 84×84"),
        ({"embed": "conv-stem", "patch": 64, "image_size": 256, "width": 32}, 8, Views(), "use 128×128"),
    ],
)
def test_invalid_models_batches_and_crops_are_refused(slots, batch, views, words) -> None:
    given = {"patch": 16, "width": 16, "depth": 1, "heads": 2, "classes": None, "image_size": 224} | slots
    config = vitrail.build(None, **given).config
    with pytest.raises(ValueError, match=words) as error:
        DINO().check_run(config, batch, views, ema=False)
    assert "\n" not in str(error.value)


def test_features_that_no_layernorm_can_standardise_are_refused() -> None:
    for slots in ({"pool": "map"}, {"pool": "class+mean"}, {"block": "post"}):
        config = vitrail.build(None, patch=16, width=16, depth=1, heads=2, classes=None, **slots).config
        DINO().check(config, 8)
        with pytest.raises(ValueError, match="standardise=none"):
            DINO(standardise=0.9).check(config, 8)


def test_valid_settings_are_accepted() -> None:
    config = vitrail.build(None, patch=16, width=16, depth=1, heads=2, classes=None).config
    DINO().check_run(config, 8, Views(), ema=False)


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]), int(sys.argv[2]))

"""Which parameter is trained at which rate, and what the optimisers do with it."""

import pytest
import torch
from timm.optim import Lamb as TimmLamb

from tests.training.made import batch, draw, task
from vitrail.training.optim import (
    SGD,
    AdamW,
    Lamb,
    LambOptimizer,
    Muon,
    MuonOptimizer,
    OptimizerSlot,
    orthogonalise,
    parameter_rules,
    set_lr,
    set_weight_decay,
)


def stepped(made: torch.nn.Module, optim: OptimizerSlot) -> dict[str, torch.Tensor]:
    """How far each parameter moves in one step."""
    optimizers = optim.build(made, parameter_rules(made, optim.layer_decay))
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    images, targets = batch()
    made(images, targets, draw())["loss"].backward()
    for optimizer in optimizers:
        optimizer.step()
    return {name: before[name] - p.detach() for name, p in made.named_parameters()}


def test_layer_decay_is_applied_to_every_parameter() -> None:
    """With SGD and no momentum, a parameter moves by its rate times its gradient: so the move tells the rate."""
    made = task()
    moved = stepped(made, SGD(lr=0.1, momentum=0.0, layer_decay=0.5, clip=None))
    expected = {
        "embed": 4,
        "position": 4,
        "prefix": 4,
        "blocks.0": 3,
        "blocks.1": 2,
        "blocks.2": 1,
        "pool": 0,
        "head": 0,
    }
    seen = set()
    for name, parameter in made.named_parameters():
        part = next(key for key in expected if name.startswith(f"model.{key}"))
        seen.add(part)
        assert parameter.grad is not None
        rate = 0.1 * 0.5 ** expected[part]
        torch.testing.assert_close(moved[name], rate * parameter.grad, rtol=1e-3, atol=1e-7)
    assert seen == set(expected)


@pytest.mark.parametrize("optim", [SGD(lr=0.1, head_scale=4.0), AdamW(head_scale=4.0), Muon(head_scale=4.0)])
def test_head_scale_is_applied_to_the_head_alone(optim: OptimizerSlot) -> None:
    made = task()
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    plain, scaled = (
        {
            names[id(parameter)]: group["lr"]
            for optimizer in optim.build(made, parameter_rules(made, 0.5, scale))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for scale in (1.0, optim.head_scale)
    )
    assert any(name.startswith("model.head.") for name in plain)
    for name, lr in plain.items():
        assert scaled[name] == pytest.approx(lr * (4 if name.startswith("model.head.") else 1)), name


def test_no_decay_for_norms_biases_positions_and_tokens() -> None:
    made = task(registers=2, layer_scale=0.1, prefix="class", pool="map")
    given = parameter_rules(made, 1.0)
    decayed = {name for name, rule in given.items() if rule.decay}
    assert "model.blocks.0.msa.qkv.weight" in decayed
    assert "model.embed.projection.weight" in decayed
    assert "model.head.weight" in decayed
    for name in given:
        if any(part in name for part in ("norm", "bias", "position", "prefix", "probe", "branch")):
            assert name not in decayed, name


def test_weight_decay_alone_shrinks_matrices_and_nothing_else() -> None:
    made = task()
    optimizers = AdamW(lr=0.1, weight_decay=0.5).build(made, parameter_rules(made, 1.0))
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in made.named_parameters():
        factor = 0.95 if parameter_rules(made, 1.0)[name].decay else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_every_learning_rate_follows_the_schedule() -> None:
    made = task()
    optimizers = Muon(lr=0.01, matrix_lr=0.02, layer_decay=0.5).build(made, parameter_rules(made, 0.5))
    full = [group["lr"] for o in optimizers for group in o.param_groups]
    set_lr(optimizers, 0.01 * 0.25)
    assert [group["lr"] for o in optimizers for group in o.param_groups] == pytest.approx([rate / 4 for rate in full])


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    for shape in ((4, 16, 16), (2, 8, 32), (2, 32, 8)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), steps=10))
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_muon_treats_queries_keys_and_values_as_three_matrices() -> None:
    together, apart = torch.nn.Parameter(torch.randn(12, 4)), [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    with torch.no_grad():
        for part, own in zip(together.chunk(3), apart, strict=True):
            own.copy_(part)
    gradient = torch.randn(12, 4)
    together.grad = gradient.clone()
    for own, part in zip(apart, gradient.chunk(3), strict=True):
        own.grad = part.clone()
    MuonOptimizer([{"params": [together], "parts": 3}], lr=0.1, momentum=0.9, weight_decay=0.0).step()
    MuonOptimizer([{"params": apart}], lr=0.1, momentum=0.9, weight_decay=0.0).step()
    torch.testing.assert_close(together.detach(), torch.cat([own.detach() for own in apart]))


def test_muon_steps_as_pytorchs_does_within_its_bfloat16() -> None:
    ours, theirs = torch.nn.Parameter(torch.randn(24, 16)), torch.nn.Parameter(torch.empty(24, 16))
    theirs.data.copy_(ours.data)
    mine = MuonOptimizer([{"params": [ours]}], lr=0.1, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.Muon(
        [theirs], lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, adjust_lr_fn="original"
    )
    for _ in range(4):
        gradient = torch.randn(24, 16)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=0.03)
    assert (ours - theirs).norm() / (0.1 * 4) < 0.2


def test_lamb_steps_as_timms_does() -> None:
    ours, theirs = torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.empty(6, 4))
    theirs.data.copy_(ours.data)
    mine = LambOptimizer([{"params": [ours]}], 0.01, (0.9, 0.999), 1e-6, 0.02)
    reference = TimmLamb([theirs], lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.02, max_grad_norm=None)
    for _ in range(5):
        gradient = torch.randn(6, 4)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optim", [AdamW(lr=3e-3), SGD(lr=0.1), Muon(lr=3e-3), Lamb(lr=3e-2)])
def test_every_optimiser_overfits_a_batch(optim: OptimizerSlot) -> None:
    made = task()
    optimizers = optim.build(made, parameter_rules(made, 1.0))
    images, targets = batch()
    losses = []
    for _ in range(60):
        loss = made(images, targets, draw())["loss"]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("lr", -1.0), ("weight_decay", -1.0), ("clip", 0.0), ("layer_decay", 0.0), ("head_scale", 0.0)],
)
def test_invalid_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"."):
        AdamW(**{name: value})


def test_weight_decay_follows_a_cosine_to_its_end() -> None:
    made, optim = task(), AdamW(lr=0.1, weight_decay=0.04, decay_end=0.4)
    optimizers = optim.build(made, parameter_rules(made, 1.0))
    assert [optim.decay_at(step, 100) for step in (0, 50, 100)] == pytest.approx([0.04, 0.22, 0.4])
    set_weight_decay(optimizers, optim.decay_at(50, 100))
    decays = {group["weight_decay"] for optimizer in optimizers for group in optimizer.param_groups}
    assert decays == {0.0, optim.decay_at(50, 100)}
    assert AdamW(weight_decay=0.3).decay_at(77, 100) == 0.3
    with pytest.raises(ValueError, match="decay_end must be >= 0"):
        AdamW(decay_end=-1.0)

"""Recurrent networks and the Neural Turing Machine: shapes, order, counts, files, refusals, and a copy through the memory."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from vitrail.models.base import Unsupported
from vitrail.models.flops import count
from vitrail.models.recurrent import Recurrent, RecurrentConfig
from vitrail.nn.recurrent import (
    LSTM,
    RNN,
    HeadControls,
    TuringMachine,
    TuringMachineEncoder,
    address,
    read_memory,
    write_memory,
)

SMALL: dict[str, Any] = {"family": "recurrent", "width": 16, "patch": 4, "image_size": (8, 12), "classes": 5}
ENCODERS: dict[str, dict[str, Any]] = {
    "rnn": {"encoder": "rnn"},
    "lstm": {"encoder": "lstm"},
    "two layers": {"encoder": "lstm", "layers": 2},
    "one direction": {"encoder": LSTM(bidirectional=False)},
    "ntm": {"encoder": TuringMachine(slots=5, slot_width=3)},
}


def build(name: str, **more: Any) -> Recurrent:
    torch.manual_seed(0)
    model = vitrail.build(**(SMALL | ENCODERS[name] | more))
    assert isinstance(model, Recurrent)
    nn.init.normal_(model.head.weight)  # zero at the start
    return model.eval()


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_has_gradients_maps_and_features(name: str) -> None:
    model, images = build(name), torch.randn(2, 3, 8, 12)
    assert model(images).shape == (2, 5)
    model(images).square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    (found,) = model.feature_maps(images)
    assert found.shape == (2, model.feature_dim, 2, 3)
    assert model.embed_images(images).shape == (2, model.feature_dim)


@pytest.mark.parametrize("name", ENCODERS)
def test_cost_equals_pytorchs_counter(name: str) -> None:
    model, images = build(name), torch.randn(2, 3, 8, 12)
    cost = count(model.config, 2)
    assert cost.params == sum(p.numel() for p in model.parameters())
    with (
        warnings.catch_warnings(),
        torch.backends.mkldnn.flags(enabled=False),
        FlopCounterMode(display=False) as counter,
    ):
        model(images)
    assert 2 * cost.macs == counter.get_total_flops()


@pytest.mark.parametrize("name", ENCODERS)
def test_files_keep_the_model(name: str, tmp_path: Path) -> None:
    model, images = build(name), torch.randn(2, 3, 8, 12)
    vitrail.save(model, tmp_path / "model.safetensors")
    loaded = vitrail.load(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    assert torch.equal(loaded(images), model(images))


def test_the_forward_direction_sees_only_earlier_patches() -> None:
    """One direction: a change of the last patch leaves all earlier outputs alone."""
    model, images = build("one direction"), torch.randn(1, 3, 8, 12)
    changed = images.clone()
    changed[:, :, 4:, 8:] += 1
    one, other = model.forward_features(images), model.forward_features(changed)
    assert torch.equal(one[:, :-1], other[:, :-1])
    assert not torch.equal(one[:, -1], other[:, -1])


@pytest.mark.parametrize("name", ["rnn", "lstm", "ntm"])
def test_the_output_depends_on_every_patch_and_on_their_order(name: str) -> None:
    model, images = build(name), torch.randn(1, 3, 8, 12)
    output = model(images)
    for row in (0, 4):
        for column in (0, 4, 8):
            changed = images.clone()
            changed[:, :, row : row + 4, column : column + 4] += 1
            assert not torch.allclose(model(changed), output, atol=1e-7)
    assert not torch.allclose(model(images.flip(3)), output, atol=1e-6)


def test_both_directions_end_with_the_whole_image() -> None:
    model, y = build("lstm"), torch.arange(2 * 6 * 16.0).view(2, 6, 16)
    last = model.encoder.last_output(y)
    assert torch.equal(last, torch.cat((y[:, -1, :8], y[:, 0, 8:]), 1))


# --- the Turing machine ---


def controls(
    shift: int, gate: float = 0.0, width: int = 3, key: Tensor | None = None, strength: float = 0.0
) -> HeadControls:
    """Controls that move the focus by `shift`; with gate 1 they look for the key first."""
    one_hot = torch.zeros(1, 3)
    one_hot[0, shift + 1] = 1.0
    values = [torch.full((1, 1), value) for value in (strength, gate, 1.0)]
    return HeadControls(torch.zeros(1, width) if key is None else key, values[0], values[1], one_hot, values[2])


def first_slot(slots: int) -> Tensor:
    focus = torch.zeros(1, slots)
    focus[0, 0] = 1.0
    return focus


def test_location_addressing_copies_a_sequence() -> None:
    """The copy task of the paper (section 4.1), with the controls that solve it: write and step on, return, read and step on."""
    sequence = torch.randn(4, 1, 3)
    memory, focus = torch.full((1, 6, 3), 1e-6), first_slot(6)
    for item in sequence:
        memory = write_memory(memory, focus, torch.ones(1, 3), item)
        focus = address(memory, focus, controls(1))
    focus, read = first_slot(6), []
    for _ in sequence:
        read.append(read_memory(memory, focus))
        focus = address(memory, focus, controls(1))
    assert torch.allclose(torch.stack(read), sequence, atol=1e-5)


@pytest.mark.parametrize(("shift", "expected"), [(-1, 5), (0, 0), (1, 1)])
def test_the_focus_moves_in_a_circle(shift: int, expected: int) -> None:
    focus = address(torch.randn(1, 6, 3), first_slot(6), controls(shift))
    assert focus.argmax() == expected
    assert focus.sum() == pytest.approx(1.0)


def test_content_addressing_finds_the_slot_of_a_key() -> None:
    memory = torch.eye(4)[None] * 3
    focus = address(memory, first_slot(4), controls(0, gate=1.0, width=4, key=torch.eye(4)[2:3], strength=50.0))
    assert focus.argmax() == 2
    assert focus[0, 2] == pytest.approx(1.0, abs=1e-4)


def test_sharpening_makes_a_focus_narrow() -> None:
    blurred = controls(0)._replace(shift=torch.tensor([[0.25, 0.5, 0.25]]))
    wide = address(torch.randn(1, 6, 3), first_slot(6), blurred)
    narrow = address(torch.randn(1, 6, 3), first_slot(6), blurred._replace(sharpening=torch.full((1, 1), 5.0)))
    assert narrow.max() > wide.max() == pytest.approx(0.5, abs=1e-4)


def test_the_copy_task_is_learnt() -> None:
    """Three vectors of three bits, then three empty steps in which they are to be given again: the loss falls below that
    of guessing, ln 2, which no machine without a memory of the vectors can do."""
    torch.manual_seed(0)
    machine, head = TuringMachineEncoder(24, 6, 6), nn.Linear(30, 3)
    for parameter in (*machine.read_head.parameters(), *machine.write_head.parameters()):
        if parameter.ndim == 2:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    embed = nn.Linear(4, 24)
    modules = nn.ModuleList([machine, head, embed])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-2)
    losses = []
    for _ in range(120):
        bits = torch.randint(0, 2, (32, 3, 3)).float()
        marked = torch.cat((bits, torch.zeros(32, 3, 1)), -1)
        empty = torch.tensor([0.0, 0, 0, 1]).expand(32, 3, 4)
        outputs = head(machine(embed(torch.cat((marked, empty), 1)))[:, 3:])
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, bits)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(2), abs=0.1)
    assert min(losses[-20:]) < 0.5


# --- names and refusals ---


def test_a_name_has_the_width_of_a_vision_transformer() -> None:
    config = vitrail.configure("LSTM-S/16", classes=3)
    assert isinstance(config, RecurrentConfig)
    assert (config.width, config.layers, config.encoder, config.stride) == (384, 1, LSTM(), 16)
    assert vitrail.configure("NTM-Ti/16", image_size=32).encoder == TuringMachine()  # type: ignore[attr-defined]
    assert isinstance(vitrail.configure("RNN-Ti/8").encoder, RNN)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "LSTM-XXL/16"}, "unknown recurrent network 'LSTM-XXL/16'"),
        ({**SMALL, "encoder": "gru"}, "unknown encoder 'gru'"),
        ({**SMALL, "width": 15}, "the width, which must be even, got 15"),
        ({**SMALL, "encoder": "ntm", "layers": 2}, "TuringMachine has one layer, got layers=2"),
        ({**SMALL, "encoder": TuringMachine(slots=2)}, "at least 3 slots"),
        ({**SMALL, "image_size": 10}, "not divisible by the patch size 4"),
        ({"family": "recurrent", "width": 8}, "give width and patch"),
        ({"name": "LSTM-Ti/16", "heads": 3}, "recurrent networks do not support heads"),
    ],
)
def test_unsuitable_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vitrail.configure(**options)


def test_what_needs_attention_is_refused_by_name() -> None:
    model = build("lstm")
    for refused in (
        lambda: model.attention_layers((8, 12)),
        model.lora_modules,
        lambda: model.merge_tokens(2),
        lambda: model.require_tokens("rollout"),
        lambda: model.resize((9, 12)),
    ):
        with pytest.raises(ValueError, match=r"recurrent networks|not divisible"):
            refused()
    with pytest.raises(Unsupported, match="use the last, -1"):
        model.feature_maps(torch.zeros(1, 3, 8, 12), [0])
    with pytest.raises(ValueError, match="takes 3 channels"):
        model(torch.zeros(1, 1, 8, 12))


def test_head_and_channels_are_adapted() -> None:
    model, images = build("lstm"), torch.randn(2, 3, 8, 12)
    features = model.compute_pre_logits(images)
    other = model.replace_head(3)
    assert other(images).shape == (2, 3)
    assert torch.equal(other.compute_pre_logits(images), features)
    assert model.adapt_channels(1)(images[:, :1]).shape == (2, 5)

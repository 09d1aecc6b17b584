"""look: every variant can be looked at, nothing is changed by it, and mistakes are told in one line."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from tests.analysis.made import pictures, resnet, shaken
from tests.variants import VIT_SLOTS
from vitrail.analysis import (
    TRACE_VIEWS,
    ImageTrace,
    extract_filters,
    extract_positions,
    find_patch,
    measure_distances,
    record_attention,
    to_arrays,
    trace_image,
)


@pytest.mark.parametrize("slot", VIT_SLOTS)
def test_every_variant_can_be_looked_at(slot):
    model = shaken(slot)
    x = pictures(model)
    seen = trace_image(model, x, at=(2, 5))
    prefix, has_classes = model.config.prefix.count, model.config.classes is not None
    assert (seen.grid, seen.patch, seen.prefix) == ((4, 6), model.embed.stride, prefix)
    shapes = {
        "attention": (2, 2, 4, 6),
        "attention_at": (2, 2, 4, 6),
        "between": (2, 2, 24, 24),
        "distance": (2, 2),
        "entropy": (2, 2),
        "alike": (2, 2, 2),
        "rollout": (4, 6),
        "colours": (3, 4, 6, 3),
        "similar": (3, 4, 6),
        "norms": (3, 4, 6),
        "prefix_norms": (3, prefix),
        "spectrum": (3, 3),
        "frequencies": (3,),
        "embedded": (4, 6, 32),
    }
    if has_classes:
        shapes |= {"relevance": (4, 6), "logits": (5,)}
    else:
        assert seen.relevance is seen.logits is seen.target is None
    for name, shape in shapes.items():
        value = getattr(seen, name)
        assert value.shape == shape, name
        assert np.isfinite(value).all(), name
        assert value.dtype == (np.float16 if name == "between" else np.float32), name
    assert seen.colours is not None
    assert seen.colours.min() >= 0
    assert seen.colours.max() <= 1
    assert seen.similar is not None
    np.testing.assert_allclose(seen.similar[:, 2, 5], 1, rtol=1e-5)
    with record_attention(model) as maps, torch.no_grad():
        answer = model(x)
    full = torch.stack([maps[layer][0] for layer in maps])  # [L, H, T, T]
    readers = {"class token": full[:, :, :1], "output tokens": full[:, :, :2], "mean of patches": full[:, :, prefix:]}
    reader = readers[seen.reader].mean(2)
    np.testing.assert_allclose(seen.attention, reader[..., prefix:].unflatten(-1, (4, 6)), atol=1e-6)
    np.testing.assert_allclose(seen.attention_at, full[:, :, prefix + 17, prefix:].unflatten(-1, (4, 6)), atol=1e-6)
    np.testing.assert_allclose(seen.between, full[:, :, prefix:, prefix:], atol=1e-3)
    states = torch.stack(model.hidden_states(x, range(3))).detach()
    np.testing.assert_allclose(seen.norms, states[:, 0, prefix:].norm(dim=-1).unflatten(-1, (4, 6)), rtol=1e-4)
    np.testing.assert_allclose(seen.prefix_norms, states[:, 0, :prefix].norm(dim=-1), rtol=1e-4)
    if has_classes:
        np.testing.assert_allclose(seen.logits, answer[0], rtol=1e-4, atol=1e-5)
    assert extract_positions(model).grid == (4, 6)
    assert measure_distances(model, [x]).mean.shape == (2, 2)
    assert len(extract_filters(model).tiles) == len(extract_filters(model).explained)


def test_embedding_and_positions_make_the_first_tokens():
    model = shaken()
    x = pictures(model)
    seen = trace_image(model, x, views=["embedded", "positions"])
    expected = model.tokens(x)[0, 1:].detach().unflatten(0, (4, 6))
    np.testing.assert_allclose(seen.embedded + seen.positions, expected, rtol=1e-4, atol=1e-5)
    assert trace_image(shaken("position rotary2d"), x).positions is None


@pytest.mark.parametrize("view", TRACE_VIEWS)
def test_only_what_was_asked_for_is_there(view):
    model = shaken()
    everything, one = (
        trace_image(model, pictures(model), at=(0, 0)),
        trace_image(model, pictures(model), at=(0, 0), views=[view]),
    )
    also = {"attention": "attention_at", "norms": "prefix_norms", "spectrum": "frequencies", "relevance": "target"}
    always = {"grid", "patch", "prefix", "reader", "at", "logits"}
    there = set(to_arrays(one)) - always - {"between_grid"}
    assert there == {view, also.get(view, view)}
    assert {field.name for field in fields(ImageTrace)} == set(to_arrays(everything))


def test_arrays_can_be_saved_and_read(tmp_path):
    model = shaken()
    seen = trace_image(model, pictures(model))
    np.savez(tmp_path / "seen.npz", **to_arrays(seen))
    with np.load(tmp_path / "seen.npz", allow_pickle=False) as read:
        assert "similar" not in read
        assert str(read["reader"]) == "class token"
        np.testing.assert_array_equal(read["attention"], seen.attention)


def test_looking_leaves_the_model_as_it_was():
    model = shaken("conv stem").train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = pictures(model)
    with torch.inference_mode():
        first = trace_image(model, x)
    second = trace_image(model, x)
    np.testing.assert_array_equal(first.relevance, second.relevance)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())  # also running statistics
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) == 0


def test_compiled_blocks_are_looked_at_uncompiled_and_are_compiled_afterwards():
    model = shaken()
    x = pictures(model)
    expected = trace_image(model, x)
    runs = []
    for block in model.blocks:
        block.compile(backend=lambda graph, _: lambda *values: runs.append(1) or graph(*values))
    with torch.no_grad():
        model(x)
    before = len(runs)
    assert before > 0
    seen = trace_image(model, x)
    assert len(runs) == before
    for name in ("attention", "rollout", "relevance", "norms"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(expected, name), err_msg=name)
    with torch.no_grad():
        model(x)
    assert len(runs) == 2 * before
    torch._dynamo.reset()


def test_half_precision_and_other_sizes_can_be_looked_at():
    model = shaken()
    x = torch.randn(1, 3, 64, 40)
    exact = trace_image(model, x, max_cells=20)
    assert exact.grid == (8, 5)
    assert exact.between_grid == (4, 3)
    rough = trace_image(model.bfloat16(), x.bfloat16(), max_cells=20)
    np.testing.assert_allclose(rough.attention, exact.attention, atol=0.02)
    assert rough.relevance is not None


def test_a_pixel_is_in_a_patch():
    assert find_patch(shaken(), x=17, y=7) == (0, 2)
    assert find_patch(shaken(), x=48, y=7, size=(32, 64)) == (0, 6)


@pytest.mark.parametrize(("x", "y"), [(-1, 0), (0, -1), (48, 0), (0, 32)])
def test_a_pixel_outside_the_image_is_an_error(x, y):
    with pytest.raises(ValueError, match="pixel must be 0,0 to 47,31"):
        find_patch(shaken(), x, y)


def test_non_finite_tokens_are_an_error():
    model = shaken()
    with torch.no_grad():
        model.blocks[1].msa.out.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite after layer 2"):
        trace_image(model, pictures(model))


def test_progress_is_told_layer_by_layer():
    heard = []
    model = shaken()
    trace_image(model, pictures(model), on_progress=lambda *news: heard.append(news))
    assert heard == [("layers", 1, 2), ("layers", 2, 2)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at": (4, 0)}, "patch must be 0,0 to 3,5, got 4,0"),
        ({"target": 5}, "target must be 0 to 4, got 5"),
        ({"views": ["maps"]}, "unknown view 'maps'"),
        ({"max_cells": 0}, "must be >= 1"),
        ({"image": torch.zeros(2, 3, 32, 48)}, "must be one image"),
        ({"image": torch.zeros(3, 32, 48)}, r"\[B, C, H, W\]"),
        ({"image": torch.full((1, 3, 32, 48), float("nan"))}, "the image has values that are not finite"),
        ({"image": torch.full((1, 3, 32, 48), float("inf"))}, "the image has values that are not finite"),
    ],
)
def test_invalid_arguments_are_errors_of_one_line(settings, message):
    given = {"image": torch.zeros(1, 3, 32, 48), **settings}
    with pytest.raises(ValueError, match=message) as error:
        trace_image(shaken(), **given)
    assert "\n" not in str(error.value)


def test_a_target_without_classes_is_an_error():
    with pytest.raises(ValueError, match="has no classes"):
        trace_image(shaken("features"), torch.zeros(1, 3, 32, 48), target=0)


@pytest.mark.parametrize(
    "ask", [lambda m: trace_image(m, torch.zeros(1, 3, 32, 32)), extract_positions, extract_filters]
)
def test_a_resnet_is_an_error(ask):
    with pytest.raises(ValueError, match="does not support BiT ResNets"):
        ask(resnet())

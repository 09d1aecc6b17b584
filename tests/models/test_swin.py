"""Swin Transformers: published sizes, windows, shifts, and the interface of all families."""

import pytest
import torch

import vitrail
from tests.models.test_bit import assert_compiles
from tests.models.test_cost import counted_by_torch
from vitrail.models.base import Unsupported
from vitrail.models.flops import count
from vitrail.models.lora import tune
from vitrail.models.registry import config_from_json, configure
from vitrail.nn.window import MASKED, ShiftRule, SwinV2, join, partition, shift_mask
from vitrail.utils.json import to_json

SMALL = {"family": "swin", "width": 16, "depths": (2, 2), "heads": (1, 2), "window": 4, "classes": 5, "image_size": 32}


def build(**options):
    return vitrail.build_from(configure(**{**SMALL, **options})).eval()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Swin-T", 28_288_354), ("Swin-S", 49_606_258), ("Swin-B", 87_768_224), ("SwinV2-T", 28_347_154)],
)
def test_parameter_counts_are_published(name, parameters):
    with torch.device("meta"):
        model = vitrail.build(name)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", ["Swin-T", "SwinV2-T"])
def test_multiply_adds_are_those_of_torchs_counter(name):
    config = configure(name)
    assert count(config).macs == counted_by_torch(config, 1)


def test_cost_grows_linearly_with_the_pixels():
    small, large = (count(configure("Swin-T", image_size=size)).macs for size in (224, 448))
    assert large == pytest.approx(4 * small, rel=0.001)
    small, large = (count(configure("S/16", image_size=size)).macs for size in (224, 448))
    assert large > 4.5 * small


def test_windows_join_to_the_grid():
    x = torch.randn(2, 8, 12, 3)
    windows = partition(x, 4)
    assert windows.shape == (2, 6, 16, 3)
    torch.testing.assert_close(windows[0, 1].view(4, 4, 3), x[0, :4, 4:8])
    torch.testing.assert_close(join(windows, (8, 12), 4), x)


def test_rolled_neighbours_do_not_see_each_other():
    mask = shift_mask((8, 8), 4, (2, 2), torch.zeros(1))
    assert not mask[0].any()  # the first window holds neighbours only
    assert set(mask[-1].unique().tolist()) == {MASKED, 0.0}
    assert (mask[-1] == 0).sum() == 4 * 4 * 4  # four regions of 2×2 tokens


@pytest.mark.parametrize("version", [1, 2])
def test_a_token_reaches_the_windows_beside_its_own_by_the_second_layer(version):
    model = build(version=version)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.ones_(module.weight)  # Swin v2 starts as the identity
    image = torch.randn(1, 3, 32, 32)
    other = image.clone()
    other[..., :4, 12:16] += 1.0  # the token in row 0, column 3, at the edge of its window
    first, second = (model.feature_maps(i, layers=(1, 2)) for i in (image, other))
    changed = [(a != b).any(1)[0] for a, b in zip(first, second, strict=True)]
    assert changed[0][:4, :4].all()
    assert not changed[0][:, 4:].any()  # the first layer keeps to the window
    assert changed[1][:4, 4:6].any()  # the second one passes it on


def test_shift_rules_differ_where_one_side_is_covered():
    shift = {sides: ShiftRule(sides).choose_shift(4, (4, 8), (8, 8)) for sides in ("side", "image", "configured")}
    assert shift == {"side": (0, 2), "image": (0, 0), "configured": (2, 2)}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", [(32, 32), (36, 60), (4, 4)])
def test_any_multiple_of_the_patch_is_taken(version, size):
    model = build(version=version)
    maps = model.feature_maps(torch.randn(2, 3, *size))
    rows, columns = (side // 4 for side in size)
    assert [tuple(m.shape) for m in maps] == [(2, 16, rows, columns), (2, 32, -(-rows // 2), -(-columns // 2))]
    assert model.config.grid_of(size) == tuple(maps[-1].shape[2:])
    assert model(torch.randn(2, 3, *size)).shape == (2, 5)


def test_bad_sizes_are_one_line():
    with pytest.raises(ValueError, match=r"multiples of the patch 4, got 30×32"):
        build()(torch.randn(1, 3, 30, 32))
    with pytest.raises(ValueError, match=r"takes \[B, 3, H, W\], got \[1, 1, 32, 32\]"):
        build()(torch.randn(1, 1, 32, 32))
    with pytest.raises(ValueError, match=r"multiples of the patch 4, got 30: use"):
        configure("Swin-T", image_size=30)
    with pytest.raises(ValueError, match="5 heads do not divide the width 16"):
        build(heads=(5, 2))
    with pytest.raises(ValueError, match="every stage needs a depth, heads and a window"):
        build(heads=(1,))
    with pytest.raises(ValueError, match="unknown Swin Transformer 'Swin-X'"):
        vitrail.build("Swin-X")


@pytest.mark.parametrize("version", [1, 2])
def test_compiles_without_a_graph_break(version):
    torch.compiler.reset()
    assert_compiles(build(version=version, image_size=36), torch.randn(2, 3, 36, 36))


def test_layers_decay_and_adapters():
    model = build(version=2)
    indices = {name: model.layer_index(name) for name, _ in model.named_parameters()}
    assert indices["embed.weight"] == 0
    assert indices["blocks.3.norm1.weight"] == 4
    assert indices["merges.0.norm.weight"] == 2
    assert indices["head.weight"] == indices["norm.weight"] == 5
    undecayed = {name for name, p in model.named_parameters() if p.ndim > 1 and not model.decays(name, p)}
    assert undecayed == {n for n, p in model.named_parameters() if "bias_mlp" in n and p.ndim > 1}
    tune(model, "lora")
    assert not any("bias_mlp" in name for name, p in model.named_parameters() if p.requires_grad)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_other_classes_sizes_and_channels():
    model = build()
    assert model.replace_head(3)(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert model.adapt_channels(1)(torch.randn(1, 1, 32, 32)).shape == (1, 5)
    image = torch.randn(1, 3, 48, 64)
    torch.testing.assert_close(model.resize((48, 64))(image), model(image))


def test_configuration_is_json_and_saved(tmp_path):
    config = configure("SwinV2-T/16", image_size=256)
    assert config.windows == (16, 16, 16, 8)
    assert config_from_json(to_json(config)) == config
    model = build(version=2)
    vitrail.save(model, tmp_path / "model.safetensors")
    again = vitrail.load(tmp_path / "model.safetensors").eval()
    assert again.config == model.config
    assert isinstance(again.config.block, SwinV2)
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(again(image), model(image))


def test_recomputing_gives_the_same_gradients():
    model, image = build().train(), torch.randn(2, 3, 32, 32)
    gradients = []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        gradients.append(torch.autograd.grad(model(image).square().sum(), list(model.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tokens_are_refused_by_name():
    with pytest.raises(Unsupported, match="attention rollout does not support Swin Transformers"):
        build().require_tokens("attention rollout")
    with pytest.raises(Unsupported, match="--dynamic-size does not support Swin Transformers"):
        build().config.check_any_size()


@pytest.mark.parametrize("version", [1, 2])
def test_the_graph_takes_any_batch(version):
    model = build(version=version, image_size=36).for_tracing()
    program = torch.export.export(
        model, (torch.randn(2, 3, 36, 36),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    images = torch.randn(5, 3, 36, 36)
    torch.testing.assert_close(program.module()(images), model(images))

"""Multiscale Vision Transformers of clips: published sizes, positions in space and time, and the interface of all families."""

import json

import pytest
import torch
import torch.nn.functional as F

import vitrail
from tests.models.test_bit import assert_compiles
from tests.models.test_cost import counted_by_torch, kept_by_autograd
from vitrail.models.adapt import with_size
from vitrail.models.base import Unsupported
from vitrail.models.flops import count
from vitrail.models.lora import tune
from vitrail.models.registry import build_segmenter, config_from_json, configure
from vitrail.nn.multiscale import SeparatePositions
from vitrail.utils.json import to_json

SMALL = {"family": "mvit", "width": 16, "depths": (1, 2), "heads": (1, 2), "classes": 5, "frames": 4, "image_size": 32}
V1 = {"positions": "absolute", "q_pooling": "strided", "expand": "mlp", "residual_pooling": "none"}
FORMS = {
    "v1": V1,
    "v2": {},
    "v1 without a class token": {**V1, "class_token": False},
    "v2 without a class token": {"class_token": False},
    "stride over time": {"q_strides": ((1, 1, 1), (2, 2, 2)), "kv_stride": (2, 4, 4)},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def build(**options):
    return vitrail.build_from(configure(**{**SMALL, **options})).eval()


@pytest.mark.parametrize(
    ("name", "parameters", "giga"), [("MViTv1-B", 36_610_672, 70.599), ("MViTv2-S", 34_537_744, 64.224)]
)
def test_parameters_and_multiply_adds_are_published(name, parameters, giga):
    config = configure(name, frames=16)
    cost = count(config)
    assert cost.params == parameters
    assert round(cost.macs / 1e9, 3) == giga
    assert cost.macs == counted_by_torch(config, 1)
    assert config.describe() == f"{name}, 16 frames"
    assert config.classes == 400


@every_form
def test_counts_agree_for_every_form_and_batch(form):
    config = configure(**SMALL | form | {"frames": 5, "image_size": (40, 68)})
    assert count(config, 3).macs == counted_by_torch(config, 3)


def test_activation_bytes_are_what_autograd_keeps():
    config = configure(**SMALL | V1 | {"image_size": 96})
    kept = kept_by_autograd(config, 2)
    assert count(config, 2).activation_bytes == pytest.approx(kept, rel=0.1)


@every_form
@pytest.mark.parametrize("shape", [(4, 32, 32), (7, 36, 60), (4, 8, 13)], ids=str)
def test_clips_of_any_shape_give_maps_of_every_scale(form, shape):
    model, clips = build(**form), torch.randn(2, 3, *shape)
    widths = (32, 32) if form.get("expand") == "mlp" else (16, 32)
    grids = [model.config.stage_grid(stage, shape) for stage in (0, 1)]
    assert [len(grid) for grid in grids] == [3, 3]
    maps = model.feature_maps(clips)
    assert [tuple(m.shape) for m in maps] == [(2, width, *grid) for width, grid in zip(widths, grids, strict=True)]
    normalised = model.normalise_map(maps[-1])
    assert normalised.shape == maps[-1].shape
    assert normalised.mean(1).abs().max() < 1e-5
    assert model(clips).shape == (2, 5)
    assert model.dense_logits(clips).shape == (2, *model.config.grid_of(shape), 5)


@every_form
def test_resizing_gives_what_the_model_gives_at_that_shape(form):
    model, clip = build(**form), torch.randn(1, 3, 4, 52, 40)
    resized = model.resize((52, 40))
    assert resized.config.input_size == (4, 52, 40)
    torch.testing.assert_close(resized(clip), model(clip))


@every_form
def test_more_frames_give_what_the_model_gives_at_that_length(form):
    model, clip = build(**form), torch.randn(1, 3, 9, 40, 32)
    longer = model.resize((40, 32), frames=9)
    assert longer.config.input_size == (9, 40, 32)
    torch.testing.assert_close(longer(clip), model(clip))


def test_positions_of_space_and_time_are_added_and_interpolated():
    """The table of another grid is the sum of both tables, interpolated over three axes."""
    positions = SeparatePositions((4, 6, 5), 8, prefix=1)
    for parameter in positions.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.zeros(2, 1 + 4 * 6 * 5, 8)
    added = positions(x, (4, 6, 5))
    assert torch.equal(added[:, 0], positions.prefix.expand(2, -1))
    cell = 1 + (2 * 6 + 3) * 5 + 4  # time 2, row 3, column 4
    torch.testing.assert_close(added[1, cell], positions.time[2] + positions.space[3, 4])
    table = added[:1, 1:].unflatten(1, (4, 6, 5)).movedim(-1, 1)
    wanted = F.interpolate(table, (7, 3, 8), mode="trilinear").movedim(1, -1).flatten(1, 3)
    actual = positions(torch.zeros(1, 1 + 7 * 3 * 8, 8), (7, 3, 8))
    torch.testing.assert_close(actual[:, 1:], wanted)
    torch.testing.assert_close(actual[:, :1], added[:1, :1])


def test_queries_of_v1_are_pooled_where_they_have_a_stride():
    parts = {name for name, _ in build(**V1).named_parameters() if "pool_q" in name}
    assert parts == {f"blocks.1.msa.pool_q.{part}" for part in ("conv.weight", "norm.weight", "norm.bias")}
    assert len([name for name, _ in build().named_parameters() if name.endswith("pool_q.conv.weight")]) == 3


def test_models_of_images_are_stored_as_before():
    stored = to_json(configure("MViTv2-S-cls", classes=3))
    assert not {"frames", "positions", "q_pooling"} & set(stored)
    assert config_from_json(json.loads(json.dumps(stored))) == configure("MViTv2-S-cls", classes=3)
    with pytest.raises(ValueError, match="config lacks kv_stride"):
        config_from_json({name: value for name, value in stored.items() if name != "kv_stride"})


@every_form
def test_configuration_is_json_and_saved(form, tmp_path):
    model, clip = build(**form), torch.randn(1, 3, 4, 32, 32)
    assert config_from_json(json.loads(json.dumps(to_json(model.config)))) == model.config
    vitrail.save(model, tmp_path / "model.safetensors")
    again = vitrail.load(tmp_path / "model.safetensors").eval()
    assert again.config == model.config
    torch.testing.assert_close(again(clip), model(clip))


def test_bad_input_is_one_line():
    model = build()
    with pytest.raises(ValueError, match=r"the model takes \[B, 3, T, H, W\], got \[1, 3, 32, 32\]"):
        model(torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"the model takes \[B, 3, T, H, W\], got \[1, 4, 3, 32, 32\]"):
        model(torch.randn(1, 4, 3, 32, 32))
    with pytest.raises(ValueError, match="clips of 1×32×32 are too small for 2 stages: use at least 2×8×8"):
        model(torch.randn(1, 3, 1, 32, 32))
    with pytest.raises(ValueError, match="clips of 0×224×224 are too small for 4 stages: use at least 2×32×32"):
        configure("MViTv2-S", frames=0)
    with pytest.raises(ValueError, match="MViTv1-B takes clips: give their number of frames, frames=16"):
        configure("MViTv1-B")
    for name in ("MViTv1-S", "MViTv1-B-cls"):
        with pytest.raises(ValueError, match=f"unknown Multiscale Vision Transformer '{name}': did you mean"):
            configure(name, frames=16)
    for options, message in (
        ({"kv_stride": (4, 4)}, r"kv_stride needs a number for each of 3 axes, got \(4, 4\)"),
        ({"positions": "some"}, "positions must be relative or absolute, got 'some'"),
        ({"q_pooling": "none"}, "q_pooling must be all or strided, got 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**options)


def test_what_needs_images_is_refused_by_name():
    with pytest.raises(
        Unsupported, match="segmentation does not support Multiscale Vision Transformers: use a model of im"
    ):
        build_segmenter(**SMALL, decoder="linear")
    with pytest.raises(Unsupported, match="frames= does not support Multiscale Vision Transformers"):
        configure("MViTv2-T").with_frames(8)
    with pytest.raises(Unsupported, match="dynamic_size= does not support"):
        build().config.check_any_size()


@every_form
def test_attention_weights_are_those_of_the_fused_kernel(form):
    model, grid = build(**form), (2, 8, 8)
    x = torch.randn(2, model.config.prefix + 128, 16)
    block = model.blocks[0].msa
    _, _, v = block.project(x, grid)
    weights = block.compute_attention(x, grid)[:, 0]
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    block.residual_pooling = "none"
    torch.testing.assert_close(block.out((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2)), block(x, grid))


def test_layers_decay_and_adapters():
    model = build(**V1)
    indices = {name: model.layer_index(name) for name, _ in model.named_parameters()}
    first = {"embed.weight", "embed.bias", "prefix.outputs", "position.space", "position.time", "position.prefix"}
    assert {name for name, index in indices.items() if index == 0} == first
    assert indices["blocks.2.msa.pool_k.conv.weight"] == 3
    undecayed = {name for name, p in model.named_parameters() if p.ndim > 1 and not model.decays(name, p)}
    assert undecayed == {"prefix.outputs", "position.space", "position.time", "position.prefix"}
    tune(model, "lora")
    adapted = {n.rsplit(".", 3)[0] for n, p in model.named_parameters() if p.requires_grad and "blocks.0" in n}
    parts = ("msa.q", "msa.k", "msa.v", "msa.out", "mlp.fc1", "mlp.fc2", "skip2")
    assert adapted == {f"blocks.0.{part}.parametrizations" for part in parts}
    assert model(torch.randn(1, 3, 4, 32, 32)).shape == (1, 5)


@every_form
def test_recomputing_gives_the_same_gradients(form):
    model, clips = build(**form).train(), torch.randn(2, 3, 4, 32, 32)
    gradients = []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        gradients.append(torch.autograd.grad(model(clips).square().sum(), list(model.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_classes_and_channels():
    model = build(**V1)
    assert model.replace_head(3)(torch.randn(1, 3, 4, 32, 32)).shape == (1, 3)
    assert model.replace_head(None)(torch.randn(1, 3, 4, 32, 32)).shape == (1, 32)
    grey = torch.randn(1, 1, 4, 32, 32)
    torch.testing.assert_close(model.adapt_channels(1)(grey), model(grey.expand(-1, 3, -1, -1, -1)))
    config, state = with_size(model.config, model.state_dict(), (64, 32))
    assert state["position.space"].shape == (*config.stage_grid(-1, config.input_size)[1:], 16)


def test_initial_values_are_torchvisions():
    model = build(**V1, width=64)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not name.startswith("embed"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.startswith(("position", "prefix")) or name.endswith(("q.weight", "fc1.weight")):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.4), name
        elif name.endswith("conv.weight"):
            assert parameter.abs().max().item() == pytest.approx(27**-0.5, rel=0.1), name
        assert torch.isfinite(parameter).all(), name


@pytest.mark.parametrize("form", [V1, {}], ids=["v1", "v2"])
def test_the_graph_takes_any_batch(form):
    model = build(**form, depths=(1, 1)).for_tracing()
    program = torch.export.export(
        model, (torch.randn(2, 3, 4, 32, 32),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    clips = torch.randn(3, 3, 4, 32, 32)
    torch.testing.assert_close(program.module()(clips), model(clips))


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    torch.compiler.reset()
    assert_compiles(build(**V1, depths=(1, 1)), torch.randn(2, 3, 4, 36, 44))

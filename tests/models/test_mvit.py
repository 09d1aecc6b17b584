"""Multiscale Vision Transformers: published sizes, pooling, relative positions, and the interface of all families."""

import pytest
import torch

import vitrail
from tests.models.test_bit import assert_compiles
from tests.models.test_cost import counted_by_torch, kept_by_autograd
from vitrail.models.base import Unsupported
from vitrail.models.flops import count
from vitrail.models.lora import tune
from vitrail.models.registry import config_from_json, configure
from vitrail.nn.multiscale import compute_offset_index, count_offsets, pool_grid, to_maps, to_tokens
from vitrail.utils.json import to_json

SMALL = {"family": "mvit", "width": 16, "depths": (1, 2), "heads": (1, 2), "classes": 5, "image_size": 32}
FORMS = {
    "attention": {},
    "mlp": {"expand": "mlp"},
    "class token": {"class_token": True},
    "no residual pooling": {"class_token": True, "residual_pooling": "none"},
    "residual pooling of patches": {"class_token": True, "residual_pooling": "patches"},
}


def build(**options):
    return vitrail.build_from(configure(**{**SMALL, **options})).eval()


every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("MViTv2-T", 24_173_320),
        ("MViTv2-S", 34_870_216),
        ("MViTv2-B", 51_472_744),
        ("MViTv2-L", 217_992_952),
        ("MViTv2-S-cls", 34_870_312),
        ("MViTv2-L-cls", 213_635_512),
    ],
)
def test_parameter_counts_are_published(name, parameters):
    with torch.device("meta"):
        model = vitrail.build(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.config.describe() == name


@pytest.mark.parametrize("name", ["MViTv2-T", "MViTv2-L", "MViTv2-B-cls"])
def test_multiply_adds_are_those_of_torchs_counter(name):
    config = configure(name)
    assert count(config).macs == counted_by_torch(config, 1)
    assert count(configure("MViTv2-T")).macs / 1e9 == pytest.approx(4.7, abs=0.05)  # the paper's table 1


@every_form
def test_counts_agree_for_every_form_and_batch(form):
    config = configure(**SMALL | form | {"image_size": (40, 68)})
    assert count(config, 3).macs == counted_by_torch(config, 3)


def test_activation_bytes_are_what_autograd_keeps():
    config = configure(**SMALL | {"image_size": 96, "depths": (2, 2, 2), "heads": (1, 2, 4)})
    assert count(config, 4).activation_bytes == pytest.approx(kept_by_autograd(config, 4), rel=0.1)


def test_grids_round_up_along_every_axis():
    assert pool_grid((7, 8, 9), (1, 2, 4)) == (7, 4, 3)
    x = torch.randn(2, 2 * 3 * 4, 5)
    assert to_maps(x, (2, 3, 4)).shape == (2, 5, 2, 3, 4)
    torch.testing.assert_close(to_tokens(to_maps(x, (2, 3, 4))), x)
    config = configure("MViTv2-T", image_size=(200, 236))
    assert [config.stage_grid(stage, (200, 236)) for stage in range(-1, 4)] == [
        (50, 59), (50, 59), (25, 30), (13, 15), (7, 8)
    ]  # fmt: skip
    assert config.grid_of((200, 236)) == (7, 8)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (8, 2), (2, 4), (25, 7), (7, 13), (1, 1), (5, 1)])
def test_offsets_stay_in_their_table(queries, keys):
    index = compute_offset_index(queries, keys)
    assert index.shape == (queries, keys)
    assert index.min() >= 0
    assert index.max() < count_offsets(queries, keys)
    assert (index.diff(dim=0) >= 0).all()  # a later query is further after the same key
    assert (index.diff(dim=1) <= 0).all()
    if queries == keys:
        assert index[0, 0] == keys - 1  # offset zero is in the middle


def test_relative_positions_are_the_sum_over_rows_and_columns():
    """Compare the bias with the definition, cell by cell."""
    attention = build(image_size=(32, 48)).blocks[1].msa
    grid, (rows, columns) = (8, 12), attention.offsets
    queries, keys = pool_grid(grid, attention.q_stride), pool_grid(grid, attention.kv_stride)
    q = torch.randn(1, queries[0] * queries[1], attention.heads, 16)
    bias = attention.compute_bias(q, grid)
    index = [compute_offset_index(a, b) for a, b in zip(queries, keys, strict=True)]
    for query, key in ((0, 0), (5, 3), (len(q[0]) - 1, 1), (7, keys[0] * keys[1] - 1)):
        (qy, qx), (ky, kx) = divmod(query, queries[1]), divmod(key, keys[1])
        vector = rows[index[0][qy, ky]] + columns[index[1][qx, kx]]
        torch.testing.assert_close(bias[0, :, query, key], q[0, query] @ vector)


def test_the_class_token_is_not_pooled_and_has_no_position():
    model = build(class_token=True)
    x = torch.randn(2, 1 + 8 * 8, 16)
    block = model.blocks[1]
    q, k, _ = block.msa.project(x, (8, 8))
    assert q.shape == (2, 1 + 16, 2, 16)
    torch.testing.assert_close(q[:, 0], block.msa.pool_q.norm(block.msa.q(x)[:, 0].unflatten(-1, (2, -1))))
    bias = block.msa.compute_bias(q, (8, 8))
    assert bias.shape == (2, 2, q.shape[1], k.shape[1])
    assert not bias[:, :, 0].any()
    assert not bias[..., 0].any()
    torch.testing.assert_close(block.pool_skip(x, (8, 8))[:, 0], x[:, 0])


def test_residual_pooling_adds_the_queries():
    torch.manual_seed(0)
    models = {name: build(class_token=True, residual_pooling=name) for name in ("all", "patches", "none")}
    attention = {name: model.blocks[0].msa for name, model in models.items()}
    x, outputs = torch.randn(1, 1 + 64, 16), {}
    for name, module in attention.items():
        module.load_state_dict(attention["all"].state_dict())
        torch.nn.init.eye_(module.out.weight)
        outputs[name] = module(x, (8, 8))
    q = attention["all"].project(x, (8, 8))[0].flatten(2)
    torch.testing.assert_close(outputs["all"] - outputs["none"], q)
    torch.testing.assert_close(outputs["patches"][:, 1:], outputs["all"][:, 1:])
    torch.testing.assert_close(outputs["patches"][:, :1], outputs["none"][:, :1])


@every_form
@pytest.mark.parametrize("size", [(32, 32), (36, 60), (8, 13)])
def test_images_of_any_size_give_maps_of_every_scale(form, size):
    model = build(**form)
    maps = model.feature_maps(torch.randn(2, 3, *size))
    widths = (32, 32) if form.get("expand") == "mlp" else (16, 32)
    grids = [model.config.stage_grid(stage, size) for stage in (0, 1)]
    assert [tuple(m.shape) for m in maps] == [(2, width, *grid) for width, grid in zip(widths, grids, strict=True)]
    assert model(torch.randn(2, 3, *size)).shape == (2, 5)
    assert model.dense_logits(torch.randn(2, 3, *size)).shape == (2, *model.config.grid_of(size), 5)


def test_four_scales_of_the_published_model():
    with torch.device("meta"):
        model = vitrail.build("MViTv2-T")
        maps = model.feature_maps(torch.empty(1, 3, 224, 288))
    assert [tuple(m.shape[1:]) for m in maps] == [(96, 56, 72), (192, 28, 36), (384, 14, 18), (768, 7, 9)]


@every_form
def test_resizing_gives_what_the_model_gives_at_that_size(form):
    model, image = build(**form), torch.randn(1, 3, 52, 40)
    resized = model.resize((52, 40))
    assert resized.config.image_size == (52, 40)
    torch.testing.assert_close(resized(image), model(image))


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match=r"images of 31×224 are too small for 4 stages: use at least 32×32"):
        configure("MViTv2-T", image_size=(31, 224))
    with pytest.raises(ValueError, match=r"images of 32×7 are too small for 2 stages: use at least 8×8"):
        build()(torch.randn(1, 3, 32, 7))
    with pytest.raises(ValueError, match=r"takes \[B, 3, H, W\], got \[1, 1, 32, 32\]"):
        build()(torch.randn(1, 1, 32, 32))
    with pytest.raises(ValueError, match="unknown Multiscale Vision Transformer 'MViTv2-X': did you mean"):
        vitrail.build("MViTv2-X")
    for options, message in (
        ({"heads": (3, 2)}, "3 heads do not divide the width 16"),
        ({"heads": (1,)}, "every stage needs a depth, heads and a stride of the queries, got 2 depths, 1 heads"),
        ({"pool_kernel": (2, 2)}, r"pool_kernel must be odd, got \(2, 2\)"),
        ({"kv_stride": (4,)}, r"kv_stride needs a number for each of 2 axes, got \(4,\)"),
        ({"q_strides": ((1, 1), (3, 3))}, "q_strides must be 1 or even"),
        ({"q_strides": ((1, 1), (0, 2))}, "q_strides must be at least 1, got 0"),
        ({"expand": "both"}, "expand must be attention or mlp, got 'both'"),
        ({"residual_pooling": "some"}, "residual_pooling must be all or patches or none, got 'some'"),
        ({"stochastic_depth": 1.0}, "stochastic_depth must be at least 0 and below 1"),
        ({"depths": (1, 0)}, "depths must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**options)
    with pytest.raises(ValueError, match=r"do not support window \(model MViTv2-T\)"):
        vitrail.build("MViTv2-T", window=7)


@pytest.mark.parametrize("form", [{}, {"class_token": True, "expand": "mlp", "residual_pooling": "patches"}])
def test_compiles_without_a_graph_break(form):
    torch.compiler.reset()
    assert_compiles(build(**form, depths=(1, 1)), torch.randn(2, 3, 36, 44))


def test_layers_decay_and_adapters():
    model = build(class_token=True)
    indices = {name: model.layer_index(name) for name, _ in model.named_parameters()}
    assert indices["embed.weight"] == indices["prefix.outputs"] == 0
    assert indices["blocks.2.msa.pool_k.conv.weight"] == 3
    assert indices["head.weight"] == indices["norm.weight"] == 4
    undecayed = {name for name, p in model.named_parameters() if p.ndim > 1 and not model.decays(name, p)}
    assert undecayed == {n for n, _ in model.named_parameters() if "offsets" in n} | {"prefix.outputs"}
    tune(model, "lora")
    adapted = {n.rsplit(".", 3)[0] for n, p in model.named_parameters() if p.requires_grad and "blocks.1" in n}
    parts = ("msa.q", "msa.k", "msa.v", "msa.out", "mlp.fc1", "mlp.fc2", "skip1")
    assert adapted == {f"blocks.1.{part}.parametrizations" for part in parts}
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_initial_values_are_timms():
    model = vitrail.build_from(configure(**SMALL | {"class_token": True, "width": 64}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not name.startswith("embed"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif "offsets" in name or name.endswith(("q.weight", "fc1.weight", "prefix.outputs")):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.3), name
        elif name.endswith("conv.weight"):
            assert parameter.abs().max() <= 1 / 3, name
            assert parameter.abs().max() > 0.25, name


def test_other_classes_and_channels():
    model = build()
    assert model.replace_head(3)(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert model.replace_head(None)(torch.randn(1, 3, 32, 32)).shape == (1, 32)
    grey = torch.randn(1, 1, 32, 32)
    torch.testing.assert_close(model.adapt_channels(1)(grey), model(grey.expand(-1, 3, -1, -1)))


@every_form
def test_configuration_is_json_and_saved(form, tmp_path):
    model = build(**form)
    assert config_from_json(to_json(model.config)) == model.config
    vitrail.save(model, tmp_path / "model.safetensors")
    again = vitrail.load(tmp_path / "model.safetensors").eval()
    assert again.config == model.config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
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


def test_dropout_and_stochastic_depth_act_in_training_only():
    model = build(dropout=0.2, attention_dropout=0.2, stochastic_depth=0.5)
    image = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(model(image), model(image))
    assert [block.branch1.depth.drop_rate for block in model.blocks] == [0.0, 0.25, 0.5]
    model.train()
    assert not torch.equal(model(image), model(image))


def test_what_needs_one_grid_is_refused_by_name():
    with pytest.raises(Unsupported, match="attention rollout does not support Multiscale Vision Transformers"):
        build().require_tokens("attention rollout")
    with pytest.raises(Unsupported, match="dynamic_size= does not support Multiscale Vision Transformers"):
        build().config.check_any_size()
    with pytest.raises(Unsupported, match="resampling of positions does not support Multiscale Vision Transformers"):
        build().resize((64, 64), "google")
    with pytest.raises(Unsupported, match="merge= does not support Multiscale Vision Transformers"):
        build().merge_tokens(2)


@every_form
def test_the_graph_takes_any_batch(form):
    model = build(**form, image_size=36).for_tracing()
    program = torch.export.export(
        model, (torch.randn(2, 3, 36, 36),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    images = torch.randn(5, 3, 36, 36)
    torch.testing.assert_close(program.module()(images), model(images))

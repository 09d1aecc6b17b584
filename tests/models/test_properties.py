"""Properties of all sizes, patches, grids and slots."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail
from tests.models.test_vit import shaken
from vitrail.nn.embed import patchify

POSITIONS = (
    *("none", "learned1d", "learned2d", "sincos2d", "sinusoid1d", "relative", "relative1d", "relative-mlp"),
    *("rotary2d", "rotary-dinov3", "rotary-eva02"),
    *("learned1d@every", "learned2d@shared", "relative@shared", "sincos2d@every"),
)
QUICK = settings(max_examples=40, deadline=None)


@st.composite
def models(draw, **fixed):
    heads = draw(st.integers(1, 3))
    patch = draw(st.integers(1, 7))
    slots = {
        "patch": patch,
        "width": 4 * heads * draw(st.integers(1, 3)),
        "depth": draw(st.integers(1, 3)),
        "heads": heads,
        "mlp_width": draw(st.integers(1, 20)),
        "channels": draw(st.integers(1, 5)),
        "classes": draw(st.one_of(st.none(), st.integers(1, 6))),
        "image_size": (patch * draw(st.integers(1, 5)), patch * draw(st.integers(1, 5))),
        "registers": draw(st.integers(0, 2)),
        "position": draw(st.sampled_from(POSITIONS)),
        "pool": draw(st.sampled_from(("class", "mean", "mean-norm", "class+mean", "map"))),
        "block": draw(st.sampled_from(("pre", "post", "parallel", "res-post"))),
        "mlp": draw(st.sampled_from(("gelu", "relu", "swiglu"))),
        "layer_scale": draw(st.sampled_from((None, 0.1))),
        "qk_norm": draw(st.booleans()),
        "head": draw(st.sampled_from(("linear", "pre-logits"))),
        **fixed,
    }
    if slots["pool"] == "class" and slots["head"] == "linear" and slots["classes"] and draw(st.booleans()):
        slots["prefix"] = "class+distillation"
    return shaken(vitrail.build(**slots))


def image_for(model, batch=2):
    return torch.randn(batch, model.config.channels, *model.config.image_size)


@QUICK
@given(models())
def test_shapes_follow_from_the_configuration(model):
    config, image = model.config, image_for(model)
    (h, w), width = config.shape.grid, config.size.width
    tokens = config.prefix.count + h * w
    assert model.tokens(image).shape == (2, tokens, width)
    assert model.encode(model.tokens(image)).shape == (2, tokens, width)
    assert model.feature_maps(image)[0].shape == (2, width, h, w)
    features = 2 * width if type(config.pool).__name__ == "ClassAndMean" else width
    assert model(image).shape == (2, config.classes or features)


@QUICK
@given(models(position="none"), st.randoms())
def test_without_positions_the_encoder_commutes_with_permutations(model, random):
    z = model.tokens(image_for(model))
    order = list(range(z.shape[1]))
    random.shuffle(order)
    torch.testing.assert_close(model.encode(z[:, order]), model.encode(z)[:, order], rtol=1e-3, atol=1e-4)


@QUICK
@given(models(position="none", pool="mean", registers=0), st.randoms())
def test_without_positions_an_image_is_a_bag_of_patches(model, random):
    image = image_for(model)
    patch, (h, w) = model.embed.stride, model.config.shape.grid
    order = list(range(h * w))
    random.shuffle(order)
    x_p = patchify(image, patch)[:, order]
    mixed = x_p.view(2, h, w, -1, patch, patch).permute(0, 3, 1, 4, 2, 5).reshape(image.shape)
    torch.testing.assert_close(model(mixed), model(image), rtol=1e-3, atol=1e-4)


def test_with_positions_the_order_of_patches_matters():
    model = shaken(vitrail.build(patch=4, width=16, depth=1, heads=2, image_size=16, classes=3))
    image = torch.randn(1, 3, 16, 16)
    assert not torch.allclose(model(image.flip(3)), model(image), atol=1e-3)


@QUICK
@given(models(), st.data())
def test_kept_patches_give_exactly_those_tokens(model, data):
    image, prefix = image_for(model), model.config.prefix.count
    patches = model.config.shape.patches
    size = data.draw(st.integers(1, patches))
    rows = [data.draw(st.permutations(range(patches)))[:size] for _ in range(2)]
    keep = torch.tensor(rows)
    z, kept = model.tokens(image), model.tokens(image, keep)
    assert kept.shape[1] == prefix + size
    for row in range(2):
        torch.testing.assert_close(kept[row, prefix:], z[row, prefix:][keep[row]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept[row, :prefix], z[row, :prefix], rtol=1e-4, atol=1e-5)


@QUICK
@given(models(), st.data())
def test_kept_patches_keep_their_positions_in_every_layer(model, data):
    grid, prefix = model.config.shape.grid, model.config.prefix.count
    patches = grid[0] * grid[1]
    rows = [data.draw(st.permutations(range(patches)))[: max(1, patches // 2)] for _ in range(2)]
    keep = torch.tensor(rows)
    for whole, kept in zip(
        model.position.layer_positions(grid, None), model.position.layer_positions(grid, keep), strict=True
    ):
        for row in range(2):
            at = torch.cat((torch.arange(prefix), keep[row] + prefix))
            if whole.embedding is not None:
                torch.testing.assert_close(kept.embedding[row], whole.embedding[0, at])
            if whole.bias is not None:
                torch.testing.assert_close(kept.bias[row], whole.bias[0][:, at][:, :, at])
            if whole.rotation is not None:
                torch.testing.assert_close(kept.rotation[0][row], whole.rotation[0][0][:, at])
                torch.testing.assert_close(kept.rotation[1][row], whole.rotation[1][0][:, at])


@QUICK
@given(models(), st.randoms())
def test_the_order_of_kept_patches_does_not_matter(model, random):
    """Positions stay with their patches, whether added, biases or rotations."""
    image, prefix, grid = image_for(model), model.config.prefix.count, model.config.shape.grid
    order = list(range(grid[0] * grid[1]))
    random.shuffle(order)
    keep = torch.tensor([order, order])
    mixed = model.encode(model.tokens(image, keep), grid, keep)
    straight = model.encode(model.tokens(image), grid)
    torch.testing.assert_close(mixed[:, prefix:], straight[:, prefix:][:, order], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(mixed[:, :prefix], straight[:, :prefix], rtol=1e-3, atol=1e-4)


@QUICK
@given(models(), st.integers(1, 6), st.integers(1, 6))
def test_any_other_grid_is_supported(model, h, w):
    patch = model.embed.stride
    output = model(torch.randn(1, model.config.channels, h * patch, w * patch))
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("patch", [1, 4, 7])
def test_patch_projection_is_a_strided_convolution(patch):
    model = shaken(vitrail.build(patch=patch, width=16, depth=1, heads=2, image_size=28, channels=2))
    weight = model.embed.projection.weight.view(16, 2, patch, patch)
    image = torch.randn(3, 2, 28, 28)
    convolution = torch.nn.functional.conv2d(image, weight, model.embed.projection.bias, stride=patch)
    torch.testing.assert_close(model.embed(image), convolution.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_mlp_is_two_pointwise_convolutions():
    mlp = shaken(vitrail.build(patch=4, width=16, depth=1, heads=2, image_size=28)).blocks[0].mlp
    x = torch.randn(3, 49, 16)
    grid = x.transpose(1, 2).unflatten(2, (7, 7))
    conv = torch.nn.functional.conv2d
    hidden = torch.nn.functional.gelu(conv(grid, mlp.fc1.weight[..., None, None], mlp.fc1.bias))
    output = conv(hidden, mlp.fc2.weight[..., None, None], mlp.fc2.bias)
    torch.testing.assert_close(mlp(x), output.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_adapted_models_with_fixed_positions_run_move_and_are_copied():
    """Fixed positions keep a buffer that is not stored, which an adapted model needs on the device of its weights."""
    model = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=3, image_size=8, position="sincos2d")
    for adapted in (model.replace_head(None), model.resize((16, 16)), model.adapt_channels(1)):
        height, width = adapted.config.image_size
        image = torch.zeros(1, adapted.config.channels, height, width)
        assert not any(buffer.is_meta for buffer in adapted.buffers())
        assert torch.equal(copy.deepcopy(adapted).to("cpu").eval()(image), adapted.eval()(image))

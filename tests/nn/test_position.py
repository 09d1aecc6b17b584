"""Positions: what each kind says, and how it is resampled."""

import math

import pytest
import torch

import vitrail
from tests.models.test_vit import shaken
from vitrail.analysis import record_attention
from vitrail.models.init import initialise
from vitrail.nn.position import (
    Learned1D,
    Learned2D,
    Relative,
    Relative1D,
    RelativeMLP,
    Rotary2D,
    SinCos2D,
    Sinusoid1D,
    rotate,
)
from vitrail.nn.resampling import Resampling, resample_table
from vitrail.nn.shape import EncoderShape

SHAPE = EncoderShape(width=8, depth=2, heads=2, grid=(3, 4), mlp=32, outputs=1)


def build_position(slot, shape=SHAPE):
    position = slot.build(shape)
    initialise(position, "vit")
    return shaken(position)


def test_resampling_to_the_same_grid_is_bit_exact():
    table = torch.randn(5, 3, 4)
    assert resample_table(table, (3, 4), Resampling()) is table
    position = build_position(Learned1D())
    assert torch.equal(position.stem_embedding((3, 4), None)[0], position.weight[0])


def test_resampling_leaves_the_prefix_unchanged():
    position = build_position(Learned1D())
    resized = position.stem_embedding((6, 8), None)[0]
    assert resized.shape == (1 + 48, 8)
    assert torch.equal(resized[0], position.weight[0, 0])
    with torch.no_grad():
        position.weight[0, 0] += 100  # the class token's position must not leak into the patches'
    assert torch.equal(position.stem_embedding((6, 8), None)[0, 1:], resized[1:])


def test_resampling_is_two_dimensional():
    position = build_position(Learned1D(), EncoderShape(8, 2, 2, (4, 4), 32, 1))
    with torch.no_grad():
        rows = torch.arange(4.0)[:, None].expand(4, 4).reshape(16, 1)
        position.weight[0, 1:] = rows  # the value is the row
    resized = position.stem_embedding((8, 6), None)[0, 1:].view(8, 6, 8)
    assert torch.allclose(resized, resized[:, :1], atol=1e-4)  # constant along a row
    assert (resized[1:, 0, 0] - resized[:-1, 0, 0] > 0).all()  # and growing downwards


def test_learned_2d_concatenates_row_and_column():
    position = build_position(Learned2D())
    table = position.stem_embedding((3, 4), None)[0, 1:].view(3, 4, 8)
    assert torch.equal(table[:, :, :4], table[:, :1, :4].expand(3, 4, 4))
    assert torch.equal(table[:, :, 4:], table[:1, :, 4:].expand(3, 4, 4))
    assert sum(p.numel() for p in position.parameters()) == 8 + 3 * 4 + 4 * 4


def test_sinusoid_is_the_2017_formula():
    table = Sinusoid1D().build(SHAPE).stem_embedding((3, 4), None)[0]
    for index in (0, 5, 12):
        for i in range(4):
            angle = index / 10_000 ** (2 * i / 8)
            assert table[index, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[index, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_sincos_of_a_cell_depends_only_on_its_row_and_column():
    table = SinCos2D().build(SHAPE).stem_embedding((3, 4), None)[0]
    assert table.shape == (13, 8)
    assert torch.equal(table[0], torch.zeros(8))  # the class token has no position
    grid = table[1:].view(3, 4, 8)
    assert grid[2, 3].tolist() == pytest.approx(
        [f(a) for v in (3, 2) for f in (math.sin, math.cos) for a in (v, v / 10_000)], abs=1e-5
    )


def test_relative_bias_depends_only_on_the_offset():
    position = build_position(Relative(), EncoderShape(8, 2, 2, (3, 4), 32, 0))
    first, second = (layer.bias[0] for layer in position.layer_positions((3, 4), None))
    assert first.shape == (2, 12, 12)
    assert not torch.equal(first, second)
    seen = {}
    for query in range(12):
        for key in range(12):
            offset = (query // 4 - key // 4, query % 4 - key % 4)
            value = first[0, query, key].item()
            assert seen.setdefault(offset, value) == value
    assert len(set(seen.values())) == 5 * 7


def test_relative_bias_has_separate_values_for_prefix_tokens():
    position = build_position(Relative(at="shared"), EncoderShape(8, 2, 2, (2, 2), 32, 2))
    bias = next(position.layer_positions((2, 2), None)).bias[0, 0]
    to_patch, to_prefix, among = position.prefix[0, 0].tolist()
    assert (bias[:2, :2] == among).all()
    assert (bias[:2, 2:] == to_patch).all()
    assert (bias[2:, :2] == to_prefix).all()


def test_computed_bias_is_that_of_the_offset_on_every_grid():
    position = build_position(RelativeMLP(hidden=5), EncoderShape(8, 2, 2, (3, 4), 32, 1))
    assert sum(parameter.numel() for parameter in position.parameters()) == 2 * (3 * 5 + 6 * 2)
    first, second = (layer.bias[0] for layer in position.layer_positions((3, 4), None))
    assert not torch.equal(first, second)
    assert first[:, 0].count_nonzero() == first[:, :, 0].count_nonzero() == 0  # of the class token
    larger = next(position.layer_positions((5, 7), None)).bias[0]
    torch.testing.assert_close(larger[:, 1 + 7 * 2 + 3, 1 + 7 * 1 + 5], first[:, 1 + 4 * 1 + 0, 1 + 4 * 0 + 2])
    mlp = position.mlps[0]
    expected = mlp(torch.tensor([math.log(2.0), -math.log(3.0)]))  # one row below, two columns to the left
    torch.testing.assert_close(first[:, 1 + 4 * 1 + 0, 1 + 4 * 0 + 2], expected)


def test_scaled_bias_is_that_of_the_share_of_the_grid():
    position = build_position(RelativeMLP("shared", scaled=True), EncoderShape(8, 2, 2, (3, 3), 32, 0))
    small = next(position.layer_positions((3, 3), None)).bias[0]
    large = next(position.layer_positions((5, 5), None)).bias[0]
    torch.testing.assert_close(small[:, 0, 8], large[:, 0, 24])  # between opposite corners
    assert (small > 0).all()
    assert (small < 16).all()
    assert position.mlps[0].fc2.bias is None


def test_relative_positions_with_a_learned_table_are_both_resampled():
    slot = Relative(absolute=Learned1D())
    position = build_position(slot, EncoderShape(8, 2, 2, (3, 4), 32, 1))
    torch.testing.assert_close(position.stem_embedding((3, 4), None), position.absolute.weight)
    resized = slot.resize_tensors(dict(position.state_dict()), position.shape, (5, 2))
    assert {name: tuple(tensor.shape) for name, tensor in resized.items()} == {
        "offsets": (2, 2, 9, 3),
        "prefix": (2, 2, 3),
        "absolute.weight": (1, 11, 8),
    }
    torch.testing.assert_close(position.stem_embedding((5, 2), None), resized["absolute.weight"])
    with pytest.raises(ValueError, match=r"Relative.absolute must be added at the stem, got at='every'"):
        Relative(absolute=Learned1D(at="every"))
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        RelativeMLP(hidden=0)


@pytest.mark.parametrize("kept", [None, [[5, 0, 7, 11], [3, 2, 1, 0]]])
def test_relative_1d_adds_the_product_of_query_and_offset(kept):
    """Appendix D.4: q_i · (k_j + r_{i-j}) / √d before the softmax, with patches in reading order."""
    shape = EncoderShape(8, 2, 2, (3, 4), 32, 1)
    position, keep = build_position(Relative1D(), shape), None if kept is None else torch.tensor(kept)
    patches = [range(12)] * 2 if kept is None else kept
    tokens = 1 + len(patches[0])
    q = torch.randn(2, 2, tokens, 4)
    layers = list(position.layer_positions((3, 4), keep))
    assert len(layers) == 2
    bias = layers[1].compute_bias(q).expand(2, -1, -1, -1)
    to_patch, to_prefix, among = position.prefix[1]
    for image in range(2):
        for i in range(tokens):
            for j in range(tokens):
                if i and j:
                    key = position.offsets[1, patches[image][i - 1] - patches[image][j - 1] + 11]
                else:
                    key = among if i == j == 0 else to_patch if i == 0 else to_prefix
                expected = q[image, :, i] @ key / 2  # √4
                torch.testing.assert_close(bias[image, :, i, j], expected, atol=1e-5, rtol=0)
    last = layers[1].compute_bias(q[:, :, :1], 1)  # the last layer computes the class token only
    torch.testing.assert_close(last.expand(2, -1, -1, -1), bias[:, :, :1], atol=1e-5, rtol=0)


def test_relative_1d_attention_is_the_softmax_of_the_sum():
    model = shaken(
        vitrail.build(patch=8, width=32, depth=1, heads=2, image_size=(16, 24), classes=3, position="relative1d")
    )
    images = torch.randn(2, 3, 16, 24)
    with torch.no_grad(), record_attention(model) as maps:
        z = model.tokens(images)
        block, layer = model.blocks[0], next(model.position.layer_positions((2, 3), None))
        found = block(z, layer)
        q, k, v = block.msa.split_heads(block.msa.qkv(block.norm1(z)))
        keys, index = layer.offsets
        attention = ((q @ k.mT + (q @ keys.T).gather(-1, index[:, None].expand(2, 2, 7, 7))) / 4).softmax(-1)
        z = z + block.msa.out((attention @ v).transpose(1, 2).flatten(2))
        expected = z + block.mlp(block.norm2(z))
    torch.testing.assert_close(maps[1][:2], attention, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_relative_1d_is_resampled_along_the_offset():
    position = build_position(Relative1D("shared"), EncoderShape(8, 2, 2, (4, 4), 32, 0))
    with torch.no_grad():
        position.offsets[0] = torch.linspace(-1, 1, 31)[:, None]  # the value is the offset as a share of the image
    table = position.table(0, (8, 4))
    assert table.shape == (63, 4)
    torch.testing.assert_close(table[:, 0], torch.linspace(-1, 1, 63), atol=0.03, rtol=0)  # the edges are flat
    resized = Relative1D("shared").resize_tensors(dict(position.state_dict()), position.shape, (8, 4))
    torch.testing.assert_close(resized["offsets"][0], table)


def test_rotary_products_depend_only_on_the_offset():
    shape = EncoderShape(16, 1, 2, (5, 5), 32, 0)
    rotation = next(Rotary2D().build(shape).layer_positions((5, 5), None)).rotation
    q, k = torch.randn(8), torch.randn(8)
    q_rotated, k_rotated = (rotate(x.expand(1, 1, 25, 8), rotation)[0, 0].view(5, 5, 8) for x in (q, k))
    for dy, dx in ((0, 0), (1, 0), (0, 2), (2, 1)):
        products = [float(q_rotated[y + dy, x + dx] @ k_rotated[y, x]) for y in range(5 - dy) for x in range(5 - dx)]
        assert products == pytest.approx([products[0]] * len(products), abs=1e-4)
    assert float(q_rotated[0, 0] @ k_rotated[0, 0]) != pytest.approx(float(q_rotated[1, 0] @ k_rotated[0, 0]), abs=1e-4)


def test_rotary_is_a_complex_rotation_of_adjacent_pairs():
    shape = EncoderShape(16, 1, 2, (3, 4), 32, 1)
    x = torch.randn(1, 2, 13, 8)
    rotated = rotate(x, next(Rotary2D().build(shape).layer_positions((3, 4), None)).rotation)
    frequency = 100.0 ** -(torch.arange(2) / 2)
    cells = torch.arange(12)
    angle = torch.cat(((cells % 4)[:, None] * frequency, (cells // 4)[:, None] * frequency), 1)  # columns, then rows
    expected = torch.view_as_real(
        torch.view_as_complex(x[:, :, 1:].unflatten(-1, (4, 2))) * torch.polar(torch.ones(12, 4), angle)
    )
    torch.testing.assert_close(rotated[:, :, 1:], expected.flatten(-2))
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])  # the class token is not rotated


@pytest.mark.parametrize(("at", "tables"), [("stem", 1), ("every", 2), ("shared", 1)])
def test_positions_are_added_in_their_scope(at, tables):
    position = build_position(Learned1D(at=at))
    assert position.weight.shape == (tables, 13, 8)
    assert (position.stem_embedding((3, 4), None) is None) == (at != "stem")
    added = [layer.embedding for layer in position.layer_positions((3, 4), None)]
    assert [row is not None for row in added] == [at != "stem"] * 2
    if at == "every":
        assert not torch.equal(added[0], added[1])


def test_every_layer_adds_its_own_table():
    slots = {"patch": 8, "width": 16, "depth": 2, "heads": 2, "image_size": 16, "classes": 3}
    model = shaken(vitrail.build(**slots, position="learned1d@every"))
    z = model.tokens(torch.randn(1, 3, 16, 16))
    expected = z
    for layer, block in enumerate(model.blocks):
        expected = block(expected + model.position.weight[layer])
    torch.testing.assert_close(model.encode(z), expected)


def test_tables_that_a_slot_cannot_resize_are_named():
    with pytest.raises(NotImplementedError, match="Rotary2D needs a resize_tensors for weight"):
        Rotary2D().resize_tensors({"weight": torch.ones(1)}, SHAPE, (2, 2))

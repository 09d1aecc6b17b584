"""Positions and filters: what a model has learnt, without a picture."""

import math

import numpy as np
import pytest
import torch

import vitrail
from tests.analysis.made import shaken
from vitrail.analysis import extract_filters, extract_positions
from vitrail.analysis.figures.terminal import render_model_view
from vitrail.models.hybrid import Hybrid
from vitrail.nn.position import rotate


@pytest.mark.parametrize(
    "kind", ["learned1d", "learned2d", "sincos2d", "sinusoid1d", "learned1d@shared", "learned2d@every"]
)
def test_added_positions_are_compared_by_their_cosine(kind):
    model = shaken(position=kind, registers=2)
    found = extract_positions(model)
    assert (found.kind, found.grid, found.bias, found.turn) == ("added", (4, 6), None, None)
    assert found.similarity is not None
    table = model.position.gather_rows(0, (4, 6), None)[0, 3:].detach().double().numpy()
    for a, b in ((0, 0), (5, 17), (23, 6)):
        cosine = table[a] @ table[b] / np.linalg.norm(table[a]) / np.linalg.norm(table[b])
        assert found.similarity.reshape(24, 24)[a, b] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize(("kind", "tables"), [("relative", 2), ("relative@shared", 1)])
def test_bias_is_by_offset_of_the_key_from_the_query(kind, tables):
    model = shaken(position=kind)
    found = extract_positions(model)
    assert found.kind == "bias"
    assert found.bias is not None
    assert found.bias.shape == (tables, 2, 7, 11)
    place = list(model.position.layer_positions((4, 6), None))[-1]
    assert place.bias is not None
    query, key = 1 * 6 + 4, 3 * 6 + 1  # two rows below, three columns to the left
    expected = place.bias[0, :, 1 + query, 1 + key].detach()
    np.testing.assert_allclose(found.bias[-1, :, 3 + 2, 5 - 3], expected)
    assert extract_positions(model, (8, 3)).bias.shape == (tables, 2, 15, 5)


@pytest.mark.parametrize("position", ["rotary2d", "rotary-dinov3"])
def test_turn_is_the_mean_cosine_by_offset(position):
    model = shaken(position=position, registers=1)
    found = extract_positions(model)
    assert found.kind == "rotary"
    assert found.turn is not None
    assert found.turn.shape == (7, 11)
    turn = next(iter(model.position.layer_positions((4, 6), None))).rotation
    assert turn is not None
    d = turn[0].shape[-1]
    ones = torch.ones(1, 1, turn[0].shape[2], d) / math.sqrt(d)
    product = (rotate(ones, turn) @ rotate(ones, turn).transpose(-2, -1))[0, 0]
    for (row, column), (below, right) in (((0, 0), (0, 0)), ((1, 4), (2, -3)), ((3, 5), (-3, -5)), ((2, 0), (-1, 5))):
        query, key = 2 + row * 6 + column, 2 + (row + below) * 6 + column + right
        assert found.turn[3 + below, 5 + right] == pytest.approx(float(product[query, key]), abs=1e-5)


def test_no_positions():
    assert extract_positions(shaken("position none")).kind == "none"


def test_a_computed_bias_is_drawn_as_a_table_is():
    model = shaken(position="relative-mlp")
    found = extract_positions(model)
    assert found.bias.shape == (2, 2, 7, 11)
    bias = list(model.position.layer_positions((4, 6), None))[1].bias.detach()
    query, key = 1 * 6 + 4, 3 * 6 + 1  # two rows below, three columns to the left
    np.testing.assert_allclose(found.bias[1, :, 3 + 2, 5 - 3], bias[0, :, 1 + query, 1 + key], rtol=1e-6)


def test_a_bias_that_depends_on_the_image_has_no_map():
    found = extract_positions(shaken("position relative1d"))
    assert (found.kind, found.bias) == ("query", None)
    assert "product with the query" in render_model_view(found, 80, "none")[0]


def hybrid(channels: int = 3):
    settings = {
        "patch": 16,
        "width": 32,
        "depth": 1,
        "heads": 2,
        "image_size": (64, 96),
        "classes": 5,
        "channels": channels,
    }
    return vitrail.build(embed=Hybrid((1, 1, 1)), **settings)


def test_a_hybrid_has_positions_and_the_filters_of_its_first_convolution():
    model = hybrid()
    assert extract_positions(model).grid == (4, 6)
    found = extract_filters(model)
    assert found.source == "first convolution"
    assert found.tiles.shape == (28, 7, 7, 3)


def test_filters_find_the_directions_that_the_weights_lie_in():
    model = shaken(channels=4)
    weight = model.embed.projection.weight
    wave, spot = torch.zeros(4, 8, 8), torch.zeros(4, 8, 8)
    wave[0] = torch.arange(8).mul(math.pi / 4).cos()
    spot[2, 3, 5] = 1.0
    with torch.no_grad():
        weight.copy_(torch.randn(32, 1) * 9 * wave.flatten() / wave.norm() + torch.randn(32, 1) * spot.flatten() + 5)
    found = extract_filters(model, 2)
    assert found.source == "patch projection"
    assert found.explained[0] > 0.9
    assert found.explained.sum() == pytest.approx(1)
    np.testing.assert_allclose(np.abs(found.tiles).max((1, 2, 3)), 1)
    first, second = found.tiles
    together = (first * wave.permute(1, 2, 0).numpy()).sum() / np.linalg.norm(first) / float(wave.norm())
    assert abs(together) > 0.99
    assert np.unravel_index(np.abs(second).argmax(), second.shape) == (3, 5, 2)


@pytest.mark.parametrize(
    ("settings", "shape"), [({"channels": 1}, (28, 8, 8, 1)), ({"embed": "conv-stem"}, (7, 3, 3, 3))]
)
def test_grey_pictures_and_stems_with_few_filters(settings, shape):
    found = extract_filters(shaken(**settings))
    assert found.tiles.shape == shape
    assert found.explained.shape == shape[:1]
    assert (np.diff(found.explained) <= 1e-6).all()


def test_no_components_is_a_mistake():
    with pytest.raises(ValueError, match="must be >= 1"):
        extract_filters(shaken(), 0)

"""Rollout, relevance, distance, entropy, similarity of heads, attention between patches: against values by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.made import materialised, pictures, shaken, uniform
from vitrail.analysis import heads, measure_distances, trace_image
from vitrail.analysis.heads import CellAttention, HeadSimilarity, MeanDistance, MeanEntropy, Rollout, coarsen_grid

CPU = torch.device("cpu")


def in_parts(watcher, attention: Tensor, parts: int = 1):
    """Shows a watcher the rows in so many parts."""
    step = math.ceil(attention.shape[1] / parts)
    for start in range(0, attention.shape[1], step):
        watcher.update(slice(start, start + step), attention[:, start : start + step])
    return watcher


# --- by hand ---


@pytest.mark.parametrize("parts", [1, 3])
def test_rollout_of_two_layers_worked_out_by_hand(parts):
    first = torch.tensor([[[1, 0, 0], [0, 0, 1], [0, 1, 0]], [[0, 1, 0], [0, 1, 0], [1, 0, 0]]]).float()
    last = torch.tensor([[[0, 0, 1], [0, 1, 0], [0, 0, 1]], [[0, 0.5, 0.5], [0, 1, 0], [1, 0, 0]]]).float()
    # mean of heads, half with the identity; row 0 of the last layer: [1/2, 1/8, 3/8]
    # the first layer: rows [3/4, 1/4, 0], [0, 3/4, 1/4], [1/4, 1/4, 1/2]
    # together: [1/2·3/4 + 3/8·1/4, 1/2·1/4 + 1/8·3/4 + 3/8·1/4, 1/8·1/4 + 3/8·1/2]
    rollout = Rollout(torch.tensor([1.0, 0, 0]))
    for attention in (last, first):
        in_parts(rollout, attention, parts)
        rollout.next_layer()
    torch.testing.assert_close(rollout.row, torch.tensor([15 / 32, 10 / 32, 7 / 32]))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_distance_worked_out_by_hand(parts):
    """A class token and 2×2 patches of 8 pixels: one head looks across, one at itself, one at the class token and sideways."""
    attention = torch.zeros(3, 5, 5)
    attention[:, 0, 0] = 1
    for query, (itself, beside, across) in enumerate([(1, 2, 4), (2, 1, 3), (3, 4, 2), (4, 3, 1)], start=1):
        attention[0, query, across] = 1
        attention[1, query, itself] = 1
        attention[2, query, 0] = 0.75
        attention[2, query, beside] = 0.25
    found = in_parts(MeanDistance(3, (2, 2), 8, 1, CPU), attention, parts).compute()
    torch.testing.assert_close(found, torch.tensor([8 * math.sqrt(2), 0, 8]))


@pytest.mark.parametrize("parts", [1, 3])
def test_entropy_and_similarity_of_heads_by_hand(parts):
    attention = (
        torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1], [0.5, 0, 0, 0.5], [0.25] * 4]).float()[:, None].expand(4, 4, 4)
    )
    entropy = in_parts(MeanEntropy(4, CPU), attention, parts).compute()
    torch.testing.assert_close(entropy, torch.tensor([0, 0, math.log(2), math.log(4)]))
    alike = in_parts(HeadSimilarity(4, 4, CPU), attention, parts).compute()
    assert torch.equal(alike, alike.T)
    torch.testing.assert_close(alike.diagonal(), torch.ones(4))
    # two points: 1 bit apart. A point and two: the mean is (3/4, 1/4), H = 0.8113 bits, less half of 1 bit
    mixed = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)) - 0.5
    torch.testing.assert_close(alike[0, 1:3], torch.tensor([0, 1 - mixed]))


def test_similarity_of_many_queries_uses_evenly_spaced_ones():
    attention = torch.rand(3, 1200, 5).softmax(-1)
    some = in_parts(HeadSimilarity(3, 400, CPU), attention[:, ::3]).compute()
    torch.testing.assert_close(in_parts(HeadSimilarity(3, 1200, CPU), attention, parts=7).compute(), some)


@pytest.mark.parametrize("parts", [1, 4])
def test_patches_to_patches_by_hand_and_rows_keep_their_sums(parts):
    attention = torch.rand(2, 9, 9).softmax(-1)
    fine = in_parts(CellAttention(2, (2, 4), 1, 256, CPU), attention, parts)
    assert fine.cells == (2, 4)
    torch.testing.assert_close(fine.compute(), attention[:, 1:, 1:])
    cells = in_parts(CellAttention(2, (2, 4), 1, 2, CPU), attention, parts)
    assert cells.cells == (1, 2)
    left, right = [1, 2, 5, 6], [3, 4, 7, 8]
    expected = [[attention[:, a][:, :, b].sum(2).mean(1) for b in (left, right)] for a in (left, right)]
    expected = torch.stack([torch.stack(row, -1) for row in expected], 1)
    torch.testing.assert_close(cells.compute(), expected)
    torch.testing.assert_close(expected.sum(2)[:, 0], attention[:, left, 1:].sum(2).mean(1))


@pytest.mark.parametrize(
    ("grid", "cells", "expected"),
    [
        ((14, 14), 256, (14, 14)),
        ((64, 64), 256, (16, 16)),
        ((5, 7), 12, (3, 4)),
        ((3, 9), 1, (1, 1)),
        ((1, 300), 256, (1, 150)),
    ],
)
def test_coarse_grids(grid, cells, expected):
    assert coarsen_grid(grid, cells)[0] == expected


def test_cells_at_an_edge_may_be_smaller():
    attention = torch.rand(1, 35, 35).softmax(-1)
    found = in_parts(CellAttention(1, (5, 7), 0, 12, CPU), attention).compute()
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 12))
    corner = attention[0, 34]  # the last cell is one patch
    torch.testing.assert_close(found[0, 11, 11], corner[34])


# --- uniform attention ---


def test_a_model_that_looks_everywhere_alike():
    model = uniform(depth=3)
    x = pictures(model)
    seen = trace_image(model, x)
    tokens, layers = 25, 3
    np.testing.assert_allclose(seen.attention, 1 / tokens, rtol=1e-5)
    np.testing.assert_allclose(seen.entropy, math.log(tokens), rtol=1e-5)
    np.testing.assert_allclose(seen.alike, 1, atol=1e-5)
    np.testing.assert_allclose(seen.rollout, (1 - 0.5**layers) / tokens, rtol=1e-5)
    places = [(8 * row, 8 * column) for row in range(4) for column in range(6)]
    mean = sum(math.dist(a, b) for a in places for b in places) / len(places) ** 2
    np.testing.assert_allclose(seen.distance, mean, rtol=1e-5)
    found = measure_distances(model, [x, torch.cat((x, x))])
    np.testing.assert_allclose(found.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(found.spread, 0, atol=1e-3)
    assert (found.pictures, found.size) == (3, (32, 48))


# --- against the textbook ---

SLOTS = [
    "paper",
    "distillation",
    "registers relative",
    "registers relative1d",
    "registers rotary",
    "no prefix",
    "pool mean-norm",
    "pool class+mean",
]
SLOTS += ["pool map", "block post", "block parallel", "layer scale", "qk norm", "swiglu", "wide heads", "pre-logits"]
SLOTS += ["position learned1d@every", "conv stem"]


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("target", [None, 3])
def test_relevance_and_rollout_equal_the_naive_ones_with_materialised_attention(slot, target):
    model = shaken(slot, depth=3)
    x = pictures(model)
    with materialised() as stored:
        logits = model.head(model.pool(model.encode(model.tokens(x), model.embed.grid(x))))
        explained = int(logits.argmax()) if target is None else target
        logits[0, explained].backward()
    tokens = stored[0].shape[-1]
    relevance, rollout = torch.eye(tokens), torch.eye(tokens)
    for matrix in stored[:3]:  # a pooling that attends comes after them
        assert matrix.grad is not None
        relevance = relevance + (matrix.grad * matrix)[0].clamp_min(0).mean(0) @ relevance
        rollout = (0.5 * matrix[0].detach().mean(0) + 0.5 * torch.eye(tokens)) @ rollout
    model.zero_grad()
    seen = trace_image(model, x, target=target)
    prefix = model.config.prefix.count
    reader = slice(0, 1) if seen.reader == "class token" else slice(prefix, None)
    assert seen.target == explained
    for found, expected in ((seen.relevance, relevance), (seen.rollout, rollout)):
        expected = expected[reader, prefix:].mean(0).detach().unflatten(0, (4, 6))
        assert expected.std() > 0
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert seen.logits is not None
    np.testing.assert_allclose(seen.logits, logits[0].detach(), rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("slot", ["paper", "registers relative", "registers relative1d", "no prefix"])
def test_a_few_rows_at_a_time_give_what_all_at_once_give(slot, monkeypatch):
    model = shaken(slot)
    x = pictures(model)
    whole, far = trace_image(model, x, at=(1, 2), max_cells=6), measure_distances(model, [x])
    monkeypatch.setattr(heads, "CHUNK", 7 * 2 * 28)
    parts, near = trace_image(model, x, at=(1, 2), max_cells=6), measure_distances(model, [x])
    for name in ("attention", "attention_at", "between", "distance", "entropy", "alike", "rollout", "relevance"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(near.mean, far.mean, rtol=1e-5)
    np.testing.assert_allclose(near.mean, whole.distance, rtol=1e-5)


def test_distances_spread_over_pictures_and_refuse_several_sizes():
    model = shaken()
    one, two = pictures(model), pictures(model)
    each = [measure_distances(model, [x]) for x in (one, two)]
    both = measure_distances(model, [torch.cat((one, two))])
    np.testing.assert_allclose(both.mean, (each[0].mean + each[1].mean) / 2, rtol=1e-5)
    np.testing.assert_allclose(both.spread, np.abs(each[0].mean - each[1].mean) / math.sqrt(2), rtol=1e-2, atol=1e-4)
    with pytest.raises(ValueError, match="must have one size"):
        measure_distances(model, [one, torch.randn(1, 3, 32, 32)])
    with pytest.raises(ValueError, match="no images"):
        measure_distances(model, [])
    with pytest.raises(ValueError, match="no images"):
        measure_distances(model, [one[:0]])
    assert measure_distances(model, [one[:0], one]).pictures == len(one)

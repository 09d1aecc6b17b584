"""The measures that two models are compared by, on attention and tokens whose numbers are known."""

import math
import weakref

import numpy as np
import pytest
import torch

from tests.analysis.made import materialised, pictures, resnet, shaken, uniform
from vitrail.analysis import measure_distances, pool_tokens, profile_model, to_arrays
from vitrail.analysis.heads import HeadDiversity, LayerHeads, MutualInformation
from vitrail.analysis.profile import mean_and_std, measure_heads, uniform_distance
from vitrail.analysis.tokens import grid_frequencies, token_spectrum

HERE = torch.device("cpu")


def seen_by(watcher, attention: torch.Tensor, step: int = 3) -> np.ndarray:
    """What a watcher makes of attention [H, T, T] that comes a few rows at a time."""
    for start in range(0, attention.shape[1], step):
        rows = slice(start, min(start + step, attention.shape[1]))
        watcher.update(rows, attention[:, rows])
    return watcher.compute().numpy()


def softmaxed(heads: int, tokens: int) -> torch.Tensor:
    return (2 * torch.randn(heads, tokens, tokens)).softmax(-1)


def test_heads_that_are_copies_have_no_diversity_and_heads_that_share_no_patch_have_all_of_it():
    copies = softmaxed(1, 9).expand(4, 9, 9)
    np.testing.assert_allclose(seen_by(HeadDiversity(4, 1, HERE), copies), 0, atol=1e-6)
    apart = torch.zeros(2, 8, 8)
    apart[0, :, :4], apart[1, :, 4:] = 0.25, 0.25
    np.testing.assert_allclose(seen_by(HeadDiversity(2, 0, HERE), apart), 1)


def test_one_head_differs_from_two_that_are_alike():
    attention = torch.zeros(3, 4, 4)
    attention[:2, :, 0], attention[2, :, 1] = 1, 1
    np.testing.assert_allclose(seen_by(HeadDiversity(3, 0, HERE), attention), [0.5, 0.5, 1])


def test_a_single_head_has_no_diversity_to_tell_of():
    assert np.isnan(seen_by(HeadDiversity(1, 0, HERE), softmaxed(1, 5))).all()


def test_diversity_and_mutual_information_are_what_their_definitions_say():
    heads, prefix, patches = 3, 2, 12
    attention = softmaxed(heads, prefix + patches)
    plain = attention[:, prefix:, prefix:].double()
    among = (plain / plain.sum(-1, keepdim=True)).numpy()
    cosine = np.zeros((heads, heads))
    for a in range(heads):
        for b in range(heads):
            for query in range(patches):
                one, other = among[a, query], among[b, query]
                cosine[a, b] += one @ other / np.linalg.norm(one) / np.linalg.norm(other) / patches
    wanted = [1 - np.delete(cosine[a], a).mean() for a in range(heads)]
    np.testing.assert_allclose(seen_by(HeadDiversity(heads, prefix, HERE), attention, 5), wanted, atol=1e-5)
    for a in range(heads):
        joint = among[a] / patches  # p(q, k) = p(k | q) / N
        key = joint.sum(0)
        shared = (joint * np.log(joint / (joint.sum(1, keepdims=True) * key))).sum()
        wanted = shared / math.sqrt(math.log(patches) * -(key * np.log(key)).sum())
        assert seen_by(MutualInformation(heads, patches, prefix, HERE), attention, 5)[a] == pytest.approx(
            wanted, abs=1e-5
        )


def test_mutual_information_is_0_where_all_look_at_the_same_and_1_where_each_looks_at_its_own():
    tokens, patches = 10, 9
    same = torch.rand(1, 1, tokens).softmax(-1).expand(1, tokens, tokens)
    assert seen_by(MutualInformation(1, patches, 1, HERE), same)[0] == pytest.approx(0, abs=1e-5)
    one = torch.zeros(1, tokens, tokens)
    one[..., 4] = 1  # not even the keys have any entropy
    assert seen_by(MutualInformation(1, patches, 1, HERE), one)[0] == 0
    own = torch.eye(tokens)[None]
    assert seen_by(MutualInformation(1, patches, 1, HERE), own)[0] == pytest.approx(1, abs=1e-5)
    assert seen_by(MutualInformation(1, 1, 0, HERE), torch.ones(1, 1, 1))[0] == 0  # one patch has nobody to differ from


def test_attention_that_is_uniform_reaches_as_far_as_patches_lie_apart_on_average():
    model = uniform()
    found = profile_model(model, [pictures(model, 3)])
    h, w = found.grid
    place = [(y, x) for y in range(h) for x in range(w)]
    apart = np.mean([math.dist(a, b) for a in place for b in place]) * 8
    assert uniform_distance(found.grid, 8) == pytest.approx(apart, rel=1e-5)
    assert found.everywhere == pytest.approx(apart, rel=1e-5)
    np.testing.assert_allclose(found.distance, apart, rtol=1e-5)
    np.testing.assert_allclose(found.diversity, 0, atol=1e-6)
    np.testing.assert_allclose(found.mutual, 0, atol=1e-4)


def test_white_noise_has_a_flat_spectrum_and_what_is_smooth_a_falling_one():
    grid, width = (16, 16), 4096
    noise = torch.randn(256, width)
    assert (
        token_spectrum(noise, grid)[1:-1].abs().max() < 0.4
    )  # at 0 and pi amplitudes are real numbers, in between complex
    assert abs(token_spectrum(noise, grid)[-1]) < 0.1
    down = torch.arange(16).minimum(16 - torch.arange(16))
    fading = torch.exp(-0.5 * (down[:, None] + down[None]).float())
    soft = torch.fft.ifft2(torch.fft.fft2(noise.T.unflatten(1, grid)) * fading).real
    assert (token_spectrum(soft.flatten(1).T, grid).diff() < 0).all()
    assert grid_frequencies(grid)[-1] == 1


@pytest.mark.parametrize("slot", ["paper", "position relative", "registers"])
def test_a_profile_is_what_whole_maps_and_all_tokens_give(slot):
    model = shaken(slot, heads=4)
    images = pictures(model, 3)
    found = profile_model(model, [images[:2], images[2:]])
    far = measure_distances(model, [images])
    np.testing.assert_allclose(found.distance, far.mean, rtol=1e-5)
    np.testing.assert_allclose(found.distance_spread, far.spread, rtol=1e-4, atol=1e-5)
    prefix = model.config.prefix.count
    with materialised() as stored, torch.no_grad():
        states = model.hidden_states(images, range(3))
    for layer, matrix in enumerate(stored):
        assert matrix.shape[-2] == matrix.shape[-1]
        for which, name in ((HeadDiversity, "diversity"), (MutualInformation, "mutual")):
            given = (4, prefix, HERE) if which is HeadDiversity else (4, 24, prefix, HERE)
            wanted = np.mean([seen_by(which(*given), each) for each in matrix], 0)
            np.testing.assert_allclose(getattr(found, name)[layer], wanted, atol=2e-5)
    for layer, z in enumerate(states):
        wanted = torch.stack([token_spectrum(each[prefix:], found.grid) for each in z]).mean(0)
        np.testing.assert_allclose(found.spectrum[layer], wanted, atol=1e-4)
        np.testing.assert_allclose(pool_tokens(model, [images])[:, layer], z[:, prefix:].mean(1), atol=1e-5)
    assert (found.pictures, found.size, found.grid) == (3, (32, 48), (4, 6))
    assert set(to_arrays(found)) >= {"distance", "diversity", "mutual", "spectrum", "frequencies"}


def test_the_same_model_has_the_same_profile_and_is_left_as_it_was():
    model = shaken(dropout=0.3).train()
    images = pictures(model, 2)
    first, second = profile_model(model, [images]), profile_model(model, [images])
    assert all(np.array_equal(value, to_arrays(second)[name]) for name, value in to_arrays(first).items())
    assert all(module.training for module in model.modules())


def test_a_model_whose_heads_are_copies_has_diversity_0_in_every_layer_that_is_copied():
    model = shaken(width=32, heads=2)
    with torch.no_grad():
        weight, bias = model.blocks[1].msa.qkv.weight, model.blocks[1].msa.qkv.bias
        for part in (0, 32):  # queries, keys: the first head's take the place of the second's
            weight[part + 16 : part + 32] = weight[part : part + 16]
            bias[part + 16 : part + 32] = bias[part : part + 16]
    found = profile_model(model, [pictures(model, 2)])
    assert (found.diversity[0] > 1e-3).all()
    np.testing.assert_allclose(found.diversity[1], 0, atol=1e-6)
    np.testing.assert_allclose(found.mutual[1, 0], found.mutual[1, 1], atol=1e-6)


def test_what_cannot_be_measured_is_refused_in_words():
    model = shaken()
    with pytest.raises(ValueError, match="does not support BiT ResNets"):
        profile_model(resnet(), [])
    for ask in (profile_model, pool_tokens):
        with pytest.raises(ValueError, match="at least 1"):
            ask(model, [])
        with pytest.raises(ValueError, match="one size, got 32×32 after 32×48"):
            ask(model, [pictures(model), torch.randn(1, 3, 32, 32)])
        with pytest.raises(ValueError, match="not finite before the first layer"):
            ask(model, [torch.full((1, 3, 32, 48), math.inf)])


def test_means_and_deviations_are_over_pictures():
    mean, spread = mean_and_std([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])])
    np.testing.assert_allclose(mean, [2, 2])
    np.testing.assert_allclose(spread, [math.sqrt(2), 0])
    np.testing.assert_allclose(mean_and_std([torch.tensor([5.0])])[1], 0)


def test_rows_come_a_few_at_a_time_so_that_no_map_is_whole(monkeypatch):
    tokens, heads = 401, 2
    asked = []
    whole = LayerHeads.attention

    def attention(self, queries=slice(None)):
        asked.append(whole(self, queries))
        return asked[-1]

    monkeypatch.setattr(LayerHeads, "attention", attention)
    monkeypatch.setattr("vitrail.analysis.heads.CHUNK", 20_000)
    measure_heads(LayerHeads(torch.randn(heads, tokens, 8), torch.randn(heads, tokens, 8), None), (20, 20), 16, 1)
    assert max(each.numel() for each in asked) <= 20_000
    assert sum(each.shape[1] for each in asked) == tokens


def test_one_piece_of_attention_is_alive_at_a_time_however_many_layers_and_pictures_there_are(monkeypatch):
    model = shaken(depth=4)
    alive: list[weakref.ref] = []
    most = 0
    whole = LayerHeads.attention

    def attention(self, queries=slice(None)):
        nonlocal most
        made = whole(self, queries)
        alive.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in alive))
        return made

    monkeypatch.setattr(LayerHeads, "attention", attention)
    monkeypatch.setattr("vitrail.analysis.heads.CHUNK", 200)
    profile_model(model, [pictures(model, 3), pictures(model, 2)])
    assert len(alive) > 4 * 5 * 3
    assert most <= 2  # that which is made, and that which it takes the place of

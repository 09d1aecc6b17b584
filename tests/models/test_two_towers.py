"""Two towers as a model: what texts see, what counts as which layer, and sizes that do not fit."""

from dataclasses import replace

import pytest
import torch

import vitrail
from vitrail.models.registry import build_from, configure_two_towers
from vitrail.models.sizes import Size
from vitrail.models.text import EndOfText, LastToken, TextConfig
from vitrail.nn.head import Projection

TEXT = TextConfig(Size(2, 32, 64, 4), 24, vocabulary=50, context=8)
IMAGE = {"patch": 16, "width": 32, "depth": 2, "heads": 4, "image_size": 32, "head": Projection(24)}


def build(**text):
    return build_from(configure_two_towers(text=replace(TEXT, **text), **IMAGE)).eval()


def test_causal_tower_ignores_what_follows_the_end() -> None:
    model, tokens = build(), torch.tensor([[1, 5, 49, 0, 0, 0, 0, 0]])
    other = tokens.clone()
    other[0, 3:] = torch.tensor([7, 8, 9, 10, 11])
    torch.testing.assert_close(model.encode_texts(other), model.encode_texts(tokens))
    torch.testing.assert_close(model.encode_texts(tokens[:, :3]), model.encode_texts(tokens))
    open_model = build(causal=False)
    assert not torch.allclose(open_model.encode_texts(other), open_model.encode_texts(tokens), atol=1e-4)


def test_pooled_token_is_the_end_or_the_last() -> None:
    tokens = torch.tensor([[3, 9, 4, 4], [4, 9, 9, 0]])
    assert EndOfText().find(tokens).tolist() == [1, 1]
    assert EndOfText(4).find(tokens).tolist() == [2, 0]
    assert LastToken().find(tokens).tolist() == [3, 3]


def test_features_are_unit_vectors_and_logits_their_scaled_products() -> None:
    model, images, tokens = build(), torch.randn(3, 3, 32, 32), torch.randint(0, 50, (5, 8))
    y, t = model.encode_images(images), model.encode_texts(tokens)
    torch.testing.assert_close(y.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(model(images, tokens), y @ t.T / 0.07)
    assert model(images).shape == (3, 24)


def test_lower_precision_gives_nearly_the_same() -> None:
    model, images, tokens = build(), torch.randn(2, 3, 32, 32), torch.randint(0, 50, (3, 8))
    expected = model(images, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert float((model(images, tokens) - expected).detach().abs().max()) < 1.0  # of a scale of 14
    assert model.bfloat16()(images.bfloat16(), tokens).dtype == torch.bfloat16


def test_layers_are_those_of_the_image_tower() -> None:
    model = build()
    assert [name for name, _ in model.layers()] == ["image.blocks.0", "image.blocks.1"]
    assert model.layer_index("image.embed.projection.weight") == 0
    assert model.layer_index("image.blocks.1.norm1.weight") == 2
    assert model.layer_index("text.blocks.0.norm1.weight") == model.layer_index("logits.scale") == 3
    parameters = dict(model.named_parameters())
    assert model.decays("text.blocks.0.mlp.fc1.weight", parameters["text.blocks.0.mlp.fc1.weight"])
    assert not any(model.decays(name, parameters[name]) for name in ("text.position", "image.position.weight"))


def test_recomputed_activations_give_the_same_gradients() -> None:
    model, images, tokens = build().train(), torch.randn(2, 3, 32, 32), torch.randint(0, 50, (2, 8))
    model(images, tokens).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing = True
    model(images, tokens).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ValueError, match="images have 24 features, texts 20: give both towers a projection of one width"
    ):
        build(features=20)
    with pytest.raises(ValueError, match="vocabulary of a text tower must be at least 1, got 0"):
        build(vocabulary=0)
    with pytest.raises(ValueError, match="an image tower returns features: use a configuration with classes=None"):
        replace(configure_two_towers(text=TEXT, **IMAGE), image=vitrail.configure("Ti/16"))
    with pytest.raises(ValueError, match=r"T at most 8, got \[1, 9\]: cut them"):
        build().encode_texts(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="token ids must be 0 to 49, got 3 to 50: use the tokeniser of this model"):
        build().encode_texts(torch.tensor([[3, 50]]))
    config = configure_two_towers(text=TEXT, **IMAGE)
    with pytest.raises(ValueError, match="has no text tower of its own"):
        replace(config, image=config)

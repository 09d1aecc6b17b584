"""Masked autoencoders: what is seen, what is asked. The same loss and gradients as a peer's are in tests/parity."""

import numpy as np
import pytest
import torch

from tests.objectives.made import draw, encoder, pictures
from vitrail.models.hybrid import Hybrid
from vitrail.models.mae_decoder import Decoder, reconstruct_patches
from vitrail.models.registry import configure
from vitrail.nn.embed import patchify
from vitrail.objectives.mae import MAE, MaskedAutoencoder
from vitrail.objectives.masking import unpatchify
from vitrail.training.optim import parameter_rules
from vitrail.utils.json import dataclass_from_json, to_json

SMALL = Decoder(2, 16, 2)


def task(spec: MAE = MAE(decoder=SMALL), **slots: object) -> MaskedAutoencoder:  # noqa: B008
    return spec.build(encoder(**slots), 10)


def test_only_the_visible_quarter_goes_through_the_encoder() -> None:
    made, shapes = task(), []
    made.model.blocks[0].register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    made(pictures(), None, draw())
    assert shapes == [(4, 1 + 4, 32)]


def test_hidden_pixels_reach_neither_encoder_nor_decoder() -> None:
    made, images = task().eval(), pictures()
    visible, hidden = made.split_patches(images, draw())
    flags = torch.zeros(4, 16, dtype=torch.bool).scatter(1, hidden, True)
    noise = unpatchify(flags.unsqueeze(-1).expand(-1, -1, 3 * 64).float(), (4, 4), 3) * torch.randn_like(images)
    before = reconstruct_patches(made.model, made.decoder, images, visible, hidden)
    torch.testing.assert_close(reconstruct_patches(made.model, made.decoder, images + noise, visible, hidden), before)
    assert not torch.allclose(reconstruct_patches(made.model, made.decoder, images.flip(3), visible, hidden), before)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_loss_is_the_squared_error_of_hidden_patches(norm_pix) -> None:
    made, images = task(MAE(norm_pix=norm_pix, decoder=SMALL)).eval(), pictures()
    visible, hidden = made.split_patches(images, draw())
    told = reconstruct_patches(made.model, made.decoder, images, visible, hidden).detach().numpy()
    patches = images.numpy().reshape(4, 3, 4, 8, 4, 8).transpose(0, 2, 4, 1, 3, 5).reshape(4, 16, -1)
    wanted = np.take_along_axis(patches, hidden.numpy()[..., None], 1)
    if norm_pix:
        wanted = (wanted - wanted.mean(-1, keepdims=True)) / np.sqrt(wanted.var(-1, ddof=1, keepdims=True) + 1e-6)
    assert made(images, None, draw())["loss"].item() == pytest.approx(float(((told - wanted) ** 2).mean()), rel=1e-5)


def test_the_order_of_tokens_does_not_matter() -> None:
    """What is wanted goes first, and the last layer computes nothing else: the same as every token in its place."""
    made, images = task().eval(), pictures()
    visible, hidden = made.split_patches(images, draw())
    decoder = made.decoder
    z = made.model.encode(made.model.tokens(images, visible), keep=visible)
    known = decoder.embed(made.model.pool.norm(z))
    tokens = decoder.mask_token.expand(4, 16, -1).scatter(1, visible.unsqueeze(-1).expand(-1, -1, 16), known[:, 1:])
    y = torch.cat((known[:, :1], tokens), 1) + decoder.position
    for block in decoder.blocks:
        y = block(y)
    expected = decoder.pred(decoder.norm(y))[:, 1:]
    found = reconstruct_patches(made.model, decoder, images, visible, hidden)
    torch.testing.assert_close(found, expected.gather(1, hidden.unsqueeze(-1).expand_as(found)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "position",
    [
        "learned1d",
        "learned2d@every",
        "sincos2d",
        "relative",
        "relative1d",
        "relative-mlp",
        "rotary2d",
        "rotary-dinov3",
        "rotary-eva02",
        "none",
    ],
)
@pytest.mark.parametrize("slots", [{}, {"pool": "mean", "prefix": "none"}, {"registers": 2}, {"block": "post"}])
def test_every_parameter_learns_but_the_decoders_positions(position, slots) -> None:
    made = task(position=position, **slots)
    places = made.decoder.position.clone()
    made(pictures(), None, draw())["loss"].backward()
    without = [name for name, parameter in made.named_parameters() if parameter.grad is None]
    assert without == ["decoder.position"]
    assert not made.decoder.position.requires_grad
    assert torch.equal(made.decoder.position, places)
    assert float(made.decoder.mask_token.grad.abs().max()) > 0


def test_grey_and_oblong_images_are_reconstructed() -> None:
    made = task(channels=1, image_size=(16, 32))
    images = pictures(4, 1)[:, :, :16]
    shown = made.eval().reconstruct(images, draw(), (0.5,), (0.5,))
    assert shown.reconstructed.shape == (4, 1, 16, 32)


def test_parts_of_a_batch_have_the_loss_of_the_whole() -> None:
    made, images = task(), pictures()
    whole = made(images, None, draw())["loss"]
    parts = [made(images[a : a + 2], None, draw(2, a, 4))["loss"] for a in (0, 2)]
    torch.testing.assert_close((parts[0] + parts[1]) / 2, whole)
    assert not torch.equal(made(images, None, draw(step=1))["loss"], whole), "every step hides others"


def test_signals_are_the_loss_without_a_gradient() -> None:
    made = task().eval()
    found = made.signals(pictures(), draw())
    torch.testing.assert_close(found["loss"], made(pictures(), None, draw())["loss"].detach())
    assert not found["loss"].requires_grad


def test_loss_falls_in_a_few_steps() -> None:
    made = task(MAE(norm_pix=False, decoder=SMALL))
    images = pictures(8).mean((2, 3), keepdim=True).expand(-1, -1, 32, 32) * 20  # each of one colour
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(30):
        loss = made(images, None, draw(8, step=step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]  # 0.20 where measured; without training it stays near 1


def test_mask_token_is_not_decayed_and_decoder_matrices_are() -> None:
    found = parameter_rules(task(), 0.5)
    assert not found["decoder.mask_token"].decay
    assert found["decoder.pred.weight"].decay
    assert found["decoder.pred.weight"].scale == 1.0, "the decoder is trained at the full rate"


def test_reconstruction_shows_hidden_patches_grey() -> None:
    made, images = task().eval(), pictures()
    torch.nn.init.zeros_(made.decoder.pred.weight)
    torch.nn.init.zeros_(made.decoder.pred.bias)
    shown = made.reconstruct(images, draw(), (0.5,) * 3, (0.5,) * 3)
    _, hidden = made.split_patches(images, draw())
    flags = torch.zeros(4, 16, dtype=torch.bool).scatter(1, hidden, True)
    where = unpatchify(flags.unsqueeze(-1).expand(-1, -1, 3 * 64), (4, 4), 3)
    assert (shown.masked[where] == 128).all()
    assert torch.equal(shown.masked[~where], shown.original[~where])
    assert torch.equal(shown.reconstructed[~where], shown.original[~where])
    # Told to be 0, a normalised patch is its own mean.
    means = patchify(images, 8).mean(2) * 0.5 + 0.5
    found = patchify(shown.reconstructed.float(), 8) / 255
    torch.testing.assert_close(found[flags], means[flags].unsqueeze(-1).expand(-1, 192), rtol=0, atol=0.51 / 255)


def test_unpatchify_is_the_inverse_of_patchify() -> None:
    images = pictures(2, 3, 32)[:, :, :16]
    assert torch.equal(unpatchify(patchify(images, 8), (2, 4), 3), images)


def test_decoder_is_half_as_wide_as_its_encoder_by_default() -> None:
    assert Decoder().fill_sizes(configure("S/16")) == Decoder(4, 192, 6, 768)
    assert Decoder().fill_sizes(configure("B/16")) == Decoder(4, 384, 12, 1536)
    assert Decoder(8, 512, 16).fill_sizes(configure("L/16")) == Decoder(8, 512, 16, 2048)
    assert Decoder().fill_sizes(encoder().config) == Decoder(4, 16, 1, 64)


def test_decoder_positions_are_fixed_sines_and_cosines() -> None:
    table = task().decoder.position[0]  # [1+16, 16]
    assert not table[0].any(), "the class token has no position"
    y, x = divmod(6, 4)
    omega = 10_000.0 ** -(np.arange(4) / 4)
    expected = np.concatenate((np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)))
    np.testing.assert_allclose(table[1 + 6].numpy(), expected, atol=1e-6)


def test_settings_round_trip_through_json() -> None:
    spec = MAE(0.6, False, Decoder(8, 512, 16))
    assert dataclass_from_json(to_json(spec), MAE, "objective") == spec


@pytest.mark.parametrize(
    ("spec", "slots", "complaint"),
    [
        ({}, {"patch": 32}, "needs several patches"),
        ({}, {"embed": "conv-stem"}, "set model.embed=Patches"),
        ({}, {"embed": Hybrid((1,), 1)}, "set model.embed=Patches"),
        ({"mask": 0.95}, {}, "mask 0.95 leaves 0 of 16 patches"),
        ({}, {"patch": 1, "channels": 1, "image_size": 4}, "no standard deviation"),
        ({}, {"classes": 3}, "model.classes=none"),
        ({}, {"pool": "map"}, "model.pool=Mean"),
        ({"decoder": Decoder(2, 18)}, {}, "divisible by 4"),
        ({"decoder": Decoder(2, 16, 3)}, {}, "3 decoder heads do not divide"),
    ],
)
def test_invalid_models_are_refused_in_one_line(spec, slots, complaint) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        MAE(**spec).check(encoder(**slots).config, 8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mask", [0.0, 1.0, -0.5, float("nan")])
def test_masks_of_0_or_1_are_refused(mask) -> None:
    with pytest.raises(ValueError, match="mask, the fraction of hidden patches"):
        MAE(mask=mask)

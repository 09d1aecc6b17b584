"""VideoMAE: what is hidden, what is asked, and the same loss, gradients and files as transformers' VideoMAEForPreTraining."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import vitrail
from tests.objectives.made import draw
from vitrail.checkpoints.formats import videomae
from vitrail.checkpoints.keys import import_state
from vitrail.checkpoints.mae import Autoencoder, map_autoencoder, read_mae, write_mae
from vitrail.models.base import Unsupported
from vitrail.models.mae_decoder import Decoder, reconstruct_patches
from vitrail.models.registry import build_from, configure
from vitrail.nn.block import PreNorm
from vitrail.objectives.mae import MAE
from vitrail.objectives.videomae import TubeAutoencoder, VideoMAE, untubeletify
from vitrail.utils.json import dataclass_from_json, to_json

SMALL = Decoder(2, 24, 2)
ENCODER = {"patch": 8, "width": 48, "depth": 2, "heads": 3, "image_size": (32, 40), "classes": None, "frames": 4}
ENCODER |= {"position": "sinusoid1d", "pool": "mean", "block": PreNorm(key_bias=False)}


def loss_of(spec: VideoMAE = VideoMAE(decoder=SMALL), **slots: object) -> TubeAutoencoder:  # noqa: B008
    torch.manual_seed(0)
    return spec.build(build_from(configure(**{**ENCODER, **slots})).require_tokens("a test", clips=True), 10)


def clips(channels: int = 3) -> Tensor:
    return torch.randn(4, channels, 4, 32, 40, generator=torch.Generator().manual_seed(1))


def test_the_same_places_are_hidden_in_every_frame() -> None:
    visible, hidden = loss_of().split_patches(clips(), draw())
    assert visible.shape == (4, 2 * 2)  # of 20 places 18 are hidden, in both steps of two frames
    assert hidden.shape == (4, 2 * 18)
    for tokens in (visible, hidden):
        first, second = tokens.unflatten(1, (2, -1)).unbind(1)
        assert torch.equal(first + 20, second)
    everything = torch.cat((visible, hidden), 1).sort(1).values
    assert torch.equal(everything, torch.arange(40).expand(4, -1))


def test_only_visible_tubes_go_through_the_encoder_and_hidden_pixels_reach_nothing() -> None:
    made, images, shapes = loss_of().eval(), clips(), []
    made.model.blocks[0].register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    made(images, None, draw())
    assert shapes == [(4, 4, 48)]
    visible, hidden = made.split_patches(images, draw())
    flags = torch.zeros(4, 40, dtype=torch.bool).scatter(1, hidden, True)
    noise = untubeletify(flags.unsqueeze(-1).expand(-1, -1, 3 * 2 * 64).float(), (2, 4, 5), 3, 2) * torch.randn_like(
        images
    )
    before = reconstruct_patches(made.model, made.decoder, images, visible, hidden)
    torch.testing.assert_close(reconstruct_patches(made.model, made.decoder, images + noise, visible, hidden), before)
    assert not torch.allclose(reconstruct_patches(made.model, made.decoder, images.flip(2), visible, hidden), before)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_loss_is_the_squared_error_of_hidden_tubelets(norm_pix) -> None:
    made, images = loss_of(VideoMAE(norm_pix=norm_pix, decoder=SMALL)).eval(), clips()
    visible, hidden = made.split_patches(images, draw())
    told = reconstruct_patches(made.model, made.decoder, images, visible, hidden).detach().numpy()
    tubelets = images.numpy().reshape(4, 3, 2, 2, 4, 8, 5, 8).transpose(0, 2, 4, 6, 1, 3, 5, 7).reshape(4, 40, 3, -1)
    wanted = np.take_along_axis(tubelets, hidden.numpy()[..., None, None], 1)
    if norm_pix:  # each channel by itself
        wanted = (wanted - wanted.mean(-1, keepdims=True)) / (wanted.std(-1, ddof=1, keepdims=True) + 1e-6)
    difference = told - wanted.reshape(told.shape)
    assert made(images, None, draw())["loss"].item() == pytest.approx(float((difference**2).mean()), rel=1e-5)


@pytest.mark.parametrize(
    "slots", [{}, {"position": "learned1d"}, {"position": "factorised", "prefix": "class"}, {"position": "rotary3d"}]
)
def test_every_parameter_learns_but_the_decoders_positions(slots) -> None:
    made = loss_of(**slots)
    made(clips(), None, draw())["loss"].backward()
    assert [name for name, p in made.named_parameters() if p.grad is None] == ["decoder.position"]


def test_parts_of_a_batch_have_the_loss_of_the_whole_and_loss_falls() -> None:
    made, images = loss_of(), clips()
    whole = made(images, None, draw())["loss"]
    parts = [made(images[a : a + 2], None, draw(2, a, 4))["loss"] for a in (0, 2)]
    torch.testing.assert_close((parts[0] + parts[1]) / 2, whole)
    made = loss_of(VideoMAE(norm_pix=False, decoder=SMALL))
    flat = clips().mean((2, 3, 4), keepdim=True).expand(-1, -1, 4, 32, 40) * 40
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(25):
        loss = made(flat, None, draw(step=step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_reconstruction_shows_the_middle_frame_with_hidden_places_grey() -> None:
    made, images = loss_of().eval(), clips()
    torch.nn.init.zeros_(made.decoder.pred.weight)
    torch.nn.init.zeros_(made.decoder.pred.bias)
    shown = made.reconstruct(images, draw(), (0.5,) * 3, (0.5,) * 3)
    assert shown.original.shape == shown.reconstructed.shape == (4, 3, 32, 40)
    _, hidden = made.split_patches(images, draw())
    flags = torch.zeros(4, 40, dtype=torch.bool).scatter(1, hidden, True)
    where = untubeletify(flags.unsqueeze(-1).expand(-1, -1, 3 * 2 * 64), (2, 4, 5), 3, 2)[:, :, 2]
    assert (shown.masked[where] == 128).all()
    assert torch.equal(shown.reconstructed[~where], shown.original[~where])


def test_unusable_settings_and_encoders_are_refused() -> None:
    def refused(words: str, spec: MAE = VideoMAE(decoder=SMALL), error: type = ValueError, **slots: object) -> None:  # noqa: B008
        with pytest.raises(error, match=words):
            spec.check(configure(**{**ENCODER, **slots}), 4)

    refused("method='mae' for images", frames=None)
    refused("divided attention needs every patch", block="divided", position="factorised", error=Unsupported)
    refused("0.99 leaves 1 of 20|mask", VideoMAE(mask=0.01, decoder=SMALL))
    refused("ends in features", classes=5)
    refused("MAE does not support models of clips", MAE(decoder=SMALL), error=Unsupported)
    spec = VideoMAE(0.8, False, Decoder(1))
    assert dataclass_from_json(to_json(spec), VideoMAE, "objective") == spec


def test_own_file_holds_encoder_and_decoder(tmp_path) -> None:
    made = loss_of()
    write_mae(Autoencoder(made.model, made.decoder, 0.9, True), tmp_path / "pretraining.safetensors", "vitrail")
    back = read_mae(tmp_path / "pretraining.safetensors")
    assert (back.mask_ratio, back.norm_pix, back.decoder.spec) == (0.9, True, made.decoder.spec)
    again = VideoMAE(back.mask_ratio, back.norm_pix, back.decoder.spec).build(back.model, 1, decoder=back.decoder)
    torch.testing.assert_close(again(clips(), None, draw())["loss"], made(clips(), None, draw())["loss"])
    assert vitrail.load(tmp_path / "pretraining.safetensors").config == made.model.config
    parts, note = VideoMAE(decoder=SMALL).read_parts(str(tmp_path / "pretraining.safetensors"), made.model.config)
    assert set(parts) == {"decoder"}
    assert "continues" in note
    other = replace(made.model.config, frames=8)
    assert (
        "another image size" in VideoMAE(decoder=SMALL).read_parts(str(tmp_path / "pretraining.safetensors"), other)[1]
    )


# --- against transformers ---

SETTINGS = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
SETTINGS |= {"patch_size": 8, "decoder_hidden_size": 24, "decoder_num_hidden_layers": 2}
SETTINGS |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 48, "layer_norm_eps": 1e-6}


def make_peer(**settings: object):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.parity.peers import spread

    torch.manual_seed(0)
    config = transformers.VideoMAEConfig(**{**SETTINGS, "num_frames": 4, "image_size": [32, 40], **settings})
    return spread(transformers.VideoMAEForPreTraining(config), 0.1)


@pytest.mark.parametrize("mean", [True, False], ids=["no norm", "norm"])
@pytest.mark.parametrize("shape", [(4, 2, 32, 40), (6, 3, 16, 48)], ids=str)
def test_loss_and_gradients_are_transformers(shape, mean, tmp_path) -> None:
    from tests.parity.peers import TOLERANCE, saved_state

    frames, tubelet, height, width = shape
    size = {"num_frames": frames, "tubelet_size": tubelet, "image_size": [height, width]}
    theirs = make_peer(use_mean_pooling=mean, **size)
    theirs.save_pretrained(tmp_path / "theirs")
    found = read_mae(tmp_path / "theirs")
    ours = VideoMAE(found.mask_ratio, found.norm_pix, found.decoder.spec).build(found.model, 1, decoder=found.decoder)
    images = torch.rand(2, 3, frames, height, width)  # as normalised frames
    _, hidden = ours.split_patches(images, draw(2))
    masked = torch.zeros(2, found.model.config.shape.patches, dtype=torch.bool).scatter(1, hidden, True)
    expected, actual = theirs(images.transpose(1, 2), masked).loss, ours(images, None, draw(2))["loss"]
    assert actual.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    expected.backward()
    actual.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():  # their gradients under their names, through the same table
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    table = map_autoencoder(ours.model.config, ours.decoder.spec, videomae.TRANSFORMERS)
    gradients = import_state(table, saved_state(theirs))
    largest = max(float(gradient.abs().max()) for name, gradient in gradients.items() if name != "decoder.position")
    for name, parameter in ours.named_parameters():
        wanted = gradients[name.removeprefix("model.")]
        if name == "decoder.position":
            continue
        difference = float((parameter.grad - wanted).abs().max())
        assert difference <= TOLERANCE * max(float(wanted.abs().max()), 1e-3 * largest), name


def test_checkpoints_round_trip_through_transformers_and_the_release(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = make_peer(use_mean_pooling=False)
    theirs.save_pretrained(tmp_path / "theirs")
    found = read_mae(tmp_path / "theirs")
    state = found.state_dict()
    write_mae(found, tmp_path / "again", "hf")
    again, info = transformers.VideoMAEForPreTraining.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert {name: list(found) for name, found in info.items() if found} == {}
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in again.state_dict().items())
    write_mae(found, tmp_path / "release.pth", "videomae")
    names = set(torch.load(tmp_path / "release.pth", weights_only=True))
    assert {"encoder.patch_embed.proj.weight", "encoder.norm.weight", "encoder_to_decoder.weight", "mask_token"} < names
    assert {"decoder.blocks.0.attn.q_bias", "decoder.norm.weight", "decoder.head.weight"} < names
    assume = {"heads": 3, "frames": 4, "size": "32x40"}
    back = read_mae(tmp_path / "release.pth", assume=assume, decoder_heads=2)
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items())
    with pytest.raises(ValueError, match="heads of its decoder of width 24 are not recorded"):
        read_mae(tmp_path / "release.pth", assume=assume)
    with pytest.raises(ValueError, match="does not support models of clips"):
        write_mae(found, tmp_path / "out.pth", "timm")
    assert not (tmp_path / "out.pth").exists()

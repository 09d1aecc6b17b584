"""Masked autoencoders with the same weights and the same noise: the same loss and gradients as their published code."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.objectives.made import draw, pictures
from tests.parity.peers import TOLERANCE, saved_state, spread
from vitrail.checkpoints.keys import export_state, import_state
from vitrail.checkpoints.mae import (
    FACEBOOK,
    HUGGING_FACE,
    HUGGING_FACE_V5,
    Autoencoder,
    map_autoencoder,
    read_mae,
    write_mae,
)
from vitrail.objectives.mae import MAE, MASK_STREAM, MaskedAutoencoder

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
timm_layers = pytest.importorskip("timm.models.vision_transformer", reason="timm is not installed")

SETTINGS = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "decoder_hidden_size": 32,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 64,
}


def hugging(**settings):
    return spread(transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**SETTINGS, **settings)), 0.1).train()


def as_task(found: Autoencoder) -> MaskedAutoencoder:
    return (
        MAE(found.mask_ratio, found.norm_pix, found.decoder.spec).build(found.model, 1, decoder=found.decoder).train()
    )


def assert_same_gradients(ours: MaskedAutoencoder, expected: dict[str, Tensor]) -> None:
    """Compare every gradient except those of the fixed positions."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in ours.named_parameters():
        name = name.removeprefix("model.")
        if name in ("position.weight", "decoder.position"):
            continue
        assert parameter.grad is not None, name
        difference = float((parameter.grad - expected[name]).abs().max())
        assert difference <= TOLERANCE * max(float(expected[name].abs().max()), 1e-3 * largest), name


@pytest.mark.parametrize("norm_pix", [True, False])
def test_mae_gives_transformers_loss_and_gradients(norm_pix, tmp_path):
    theirs = hugging(norm_pix_loss=norm_pix)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = as_task(read_mae(tmp_path / "theirs"))
    assert ours.spec == MAE(0.75, norm_pix, ours.decoder.spec)
    images = pictures()
    expected = theirs(images, noise=draw().uniform(16, MASK_STREAM)).loss
    found = ours(images, None, draw())["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    found.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():  # their gradients under their names, through the same table
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    assert_same_gradients(
        ours, import_state(map_autoencoder(ours.model.config, ours.decoder.spec, HUGGING_FACE_V5), saved_state(theirs))
    )


def test_transformers_loads_our_directory_strictly_with_the_same_loss(tmp_path):
    theirs = hugging(norm_pix_loss=True, mask_ratio=0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    write_mae(read_mae(tmp_path / "theirs"), tmp_path / "again", "hf")
    again, info = transformers.ViTMAEForPreTraining.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert {name: list(found) for name, found in info.items() if found} == {}
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    noise = torch.rand(4, 16)
    assert torch.equal(again(pictures(), noise=noise).loss, theirs.eval()(pictures(), noise=noise).loss)
    assert again.config.norm_pix_loss
    assert again.config.mask_ratio == 0.5


def test_names_of_published_files_are_read(tmp_path):
    """Published files have decoder_layers; transformers 5 writes another name and reads both."""
    theirs = hugging()
    theirs.save_pretrained(tmp_path / "theirs")
    found = read_mae(tmp_path / "theirs")
    tables = [
        map_autoencoder(found.model.config, found.decoder.spec, spelling)
        for spelling in (HUGGING_FACE, HUGGING_FACE_V5)
    ]
    assert sum("decoder.decoder_layers." in name for name in export_state(tables[0], found.state_dict())) == 32
    write_mae(found, tmp_path / "hub", "hf")
    state = read_mae(tmp_path / "hub").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())


class Published(nn.Module):
    """He et al.'s autoencoder from their paper, with the names of their release, on timm's layers."""

    def __init__(self) -> None:
        super().__init__()
        block = timm_layers.Block
        self.patch_embed = timm_layers.PatchEmbed(32, 8, 3, 48)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, 48), requires_grad=False)
        norm = {"qkv_bias": True, "norm_layer": partial(nn.LayerNorm, eps=1e-6)}
        self.blocks = nn.ModuleList(block(48, 3, **norm) for _ in range(2))
        self.norm = nn.LayerNorm(48, eps=1e-6)
        self.decoder_embed = nn.Linear(48, 64)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 64))
        self.decoder_pos_embed = nn.Parameter(torch.zeros(1, 17, 64), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(block(64, 2, **norm) for _ in range(2))
        self.decoder_norm = nn.LayerNorm(64, eps=1e-6)
        self.decoder_pred = nn.Linear(64, 8 * 8 * 3)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        rank = noise.argsort(1).argsort(1)  # a patch is seen if its noise is among the four lowest
        z = self.patch_embed(images) + self.pos_embed[:, 1:]
        seen = torch.stack([one[place < 4] for one, place in zip(z, rank, strict=True)])
        z = torch.cat(((self.cls_token + self.pos_embed[:, :1]).expand(len(z), -1, -1), seen), 1)
        for block in self.blocks:
            z = block(z)
        z = self.decoder_embed(self.norm(z))
        whole = self.mask_token.expand(len(z), 16, -1).clone()
        for picture, place in enumerate(rank):
            whole[picture, place < 4] = z[picture, 1:]
        y = torch.cat((z[:, :1], whole), 1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            y = block(y)
        predicted = self.decoder_pred(self.decoder_norm(y))[:, 1:]
        wanted = (
            images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).reshape(len(z), 16, -1)
        )  # pixel by pixel
        wanted = (wanted - wanted.mean(-1, keepdim=True)) / (wanted.var(-1, keepdim=True) + 1e-6).sqrt()
        return (predicted - wanted).square().mean(-1)[rank >= 4].mean()


def test_facebook_checkpoint_gives_its_loss_and_gradients_and_round_trips(tmp_path):
    theirs = spread(Published(), 0.1).train()
    before = copy.deepcopy(theirs.state_dict())
    torch.save({"model": before, "epoch": 3}, tmp_path / "mae_pretrain_full.pth")
    found = read_mae(tmp_path / "mae_pretrain_full.pth", assume={"heads": 3})  # 32 values a head in the decoder
    assert found.decoder.spec.heads == 2
    ours, images = as_task(found), pictures()
    expected = theirs(images, draw().uniform(16, MASK_STREAM))
    loss = ours(images, None, draw())["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    assert_same_gradients(
        ours, import_state(map_autoencoder(found.model.config, found.decoder.spec, FACEBOOK), gradients)
    )

    for name in ("again.safetensors", "again.pth"):
        write_mae(found, tmp_path / name, "timm")
        assume = {"heads": 3, "size": 32}
        again = read_mae(tmp_path / name, assume=assume)
        back = export_state(map_autoencoder(again.model.config, again.decoder.spec, FACEBOOK), again.state_dict())
        assert set(back) == set(before)
        assert all(torch.equal(tensor, before[name]) for name, tensor in back.items())

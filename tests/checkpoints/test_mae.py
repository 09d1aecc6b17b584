"""Masked autoencoders in files: our own with the decoder beside the model, and what others can hold."""

import json

import pytest
import torch

import vitrail
from tests.objectives.made import draw, encoder, pictures
from vitrail.checkpoints.artifact import CheckpointContract, save_artifact
from vitrail.checkpoints.load import inspect_checkpoint, save
from vitrail.checkpoints.mae import Autoencoder, convert_with_decoder, read_mae, write_mae
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.mae_decoder import Decoder, build_decoder
from vitrail.nn.position import SinCos2D
from vitrail.objectives.mae import MAE, MASK_STREAM, MaskedAutoencoder

DECODER = Decoder(2, 16, 2, 24)


def made(**slots) -> Autoencoder:
    """Every tensor shaken, so that each matters."""
    model = encoder(**slots)
    model.preprocessing = Preprocessing((32, 32), (32, 32))
    decoder = build_decoder(model.config, DECODER)
    with torch.no_grad():
        for parameter in (*model.parameters(), *decoder.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Autoencoder(model.eval(), decoder.eval(), 0.75, True)


def as_task(found: Autoencoder) -> MaskedAutoencoder:
    return MAE(found.mask_ratio, found.norm_pix, found.decoder.spec).build(found.model, 1, decoder=found.decoder).eval()


def assert_same(one: Autoencoder, other: Autoencoder) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_our_own_file_brings_back_encoder_and_decoder_bit_for_bit(tmp_path):
    auto, path = made(pool="mean", position="sincos2d"), tmp_path / "pretraining.safetensors"
    proof = write_mae(auto, path, "vitrail")
    assert proof.largest_difference == 0
    found = read_mae(path)
    assert_same(auto, found)
    assert (found.model.config, found.decoder.spec) == (auto.model.config, auto.decoder.spec)
    assert found.model.preprocessing == auto.model.preprocessing
    assert not found.decoder.position.requires_grad
    expected = as_task(auto)(pictures(), None, draw())["loss"]
    assert torch.equal(as_task(found)(pictures(), None, draw())["loss"], expected)


def test_our_own_file_loads_as_the_encoder(tmp_path):
    auto, path = made(), tmp_path / "pretraining.safetensors"
    write_mae(auto, path, "vitrail")
    model = vitrail.load(path)
    assert torch.equal(model(pictures()), auto.model(pictures()))
    with inspect_checkpoint(path) as checkpoint:
        assert checkpoint.detection.is_complete
        assert set(checkpoint.detection.ignored.values()) == {"MAE decoder"}
    ours = vitrail.load(path, classes=5)
    assert ours(pictures()).shape == (4, 5)


def test_mask_and_normalisation_come_back(tmp_path):
    auto, path = made(), tmp_path / "pretraining.safetensors"
    auto.mask_ratio, auto.norm_pix = 0.6, False
    write_mae(auto, path, "vitrail")
    found = read_mae(path)
    assert (found.mask_ratio, found.norm_pix) == (0.6, False)


def test_changed_byte_of_the_decoder_is_detected(tmp_path):
    path = tmp_path / "pretraining.safetensors"
    write_mae(made(), path, "vitrail")
    data = bytearray(path.read_bytes())
    at = data.index(b'"decoder.position"')
    start = json.loads(bytes(data[8 : 8 + int.from_bytes(data[:8], "little")]))["decoder.position"]["data_offsets"][0]
    data[8 + int.from_bytes(data[:8], "little") + start] ^= 1
    assert at > 0
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged: the checksum of decoder\.position"):
        read_mae(path)


def test_a_file_without_decoder_or_without_word_of_it_is_refused_in_a_line(tmp_path):
    auto, path = made(), tmp_path / "model.safetensors"
    save(auto.model, path)
    with pytest.raises(ValueError, match="it has no MAE decoder"):
        read_mae(path)
    for card, complaint in (
        ({}, "has no description of the decoder"),
        ({"pretraining": {"method": "mae"}}, "decoder is None"),
        (
            {"pretraining": {"method": "mae", "decoder": {"type": "Decoder", "depth": 10**12}}},
            "must be at most",
        ),
    ):
        save_artifact(path, auto.state_dict(), CheckpointContract(auto.model.config, card=card))
        with pytest.raises(ValueError, match=complaint) as error:
            read_mae(path)
        assert "\n" not in str(error.value)


def test_decoder_of_another_size_than_configured_is_refused(tmp_path):
    auto, path = made(), tmp_path / "pretraining.safetensors"
    auto.decoder.spec = Decoder(3, 16, 2, 24)
    with pytest.raises(ValueError, match="differ from the configuration"):
        write_mae(auto, path, "vitrail")
    assert not path.exists()


def test_values_that_are_not_finite_are_not_saved(tmp_path):
    auto = made()
    with torch.no_grad():
        auto.decoder.pred.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"not finite in decoder\.pred\.bias"):
        write_mae(auto, tmp_path / "pretraining.safetensors", "vitrail")


@pytest.mark.parametrize("slots", [{}, {"position": SinCos2D(end=False), "pool": "mean", "prefix": "class"}])
def test_transformers_loads_our_autoencoder_strictly_with_the_same_loss(slots, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    auto = made(**slots)
    write_mae(auto, tmp_path / "pretraining.safetensors", "vitrail")
    proof = convert_with_decoder(tmp_path / "pretraining.safetensors", tmp_path / "hf", "hf")
    assert proof.largest_difference < 1e-5
    theirs, info = transformers.ViTMAEForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert {name: list(found) for name, found in info.items() if found} == {}
    expected = theirs(pictures(), noise=draw().uniform(16, MASK_STREAM)).loss
    assert as_task(auto)(pictures(), None, draw())["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_command_line_converts_the_decoder(tmp_path, capsys):
    auto, path = made(), tmp_path / "pretraining.safetensors"
    write_mae(auto, path, "vitrail")
    assert main(["convert", str(path), str(tmp_path / "facebook.safetensors"), "--to", "timm", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compared"] == "hidden patches"
    assert "the decoder's 2" in report["notes"][-1]
    found = read_mae(tmp_path / "facebook.safetensors", assume={"heads": 2}, decoder_heads=2)
    assert_same(auto, found)
    assert main(["convert", str(path), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert "hidden patches on a photograph" in capsys.readouterr().out
    assert_same(auto, read_mae(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "vit_mae"


def test_command_line_refuses_changes_with_a_decoder_and_extracts_the_encoder(tmp_path, capsys):
    auto, path = made(), tmp_path / "pretraining.safetensors"
    write_mae(auto, path, "vitrail")
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "hf", "--classes", "3"]) == 2
    assert "leave out classes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(path), str(tmp_path / "m.safetensors"), "--to", "vitrail", "--classes", "3"]) == 0
    assert vitrail.load(tmp_path / "m.safetensors").config.classes == 3
    assert "the decoder is left out: it does not support other classes" in capsys.readouterr().out


def test_decoder_is_converted_or_reported_as_left_out(tmp_path, capsys):
    auto, path = made(), tmp_path / "pretraining.safetensors"
    write_mae(auto, path, "vitrail")
    assert main(["convert", str(path), str(tmp_path / "again.safetensors"), "--to", "vitrail"]) == 0
    assert set(read_mae(tmp_path / "again.safetensors").state_dict()) == set(auto.state_dict())
    assert "left out" not in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "theirs.npz"), "--to", "big_vision"]) == 0
    assert "the decoder is left out: big_vision does not store one" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["timm", "hf"])
def test_decoder_of_other_projects_is_converted_or_reported_as_left_out(form, tmp_path, capsys):
    """Facebook's file does not record the decoder's heads; transformers' directory does."""
    model = encoder(width=64, heads=1)  # 64 values a head and 32 in the decoder: what is taken for granted
    model.preprocessing = Preprocessing((32, 32), (32, 32))
    auto = Autoencoder(model.eval(), build_decoder(model.config, Decoder(2, 64, 2, 96)).eval())
    source = tmp_path / ("theirs.safetensors" if form == "timm" else "theirs")
    write_mae(auto, source, form)
    for to, out in (("vitrail", "ours.safetensors"), ("hf", "hub")):
        assert main(["convert", str(source), str(tmp_path / out), "--to", to, "--licence", "mit"]) == 0
        output = capsys.readouterr().out
        assert "left out" not in output
        assert ("assumed, because the file does not record them: 2 decoder heads" in output) == (form == "timm")
        assert_same(auto, read_mae(tmp_path / out))
    with inspect_checkpoint(tmp_path / "ours.safetensors") as checkpoint:
        assert checkpoint.contract.card["licence"] == "mit"
    for to, out in (("timm", "for_timm.safetensors"), ("big_vision", "theirs.npz")):
        assert main(["convert", str(source), str(tmp_path / out), "--to", to]) == 0
        assert "the decoder is left out: " in capsys.readouterr().out
        with inspect_checkpoint(tmp_path / out) as checkpoint:
            assert not [name for name in checkpoint.source.specs if "decoder" in name]
    assert main(["convert", str(source), str(tmp_path / "three"), "--to", "hf", "--classes", "3"]) == 0
    assert "the decoder is left out: it does not support other classes" in capsys.readouterr().out


def test_undetermined_decoder_is_left_out_with_the_reason(tmp_path, capsys):
    auto, path = made(), tmp_path / "theirs.safetensors"  # a width of 16, and nobody says how many heads
    write_mae(auto, path, "timm")
    assert (
        main(["convert", str(path), str(tmp_path / "ours.safetensors"), "--to", "vitrail", "--assume", "heads=2"]) == 0
    )
    assert "the decoder is left out: cannot read its decoder: the heads" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no MAE decoder"):
        read_mae(tmp_path / "ours.safetensors")


@pytest.mark.parametrize(
    ("slots", "complaint"),
    [
        ({"pool": "mean", "prefix": "none"}, "class token"),
        ({"registers": 2}, "a class token and no other"),
        ({"image_size": (16, 32)}, "square"),
        ({"position": "rotary2d"}, "positions"),
        ({"layer_scale": 0.1}, "layers are the paper's"),
        ({"mlp": "swiglu"}, "layers are the paper's"),
        ({"block": "parallel"}, "layers are the paper's"),
        ({"token_norm": True}, "no norm before the first layer"),
    ],
)
def test_unsupported_autoencoder_is_refused_in_one_line(slots, complaint, tmp_path):
    auto = made(**slots)
    auto.model.preprocessing = None
    for to, out in (("hf", tmp_path / "hf"), ("timm", tmp_path / "f.safetensors")):
        with pytest.raises(ValueError, match=complaint) as error:
            write_mae(auto, out, to)
        assert "\n" not in str(error.value)
        assert not out.exists()
    with pytest.raises(ValueError, match="does not store a decoder"):
        write_mae(auto, tmp_path / "c.safetensors", "clip")
